//! Deterministic batches under a token budget. Knows nothing of text or of devices.

use shared::TokenSample;

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

    /// Start of each sample in the packed rows, and the total last: [samples + 1].
    pub fn cu_seqlens(&self) -> &[usize] {
        &self.cu_seqlens
    }

    /// Tokens of all samples.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens.last().copied().unwrap_or(0)
    }

    /// Token ids of all samples end to end, [tokens].
    pub fn input_ids(&self) -> Vec<u32> {
        self.samples.iter().flat_map(|s| s.input_ids().iter().copied()).collect()
    }
}
