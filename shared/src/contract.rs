//! The tensor contract: what a captured sample is. A value of [`CapturedSample`] is proof that it
//! holds exactly `layers x [tokens, hidden]`, finite, with ids and mask of the same length.
//!
//! The shape errors name the likely cause, because the failure this project began with (771
//! tensors of [512] in place of 4 of [512, 7168]) was silent.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::sample::{SampleId, TokenSample};

/// 0-based decoder layer whose *output* (residual stream, before the final norm) is meant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerIndex(pub u16);

impl fmt::Display for LayerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How hidden states are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateDtype {
    /// bfloat16, 2 bytes a value.
    Bf16,
    /// float8 e4m3fn with one f32 scale a token; value = code x scale.
    Fp8,
}

impl StateDtype {
    /// Stored bytes of one token in one layer.
    pub fn bytes_per_token(self, hidden_size: usize) -> usize {
        match self {
            Self::Bf16 => 2 * hidden_size,
            Self::Fp8 => hidden_size + 4,
        }
    }
}

impl fmt::Display for StateDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

/// What every sample of one data set must contain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CaptureSpec {
    /// Captured layers, ascending. The last is the teacher's state, the others feed the draft.
    pub layers: Vec<LayerIndex>,
    /// Width of one state.
    pub hidden_size: usize,
    /// Storage type.
    pub dtype: StateDtype,
}

impl CaptureSpec {
    /// Bytes of hidden states of one token over all layers.
    pub fn bytes_per_token(&self) -> usize {
        self.layers.len() * self.dtype.bytes_per_token(self.hidden_size)
    }
}

/// Rows of one layer in their stored type, row-major [tokens, hidden].
#[derive(Clone, PartialEq, Debug)]
pub enum StateRows {
    /// bfloat16 values.
    Bf16(Vec<bf16>),
    /// e4m3fn codes and one scale a token.
    Fp8 {
        /// [tokens, hidden] codes.
        codes: Vec<u8>,
        /// [tokens] multipliers.
        scales: Vec<f32>,
    },
}

/// One named tensor offered to [`CapturedSample::new`].
#[derive(Clone, PartialEq, Debug)]
pub struct LayerState {
    /// Which layer's output this is.
    pub layer: LayerIndex,
    /// The shape its producer claims.
    pub shape: Vec<usize>,
    /// The values.
    pub rows: StateRows,
}

/// A sample whose states have been checked against a [`CaptureSpec`].
#[derive(Clone, PartialEq, Debug)]
pub struct CapturedSample {
    sample: TokenSample,
    states: Vec<LayerState>,
}
