//! What an extraction would do: samples, tokens, rejects, batches, bytes, time. Encodes every line
//! and loads no weights.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Serialize;
use shared::{CaptureSpec, SampleId, TokenSample};
use thiserror::Error;

use crate::batch::{Batcher, TokenBatch};
use crate::config::{ConfigError, ExtractConfig};
use crate::encode::{Encoder, EncoderError};
use crate::model_shape::{ModelShape, ModelShapeError};
use crate::prompts::{Prompts, PromptsError};
use crate::reject::{Reject, RejectReason};

/// Tokens a second assumed where none are given. A measurement is better: `extractor bench`.
pub const ASSUMED_TOKENS_PER_SECOND: f64 = 1000.0;

/// Why there is no plan.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's config.json.
    #[error(transparent)]
    Shape(#[from] ModelShapeError),
    /// Tokenizer or template.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// The prompt files.
    #[error(transparent)]
    Prompts(#[from] PromptsError),
}

impl PlanError {
    /// Process exit code, that of the cause.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::Shape(error) => error.exit_code(),
            Self::Encoder(error) => error.exit_code(),
            Self::Prompts(error) => error.exit_code(),
        }
    }
}

/// The forecast of one extraction.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// Lines that are not blank.
    pub lines: u64,
    /// Distinct samples.
    pub samples: u64,
    /// Lines whose ids and mask equal an earlier line's.
    pub duplicates: u64,
    /// Lines that cannot be used.
    pub rejected: u64,
    /// Rejects by reason.
    pub rejects: BTreeMap<RejectReason, u64>,
    /// The first reject of each reason, with file and line.
    pub examples: Vec<String>,
    /// Samples whose end is cut off.
    pub truncated: u64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Tokens with loss mask 1.
    pub trainable_tokens: u64,
    /// Tokens of the longest sample.
    pub longest: u64,
    /// Forwards.
    pub batches: u64,
    /// Captured layers.
    pub layers: Vec<u16>,
    /// Bytes of hidden states.
    pub state_bytes: u64,
    /// Bytes of ids, masks and states.
    pub total_bytes: u64,
    /// Shards.
    pub shards: u64,
    /// Free bytes where the data set is to lie, if that could be found out.
    pub free_bytes: Option<u64>,
    /// The rate behind `seconds`.
    pub tokens_per_second: f64,
    /// Whether that rate is an assumption.
    pub rate_assumed: bool,
    /// Forecast time.
    pub seconds: f64,
    /// Largest share of rejects with which the run succeeds.
    pub reject_limit: f64,
}

impl Plan {
    /// Encodes every line of the prompts. `rate` is in tokens a second.
    pub fn make(config: &ExtractConfig, rate: Option<f64>) -> Result<Self, PlanError> {
        let shape = ModelShape::load(config.model()?)?;
        let layers = config.capture.layers.resolve(shape.layers)?;
        let options = config.data.encode_options(shape.vocab_size);
        let encoder = Encoder::load(config.model()?, options)?;
        let prompts = Prompts::open(&config.data.prompts)?;

        let mut plan = Self {
            layers: layers.iter().map(|layer| layer.0).collect(),
            reject_limit: config.run.reject_limit,
            ..Self::default()
        };
        let mut batcher = Batcher::new(config.run.batch_tokens);
        let mut seen = HashSet::new();
        let limit = usize::try_from(config.run.limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
        for line in prompts.take(limit) {
            plan.lines += 1;
            match line?.parsed.and_then(|conversation| encoder.encode(&conversation)) {
                Ok(encoded) => {
                    plan.truncated += u64::from(encoded.truncated);
                    plan.count_sample(encoded.sample, &mut seen, &mut batcher);
                }
                Err(reject) => plan.count_reject(&reject),
            }
        }
        plan.count_batch(batcher.finish());

        let spec =
            CaptureSpec { layers, hidden_size: shape.hidden_size, dtype: config.capture.dtype };
        plan.state_bytes = plan.tokens * spec.bytes_per_token() as u64;
        plan.total_bytes = plan.state_bytes + plan.tokens * 5;
        plan.shards = plan.total_bytes.div_ceil(config.run.shard_bytes.max(1));
        plan.free_bytes = config.run.dataset.as_deref().and_then(free_bytes);
        plan.rate_assumed = rate.is_none();
        plan.tokens_per_second = rate.unwrap_or(ASSUMED_TOKENS_PER_SECOND);
        plan.seconds = plan.tokens as f64 / plan.tokens_per_second;
        Ok(plan)
    }

    /// Share of lines that cannot be used, 0 to 1.
    pub fn reject_rate(&self) -> f64 {
        self.rejected as f64 / self.lines.max(1) as f64
    }

    /// Whether the data set fits into the free space; `true` where that is not known.
    pub fn fits(&self) -> bool {
        self.free_bytes.is_none_or(|free| self.total_bytes <= free)
    }

    /// Whether a run would succeed as far as can be told now.
    pub fn succeeds(&self) -> bool {
        self.fits() && self.reject_rate() <= self.reject_limit && self.samples > 0
    }

    fn count_sample(
        &mut self,
        sample: TokenSample,
        seen: &mut HashSet<SampleId>,
        batcher: &mut Batcher,
    ) {
        if !seen.insert(sample.id()) {
            self.duplicates += 1;
            return;
        }
        self.samples += 1;
        self.tokens += sample.tokens() as u64;
        self.trainable_tokens += sample.trainable_tokens() as u64;
        self.longest = self.longest.max(sample.tokens() as u64);
        self.count_batch(batcher.push(sample));
    }

    fn count_batch(&mut self, batch: Option<TokenBatch>) {
        self.batches += u64::from(batch.is_some());
    }

    fn count_reject(&mut self, reject: &Reject) {
        self.rejected += 1;
        let count = self.rejects.entry(reject.reason).or_default();
        *count += 1;
        if *count == 1 {
            self.examples.push(reject.to_string());
        }
    }
}

/// Free bytes for this user on the file system of `path`, or of its nearest ancestor that exists.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let absolute: PathBuf = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}
