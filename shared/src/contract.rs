//! The tensor contract: what a captured sample is. A value of [`CapturedSample`] is proof that it
//! holds exactly `layers x [tokens, hidden]`, finite, with ids and mask of the same length.
//!
//! The shape errors name the likely cause, because the failure this project began with (771
//! tensors of [512] in place of 4 of [512, 7168]) was silent.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::diagnosis::{self, Expected};
use crate::finite::{self, NonFinite};
use crate::fp8;
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

impl StateRows {
    /// Converts row-major [tokens, hidden] f32 values, rounding to nearest even; for fp8 every row
    /// gets its own scale (absmax / 448).
    pub fn from_f32(values: &[f32], hidden_size: usize, dtype: StateDtype) -> Self {
        match dtype {
            StateDtype::Bf16 => Self::Bf16(values.iter().map(|&v| bf16::from_f32(v)).collect()),
            StateDtype::Fp8 => {
                let (codes, scales) = fp8::quantize_rows(values, hidden_size);
                Self::Fp8 { codes, scales }
            }
        }
    }

    /// The values as row-major [tokens, hidden] f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::Bf16(values) => values.iter().map(|v| v.to_f32()).collect(),
            Self::Fp8 { codes, scales } => fp8::dequantize_rows(codes, scales),
        }
    }

    /// Storage type of the values.
    pub fn dtype(&self) -> StateDtype {
        match self {
            Self::Bf16(_) => StateDtype::Bf16,
            Self::Fp8 { .. } => StateDtype::Fp8,
        }
    }

    /// Number of values (scales not counted).
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::Fp8 { codes, .. } => codes.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
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

/// Size of one layer's states, as recorded in the manifest.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LayerStats {
    /// Which layer's output this is.
    pub layer: LayerIndex,
    /// Root mean square over [tokens, hidden].
    pub rms: f64,
    /// Largest absolute value.
    pub absmax: f32,
}

/// A sample whose states have been checked against a [`CaptureSpec`].
#[derive(Clone, PartialEq, Debug)]
pub struct CapturedSample {
    sample: TokenSample,
    states: Vec<LayerState>,
    stats: Vec<LayerStats>,
    storage_errors: Vec<(LayerIndex, f64)>,
}

impl CapturedSample {
    /// Checks the offered tensors: as many as layers, those layers in that order, each exactly
    /// [tokens, hidden] in the type of `spec`, and finite.
    ///
    /// `batch_tokens` are the token counts of all samples of the batch this one came from; they
    /// serve only to name the cause of a wrong shape and may be empty.
    pub fn new(
        sample: TokenSample,
        spec: &CaptureSpec,
        states: Vec<LayerState>,
        batch_tokens: &[usize],
    ) -> Result<Self, ContractError> {
        let expected = Expected {
            layers: spec.layers.len(),
            tokens: sample.tokens(),
            hidden_size: spec.hidden_size,
        };
        let shapes: Vec<&[usize]> = states.iter().map(|state| state.shape.as_slice()).collect();
        diagnosis::check_shapes(&expected, &shapes, batch_tokens)
            .map_err(|fault| ContractError::Shapes(Box::new(fault)))?;
        check_layers(spec, &states)?;
        let mut stats = Vec::with_capacity(states.len());
        let mut faults = Vec::new();
        for state in &states {
            check_storage(spec, state)?;
            match finite::layer_stats(state.layer, &state.rows, spec.hidden_size) {
                Ok(layer_stats) => stats.push(layer_stats),
                Err(fault) => faults.push(fault),
            }
        }
        if !faults.is_empty() {
            return Err(ContractError::NonFinite { sample: sample.id(), layers: faults });
        }
        Ok(Self { sample, states, stats, storage_errors: Vec::new() })
    }

    /// The token ids and the loss mask.
    pub fn sample(&self) -> &TokenSample {
        &self.sample
    }

    /// One [tokens, hidden] tensor a layer, in the order of the spec.
    pub fn states(&self) -> &[LayerState] {
        &self.states
    }

    /// The states of one layer, if it was captured.
    pub fn layer(&self, layer: LayerIndex) -> Option<&LayerState> {
        self.states.iter().find(|state| state.layer == layer)
    }

    /// rms and absmax of every layer, in the order of the spec.
    pub fn stats(&self) -> &[LayerStats] {
        &self.stats
    }

    /// Notes what storing has cost: the root mean square of (state - stored state) over that of the
    /// state, by layer, measured where the state still was.
    pub fn with_storage_errors(self, storage_errors: Vec<(LayerIndex, f64)>) -> Self {
        Self { storage_errors, ..self }
    }

    /// What storing has cost; empty where that was not measured.
    pub fn storage_errors(&self) -> &[(LayerIndex, f64)] {
        &self.storage_errors
    }

    /// Gives the parts back: tokens and one tensor a layer.
    pub fn into_parts(self) -> (TokenSample, Vec<LayerState>) {
        (self.sample, self.states)
    }
}

pub(crate) fn check_layers(spec: &CaptureSpec, states: &[LayerState]) -> Result<(), ContractError> {
    let got: Vec<LayerIndex> = states.iter().map(|state| state.layer).collect();
    if got == spec.layers {
        return Ok(());
    }
    let cause = diagnosis::layer_names(&spec.layers, &got);
    Err(ContractError::Layers { expected: spec.layers.clone(), got, cause })
}

pub(crate) fn check_storage(spec: &CaptureSpec, state: &LayerState) -> Result<(), ContractError> {
    let layer = state.layer;
    if state.rows.dtype() != spec.dtype {
        let (expected, got) = (spec.dtype, state.rows.dtype());
        return Err(ContractError::Dtype { layer, expected, got });
    }
    let claimed: usize = state.shape.iter().product();
    if state.rows.len() != claimed {
        let got = state.rows.len();
        return Err(ContractError::Values { layer, shape: state.shape.clone(), got });
    }
    if let StateRows::Fp8 { scales, .. } = &state.rows {
        let tokens = state.shape.first().copied().unwrap_or(0);
        if scales.len() != tokens {
            return Err(ContractError::Scales { layer, tokens, got: scales.len() });
        }
        // A NaN is left to the search for non-finite values, which counts them.
        if let Some(token) = scales.iter().position(|&scale| scale < 0.0) {
            let scale = scales.get(token).copied().unwrap_or_default();
            return Err(ContractError::NegativeScale { layer, token, scale });
        }
    }
    Ok(())
}

/// Why offered tensors are not a captured sample.
#[derive(Debug, Error, PartialEq)]
pub enum ContractError {
    /// Number or shape of the tensors is wrong; the text names the likely cause.
    #[error("{0}")]
    Shapes(Box<diagnosis::ShapeFault>),
    /// Right shapes, but of other layers or in another order.
    #[error("expected layers {}; got layers {}{}", list(expected), list(got), because(cause))]
    Layers {
        /// Layers of the spec.
        expected: Vec<LayerIndex>,
        /// Layers offered.
        got: Vec<LayerIndex>,
        /// The likely cause.
        cause: Option<String>,
    },
    /// Another storage type than the data set's.
    #[error("layer {layer}: expected {expected} rows, got {got}: convert with StateRows::from_f32")]
    Dtype {
        /// The layer concerned.
        layer: LayerIndex,
        /// Type of the data set.
        expected: StateDtype,
        /// Type offered.
        got: StateDtype,
    },
    /// A shape that its own values do not fill.
    #[error(
        "layer {layer}: shape {shape:?} needs {} values, got {got}",
        shape.iter().product::<usize>()
    )]
    Values {
        /// The layer concerned.
        layer: LayerIndex,
        /// The shape claimed.
        shape: Vec<usize>,
        /// Number of values offered.
        got: usize,
    },
    /// fp8 rows without exactly one scale a token.
    #[error("layer {layer}: {tokens} rows of fp8 need {tokens} scales, got {got}")]
    Scales {
        /// The layer concerned.
        layer: LayerIndex,
        /// Rows.
        tokens: usize,
        /// Scales offered.
        got: usize,
    },
    /// A scale that no row of states gives: scale = absmax / 448.
    #[error(
        "layer {layer}: the scale of token {token} is {scale}, 0 or more is expected: its bytes \
         are not what was written"
    )]
    NegativeScale {
        /// The layer concerned.
        layer: LayerIndex,
        /// Row of the first of them.
        token: usize,
        /// The scale found there.
        scale: f32,
    },
    /// NaN or infinite values.
    #[error("sample {sample} has non-finite states: {}", finite::describe(layers))]
    NonFinite {
        /// The sample concerned.
        sample: SampleId,
        /// Counts and first position, for each layer that has some.
        layers: Vec<NonFinite>,
    },
}

impl ContractError {
    /// 65: the data is bad.
    pub fn exit_code(&self) -> u8 {
        65
    }
}

fn list(layers: &[LayerIndex]) -> String {
    layers.iter().map(LayerIndex::to_string).collect::<Vec<_>>().join(", ")
}

fn because(cause: &Option<String>) -> String {
    cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default()
}
