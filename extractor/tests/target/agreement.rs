//! What must not depend on how a request is cut: ranks, batches, caches, the set of layers.

use extractor::target::{
    CacheId, EngineOptions, ExpertPlan, ExtendRequest, RankGroup, TargetError, TargetModel, Wanted,
};

use crate::{NANO_KIMI, STORIES, TINY_ODD, apart, batch, ids, layers, open, options};

/// Sums over ranks are taken in another order than on one rank, and nothing else differs.
const RANKS: f64 = 2e-5;
/// Products of few and of many rows add in another order.
const ROWS: f64 = 3e-5;

#[test]
fn ranks_agree() {
    let sequences = [ids(70, 512, 1), ids(3, 512, 2), ids(129, 512, 3)];
    for (model, last) in [(NANO_KIMI, 7), (TINY_ODD, 4), (STORIES, 4)] {
        let wanted = Wanted { layers: layers(&[1, last]), logits: true, ..Wanted::default() };
        let batch = batch(&sequences);
        let one = open(model, 1).unwrap().probe(&batch, wanted.clone()).unwrap();
        for tp in [2, 4, 8] {
            let many = open(model, tp).unwrap().probe(&batch, wanted.clone()).unwrap();
            for (many, one) in many.capture.layers.iter().zip(&one.capture.layers) {
                let apart = apart(&many.rows.to_f32(), &one.rows.to_f32());
                assert!(apart < RANKS, "{model} tp {tp} layer {}: {apart}", one.layer);
            }
            let apart = apart(&many.logits, &one.logits);
            assert!(apart < RANKS, "{model} tp {tp} logits: {apart}");
        }
    }
}

/// The same bits again, whatever the threads do: data sets are compared by digest.
#[test]
fn repeated_runs_give_the_same_bits() {
    let batch = batch(&[ids(90, 512, 4), ids(41, 512, 5)]);
    for tp in [1, 4] {
        let mut target = open(NANO_KIMI, tp).unwrap();
        let first = target.prefill(&batch, &layers(&[2, 7])).unwrap();
        for _ in 0..3 {
            assert!(target.prefill(&batch, &layers(&[2, 7])).unwrap() == first, "tp {tp}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let batch = batch(&[ids(90, 512, 4), ids(41, 512, 5)]);
    let prefill = |threads: usize| {
        let threads = std::num::NonZeroUsize::new(threads);
        let mut target = RankGroup::open(&EngineOptions { threads, ..options(NANO_KIMI, 1) });
        target.as_mut().unwrap().prefill(&batch, &layers(&[0, 7])).unwrap()
    };
    assert!(prefill(1) == prefill(3));
}

#[test]
fn a_sequence_does_not_see_its_neighbours() {
    let sequences = [ids(33, 512, 6), ids(1, 512, 7), ids(120, 512, 8), ids(64, 512, 9)];
    for (model, last) in [(NANO_KIMI, 7), (TINY_ODD, 4), (STORIES, 4)] {
        let mut target = open(model, 2).unwrap();
        let together = target.prefill(&batch(&sequences), &layers(&[last])).unwrap();
        assert_eq!(together.tokens, 33 + 1 + 120 + 64);
        let rows = together.layers[0].rows.to_f32();
        let mut rows = rows.as_slice();
        for sequence in &sequences {
            let alone = target.prefill(&batch(std::slice::from_ref(sequence)), &layers(&[last]));
            let alone = alone.unwrap().layers.remove(0).rows.to_f32();
            let (own, rest) = rows.split_at(alone.len());
            rows = rest;
            let apart = apart(own, &alone);
            assert!(apart < ROWS, "{model}, {} tokens: {apart}", sequence.len());
        }
    }
}

/// Layers come in the order of the request, and asking for fewer does not change them.
#[test]
fn layers_are_what_was_asked_for() {
    let batch = batch(&[ids(20, 4096, 10)]);
    let mut target = open(NANO_KIMI, 1).unwrap();
    let all = target.prefill(&batch, &layers(&[0, 1, 2, 3, 4, 5, 6, 7])).unwrap();
    let some = target.prefill(&batch, &layers(&[5, 0, 3])).unwrap();
    assert_eq!(some.hidden_size, 128);
    for (layer, want) in some.layers.iter().zip([5, 0, 3]) {
        assert_eq!(*layer, all.layers[want]);
    }
    let none = target.prefill(&batch, &[]).unwrap();
    assert_eq!((none.tokens, none.layers.len()), (20, 0));
}

#[test]
fn extending_a_cache_equals_prefill() {
    let tokens = ids(150, 512, 11);
    for (model, tp) in [(NANO_KIMI, 1), (NANO_KIMI, 4), (TINY_ODD, 2), (STORIES, 8)] {
        let mut target = open(model, tp).unwrap();
        let wanted = Wanted { layers: layers(&[1, 4]), logits: true, ..Wanted::default() };
        let whole = target.probe(&batch(std::slice::from_ref(&tokens)), wanted.clone()).unwrap();
        let vocab_size = target.spec().vocab_size;
        let cache = CacheId(3);
        for (start, end) in [(0, 64), (64, 65), (65, 148), (148, 150)] {
            let request = ExtendRequest {
                cache,
                keep: start,
                tokens: &tokens[start..end],
                layers: &wanted.layers,
            };
            let part = target.extend(&request).unwrap();
            let rows = start * vocab_size..end * vocab_size;
            let logits = apart(&part.logits, &whole.logits[rows]);
            assert!(logits < ROWS, "{model} {start}..{end}: {logits}");
            for (part, whole) in part.capture.layers.iter().zip(&whole.capture.layers) {
                let width = target.spec().hidden_size;
                let apart =
                    apart(&part.rows.to_f32(), &whole.rows.to_f32()[start * width..end * width]);
                assert!(apart < ROWS, "{model} {start}..{end} layer {}: {apart}", whole.layer);
            }
        }
    }
}

/// Speculative decoding rejects tokens: what was cut off must leave no trace.
#[test]
fn a_cut_cache_forgets_what_was_cut() {
    let (tokens, wrong) = (ids(60, 4096, 12), ids(17, 4096, 13));
    let mut target = open(NANO_KIMI, 2).unwrap();
    let mut extend = |cache, keep, tokens: &[u32]| {
        let request = ExtendRequest { cache: CacheId(cache), keep, tokens, layers: &layers(&[7]) };
        target.extend(&request).unwrap()
    };
    extend(1, 0, &tokens[..40]);
    let straight = extend(1, 40, &tokens[40..]);
    extend(2, 0, &tokens[..40]);
    extend(2, 40, &wrong);
    extend(2, 52, &wrong);
    let cut = extend(2, 40, &tokens[40..]);
    assert!(cut == straight);
}

#[test]
fn a_dropped_cache_starts_empty() {
    let mut target = open(STORIES, 1).unwrap();
    let request = ExtendRequest { cache: CacheId(9), keep: 0, tokens: &[5, 6], layers: &[] };
    let first = target.extend(&request).unwrap();
    target.drop_cache(CacheId(9));
    let stale = ExtendRequest { keep: 2, ..request };
    let error = target.extend(&stale).unwrap_err();
    assert!(matches!(error, TargetError::Cache { held: 0, keep: 2, .. }), "{error}");
    assert!(target.extend(&request).unwrap() == first);
}

/// A refused request leaves the ranks as they were.
#[test]
fn requests_that_cannot_be_met_are_refused() {
    let mut target = open(STORIES, 2).unwrap();
    let good = batch(&[vec![1, 2, 3]]);
    let before = target.prefill(&good, &layers(&[4])).unwrap();
    let refuse = |target: &mut RankGroup, ids: &[Vec<u32>], numbers: &[u16]| {
        target.prefill(&batch(ids), &layers(numbers)).unwrap_err()
    };
    let error = refuse(&mut target, &[vec![1, 2], vec![3, 512]], &[4]);
    assert!(matches!(error, TargetError::TokenId { position: 3, id: 512, vocab_size: 512 }));
    assert_eq!(error.exit_code(), 65);
    let error = refuse(&mut target, &[vec![1]], &[5]);
    assert_eq!(error.to_string(), "layer 5 was requested, but the model has layers 0 to 4");
    let error = refuse(&mut target, &[vec![1]], &[2, 2]);
    assert!(error.to_string().contains("2 twice"), "{error}");
    let error = refuse(&mut target, &[vec![1; 513]], &[2]);
    assert!(matches!(error, TargetError::TooLong { tokens: 513, limit: 512 }), "{error}");
    let error = refuse(&mut target, &[], &[2]);
    assert!(matches!(error, TargetError::EmptyBatch), "{error}");
    assert!(target.prefill(&good, &layers(&[4])).unwrap() == before);
}

#[test]
fn models_that_cannot_be_split_are_refused() {
    let refuse = |options: &EngineOptions| RankGroup::open(options).err().unwrap();
    let error = refuse(&options(NANO_KIMI, 3));
    let text = "8 attention heads cannot be split over --tp 3; use a --tp that divides 8";
    assert_eq!((error.to_string().as_str(), error.exit_code()), (text, 78));
    let error = refuse(&options(NANO_KIMI, 0));
    assert_eq!(error.exit_code(), 78);
    let whole = EngineOptions { experts: ExpertPlan::Whole, ..options(NANO_KIMI, 8) };
    assert!(RankGroup::open(&whole).is_ok());
}
