//! Which samples a run trains on and which it measures, of those that have something to train or
//! measure. Reads ids and loss masks, no states.

use shared::TokenSample;

use super::{FitError, ttt_options};
use crate::batch::{BatchError, BatchTokens};
use crate::config::FitConfig;
use crate::dataset::{DatasetError, ManifestDataset, Split};
use crate::masks::{MaskMode, row_masks};
use crate::watch::Watch;

/// Trained tokens that a sample needs for a row of its own: what the row is given, and what it
/// predicts.
const LEAST_TRAINED: usize = 2;

/// The split without samples that have too few trained tokens. A data set of which no row can be
/// trained is an error; `watch` is told of every sample read.
pub(super) fn split(
    dataset: &ManifestDataset,
    config: &FitConfig,
    watch: &Watch,
) -> Result<Split, FitError> {
    let mut split = dataset.split(config.data.held_out);
    let trained = |&at: &usize| dataset.samples()[at].trainable_tokens;
    let before = split.train.len() + split.held_out.len();
    split.train.retain(|at| trained(at) >= LEAST_TRAINED);
    split.held_out.retain(|at| trained(at) >= LEAST_TRAINED);
    let skipped = before - split.train.len() - split.held_out.len();
    if skipped > 0 {
        tracing::warn!("{skipped} of {before} samples have fewer than two trained tokens: skipped");
    }
    if split.train.is_empty() {
        let reason = match skipped {
            0 => "data.held_out keeps all of them out",
            _ => {
                "their loss masks have fewer than two trained tokens, or data.held_out keeps the \
                    others out"
            }
        };
        return Err(DatasetError::NoTraining { samples: before, reason }.into());
    }
    let mode = ttt_options(config).mask_mode;
    if !any_has_rows(dataset, (&split.train, mode), watch)? {
        let tokens = split.train.iter().map(trained).sum();
        let rule = match mode {
            MaskMode::Chain => "two trained tokens side by side, behind another one of its sample",
            MaskMode::Specforge { .. } => "a trained token that is not the last of its sample",
        };
        return Err(DatasetError::NoRows { samples: split.train.len(), tokens, rule }.into());
    }
    let measured = split.held_out.len().min(config.checkpoint.eval_samples);
    if !any_has_rows(dataset, (&split.held_out[..measured], mode), watch)? {
        // What is left of them would be measured on nothing.
        split.held_out.clear();
    }
    if split.held_out.is_empty() && config.data.held_out > 0.0 {
        tracing::warn!(
            "no sample with rows to measure is held out: the best checkpoint cannot be chosen by \
                acceptance"
        );
    }
    Ok(split)
}

/// Whether any of these samples has a row at the first step. Reads no further than the first that
/// has one, as nearly all have.
fn any_has_rows(
    dataset: &ManifestDataset,
    (indices, mode): (&[usize], MaskMode),
    watch: &Watch,
) -> Result<bool, FitError> {
    let reader = dataset.quick_reader();
    for &at in indices {
        watch.goes_on();
        if has_row(&reader.read_tokens(at)?, mode)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn has_row(sample: &TokenSample, mode: MaskMode) -> Result<bool, BatchError> {
    let (ids, rows) = (sample.input_ids().to_vec(), sample.tokens());
    let tokens = BatchTokens::new(ids, sample.loss_mask(), vec![0, rows])?;
    // Which tokens the teacher puts first only the states tell.
    let masks = row_masks(&tokens, 1, mode, &vec![true; rows + 1]);
    Ok(masks.in_loss.concat().contains(&true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(mask: &[u8], mode: MaskMode) -> bool {
        has_row(&TokenSample::new(vec![7; mask.len()], mask.to_vec()).unwrap(), mode).unwrap()
    }

    #[test]
    fn no_sample_that_has_a_row_is_skipped() {
        for trained in 0..5 {
            let mask = [[0; 3].as_slice(), &[1].repeat(trained)].concat();
            assert_eq!(rows(&mask, MaskMode::Chain), trained >= LEAST_TRAINED, "{trained} trained");
        }
    }

    #[test]
    fn a_row_needs_neighbours_behind_another_token() {
        let specforge = MaskMode::Specforge { zero_last_mask: true };
        for (mask, chain, single) in [
            (&[0, 1, 0, 1, 0, 1][..], false, true),
            (&[1, 1, 0, 0], false, true),
            (&[0, 1, 1, 0], true, true),
            (&[0, 0, 0, 1], false, false),
        ] {
            assert_eq!(
                (rows(mask, MaskMode::Chain), rows(mask, specforge)),
                (chain, single),
                "{mask:?}"
            );
        }
    }
}
