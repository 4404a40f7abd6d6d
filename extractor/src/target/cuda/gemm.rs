//! Products on a GPU. Knows no model.

use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::cudarc::driver::{CudaStream, sys::CUevent_flags};
use kernels::cuda::{Blas, CudaError, DeviceBuffer, DeviceMatrix, Dtype, Product};

use super::CudaOps;
use super::buffer::{CudaBuffer, CudaLinear};
use super::device::driver;
use crate::target::ops::{Rows, Write};

/// What cuBLASLt wants on Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Rows that a product of `rows` rows computes: a few more, so that batches of many lengths share
/// their plans. At most one row in 64 is idle; those rows hold nothing that is read.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(padding(rows))
}

/// More rows than [`padded_rows`] adds to `rows` or fewer.
fn padding(rows: usize) -> usize {
    (rows.next_power_of_two() / 64).max(8)
}

impl CudaOps {
    /// `out = x weight^T`, or `out +=`.
    pub(super) fn product(
        &mut self,
        out: &mut CudaBuffer,
        Rows { of: x, range }: Rows<'_, CudaBuffer>,
        weight: &CudaLinear,
        write: Write,
    ) -> Result<(), CudaError> {
        let input = weight.input;
        let range = range.unwrap_or(0..x.len() / input.max(1));
        let (first, rows) = (range.start, range.len());
        let product = match write {
            Write::Set => {
                out.set_len(rows * weight.out)?;
                Product::LINEAR
            }
            Write::Add => Product::ADD_LINEAR,
        };
        // Few rows, or buffers that grow, have no room for padding.
        let padded = padded_rows(rows);
        let views = x.padded(first + padded, input).and_then(|x| {
            let out = out.padded(padded, weight.out)?;
            Ok((out, x.row_range(first..first + padded)))
        });
        let exact = || (out.rows(weight.out), x.rows(input).row_range(range));
        let (out, x) = views.unwrap_or_else(|_| exact());
        self.device.products().matmul(&out, &x, &weight.matrix(), product)
    }
}

/// bf16 products of 8192 x 8192 x 8192 in TFLOP/s: what no product of this GPU exceeds. On random
/// values, in bursts and pauses as long as a bench's batches: a GPU at its power limit multiplies
/// zeros, or repeats of a pattern, faster than anything else, and after a pause more than for long.
pub(super) fn ceiling(blas: &mut Blas, stream: &Arc<CudaStream>) -> Result<f64, CudaError> {
    const SIDE: usize = 8192;
    const REPEATS: usize = 60;
    const BURSTS: usize = 3;
    let bytes = SIDE * SIDE * 2;
    let (a, b) = (random(stream, SIDE * SIDE, 1)?, random(stream, SIDE * SIDE, 2)?);
    let out = DeviceBuffer::new(stream.context(), bytes)?;
    let [a, b, out]: [DeviceMatrix; 3] =
        [&a, &b, &out].map(|buffer| buffer.matrix([SIDE, SIDE], Dtype::Bf16));
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let (start, end) = (event().map_err(driver("event"))?, event().map_err(driver("event"))?);
    let mut times = Vec::with_capacity(BURSTS);
    for _ in 0..=BURSTS {
        std::thread::sleep(Duration::from_millis(100));
        start.record(stream).map_err(driver("record an event"))?;
        for _ in 0..REPEATS {
            blas.matmul(&out, &a, &b, Product::LINEAR)?;
        }
        end.record(stream).map_err(driver("record an event"))?;
        times.push(start.elapsed_ms(&end).map_err(driver("time the ceiling"))?);
    }
    // The first burst warms up.
    let mut timed = times.split_off(1);
    timed.sort_by(f32::total_cmp);
    let seconds = f64::from(timed[BURSTS / 2]) / 1e3;
    Ok(2.0 * (SIDE as f64).powi(3) * REPEATS as f64 / seconds / 1e12)
}

/// `len` values in bf16, about normal with variance 1: sums of four.
fn random(stream: &CudaStream, len: usize, seed: u64) -> Result<DeviceBuffer, CudaError> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let values: Vec<half::bf16> = (0..len)
        .map(|_| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let parts = [0, 16, 32, 48].map(|shift| f32::from((state >> shift) as u16));
            let sum = parts.iter().sum::<f32>() / 65_536.0 - 2.0;
            half::bf16::from_f32(sum * 1.732)
        })
        .collect();
    DeviceBuffer::from_slice(stream, &values)
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
