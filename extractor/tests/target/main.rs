//! The target engine against another implementation and against itself: goldens, tensor
//! parallelism, batching, caches, number formats, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod agreement;
mod config;
mod formats;
mod goldens;
mod shapes;

use std::path::{Path, PathBuf};

use extractor::batch::TokenBatch;
use extractor::golden::Difference;
use extractor::target::{EngineOptions, QaNormEps, RankGroup, TargetError};
use shared::{LayerIndex, TokenSample};

const NANO_KIMI: &str = "models/nano-kimi";
const TINY_ODD: &str = "tests/fixtures/tiny-odd";
const STORIES: &str = "tests/fixtures/stories260k";

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn options(model: &str, tp: usize) -> EngineOptions {
    EngineOptions { tp, qa_norm_eps: QaNormEps::Hf, ..EngineOptions::new(repository(model)) }
}

fn open(model: &str, tp: usize) -> Result<RankGroup, TargetError> {
    RankGroup::open(&options(model, tp))
}

/// Reproducible ids below `vocab_size`.
fn ids(len: usize, vocab_size: u32, seed: u64) -> Vec<u32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % u64::from(vocab_size)) as u32
        })
        .collect()
}

fn batch(sequences: &[Vec<u32>]) -> TokenBatch {
    let sample = |ids: &Vec<u32>| TokenSample::new(ids.clone(), vec![1; ids.len()]).unwrap();
    TokenBatch::new(sequences.iter().map(sample).collect())
}

fn layers(numbers: &[u16]) -> Vec<LayerIndex> {
    numbers.iter().copied().map(LayerIndex).collect()
}

/// Largest difference in units of the rms of `expected`.
fn apart(found: &[f32], expected: &[f32]) -> f64 {
    Difference::of(String::new(), found, expected).relative()
}
