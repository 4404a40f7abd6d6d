//! How many drafted tokens a target would accept, estimated on recorded text: the draft runs on
//! the states and tokens of the data, as in training. Knows no target engine.

mod chain;

use extractor::shutdown::{EXIT_STOPPED, Shutdown};
use serde::Serialize;

use crate::batch::FrozenTarget;
use crate::collate::{collate_plain, plan};
use crate::dataset::{DatasetError, ManifestDataset};
use crate::draft::Eagle3Draft;
use crate::metrics::TttMetrics;
use crate::ops::DraftOps;
use crate::ttt::{TttError, TttOptions, ttt_step};
use crate::watch::Watch;

pub use self::chain::{ChainCounts, chain_acceptance};

/// Upper ends of the length buckets, in tokens of a sample; the last bucket has no end.
const BUCKETS: [usize; 4] = [256, 1024, 4096, 16384];

/// Acceptance by depth. Depth 0 is the first drafted token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Acceptance {
    /// Rows measured at each depth.
    pub rows: Vec<u64>,
    /// Share of rows whose token at this depth is the target's, whatever came before.
    pub acc: Vec<f64>,
    /// Share of rows whose tokens up to this depth are all the target's.
    pub full_acc: Vec<f64>,
    /// `full_acc` over that of the depth before: the acceptance rate of this depth once reached.
    pub conditional_acc: Vec<f64>,
    /// Mean overlap `sum_v min(p, q)` of the two distributions: acceptance at temperature 1.
    pub alpha: Vec<f64>,
    /// Drafted tokens expected to be accepted a round; the bonus token is not counted.
    pub accepted_drafts: f64,
    /// The same plus the token the target adds in every round: what servers print.
    pub acceptance_length: f64,
    /// Acceptance length, bonus token included, when only the first n + 1 depths are drafted.
    pub acceptance_length_by_drafts: Vec<f64>,
    /// Soft cross-entropy of each depth.
    pub loss: Vec<f64>,
}

impl Acceptance {
    /// Rates from the sums of any number of batches.
    pub fn from_metrics(metrics: &TttMetrics) -> Self {
        let full_acc = metrics.full_acc();
        let before = std::iter::once(1.0).chain(full_acc.iter().copied());
        let conditional = full_acc.iter().zip(before);
        let mut length = 1.0;
        let by_drafts = full_acc.iter().map(|accepted| {
            length += accepted;
            length
        });
        Self {
            rows: metrics.counted.clone(),
            acc: metrics.acc(),
            conditional_acc: conditional.map(|(f, b)| if b > 0.0 { f / b } else { 0.0 }).collect(),
            alpha: metrics.alpha(),
            accepted_drafts: full_acc.iter().sum(),
            acceptance_length: 1.0 + full_acc.iter().sum::<f64>(),
            acceptance_length_by_drafts: by_drafts.collect(),
            loss: metrics.step_loss(),
            full_acc,
        }
    }
}

/// Acceptance over samples, and by their length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Samples measured.
    pub samples: usize,
    /// All samples.
    pub all: Acceptance,
    /// Samples of up to so many tokens (and more than the bucket before): only buckets with rows.
    pub by_length: Vec<Bucket>,
}

/// Acceptance of samples of similar length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Longest sample, in tokens; `None` for the last bucket.
    pub up_to_tokens: Option<usize>,
    /// Samples in it.
    pub samples: usize,
    /// Their acceptance.
    pub acceptance: Acceptance,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct EvaluationPlan<'a> {
    /// Samples, as indices of the data set.
    pub indices: &'a [usize],
    /// Tokens of one packed batch.
    pub max_tokens: usize,
    /// Steps and masks.
    pub options: &'a TttOptions,
    /// Told after every batch.
    pub watch: &'a Watch,
    /// Ends the measurement before its next batch when a stop is asked for.
    pub stop: Option<&'a Shutdown>,
}

/// Runs a draft over samples of a data set. Changes nothing: the result depends on the weights and
/// the samples only. Samples without a row to measure are an error.
pub fn evaluate<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    dataset: &ManifestDataset,
    what: &EvaluationPlan<'_>,
) -> Result<Evaluation, EvaluateError> {
    let mut total = TttMetrics::default();
    let mut by_length = Vec::new();
    for bucket in 0..=BUCKETS.len() {
        let members: Vec<usize> = what
            .indices
            .iter()
            .copied()
            .filter(|&at| bucket_of(dataset.samples()[at].tokens) == bucket)
            .collect();
        if members.is_empty() {
            continue;
        }
        let sums =
            run_samples(draft, frozen, dataset, &EvaluationPlan { indices: &members, ..*what })?;
        total.add(&sums);
        if !sums.has_measured_rows() {
            continue;
        }
        by_length.push(Bucket {
            up_to_tokens: BUCKETS.get(bucket).copied(),
            samples: members.len(),
            acceptance: Acceptance::from_metrics(&sums),
        });
    }
    if !total.has_measured_rows() {
        return Err(EvaluateError::NoRows { samples: what.indices.len() });
    }
    let all = Acceptance::from_metrics(&total);
    Ok(Evaluation { samples: what.indices.len(), all, by_length })
}

/// Which bucket a sample of so many tokens is in.
fn bucket_of(tokens: usize) -> usize {
    BUCKETS.partition_point(|&end| end < tokens)
}

fn run_samples<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    dataset: &ManifestDataset,
    what: &EvaluationPlan<'_>,
) -> Result<TttMetrics, EvaluateError> {
    let device = draft.device();
    let lengths: Vec<usize> = what.indices.iter().map(|&at| dataset.samples()[at].tokens).collect();
    let reader = dataset.reader();
    let mut sums = TttMetrics::default();
    for batch in plan(what.indices, &lengths, what.max_tokens) {
        if what.stop.is_some_and(Shutdown::requested) {
            return Err(EvaluateError::Stopped);
        }
        let documents: Vec<_> =
            batch.iter().map(|&at| reader.read(at)).collect::<Result<_, _>>()?;
        let batch = collate_plain(&documents)
            .and_then(|host| host.to_device::<B>(&device, draft.dtype()))
            .map_err(DatasetError::from)?;
        sums.add(&ttt_step(draft, frozen, &batch, what.options)?.metrics());
        what.watch.goes_on();
        check_device::<B>(&device)?;
    }
    Ok(sums)
}

/// What was measured after a fault means nothing.
fn check_device<B: DraftOps>(device: &B::Device) -> Result<(), EvaluateError> {
    match B::fault(device) {
        None => Ok(()),
        Some(fault) => Err(TttError::from(fault).into()),
    }
}

/// An evaluation that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// The data set.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// Draft, target and data do not belong together.
    #[error(transparent)]
    Ttt(#[from] TttError),
    /// Nothing to measure.
    #[error(
        "no rows were measured: the loss masks of the {samples} samples have no two trained tokens \
            side by side, behind another one of their sample"
    )]
    NoRows {
        /// Samples looked at.
        samples: usize,
    },
    /// A stop was asked for.
    #[error("stopped by a signal in an evaluation")]
    Stopped,
}

impl EvaluateError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Dataset(error) => error.exit_code(),
            Self::Ttt(error) => error.exit_code(),
            Self::NoRows { .. } => 65,
            Self::Stopped => EXIT_STOPPED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_as_long_as_a_bucket_reaches_is_in_it() {
        assert_eq!([1, 256, 257, 1024, 16384, 16385].map(bucket_of), [0, 0, 1, 1, 3, 4]);
    }

    #[test]
    fn rates_and_lengths_follow_from_the_counts() {
        // Ten rows at depth 0 of which 8 right; 5 at depth 1 of which 4 right and 3 right so far;
        // none at depth 2.
        let metrics = TttMetrics {
            step_rows: vec![10, 5, 0],
            step_loss_sum: vec![20.0, 15.0, 0.0],
            step_divisor: vec![10.0, 5.0, 1.0],
            counted: vec![10, 5, 0],
            right: vec![8, 4, 0],
            all_right: vec![8, 3, 0],
            alpha_sum: vec![5.0, 2.0, 0.0],
        };
        let acceptance = Acceptance::from_metrics(&metrics);
        assert_eq!(acceptance.acc, [0.8, 0.8, 0.0]);
        assert_eq!(acceptance.full_acc, [0.8, 0.6, 0.0]);
        assert!((acceptance.conditional_acc[1] - 0.75).abs() < 1e-12);
        assert!((acceptance.accepted_drafts - 1.4).abs() < 1e-12);
        assert!((acceptance.acceptance_length - 2.4).abs() < 1e-12);
        let by_drafts = acceptance.acceptance_length_by_drafts;
        assert!((by_drafts[0] - 1.8).abs() < 1e-12 && (by_drafts[2] - 2.4).abs() < 1e-12);
        assert_eq!(acceptance.alpha, [0.5, 0.4, 0.0]);
    }
}
