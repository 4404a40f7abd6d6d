//! How a run is recorded in the manifest, and what it reports. Knows no tensors.

use serde::Serialize;
use shared::error_chain::in_words;
use shared::manifest::{Conservation, InputFile, Manifest, ManifestError, RunEnd, RunId, RunStart};
use shared::provenance::Provenance;
use thiserror::Error;

use crate::address_space::AddressSpaceError;
use crate::config::{ConfigError, ExtractConfig};
use crate::encode::EncoderError;
use crate::import::ImportError;
use crate::intake::IntakeError;
use crate::plan::PlanError;
use crate::progress::Progress;
use crate::sink::{SinkError, Written};
use crate::target::{EXIT_DIED, TargetError};
use crate::target_dir::TargetDirError;

/// Largest share of samples with non-finite states with which a run still succeeds.
const NON_FINITE_LIMIT: f64 = 0.001;

/// Why an extraction ended early.
#[derive(Debug, Error)]
pub enum PipelineError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Tokenizer or template.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// Too little memory.
    #[error(transparent)]
    AddressSpace(#[from] AddressSpaceError),
    /// The forecast.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The input files.
    #[error(transparent)]
    Intake(#[from] IntakeError),
    /// The target model.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The target's part of the data set.
    #[error(transparent)]
    TargetDir(#[from] TargetDirError),
    /// The thread that writes could not be started.
    #[error(
        "starting the thread that writes shards: the system allows no more threads now \
         (`ulimit -u`, or the pids limit of a container)"
    )]
    WriterThread(#[source] std::io::Error),
    /// Files that another tool wrote.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// Shards.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// More unusable lines than allowed; everything usable is committed.
    #[error(
        "{rejected} of {lines} {unit} were rejected ({:.1} %, limit {:.1} %); the rest is \
         committed. `extractor query DATASET rejects` lists them; --reject-limit raises the limit",
        100.0 * *rejected as f64 / (*lines).max(1) as f64, 100.0 * limit
    )]
    RejectRate {
        /// Rejected lines of all inputs.
        rejected: u64,
        /// Lines of all inputs.
        lines: u64,
        /// `run.reject_limit`.
        limit: f64,
        /// What is counted: lines, or files of an import.
        unit: &'static str,
    },
    /// Too many samples with NaN or infinite states; the finite ones are committed.
    #[error(
        "{non_finite} samples of this run had NaN or infinite states ({committed} were committed), \
         more than 0.1 %: the weights or the engine are at fault; the log names layers and samples"
    )]
    NonFinite {
        /// Samples refused.
        non_finite: u64,
        /// Samples committed.
        committed: u64,
    },
}

impl PipelineError {
    /// Exit code of the process, that of the cause.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::Encoder(error) => error.exit_code(),
            Self::AddressSpace(error) => error.exit_code(),
            Self::Plan(error) => error.exit_code(),
            Self::Intake(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            Self::TargetDir(error) => error.exit_code(),
            Self::WriterThread(_) => EXIT_DIED,
            Self::Import(error) => error.exit_code(),
            Self::Sink(error) => error.exit_code(),
            Self::Manifest(error) => error.exit_code(),
            Self::RejectRate { .. } | Self::NonFinite { .. } => 65,
        }
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every line has an outcome, or the line limit was reached.
    Completed,
    /// A signal asked for the end.
    Stopped,
}

/// What a run did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    /// How it ended.
    pub outcome: Outcome,
    /// Samples, shards and bytes of this run.
    pub written: Written,
    /// All lines of all runs.
    pub conservation: Conservation,
    /// Seconds from the first batch to the last commit.
    pub seconds: f64,
    /// Mean rate of this run.
    pub tokens_per_second: f64,
}

impl RunReport {
    /// The report of a run that was stopped before it began.
    pub(super) fn nothing_done(conservation: Conservation) -> Self {
        let (outcome, written) = (Outcome::Stopped, Written::default());
        Self { outcome, written, conservation, seconds: 0.0, tokens_per_second: 0.0 }
    }
}

/// The row of a run in the manifest, from its start to its end.
pub(crate) struct Record<'a> {
    manifest: &'a Manifest,
    id: RunId,
    reject_limit: f64,
    unit: &'static str,
}

impl<'a> Record<'a> {
    /// `unit` is what the inputs consist of: lines, or files.
    pub(crate) fn begin<'i>(
        manifest: &'a Manifest,
        config: &ExtractConfig,
        inputs: impl IntoIterator<Item = &'i InputFile>,
        unit: &'static str,
    ) -> Result<Self, PipelineError> {
        for input in inputs {
            manifest.register_input(input)?;
        }
        let Provenance { argv, host, .. } = Provenance::here();
        let config_text = config.to_toml()?;
        let id = manifest.begin_run(&RunStart { argv, host, config: config_text })?;
        Ok(Self { manifest, id, reject_limit: config.run.reject_limit, unit })
    }

    pub(crate) fn end(
        self,
        written: Written,
        progress: &Progress,
        stopped: bool,
    ) -> Result<RunReport, PipelineError> {
        let outcome = if stopped { Outcome::Stopped } else { Outcome::Completed };
        let conservation = self.manifest.conservation()?;
        let verdict = self.judge(&written, &conservation, outcome);
        let text = match (&verdict, outcome) {
            (Err(error), _) => error.to_string(),
            (Ok(()), Outcome::Completed) => "completed".to_owned(),
            (Ok(()), Outcome::Stopped) => "stopped".to_owned(),
        };
        let seconds = progress.seconds();
        let (tokens, bytes) = (written.tokens, written.bytes);
        self.manifest.finish_run(self.id, &RunEnd { outcome: text, tokens, bytes, seconds })?;
        verdict?;
        let tokens_per_second = progress.tokens_per_second();
        Ok(RunReport { outcome, written, conservation, seconds, tokens_per_second })
    }

    /// Ends the row of a run that `error` ended, and gives the error back.
    pub(crate) fn fail(
        self,
        written: Written,
        progress: &Progress,
        error: PipelineError,
    ) -> Result<PipelineError, PipelineError> {
        let (outcome, seconds) = (in_words(&error), progress.seconds());
        let Written { tokens, bytes, .. } = written;
        self.manifest.finish_run(self.id, &RunEnd { outcome, tokens, bytes, seconds })?;
        Ok(error)
    }

    fn judge(
        &self,
        written: &Written,
        conservation: &Conservation,
        outcome: Outcome,
    ) -> Result<(), PipelineError> {
        let (non_finite, committed) = (written.non_finite, written.samples);
        if non_finite as f64 > NON_FINITE_LIMIT * (non_finite + committed) as f64 {
            return Err(PipelineError::NonFinite { non_finite, committed });
        }
        let Conservation { lines, rejected, .. } = *conservation;
        let seen = lines - conservation.pending;
        if outcome == Outcome::Completed && rejected as f64 > self.reject_limit * seen as f64 {
            return Err(PipelineError::RejectRate {
                rejected,
                lines: seen,
                limit: self.reject_limit,
                unit: self.unit,
            });
        }
        Ok(())
    }
}
