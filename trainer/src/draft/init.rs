//! Fresh parameters from a seed. Knows names and shapes only.

use burn::tensor::backend::Backend;
use rayon::prelude::*;

use super::{DraftConfig, DraftConfigError, Eagle3Draft, Param, ParamShapeError, layer};

/// Standard deviation of every fresh matrix.
const SPREAD: f64 = 0.02;

impl<B: Backend> Eagle3Draft<B> {
    /// Fresh parameters: norms one, matrices normal with spread 0.02. Each depends on the seed
    /// and its own name only, so it is the same on every device and for every order.
    pub fn init(
        config: DraftConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, DraftConfigError> {
        config.validate()?;
        let params = config.parameter_shapes().into_iter().map(|(name, shape)| {
            let count = shape.iter().product();
            let values = match shape.len() {
                1 => vec![1.0; count],
                _ => normal(seed, &name, count),
            };
            Param::from_vec(values, &shape, device)
        });
        let params = params.collect();
        Ok(layer::assemble(config, params))
    }

    /// Replaces the head by rows of the target's, one for each draft token, `[draft_vocab, H]`.
    pub fn with_lm_head(self, rows: burn::tensor::Tensor<B, 2>) -> Result<Self, ParamShapeError> {
        let expected = vec![self.config.draft_vocab_size, self.config.hidden_size];
        let found = rows.dims().to_vec();
        if found != expected {
            return Err(ParamShapeError { name: "lm_head.weight".to_owned(), expected, found });
        }
        Ok(Self { lm_head: rows, ..self })
    }
}

/// Pairs of numbers made by one thread at a time.
const BLOCK: usize = 1 << 14;

/// `count` normal numbers that depend on seed and name.
fn normal(seed: u64, name: &str, count: usize) -> Vec<f32> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
    let mut values = vec![0.0; count];
    values.par_chunks_mut(2 * BLOCK).enumerate().for_each(|(block, values)| {
        // The endless output of the hash, from where this block's numbers are.
        let mut reader = hasher.finalize_xof();
        reader.set_position((block * BLOCK * PAIR_BYTES) as u64);
        let mut bytes = vec![0; values.len().div_ceil(2) * PAIR_BYTES];
        reader.fill(&mut bytes);
        for (pair, bytes) in values.chunks_mut(2).zip(bytes.chunks_exact(PAIR_BYTES)) {
            let (first, second) = bytes.split_at(8);
            // Box-Muller: two uniform numbers make two normal ones.
            let radius = SPREAD * (-2.0 * uniform(first).ln()).sqrt();
            let (sin, cos) = (uniform(second) * std::f64::consts::TAU).sin_cos();
            for (value, number) in pair.iter_mut().zip([radius * cos, radius * sin]) {
                *value = number as f32;
            }
        }
    });
    values
}

/// Bytes of two uniform numbers.
const PAIR_BYTES: usize = 16;

/// A number in (0, 1] of eight bytes.
fn uniform(bytes: &[u8]) -> f64 {
    let word = bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
    ((word >> 11) + 1) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same stream read from its start, number by number.
    fn one_by_one(seed: u64, name: &str, count: usize) -> Vec<f32> {
        let mut hasher = blake3::Hasher::new();
        let mut reader = hasher.update(&seed.to_le_bytes()).update(name.as_bytes()).finalize_xof();
        let mut next = || {
            let mut word = [0; 8];
            reader.fill(&mut word);
            ((u64::from_le_bytes(word) >> 11) + 1) as f64 / (1u64 << 53) as f64
        };
        let mut values = Vec::new();
        while values.len() < count {
            let radius = 0.02 * (-2.0 * next().ln()).sqrt();
            let angle = next() * std::f64::consts::TAU;
            values.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        }
        values.truncate(count);
        values
    }

    #[test]
    fn numbers_do_not_depend_on_the_threads_that_make_them() {
        for count in [1, 7, 2 * BLOCK + 5, 5 * BLOCK] {
            assert_eq!(normal(3, "fc.weight", count), one_by_one(3, "fc.weight", count));
        }
        assert_ne!(normal(3, "fc.weight", 8), normal(4, "fc.weight", 8));
    }
}
