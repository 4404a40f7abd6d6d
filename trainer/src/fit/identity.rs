//! Whether a run may be continued: under the settings and on the samples it was started with. Reads
//! the manifest and the small files of a checkpoint, no shard and no weights.

use super::FitError;
use crate::checkpoint::{Checkpoint, RunDir};
use crate::config::{ConfigError, FitConfig};
use crate::dataset::ManifestDataset;

/// Compares the newest checkpoint of `run` with what is asked for now; the first difference is an
/// error that names both values. Cheap, so that nobody waits for a data set to be read first.
pub(super) fn require_same_run(
    config: &FitConfig,
    run: &RunDir,
    dataset: &ManifestDataset,
) -> Result<(), FitError> {
    let (state, settings) = Checkpoint::load_identity(&run.latest()?)?;
    let changes = config.changes_from(&settings);
    if !changes.is_empty() {
        return Err(ConfigError::Changed(changes).into());
    }
    let current = dataset.fingerprint().to_string();
    if state.dataset_fingerprint != current {
        return Err(FitError::OtherDataset { stored: state.dataset_fingerprint, current });
    }
    match state.samples {
        Some(stored) if stored != dataset.sample_set() => {
            Err(FitError::OtherSamples { stored, current: dataset.sample_set() })
        }
        _ => Ok(()),
    }
}
