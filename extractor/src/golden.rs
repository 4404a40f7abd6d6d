//! Expected values of a target model, computed by another implementation, and the comparison with
//! what this engine computes. The file layout is described at [`Golden::read`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use shared::{LayerIndex, SampleError, TokenSample};
use thiserror::Error;

use crate::batch::TokenBatch;
use crate::cosine::Cosines;
use crate::target::{
    CacheId, ExtendRequest, Probe, QaNormEps, RankGroup, RouterChoice, TargetError, TargetModel,
    Wanted,
};

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

/// Largest difference of one tensor from its expected values.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Prompt and tensor.
    pub tensor: String,
    /// Values compared.
    pub count: usize,
    /// Largest absolute difference; infinite where values are missing or not finite.
    pub max_abs: f64,
    /// Root mean square of the expected values.
    pub rms: f64,
}

impl Difference {
    /// Compares values of the same layout.
    pub fn of(tensor: String, found: &[f32], expected: &[f32]) -> Self {
        let square: f64 = expected.iter().map(|&value| f64::from(value).powi(2)).sum();
        let rms = (square / expected.len().max(1) as f64).sqrt();
        let apart = |(&a, &b): (&f32, &f32)| match (f64::from(a) - f64::from(b)).abs() {
            apart if apart.is_nan() => f64::INFINITY,
            apart => apart,
        };
        let max_abs = match found.len() == expected.len() {
            true => found.iter().zip(expected).map(apart).fold(0.0, f64::max),
            false => f64::INFINITY,
        };
        Self { tensor, count: expected.len(), max_abs, rms }
    }

    /// Largest absolute difference in units of the expected values' rms.
    pub fn relative(&self) -> f64 {
        match self.max_abs / self.rms {
            _ if self.max_abs == 0.0 => 0.0,
            // NaN would pass every comparison.
            ratio if ratio.is_nan() => f64::INFINITY,
            ratio => ratio,
        }
    }
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GoldenReport {
    /// One entry a tensor.
    pub differences: Vec<Difference>,
    /// Cosines of the states, one entry a tensor.
    pub cosines: Vec<Cosines>,
    /// Router choices compared.
    pub routed: usize,
    /// Router choices left out because their margin is below [`ROUTER_NEAR_TIE`].
    pub routed_near_ties: usize,
    /// Prompt, layer and position of choices that differ.
    pub misrouted: Vec<String>,
    /// Continuation tokens that agree.
    pub greedy: usize,
    /// Prompt and step of continuations that differ beyond near ties.
    pub greedy_wrong: Vec<String>,
}

impl GoldenReport {
    /// Largest relative difference of all tensors.
    pub fn worst(&self) -> f64 {
        self.differences.iter().map(Difference::relative).fold(0.0, f64::max)
    }

    /// Every state points where it should, as far as bf16 allows.
    pub fn agrees_in_bf16(&self) -> bool {
        Cosines::agree(&self.cosines)
    }

    /// Every tensor is within `tolerance` of its rms, and every choice is the expected one.
    pub fn agrees(&self, tolerance: f64) -> bool {
        !self.differences.is_empty()
            && self.worst() < tolerance
            && self.misrouted.is_empty()
            && self.greedy_wrong.is_empty()
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

    /// Runs every prompt through `target`, each in a batch of its own or all `together` in one,
    /// and compares.
    pub fn compare(
        &self,
        target: &mut RankGroup,
        together: bool,
    ) -> Result<GoldenReport, GoldenError> {
        let hidden_size = target.spec().hidden_size;
        self.prompts.iter().try_for_each(|prompt| prompt.check_width(hidden_size))?;
        let mut report = GoldenReport::default();
        let size = if together { self.prompts.len() } else { 1 };
        for prompts in self.prompts.chunks(size.max(1)) {
            let samples = prompts.iter().map(GoldenPrompt::sample).collect::<Result<_, _>>()?;
            let layers: BTreeSet<_> = prompts.iter().flat_map(GoldenPrompt::layers).collect();
            let wanted = Wanted {
                layers: layers.into_iter().collect(),
                embeddings: true,
                normed: true,
                logits: true,
                routers: true,
            };
            let probe = target.probe(&TokenBatch::new(samples), wanted)?;
            let mut start = 0;
            for prompt in prompts {
                let end = start + prompt.input_ids.len();
                prompt.compare_states(&probe.part(start..end), &mut report);
                start = end;
            }
        }
        for prompt in &self.prompts {
            prompt.compare_greedy(target, &mut report)?;
        }
        Ok(report)
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

    fn compare_states(&self, probe: &Probe, report: &mut GoldenReport) {
        let width = probe.capture.hidden_size;
        let margins = self.smallest_margins();
        let mut differences = Vec::new();
        let mut compare = |part: &str, found: &[f32], expected: &[f32]| {
            let tensor = format!("{}.{part}", self.name);
            differences.push(Difference::of(tensor, found, expected));
        };
        for (&k, expected) in &self.states {
            let found = match k {
                0 => probe.embeddings.clone(),
                _ => layer_rows(probe, k - 1),
            };
            let found = pick(&found, &self.rows, width);
            compare(&format!("h_{k}"), &found, expected);
            let tensor = format!("{}.h_{k}", self.name);
            let values = (found.as_slice(), expected.as_slice());
            report.cosines.push(Cosines::of(tensor, values, width, &margins));
        }
        if !self.normed.is_empty() {
            compare("normed", &pick(&probe.normed, &self.rows, width), &self.normed);
        }
        if !self.logits.is_empty() {
            let start = probe.logits.len().saturating_sub(self.logits.len());
            compare("logits", &probe.logits[start..], &self.logits);
        }
        report.differences.append(&mut differences);
        self.compare_routers(probe, report);
    }

    /// The smallest margin that any router had for the row of each state.
    fn smallest_margins(&self) -> Vec<f32> {
        let margin = |&row: &usize| {
            let margins = self.routers.values().filter_map(|choice| choice.margins.get(row));
            margins.copied().fold(f32::INFINITY, f32::min)
        };
        self.rows.iter().map(margin).collect()
    }

    fn compare_routers(&self, probe: &Probe, report: &mut GoldenReport) {
        for (layer, expected) in &self.routers {
            let found = probe.routers.iter().find(|(index, _)| index == layer);
            let top_k = expected.indices.len() / expected.margins.len().max(1);
            for (row, &margin) in expected.margins.iter().enumerate() {
                if margin < ROUTER_NEAR_TIE {
                    report.routed_near_ties += 1;
                    continue;
                }
                report.routed += 1;
                let choices = row * top_k..(row + 1) * top_k;
                let found = found.and_then(|(_, choice)| sorted(choice, choices.clone()));
                if found.is_none() || found != sorted(expected, choices) {
                    report.misrouted.push(format!("{} layer {layer} row {row}", self.name));
                }
            }
            if let Some((_, choice)) = found {
                let tensor = format!("{}.router.{layer}.weights", self.name);
                // A near tie may exchange experts, and their weights with them.
                let is_clear = expected.margins.iter().all(|&margin| margin >= ROUTER_NEAR_TIE);
                if is_clear {
                    let found = Difference::of(tensor, &choice.weights, &expected.weights);
                    report.differences.push(found);
                }
            }
        }
    }

    fn compare_greedy(
        &self,
        target: &mut RankGroup,
        report: &mut GoldenReport,
    ) -> Result<(), GoldenError> {
        let cache = CacheId(u64::MAX);
        let mut tokens = self.input_ids.clone();
        let mut keep = 0;
        for (step, &expected) in self.greedy_ids.iter().enumerate() {
            let request = ExtendRequest { cache, keep, tokens: &tokens, layers: &[] };
            let logits = target.extend(&request)?.logits;
            let last = &logits[logits.len() - logits.len() / tokens.len()..];
            if argmax(last) != expected as usize {
                let margin = self.greedy_margins.get(step).copied().unwrap_or(f32::INFINITY);
                if margin >= LOGIT_NEAR_TIE {
                    report.greedy_wrong.push(format!("{} step {step}", self.name));
                }
                break;
            }
            report.greedy += 1;
            keep += tokens.len();
            tokens = vec![expected];
        }
        target.drop_cache(cache);
        Ok(())
    }
}

fn layer_rows(probe: &Probe, layer: usize) -> Vec<f32> {
    let found = probe.capture.layers.iter().find(|found| usize::from(found.layer.0) == layer);
    found.map_or(Vec::new(), |found| found.rows.to_f32())
}

fn pick(values: &[f32], rows: &[usize], width: usize) -> Vec<f32> {
    let row = |&row: &usize| values.get(row * width..(row + 1) * width).unwrap_or(&[]);
    rows.iter().flat_map(row).copied().collect()
}

fn sorted(choice: &RouterChoice, choices: std::ops::Range<usize>) -> Option<Vec<u32>> {
    let mut experts = choice.indices.get(choices)?.to_vec();
    experts.sort_unstable();
    Some(experts)
}

/// Position of the largest value, the first of equals.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] {
            best = index;
        }
    }
    best
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
