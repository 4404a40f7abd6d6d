//! A trained draft from wherever a path leads: a run, a checkpoint or an export. Knows no data set.

use std::path::{Path, PathBuf};

use burn::tensor::backend::Backend;
use shared::LayerIndex;
use thiserror::Error;

use crate::checkpoint::{Checkpoint, CheckpointError, Parts, RunDir};
use crate::config::FitConfig;
use crate::draft::Eagle3Draft;
use crate::export::{ExportError, ExportedDraft};
use crate::vocab::VocabMap;

/// A draft ready to be run.
#[derive(Clone, Debug)]
pub struct TrainedDraft {
    /// Where it was read.
    pub path: PathBuf,
    weights: Weights,
    /// Draft vocabulary.
    pub vocab: VocabMap,
    /// Layers whose outputs it reads, in order.
    pub aux_layers: Vec<LayerIndex>,
    /// Settings of its run; `None` for an export.
    pub config: Option<FitConfig>,
    /// Digest of the data set it was trained on; `None` for an export.
    pub dataset_fingerprint: Option<String>,
}

#[derive(Clone, Debug)]
enum Weights {
    Checkpoint(Box<Checkpoint>),
    Export(Box<ExportedDraft>),
}

impl TrainedDraft {
    /// A run directory gives its best checkpoint; a checkpoint or export directory itself.
    pub fn open(path: &Path) -> Result<Self, TrainedError> {
        if path.join("model.safetensors").is_file() {
            let export = ExportedDraft::load(path)?;
            return Ok(Self {
                path: path.to_owned(),
                vocab: export.vocab.clone(),
                aux_layers: export.aux_layers.clone(),
                config: None,
                dataset_fingerprint: None,
                weights: Weights::Export(Box::new(export)),
            });
        }
        let (path, checkpoint) = RunDir::open(path, Parts::Inference)?;
        let state = &checkpoint.state;
        Ok(Self {
            vocab: checkpoint.vocab.clone(),
            aux_layers: state.layers.iter().take(state.draft.num_aux).copied().collect(),
            config: Some(checkpoint.config.clone()),
            dataset_fingerprint: Some(state.dataset_fingerprint.clone()),
            weights: Weights::Checkpoint(Box::new(checkpoint)),
            path,
        })
    }

    /// The draft with its parameters on a device.
    pub fn draft<B: Backend>(&self, device: &B::Device) -> Result<Eagle3Draft<B>, TrainedError> {
        Ok(match &self.weights {
            Weights::Checkpoint(checkpoint) => checkpoint.draft(device)?,
            Weights::Export(export) => export.draft(device)?,
        })
    }
}

/// A path that leads to no usable draft.
#[derive(Debug, Error)]
pub enum TrainedError {
    /// A run or checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An export.
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl TrainedError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Checkpoint(error) => error.exit_code(),
            Self::Export(error) => error.exit_code(),
        }
    }
}
