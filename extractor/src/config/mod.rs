//! The configuration of an extraction: defaults, a TOML file, environment and flags, in rising
//! order of weight, checked once. Knows where each value came from, not what is done with it.

mod args;
mod layers;
mod resolve;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shared::{CaptureSpec, StateDtype};
use thiserror::Error;

pub use args::ConfigArgs;
pub use layers::LayerChoice;
pub use resolve::{Origin, Resolved};

use crate::encode::{EncodeOptions, Overlong};
use crate::intake::IntakeOptions;
use crate::target::{Compute, Device, EngineOptions, Exchange, QaNormEps, TargetSpec};

/// Everything that says what an extraction does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExtractConfig {
    /// The frozen model.
    pub target: TargetConfig,
    /// The conversations.
    pub data: DataConfig,
    /// What is recorded.
    pub capture: CaptureConfig,
    /// Where to, and in which portions.
    pub run: RunConfig,
}

/// Section `[target]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TargetConfig {
    /// Directory with config.json, weights and tokenizer.
    pub model: Option<PathBuf>,
    /// Where the model runs.
    pub device: Device,
    /// Number format of the products: bf16 or f32; auto is what the device does best.
    pub compute: Compute,
    /// Number of tensor-parallel ranks.
    pub tp: usize,
    /// How rows cross GPUs: nccl, or copies by the copy engines.
    pub exchange: Exchange,
    /// Epsilon of the norms inside latent attention: `config` as vLLM, `hf` as Hugging Face.
    pub qa_norm_eps: QaNormEps,
    /// Which revision of the model this is, for the fingerprint.
    pub revision: String,
}

/// Section `[data]`. The keys after `prompts` are those of [`EncodeOptions`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// JSONL files, read in this order.
    pub prompts: Vec<PathBuf>,
    /// Longest sample, in tokens.
    pub max_tokens: usize,
    /// What happens to longer ones.
    pub overlong: Overlong,
    /// Samples with fewer trained tokens are rejected.
    pub min_trainable_tokens: usize,
    /// Train the last answer only.
    pub last_turn_only: bool,
    /// Accept chats and tokenised rows of which every token is trained.
    pub allow_all_trainable: bool,
    /// Special tokens whose text in an answer is meant as such.
    pub answer_specials: Vec<String>,
    /// Variables for the chat template.
    pub chat_template_kwargs: Map<String, Value>,
}

/// Section `[capture]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureConfig {
    /// Which layers' outputs.
    pub layers: LayerChoice,
    /// How they are stored.
    pub dtype: StateDtype,
}

/// Section `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Directory of the data set.
    pub dataset: Option<PathBuf>,
    /// Wanted tokens of a batch.
    pub batch_tokens: usize,
    /// Wanted bytes of a shard.
    pub shard_bytes: u64,
    /// Largest share of rejected lines, 0 to 1, with which a run still succeeds.
    pub reject_limit: f64,
    /// Stop after this many lines, or files of an import; those done before count too.
    pub limit: Option<u64>,
}

impl Default for TargetConfig {
    fn default() -> Self {
        Self {
            model: None,
            device: Device::Cpu,
            compute: Compute::Auto,
            tp: 1,
            exchange: Exchange::Nccl,
            qa_norm_eps: QaNormEps::Config,
            revision: String::new(),
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        let options = EncodeOptions::default();
        Self {
            prompts: Vec::new(),
            max_tokens: options.max_tokens,
            overlong: options.overlong,
            min_trainable_tokens: options.min_trainable_tokens,
            last_turn_only: options.last_turn_only,
            allow_all_trainable: options.allow_all_trainable,
            answer_specials: options.answer_specials,
            chat_template_kwargs: options.chat_template_kwargs,
        }
    }
}

impl DataConfig {
    /// The part of this section that encoding needs, for the model of `spec`: no sample is longer
    /// than it has positions for.
    pub fn encode_options(&self, spec: &TargetSpec) -> EncodeOptions {
        let positions = spec.max_position_embeddings;
        if positions < self.max_tokens {
            let asked = self.max_tokens;
            tracing::warn!(
                "max_tokens is {asked}, the model has {positions} positions: they count"
            );
        }
        EncodeOptions {
            max_tokens: self.max_tokens.min(positions),
            overlong: self.overlong,
            min_trainable_tokens: self.min_trainable_tokens,
            last_turn_only: self.last_turn_only,
            allow_all_trainable: self.allow_all_trainable,
            answer_specials: self.answer_specials.clone(),
            chat_template_kwargs: self.chat_template_kwargs.clone(),
            vocab_size: Some(spec.vocab_size),
        }
    }
}

impl Default for CaptureConfig {
    fn default() -> Self {
        Self { layers: LayerChoice::Default, dtype: StateDtype::Bf16 }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            dataset: None,
            batch_tokens: 8192,
            shard_bytes: 1 << 30,
            reject_limit: 0.10,
            limit: None,
        }
    }
}

/// What is wrong with the configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("reading configuration {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not TOML: {detail}", .path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// The parser's message, with the place.
        detail: String,
    },
    /// A key that does not exist.
    #[error("{}:{line}: there is no key `{key}`; {hint}", .path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
        /// The key as written.
        key: String,
        /// What there is.
        hint: String,
    },
    /// A value of the wrong type or outside its range.
    #[error("`{key}` ({origin}): {detail}")]
    Value {
        /// `section.key`.
        key: String,
        /// Where the value came from.
        origin: Origin,
        /// What is expected.
        detail: String,
    },
    /// A value without which a command cannot work.
    #[error("`{key}` is not set: pass --{flag}, or set it in the configuration file")]
    Missing {
        /// `section.key`.
        key: &'static str,
        /// The flag of the same name.
        flag: &'static str,
    },
    /// A value that has no text form.
    #[error("writing the configuration as text: {0}")]
    Unprintable(String),
    /// Layers that the model does not have, or in the wrong order.
    #[error("capture.layers: {0}")]
    Layers(String),
}

impl ConfigError {
    pub(crate) fn unprintable(error: impl std::fmt::Display) -> Self {
        Self::Unprintable(error.to_string())
    }

    /// Process exit code: 74 I/O, 78 configuration.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Read { .. }) { 74 } else { 78 }
    }
}

impl ExtractConfig {
    /// The model's directory, which most commands need.
    pub fn model(&self) -> Result<&PathBuf, ConfigError> {
        let missing = ConfigError::Missing { key: "target.model", flag: "model" };
        self.target.model.as_ref().ok_or(missing)
    }

    /// The data set's directory, which most commands need.
    pub fn dataset(&self) -> Result<&PathBuf, ConfigError> {
        let missing = ConfigError::Missing { key: "run.dataset", flag: "dataset" };
        self.run.dataset.as_ref().ok_or(missing)
    }

    /// What every sample of the data set contains.
    pub fn capture_spec(&self, spec: &TargetSpec) -> Result<CaptureSpec, ConfigError> {
        let layers = self.capture.layers.resolve(spec.num_layers)?;
        Ok(CaptureSpec { layers, hidden_size: spec.hidden_size, dtype: self.capture.dtype })
    }

    /// What the intake needs.
    pub fn intake(&self) -> IntakeOptions {
        IntakeOptions {
            prompts: self.data.prompts.clone(),
            batch_tokens: self.run.batch_tokens,
            limit: self.run.limit,
        }
    }

    /// What the target engine needs.
    pub fn engine_options(&self) -> Result<EngineOptions, ConfigError> {
        Ok(EngineOptions {
            device: self.target.device,
            compute: self.target.compute,
            // A sample longer than the budget has a batch of its own.
            batch_tokens: self.run.batch_tokens.max(self.data.max_tokens),
            tp: self.target.tp,
            exchange: self.target.exchange,
            qa_norm_eps: self.target.qa_norm_eps,
            states: self.capture.dtype,
            ..EngineOptions::new(self.model()?)
        })
    }

    /// The configuration as TOML text.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(ConfigError::unprintable)
    }

    /// The first value outside its range, as (`section.key`, what is expected).
    fn out_of_range(&self) -> Option<(&'static str, String)> {
        let (data, run) = (&self.data, &self.run);
        let checks = [
            ("target.tp", (1..=256).contains(&self.target.tp), "1 to 256 ranks"),
            ("data.max_tokens", (2..=1 << 24).contains(&data.max_tokens), "2 to 16,777,216 tokens"),
            (
                "data.min_trainable_tokens",
                (1..=data.max_tokens).contains(&data.min_trainable_tokens),
                "1 to data.max_tokens",
            ),
            (
                "run.batch_tokens",
                (1..=1 << 24).contains(&run.batch_tokens),
                "1 to 16,777,216 tokens",
            ),
            ("run.shard_bytes", run.shard_bytes >= 1 << 16, "at least 65,536 bytes"),
            ("run.reject_limit", (0.0..=1.0).contains(&run.reject_limit), "0 to 1"),
            ("run.limit", run.limit != Some(0), "at least 1 line"),
        ];
        let (key, _, expected) = checks.into_iter().find(|(_, holds, _)| !holds)?;
        Some((key, format!("{expected} expected")))
    }
}
