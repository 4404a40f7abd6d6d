//! Routed experts on a GPU: weights stay packed; each expert is decoded when its turn comes, while
//! others multiply. Only the counts of rows come to the host.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::cuda::cudarc::driver::{CudaEvent, CudaStream};
use kernels::cuda::{
    Blas, CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype, Fp8BlockWeight, Int4Weight,
    Launcher, Nvfp4Weight, PinnedBuffer, Product,
};

use super::device::{Device, driver};
use super::gemm::WORKSPACE_BYTES;
use super::routing::Routing;
use crate::target::error::TargetError;
use crate::target::weights::PackedFormat;

/// Experts under way at the same time.
pub(super) const LANES: usize = 3;
/// Blocks that decode weights, one a multiprocessor of an H200. Fewer would leave the others to
/// products, but were slower: the products of an expert then wait for its weights.
const DECODING: usize = 132;
/// Rows of every expert start at a multiple of this, so that products of many sizes share plans.
pub(super) const ROW_ALIGN: usize = 32;
/// Side of the blocks that share a factor in FP8.
const FP8_BLOCK: usize = 128;

/// Equal matrices [out, in] of a layer's experts, packed one after the other.
#[derive(Debug)]
pub(in crate::target) struct Stack {
    pub(super) format: PackedFormat,
    pub(super) dims: [usize; 2],
    pub(super) codes: DeviceBuffer,
    pub(super) scales: DeviceBuffer,
    /// Multiplier of each matrix.
    pub(super) factors: Vec<f32>,
}

/// Routed experts of one layer.
#[derive(Debug)]
pub(in crate::target) struct CudaExperts {
    /// Gate and up of every expert in turn, each [columns, hidden].
    pub(super) gate_up: Stack,
    /// [hidden, columns].
    pub(super) down: Stack,
}

impl Stack {
    /// `count` matrices from number `first` on, as one [count * out, in] in the format of
    /// products: where it is, or decoded into the start of `room`.
    fn decoded(
        &self,
        launch: &Launcher<'_>,
        (first, count): (usize, usize),
        room: &DeviceBuffer,
        dtype: Dtype,
    ) -> Result<DeviceMatrix, CudaError> {
        let [out, input] = self.dims;
        let whole = [count * out, input];
        let stored = match self.format {
            PackedFormat::Bf16 => Dtype::Bf16,
            PackedFormat::F32 => Dtype::F32,
            _ => {
                let matrix = room.matrix(whole, dtype);
                for index in 0..count {
                    let part = matrix.row_range(index * out..(index + 1) * out);
                    self.decode(launch, first + index, &part)?;
                }
                return Ok(matrix);
            }
        };
        let address = self.codes.address() + (first * self.format.code_bytes(self.dims)) as u64;
        let matrix = DeviceMatrix::packed(address, whole, stored);
        if stored == dtype {
            return Ok(matrix);
        }
        let converted = room.matrix(whole, dtype);
        launch.copy(&converted, &matrix)?;
        Ok(converted)
    }

    fn decode(
        &self,
        launch: &Launcher<'_>,
        index: usize,
        out: &DeviceMatrix,
    ) -> Result<(), CudaError> {
        let (codes, scales) =
            (self.format.code_bytes(self.dims), self.format.scale_bytes(self.dims));
        let code = self.codes.address() + (index * codes) as u64;
        let scale = self.scales.address() + (index * scales) as u64;
        match self.format {
            PackedFormat::Int4 { group } => launch.dequant_int4_beside(
                out,
                &Int4Weight {
                    packed: DeviceVector::new(code, codes / 4),
                    scale: DeviceVector::new(scale, scales / 2),
                    group,
                },
                DECODING,
            ),
            PackedFormat::Fp8 => launch.dequant_fp8_block(
                out,
                &Fp8BlockWeight {
                    weight: DeviceVector::new(code, codes),
                    scale_inv: DeviceVector::new(scale, scales / 4),
                    block: FP8_BLOCK,
                },
            ),
            PackedFormat::Nvfp4 => launch.dequant_nvfp4(
                out,
                &Nvfp4Weight {
                    packed: DeviceVector::new(code, codes),
                    scale: DeviceVector::new(scale, scales),
                    global: self.factors.get(index).copied().unwrap_or(1.0),
                },
            ),
            PackedFormat::Bf16 | PackedFormat::F32 => {
                Err(CudaError::Shape("plain weights need no decoding".to_owned()))
            }
        }
    }
}

/// Sizes of the experts of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertSizes {
    /// Number of the first expert held.
    pub(super) first: usize,
    /// Experts held.
    pub(super) held: usize,
    /// Columns of an intermediate.
    pub(super) columns: usize,
    pub(super) hidden: usize,
    /// Choices a row.
    pub(super) top_k: usize,
    /// Experts of the model.
    pub(super) num_experts: usize,
}

impl ExpertSizes {
    /// Grouped rows of a batch of `rows`, at most; the idle ones behind each expert included.
    pub(super) fn grouped_rows(&self, rows: usize) -> usize {
        let chosen = rows * self.top_k.min(self.held);
        chosen + self.held.min(chosen) * (ROW_ALIGN - 1)
    }

    /// Values of each of the work buffers for batches of `rows`: decoded gate and up, decoded
    /// down, inputs, gates and ups, activations (one a lane), outputs.
    pub(super) fn work(&self, rows: usize) -> [usize; 6] {
        let (rows, all) = (rows.next_multiple_of(ROW_ALIGN), self.grouped_rows(rows));
        let Self { columns, hidden, .. } = *self;
        [
            2 * columns * hidden,
            hidden * columns,
            rows * hidden,
            rows * 2 * columns,
            rows * columns,
            all * hidden,
        ]
    }
}

/// Buffers of the experts' work, taken once.
pub(super) struct ExpertWork {
    sizes: ExpertSizes,
    lanes: Vec<Lane>,
    outputs: DeviceBuffer,
    /// Rows a held expert, on the host.
    counts: Mutex<PinnedBuffer>,
    /// The rows are grouped, and their counts are on the host.
    grouped: CudaEvent,
}

/// One expert at a time, from gathered rows to outputs, on a stream of its own: what one expert
/// leaves idle of the GPU, another uses.
struct Lane {
    stream: Arc<CudaStream>,
    blas: Blas,
    gate_up: DeviceBuffer,
    down: DeviceBuffer,
    input: DeviceBuffer,
    both: DeviceBuffer,
    activation: DeviceBuffer,
    decoded: CudaEvent,
    done: CudaEvent,
}

impl Lane {
    fn new(device: &Device, sizes: [usize; 5]) -> Result<Self, CudaError> {
        let take = |bytes| DeviceBuffer::new(&device.context, bytes);
        let stream = device.context.new_stream().map_err(driver("make a stream"))?;
        let [gate_up, down, input, both, activation] = sizes;
        Ok(Self {
            blas: Blas::new(&stream, WORKSPACE_BYTES)?,
            stream,
            gate_up: take(gate_up)?,
            down: take(down)?,
            input: take(input)?,
            both: take(both)?,
            activation: take(activation)?,
            decoded: device.event()?,
            done: device.event()?,
        })
    }

    /// Brings one expert on the way: gathers its rows of `x`, decodes its weights, multiplies.
    fn expert(
        &mut self,
        device: &Device,
        (out, x): (&DeviceMatrix, &DeviceMatrix),
        sources: DeviceVector<u32>,
        (experts, index): (&CudaExperts, usize),
    ) -> Result<(), CudaError> {
        let (dtype, rows, hidden) = (device.dtype, out.rows, out.cols);
        let launch = device.kernels.on(&device.decode);
        device.decode.wait(&self.done).map_err(driver("order streams"))?;
        let gate_up = experts.gate_up.decoded(&launch, (2 * index, 2), &self.gate_up, dtype)?;
        let down = experts.down.decoded(&launch, (index, 1), &self.down, dtype)?;
        self.decoded.record(&device.decode).map_err(driver("record an event"))?;
        let launch = device.kernels.on(&self.stream);
        launch.gather_rows(&self.input.matrix([sources.len, hidden], dtype), x, sources)?;
        self.stream.wait(&self.decoded).map_err(driver("order streams"))?;
        let columns = gate_up.rows / 2;
        let both = self.both.matrix([rows, 2 * columns], dtype);
        let input = self.input.matrix([rows, hidden], dtype);
        self.blas.matmul(&both, &input, &gate_up, Product::LINEAR)?;
        let activation = self.activation.matrix([rows, columns], dtype);
        let (gate, up) = (both.columns(0..columns), both.columns(columns..2 * columns));
        launch.silu_mul(&activation, &gate, &up)?;
        self.blas.matmul(out, &activation, &down, Product::LINEAR)?;
        self.done.record(&self.stream).map_err(driver("record an event"))
    }
}

impl ExpertWork {
    pub(super) fn new(
        device: &Device,
        sizes: ExpertSizes,
        rows: usize,
    ) -> Result<Self, TargetError> {
        let work = sizes.work(rows).map(|values| values * device.dtype.size());
        let [gate_up, down, input, both, activation, outputs] = work;
        let lane = [gate_up, down, input, both, activation];
        let make = || {
            let lanes = (0..LANES).map(|_| Lane::new(device, lane));
            Ok(Self {
                sizes,
                lanes: lanes.collect::<Result<_, CudaError>>()?,
                outputs: DeviceBuffer::new(&device.context, outputs)?,
                counts: Mutex::new(PinnedBuffer::new(&device.context, sizes.held * 4)?),
                grouped: device.event()?,
            })
        };
        device.doing("take memory for the experts", make())
    }

    /// Sizes that the buffers were taken for.
    pub(super) fn sizes(&self) -> ExpertSizes {
        self.sizes
    }

    /// Starts to bring the counts of `routing` to the host. What the compute stream is given
    /// after this runs beside the experts.
    pub(super) fn start_counts(
        &self,
        device: &Device,
        counts: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let mut pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.start_download(&device.compute, 0, (counts.address, counts.len * 4))?;
        self.grouped.record(&device.compute).map_err(driver("record an event"))
    }

    fn counts(&self, device: &Device) -> Result<Vec<usize>, TargetError> {
        device.wait("wait for the counts of the experts", &self.grouped)?;
        let pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (counts, _) = pinned.as_slice().as_chunks::<4>();
        Ok(counts.iter().map(|&count| u32::from_le_bytes(count) as usize).collect())
    }

    /// Computes the held experts of the rows of `x` that chose them, for
    /// [`ExpertWork::combine`]. `x` is what it was when the counts were asked for.
    pub(super) fn run(
        &mut self,
        device: &Device,
        x: &DeviceMatrix,
        routing: &Routing,
        experts: &CudaExperts,
    ) -> Result<(), TargetError> {
        let counts = self.counts(device)?;
        let total: usize = counts.iter().sum();
        let most = x.rows * self.sizes.top_k.min(self.sizes.held);
        if total > most || counts.iter().any(|&count| count > x.rows) {
            return Err(TargetError::Reply {
                rank: device.rank,
                found: format!("{total} rows for the experts"),
                expected: format!("at most {most} of {} rows", x.rows),
            });
        }
        let result = self.enqueue(device, x, routing, (experts, &counts));
        device.doing("multiply with the experts", result)
    }

    /// `out += sum of weight * expert(x)` for `rows` of those of the last run.
    pub(super) fn combine(
        &self,
        device: &Device,
        out: &DeviceMatrix,
        routing: &Routing,
        rows: std::ops::Range<usize>,
    ) -> Result<(), CudaError> {
        let (top_k, all) = (self.sizes.top_k, routing.views.margins.len);
        let outputs = self.outputs(device, 0..self.sizes.grouped_rows(all));
        let choices = rows.start * top_k..rows.end * top_k;
        let places = routing.permutation.places.range(choices.clone());
        let weights = routing.views.weights.range(choices);
        device.launch().combine(out, &outputs, places, weights)
    }

    fn enqueue(
        &mut self,
        device: &Device,
        x: &DeviceMatrix,
        routing: &Routing,
        (experts, counts): (&CudaExperts, &[usize]),
    ) -> Result<(), CudaError> {
        for lane in &self.lanes {
            lane.stream.wait(&self.grouped).map_err(driver("order streams"))?;
        }
        let (mut start, mut turn) = (0, 0);
        for (expert, &count) in counts.iter().enumerate() {
            if count == 0 {
                continue;
            }
            let sources = routing.permutation.sources.range(start..start + count);
            let end = start + count.next_multiple_of(ROW_ALIGN);
            let out = self.outputs(device, start..end);
            self.lanes[turn % LANES].expert(device, (&out, x), sources, (experts, expert))?;
            (start, turn) = (end, turn + 1);
        }
        for lane in &self.lanes {
            device.compute.wait(&lane.done).map_err(driver("order streams"))?;
        }
        Ok(())
    }

    fn outputs(&self, device: &Device, rows: std::ops::Range<usize>) -> DeviceMatrix {
        let hidden = self.sizes.hidden;
        self.outputs.matrix([rows.end, hidden], device.dtype).row_range(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every expert's rows fit with the idle ones behind them, however the rows are spread.
    #[test]
    fn aligned_outputs_stay_inside() {
        for (rows, held, top_k) in [(1, 4, 2), (7, 3, 2), (100, 48, 8), (4096, 48, 8), (50, 1, 1)] {
            let sizes =
                ExpertSizes { first: 0, held, columns: 8, hidden: 4, top_k, num_experts: 384 };
            let room = sizes.grouped_rows(rows);
            // As many experts as may be chosen hold every row, or all hold about as many.
            let chosen = top_k.min(held);
            let full: usize = (0..chosen).map(|_| rows.next_multiple_of(ROW_ALIGN)).sum();
            let each = |expert: usize| (rows * chosen + expert) / held;
            let even: usize = (0..held).map(|e| each(e).next_multiple_of(ROW_ALIGN)).sum();
            assert!(full.max(even) <= room, "{rows} {held} {top_k}: {full} {even} of {room}");
        }
    }
}
