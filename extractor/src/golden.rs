//! Expected values of a target model, computed by another implementation. The file layout is
//! described at [`Golden::read`].

mod compare;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use shared::{LayerIndex, SampleError, TokenSample};
use thiserror::Error;

pub use self::compare::{Difference, GivenReport, GoldenReport};
use crate::target::{QaNormEps, RouterChoice, TargetError};

/// Router choices whose margin is below this may differ between correct f32 engines.
pub const ROUTER_NEAR_TIE: f32 = 1e-5;
/// Top-1 minus top-2 logits below this may order differently between correct f32 engines.
pub const LOGIT_NEAR_TIE: f32 = 1e-4;

const EPS_CONFIG: &str = ".eps_config";

/// Expected values of some prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Golden {
    /// The prompts, by name.
    pub prompts: Vec<GoldenPrompt>,
}

/// Expected values of one prompt; what the file lacks is empty.
#[derive(Clone, Debug, PartialEq)]
pub struct GoldenPrompt {
    /// Prefix of its tensors.
    pub name: String,
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// Positions of the rows of `states` and `normed`.
    pub rows: Vec<usize>,
    /// Residual stream after k layers, [rows, hidden].
    pub states: BTreeMap<usize, Vec<f32>>,
    /// Final norm of the last state, [rows, hidden].
    pub normed: Vec<f32>,
    /// Logits of the last positions, [n, vocab].
    pub logits: Vec<f32>,
    /// Router choices by layer.
    pub routers: BTreeMap<usize, RouterChoice>,
    /// Argmax continuation.
    pub greedy_ids: Vec<u32>,
    /// Top-1 minus top-2 logit of each of them.
    pub greedy_margins: Vec<f32>,
}

/// Why a comparison could not be made.
#[derive(Debug, Error)]
pub enum GoldenError {
    /// The file cannot be read.
    #[error("{path}: the golden file cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is not in the safetensors format.
    #[error("{path}: not a safetensors file")]
    Format {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A tensor of another type or size than the layout says.
    #[error("golden tensor `{name}` is {found}, {expected} was expected")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// What the layout says.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// No prompt was found.
    #[error("{path}: no tensor is named PROMPT.input_ids; this is not a golden of a target model")]
    NoPrompts {
        /// The file.
        path: PathBuf,
    },
    /// The ids of a prompt are no sample.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The engine stopped.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl GoldenError {
    /// Process exit code: 65 bad data, 74 I/O, or that of the engine.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            Self::Target(error) => error.exit_code(),
            _ => 65,
        }
    }
}

impl Golden {
    /// Reads a file whose tensors are named by prompt `P`: `P.input_ids` [T], `P.rows` (positions
    /// of the rows of the following; all if absent), `P.h_k` (state after k layers), `P.normed`,
    /// `P.logits` or `P.logits_last4`, `P.router.L.{indices,weights,margin}`,
    /// `P.greedy_{ids,margin}`.
    ///
    /// With [`QaNormEps::Config`], prompts that have `P.eps_config.*` values are read with these,
    /// and the others are left out; a file without any has models in which it makes no difference.
    pub fn read(path: &Path, eps: QaNormEps) -> Result<Self, GoldenError> {
        let bytes = std::fs::read(path)
            .map_err(|source| GoldenError::Read { path: path.to_owned(), source })?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|source| GoldenError::Format { path: path.to_owned(), source })?;
        let tensors: BTreeMap<String, TensorView<'_>> = file.tensors().into_iter().collect();
        let variant = match eps {
            QaNormEps::Config if tensors.keys().any(|name| name.contains(EPS_CONFIG)) => EPS_CONFIG,
            _ => "",
        };
        let names = tensors.keys().filter_map(|name| name.strip_suffix(".input_ids"));
        let prompts: Vec<_> = names
            .filter(|name| {
                let prefix = format!("{name}{variant}.");
                variant.is_empty() || tensors.keys().any(|name| name.starts_with(&prefix))
            })
            .map(|name| GoldenPrompt::read(&tensors, name, variant))
            .collect::<Result<_, _>>()?;
        if prompts.is_empty() {
            return Err(GoldenError::NoPrompts { path: path.to_owned() });
        }
        Ok(Self { prompts })
    }

    /// Tokens of the largest batch of a comparison: the longest prompt with its continuation, or
    /// all prompts.
    pub fn longest(&self, together: bool) -> usize {
        let tokens = |prompt: &GoldenPrompt| prompt.input_ids.len() + prompt.greedy_ids.len();
        let longest = self.prompts.iter().map(tokens).max().unwrap_or(0);
        let all: usize = self.prompts.iter().map(|prompt| prompt.input_ids.len()).sum();
        if together { longest.max(all) } else { longest }
    }
}

impl GoldenPrompt {
    fn read(
        tensors: &BTreeMap<String, TensorView<'_>>,
        name: &str,
        variant: &str,
    ) -> Result<Self, GoldenError> {
        let ids = |part: &str| integers(tensors, &format!("{name}.{part}"));
        let values = |part: &str| floats(tensors, &format!("{name}{variant}.{part}"));
        let input_ids = ids("input_ids")?.unwrap_or_default();
        let rows = match ids("rows")? {
            Some(rows) => rows.into_iter().map(|row| row as usize).collect(),
            None => (0..input_ids.len()).collect(),
        };
        let logits = match values("logits")? {
            Some(logits) => Some(logits),
            None => values("logits_last4")?,
        };
        let (mut states, mut routers) = (BTreeMap::new(), BTreeMap::new());
        let numbered = |prefix: String| {
            let names = tensors.keys().filter_map(move |name| {
                name.strip_prefix(&prefix)?.split('.').next()?.parse::<usize>().ok()
            });
            names.collect::<BTreeSet<_>>()
        };
        for k in numbered(format!("{name}{variant}.h_")) {
            states.insert(k, values(&format!("h_{k}"))?.unwrap_or_default());
        }
        // The variant was recorded for states only.
        for layer in numbered(format!("{name}.router.")).into_iter().filter(|_| variant.is_empty())
        {
            let choice = RouterChoice {
                indices: ids(&format!("router.{layer}.indices"))?.unwrap_or_default(),
                weights: values(&format!("router.{layer}.weights"))?.unwrap_or_default(),
                margins: values(&format!("router.{layer}.margin"))?.unwrap_or_default(),
            };
            routers.insert(layer, choice);
        }
        let greedy_ids = if variant.is_empty() { ids("greedy_ids")? } else { None };
        Ok(Self {
            name: format!("{name}{variant}"),
            input_ids,
            rows,
            states,
            normed: values("normed")?.unwrap_or_default(),
            logits: logits.unwrap_or_default(),
            routers,
            greedy_ids: greedy_ids.unwrap_or_default(),
            greedy_margins: values("greedy_margin")?.unwrap_or_default(),
        })
    }

    fn sample(&self) -> Result<TokenSample, SampleError> {
        TokenSample::new(self.input_ids.clone(), vec![0; self.input_ids.len()])
    }

    /// Refuses states of another width than the target's, with which nothing can be compared.
    fn check_width(&self, hidden_size: usize) -> Result<(), GoldenError> {
        let rows = self.rows.len();
        match self.states.iter().find(|(_, values)| values.len() != rows * hidden_size) {
            None => Ok(()),
            Some((k, values)) => Err(GoldenError::Tensor {
                name: format!("{}.h_{k}", self.name),
                expected: format!("[{rows}, {hidden_size}], the width of the model in --model,"),
                found: format!("{} values for {rows} rows", values.len()),
            }),
        }
    }

    /// State k is the output of layer k - 1.
    fn layers(&self) -> impl Iterator<Item = LayerIndex> {
        self.states.keys().filter(|&&k| k > 0).map(|&k| LayerIndex((k - 1) as u16))
    }
}

fn floats(
    tensors: &BTreeMap<String, TensorView<'_>>,
    name: &str,
) -> Result<Option<Vec<f32>>, GoldenError> {
    let words = words(tensors, name, Dtype::F32)?;
    Ok(words.map(|words| words.into_iter().map(f32::from_bits).collect()))
}

fn integers(
    tensors: &BTreeMap<String, TensorView<'_>>,
    name: &str,
) -> Result<Option<Vec<u32>>, GoldenError> {
    words(tensors, name, Dtype::I32)
}

fn words(
    tensors: &BTreeMap<String, TensorView<'_>>,
    name: &str,
    dtype: Dtype,
) -> Result<Option<Vec<u32>>, GoldenError> {
    let Some(tensor) = tensors.get(name) else { return Ok(None) };
    if tensor.dtype() != dtype {
        return Err(GoldenError::Tensor {
            name: name.to_owned(),
            expected: format!("{dtype:?}"),
            found: format!("{:?}", tensor.dtype()),
        });
    }
    let (words, _) = tensor.data().as_chunks::<4>();
    Ok(Some(words.iter().map(|&word| u32::from_le_bytes(word)).collect()))
}
