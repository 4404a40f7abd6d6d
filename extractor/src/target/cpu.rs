//! The device functions on the CPU, over the `kernels` crate, in f32. Knows nothing of ranks; it is
//! run inside the rank's own rayon pool and uses as many threads as it is told.

mod latent;

use std::ops::Range;

use kernels::attention::{self, AttentionShape, HeadShape};
use kernels::gemm::{GemmDims, matmul_nt};
use kernels::rope::{RopeAngles, RopeLayout, RopeTable};
use kernels::router::{Routing, route_top_k};
use kernels::{Threads, activation, norm};
use rayon::prelude::*;

use super::error::TargetError;
use super::experts::ExpertScratch;
use super::model::{Stage, StageClock, StageTimes};
use super::ops::{
    AttentionDims, Expert, ExpertShare, HeldExperts, LatentDims, Norm, Ops, Parts, Room, RouteRule,
    RouterChoice, Rows, Write,
};
use super::source::Source;
use super::spec::RopeSpec;
use super::weights::Slice;
use crate::capture::LayerRows;

/// Rows that one task of an element-wise function takes.
const ROWS_PER_TASK: usize = 16;

/// Device functions on the CPU.
#[derive(Debug)]
pub(super) struct CpuOps {
    threads: Threads,
    scratch: ExpertScratch,
    clock: StageClock,
}

/// A weight matrix in f32, row-major [out, in].
#[derive(Clone, Debug)]
pub(super) struct CpuLinear {
    pub(super) values: Vec<f32>,
    pub(super) out: usize,
    pub(super) input: usize,
}

/// Rotary angles, cut into the row blocks that tasks work on.
#[derive(Debug)]
pub(super) struct CpuRope {
    blocks: Vec<RopeAngles>,
    dim: usize,
    rows: usize,
    interleaved: bool,
}

/// Experts chosen for the rows of one forward.
#[derive(Debug)]
pub(super) struct CpuRouting {
    pub(super) top_k: usize,
    pub(super) choice: RouterChoice,
}

impl CpuOps {
    /// Functions that use `threads` threads of the current rayon pool.
    pub(super) fn new(threads: usize) -> Self {
        let (scratch, clock) = (ExpertScratch::default(), StageClock::start());
        Self { threads: Threads(threads.max(1)), scratch, clock }
    }

    /// Runs `task` on the row blocks of `out` with the number of the first row.
    fn for_rows(
        &self,
        out: &mut [f32],
        width: usize,
        task: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) {
        for_rows(self.threads, out, width, task);
    }
}

/// Runs `task` on blocks of rows of `out`, with the number of the first row of each.
pub(super) fn for_rows(
    threads: Threads,
    out: &mut [f32],
    width: usize,
    task: impl Fn(usize, &mut [f32]) + Sync + Send,
) {
    if out.is_empty() || width == 0 {
        return;
    }
    if threads.0 == 1 || out.len() <= ROWS_PER_TASK * width {
        return task(0, out);
    }
    let blocks = out.par_chunks_mut(ROWS_PER_TASK * width).enumerate();
    blocks.for_each(|(block, rows)| task(block * ROWS_PER_TASK, rows));
}

impl CpuLinear {
    /// `out = x weight^T` or `out +=`, over whole rows.
    pub(super) fn apply(&self, out: &mut [f32], x: &[f32], write: Write, threads: Threads) {
        let dims = GemmDims { m: x.len() / self.input, n: self.out, k: self.input };
        matmul_nt(out, x, &self.values, dims, write == Write::Add, threads);
    }
}

impl Ops for CpuOps {
    type Buffer = Vec<f32>;
    type Linear = CpuLinear;
    type Rope = CpuRope;
    type Routing = CpuRouting;
    type Experts = HeldExperts<CpuLinear>;
    type GateUp = [CpuLinear; 2];
    type Captured = LayerRows;

    fn buffer(&mut self, _room: Room) -> Result<Vec<f32>, TargetError> {
        Ok(Vec::new())
    }

    fn dtype(&self) -> &'static str {
        "f32"
    }

    fn len(&self, buffer: &Vec<f32>) -> usize {
        buffer.len()
    }

    fn download(
        &mut self,
        buffer: &Vec<f32>,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TargetError> {
        Ok(buffer[range].to_vec())
    }

    fn capture(
        &mut self,
        buffer: &Vec<f32>,
        rows: Range<usize>,
        width: usize,
    ) -> Result<LayerRows, TargetError> {
        Ok(LayerRows::F32(buffer[rows.start * width..rows.end * width].to_vec()))
    }

    fn collect(&mut self, captured: LayerRows) -> Result<LayerRows, TargetError> {
        Ok(captured)
    }

    fn start_clock(&mut self) -> Result<(), TargetError> {
        self.clock = StageClock::start();
        Ok(())
    }

    fn lap(&mut self, stage: Stage) -> Result<(), TargetError> {
        self.clock.lap(stage);
        Ok(())
    }

    fn times(&mut self) -> Result<StageTimes, TargetError> {
        Ok(self.clock.times)
    }

    fn load_linear(
        &mut self,
        source: &Source,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<CpuLinear, TargetError> {
        let values = source.linear(name, dims, slice)?;
        Ok(CpuLinear { values, out: slice.rows.len(), input: slice.cols.len() })
    }

    fn load_gate_up(
        &mut self,
        source: &Source,
        prefix: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<[CpuLinear; 2], TargetError> {
        let gate = self.load_linear(source, &format!("{prefix}.gate_proj"), dims, slice)?;
        let up = self.load_linear(source, &format!("{prefix}.up_proj"), dims, slice)?;
        Ok([gate, up])
    }

    fn load_vector(
        &mut self,
        source: &Source,
        name: &str,
        len: usize,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TargetError> {
        Ok(source.vector(name, len, range)?)
    }

    fn zero_vector(&mut self, len: usize) -> Result<Vec<f32>, TargetError> {
        Ok(vec![0.0; len])
    }

    fn load_experts(
        &mut self,
        source: &Source,
        prefix: &str,
        share: &ExpertShare,
    ) -> Result<HeldExperts<CpuLinear>, TargetError> {
        let ((dims, slice), (down_dims, down)) = (share.input(), share.output());
        let mut expert = |index: usize| {
            let name = |part: &str| format!("{prefix}.{index}.{part}_proj");
            Ok::<_, TargetError>(Expert {
                gate: self.load_linear(source, &name("gate"), dims, &slice)?,
                up: self.load_linear(source, &name("up"), dims, &slice)?,
                down: self.load_linear(source, &name("down"), down_dims, &down)?,
            })
        };
        let experts = share.experts.clone().map(&mut expert).collect::<Result<_, _>>()?;
        Ok(HeldExperts { first: share.experts.start, experts })
    }

    fn rope_angles(
        &mut self,
        spec: &RopeSpec,
        positions: &[u32],
        _first: usize,
    ) -> Result<CpuRope, TargetError> {
        let table = RopeTable::new(spec.dim, spec.theta, spec.yarn().as_ref());
        let blocks = positions.chunks(ROWS_PER_TASK).map(|block| table.angles(block)).collect();
        let (dim, interleaved) = (spec.dim, spec.interleaved);
        Ok(CpuRope { blocks, dim, rows: positions.len(), interleaved })
    }

    fn embed(
        &mut self,
        out: &mut Vec<f32>,
        table: &CpuLinear,
        ids: &[u32],
        first: usize,
    ) -> Result<(), TargetError> {
        let width = table.input;
        out.resize(ids.len() * width, 0.0);
        self.for_rows(out, width, |row, out| {
            for (out, &id) in out.chunks_exact_mut(width).zip(&ids[row..]) {
                let found = (id as usize).checked_sub(first).filter(|&row| row < table.out);
                match found {
                    Some(row) => out.copy_from_slice(&table.values[row * width..][..width]),
                    None => out.fill(0.0),
                }
            }
        });
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Vec<f32>,
        Norm { out, first, weight, eps }: Norm<'_, Vec<f32>>,
    ) -> Result<(), TargetError> {
        let width = weight.len();
        out.resize(first * width + x.len(), 0.0);
        self.for_rows(&mut out[first * width..], width, |row, out| {
            for (out, x) in out.chunks_exact_mut(width).zip(x[row * width..].chunks_exact(width)) {
                norm::rms_norm(out, x, weight, eps);
            }
        });
        Ok(())
    }

    fn matmul(
        &mut self,
        out: &mut Vec<f32>,
        x: Rows<'_, Vec<f32>>,
        weight: &CpuLinear,
        write: Write,
    ) -> Result<(), TargetError> {
        let x = x.values(weight.input);
        if write == Write::Set {
            out.resize(x.len() / weight.input * weight.out, 0.0);
        }
        weight.apply(out, x, write, self.threads);
        Ok(())
    }

    fn repeat_row(
        &mut self,
        out: &mut Vec<f32>,
        row: &Vec<f32>,
        rows: usize,
    ) -> Result<(), TargetError> {
        out.clear();
        (0..rows).for_each(|_| out.extend_from_slice(row));
        Ok(())
    }

    fn zeros(&mut self, out: &mut Vec<f32>, len: usize) -> Result<(), TargetError> {
        out.clear();
        out.resize(len, 0.0);
        Ok(())
    }

    fn add_parts(
        &mut self,
        x: &mut Vec<f32>,
        parts: &Parts<'_, Vec<f32>>,
        write: Write,
        norm: Option<Norm<'_, Vec<f32>>>,
    ) -> Result<(), TargetError> {
        let Parts { own, received, rank, ranks, rows, width } = parts;
        let size = rows.len() * width;
        if write == Write::Set {
            x.clear();
            x.resize(size, 0.0);
        }
        let part = |from: usize, first: usize, len: usize| match from == *rank {
            true => &own[(rows.start + first) * width..][..len],
            false => &received[from * size + first * width..][..len],
        };
        self.for_rows(x, *width, |first, x| {
            let mut sum = vec![0.0; x.len()];
            for from in 0..*ranks {
                let part = part(from, first, x.len());
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
            x.iter_mut().zip(sum).for_each(|(x, sum)| *x += sum);
        });
        match norm {
            None => Ok(()),
            Some(norm) => self.rms_norm(x, norm),
        }
    }

    fn gated(
        &mut self,
        (gate, up): (&mut Vec<f32>, &mut Vec<f32>),
        Rows { of, range }: Rows<'_, Vec<f32>>,
        [gate_weight, up_weight]: &[CpuLinear; 2],
    ) -> Result<(), TargetError> {
        self.matmul(gate, Rows { of, range: range.clone() }, gate_weight, Write::Set)?;
        self.matmul(up, Rows { of, range }, up_weight, Write::Set)?;
        self.for_rows(gate, 512, |row, gate| {
            activation::silu_mul(gate, &up[row * 512..][..gate.len()]);
        });
        Ok(())
    }

    fn rope(
        &mut self,
        x: &mut Vec<f32>,
        angles: &CpuRope,
        head_dim: usize,
    ) -> Result<(), TargetError> {
        if angles.rows == 0 {
            return Ok(());
        }
        let width = x.len() / angles.rows;
        let layout = RopeLayout::packed(width / head_dim, head_dim, head_dim - angles.dim);
        let interleaved = angles.interleaved;
        let task = |(x, block): (&mut [f32], &RopeAngles)| match interleaved {
            true => block.rotate_interleaved(x, layout),
            false => block.rotate_half(x, layout),
        };
        if self.threads.0 == 1 {
            x.chunks_mut(ROWS_PER_TASK * width).zip(&angles.blocks).for_each(task);
        } else {
            x.par_chunks_mut(ROWS_PER_TASK * width).zip(&angles.blocks).for_each(task);
        }
        Ok(())
    }

    fn split_latent(
        &mut self,
        latent: Norm<'_, Vec<f32>>,
        k_pe: &mut Vec<f32>,
        down: &Vec<f32>,
        rope: usize,
    ) -> Result<(), TargetError> {
        latent::split(self.threads, latent, k_pe, (down, rope));
        Ok(())
    }

    fn expand_latent(
        &mut self,
        keys_values: (&mut Vec<f32>, &mut Vec<f32>),
        kv: &Vec<f32>,
        k_pe: &Vec<f32>,
        dims: &LatentDims,
    ) -> Result<(), TargetError> {
        latent::expand(self.threads, keys_values, (kv, k_pe), dims);
        Ok(())
    }

    fn append(
        &mut self,
        cache: &mut Vec<f32>,
        kept: usize,
        fresh: &Vec<f32>,
    ) -> Result<(), TargetError> {
        cache.truncate(kept);
        cache.extend_from_slice(fresh);
        Ok(())
    }

    fn attention(
        &mut self,
        out: &mut Vec<f32>,
        [q, k, v]: [&Vec<f32>; 3],
        dims: &AttentionDims<'_>,
    ) -> Result<(), TargetError> {
        let tokens = dims.cu_seqlens.last().copied().unwrap_or(0);
        out.resize(tokens * dims.heads * dims.v_dim, 0.0);
        let heads = HeadShape {
            q_heads: dims.heads,
            kv_heads: dims.kv_heads,
            qk_dim: dims.qk_dim,
            v_dim: dims.v_dim,
            scale: dims.scale,
        };
        let packed = AttentionShape::packed(dims.cu_seqlens, heads, self.threads);
        attention::causal(out, q, k, v, AttentionShape { cached: dims.cached, ..packed });
        Ok(())
    }

    fn route(
        &mut self,
        logits: &Vec<f32>,
        bias: &Vec<f32>,
        rule: &RouteRule,
    ) -> Result<CpuRouting, TargetError> {
        let rule = rule.with_bias(bias);
        let block = ROWS_PER_TASK * bias.len();
        let parts: Vec<Routing> = if self.threads.0 == 1 {
            vec![route_top_k(logits, &rule)]
        } else {
            logits.par_chunks(block).map(|logits| route_top_k(logits, &rule)).collect()
        };
        let mut choice = RouterChoice::default();
        for part in parts {
            choice.indices.extend(part.indices);
            choice.weights.extend(part.weights);
            choice.margins.extend(part.margins);
        }
        Ok(CpuRouting { top_k: rule.top_k, choice })
    }

    fn routing_to_host(&mut self, routing: &CpuRouting) -> Result<RouterChoice, TargetError> {
        Ok(routing.choice.clone())
    }

    fn routing_from_host(&mut self, choice: RouterChoice) -> Result<CpuRouting, TargetError> {
        let top_k = choice.indices.len() / choice.margins.len().max(1);
        Ok(CpuRouting { top_k, choice })
    }

    fn experts(
        &mut self,
        x: &Vec<f32>,
        routing: &CpuRouting,
        held: &HeldExperts<CpuLinear>,
    ) -> Result<(), TargetError> {
        self.scratch.run(x, routing, held, self.threads);
        Ok(())
    }

    fn combine(
        &mut self,
        out: &mut Vec<f32>,
        routing: &CpuRouting,
        rows: Range<usize>,
    ) -> Result<(), TargetError> {
        self.scratch.combine(out, routing, rows, self.threads);
        Ok(())
    }
}

impl Rows<'_, Vec<f32>> {
    fn values(&self, width: usize) -> &[f32] {
        match &self.range {
            None => self.of,
            Some(rows) => &self.of[rows.start * width..rows.end * width],
        }
    }
}
