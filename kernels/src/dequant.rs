//! Decodes quantised weights into f32: INT4 with group scales, FP8 with block scales, NVFP4.
//! Knows the layouts of the stored bytes, but nothing of files or names.
//!
//! Every function decodes one region of a matrix and touches only the bytes of its rows.

use std::ops::Range;

use crate::simd::multiversion;

/// Rows and columns of a matrix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Rows, of the outputs.
    pub rows: Range<usize>,
    /// Columns, of the inputs.
    pub cols: Range<usize>,
}

impl Region {
    /// All of a matrix of shape [rows, columns].
    pub fn full([rows, cols]: [usize; 2]) -> Self {
        Self { rows: 0..rows, cols: 0..cols }
    }

    /// Elements in the region.
    pub fn elements(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    fn assert_inside(&self, [rows, cols]: [usize; 2], out: usize) {
        assert!(self.rows.end <= rows && self.rows.start <= self.rows.end, "dequant: rows");
        assert!(self.cols.end <= cols && self.cols.start <= self.cols.end, "dequant: columns");
        assert_eq!(out, self.elements(), "dequant: out does not hold the region");
    }
}

/// A matrix [out, in] of 4-bit integers with one bf16 scale for `group` neighbouring inputs.
#[derive(Clone, Copy, Debug)]
pub struct Int4PackQuantized<'a> {
    /// Little-endian 32-bit words [out, ceil(in / 8)]; element `i` of a word in bits `4i..4i + 4`,
    /// stored with 8 added.
    pub packed: &'a [u8],
    /// Little-endian bf16 [out, ceil(in / group)].
    pub scale: &'a [u8],
    /// [out, in].
    pub shape: [usize; 2],
    /// Inputs that share a scale.
    pub group: usize,
}

/// Decodes a region of `weight` into the row-major `out`; every value is rounded to bf16, as the
/// engines that serve these checkpoints round it.
pub fn int4_pack_quantized(out: &mut [f32], weight: &Int4PackQuantized<'_>, region: &Region) {
    let Int4PackQuantized { packed, scale, shape: [rows, cols], group } = *weight;
    region.assert_inside([rows, cols], out.len());
    assert!(group > 0, "dequant: groups of no elements");
    let (row_bytes, row_scales) = (cols.div_ceil(8) * 4, cols.div_ceil(group));
    assert_eq!(packed.len(), rows * row_bytes, "dequant: bytes of packed");
    assert_eq!(scale.len(), rows * row_scales * 2, "dequant: bytes of scale");
    if region.cols.is_empty() {
        return;
    }
    for (out, row) in out.chunks_exact_mut(region.cols.len()).zip(region.rows.clone()) {
        let packed = &packed[row * row_bytes..][..row_bytes];
        let (scales, _) = scale[row * row_scales * 2..][..row_scales * 2].as_chunks::<2>();
        int4_row(out, packed, scales, (region.cols.clone(), group));
    }
}

multiversion! {
    fn int4_row(
        out: &mut [f32],
        packed: &[u8],
        scales: &[[u8; 2]],
        span: (Range<usize>, usize)
    ) = int4_row_body
}

#[inline(always)]
fn int4_row_body<const FUSED: bool>(
    out: &mut [f32],
    packed: &[u8],
    scales: &[[u8; 2]],
    (cols, group): (Range<usize>, usize),
) {
    let (words, _) = packed.as_chunks::<4>();
    let value =
        |col: usize, scale: f32| round_to_bf16((nibble(packed, col) as i32 - 8) as f32 * scale);
    for_each_block(out, cols, group, |out, cols, block| {
        let scale = bf16_to_f32(scales[block]);
        // Whole words are decoded by vector code, the columns around them one by one.
        let before = (cols.start.next_multiple_of(8) - cols.start).min(out.len());
        let (head, rest) = out.split_at_mut(before);
        for (i, out) in head.iter_mut().enumerate() {
            *out = value(cols.start + i, scale);
        }
        let (eights, tail) = rest.as_chunks_mut::<8>();
        for (eight, word) in eights.iter_mut().zip(&words[(cols.start + before) / 8..]) {
            let word = u32::from_le_bytes(*word);
            for (i, out) in eight.iter_mut().enumerate() {
                let code = word >> (4 * i) & 0xF;
                *out = round_to_bf16((code as i32 - 8) as f32 * scale);
            }
        }
        let first = cols.end - tail.len();
        for (i, out) in tail.iter_mut().enumerate() {
            *out = value(first + i, scale);
        }
    });
}

/// A matrix [out, in] of E4M3 numbers with one f32 factor for each square of `block` x `block`
/// elements, the last ones of a row or column of blocks cut short.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Block<'a> {
    /// E4M3 bytes [out, in].
    pub weight: &'a [u8],
    /// Little-endian f32 factors [ceil(out / block), ceil(in / block)].
    pub scale_inv: &'a [u8],
    /// [out, in].
    pub shape: [usize; 2],
    /// Side of a block.
    pub block: usize,
}

/// Decodes a region of `weight` into the row-major `out`, without any rounding beyond f32.
pub fn fp8_block(out: &mut [f32], weight: &Fp8Block<'_>, region: &Region) {
    let Fp8Block { weight, scale_inv, shape: [rows, cols], block } = *weight;
    region.assert_inside([rows, cols], out.len());
    assert!(block > 0, "dequant: blocks of no elements");
    let row_scales = cols.div_ceil(block);
    assert_eq!(weight.len(), rows * cols, "dequant: bytes of weight");
    let scale_bytes = rows.div_ceil(block) * row_scales * 4;
    assert_eq!(scale_inv.len(), scale_bytes, "dequant: bytes of scale_inv");
    if region.cols.is_empty() {
        return;
    }
    let (scales, _) = scale_inv.as_chunks::<4>();
    for (out, row) in out.chunks_exact_mut(region.cols.len()).zip(region.rows.clone()) {
        let weight = &weight[row * cols..][..cols];
        let scales = &scales[row / block * row_scales..][..row_scales];
        for_each_block(out, region.cols.clone(), block, |out, cols, block| {
            let scale = f32::from_le_bytes(scales[block]);
            for (out, &code) in out.iter_mut().zip(&weight[cols]) {
                *out = e4m3_to_f32(code) * scale;
            }
        });
    }
}

/// The factor on all of an NVFP4 matrix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GlobalScale {
    /// Multiply by it (modelopt's `weight_scale_2`).
    Multiplier(f32),
    /// Divide by it (compressed-tensors' `weight_global_scale`).
    Divisor(f32),
}

/// Inputs that share a scale in NVFP4.
pub const NVFP4_BLOCK: usize = 16;

/// A matrix [out, in] of E2M1 numbers with an E4M3 scale for 16 neighbouring inputs.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4<'a> {
    /// Two numbers a byte, the even column in the low half: [out, ceil(in / 2)].
    pub packed: &'a [u8],
    /// E4M3 bytes [out, ceil(in / 16)].
    pub scale: &'a [u8],
    /// Factor on everything.
    pub global: GlobalScale,
    /// [out, in].
    pub shape: [usize; 2],
}

/// Decodes a region of `weight` into the row-major `out`, without any rounding beyond f32.
pub fn nvfp4(out: &mut [f32], weight: &Nvfp4<'_>, region: &Region) {
    let Nvfp4 { packed, scale, global, shape: [rows, cols] } = *weight;
    region.assert_inside([rows, cols], out.len());
    let (row_bytes, row_scales) = (cols.div_ceil(2), cols.div_ceil(NVFP4_BLOCK));
    assert_eq!(packed.len(), rows * row_bytes, "dequant: bytes of packed");
    assert_eq!(scale.len(), rows * row_scales, "dequant: bytes of scale");
    if region.cols.is_empty() {
        return;
    }
    for (out, row) in out.chunks_exact_mut(region.cols.len()).zip(region.rows.clone()) {
        let packed = &packed[row * row_bytes..][..row_bytes];
        let scales = &scale[row * row_scales..][..row_scales];
        for_each_block(out, region.cols.clone(), NVFP4_BLOCK, |out, cols, block| {
            let scale = e4m3_to_f32(scales[block]);
            let scale = match global {
                GlobalScale::Multiplier(factor) => scale * factor,
                GlobalScale::Divisor(divisor) => scale / divisor,
            };
            for (out, col) in out.iter_mut().zip(cols) {
                *out = E2M1[nibble(packed, col)] * scale;
            }
        });
    }
}

/// Calls `f` with each piece of `out` whose columns lie in one block, those columns, and the
/// number of the block.
#[inline(always)]
fn for_each_block(
    mut out: &mut [f32],
    cols: Range<usize>,
    block: usize,
    mut f: impl FnMut(&mut [f32], Range<usize>, usize),
) {
    let mut start = cols.start;
    while start < cols.end {
        let end = cols.end.min((start / block + 1) * block);
        let (piece, rest) = out.split_at_mut(end - start);
        f(piece, start..end, start / block);
        (out, start) = (rest, end);
    }
}

#[inline(always)]
fn nibble(packed: &[u8], index: usize) -> usize {
    usize::from(packed[index / 2] >> (4 * (index % 2)) & 0xF)
}

#[inline(always)]
fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Nearest bf16, ties to even; infinities stay, and so does NaN whose low bits are zero, as those
/// of products with a bf16 number are.
#[inline(always)]
fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000)
}

/// Values of the sixteen E2M1 codes.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = decode_e4m3(code as u8);
        code += 1;
    }
    values
};

/// The number that an E4M3 byte (the `fn` variant: no infinities, largest 448) stands for.
pub fn e4m3_to_f32(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

const fn decode_e4m3(code: u8) -> f32 {
    let sign = (code as u32 >> 7) << 31;
    let exponent = code as u32 >> 3 & 0xF;
    let mantissa = code as u32 & 7;
    if exponent == 0xF && mantissa == 7 {
        return f32::NAN;
    }
    if exponent == 0 {
        // Subnormal: steps of 2^-9.
        let magnitude = mantissa as f32 / 512.0;
        return if sign == 0 { magnitude } else { -magnitude };
    }
    f32::from_bits(sign | (exponent + 120) << 23 | mantissa << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition of the format, with powers instead of bit patterns.
    fn e4m3_slow(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa * 2f64.powi(-6),
            _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_e4m3_code() {
        for code in 0..=255u8 {
            let (got, want) = (e4m3_to_f32(code), e4m3_slow(code));
            assert!(f64::from(got) == want || (got.is_nan() && want.is_nan()), "{code:#x}");
        }
        assert_eq!((e4m3_to_f32(0x7E), e4m3_to_f32(0x01)), (448.0, 0.001_953_125));
    }

    /// Words packed by the rule in the documentation of compressed-tensors, by hand:
    /// nibbles 7, 8, 9, 0, 15, 1, 8, 12 are -1, 0, 1, -8, 7, -7, 0, 4.
    #[test]
    fn int4_golden_word() {
        let packed = 0xC81F_0987u32.to_le_bytes();
        let scale = half::bf16::from_f32(0.33).to_le_bytes();
        let weight = Int4PackQuantized { packed: &packed, scale: &scale, shape: [1, 8], group: 32 };
        let mut out = [0.0; 8];
        int4_pack_quantized(&mut out, &weight, &Region::full([1, 8]));
        // bf16(0.33) is 0.330078125; 7 and -7 times it need rounding to 8 bits.
        assert_eq!(
            out,
            [-0.330_078_13, 0.0, 0.330_078_13, -2.640_625, 2.3125, -2.3125, 0.0, 1.320_312_5]
        );
    }

    /// Rounds to 8 significant bits, ties to even, in f64 arithmetic.
    fn bf16_slow(x: f64) -> f64 {
        if x == 0.0 {
            return x;
        }
        let step = 2f64.powi(x.abs().log2().floor() as i32 - 7);
        (x / step).round_ties_even() * step
    }

    fn region() -> impl Strategy<Value = ([usize; 2], Region)> {
        (1usize..9, 1usize..80).prop_flat_map(|(rows, cols)| {
            (0..=rows, 0..=rows, 0..=cols, 0..=cols).prop_map(move |(a, b, c, d)| {
                let region = Region { rows: a.min(b)..a.max(b), cols: c.min(d)..c.max(d) };
                ([rows, cols], region)
            })
        })
    }

    fn at(region: &Region, [_, cols]: [usize; 2]) -> Vec<(usize, usize, usize)> {
        region
            .rows
            .clone()
            .flat_map(|r| region.cols.clone().map(move |c| (r, c, r * cols + c)))
            .collect()
    }

    fn byte(i: usize, seed: u64) -> u8 {
        ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_mul(seed | 1) >> 56) as u8
    }

    proptest! {
        #[test]
        fn int4_matches_the_formula((shape, region) in region(), seed in any::<u64>()) {
            let [rows, cols] = shape;
            let group = [1, 2, 8, 32][seed as usize % 4];
            let codes: Vec<u8> = (0..rows * cols).map(|i| byte(i, seed) & 15).collect();
            let mut packed = Vec::new();
            for row in codes.chunks(cols) {
                for word in row.chunks(8) {
                    let word = word.iter().rev().fold(0u32, |w, &c| (w << 4) | u32::from(c));
                    packed.extend(word.to_le_bytes());
                }
            }
            let row_scales = cols.div_ceil(group);
            let scales: Vec<half::bf16> = (0..rows * row_scales)
                .map(|i| half::bf16::from_f32(f32::from(byte(i, seed ^ 5)) / 977.0))
                .collect();
            let scale: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            let weight = Int4PackQuantized { packed: &packed, scale: &scale, shape, group };
            let mut out = vec![f32::NAN; region.elements()];
            int4_pack_quantized(&mut out, &weight, &region);
            for (got, (r, c, i)) in out.iter().zip(at(&region, shape)) {
                let scale = f64::from(scales[r * row_scales + c / group].to_f32());
                prop_assert_eq!(f64::from(*got), bf16_slow((f64::from(codes[i]) - 8.0) * scale));
            }
        }

        #[test]
        fn fp8_matches_the_formula((shape, region) in region(), seed in any::<u64>()) {
            let [rows, cols] = shape;
            let block = [1, 3, 16, 128][seed as usize % 4];
            // 0x7F and 0xFF are NaN.
            let weight: Vec<u8> = (0..rows * cols).map(|i| byte(i, seed) & 0xF7).collect();
            let row_scales = cols.div_ceil(block);
            let scales: Vec<f32> = (0..rows.div_ceil(block) * row_scales)
                .map(|i| f32::from(byte(i, seed ^ 9)) * 0.0037)
                .collect();
            let scale_inv: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            let mut out = vec![f32::NAN; region.elements()];
            let stored = Fp8Block { weight: &weight, scale_inv: &scale_inv, shape, block };
            fp8_block(&mut out, &stored, &region);
            for (got, (r, c, i)) in out.iter().zip(at(&region, shape)) {
                let scale = f64::from(scales[r / block * row_scales + c / block]);
                prop_assert_eq!(*got, (e4m3_slow(weight[i]) * scale) as f32);
            }
        }

        #[test]
        fn nvfp4_matches_the_formula((shape, region) in region(), seed in any::<u64>()) {
            let [rows, cols] = shape;
            let codes: Vec<u8> = (0..rows * cols).map(|i| byte(i, seed) & 15).collect();
            let packed: Vec<u8> = codes
                .chunks(cols)
                .flat_map(|row| row.chunks(2).map(|two| two[0] | two.get(1).unwrap_or(&0) << 4))
                .collect();
            let row_scales = cols.div_ceil(16);
            let scale: Vec<u8> = (0..rows * row_scales).map(|i| byte(i, seed ^ 3) & 0x77).collect();
            let factor = 0.125f32;
            for global in [GlobalScale::Multiplier(factor), GlobalScale::Divisor(1.0 / factor)] {
                let mut out = vec![f32::NAN; region.elements()];
                let stored = Nvfp4 { packed: &packed, scale: &scale, global, shape };
                nvfp4(&mut out, &stored, &region);
                for (got, (r, c, i)) in out.iter().zip(at(&region, shape)) {
                    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
                    let sign = if codes[i] & 8 == 0 { 1.0 } else { -1.0 };
                    let value = sign * magnitudes[usize::from(codes[i] & 7)];
                    let scale = e4m3_slow(scale[r * row_scales + c / 16]) * f64::from(factor);
                    prop_assert_eq!(f64::from(*got), value * scale);
                }
            }
        }
    }
}
