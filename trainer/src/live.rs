//! Speculative decoding for real: the draft proposes a chain, the target engine judges it with its
//! KV cache, and the text is compared with plain greedy decoding. Knows no files but prompts.

mod error;
mod prompts;

use extractor::capture::Capture;
use extractor::target::{CacheId, ExtendRequest, Extension, TargetModel};
use serde::Serialize;
use shared::LayerIndex;

pub use self::error::LiveError;
pub use self::prompts::{Prompt, read_prompts};
use crate::decode::{DraftDecoder, NewRows};
use crate::ops::DraftOps;

const SPECULATIVE: CacheId = CacheId(1);
const GREEDY: CacheId = CacheId(2);

/// Limits of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveOptions {
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Drafted tokens a round.
    pub draft_tokens: usize,
    /// Ids that end the answer; the id itself is part of it.
    pub stop: Vec<u32>,
    /// Layers the draft reads, in order.
    pub aux_layers: Vec<LayerIndex>,
}

/// Counts of speculative decoding; those of several prompts add up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LiveCounts {
    /// Rounds: one draft chain and one target forward that judges it.
    pub rounds: u64,
    /// Tokens that rounds added, the bonus token of each included. The first token of an answer
    /// comes from the prompt's forward and is not among them.
    pub tokens: u64,
    /// Rounds in which the drafted token of this position was accepted.
    pub accepted: Vec<u64>,
}

impl LiveCounts {
    /// Notes a round of `drafted` tokens, of which the first `accepted` were right, that added
    /// `added` tokens to the answer (fewer than `accepted + 1` where the answer ends inside: what
    /// lies behind its end was never emitted and does not count).
    pub fn round(&mut self, drafted: usize, accepted: usize, added: usize) {
        self.rounds += 1;
        self.tokens += added as u64;
        let positions = self.accepted.len().max(drafted);
        self.accepted.resize(positions, 0);
        self.accepted.iter_mut().take(accepted.min(added)).for_each(|count| *count += 1);
    }

    /// Adds those of another prompt.
    pub fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.tokens += other.tokens;
        let positions = self.accepted.len().max(other.accepted.len());
        self.accepted.resize(positions, 0);
        self.accepted.iter_mut().zip(&other.accepted).for_each(|(sum, more)| *sum += more);
    }

    /// Tokens a target forward yields, the bonus token included; 1 is decoding without a draft.
    /// `None` without rounds.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.tokens as f64 / self.rounds as f64)
    }

    /// Share of rounds in which the token of each position was accepted; empty without rounds.
    pub fn acceptance_rate(&self) -> Vec<f64> {
        self.accepted.iter().map(|&count| count as f64 / self.rounds.max(1) as f64).collect()
    }
}

/// An answer and its counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Generated ids.
    pub tokens: Vec<u32>,
    /// Counts of its rounds.
    pub counts: LiveCounts,
}

/// Decodes one prompt with the draft. The text is that of the target alone: every token is the
/// target's own choice, drafted ones are kept only where they agree with it.
pub fn speculate<B: DraftOps>(
    target: &mut dyn TargetModel,
    decoder: &mut DraftDecoder<B>,
    prompt: &[u32],
    options: &LiveOptions,
) -> Result<Generation, LiveError> {
    let vocab = check(target, prompt, options, decoder.max_positions())?;
    decoder.clear();
    target.drop_cache(SPECULATIVE);
    let mut known = prompt.to_vec();
    let mut extension = target.extend(&request(options, 0, prompt))?;
    known.push(top(&extension, prompt.len() - 1, vocab)?);
    let mut fresh = prompt.len();
    let mut counts = LiveCounts::default();
    while !ended(&known, prompt.len(), options) {
        // Rows of the last forward that hold true tokens, each with the token after it.
        let aux = side_by_side(&extension.capture, fresh)?;
        let first = known.len() - fresh;
        decoder.extend(NewRows { aux: &aux, next_tokens: &known[first..] });
        // No more than the answer has room for, as servers do near the limit.
        let left = prompt.len() + options.max_new_tokens - known.len();
        let drafted = decoder.draft(options.draft_tokens.min(left));
        let judged: Vec<u32> = known.last().into_iter().chain(&drafted).copied().collect();
        extension = target.extend(&request(options, known.len() - 1, &judged))?;
        let mut accepted = 0;
        let before = known.len();
        loop {
            // The token the target puts after row `accepted`: equal to the draft's, or the bonus.
            let choice = top(&extension, accepted, vocab)?;
            known.push(choice);
            if drafted.get(accepted) != Some(&choice) {
                break;
            }
            accepted += 1;
        }
        fresh = accepted + 1;
        let kept = cut(&known, prompt.len(), options);
        counts.round(drafted.len(), accepted, kept.min(known.len()) - before);
        known.truncate(kept);
    }
    target.drop_cache(SPECULATIVE);
    Ok(Generation { tokens: known.split_off(prompt.len()), counts })
}

fn request<'a>(options: &'a LiveOptions, keep: usize, tokens: &'a [u32]) -> ExtendRequest<'a> {
    ExtendRequest { cache: SPECULATIVE, keep, tokens, layers: &options.aux_layers }
}

/// Decodes one prompt with the target alone, one token a forward.
pub fn greedy(
    target: &mut dyn TargetModel,
    prompt: &[u32],
    options: &LiveOptions,
) -> Result<Vec<u32>, LiveError> {
    let vocab = check(target, prompt, options, usize::MAX)?;
    target.drop_cache(GREEDY);
    let mut known = prompt.to_vec();
    let mut from = 0;
    while !ended(&known, prompt.len(), options) {
        let request =
            ExtendRequest { cache: GREEDY, keep: from, tokens: &known[from..], layers: &[] };
        let extension = target.extend(&request)?;
        let last = known.len() - from - 1;
        from = known.len();
        known.push(top(&extension, last, vocab)?);
    }
    target.drop_cache(GREEDY);
    Ok(known.split_off(prompt.len()))
}

/// Proof that speculation lost nothing: both texts are the same, token for token.
pub fn require_equal(prompt: &str, greedy: &[u32], speculative: &[u32]) -> Result<(), LiveError> {
    let differs = (0..greedy.len().max(speculative.len()))
        .find(|&position| greedy.get(position) != speculative.get(position));
    match differs {
        None => Ok(()),
        Some(position) => Err(LiveError::NotLossless {
            prompt: prompt.to_owned(),
            position,
            greedy: greedy.get(position).copied(),
            speculative: speculative.get(position).copied(),
        }),
    }
}

fn check(
    target: &dyn TargetModel,
    prompt: &[u32],
    options: &LiveOptions,
    room: usize,
) -> Result<usize, LiveError> {
    let longest = target.spec().max_position_embeddings.min(room);
    let needed = prompt.len() + options.max_new_tokens + options.draft_tokens + 1;
    if prompt.is_empty() || needed > longest {
        return Err(LiveError::Length { prompt: prompt.len(), needed, longest });
    }
    Ok(target.spec().vocab_size)
}

/// Where the answer ends: after a stop id or at the limit; the present length when it goes on.
fn cut(known: &[u32], prompt: usize, options: &LiveOptions) -> usize {
    let limit = known.len().min(prompt + options.max_new_tokens);
    let stop = known[prompt..limit].iter().position(|id| options.stop.contains(id));
    stop.map_or(limit, |at| prompt + at + 1)
}

fn ended(known: &[u32], prompt: usize, options: &LiveOptions) -> bool {
    let stopped = known.len() > prompt && known.last().is_some_and(|id| options.stop.contains(id));
    stopped || known.len() >= prompt + options.max_new_tokens
}

/// The id with the largest logit of a row; the smallest id of equal ones.
fn top(extension: &Extension, row: usize, vocab: usize) -> Result<u32, LiveError> {
    let logits = extension.logits.get(row * vocab..(row + 1) * vocab);
    let logits = logits.ok_or(LiveError::Reply { what: "logits", row })?;
    let larger = |a: &f32, b: &f32| b > a || b.is_nan();
    let best = logits.iter().enumerate().reduce(|a, b| if larger(a.1, b.1) { b } else { a });
    match best {
        Some((id, value)) if value.is_finite() => Ok(id as u32),
        _ => Err(LiveError::NotFinite { row }),
    }
}

/// The first `rows` rows of all captured layers, `[rows, layers * H]`.
fn side_by_side(capture: &Capture, rows: usize) -> Result<Vec<f32>, LiveError> {
    let width = capture.hidden_size;
    let layers: Vec<Vec<f32>> = capture.layers.iter().map(|layer| layer.rows.to_f32()).collect();
    let mut joined = Vec::with_capacity(rows * width * layers.len());
    for row in 0..rows {
        for layer in &layers {
            let values = layer.get(row * width..(row + 1) * width);
            joined.extend_from_slice(values.ok_or(LiveError::Reply { what: "states", row })?);
        }
    }
    Ok(joined)
}

#[cfg(test)]
mod tests;
