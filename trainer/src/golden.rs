//! Files that fix loss, metrics and gradients of one training step, made by an independent
//! implementation in double precision, and the comparison with what this trainer computes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use thiserror::Error;

use crate::batch::{BatchError, BatchTokens, FrozenTarget, TargetWeights, TrainBatch};
use crate::cosines;
use crate::draft::{
    AttentionConfig, DraftConfig, DraftConfigError, DraftVocabulary, Eagle3Draft, Param,
    ParamShapeError, VocabularyError, Yarn, rotary_frequencies,
};
use crate::masks::MaskMode;
use crate::ops::DraftOps;
use crate::ttt::{Trace, TttError, TttOptions, TttOutput, ttt_step};

/// A golden file that cannot be read or does not fit together.
#[derive(Debug, Error)]
pub enum GoldenError {
    /// The file is not readable.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Not safetensors.
    #[error("the file is no safetensors file")]
    Container(#[from] safetensors::SafeTensorError),
    /// The metadata key `config` is absent or no JSON of the known form.
    #[error("metadata key `config` does not describe a training step: {0}")]
    Config(String),
    /// A tensor is absent or of an unknown type.
    #[error("tensor {name} is {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// Draft sizes.
    #[error(transparent)]
    Draft(#[from] DraftConfigError),
    /// A draft weight of another shape.
    #[error(transparent)]
    Shape(#[from] ParamShapeError),
    /// The vocabulary mapping.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// The batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The step.
    #[error(transparent)]
    Step(#[from] TttError),
}

impl GoldenError {
    /// Exit code of a run that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            _ => 65,
        }
    }
}

/// One file in memory; real numbers are kept in f64.
#[derive(Clone, Debug)]
pub struct GoldenCase {
    /// Sizes and switches of the draft.
    pub config: DraftConfig,
    /// The step.
    pub options: TttOptions,
    /// Ids, mask and documents.
    pub tokens: BatchTokens,
    target_norm_eps: f64,
    tensors: HashMap<String, (Vec<usize>, Vec<f64>)>,
}

/// One expected value and how far the computed one is from it.
#[derive(Clone, Debug)]
pub struct Difference {
    /// What was compared: `loss`, `logits.0`, `grad.fc.weight`, ...
    pub name: String,
    /// Largest absolute difference; for gradients over the largest expected entry.
    pub value: f64,
}

#[derive(Deserialize)]
struct GoldenConfig {
    attention: String,
    attention_scale: f64,
    draft_vocab_size: usize,
    fc_norm: bool,
    head_dim: usize,
    hidden_size: usize,
    intermediate_size: usize,
    #[serde(default)]
    kv_lora_rank: usize,
    mask_mode: String,
    norm_before_residual: bool,
    norm_output: bool,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    #[serde(default)]
    q_lora_rank: usize,
    #[serde(default)]
    qk_nope_head_dim: usize,
    #[serde(default)]
    qk_rope_head_dim: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
    step_decay: f64,
    target_rms_norm_eps: f64,
    ttt_steps: usize,
    #[serde(default)]
    v_head_dim: usize,
    vocab_size: usize,
    yarn: Option<Yarn>,
    zero_last_mask: bool,
}

impl GoldenConfig {
    fn draft(&self) -> DraftConfig {
        let attention = match self.attention.as_str() {
            "mla" => AttentionConfig::Mla {
                q_lora_rank: self.q_lora_rank,
                kv_lora_rank: self.kv_lora_rank,
                qk_nope_head_dim: self.qk_nope_head_dim,
                qk_rope_head_dim: self.qk_rope_head_dim,
                v_head_dim: self.v_head_dim,
            },
            _ => AttentionConfig::Gqa {
                num_key_value_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
            },
        };
        DraftConfig {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_attention_heads: self.num_attention_heads,
            attention,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            yarn: self.yarn,
            vocab_size: self.vocab_size,
            draft_vocab_size: self.draft_vocab_size,
            num_aux: 3,
            fc_norm: self.fc_norm,
            norm_output: self.norm_output,
            norm_before_residual: self.norm_before_residual,
        }
    }

    fn options(&self) -> TttOptions {
        TttOptions {
            steps: self.ttt_steps,
            step_decay: self.step_decay,
            mask_mode: match self.mask_mode.as_str() {
                "specforge" => MaskMode::Specforge { zero_last_mask: self.zero_last_mask },
                _ => MaskMode::Chain,
            },
            trace: true,
            ..TttOptions::default()
        }
    }
}

impl GoldenCase {
    /// Reads a file.
    pub fn open(path: &Path) -> Result<Self, GoldenError> {
        let bytes = std::fs::read(path)
            .map_err(|source| GoldenError::Read { path: path.to_owned(), source })?;
        Self::from_bytes(&bytes)
    }

    /// Reads the content of a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, GoldenError> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let text = header.metadata().as_ref().and_then(|map| map.get("config"));
        let text = text.ok_or_else(|| GoldenError::Config("it is absent".to_owned()))?;
        let config: GoldenConfig =
            serde_json::from_str(text).map_err(|error| GoldenError::Config(error.to_string()))?;
        let draft = config.draft();
        draft.validate()?;
        let mut tensors = HashMap::new();
        for (name, view) in SafeTensors::deserialize(bytes)?.tensors() {
            let values = numbers(view.dtype(), view.data()).ok_or(GoldenError::Tensor {
                name: name.clone(),
                problem: "of a type golden files do not use",
            })?;
            tensors.insert(name, (view.shape().to_vec(), values));
        }
        let scale = (vec![1], vec![config.attention_scale]);
        tensors.insert("expected.attention_scale".to_owned(), scale);
        let whole = |name: &str| Ok::<_, GoldenError>(find(&tensors, name)?.1.iter());
        let tokens = BatchTokens::new(
            whole("input.input_ids")?.map(|&id| id as u32).collect(),
            &whole("input.loss_mask")?.map(|&mark| mark as u8).collect::<Vec<_>>(),
            whole("input.doc_offsets")?.map(|&offset| offset as usize).collect(),
        )?;
        Ok(Self {
            options: config.options(),
            target_norm_eps: config.target_rms_norm_eps,
            config: draft,
            tokens,
            tensors,
        })
    }

    /// Draft weights of the file, without gradients.
    pub fn draft<B: Backend>(&self, device: &B::Device) -> Result<Eagle3Draft<B>, GoldenError> {
        Eagle3Draft::from_parameters(self.config.clone(), &mut |name, _| {
            let (shape, values) = find(&self.tensors, &format!("draft.{name}"))?;
            Ok(Param::from_vec(values.iter().map(|&x| x as f32).collect(), shape, device))
        })
    }

    /// The target's part of the file.
    pub fn target<B: Backend>(&self, device: &B::Device) -> Result<FrozenTarget<B>, GoldenError> {
        let norm = match self.param::<B>("input.target.norm.weight", device)? {
            Param::Vector(norm) => norm,
            Param::Matrix(norm) => norm.flatten(0, 1),
        };
        let weights = TargetWeights {
            embed_tokens: self.matrix("input.embed_tokens.weight", device)?,
            norm,
            norm_eps: self.target_norm_eps,
            lm_head: self.matrix("input.target.lm_head.weight", device)?,
        };
        let d2t: Vec<i64> = self.values("input.d2t")?.iter().map(|&x| x as i64).collect();
        let t2d: Vec<bool> = self.values("input.t2d")?.iter().map(|&x| x != 0.0).collect();
        Ok(FrozenTarget::new(weights, DraftVocabulary::from_mapping(&d2t, &t2d)?)?)
    }

    /// Tokens and states of the file.
    pub fn batch<B: Backend>(&self, device: &B::Device) -> Result<TrainBatch<B>, GoldenError> {
        let aux =
            (0..self.config.num_aux).map(|at| self.matrix(&format!("input.aux.{at}"), device));
        let aux = Tensor::cat(aux.collect::<Result<Vec<_>, _>>()?, 1);
        let last_hidden = self.matrix("input.last_hidden", device)?;
        Ok(TrainBatch::new(self.tokens.clone(), aux, last_hidden)?)
    }

    /// Entries of a tensor of the file, row-major.
    pub fn values(&self, name: &str) -> Result<&[f64], GoldenError> {
        Ok(&find(&self.tensors, name)?.1)
    }

    fn param<B: Backend>(&self, name: &str, device: &B::Device) -> Result<Param<B>, GoldenError> {
        let (shape, values) = find(&self.tensors, name)?;
        Ok(Param::from_vec(values.iter().map(|&x| x as f32).collect(), shape, device))
    }

    fn matrix<B: Backend>(
        &self,
        name: &str,
        device: &B::Device,
    ) -> Result<Tensor<B, 2>, GoldenError> {
        match self.param(name, device)? {
            Param::Matrix(matrix) => Ok(matrix),
            Param::Vector(_) => {
                Err(GoldenError::Tensor { name: name.to_owned(), problem: "no matrix" })
            }
        }
    }

    /// Runs the step of the file, densely or row-sparsely, and compares everything expected.
    pub fn compare<B: AutodiffBackend + DraftOps>(
        &self,
        row_sparse: bool,
        device: &B::Device,
    ) -> Result<Vec<Difference>, GoldenError> {
        let draft = Eagle3Draft::<B>::tracked(&self.draft(device)?);
        let target = self.target(device)?;
        let batch = self.batch(device)?;
        let options = TttOptions { row_sparse, ..self.options.clone() };
        let output = ttt_step(&draft, &target, &batch, &options)?;
        let mut list = self.compare_metrics(&output)?;
        if let Some(trace) = &output.trace {
            list.extend(self.compare_trace(&draft, trace)?);
        }
        let mut gradients = output.backward();
        for (name, gradient) in draft.gradients(&mut gradients) {
            let name = format!("grad.{name}");
            let expected = self.values(&name)?;
            let computed = gradient.to_vec();
            let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            let divisor = if largest > 0.0 { largest } else { 1.0 };
            let value = largest_difference(computed.iter().map(|&x| f64::from(x)), expected);
            list.push(Difference { name, value: value / divisor });
        }
        Ok(list)
    }

    /// One less the cosine between the gradients of the step in f32 and in `dtype`, by parameter.
    pub fn compare_types<B: AutodiffBackend + DraftOps>(
        &self,
        dtype: FloatDType,
        device: &B::Device,
    ) -> Result<Vec<Difference>, GoldenError> {
        let exact = self.gradients::<B>(FloatDType::F32, device)?;
        Ok(cosines::turned(&exact, &self.gradients::<B>(dtype, device)?))
    }

    fn gradients<B: AutodiffBackend + DraftOps>(
        &self,
        dtype: FloatDType,
        device: &B::Device,
    ) -> Result<Vec<(String, Vec<f32>)>, GoldenError> {
        let draft = self.draft::<B::InnerBackend>(device)?.with_dtype(dtype);
        let target = self.target(device)?.with_dtype(dtype);
        let batch = self.batch(device)?.with_dtype(dtype);
        let options = TttOptions { trace: false, ..self.options.clone() };
        Ok(cosines::gradients::<B>(&draft, &target, &batch, &options)?)
    }

    fn compare_metrics<B: AutodiffBackend>(
        &self,
        output: &TttOutput<B>,
    ) -> Result<Vec<Difference>, GoldenError> {
        let metrics = output.metrics();
        let loss: Vec<f64> = output.loss.to_data().iter::<f64>().collect();
        let pairs = [
            ("attention_scale", vec![self.config.attention_scale()]),
            ("step_rows", metrics.step_rows.iter().map(|&rows| rows as f64).collect()),
            ("step_loss_sum", metrics.step_loss_sum.clone()),
            ("step_loss", metrics.step_loss()),
            ("loss", loss),
            ("acc", metrics.acc()),
            ("full_acc", metrics.full_acc()),
            ("alpha", metrics.alpha()),
            ("accept_len", vec![metrics.accept_len()]),
        ];
        let mut list = vec![Difference {
            name: "rope.inv_freq".to_owned(),
            value: largest_difference(
                rotary_frequencies(&self.config).into_iter(),
                self.values("rope.inv_freq")?,
            ),
        }];
        for (name, computed) in pairs {
            let expected = self.values(&format!("expected.{name}"))?;
            let value = largest_difference(computed.into_iter(), expected);
            list.push(Difference { name: name.to_owned(), value });
        }
        Ok(list)
    }

    fn compare_trace<B: AutodiffBackend + DraftOps>(
        &self,
        draft: &Eagle3Draft<B>,
        trace: &Trace<B>,
    ) -> Result<Vec<Difference>, GoldenError> {
        let mask = trace.masks.in_loss.concat().into_iter().map(|row| f64::from(u8::from(row)));
        let value = largest_difference(mask, self.values("expected.row_mask")?);
        let mut list = vec![Difference { name: "row_mask".to_owned(), value }];
        let mut rows = |name: String, rows: &[u32], computed: Tensor<B, 2>| {
            let width = computed.dims()[1];
            let values = self.values(&format!("expected.{name}"))?;
            let pick = |&row: &u32| &values[row as usize * width..(row as usize + 1) * width];
            let expected: Vec<f64> = rows.iter().flat_map(pick).copied().collect();
            let data = computed.to_data();
            let value = largest_difference(data.iter::<f64>(), &expected);
            list.push(Difference { name, value });
            Ok::<_, GoldenError>(())
        };
        rows("h0".to_owned(), &trace.rows.base, trace.h0.clone())?;
        if let (Some(z), Some(need)) = (trace.layer_output.first(), trace.rows.need.first()) {
            rows("z.0".to_owned(), need, z.clone())?;
        }
        for step in [0, self.options.steps - 1] {
            if let (Some(normed), Some(need)) = (trace.normed.get(step), trace.rows.need.get(step))
            {
                let logits = B::project(normed.clone(), draft.lm_head.clone());
                rows(format!("logits.{step}"), need, logits)?;
            }
        }
        Ok(list)
    }
}

fn find<'a>(
    tensors: &'a HashMap<String, (Vec<usize>, Vec<f64>)>,
    name: &str,
) -> Result<&'a (Vec<usize>, Vec<f64>), GoldenError> {
    let absent = || GoldenError::Tensor { name: name.to_owned(), problem: "absent" };
    tensors.get(name).ok_or_else(absent)
}

/// Cosine of the angle between two vectors; 1 between zeros.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths == 0.0 { 1.0 } else { dot(a, b) / lengths }
}

/// The largest absolute difference; infinite when counts differ or something is not a number.
fn largest_difference(computed: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
    let computed: Vec<f64> = computed.collect();
    if computed.len() != expected.len() {
        return f64::INFINITY;
    }
    let differences = computed.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, x| if x.is_nan() { f64::INFINITY } else { max.max(x) })
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn words<const N: usize>(bytes: &[u8], number: fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|&word| number(word)).collect()
    }
    Some(match dtype {
        Dtype::F64 => words(bytes, f64::from_le_bytes),
        Dtype::F32 => words(bytes, |word| f64::from(f32::from_le_bytes(word))),
        Dtype::I64 => words(bytes, |word| i64::from_le_bytes(word) as f64),
        Dtype::U8 | Dtype::BOOL => bytes.iter().map(|&byte| f64::from(byte)).collect(),
        _ => return None,
    })
}
