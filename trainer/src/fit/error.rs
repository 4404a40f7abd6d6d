//! Why a training run ends early. Knows only the errors of its parts.

use std::path::PathBuf;

use thiserror::Error;

use crate::acceptance::EvaluateError;
use crate::batch::BatchError;
use crate::checkpoint::{CheckpointError, Computed};
use crate::config::ConfigError;
use crate::dataset::{DatasetError, SampleSet};
use crate::draft::{DraftConfigError, ParamShapeError};
use crate::exchange::ExchangeError;
use crate::optimizer::GradientError;
use crate::run_log::RunLogError;
use crate::target::TargetError;
use crate::ttt::TttError;
use crate::vocab::VocabError;
use crate::world::WorldError;

/// A training run that stopped. The newest checkpoint stays valid in every case.
#[derive(Debug, Error)]
pub enum FitError {
    /// Settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data set.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// The target's head or config.json.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The draft vocabulary.
    #[error(transparent)]
    Vocab(#[from] VocabError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Sizes of the draft.
    #[error(transparent)]
    Draft(#[from] DraftConfigError),
    /// A parameter of the wrong shape.
    #[error(transparent)]
    Shape(#[from] ParamShapeError),
    /// A batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The training step.
    #[error(transparent)]
    Ttt(#[from] TttError),
    /// A gradient.
    #[error(transparent)]
    Gradient(#[from] GradientError),
    /// An evaluation.
    #[error(transparent)]
    Evaluate(#[from] EvaluateError),
    /// Other processes of the run.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Batches that do not divide over the processes.
    #[error(
        "train.accumulate = {accumulate} batches a step do not divide over {size} processes: set \
            it to a multiple of {size}; the steps are then the same for every number of processes"
    )]
    Accumulate {
        /// Batches of a step.
        accumulate: usize,
        /// Processes.
        size: usize,
    },
    /// Processes that would continue from different checkpoints.
    #[error(
        "the first process continues from step {expected}, this one found step {found}: the run \
            directory must be on a folder that all processes share"
    )]
    OtherStep {
        /// Step of the first process.
        expected: u64,
        /// Step of this one.
        found: u64,
    },
    /// metrics.jsonl.
    #[error(transparent)]
    Log(#[from] RunLogError),
    /// NaN or infinity before any update was made with it.
    #[error(
        "the loss is {loss} at step {step}, on samples {samples}: no update was made and no \
            checkpoint written; audit the data set or lower train.lr"
    )]
    LossNotFinite {
        /// Steps taken before.
        step: u64,
        /// The value.
        loss: f64,
        /// Samples of the batch.
        samples: String,
    },
    /// NaN or infinity in what a checkpoint would hold.
    #[error(
        "{name} is not finite after step {step}: no checkpoint was written; lower train.lr, and \
            continue from the newest checkpoint or start again"
    )]
    StateNotFinite {
        /// Steps taken.
        step: u64,
        /// First parameter or moment that is not finite, as a checkpoint names it.
        name: String,
    },
    /// A fresh start where a run exists.
    #[error(
        "{} already holds checkpoints: continue it with --resume, or choose another run_dir",
        path.display()
    )]
    RunExists {
        /// The run directory.
        path: PathBuf,
    },
    /// A run continued on other data.
    #[error(
        "the data set's fingerprint is {current}, the run was started on {stored}: resume with \
            the same data set, or start a new run_dir"
    )]
    OtherDataset {
        /// Digest in the checkpoint.
        stored: String,
        /// Digest of the data set.
        current: String,
    },
    /// A run continued on more or fewer samples.
    #[error(
        "the data set holds {current}, the run was started on {stored}: order and steps would be \
            others; resume with the same data set, or start a new run_dir"
    )]
    OtherSamples {
        /// Samples noted in the checkpoint.
        stored: SampleSet,
        /// Samples of the data set.
        current: SampleSet,
    },
    /// A run continued in another type.
    #[error(
        "the run computed in {stored}, and would go on in {current}: give --device {} (or, on \
            cuda, --compute {}), or start a new run_dir", stored.device, stored.dtype
    )]
    OtherType {
        /// What the checkpoint was computed in.
        stored: Computed,
        /// What would be computed in now.
        current: Computed,
    },
    /// A run continued with another draft.
    #[error(
        "the data set's target/config.json gives another draft than the run was started with: {}; \
            restore that file, or start a new run_dir", changes.join(", ")
    )]
    OtherDraft {
        /// What is different.
        changes: Vec<String>,
    },
    /// A run continued with another draft vocabulary.
    #[error(
        "the draft vocabulary's digest is {current}, the run was started with {stored}: samples \
            were added, or the target's config.json changed; start a new run_dir"
    )]
    OtherVocab {
        /// Digest in the checkpoint.
        stored: String,
        /// Digest built now.
        current: String,
    },
}

impl From<WorldError> for FitError {
    fn from(error: WorldError) -> Self {
        Self::Exchange(error.into())
    }
}

impl FitError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::Dataset(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            Self::Vocab(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Draft(error) => error.exit_code(),
            Self::Batch(error) => error.exit_code(),
            Self::Ttt(error) => error.exit_code(),
            Self::Gradient(error) => error.exit_code(),
            Self::Evaluate(error) => error.exit_code(),
            Self::Exchange(error) => error.exit_code(),
            Self::Log(_) => 74,
            Self::Accumulate { .. }
            | Self::OtherStep { .. }
            | Self::RunExists { .. }
            | Self::OtherDataset { .. }
            | Self::OtherSamples { .. }
            | Self::OtherType { .. }
            | Self::OtherDraft { .. }
            | Self::OtherVocab { .. } => 78,
            Self::Shape(_) | Self::LossNotFinite { .. } | Self::StateNotFinite { .. } => 65,
        }
    }
}
