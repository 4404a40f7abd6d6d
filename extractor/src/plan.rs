//! What an extraction would do: samples, tokens, rejects, batches, bytes, time. Encodes every line
//! that has no outcome yet and loads no weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use shared::CaptureSpec;
use shared::durable::DatasetDir;
use shared::manifest::{Manifest, ManifestError};
use shared::shard::ShardId;
use thiserror::Error;

use crate::batch::Batcher;
use crate::config::{ConfigError, ExtractConfig};
use crate::encode::{Encoder, EncoderError};
use crate::fingerprint::{as_begun, fingerprint};
use crate::input_file::{self, Survey};
use crate::intake::{Admission, Intake, IntakeError};
use crate::pipeline::PipelineError;
use crate::reject::{Reject, RejectReason};
use crate::shutdown::Shutdown;
use crate::target::{TargetError, TargetSpec};
use crate::target_dir;

/// Tokens a second assumed where none are given. A measurement is better: `extractor bench`.
pub const ASSUMED_TOKENS_PER_SECOND: f64 = 1000.0;
/// Share of the forecast bytes that must be free beyond them: headers, manifest and its log.
const SLACK: f64 = 0.05;

/// Why there is no plan, or why it cannot be carried out.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's config.json.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Tokenizer or template.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// The input files.
    #[error(transparent)]
    Intake(#[from] IntakeError),
    /// The data set that is there already.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// An input file that went away.
    #[error("reading {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The disk cannot hold what would be written.
    #[error(
        "{needed} bytes are needed for {tokens} tokens, {free} are free where the data set lies: \
         free some space (quarantine/ in the data set may be emptied), lower --limit, or store the \
         states with --dtype fp8"
    )]
    NoSpace {
        /// Free bytes.
        free: u64,
        /// Forecast bytes with slack.
        needed: u64,
        /// Tokens to extract.
        tokens: u64,
    },
}

impl PlanError {
    /// Process exit code, that of the cause.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            Self::Encoder(error) => error.exit_code(),
            Self::Intake(error) => error.exit_code(),
            Self::Manifest(error) => error.exit_code(),
            Self::Read { .. } | Self::NoSpace { .. } => 74,
        }
    }
}

/// The forecast of one extraction.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// Lines that are looked at: not blank, and within the line limit.
    pub lines: u64,
    /// Lines with an outcome from earlier runs.
    pub known_lines: u64,
    /// Distinct samples to extract.
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
    /// Bytes of the target's embeddings, head and configuration that are not in the data set yet.
    pub target_bytes: u64,
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
    /// The input files as they were before the first line was looked at.
    #[serde(skip)]
    pub inputs: Vec<Survey>,
}

impl Plan {
    /// The plan of `extractor plan`: `rate` is in tokens a second. A data set that exists already
    /// is looked into, not changed, and refused where a run refuses it.
    pub fn standalone(config: &ExtractConfig, rate: Option<f64>) -> Result<Self, PipelineError> {
        let spec = TargetSpec::read(config.model()?)?;
        let contract = config.capture_spec(&spec)?;
        let encoder = Encoder::load(config.model()?, config.data.encode_options(&spec))?;
        let dir = config.run.dataset.as_deref().map(DatasetDir::new);
        let manifest = match &dir {
            Some(dir) => to_continue(config, dir, &encoder, (&spec, &contract))?,
            None => None,
        };
        let stop = Shutdown::default();
        let mut plan = Self::make(config, &encoder, &contract, manifest.as_ref(), &stop)?;
        // What is missing a run writes anew.
        if let Some(dir) = dir.filter(|_| manifest.is_some() && plan.target_bytes == 0) {
            target_dir::require_undamaged(&dir.target())?;
        }
        plan.rate_assumed = rate.is_none();
        plan.tokens_per_second = rate.unwrap_or(ASSUMED_TOKENS_PER_SECOND);
        plan.seconds = plan.tokens as f64 / plan.tokens_per_second;
        Ok(plan)
    }

    /// Encodes every line of the input that has no outcome in `manifest`. Once a stop is asked for
    /// no further file or line is looked at, and what comes back is no plan of the whole.
    pub fn make(
        config: &ExtractConfig,
        encoder: &Encoder,
        contract: &CaptureSpec,
        manifest: Option<&Manifest>,
        stop: &Shutdown,
    ) -> Result<Self, PlanError> {
        let mut plan = Self {
            layers: contract.layers.iter().map(|layer| layer.0).collect(),
            reject_limit: config.run.reject_limit,
            ..Self::default()
        };
        let options = config.intake();
        let mut batcher = Batcher::new(options.batch_tokens);
        let intake = Intake::open(&options, encoder, manifest)?;
        for path in options.prompts.iter().take_while(|_| !stop.requested()) {
            let read = |source| PlanError::Read { path: path.clone(), source };
            plan.inputs.push(input_file::survey(path).map_err(read)?);
        }
        for admission in intake.within(&plan.inputs).while_not(stop) {
            plan.count(admission?, &mut batcher);
        }
        plan.batches += u64::from(batcher.finish().is_some());
        plan.state_bytes = plan.tokens * contract.bytes_per_token() as u64;
        plan.total_bytes = plan.state_bytes + plan.tokens * 5;
        let (model, dataset) = (config.model()?, config.run.dataset.as_deref());
        plan.target_bytes = target_dir::bytes_to_write(dataset, model, &TargetSpec::read(model)?);
        plan.shards = plan.total_bytes.div_ceil(config.run.shard_bytes.max(1));
        plan.free_bytes = dataset.and_then(free_bytes);
        Ok(plan)
    }

    /// Share of lines that cannot be used, 0 to 1.
    pub fn reject_rate(&self) -> f64 {
        self.rejected as f64 / self.lines.max(1) as f64
    }

    /// Whether the data set fits into the free space; `true` where that is not known.
    pub fn fits(&self) -> bool {
        self.free_bytes.is_none_or(|free| self.bytes_needed() <= free)
    }

    /// Whether a run would succeed as far as can be told now.
    pub fn succeeds(&self) -> bool {
        let has_work = self.samples + self.known_lines > 0;
        self.fits() && self.reject_rate() <= self.reject_limit && has_work
    }

    /// Refuses to start what the disk cannot hold.
    pub fn require_space(&self) -> Result<(), PlanError> {
        match self.free_bytes {
            Some(free) if !self.fits() => {
                Err(PlanError::NoSpace { free, needed: self.bytes_needed(), tokens: self.tokens })
            }
            _ => Ok(()),
        }
    }

    fn bytes_needed(&self) -> u64 {
        ((self.total_bytes + self.target_bytes) as f64 * (1.0 + SLACK)) as u64
    }

    fn count(&mut self, admission: Admission, batcher: &mut Batcher) {
        self.lines += 1;
        match admission {
            Admission::Known => self.known_lines += 1,
            Admission::Duplicate(_) => self.duplicates += 1,
            Admission::Rejected(reject, _) => self.count_reject(&reject),
            Admission::Fresh(sample, record) => {
                self.samples += 1;
                self.truncated += u64::from(record.truncated);
                self.tokens += sample.tokens() as u64;
                self.trainable_tokens += sample.trainable_tokens() as u64;
                self.longest = self.longest.max(sample.tokens() as u64);
                self.batches += u64::from(batcher.push(sample).is_some());
            }
        }
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

/// The data set in `dir` that a run would continue, refused as [`Manifest::open_for_write`] refuses
/// it, with nothing written. `None` where all lines would be pending.
fn to_continue(
    config: &ExtractConfig,
    dir: &DatasetDir,
    encoder: &Encoder,
    (spec, contract): (&TargetSpec, &CaptureSpec),
) -> Result<Option<Manifest>, PipelineError> {
    let path = dir.manifest();
    // One without bytes was being created.
    let Some(found) = path.metadata().ok().filter(|it| it.len() > 0) else {
        let names = dir.files().list(&dir.shards()).unwrap_or_default();
        let is_shard = |name: &str| name.parse::<ShardId>().is_ok();
        return match names.iter().filter(|name| name.to_str().is_some_and(is_shard)).count() {
            0 => Ok(None),
            shards => Err(ManifestError::Lost { dir: dir.root().to_path_buf(), shards }.into()),
        };
    };
    let current = fingerprint(config, spec, encoder, contract)?;
    let current = as_begun(current, encoder, dir.root())?;
    if found.permissions().readonly() {
        return Err(ManifestError::Sealed(path).into());
    }
    let manifest = Manifest::open_read(dir.root())?;
    manifest.require_newest()?;
    let changes = manifest.fingerprint().diff(&current);
    if changes.is_empty() {
        Ok(Some(manifest))
    } else if manifest.committed_samples()?.is_empty() {
        // A run takes the new settings.
        Ok(None)
    } else {
        Err(ManifestError::FingerprintChanged(changes).into())
    }
}

/// Free bytes for this user on the file system of `path`, or of its nearest ancestor that exists.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let absolute: PathBuf = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_does_not_fit_is_refused_with_the_numbers() {
        let plan = Plan { tokens: 10, total_bytes: 900, target_bytes: 100, ..Plan::default() };
        let with_free = |free| Plan { free_bytes: free, ..plan.clone() };
        assert!(with_free(None).require_space().is_ok());
        assert!(with_free(Some(1050)).require_space().is_ok());
        let refused = with_free(Some(1049)).require_space().unwrap_err();
        assert_eq!(refused.exit_code(), 74);
        let text = refused.to_string();
        assert!(text.contains("1050 bytes") && text.contains("1049 are free"), "{text}");
        assert!(text.contains("10 tokens"), "{text}");
    }
}
