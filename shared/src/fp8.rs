//! float8 e4m3fn (4 exponent bits, bias 7, 3 mantissa bits, no infinity, NaN = 0x7f and 0xff) and
//! rows of it with one scale each. Knows nothing of layers or files.

/// Largest finite value.
pub const MAX: f32 = 448.0;

/// The value of a code; NaN for 0x7f and 0xff.
pub fn decode(code: u8) -> f32 {
    let exponent = i32::from((code >> 3) & 0xf);
    let mantissa = f32::from(code & 7);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest code, ties to even; magnitudes above 448 saturate, NaN stays NaN.
pub fn encode(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= MAX {
        return sign | 0x7e;
    }
    if magnitude < 2f32.powi(-6) {
        // Subnormal spacing is 2^-9; the eighth step is the first normal code, so no special case.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    // Adds just under half of the lowest kept bit, plus one when that bit is odd: ties to even.
    let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
    let code = (rounded >> 20) - ((127 - 7) << 3);
    sign | (code.min(0x7e) as u8)
}

/// Values of all 256 codes.
pub fn table() -> [f32; 256] {
    std::array::from_fn(|code| decode(code as u8))
}

/// Quantises row-major [rows, width] values: codes and one scale a row (absmax / 448, 0 for a row
/// of zeros). A row with a non-finite value gets a non-finite scale, so that it stays visible.
pub fn quantize_rows(values: &[f32], width: usize) -> (Vec<u8>, Vec<f32>) {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(values.len() / width.max(1));
    for row in values.chunks(width.max(1)) {
        let absmax =
            row.iter().fold(0f32, |most, v| if v.is_nan() { *v } else { most.max(v.abs()) });
        let absmax = if row.iter().any(|v| v.is_nan()) { f32::NAN } else { absmax };
        let scale = absmax / MAX;
        scales.push(scale);
        if scale == 0.0 {
            codes.resize(codes.len() + row.len(), 0);
        } else {
            codes.extend(row.iter().map(|v| encode(v / scale)));
        }
    }
    (codes, scales)
}

/// The values code x scale of [rows, width] codes, where rows = number of scales.
pub fn dequantize_rows(codes: &[u8], scales: &[f32]) -> Vec<f32> {
    if scales.is_empty() {
        return Vec::new();
    }
    let table = table();
    let width = codes.len() / scales.len();
    let mut values = Vec::with_capacity(codes.len());
    for (row, scale) in codes.chunks(width.max(1)).zip(scales) {
        values.extend(row.iter().map(|&code| table[usize::from(code)] * scale));
    }
    values
}

/// Of each row, in units of its scale squared: the sum of the squares of (value - code x scale),
/// and of the values.
pub fn squared_errors(values: &[f32], codes: &[u8], scales: &[f32]) -> Vec<[f32; 2]> {
    let table = table();
    let width = codes.len() / scales.len().max(1);
    let rows = values.chunks(width.max(1)).zip(codes.chunks(width.max(1))).zip(scales);
    rows.map(|((values, codes), scale)| {
        values.iter().zip(codes).fold([0.0; 2], |[errors, squares], (value, &code)| {
            let value = if *scale == 0.0 { 0.0 } else { value / scale };
            let error = value - table[usize::from(code)];
            [errors + error * error, squares + value * value]
        })
    })
    .collect()
}

/// Root of the summed squared errors of rows over their summed squares, both in units of the rows'
/// scales squared; 0 for rows of zeros.
pub fn relative_error(rows: &[[f32; 2]], scales: &[f32]) -> f64 {
    let sums = rows.iter().zip(scales).fold([0f64; 2], |[errors, squares], (row, scale)| {
        let unit = f64::from(*scale) * f64::from(*scale);
        [errors + f64::from(row[0]) * unit, squares + f64::from(row[1]) * unit]
    });
    match sums {
        [_, 0.0] => 0.0,
        [errors, squares] => (errors / squares).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Independent reading of the format: the value as an exact integer count of 2^-9.
    fn units(code: u8) -> i64 {
        let (exponent, mantissa) = (i64::from(code >> 3 & 0xf), i64::from(code & 7));
        let magnitude = if exponent == 0 { mantissa } else { (8 + mantissa) << (exponent - 1) };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn all_256_codes_decode_and_encode_back() {
        for code in 0..=255u8 {
            if code & 0x7f == 0x7f {
                assert!(decode(code).is_nan());
                assert_eq!(encode(decode(code)) & 0x7f, 0x7f);
            } else {
                assert_eq!(f64::from(decode(code)), units(code) as f64 / 512.0, "code {code:#x}");
                assert_eq!(encode(decode(code)), code);
            }
        }
        assert_eq!(decode(0x7e), MAX);
    }

    /// f32 bits and codes of values cast by the ml_dtypes package for Python.
    const ML_DTYPES: [(u32, u8); 26] = [
        (0x3da2bc34, 0x1a),
        (0x3d8da940, 0x19),
        (0xc12b1cb0, 0xd3),
        (0xbfbe1e11, 0xbc),
        (0xc064db89, 0xc6),
        (0xb9d0d516, 0x80),
        (0x3cb7b54e, 0xb),
        (0x3e9a1407, 0x2a),
        (0xc1dddbee, 0xde),
        (0xbc765012, 0x88),
        (0x3ede816c, 0x2e),
        (0x38b82bcd, 0x0),
        (0x3b79e3e1, 0x2),
        (0xbc4e9d5f, 0x86),
        (0x4187dc7d, 0x58),
        (0xc303e5cb, 0xf0),
        (0xbfa28f84, 0xba),
        (0xbaa44d15, 0x81),
        (0x4220684b, 0x62),
        (0x80000000, 0x80),
        (0x3a800000, 0x0),
        (0x3ac00000, 0x1),
        (0x3c700000, 0x8),
        (0x43dff333, 0x7e),
        (0xc3e00000, 0xfe),
        (0x43cff333, 0x7d),
    ];

    #[test]
    fn codes_are_those_of_ml_dtypes() {
        for (bits, code) in ML_DTYPES {
            assert_eq!(encode(f32::from_bits(bits)), code, "{}", f32::from_bits(bits));
        }
    }

    #[test]
    fn midpoints_go_to_the_even_code() {
        for code in 0..0x7eu8 {
            let middle = (decode(code) + decode(code + 1)) / 2.0;
            assert_eq!(encode(middle), code + code % 2, "between {code:#x} and the next");
            assert_eq!(encode(middle.next_down()), code);
            assert_eq!(encode(middle.next_up()), code + 1);
        }
    }

    #[test]
    fn a_row_with_a_non_finite_value_keeps_a_non_finite_scale() {
        let (_, scales) = quantize_rows(&[1.0, f32::NAN, 2.0, 1.0, f32::INFINITY, 2.0], 3);
        assert!(scales[0].is_nan());
        assert!(scales[1].is_infinite());
    }

    #[test]
    fn errors_are_those_of_the_values_that_come_back() {
        let values: Vec<f32> = (0..200).map(|at| ((at * 37) % 91) as f32 / 7.0 - 5.0).collect();
        let (codes, scales) = quantize_rows(&values, 50);
        let back = dequantize_rows(&codes, &scales);
        let sum = |of: &dyn Fn(usize) -> f64| (0..200).map(|at| of(at).powi(2)).sum::<f64>();
        let lost = sum(&|at| f64::from(values[at] - back[at]));
        let expected = (lost / sum(&|at| f64::from(values[at]))).sqrt();
        let found = relative_error(&squared_errors(&values, &codes, &scales), &scales);
        assert!((found - expected).abs() < 1e-6 && found > 0.01, "{found} {expected}");
        let zeros = squared_errors(&[0.0; 4], &[0; 4], &[0.0; 2]);
        assert_eq!(relative_error(&zeros, &[0.0; 2]), 0.0);
        // Squares of such values are beyond f32.
        let large: Vec<f32> = values.iter().map(|value| value * 1e35).collect();
        let (codes, scales) = quantize_rows(&large, 50);
        let found = relative_error(&squared_errors(&large, &codes, &scales), &scales);
        assert!((found - expected).abs() < 1e-3, "{found} {expected}");
    }

    proptest! {
        #[test]
        fn the_nearest_code_is_chosen(value in -500f32..500f32) {
            let got = (decode(encode(value)) - value).abs();
            let best = (0..=255u8)
                .filter(|code| code & 0x7f != 0x7f)
                .map(|code| (decode(code) - value).abs())
                .fold(f32::INFINITY, f32::min);
            prop_assert_eq!(got, best);
        }

        #[test]
        fn a_row_loses_at_most_a_sixteenth(row in prop::collection::vec(-1e4f32..1e4, 1..40)) {
            let (codes, scales) = quantize_rows(&row, row.len());
            let absmax = row.iter().fold(0f32, |m, v| m.max(v.abs()));
            for (value, back) in row.iter().zip(dequantize_rows(&codes, &scales)) {
                // Half a mantissa step, or half a subnormal step near zero.
                let allowed = (value.abs() / 16.0).max(absmax / 448.0 / 1024.0) * 1.0001;
                prop_assert!((value - back).abs() <= allowed, "{value} became {back}");
            }
        }
    }
}
