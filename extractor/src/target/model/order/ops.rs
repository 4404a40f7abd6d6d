//! The device functions on the CPU, each noted in the account of its rank. Knows no order itself.

use std::ops::Range;

use super::{ALL, Buffer, COMPUTE, Shared};
use crate::capture::LayerRows;
use crate::target::cpu::{CpuLinear, CpuOps, CpuRope, CpuRouting};
use crate::target::error::TargetError;
use crate::target::model::{Stage, StageTimes};
use crate::target::ops::{
    AttentionDims, ExpertShare, HeldExperts, LatentDims, Norm, Ops, Parts, Room, RouteRule,
    RouterChoice, Rows, Write,
};
use crate::target::source::Source;
use crate::target::spec::RopeSpec;
use crate::target::weights::Slice;

type Answer<T> = Result<T, TargetError>;

pub(super) struct Watched {
    cpu: CpuOps,
    account: Shared,
}

impl Watched {
    pub(super) fn new(account: Shared) -> Self {
        Self { cpu: CpuOps::new(1), account }
    }

    /// What a GPU does on its compute stream whatever the current one is.
    fn in_order(&self, doing: &'static str) {
        assert_eq!(self.account.lock().current, COMPUTE, "{doing}");
    }
}

/// The rows as the CPU takes them, and as values.
fn rows<'a>(
    Rows { of, range }: Rows<'a, Buffer>,
    width: usize,
) -> (Rows<'a, Vec<f32>>, Range<usize>) {
    let all = || 0..of.values.len();
    let values = range.clone().map_or_else(all, |rows| rows.start * width..rows.end * width);
    (Rows { of: &of.values, range }, values)
}

impl Shared {
    /// A norm of `values` values.
    fn norms(&self, norm: &Norm<'_, Buffer>, values: usize) {
        let first = norm.first * norm.weight.values.len();
        self.lock().writes(norm.out, first..first + values);
    }
}

fn plain(Norm { out, first, weight, eps }: Norm<'_, Buffer>) -> Norm<'_, Vec<f32>> {
    Norm { out: &mut out.values, first, weight: &weight.values, eps }
}

impl Ops for Watched {
    type Buffer = Buffer;
    type Linear = CpuLinear;
    type Rope = CpuRope;
    type Routing = CpuRouting;
    type Experts = HeldExperts<CpuLinear>;
    type GateUp = [CpuLinear; 2];
    type Captured = LayerRows;

    fn buffer(&mut self, room: Room) -> Answer<Buffer> {
        Ok(Buffer { name: room.name, ..Buffer::default() })
    }

    fn dtype(&self) -> &'static str {
        self.cpu.dtype()
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.values.len()
    }

    fn download(&mut self, buffer: &Buffer, range: Range<usize>) -> Answer<Vec<f32>> {
        self.account.start("download").reads(buffer, range.clone());
        self.cpu.download(&buffer.values, range)
    }

    fn capture(&mut self, buffer: &Buffer, rows: Range<usize>, width: usize) -> Answer<LayerRows> {
        let values = rows.start * width..rows.end * width;
        self.account.start("capture").reads(buffer, values);
        self.cpu.capture(&buffer.values, rows, width)
    }

    fn collect(&mut self, captured: LayerRows) -> Answer<LayerRows> {
        self.cpu.collect(captured)
    }

    fn start_clock(&mut self) -> Answer<()> {
        self.cpu.start_clock()
    }

    fn lap(&mut self, stage: Stage) -> Answer<()> {
        self.cpu.lap(stage)
    }

    fn times(&mut self) -> Answer<StageTimes> {
        self.cpu.times()
    }

    fn load_linear(
        &mut self,
        source: &Source,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Answer<CpuLinear> {
        self.cpu.load_linear(source, name, dims, slice)
    }

    fn load_gate_up(
        &mut self,
        source: &Source,
        prefix: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Answer<[CpuLinear; 2]> {
        self.cpu.load_gate_up(source, prefix, dims, slice)
    }

    fn load_vector(
        &mut self,
        source: &Source,
        name: &str,
        len: usize,
        range: Range<usize>,
    ) -> Answer<Buffer> {
        let values = self.cpu.load_vector(source, name, len, range)?;
        Ok(Buffer { name: "weights", values, ..Buffer::default() })
    }

    fn zero_vector(&mut self, len: usize) -> Answer<Buffer> {
        let values = self.cpu.zero_vector(len)?;
        Ok(Buffer { name: "weights", values, ..Buffer::default() })
    }

    fn load_experts(
        &mut self,
        source: &Source,
        prefix: &str,
        share: &ExpertShare,
    ) -> Answer<HeldExperts<CpuLinear>> {
        self.cpu.load_experts(source, prefix, share)
    }

    fn rope_angles(&mut self, spec: &RopeSpec, positions: &[u32], first: usize) -> Answer<CpuRope> {
        self.in_order("angles");
        self.cpu.rope_angles(spec, positions, first)
    }

    fn embed(
        &mut self,
        out: &mut Buffer,
        table: &CpuLinear,
        ids: &[u32],
        first: usize,
    ) -> Answer<()> {
        self.in_order("embed");
        self.account.start("embed").writes(out, ALL);
        self.cpu.embed(&mut out.values, table, ids, first)
    }

    fn rms_norm(&mut self, x: &Buffer, norm: Norm<'_, Buffer>) -> Answer<()> {
        self.account.start("norm").reads(x, 0..x.values.len());
        self.account.norms(&norm, x.values.len());
        self.cpu.rms_norm(&x.values, plain(norm))
    }

    fn matmul(
        &mut self,
        out: &mut Buffer,
        x: Rows<'_, Buffer>,
        weight: &CpuLinear,
        write: Write,
    ) -> Answer<()> {
        let of = x.of;
        let (x, values) = rows(x, weight.input);
        let mut account = self.account.start("multiply");
        account.reads(of, values);
        account.writes(out, ALL);
        drop(account);
        self.cpu.matmul(&mut out.values, x, weight, write)
    }

    fn repeat_row(&mut self, out: &mut Buffer, row: &Buffer, rows: usize) -> Answer<()> {
        self.account.start("repeat").writes(out, ALL);
        self.cpu.repeat_row(&mut out.values, &row.values, rows)
    }

    fn zeros(&mut self, out: &mut Buffer, len: usize) -> Answer<()> {
        self.account.start("set to zero").writes(out, 0..len);
        self.cpu.zeros(&mut out.values, len)
    }

    fn add_parts(
        &mut self,
        x: &mut Buffer,
        parts: &Parts<'_, Buffer>,
        write: Write,
        norm: Option<Norm<'_, Buffer>>,
    ) -> Answer<()> {
        let Parts { own, received, rank, ranks, rows: ref own_rows, width } = *parts;
        let size = own_rows.len() * width;
        let mut account = self.account.start("add parts");
        account.reads(own, own_rows.start * width..own_rows.end * width);
        account.reads(received, 0..ranks * size);
        account.writes(x, ALL);
        drop(account);
        if let Some(norm) = &norm {
            self.account.norms(norm, size);
        }
        let (own, received, rows) = (&own.values, &received.values, own_rows.clone());
        let parts = Parts { own, received, rank, ranks, rows, width };
        self.cpu.add_parts(&mut x.values, &parts, write, norm.map(plain))
    }

    fn mark(&mut self, half: usize) -> Answer<()> {
        self.account.lock().mark(half);
        Ok(())
    }

    fn aside(&mut self, half: usize) -> Answer<()> {
        self.account.lock().aside(half);
        Ok(())
    }

    fn abreast(&mut self, half: usize) -> Answer<()> {
        self.account.lock().abreast(half);
        Ok(())
    }

    fn join(&mut self, half: usize) -> Answer<()> {
        self.account.lock().join(half);
        Ok(())
    }

    fn gated(
        &mut self,
        (out, work): (&mut Buffer, &mut Buffer),
        x: Rows<'_, Buffer>,
        weights: &[CpuLinear; 2],
    ) -> Answer<()> {
        let of = x.of;
        let (x, values) = rows(x, weights[0].input);
        let mut account = self.account.start("gate");
        account.reads(of, values);
        account.writes(out, ALL);
        account.writes(work, ALL);
        drop(account);
        self.cpu.gated((&mut out.values, &mut work.values), x, weights)
    }

    fn rope(&mut self, x: &mut Buffer, angles: &CpuRope, head_dim: usize) -> Answer<()> {
        self.account.start("rotate").writes(x, 0..x.values.len());
        self.cpu.rope(&mut x.values, angles, head_dim)
    }

    fn split_latent(
        &mut self,
        latent: Norm<'_, Buffer>,
        k_pe: &mut Buffer,
        down: &Buffer,
        rope: usize,
    ) -> Answer<()> {
        let (width, first) = (latent.weight.values.len(), latent.first);
        let rows = down.values.len() / (width + rope);
        let mut account = self.account.start("split the latent");
        account.reads(down, 0..down.values.len());
        account.writes(k_pe, first * rope..(first + rows) * rope);
        drop(account);
        self.account.norms(&latent, rows * width);
        self.cpu.split_latent(plain(latent), &mut k_pe.values, &down.values, rope)
    }

    fn expand_latent(
        &mut self,
        (keys, values): (&mut Buffer, &mut Buffer),
        kv: &Buffer,
        k_pe: &Buffer,
        dims: &LatentDims,
    ) -> Answer<()> {
        let mut account = self.account.start("expand the latent");
        account.reads(kv, 0..kv.values.len());
        account.reads(k_pe, 0..k_pe.values.len());
        account.writes(keys, ALL);
        account.writes(values, ALL);
        drop(account);
        let out = (&mut keys.values, &mut values.values);
        self.cpu.expand_latent(out, &kv.values, &k_pe.values, dims)
    }

    fn append(&mut self, cache: &mut Buffer, kept: usize, fresh: &Buffer) -> Answer<()> {
        self.in_order("append");
        let mut account = self.account.start("append");
        account.reads(fresh, 0..fresh.values.len());
        account.writes(cache, ALL);
        drop(account);
        self.cpu.append(&mut cache.values, kept, &fresh.values)
    }

    fn attention(
        &mut self,
        out: &mut Buffer,
        qkv: [&Buffer; 3],
        dims: &AttentionDims<'_>,
    ) -> Answer<()> {
        self.in_order("attend");
        let mut account = self.account.start("attend");
        qkv.iter().for_each(|buffer| account.reads(buffer, 0..buffer.values.len()));
        account.writes(out, ALL);
        drop(account);
        self.cpu.attention(&mut out.values, qkv.map(|buffer| &buffer.values), dims)
    }

    fn route(&mut self, logits: &Buffer, bias: &Buffer, rule: &RouteRule) -> Answer<CpuRouting> {
        self.in_order("route");
        self.account.start("route").reads(logits, 0..logits.values.len());
        self.cpu.route(&logits.values, &bias.values, rule)
    }

    fn routing_to_host(&mut self, routing: &CpuRouting) -> Answer<RouterChoice> {
        self.in_order("routing to host");
        self.cpu.routing_to_host(routing)
    }

    fn routing_from_host(&mut self, choice: RouterChoice) -> Answer<CpuRouting> {
        self.in_order("routing from host");
        self.cpu.routing_from_host(choice)
    }

    fn experts(
        &mut self,
        x: &Buffer,
        routing: &CpuRouting,
        held: &HeldExperts<CpuLinear>,
    ) -> Answer<()> {
        self.in_order("experts");
        self.account.start("experts").reads(x, 0..x.values.len());
        self.cpu.experts(&x.values, routing, held)
    }

    fn combine(
        &mut self,
        out: &mut Buffer,
        routing: &CpuRouting,
        rows: Range<usize>,
    ) -> Answer<()> {
        self.in_order("combine");
        self.account.start("combine").writes(out, ALL);
        self.cpu.combine(&mut out.values, routing, rows)
    }
}
