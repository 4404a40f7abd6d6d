//! Launches that look at captured states: finiteness and size, and their storage as FP8.

use super::rows::vector_width;
use super::views::MatArg;
use super::{CudaError, DeviceMatrix, DeviceVector, Launcher, Shape, ensure};

/// What is known of some rows of states.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StateStats {
    /// Sum of the squares of the finite values.
    pub sum_squares: f64,
    /// Largest magnitude of the finite values.
    pub absmax: f32,
    /// Values that are NaN or infinite.
    pub non_finite: u32,
}

impl StateStats {
    /// Root of the mean square of `values` values.
    pub fn rms(&self, values: usize) -> f64 {
        (self.sum_squares / values.max(1) as f64).sqrt()
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StatsArgs {
    x: MatArg,
    per_row: u64,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SegmentArgs {
    per_row: u64,
    bounds: u64,
    out: u64,
    segments: u32,
    rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct QuantiseArgs {
    codes: u64,
    codes_stride: i64,
    scales: u64,
    errors: u64,
    x: MatArg,
    rows: u32,
    cols: u32,
}

impl Launcher<'_> {
    /// What is known of each row of `x`: [rows].
    pub fn row_stats(
        &self,
        x: &DeviceMatrix,
        per_row: DeviceVector<StateStats>,
    ) -> Result<(), CudaError> {
        ensure(per_row.len == x.rows, || format!("row_stats of {x:?} in {per_row:?}"))?;
        if x.rows == 0 {
            return Ok(());
        }
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        let args = StatsArgs { x: x.arg(), per_row: per_row.address, rows, cols };
        let width = vector_width(&[x]);
        let name = format!("row_stats_{}_v{width}", x.dtype.name());
        self.launch(&name, Shape::new(x.rows, 256)?, &args)
    }

    /// Sums up the rows `bounds[s]..bounds[s + 1]` of each segment s, a sample of a batch:
    /// `out` [segments], `bounds` [segments + 1]. The order of the sum is fixed.
    pub fn segment_stats(
        &self,
        out: DeviceVector<StateStats>,
        per_row: DeviceVector<StateStats>,
        bounds: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let fits = bounds.len == out.len + 1;
        ensure(fits, || format!("segment_stats of {per_row:?} at {bounds:?} in {out:?}"))?;
        if out.len == 0 {
            return Ok(());
        }
        let args = SegmentArgs {
            per_row: per_row.address,
            bounds: bounds.address,
            out: out.address,
            segments: out.len as u32,
            rows: per_row.len as u32,
        };
        self.launch("segment_stats", Shape::new(out.len, 256)?, &args)
    }

    /// E4M3 codes, rows `codes_stride` bytes apart, and a scale a row: absmax / 448, 0 for a row of
    /// zeros, NaN or infinite for a row that is not finite. `errors`: of a row, in units of its
    /// scale squared, the sums of the squares of (value - code x scale) and of the values.
    pub fn quantise_fp8_rows(
        &self,
        (codes, codes_stride): (DeviceVector<u8>, usize),
        scales: DeviceVector<f32>,
        errors: DeviceVector<[f32; 2]>,
        x: &DeviceMatrix,
    ) -> Result<(), CudaError> {
        let room = x.rows.saturating_sub(1) * codes_stride + x.cols;
        let fits = scales.len == x.rows && errors.len == x.rows;
        let fits = fits && codes_stride >= x.cols && codes.len >= room;
        ensure(fits, || {
            format!("quantise_fp8_rows of {x:?} in {codes:?}, {scales:?}, {errors:?}")
        })?;
        if x.rows == 0 || x.cols == 0 {
            return Ok(());
        }
        let args = QuantiseArgs {
            codes: codes.address,
            codes_stride: codes_stride as i64,
            scales: scales.address,
            errors: errors.address,
            x: x.arg(),
            rows: x.rows as u32,
            cols: x.cols as u32,
        };
        let whole = codes.address.is_multiple_of(8) && codes_stride.is_multiple_of(8);
        let width = if whole { vector_width(&[x]) } else { 1 };
        let name = format!("quantise_fp8_{}_v{width}", x.dtype.name());
        self.launch(&name, Shape::new(x.rows, 256)?, &args)
    }
}
