//! Plain-Rust twins of the CUDA kernels that the CPU engine does without: grouping of rows by
//! expert, weighted sums, statistics and FP8 form of rows, latent heads. Written to be read, and
//! compared with; knows nothing of devices.

use crate::dequant::e4m3_to_f32;

/// Largest finite E4M3 number.
pub const E4M3_MAX: f32 = 448.0;

/// Rows grouped by expert; see [`group_by_expert`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grouped {
    /// Rows of each held expert.
    pub counts: Vec<u32>,
    /// Where the rows of each held expert start, and the total: [held + 1].
    pub offsets: Vec<u32>,
    /// Row of x of each grouped row.
    pub sources: Vec<u32>,
    /// Grouped row of every (row, choice); `u32::MAX` where the expert is not held.
    pub places: Vec<u32>,
}

/// Groups the choices `indices` [rows, top_k] by expert, for the `held` experts from `first` on.
/// Within an expert rows keep their order; the first is at a multiple of `align`, and between
/// experts `sources` is 0.
pub fn group_by_expert(
    indices: &[u32],
    top_k: usize,
    (first, held): (u32, usize),
    align: u32,
) -> Grouped {
    let expert_of = |choice: u32| choice.checked_sub(first).filter(|&e| (e as usize) < held);
    let mut counts = vec![0u32; held];
    for expert in indices.iter().filter_map(|&choice| expert_of(choice)) {
        counts[expert as usize] += 1;
    }
    let mut offsets = vec![0; held + 1];
    for expert in 0..held {
        offsets[expert + 1] = offsets[expert] + counts[expert].next_multiple_of(align);
    }
    let mut next = offsets.clone();
    let mut sources = vec![0; offsets[held] as usize];
    let mut places = Vec::with_capacity(indices.len());
    for (i, &choice) in indices.iter().enumerate() {
        places.push(expert_of(choice).map_or(u32::MAX, |expert| {
            let place = next[expert as usize];
            next[expert as usize] += 1;
            sources[place as usize] = (i / top_k) as u32;
            place
        }));
    }
    Grouped { counts, offsets, sources, places }
}

/// `x += sum of the parts`, or `x =` where it is `fresh`: the sum is taken in the order of the
/// parts before it meets `x`.
pub fn add_parts(x: &mut [f32], parts: &[&[f32]], fresh: bool) {
    for (i, x) in x.iter_mut().enumerate() {
        let sum = parts.iter().fold(0.0, |sum, part| sum + part[i]);
        *x = if fresh { sum } else { *x + sum };
    }
}

/// `out[r] += sum over k of weights[r, k] * x[places[r, k]]` over rows of `width` values, leaving
/// out places of `u32::MAX`; the sum runs in the order of k.
pub fn combine(out: &mut [f32], x: &[f32], places: &[u32], weights: &[f32], width: usize) {
    let top_k = places.len() / (out.len() / width).max(1);
    for (r, out) in out.chunks_exact_mut(width).enumerate() {
        for k in r * top_k..(r + 1) * top_k {
            if places[k] == u32::MAX {
                continue;
            }
            let row = &x[places[k] as usize * width..][..width];
            out.iter_mut().zip(row).for_each(|(out, x)| *out += weights[k] * x);
        }
    }
}

/// Sum of squares and largest magnitude of the finite values, and the number of the others.
pub fn stats(x: &[f32]) -> (f64, f32, u32) {
    x.iter().fold((0.0, 0.0, 0), |(sum, absmax, non_finite), &x| {
        if x.is_finite() {
            (sum + f64::from(x) * f64::from(x), f32::max(absmax, x.abs()), non_finite)
        } else {
            (sum, absmax, non_finite + 1)
        }
    })
}

/// The nearest E4M3 code, of two equally near ones the even; magnitudes above 448 become 448, NaN
/// stays NaN. By search among all codes.
pub fn f32_to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7F;
    }
    let magnitude = f64::from(x.abs().min(E4M3_MAX));
    let distance = |code: u8| (f64::from(e4m3_to_f32(code)) - magnitude).abs();
    let nearest = (0..0x7F_u8)
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
    sign | nearest.unwrap_or(0)
}

/// Codes and scales (absmax / 448; 0 for a row of zeros, not finite for a row that is not) of rows
/// of `width` values.
pub fn quantise_fp8_rows(x: &[f32], width: usize) -> (Vec<u8>, Vec<f32>) {
    let mut codes = Vec::with_capacity(x.len());
    let mut scales = Vec::new();
    for row in x.chunks_exact(width) {
        let absmax = match row.iter().any(|x| x.is_nan()) {
            true => f32::NAN,
            false => row.iter().fold(0.0, |most, x| f32::max(most, x.abs())),
        };
        let scale = absmax / E4M3_MAX;
        scales.push(scale);
        codes.extend(row.iter().map(|x| if scale == 0.0 { 0 } else { f32_to_e4m3(x / scale) }));
    }
    (codes, scales)
}

/// Of each row of `width` values, in units of its scale squared: the sums of the squares of
/// (value - code x scale) and of the values.
pub fn fp8_errors(x: &[f32], (codes, scales): (&[u8], &[f32]), width: usize) -> Vec<[f32; 2]> {
    let rows = x.chunks_exact(width).zip(codes.chunks_exact(width)).zip(scales);
    rows.map(|((x, codes), &scale)| {
        let (mut lost, mut squares) = (0.0, 0.0);
        for (x, &code) in x.iter().zip(codes) {
            let value = if scale == 0.0 { 0.0 } else { x / scale };
            lost += f64::from(value - e4m3_to_f32(code)).powi(2);
            squares += f64::from(value).powi(2);
        }
        [lost as f32, squares as f32]
    })
    .collect()
}

/// Keys [rows, heads, nope + rope] and values [rows, heads, v] from `kv` [rows, heads, nope + v]
/// and `k_pe` [rows, rope], `dims` being heads, nope, rope, v.
pub fn expand_latent(
    kv: &[f32],
    k_pe: &[f32],
    [heads, nope, rope, v]: [usize; 4],
) -> (Vec<f32>, Vec<f32>) {
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (kv, k_pe) in kv.chunks_exact(heads * (nope + v)).zip(k_pe.chunks_exact(rope)) {
        for head in kv.chunks_exact(nope + v) {
            keys.extend_from_slice(&head[..nope]);
            keys.extend_from_slice(k_pe);
            values.extend_from_slice(&head[nope..]);
        }
    }
    (keys, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_the_order_of_rows() {
        let grouped = group_by_expert(&[3, 1, 2, 3, 0, 2], 2, (2, 2), 1);
        assert_eq!(grouped.counts, [2, 2]);
        assert_eq!(grouped.offsets, [0, 2, 4]);
        assert_eq!(grouped.sources, [1, 2, 0, 1]);
        assert_eq!(grouped.places, [2, u32::MAX, 0, 3, u32::MAX, 1]);
        let aligned = group_by_expert(&[3, 1, 2, 3, 0, 2], 2, (2, 2), 4);
        assert_eq!(aligned.offsets, [0, 4, 8]);
        assert_eq!(aligned.sources, [1, 2, 0, 0, 0, 1, 0, 0]);
        assert_eq!(aligned.places, [4, u32::MAX, 0, 5, u32::MAX, 1]);
    }

    #[test]
    fn e4m3_codes_are_their_own_nearest() {
        for code in (0..=255u8).filter(|code| code & 0x7F != 0x7F) {
            assert_eq!(f32_to_e4m3(e4m3_to_f32(code)), code);
        }
        // Halfway between 1.0 (0x38) and 1.125 (0x39), and between 1.125 and 1.25 (0x3A).
        assert_eq!((f32_to_e4m3(1.0625), f32_to_e4m3(1.1875)), (0x38, 0x3A));
        assert_eq!((f32_to_e4m3(1e9), f32_to_e4m3(-1e9)), (0x7E, 0xFE));
    }

    #[test]
    fn rows_of_zeros_and_of_nan_show_in_their_scales() {
        let (codes, scales) = quantise_fp8_rows(&[0.0, 0.0, 1.0, f32::NAN, -2.0, 1.0], 2);
        assert_eq!(codes[..2], [0, 0]);
        assert_eq!(codes[4..], [0xFE, 0x76]);
        assert!(scales[0] == 0.0 && scales[1].is_nan() && scales[2] == 2.0 / 448.0);
    }

    #[test]
    fn not_finite_values_are_counted_and_left_out() {
        assert_eq!(stats(&[3.0, f32::NAN, -4.0, f32::INFINITY]), (25.0, 4.0, 2));
    }
}
