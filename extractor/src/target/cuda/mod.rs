//! The device functions on an NVIDIA GPU. Memory is taken when the model is loaded, by a plan that
//! is checked first. Knows nothing of layers; rows cross GPUs in [`nccl`] or [`peers`].

mod attention;
mod buffer;
mod capture;
mod clock;
mod device;
mod exit;
mod experts;
mod gemm;
mod grouped;
mod inputs;
mod lanes;
mod limits;
mod memory;
mod nccl;
mod peers;
mod rank;
mod routing;
mod rows;
mod weights;

use std::ops::Range;

use kernels::cuda::{DeviceMatrix, DeviceVector, Dtype, copy_on_device, download, upload};

use self::buffer::{CudaBuffer, CudaLinear};
use self::capture::{CaptureLane, CudaCaptured};
use self::clock::EventClock;
use self::device::Device;
pub(crate) use self::exit::LastResort;
pub use self::exit::exit_at_once;
#[cfg(test)]
pub(crate) use self::exit::hang_at_exit;
use self::experts::{CudaExperts, ExpertWork};
use self::inputs::{CudaRope, Inputs};
use self::memory::{Load, MemoryPlan, precision, room_values};
pub use self::rank::FreeMemory;
pub(super) use self::rank::{ceiling, start, start_shape};
use self::routing::{Routing, RoutingMemory};
use self::weights::{Loader, Progress, floats};
use super::error::TargetError;
use super::model::{Stage, StageTimes};
use super::ops::{
    AttentionDims, ExpertShare, LatentDims, Norm, Ops, Parts, Room, RouteRule, RouterChoice, Rows,
    Write,
};
use super::source::Source;
use super::spec::RopeSpec;
use super::weights::Slice;
use crate::capture::LayerRows;

/// Device functions on one GPU.
pub(super) struct CudaOps {
    device: Device,
    /// Tokens of the largest batch.
    tokens: usize,
    inputs: Inputs,
    routing: Option<RoutingMemory>,
    experts: Option<ExpertWork>,
    capture: CaptureLane,
    clock: EventClock,
    progress: Progress,
}

impl CudaOps {
    /// Takes the memory of `load`, if there is enough.
    fn new(device: Device, load: &Load<'_>) -> Result<Self, TargetError> {
        let plan = MemoryPlan::new(load);
        memory::require(&device, &plan)?;
        let tokens = load.tokens;
        let inputs = device.doing("take memory for a batch", Inputs::new(&device, load))?;
        let sizes = load.spec.moe.as_ref();
        let sizes = sizes.map(|moe| memory::expert_sizes(load, moe));
        let (routing, experts) = match sizes {
            None => (None, None),
            Some(sizes) => {
                let routing = RoutingMemory::new(&device, sizes, tokens);
                let routing = device.doing("take memory for a batch", routing)?;
                (Some(routing), Some(ExpertWork::new(&device, sizes, tokens)?))
            }
        };
        let capture = CaptureLane::new(&device, load.captured(), load.share())?;
        let clock = EventClock::new(&device.context);
        let progress = Progress::new(plan.weights());
        Ok(Self { device, tokens, inputs, routing, experts, capture, clock, progress })
    }

    fn loader<'a>(&'a mut self, source: &'a Source) -> Loader<'a> {
        let grouped = self.experts.as_ref().is_some_and(|work| work.sizes().grouped);
        Loader { device: &self.device, source, grouped, progress: &mut self.progress }
    }

    fn fits(&self, tokens: usize) -> Result<(), TargetError> {
        match tokens <= self.tokens {
            true => Ok(()),
            false => Err(TargetError::BatchTooLarge { tokens, limit: self.tokens }),
        }
    }

    fn missing(&self, what: &str) -> TargetError {
        let rank = self.device.rank;
        let (found, expected) = (format!("no {what}"), "a model with routed experts".to_owned());
        TargetError::Reply { rank, found, expected }
    }
}

impl Ops for CudaOps {
    type Buffer = CudaBuffer;
    type Linear = CudaLinear;
    type Rope = CudaRope;
    type Routing = Routing;
    type Experts = CudaExperts;
    /// Gate above up, [2 x columns, hidden].
    type GateUp = CudaLinear;
    type Captured = CudaCaptured;

    fn buffer(&mut self, room: Room) -> Result<CudaBuffer, TargetError> {
        let capacity = (room.width > 0).then(|| room_values(&room, self.tokens));
        let dtype = precision(room.precision, self.device.dtype);
        let buffer = CudaBuffer::new(&self.device.context, dtype, capacity);
        self.device.doing("take memory for a batch", buffer)
    }

    fn dtype(&self) -> &'static str {
        match self.device.dtype {
            Dtype::Bf16 => "bf16",
            Dtype::F32 => "f32",
        }
    }

    fn len(&self, buffer: &CudaBuffer) -> usize {
        buffer.len()
    }

    fn download(
        &mut self,
        buffer: &CudaBuffer,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TargetError> {
        const DOING: &str = "copy values to the host";
        self.device.settle(DOING)?;
        let (address, stream) = (buffer.address(), self.device.stream());
        let values = match buffer.dtype() {
            Dtype::F32 => {
                download(stream, DeviceVector::<f32>::new(address, buffer.len()).range(range))
            }
            Dtype::Bf16 => {
                let vector = DeviceVector::<half::bf16>::new(address, buffer.len()).range(range);
                download(stream, vector)
                    .map(|values| values.into_iter().map(half::bf16::to_f32).collect())
            }
        };
        self.device.doing(DOING, values)
    }

    fn capture(
        &mut self,
        buffer: &CudaBuffer,
        rows: Range<usize>,
        width: usize,
    ) -> Result<CudaCaptured, TargetError> {
        let size = buffer.dtype().size() * width;
        let address = buffer.address() + (rows.start * size) as u64;
        let started = self.capture.start(&self.device, address, [rows.len(), width]);
        self.device.doing("capture a layer", started)
    }

    fn collect(&mut self, captured: CudaCaptured) -> Result<LayerRows, TargetError> {
        self.device.doing("copy captured rows", captured.wait())
    }

    fn start_clock(&mut self) -> Result<(), TargetError> {
        let started = self.clock.start(&self.device.compute);
        self.device.doing("start a forward", started)
    }

    fn lap(&mut self, stage: Stage) -> Result<(), TargetError> {
        if self.device.is_aside() {
            return Ok(());
        }
        let recorded = self.clock.lap(stage, &self.device.compute);
        self.device.doing("time a stage", recorded)
    }

    fn times(&mut self) -> Result<StageTimes, TargetError> {
        const DOING: &str = "finish a forward";
        if let Some(last) = self.clock.last() {
            self.device.wait(DOING, last)?;
        }
        self.device.doing(DOING, self.clock.times(self.device.rank))
    }

    fn load_linear(
        &mut self,
        source: &Source,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<CudaLinear, TargetError> {
        self.loader(source).linear(name, dims, slice)
    }

    fn load_gate_up(
        &mut self,
        source: &Source,
        prefix: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<CudaLinear, TargetError> {
        self.loader(source).gate_up(prefix, dims, slice)
    }

    fn load_vector(
        &mut self,
        source: &Source,
        name: &str,
        len: usize,
        range: Range<usize>,
    ) -> Result<CudaBuffer, TargetError> {
        self.loader(source).vector(name, len, range)
    }

    fn zero_vector(&mut self, len: usize) -> Result<CudaBuffer, TargetError> {
        floats(&self.device, &vec![0.0; len])
    }

    fn load_experts(
        &mut self,
        source: &Source,
        prefix: &str,
        share: &ExpertShare,
    ) -> Result<CudaExperts, TargetError> {
        self.loader(source).experts(prefix, share)
    }

    fn rope_angles(
        &mut self,
        spec: &RopeSpec,
        positions: &[u32],
        first: usize,
    ) -> Result<CudaRope, TargetError> {
        let rope = CudaRope::new(spec, first, positions.len());
        self.fits(rope.end())?;
        let found = self.inputs.look_up(&self.device, &rope, positions);
        self.device.doing("look up rotary angles", found)?;
        Ok(rope)
    }

    fn embed(
        &mut self,
        out: &mut CudaBuffer,
        table: &CudaLinear,
        ids: &[u32],
        first: usize,
    ) -> Result<(), TargetError> {
        self.fits(ids.len())?;
        let Self { device, inputs, .. } = self;
        let result = out.set_len(ids.len() * table.input).and_then(|()| {
            upload(&device.compute, inputs.ids.address(), ids)?;
            let ids = inputs.ids.vector(ids.len());
            device.launch().embed(&out.rows(table.input), &table.matrix(), ids, first)
        });
        device.doing("embed", result)
    }

    fn rms_norm(&mut self, x: &CudaBuffer, norm: Norm<'_, CudaBuffer>) -> Result<(), TargetError> {
        let normed = self.device.rms_norm(x, norm);
        self.device.doing("norm", normed)
    }

    fn matmul(
        &mut self,
        out: &mut CudaBuffer,
        x: Rows<'_, CudaBuffer>,
        weight: &CudaLinear,
        write: Write,
    ) -> Result<(), TargetError> {
        let result = self.product(out, x, weight, write);
        self.device.doing("multiply", result)
    }

    fn repeat_row(
        &mut self,
        out: &mut CudaBuffer,
        row: &CudaBuffer,
        rows: usize,
    ) -> Result<(), TargetError> {
        let (device, width) = (&self.device, row.len());
        let result = out
            .set_len(rows * width)
            .and_then(|()| device.launch().repeat_row(&out.rows(width), &row.rows(width)));
        device.doing("repeat a bias", result)
    }

    fn zeros(&mut self, out: &mut CudaBuffer, len: usize) -> Result<(), TargetError> {
        let device = &self.device;
        let result = out.set_len(len).and_then(|()| device.launch().zero(&elements(out)));
        device.doing("set to zero", result)
    }

    fn add_parts(
        &mut self,
        x: &mut CudaBuffer,
        parts: &Parts<'_, CudaBuffer>,
        write: Write,
        norm: Option<Norm<'_, CudaBuffer>>,
    ) -> Result<(), TargetError> {
        let added = self.device.add_parts(x, parts, write, norm);
        self.device.doing("add the parts of a sum", added)
    }

    fn mark(&mut self, half: usize) -> Result<(), TargetError> {
        self.device.doing("mark the end of a part", self.device.mark(half))
    }

    fn aside(&mut self, half: usize) -> Result<(), TargetError> {
        let ordered = self.device.go_aside(half);
        self.device.doing("order streams", ordered)
    }

    fn abreast(&mut self, half: usize) -> Result<(), TargetError> {
        let ordered = self.device.come_back(half);
        self.device.doing("order streams", ordered)
    }

    fn join(&mut self, half: usize) -> Result<(), TargetError> {
        self.device.doing("order streams", self.device.join(half))
    }

    fn gated(
        &mut self,
        (out, work): (&mut CudaBuffer, &mut CudaBuffer),
        x: Rows<'_, CudaBuffer>,
        weights: &CudaLinear,
    ) -> Result<(), TargetError> {
        let columns = weights.out / 2;
        let result = self.product(work, x, weights, Write::Set).and_then(|()| {
            let both = work.rows(weights.out);
            out.set_len(both.rows * columns)?;
            let (gate, up) = (both.columns(0..columns), both.columns(columns..weights.out));
            self.device.launch().silu_mul(&out.rows(columns), &gate, &up)
        });
        self.device.doing("multiply with gate and up", result)
    }

    fn rope(
        &mut self,
        x: &mut CudaBuffer,
        angles: &CudaRope,
        head_dim: usize,
    ) -> Result<(), TargetError> {
        let rotated = self.inputs.rotate(&self.device, x, angles, head_dim);
        self.device.doing("rotate", rotated)
    }

    fn split_latent(
        &mut self,
        latent: Norm<'_, CudaBuffer>,
        k_pe: &mut CudaBuffer,
        down: &CudaBuffer,
        rope: usize,
    ) -> Result<(), TargetError> {
        let split = self.device.split_latent(latent, k_pe, down, rope);
        self.device.doing("split the latent", split)
    }

    fn expand_latent(
        &mut self,
        keys_values: (&mut CudaBuffer, &mut CudaBuffer),
        kv: &CudaBuffer,
        k_pe: &CudaBuffer,
        dims: &LatentDims,
    ) -> Result<(), TargetError> {
        let expanded = self.device.expand_latent(keys_values, kv, k_pe, dims);
        self.device.doing("expand the latent", expanded)
    }

    fn append(
        &mut self,
        cache: &mut CudaBuffer,
        kept: usize,
        fresh: &CudaBuffer,
    ) -> Result<(), TargetError> {
        let (stream, size) = (&self.device.compute, fresh.dtype().size());
        let result = cache
            .resize(kept + fresh.len(), kept, |to, from, bytes| {
                copy_on_device(stream, to, from, bytes)
            })
            .and_then(|()| {
                let end = cache.address() + (kept * size) as u64;
                copy_on_device(stream, end, fresh.address(), fresh.len() * size)
            });
        self.device.doing("append to a cache", result)
    }

    fn attention(
        &mut self,
        out: &mut CudaBuffer,
        [q, k, v]: [&CudaBuffer; 3],
        dims: &AttentionDims<'_>,
    ) -> Result<(), TargetError> {
        let result = self.attend(out, [q, k, v], dims);
        self.device.doing("attend", result)
    }

    fn route(
        &mut self,
        logits: &CudaBuffer,
        bias: &CudaBuffer,
        rule: &RouteRule,
    ) -> Result<Routing, TargetError> {
        let (Some(memory), Some(work)) = (&self.routing, &self.experts) else {
            return Err(self.missing("memory for a router"));
        };
        let device = &self.device;
        let logits = logits.rows(rule.num_experts);
        let routing = memory.of(logits.rows);
        let kernel_rule = kernels::cuda::RouteRule {
            scoring: rule.scoring,
            top_k: rule.top_k,
            groups: rule.num_groups,
            kept_groups: rule.topk_group,
            normalise: rule.normalise,
            scale: rule.scale,
        };
        let result = device
            .launch()
            .route(&logits, bias.floats(), &kernel_rule, &routing.views)
            .and_then(|()| routing.group_rows(device, rule.top_k))
            .and_then(|()| work.start_counts(device, routing.permutation.counts));
        device.doing("choose experts", result)?;
        Ok(routing)
    }

    fn routing_to_host(&mut self, routing: &Routing) -> Result<RouterChoice, TargetError> {
        const DOING: &str = "copy the choice of experts to the host";
        self.device.settle(DOING)?;
        self.device.doing(DOING, routing.to_host(&self.device))
    }

    fn routing_from_host(&mut self, choice: RouterChoice) -> Result<Routing, TargetError> {
        let (Some(memory), Some(work)) = (&self.routing, &self.experts) else {
            return Err(self.missing("memory for a router"));
        };
        let device = &self.device;
        let rows = choice.margins.len();
        let routing = memory.of(rows);
        let result = routing
            .set(device, &choice)
            .and_then(|()| routing.group_rows(device, choice.indices.len() / rows.max(1)))
            .and_then(|()| work.start_counts(device, routing.permutation.counts));
        device.doing("copy a choice of experts to the GPU", result)?;
        Ok(routing)
    }

    fn experts(
        &mut self,
        x: &CudaBuffer,
        routing: &Routing,
        held: &CudaExperts,
    ) -> Result<(), TargetError> {
        let Some(work) = &mut self.experts else {
            return Err(self.missing("memory for experts"));
        };
        let hidden = work.sizes().hidden;
        work.run(&self.device, &x.rows(hidden), routing, held)
    }

    fn combine(
        &mut self,
        out: &mut CudaBuffer,
        routing: &Routing,
        rows: Range<usize>,
    ) -> Result<(), TargetError> {
        let Some(work) = &self.experts else {
            return Err(self.missing("memory for experts"));
        };
        let out = out.rows(work.sizes().hidden);
        let combined = work.combine(&self.device, &out, routing, rows);
        self.device.doing("sum the experts", combined)
    }
}

/// All values in rows as wide as a launch takes well: functions of single values care for no
/// width.
fn elements(buffer: &CudaBuffer) -> DeviceMatrix {
    let widths = [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2];
    let width = widths.into_iter().find(|&width| buffer.len().is_multiple_of(width));
    buffer.rows(width.unwrap_or(1))
}
