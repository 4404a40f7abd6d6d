//! Deterministic batches under a token budget. Knows nothing of text or of devices.

use shared::{SampleId, TokenSample};

/// Samples that go through the target in one forward, laid end to end without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    samples: Vec<TokenSample>,
    cu_seqlens: Vec<usize>,
}

impl TokenBatch {
    /// Packs the samples in the given order.
    pub fn new(samples: Vec<TokenSample>) -> Self {
        let mut cu_seqlens = Vec::with_capacity(samples.len() + 1);
        cu_seqlens.push(0);
        let mut end = 0;
        for sample in &samples {
            end += sample.tokens();
            cu_seqlens.push(end);
        }
        Self { samples, cu_seqlens }
    }

    /// The samples, in batch order.
    pub fn samples(&self) -> &[TokenSample] {
        &self.samples
    }

    /// Ids of the samples, in batch order.
    pub fn ids(&self) -> Vec<SampleId> {
        self.samples.iter().map(TokenSample::id).collect()
    }

    /// Start of each sample in the packed rows, and the total last: [samples + 1].
    pub fn cu_seqlens(&self) -> &[usize] {
        &self.cu_seqlens
    }

    /// Tokens of all samples.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens.last().copied().unwrap_or(0)
    }

    /// The first half of the samples and the second; `None` for a single sample.
    pub fn halves(&self) -> Option<(Self, Self)> {
        let (first, second) = self.samples.split_at(self.samples.len() / 2);
        let half = |samples: &[TokenSample]| Self::new(samples.to_vec());
        (!first.is_empty()).then(|| (half(first), half(second)))
    }

    /// Token ids of all samples end to end, [tokens].
    pub fn input_ids(&self) -> Vec<u32> {
        self.samples.iter().flat_map(|s| s.input_ids().iter().copied()).collect()
    }
}

/// Samples of a batch at most: attention kernels number them along an axis of this length.
const MAX_SAMPLES: usize = 65_535;

/// Packs samples in the order they come: a batch is closed when the next sample would take it over
/// the budget or [`MAX_SAMPLES`], and a sample above the budget has a batch of its own. The same
/// samples in the same order always give the same batches.
#[derive(Debug)]
pub struct Batcher {
    budget: usize,
    waiting: Vec<TokenSample>,
    tokens: usize,
}

impl Batcher {
    /// `budget` is the wanted number of tokens of a batch.
    pub fn new(budget: usize) -> Self {
        Self { budget, waiting: Vec::new(), tokens: 0 }
    }

    /// Takes the next sample; returns a batch when that closes one.
    pub fn push(&mut self, sample: TokenSample) -> Option<TokenBatch> {
        let fits = self.tokens + sample.tokens() <= self.budget && self.waiting.len() < MAX_SAMPLES;
        let closed = if fits { None } else { self.finish() };
        self.tokens += sample.tokens();
        self.waiting.push(sample);
        closed
    }

    /// The last batch, if any sample waits for one.
    pub fn finish(&mut self) -> Option<TokenBatch> {
        self.tokens = 0;
        let samples = std::mem::take(&mut self.waiting);
        (!samples.is_empty()).then(|| TokenBatch::new(samples))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_batch_has_no_more_samples_than_kernels_can_number() {
        let mut batcher = Batcher::new(usize::MAX);
        let sample = || TokenSample::new(vec![1], vec![1]).unwrap();
        assert!((0..MAX_SAMPLES).all(|_| batcher.push(sample()).is_none()));
        assert_eq!(batcher.push(sample()).unwrap().samples().len(), MAX_SAMPLES);
        assert_eq!(batcher.finish().unwrap().samples().len(), 1);
    }

    proptest! {
        #[test]
        fn packs_every_sample_once_in_order_within_the_budget(
            lengths in proptest::collection::vec(1..40_usize, 0..60),
            budget in 1..100_usize,
        ) {
            let samples: Vec<TokenSample> = (0..).zip(&lengths)
                .map(|(id, &n)| TokenSample::new(vec![id; n], vec![1; n]).unwrap())
                .collect();
            let mut batcher = Batcher::new(budget);
            let mut batches: Vec<TokenBatch> =
                samples.iter().filter_map(|sample| batcher.push(sample.clone())).collect();
            batches.extend(batcher.finish());
            prop_assert!(batcher.finish().is_none());
            let packed: Vec<TokenSample> =
                batches.iter().flat_map(|batch| batch.samples().to_vec()).collect();
            prop_assert_eq!(packed, samples);
            for pair in batches.windows(2) {
                prop_assert!(pair[0].tokens() <= budget || pair[0].samples().len() == 1);
                // Closing was necessary: the next sample would not have fitted.
                prop_assert!(pair[0].tokens() + pair[1].samples()[0].tokens() > budget);
            }
        }
    }
}
