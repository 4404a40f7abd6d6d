//! Launches that decode quantised weights on the device. Layouts as in [`crate::dequant`]; the
//! rows of all parts may be a slice of a larger matrix.

use super::views::MatArg;
use super::{CudaError, DeviceMatrix, DeviceVector, Launcher, Shape, ensure, grid};

/// A matrix [out, in] of 4-bit integers with 8 added, eight a 32-bit word, the first in the low
/// bits, and a bf16 scale for each `group` of inputs.
#[derive(Clone, Copy, Debug)]
pub struct Int4Weight {
    /// Words, row-major [out, ceil(in / 8)].
    pub packed: DeviceVector<u32>,
    /// bf16 bits, row-major [out, ceil(in / group)].
    pub scale: DeviceVector<u16>,
    /// Inputs that share a scale.
    pub group: usize,
}

/// A matrix [out, in] of E4M3 with an f32 factor for each `block` x `block` square.
#[derive(Clone, Copy, Debug)]
pub struct Fp8BlockWeight {
    /// Codes, row-major [out, in].
    pub weight: DeviceVector<u8>,
    /// Factors, row-major [ceil(out / block), ceil(in / block)].
    pub scale_inv: DeviceVector<f32>,
    /// Side of a square.
    pub block: usize,
}

/// A matrix [out, in] of E2M1, the even column in the low half of a byte, with an E4M3 scale for
/// each 16 inputs and one factor on everything.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4Weight {
    /// Bytes, row-major [out, ceil(in / 2)].
    pub packed: DeviceVector<u8>,
    /// E4M3 codes, row-major [out, ceil(in / 16)].
    pub scale: DeviceVector<u8>,
    /// Factor: `weight_scale_2`, or one over `weight_global_scale`.
    pub global: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DequantArgs {
    out: MatArg,
    packed: u64,
    scale: u64,
    rows: u32,
    cols: u32,
    /// Inputs that share a scale.
    group: u32,
    /// Columns of `scale`.
    scale_cols: u32,
    global: f32,
}

impl Launcher<'_> {
    /// Decodes into `out` [out, in]; every value is rounded to bf16 whatever the type of `out`.
    pub fn dequant_int4(&self, out: &DeviceMatrix, weight: &Int4Weight) -> Result<(), CudaError> {
        let Int4Weight { packed, scale, group } = *weight;
        let [rows, cols] = out.shape();
        let fits = group > 0
            && packed.len == rows * cols.div_ceil(8)
            && scale.len == rows * cols.div_ceil(group);
        ensure(fits, || format!("dequant_int4 of {weight:?} in {out:?}"))?;
        let vectors = group.is_multiple_of(8);
        self.dequant("int4", out, (packed.address, scale.address, 1.0), (group, vectors))
    }

    /// Decodes into `out` [out, in].
    pub fn dequant_fp8_block(
        &self,
        out: &DeviceMatrix,
        weight: &Fp8BlockWeight,
    ) -> Result<(), CudaError> {
        let Fp8BlockWeight { weight: codes, scale_inv, block } = *weight;
        let [rows, cols] = out.shape();
        let fits = block > 0
            && codes.len == rows * cols
            && scale_inv.len == rows.div_ceil(block) * cols.div_ceil(block);
        ensure(fits, || format!("dequant_fp8_block of {weight:?} in {out:?}"))?;
        let vectors = block.is_multiple_of(8) && codes.address.is_multiple_of(8);
        self.dequant("fp8_block", out, (codes.address, scale_inv.address, 1.0), (block, vectors))
    }

    /// Decodes into `out` [out, in].
    pub fn dequant_nvfp4(&self, out: &DeviceMatrix, weight: &Nvfp4Weight) -> Result<(), CudaError> {
        let Nvfp4Weight { packed, scale, global } = *weight;
        let [rows, cols] = out.shape();
        let fits = packed.len == rows * cols.div_ceil(2) && scale.len == rows * cols.div_ceil(16);
        ensure(fits, || format!("dequant_nvfp4 of {weight:?} in {out:?}"))?;
        let vectors = packed.address.is_multiple_of(4);
        self.dequant("nvfp4", out, (packed.address, scale.address, global), (16, vectors))
    }

    fn dequant(
        &self,
        format: &str,
        out: &DeviceMatrix,
        (packed, scale, global): (u64, u64, f32),
        (group, vectors): (usize, bool),
    ) -> Result<(), CudaError> {
        if out.rows == 0 || out.cols == 0 {
            return Ok(());
        }
        let args = DequantArgs {
            out: out.arg(),
            packed,
            scale,
            rows: out.rows as u32,
            cols: out.cols as u32,
            group: group as u32,
            scale_cols: out.cols.div_ceil(group) as u32,
            global,
        };
        let width = if vectors && out.in_vectors() { 8 } else { 1 };
        // Four steps a thread keep enough loads in flight.
        let blocks = grid(out.cols.div_ceil(width).div_ceil(4 * 256))?;
        ensure(blocks <= 65_535, || format!("dequant_{format} in {out:?}"))?;
        let shape = Shape { grid: (grid(out.rows)?, blocks, 1), block: (256, 1, 1), shared: 0 };
        self.launch(&format!("dequant_{format}_{}_v{width}", out.dtype.name()), shape, &args)
    }
}
