//! Rotary frequencies of a draft, YaRN included. Knows no tensors.

use super::{DraftConfig, Yarn};

/// Angle per position of each rotated pair, `[rotary_dim / 2]`.
pub fn rotary_frequencies(config: &DraftConfig) -> Vec<f64> {
    let size = config.rotary_dim() as f64;
    let plain = (0..config.rotary_dim() / 2)
        .map(|pair| config.rope_theta.powf(-(2.0 * pair as f64) / size))
        .collect::<Vec<_>>();
    match &config.yarn {
        Some(yarn) => slowed(&plain, yarn, size, config.rope_theta),
        None => plain,
    }
}

/// Pairs that turn often over the original context keep their frequency, those that turn seldom
/// are divided by the factor, with a linear blend in between.
fn slowed(plain: &[f64], yarn: &Yarn, size: f64, theta: f64) -> Vec<f64> {
    let pair_with_turns = |turns: f64| {
        let context = yarn.original_max_position_embeddings as f64;
        size * (context / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
    };
    let first = pair_with_turns(yarn.beta_fast).floor().max(0.0);
    let last = pair_with_turns(yarn.beta_slow).ceil().min(size - 1.0);
    let width = if first == last { 0.001 } else { last - first };
    let blend = |(pair, frequency): (usize, &f64)| {
        let slow = ((pair as f64 - first) / width).clamp(0.0, 1.0);
        frequency / yarn.factor * slow + frequency * (1.0 - slow)
    };
    plain.iter().enumerate().map(blend).collect()
}
