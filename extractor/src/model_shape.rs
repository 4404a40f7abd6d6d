//! The three dimensions of a target that planning needs, from its `config.json`. Loads no weights
//! and does not know the architecture.

use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

use crate::tokenizer::{TokenizerError, read_limited};

const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_LAYERS: u64 = 256;
const MAX_HIDDEN: u64 = 1 << 16;
const MAX_VOCAB: u64 = 1 << 21;

/// Dimensions of a target model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of token ids.
    pub vocab_size: usize,
}

/// Why the dimensions are not known.
#[derive(Debug, Error)]
pub enum ModelShapeError {
    /// `config.json` cannot be read.
    #[error("reading the model's config.json; --model has to name a model directory")]
    Read(#[source] TokenizerError),
    /// `config.json` is not what is expected.
    #[error("{}: {detail}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected and what came.
        detail: String,
    },
}

impl ModelShapeError {
    /// Process exit code: 74 I/O, 65 bad data.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read(error) => error.exit_code(),
            Self::Malformed { .. } => 65,
        }
    }
}

impl ModelShape {
    /// Reads `config.json` of a model directory; vision models keep these in `text_config`.
    pub fn load(dir: &Path) -> Result<Self, ModelShapeError> {
        let path = dir.join("config.json");
        let bytes = read_limited(&path, MAX_CONFIG_BYTES).map_err(ModelShapeError::Read)?;
        let malformed = |detail: String| ModelShapeError::Malformed { path: path.clone(), detail };
        let config: Value =
            serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
        let text = config.get("text_config").filter(|text| text.is_object()).unwrap_or(&config);
        let dimension = |key: &str, largest: u64| {
            let value = text.get(key);
            let in_range = value.and_then(Value::as_u64).filter(|n| (1..=largest).contains(n));
            in_range.and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
                let found = value.map_or("missing".to_owned(), Value::to_string);
                malformed(format!("{key} has to be an integer from 1 to {largest}; it is {found}"))
            })
        };
        Ok(Self {
            layers: dimension("num_hidden_layers", MAX_LAYERS)?,
            hidden_size: dimension("hidden_size", MAX_HIDDEN)?,
            vocab_size: dimension("vocab_size", MAX_VOCAB)?,
        })
    }
}
