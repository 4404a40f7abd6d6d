//! Whether a run may be continued: under the settings, in the type and on the samples it was
//! started with. Reads the manifest and the small files of a checkpoint, no shard and no weights.

use serde_json::{Map, Value};

use super::FitError;
use crate::checkpoint::{Checkpoint, Computed, RunDir};
use crate::config::{ConfigError, FitConfig};
use crate::dataset::ManifestDataset;
use crate::draft::DraftConfig;

/// A run goes on with the draft it was started with: what the data set's config.json gives now may
/// be another one.
pub(super) fn require_same_draft(
    stored: &DraftConfig,
    current: &DraftConfig,
) -> Result<(), FitError> {
    // As the checkpoint would have it: reading JSON may round a number once.
    let as_stored = |config: &DraftConfig| -> Option<Map<String, Value>> {
        serde_json::from_slice(&serde_json::to_vec(config).ok()?).ok()
    };
    let read = |config: &DraftConfig| serde_json::to_value(config).ok();
    let (Some(Value::Object(before)), Some(now)) = (read(stored), as_stored(current)) else {
        return Ok(());
    };
    let differs = |(key, value): (&String, &Value)| {
        let other = before.get(key).unwrap_or(&Value::Null);
        (other != value).then(|| format!("{key} is {value}, was {other}"))
    };
    let changes: Vec<String> = now.iter().filter_map(differs).collect();
    if changes.is_empty() { Ok(()) } else { Err(FitError::OtherDraft { changes }) }
}

/// Compares the newest checkpoint of `run` with what is asked for now; the first difference is an
/// error that names both values. Cheap, so that nobody waits for a data set to be read first.
pub(super) fn require_same_run(
    config: &FitConfig,
    (run, dataset): (&RunDir, &ManifestDataset),
    computed: Computed,
) -> Result<(), FitError> {
    let (state, settings) = Checkpoint::load_identity(&run.latest()?)?;
    let mut changes = config.changes_from(&settings);
    if state.computed.is_none() {
        // Of the type there is only what was asked for.
        changes.extend(config.compute_changed(&settings));
    }
    if !changes.is_empty() {
        return Err(ConfigError::Changed(changes).into());
    }
    require_same_type(state.computed, computed)?;
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

/// Weights trained in one type are not trained on in another by chance: `auto` is another one on
/// each device. The same type on another device is rounded in other places.
fn require_same_type(stored: Option<Computed>, current: Computed) -> Result<(), FitError> {
    match stored {
        Some(stored) if stored.dtype != current.dtype => {
            return Err(FitError::OtherType { stored, current });
        }
        Some(stored) if stored != current => tracing::warn!(
            "the run computed in {stored}, and goes on in {current}: sums are rounded in another \
                order, so it will not end with the bits it would have had"
        ),
        Some(_) => {}
        None => tracing::warn!(
            "the checkpoint does not say what it was computed in; it goes on in {current}"
        ),
    }
    Ok(())
}
