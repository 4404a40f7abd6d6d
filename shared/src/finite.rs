//! One pass over a layer's stored rows: its size (rms, absmax), or where it is not finite.

use std::fmt;

use half::bf16;
use serde::Serialize;

use crate::contract::{LayerIndex, LayerStats, StateRows};
use crate::fp8;

/// Non-finite values of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct NonFinite {
    /// The layer concerned.
    pub layer: LayerIndex,
    /// Values that are not a number.
    pub nan: usize,
    /// Infinite values.
    pub infinite: usize,
    /// Row of the first of them.
    pub first_token: usize,
    /// Column of the first of them.
    pub first_channel: usize,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, nan, infinite, first_token, first_channel } = self;
        write!(f, "layer {layer}: {nan} NaN and {infinite} infinite, ")?;
        write!(f, "first at token {first_token}, channel {first_channel}")
    }
}

/// All layers' faults in one line.
pub(crate) fn describe(layers: &[NonFinite]) -> String {
    layers.iter().map(NonFinite::to_string).collect::<Vec<_>>().join("; ")
}

/// rms and absmax of stored rows, or the count and first position of what is not finite.
pub(crate) fn layer_stats(
    layer: LayerIndex,
    rows: &StateRows,
    hidden_size: usize,
) -> Result<LayerStats, NonFinite> {
    let (sum_of_squares, absmax) = match rows {
        StateRows::Bf16(values) => bf16_size(values),
        StateRows::Fp8 { codes, scales } => fp8_size(codes, scales, hidden_size),
    };
    if !absmax.is_finite() {
        return Err(count(layer, rows, hidden_size));
    }
    let rms = (sum_of_squares / rows.len().max(1) as f64).sqrt();
    Ok(LayerStats { layer, rms, absmax })
}

/// Lanes let the compiler vectorise; their number is fixed, so the sum does not depend on it.
const LANES: usize = 16;

fn bf16_size(values: &[bf16]) -> (f64, f32) {
    // The bits of non-negative floats order like the floats, with infinity and NaN on top.
    let most = values.iter().fold(0u16, |most, v| most.max(v.to_bits() & 0x7fff));
    let mut lanes = [0f64; LANES];
    for chunk in values.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value = f64::from(f32::from_bits(u32::from(value.to_bits()) << 16));
            *lane += value * value;
        }
    }
    (lanes.iter().sum(), bf16::from_bits(most).to_f32())
}

fn fp8_size(codes: &[u8], scales: &[f32], hidden_size: usize) -> (f64, f32) {
    let table = fp8::table();
    let mut sum_of_squares = 0f64;
    let mut absmax = 0f32;
    for (row, &scale) in codes.chunks(hidden_size.max(1)).zip(scales) {
        let most = row.iter().fold(0u8, |most, code| most.max(code & 0x7f));
        let squares: f64 = row.iter().map(|&c| f64::from(table[usize::from(c)]).powi(2)).sum();
        let row_most = table[usize::from(most)] * scale.abs();
        // `max` would drop a NaN.
        absmax = if row_most.is_nan() || absmax.is_nan() { f32::NAN } else { absmax.max(row_most) };
        sum_of_squares += squares * f64::from(scale).powi(2);
    }
    (sum_of_squares, absmax)
}

fn count(layer: LayerIndex, rows: &StateRows, hidden_size: usize) -> NonFinite {
    let mut fault = NonFinite { layer, nan: 0, infinite: 0, first_token: 0, first_channel: 0 };
    for (position, value) in rows.to_f32().into_iter().enumerate() {
        if value.is_finite() {
            continue;
        }
        if fault.nan + fault.infinite == 0 {
            fault.first_token = position / hidden_size.max(1);
            fault.first_channel = position % hidden_size.max(1);
        }
        if value.is_nan() {
            fault.nan += 1;
        } else {
            fault.infinite += 1;
        }
    }
    fault
}
