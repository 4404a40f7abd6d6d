//! The states of one batch, as the target returns them. Knows nothing of files.

use std::ops::Range;

use half::bf16;
use shared::{LayerIndex, StateDtype, StateRows, fp8};

/// Hidden states of every token of a batch at the requested layers.
///
/// The replies of a target are this type and nothing else: there is no list whose nesting depends
/// on a flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Capture {
    /// Rows in every layer.
    pub tokens: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// One entry a requested layer, in the order of the request.
    pub layers: Vec<LayerCapture>,
}

/// Row-major [tokens, hidden] states of one layer's output, before the final norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCapture {
    /// Which layer's output this is.
    pub layer: LayerIndex,
    /// The values.
    pub rows: LayerRows,
}

/// Row-major values in the number format that the device computed them in.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerRows {
    /// Single precision.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// float8 e4m3fn codes, stored already.
    Fp8 {
        /// [tokens, hidden] codes.
        codes: Vec<u8>,
        /// [tokens] multipliers.
        scales: Vec<f32>,
        /// [tokens] sums of squared errors and of squares of the values, in units of the
        /// multiplier squared.
        errors: Vec<[f32; 2]>,
    },
}

impl LayerRows {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Fp8 { codes, .. } => codes.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(values.as_slice()),
            Self::Bf16(values) => size_of_val(values.as_slice()),
            Self::Fp8 { codes, scales, .. } => codes.len() + size_of_val(scales.as_slice()),
        }
    }

    /// Name of the number format.
    pub fn dtype(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::Bf16(_) => "bf16",
            Self::Fp8 { .. } => "fp8",
        }
    }

    /// All values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::Fp8 { codes, scales, .. } => fp8::dequantize_rows(codes, scales),
        }
    }

    /// The rows numbered `rows`, which must lie inside and are `hidden_size` wide, in their stored
    /// type, and what storing them in fp8 has cost: root mean square of the errors over that of the
    /// values.
    pub fn store(
        &self,
        rows: Range<usize>,
        hidden_size: usize,
        dtype: StateDtype,
    ) -> (StateRows, Option<f64>) {
        let range = rows.start * hidden_size..rows.end * hidden_size;
        match (self, dtype) {
            (Self::Bf16(values), StateDtype::Bf16) => {
                (StateRows::Bf16(values[range].to_vec()), None)
            }
            (Self::F32(values), StateDtype::Bf16) => {
                (StateRows::from_f32(&values[range], hidden_size, dtype), None)
            }
            (Self::Fp8 { .. }, StateDtype::Bf16) => {
                (StateRows::from_f32(&self.to_f32()[range], hidden_size, dtype), None)
            }
            (Self::Bf16(values), StateDtype::Fp8) => {
                let values: Vec<f32> = values[range].iter().map(|value| value.to_f32()).collect();
                quantise(&values, hidden_size)
            }
            (Self::F32(values), StateDtype::Fp8) => quantise(&values[range], hidden_size),
            (Self::Fp8 { codes, scales, errors }, StateDtype::Fp8) => {
                let error = fp8::relative_error(&errors[rows.clone()], &scales[rows.clone()]);
                let (codes, scales) = (codes[range].to_vec(), scales[rows].to_vec());
                (StateRows::Fp8 { codes, scales }, Some(error))
            }
        }
    }

    /// Appends rows of the same number format; gives them back if theirs is another.
    pub(crate) fn append(&mut self, more: Self) -> Result<(), Self> {
        match (self, more) {
            (Self::F32(values), Self::F32(more)) => values.extend_from_slice(&more),
            (Self::Bf16(values), Self::Bf16(more)) => values.extend_from_slice(&more),
            (
                Self::Fp8 { codes, scales, errors },
                Self::Fp8 { codes: more, scales: more_scales, errors: more_errors },
            ) => {
                codes.extend_from_slice(&more);
                scales.extend_from_slice(&more_scales);
                errors.extend_from_slice(&more_errors);
            }
            (_, more) => return Err(more),
        }
        Ok(())
    }
}

/// The plain twin of what a GPU does before it copies.
fn quantise(values: &[f32], hidden_size: usize) -> (StateRows, Option<f64>) {
    let (codes, scales) = fp8::quantize_rows(values, hidden_size);
    let error = fp8::relative_error(&fp8::squared_errors(values, &codes, &scales), &scales);
    (StateRows::Fp8 { codes, scales }, Some(error))
}

impl Default for LayerRows {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}
