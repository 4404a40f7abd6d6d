//! Exponential, sigmoid and the gated SiLU of transformer MLPs. Knows nothing of layers.

use crate::simd::{multiply_add, multiversion};

// Above HIGHEST the result exceeds f32, below LOWEST it rounds to zero.
const HIGHEST: f32 = 88.722_84;
const LOWEST: f32 = -103.972_08;

/// e^x to within 2e-7 relative (subnormal results: within half a step); infinite above 88.72,
/// NaN for NaN. Written without branches so that loops over it become vector code.
#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUNDER: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Comparisons, not min and max: those would turn NaN into a number.
    let clamped = if x < LOWEST { LOWEST } else { x };
    let clamped = if clamped > HIGHEST { HIGHEST } else { clamped };
    let shifted = multiply_add::<FUSED>(clamped, std::f32::consts::LOG2_E, ROUNDER);
    let whole = shifted - ROUNDER;
    let power = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let rest = multiply_add::<FUSED>(whole, -LN_2_HIGH, clamped);
    let rest = multiply_add::<FUSED>(whole, -LN_2_LOW, rest);
    // Minimax polynomial of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2.
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = multiply_add::<FUSED>(p, rest, c);
    }
    let y = multiply_add::<FUSED>(p * rest, rest, rest) + 1.0;
    // Two halves, because 2^128 and 2^-149 have no single normal factor.
    let half = power >> 1;
    let y = y * power_of_two(half) * power_of_two(power.wrapping_sub(half));
    let y = if x < LOWEST { 0.0 } else { y };
    if x > HIGHEST { f32::INFINITY } else { y }
}

#[inline(always)]
fn power_of_two(power: i32) -> f32 {
    f32::from_bits((power.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
fn silu_mul_body<const FUSED: bool>(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp::<FUSED>(-*gate)) * up;
    }
}

multiversion! {
    fn silu_mul_dispatch(gate: &mut [f32], up: &[f32]) = silu_mul_body
}

/// `gate = silu(gate) * up`, element by element; both of the same length. Gates below -88.7, whose
/// SiLU is smaller than 1e-36, give zero.
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "silu_mul: gate and up differ in length");
    silu_mul_dispatch(gate, up);
}

#[inline(always)]
fn exp_body<const FUSED: bool>(x: &mut [f32]) {
    for x in x {
        *x = exp::<FUSED>(*x);
    }
}

multiversion! {
    /// e^x of every element in place, to within 2e-7 relative.
    pub fn exp_in_place(x: &mut [f32]) = exp_body
}

#[inline(always)]
fn sigmoid_body<const FUSED: bool>(x: &mut [f32]) {
    for x in x {
        *x = 1.0 / (1.0 + exp::<FUSED>(-*x));
    }
}

multiversion! {
    /// 1 / (1 + e^-x) of every element in place.
    pub fn sigmoid_in_place(x: &mut [f32]) = sigmoid_body
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn exp_one(x: f32) -> f32 {
        let mut v = [x];
        exp_in_place(&mut v);
        v[0]
    }

    /// Every 1,021st bit pattern: about four million numbers of both signs and all magnitudes.
    #[test]
    fn exp_is_accurate_over_all_magnitudes() {
        let mut worst = 0.0f64;
        let patterns: Vec<u32> = (0..=u32::MAX).step_by(1021).collect();
        let mut values: Vec<f32> = patterns.iter().map(|&b| f32::from_bits(b)).collect();
        let inputs = values.clone();
        exp_in_place(&mut values);
        for (&x, &got) in inputs.iter().zip(&values) {
            let want = f64::from(x).exp();
            if x.is_nan() {
                assert!(got.is_nan());
            } else if want > f64::from(f32::MAX) {
                assert!(got.is_infinite() || want < 3.402_824e38, "exp({x}) = {got}");
            } else if want < f64::from(f32::MIN_POSITIVE) {
                assert!((f64::from(got) - want).abs() <= 1.5e-45, "exp({x}) = {got}, not {want}");
            } else {
                worst = worst.max((f64::from(got) - want).abs() / want);
            }
        }
        assert!(worst < 2e-7, "worst relative error {worst}");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp_one(0.0), 1.0);
        assert_eq!(exp_one(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_one(f32::INFINITY), f32::INFINITY);
        assert!(exp_one(f32::NAN).is_nan());
    }

    /// The baseline body is what machines without FMA run.
    #[test]
    fn exp_without_fma_is_as_accurate() {
        for i in -1000..880 {
            let x = i as f32 * 0.1;
            let want = f64::from(x).exp();
            let got = f64::from(exp::<false>(x));
            assert!((got - want).abs() <= want * 2e-7 + 1.5e-45, "exp({x}) = {got}, not {want}");
        }
    }

    proptest! {
        #[test]
        fn silu_mul_matches_f64(pairs in prop::collection::vec((-90f32..90.0, -4f32..4.0), 0..70)) {
            let mut gate: Vec<f32> = pairs.iter().map(|p| p.0).collect();
            let up: Vec<f32> = pairs.iter().map(|p| p.1).collect();
            silu_mul(&mut gate, &up);
            for (&got, &(g, u)) in gate.iter().zip(&pairs) {
                let g = f64::from(g);
                let want = g / (1.0 + (-g).exp()) * f64::from(u);
                prop_assert!((f64::from(got) - want).abs() <= want.abs() * 5e-7 + 1e-35);
            }
        }

        #[test]
        fn sigmoid_matches_f64(x in -100f32..100.0) {
            let mut v = [x];
            sigmoid_in_place(&mut v);
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            prop_assert!((f64::from(v[0]) - want).abs() <= want * 4e-7 + 1e-37);
        }
    }
}
