//! Products on a GPU. Knows no model.

use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::cudarc::driver::{CudaStream, sys::CUevent_flags};
use kernels::cuda::{Blas, CudaError, DeviceBuffer, DeviceMatrix, Dtype, Product};

use super::CudaOps;
use super::buffer::{CudaBuffer, CudaLinear};
use super::device::driver;
use crate::target::ops::Write;

/// What cuBLASLt wants on Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Rows that a product of `rows` rows computes: a few more, so that batches of many lengths share
/// their plans. At most one row in 64 is idle; those rows hold nothing that is read.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(padding(rows))
}

/// More rows than [`padded_rows`] adds to `rows` or fewer.
pub(super) fn padding(rows: usize) -> usize {
    (rows.next_power_of_two() / 64).max(8)
}

impl CudaOps {
    /// `out = x weight^T`, or `out +=`.
    pub(super) fn product(
        &mut self,
        out: &mut CudaBuffer,
        x: &CudaBuffer,
        weight: &CudaLinear,
        write: Write,
    ) -> Result<(), CudaError> {
        let rows = x.len() / weight.input.max(1);
        let product = match write {
            Write::Set => {
                out.set_len(rows * weight.out)?;
                Product::LINEAR
            }
            Write::Add => Product::ADD_LINEAR,
        };
        // Few rows, or buffers that grow, have no room for padding.
        let padded = padded_rows(rows);
        let views = x.padded(padded, weight.input).and_then(|x| {
            let out = out.padded(padded, weight.out)?;
            Ok((out, x))
        });
        let (out, x) = views.unwrap_or((out.rows(weight.out), x.rows(weight.input)));
        self.device.blas.matmul(&out, &x, &weight.matrix(), product)
    }
}

/// bf16 products of 8192 x 8192 x 8192 in TFLOP/s: what no product of this GPU exceeds.
pub(super) fn ceiling(blas: &mut Blas, stream: &Arc<CudaStream>) -> Result<f64, CudaError> {
    const SIDE: usize = 8192;
    const REPEATS: usize = 10;
    let bytes = SIDE * SIDE * 2;
    // Values between -1 and 1: power, and with it the clock, depends on what is multiplied.
    let values: Vec<u16> = (0..SIDE * SIDE)
        .map(|index| {
            let bits = (index as u32).wrapping_mul(2_654_435_761) >> 16;
            (bits as u16 & 0x80ff) | 0x3f00
        })
        .collect();
    let a = DeviceBuffer::from_slice(stream, &values)?;
    let b = DeviceBuffer::from_slice(stream, &values)?;
    let out = DeviceBuffer::new(stream.context(), bytes)?;
    let [a, b, out]: [DeviceMatrix; 3] =
        [&a, &b, &out].map(|buffer| buffer.matrix([SIDE, SIDE], Dtype::Bf16));
    for _ in 0..3 {
        blas.matmul(&out, &a, &b, Product::LINEAR)?;
    }
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let (start, end) = (event().map_err(driver("event"))?, event().map_err(driver("event"))?);
    start.record(stream).map_err(driver("record an event"))?;
    for _ in 0..REPEATS {
        blas.matmul(&out, &a, &b, Product::LINEAR)?;
    }
    end.record(stream).map_err(driver("record an event"))?;
    let milliseconds = start.elapsed_ms(&end).map_err(driver("time the ceiling"))?;
    let time = Duration::from_secs_f64(f64::from(milliseconds) / 1e3);
    Ok(2.0 * (SIDE as f64).powi(3) * REPEATS as f64 / time.as_secs_f64() / 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_wastes_little_and_leaves_few_shapes() {
        let mut shapes = std::collections::HashSet::new();
        for rows in 1..=65_536_usize {
            let padded = padded_rows(rows);
            assert!(padded >= rows);
            assert!(padded - rows <= (rows / 32).max(7), "{rows} -> {padded}");
            assert_eq!(padded_rows(padded), padded);
            shapes.insert(padded);
        }
        assert!(shapes.len() < 600, "{}", shapes.len());
    }
}
