//! Routed experts on a GPU: weights stay packed, and are decoded inside the products where there is
//! a kernel for that ([`super::grouped`]), else one expert after the other ([`super::lanes`]).

use std::ops::Range;

use kernels::cuda::{
    CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype, EXPERT_ALIGN, ExpertWeights,
    Fp8BlockWeight, Int4Weight, Launcher, Nvfp4Weight, copy_on_device,
};

use super::device::{Device, driver};
use super::grouped::Grouped;
use super::lanes::Lanes;
use super::routing::Routing;
use crate::target::error::TargetError;
use crate::target::weights::PackedFormat;

/// Blocks that decode weights, one a multiprocessor of an H200. Fewer would leave the others to
/// products, but were slower: the products of an expert then wait for its weights.
const DECODING: usize = 132;
/// Rows of every expert start at a multiple of this, so that products of many sizes share plans.
pub(super) const ROW_ALIGN: usize = EXPERT_ALIGN;
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
    pub(super) fn decoded(
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

    /// Puts codes and scales in the order in which products that decode them want them; `parts`
    /// neighbouring matrices, gate and up, become one.
    pub(super) fn order(&self, device: &Device, parts: usize) -> Result<(), CudaError> {
        let PackedFormat::Int4 { group } = self.format else { return Ok(()) };
        let [out, input] = self.dims;
        let dims = [parts * out, input];
        let (codes, scales) = (self.format.code_bytes(dims), self.format.scale_bytes(dims));
        let stream = &device.compute;
        let room = DeviceBuffer::new(&device.context, codes + scales)?;
        let from = Int4Weight {
            packed: DeviceVector::new(room.address(), codes / 4),
            scale: DeviceVector::new(room.address() + codes as u64, scales / 2),
            group,
        };
        for index in 0..self.factors.len() / parts {
            let code = self.codes.address() + (index * codes) as u64;
            let scale = self.scales.address() + (index * scales) as u64;
            copy_on_device(stream, from.packed.address, code, codes)?;
            copy_on_device(stream, from.scale.address, scale, scales)?;
            let to = (DeviceVector::new(code, codes / 4), DeviceVector::new(scale, scales / 2));
            device.launch().order_int4(to, &from, dims, parts > 1)?;
        }
        stream.synchronize().map_err(driver("order the experts"))
    }

    /// The matrices after [`Stack::order`].
    pub(super) fn ordered(&self, parts: usize) -> ExpertWeights {
        let [out, input] = self.dims;
        ExpertWeights {
            codes: self.codes.vector(self.codes.bytes() / 4),
            scales: self.scales.vector(self.scales.bytes() / 2),
            experts: self.factors.len() / parts,
            out: parts * out,
            input,
        }
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
    /// Whether the weights of all layers are decoded inside the products.
    pub(super) grouped: bool,
}

impl ExpertSizes {
    /// Grouped rows of a batch of `rows`, at most; the idle ones behind each expert included.
    pub(super) fn grouped_rows(&self, rows: usize) -> usize {
        let chosen = rows * self.top_k.min(self.held);
        chosen + self.held.min(chosen) * (ROW_ALIGN - 1)
    }

    /// Values of the work buffers for batches of `rows`.
    pub(super) fn work(&self, rows: usize) -> usize {
        match self.grouped {
            true => Grouped::values(self, rows).iter().sum(),
            false => Lanes::values(self, rows),
        }
    }
}

/// Buffers of the experts' work, taken once.
pub(super) struct ExpertWork {
    sizes: ExpertSizes,
    way: Way,
    /// What the last run computed.
    outputs: Option<DeviceMatrix>,
}

enum Way {
    Grouped(Grouped),
    Lanes(Lanes),
}

impl ExpertWork {
    pub(super) fn new(
        device: &Device,
        sizes: ExpertSizes,
        rows: usize,
    ) -> Result<Self, TargetError> {
        let way = match sizes.grouped {
            true => Grouped::new(device, sizes, rows).map(Way::Grouped),
            false => Lanes::new(device, sizes, rows).map(Way::Lanes),
        };
        let way = device.doing("take memory for the experts", way)?;
        Ok(Self { sizes, way, outputs: None })
    }

    /// Sizes that the buffers were taken for.
    pub(super) fn sizes(&self) -> ExpertSizes {
        self.sizes
    }

    /// Starts to bring the counts of a routing to the host, where they are needed there.
    pub(super) fn start_counts(
        &self,
        device: &Device,
        counts: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        match &self.way {
            Way::Grouped(_) => Ok(()),
            Way::Lanes(lanes) => lanes.start_counts(device, counts),
        }
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
        let outputs = match &mut self.way {
            Way::Lanes(lanes) => lanes.run(device, x, routing, experts)?,
            Way::Grouped(grouped) => {
                let outputs = grouped.run(device, x, routing, experts);
                device.doing("multiply with the experts", outputs)?
            }
        };
        self.outputs = Some(outputs);
        Ok(())
    }

    /// `out += sum of weight * expert(x)` for `rows` of those of the last run.
    pub(super) fn combine(
        &self,
        device: &Device,
        out: &DeviceMatrix,
        routing: &Routing,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        let Some(outputs) = &self.outputs else {
            return Err(CudaError::Shape("experts summed before they are computed".to_owned()));
        };
        let choices = rows.start * self.sizes.top_k..rows.end * self.sizes.top_k;
        let places = routing.permutation.places.range(choices.clone());
        let weights = routing.views.weights.range(choices);
        device.launch().combine(out, outputs, places, weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every expert's rows fit with the idle ones behind them, however the rows are spread.
    #[test]
    fn aligned_outputs_stay_inside() {
        for (rows, held, top_k) in [(1, 4, 2), (7, 3, 2), (100, 48, 8), (4096, 48, 8), (50, 1, 1)] {
            let sizes = ExpertSizes {
                first: 0,
                held,
                columns: 8,
                hidden: 4,
                top_k,
                num_experts: 384,
                grouped: false,
            };
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
