//! Root-mean-square norm of rows. Knows nothing of where the rows come from.

use crate::simd::{multiply_add, multiversion};

const LANES: usize = 32;

/// `out[r] = weight * x[r] / sqrt(mean(x[r]^2) + eps)` for rows of `weight.len()` elements.
pub fn rms_norm(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert!(!weight.is_empty(), "rms_norm: the weight is empty");
    assert_eq!(out.len(), x.len(), "rms_norm: out and x differ in length");
    assert_eq!(x.len() % weight.len(), 0, "rms_norm: x does not hold whole rows");
    rms_norm_rows(out, x, weight, eps);
}

multiversion! {
    fn rms_norm_rows(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) = rms_norm_body
}

#[inline(always)]
fn rms_norm_body<const FUSED: bool>(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
        let mean = sum_of_squares::<FUSED>(x) / width as f64;
        let factor = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
        for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
            *out = weight * (x * factor);
        }
    }
}

/// Each of 32 lanes adds a 32nd of the squares, so even wide rows lose next to nothing.
#[inline(always)]
fn sum_of_squares<const FUSED: bool>(x: &[f32]) -> f64 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = multiply_add::<FUSED>(chunk[lane], chunk[lane], lanes[lane]);
        }
    }
    let mut sum = 0.0f64;
    for lane in lanes {
        sum += f64::from(lane);
    }
    for &x in rest {
        sum += f64::from(x) * f64::from(x);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rms_norm_slow(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
        x.chunks(weight.len())
            .flat_map(|row| {
                let mean =
                    row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
                row.iter()
                    .zip(weight)
                    .map(move |(&v, &w)| f64::from(w) * f64::from(v) / (mean + eps).sqrt())
            })
            .collect()
    }

    fn shape() -> impl Strategy<Value = (Vec<f32>, Vec<f32>)> {
        (0usize..5, 1usize..200).prop_flat_map(|(rows, width)| {
            (
                prop::collection::vec(-30f32..30.0, rows * width),
                prop::collection::vec(-2f32..2.0, width),
            )
        })
    }

    proptest! {
        #[test]
        fn matches_f64((x, weight) in shape(), eps in 1e-6f32..1e-3) {
            let mut out = vec![0.0; x.len()];
            rms_norm(&mut out, &x, &weight, eps);
            for (&got, want) in out.iter().zip(rms_norm_slow(&x, &weight, f64::from(eps))) {
                prop_assert!((f64::from(got) - want).abs() <= want.abs() * 4e-7 + 1e-9);
            }
        }
    }

    /// A row as wide as Kimi's, with one value that dwarfs the others.
    #[test]
    fn wide_rows_keep_their_precision() {
        let mut x: Vec<f32> = (0..7168).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
        x[3000] = 900.0;
        let weight = vec![1.0; x.len()];
        let mut out = vec![0.0; x.len()];
        rms_norm(&mut out, &x, &weight, 1e-5);
        for (&got, want) in out.iter().zip(rms_norm_slow(&x, &weight, 1e-5)) {
            assert!((f64::from(got) - want).abs() <= want.abs() * 3e-7);
        }
    }

    #[test]
    fn a_zero_row_stays_zero() {
        let mut out = [1.0; 4];
        rms_norm(&mut out, &[0.0; 4], &[1.0; 4], 1e-6);
        assert_eq!(out, [0.0; 4]);
    }
}
