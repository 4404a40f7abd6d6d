//! Routed experts on a GPU: weights stay packed; each expert is decoded when its turn comes, while
//! the one before it multiplies. Only the counts of rows come to the host.

use std::sync::{Mutex, PoisonError};

use kernels::cuda::cudarc::driver::CudaEvent;
use kernels::cuda::{
    CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype, Fp8BlockWeight, Int4Weight,
    Launcher, Nvfp4Weight, PinnedBuffer, Product,
};

use super::device::{Device, driver};
use super::gemm::{padded_rows, padding};
use super::routing::Routing;
use crate::target::error::TargetError;
use crate::target::weights::PackedFormat;

/// Experts being prepared and being multiplied.
pub(super) const SLOTS: usize = 2;
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
            PackedFormat::Int4 { group } => launch.dequant_int4(
                out,
                &Int4Weight {
                    packed: DeviceVector::new(code, codes / 4),
                    scale: DeviceVector::new(scale, scales / 2),
                    group,
                },
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
    /// Grouped rows of a batch of `rows`, at most; padding behind the last one included.
    pub(super) fn grouped_rows(&self, rows: usize) -> usize {
        rows * self.top_k.min(self.held) + padding(rows)
    }

    /// Values of each of the work buffers for batches of `rows`: decoded gate and up, decoded
    /// down, inputs, gates and ups, activations (one a slot for the first three), outputs.
    pub(super) fn work(&self, rows: usize) -> [usize; 6] {
        let (rows, all) = (padded_rows(rows), self.grouped_rows(rows));
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
    slots: Vec<Slot>,
    gate_up: DeviceBuffer,
    activation: DeviceBuffer,
    outputs: DeviceBuffer,
    /// Rows a held expert, on the host.
    counts: Mutex<PinnedBuffer>,
    counted: CudaEvent,
    /// The compute stream has reached the experts.
    ready: CudaEvent,
}

struct Slot {
    gate_up: DeviceBuffer,
    down: DeviceBuffer,
    input: DeviceBuffer,
    prepared: CudaEvent,
    used: CudaEvent,
}

impl ExpertWork {
    pub(super) fn new(
        device: &Device,
        sizes: ExpertSizes,
        rows: usize,
    ) -> Result<Self, TargetError> {
        let work = sizes.work(rows).map(|values| values * device.dtype.size());
        let [gate_up, down, input, gates, activation, outputs] = work;
        let take = |bytes| DeviceBuffer::new(&device.context, bytes);
        let make = || {
            let slots = (0..SLOTS).map(|_| {
                Ok::<_, CudaError>(Slot {
                    gate_up: take(gate_up)?,
                    down: take(down)?,
                    input: take(input)?,
                    prepared: device.event()?,
                    used: device.event()?,
                })
            });
            Ok(Self {
                sizes,
                slots: slots.collect::<Result<_, _>>()?,
                gate_up: take(gates)?,
                activation: take(activation)?,
                outputs: take(outputs)?,
                counts: Mutex::new(PinnedBuffer::new(&device.context, sizes.held * 4)?),
                counted: device.event()?,
                ready: device.event()?,
            })
        };
        device.doing("take memory for the experts", make())
    }

    /// Sizes that the buffers were taken for.
    pub(super) fn sizes(&self) -> ExpertSizes {
        self.sizes
    }

    /// Starts to bring the counts of `routing` to the host.
    pub(super) fn start_counts(
        &self,
        device: &Device,
        counts: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let mut pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.start_download(&device.compute, 0, (counts.address, counts.len * 4))?;
        self.counted.record(&device.compute).map_err(driver("record an event"))
    }

    fn counts(&self, device: &Device) -> Result<Vec<usize>, TargetError> {
        device.wait("wait for the counts of the experts", &self.counted)?;
        let pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (counts, _) = pinned.as_slice().as_chunks::<4>();
        Ok(counts.iter().map(|&count| u32::from_le_bytes(count) as usize).collect())
    }

    /// `out += sum of weight * expert(x)` over the held experts.
    pub(super) fn run(
        &self,
        device: &mut Device,
        (out, x): (&DeviceMatrix, &DeviceMatrix),
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
        let result = self.enqueue(device, x, routing, (experts, &counts)).and_then(|()| {
            let outputs = self.outputs(device.dtype, 0..self.sizes.grouped_rows(x.rows));
            let (places, weights) = (routing.permutation.places, routing.views.weights);
            device.launch().combine(out, &outputs, places, weights)
        });
        device.doing("multiply with the experts", result)
    }

    fn enqueue(
        &self,
        device: &mut Device,
        x: &DeviceMatrix,
        routing: &Routing,
        (experts, counts): (&CudaExperts, &[usize]),
    ) -> Result<(), CudaError> {
        self.ready.record(&device.compute).map_err(driver("record an event"))?;
        device.prepare.wait(&self.ready).map_err(driver("order streams"))?;
        let mut start = 0;
        let mut turn = 0;
        for (expert, &count) in counts.iter().enumerate() {
            if count == 0 {
                continue;
            }
            let slot = &self.slots[turn % SLOTS];
            let sources = routing.permutation.sources.range(start..start + count);
            let (gate_up, down) = self.prepare(device, slot, (x, sources), (experts, expert))?;
            self.multiply(device, slot, (start, count), (&gate_up, &down))?;
            start += count;
            turn += 1;
        }
        Ok(())
    }

    /// Gathers an expert's rows and decodes its weights, beside the products of the one before.
    fn prepare(
        &self,
        device: &Device,
        slot: &Slot,
        (x, sources): (&DeviceMatrix, DeviceVector<u32>),
        (experts, index): (&CudaExperts, usize),
    ) -> Result<(DeviceMatrix, DeviceMatrix), CudaError> {
        device.prepare.wait(&slot.used).map_err(driver("order streams"))?;
        let launch = device.kernels.on(&device.prepare);
        let input = slot.input.matrix([sources.len, self.sizes.hidden], device.dtype);
        launch.gather_rows(&input, x, sources)?;
        let dtype = device.dtype;
        let gate_up = experts.gate_up.decoded(&launch, (2 * index, 2), &slot.gate_up, dtype)?;
        let down = experts.down.decoded(&launch, (index, 1), &slot.down, dtype)?;
        slot.prepared.record(&device.prepare).map_err(driver("record an event"))?;
        Ok((gate_up, down))
    }

    /// The three products of one expert. Rows behind its own hold nothing that is read: the next
    /// expert's outputs overwrite those of this one.
    fn multiply(
        &self,
        device: &mut Device,
        slot: &Slot,
        (start, count): (usize, usize),
        (gate_up, down): (&DeviceMatrix, &DeviceMatrix),
    ) -> Result<(), CudaError> {
        let ExpertSizes { columns, hidden, .. } = self.sizes;
        let (rows, dtype) = (padded_rows(count), device.dtype);
        device.compute.wait(&slot.prepared).map_err(driver("order streams"))?;
        let input = slot.input.matrix([rows, hidden], dtype);
        let both = self.gate_up.matrix([rows, 2 * columns], dtype);
        device.blas.matmul(&both, &input, gate_up, Product::LINEAR)?;
        let activation = self.activation.matrix([rows, columns], dtype);
        let (gate, up) = (both.columns(0..columns), both.columns(columns..2 * columns));
        device.launch().silu_mul(&activation, &gate, &up)?;
        let output = self.outputs(dtype, start..start + rows);
        device.blas.matmul(&output, &activation, down, Product::LINEAR)?;
        slot.used.record(&device.compute).map_err(driver("record an event"))
    }

    fn outputs(&self, dtype: Dtype, rows: std::ops::Range<usize>) -> DeviceMatrix {
        let hidden = self.sizes.hidden;
        self.outputs.matrix([rows.end, hidden], dtype).row_range(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every expert's padded rows fit behind the rows before it, however the rows are spread.
    #[test]
    fn padded_outputs_stay_inside() {
        for (rows, held, top_k) in [(1, 4, 2), (7, 3, 2), (100, 48, 8), (4096, 48, 8), (50, 1, 1)] {
            let sizes =
                ExpertSizes { first: 0, held, columns: 8, hidden: 4, top_k, num_experts: 384 };
            let room = sizes.grouped_rows(rows);
            let mut start = 0;
            // The worst case: as many experts as may be chosen hold every row.
            for _ in 0..top_k.min(held) {
                assert!(start + padded_rows(rows) <= room, "{rows} {held} {top_k}");
                start += rows;
            }
            // One row in the last place.
            for count in 1..=rows {
                let start = rows * top_k.min(held) - count;
                assert!(start + padded_rows(count) <= room, "{count} of {rows}");
            }
        }
    }
}
