//! The states of one batch, as the target returns them. Knows nothing of files.

use shared::LayerIndex;

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
    pub rows: Vec<f32>,
}
