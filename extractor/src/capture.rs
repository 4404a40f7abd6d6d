//! The states of one batch, as the target returns them. Knows nothing of files.

use std::ops::Range;

use half::bf16;
use shared::{LayerIndex, StateDtype, StateRows};

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
}

impl LayerRows {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
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
        }
    }

    /// Name of the number format.
    pub fn dtype(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::Bf16(_) => "bf16",
        }
    }

    /// All values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// The values numbered `range`, which must lie inside, in their stored type; rows are
    /// `hidden_size` wide.
    pub fn store(&self, range: Range<usize>, hidden_size: usize, dtype: StateDtype) -> StateRows {
        match (self, dtype) {
            (Self::Bf16(values), StateDtype::Bf16) => StateRows::Bf16(values[range].to_vec()),
            (Self::Bf16(values), StateDtype::Fp8) => {
                let values: Vec<f32> = values[range].iter().map(|value| value.to_f32()).collect();
                StateRows::from_f32(&values, hidden_size, dtype)
            }
            (Self::F32(values), _) => StateRows::from_f32(&values[range], hidden_size, dtype),
        }
    }

    /// Appends rows of the same number format; gives them back if theirs is another.
    pub(crate) fn append(&mut self, more: Self) -> Result<(), Self> {
        match (self, more) {
            (Self::F32(values), Self::F32(more)) => values.extend_from_slice(&more),
            (Self::Bf16(values), Self::Bf16(more)) => values.extend_from_slice(&more),
            (_, more) => return Err(more),
        }
        Ok(())
    }
}

impl Default for LayerRows {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}
