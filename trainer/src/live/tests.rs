//! Speculative decoding against a scripted target: lossless, counted right, and with the draft's
//! cache holding true states only.

use std::collections::HashMap;

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use extractor::batch::TokenBatch;
use extractor::capture::{LayerCapture, LayerRows};
use extractor::target::{TargetError, TargetSpec};
use serde_json::json;

use super::*;
use crate::draft::{AttentionConfig, DraftConfig, DraftVocabulary, Eagle3Draft, Param};

const H: usize = 8;
/// Few tokens, so that a draft with random weights is right now and then.
const V: usize = 5;

/// A target whose next token depends on the last two and whose states depend on position and token.
struct Scripted {
    spec: TargetSpec,
    caches: HashMap<CacheId, Vec<u32>>,
    forwards: usize,
}

impl Scripted {
    fn new() -> Self {
        let config = json!({
            "model_type": "llama", "hidden_size": H, "num_hidden_layers": 6, "vocab_size": V,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
            "intermediate_size": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": false,
        });
        let spec = TargetSpec::from_json(&config).unwrap();
        Self { spec, caches: HashMap::new(), forwards: 0 }
    }

    fn next(text: &[u32]) -> u32 {
        let last = text[text.len() - 1];
        let before = if text.len() > 1 { text[text.len() - 2] } else { 0 };
        (last * 3 + before * 2 + 1) % 4
    }

    fn state(position: usize, token: u32, layer: u16) -> Vec<f32> {
        let seed = position as f32 * 0.37 + token as f32 * 1.9 + f32::from(layer) * 5.3;
        (0..H).map(|at| (seed + at as f32 * 2.1).sin()).collect()
    }
}

impl TargetModel for Scripted {
    fn spec(&self) -> &TargetSpec {
        &self.spec
    }

    fn prefill(&mut self, _: &TokenBatch, _: &[LayerIndex]) -> Result<Capture, TargetError> {
        unreachable!("live decoding extends")
    }

    fn extend(&mut self, request: &ExtendRequest<'_>) -> Result<Extension, TargetError> {
        self.forwards += 1;
        let text = self.caches.entry(request.cache).or_default();
        assert!(request.keep <= text.len(), "cannot keep what was never there");
        text.truncate(request.keep);
        let (mut logits, mut rows) = (Vec::new(), vec![Vec::new(); request.layers.len()]);
        for &token in request.tokens {
            text.push(token);
            let next = Self::next(text);
            logits.extend((0..V as u32).map(|id| f32::from(u8::from(id == next))));
            for (rows, layer) in rows.iter_mut().zip(request.layers) {
                rows.extend(Self::state(text.len() - 1, token, layer.0));
            }
        }
        let layers = request.layers.iter().zip(rows);
        let layers = layers
            .map(|(&layer, rows)| LayerCapture { layer, rows: LayerRows::F32(rows) })
            .collect();
        let capture = Capture { tokens: request.tokens.len(), hidden_size: H, layers };
        Ok(Extension { capture, logits })
    }

    fn drop_cache(&mut self, cache: CacheId) {
        self.caches.remove(&cache);
    }
}

fn decoder(seed: u64) -> DraftDecoder<Flex> {
    let config = DraftConfig {
        hidden_size: H,
        intermediate_size: 8,
        num_attention_heads: 2,
        attention: AttentionConfig::Gqa { num_key_value_heads: 2, head_dim: 4 },
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        yarn: None,
        vocab_size: V,
        draft_vocab_size: 4,
        num_aux: 3,
        fc_norm: false,
        norm_output: false,
        norm_before_residual: false,
    };
    let draft = Eagle3Draft::<Flex>::init(config, seed, &Default::default()).unwrap();
    let draft = draft.map(|_, param| match param {
        Param::Matrix(tensor) => Param::Matrix(tensor * 20.0),
        vector => vector,
    });
    let embeds: Vec<f32> = (0..V * H).map(|at| (at as f32 * 3.7).sin()).collect();
    let embeds = Tensor::from_data(TensorData::new(embeds, [V, H]), &Default::default());
    DraftDecoder::new(draft, embeds, DraftVocabulary::first(4, V), 200)
}

fn options(max_new_tokens: usize, stop: &[u32]) -> LiveOptions {
    LiveOptions {
        max_new_tokens,
        draft_tokens: 3,
        stop: stop.to_vec(),
        aux_layers: [1, 2, 4].map(LayerIndex).to_vec(),
    }
}

#[test]
fn the_text_is_that_of_plain_decoding_and_every_token_is_counted() {
    let mut accepted = 0;
    for seed in 0..6 {
        let (mut target, mut decoder) = (Scripted::new(), decoder(seed));
        for (prompt, limit) in [(vec![0], 40), (vec![1, 2, 3, 0, 2], 33), (vec![2, 2], 1)] {
            let options = options(limit, &[]);
            let plain = greedy(&mut target, &prompt, &options).unwrap();
            target.forwards = 0;
            let fast = speculate(&mut target, &mut decoder, &prompt, &options).unwrap();
            require_equal("p", &plain, &fast.tokens).unwrap();
            assert_eq!(plain.len(), limit);
            // One forward for the prompt, one a round; the first token is the prompt's.
            assert_eq!(fast.counts.rounds as usize, target.forwards - 1);
            assert_eq!(fast.counts.tokens as usize, limit - 1);
            accepted += fast.counts.accepted.iter().sum::<u64>();
            assert!(fast.counts.accepted.windows(2).all(|pair| pair[0] >= pair[1]));
            // A round emits its accepted tokens and a bonus token, or ends the answer.
            let emitted = fast.counts.accepted.iter().sum::<u64>() + fast.counts.rounds;
            assert!((0..=1).contains(&(emitted - fast.counts.tokens)), "{:?}", fast.counts);
        }
    }
    assert!(accepted > 20, "too few accepted tokens to test anything: {accepted}");
}

#[test]
fn the_drafts_cache_holds_the_targets_true_states() {
    for seed in 0..6 {
        let (mut target, mut used) = (Scripted::new(), decoder(seed));
        let prompt = [3, 1, 2];
        let options = options(30, &[]);
        let answer = speculate(&mut target, &mut used, &prompt, &options).unwrap().tokens;
        let text: Vec<u32> = prompt.iter().chain(&answer).copied().collect();
        let aux = |range: std::ops::Range<usize>| -> Vec<f32> {
            let row =
                |at: usize| [1, 2, 4].map(|layer| Scripted::state(at, text[at], layer)).concat();
            range.flat_map(row).collect()
        };
        let rows = used.rows();
        assert!(rows > prompt.len() && rows < text.len());
        let mut fresh = decoder(seed);
        fresh.extend(NewRows { aux: &aux(0..rows), next_tokens: &text[1..=rows] });
        assert_eq!(used.draft(5), fresh.draft(5));
        let next = aux(rows..rows + 1);
        let more = NewRows { aux: &next, next_tokens: &[0] };
        let (a, b) = (used.extend_with_logits(more), fresh.extend_with_logits(more));
        let largest = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 1e-4, "{largest}");
    }
}

#[test]
fn a_stop_token_inside_an_accepted_chain_ends_the_answer() {
    for stop in 0..4 {
        let (mut target, mut decoder) = (Scripted::new(), decoder(1));
        let options = options(40, &[stop]);
        let plain = greedy(&mut target, &[1, 3], &options).unwrap();
        let fast = speculate(&mut target, &mut decoder, &[1, 3], &options).unwrap();
        assert_eq!(plain, fast.tokens);
        assert!(plain.last() == Some(&stop) || plain.len() == 40);
        assert_eq!(fast.counts.tokens as usize, plain.len() - 1);
    }
}

/// A recorded answer that ends where the live one does gives the same rounds.
#[test]
fn nothing_is_drafted_beyond_the_limit() {
    for seed in 0..6 {
        let (mut target, mut decoder) = (Scripted::new(), decoder(seed));
        let fast = speculate(&mut target, &mut decoder, &[1, 3], &options(2, &[])).unwrap();
        assert_eq!((fast.counts.rounds, fast.counts.tokens), (1, 1));
        assert_eq!(fast.counts.accepted.len(), 1, "one token was left to draft");
    }
}

#[test]
fn counts_of_hand_made_rounds() {
    let mut counts = LiveCounts::default();
    counts.round(3, 3, 4);
    counts.round(3, 0, 1);
    counts.round(3, 1, 2);
    // The answer ended inside the chain: the second accepted token was never emitted.
    counts.round(3, 2, 1);
    assert_eq!(counts.accepted, [3, 1, 1]);
    assert_eq!(counts.acceptance_length(), Some(2.0));
    assert_eq!(LiveCounts::default().acceptance_length(), None);
    assert_eq!(counts.acceptance_rate(), [0.75, 0.25, 0.25]);
    let mut sum = LiveCounts::default();
    sum.add(&counts);
    sum.add(&counts);
    assert_eq!((sum.rounds, sum.tokens, sum.acceptance_length()), (8, 16, Some(2.0)));
}

#[test]
fn a_difference_is_reported_with_its_position() {
    require_equal("p", &[1, 2], &[1, 2]).unwrap();
    let error = require_equal("file:3", &[1, 2, 3], &[1, 2]).unwrap_err();
    assert!(
        error.to_string().contains("file:3") && error.to_string().contains("token 2"),
        "{error}"
    );
    let error = require_equal("p", &[1, 2, 3], &[1, 4, 3]).unwrap_err();
    assert!(matches!(error, LiveError::NotLossless { position: 1, .. }));
    assert_eq!(error.exit_code(), 70);
}

#[test]
fn prompts_without_room_are_refused() {
    let (mut target, mut decoder) = (Scripted::new(), decoder(1));
    let long = vec![1; 190];
    let result = speculate(&mut target, &mut decoder, &long, &options(20, &[]));
    assert!(matches!(result, Err(LiveError::Length { longest: 200, .. })));
    let empty = greedy(&mut target, &[], &options(4, &[]));
    assert!(matches!(empty, Err(LiveError::Length { prompt: 0, .. })));
}

#[test]
fn a_logit_that_is_no_number_is_an_error_wherever_it_stands() {
    for at in 0..V {
        let mut logits = vec![0.5; 2 * V];
        logits[V + at] = f32::NAN;
        let capture = Capture { tokens: 2, hidden_size: H, layers: Vec::new() };
        let extension = Extension { capture, logits };
        assert_eq!(top(&extension, 0, V).unwrap(), 0);
        assert!(matches!(top(&extension, 1, V), Err(LiveError::NotFinite { row: 1 })), "{at}");
    }
}
