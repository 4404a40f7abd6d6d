//! Chain acceptance on recorded text against the decoder of a server, run on the same text.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{FloatDType, Tensor, TensorData};
use shared::CapturedSample;
use trainer::Eagle3Draft;
use trainer::acceptance::{EvaluationPlan, chain_acceptance};
use trainer::decode::{DraftDecoder, NewRows};
use trainer::fit::{Session, Start, TrainState, frozen_target, ttt_options};
use trainer::live::LiveCounts;
use trainer::target::TargetHead;
use trainer::watch::Watch;
use trainer::world::World;

type Backend = Autodiff<Flex>;

/// Aux states of rows `from..to` side by side.
fn aux(sample: &CapturedSample, from: usize, to: usize) -> Vec<f32> {
    let states: Vec<Vec<f32>> =
        sample.states()[..support::LAYERS - 1].iter().map(|state| state.rows.to_f32()).collect();
    let row = |at: usize| at * support::HIDDEN..(at + 1) * support::HIDDEN;
    (from..to).flat_map(|at| states.iter().flat_map(move |s| s[row(at)].to_vec())).collect()
}

/// Decodes the answer of a sample with a cache, round by round; the text plays the target.
fn decode(
    decoder: &mut DraftDecoder<Flex>,
    sample: &CapturedSample,
    length: usize,
    counts: &mut LiveCounts,
) {
    let ids = sample.sample().input_ids();
    let start = sample.sample().loss_mask().iter().position(|&mark| mark == 1).unwrap();
    decoder.clear();
    let (mut known, mut rows) = (start, 0);
    while known + 1 < ids.len() {
        let aux = aux(sample, rows, known);
        decoder.extend(NewRows { aux: &aux, next_tokens: &ids[rows + 1..=known] });
        rows = known;
        let left = &ids[known + 1..];
        let drafted = decoder.draft(length.min(left.len()));
        let accepted = drafted.iter().zip(left).take_while(|(a, b)| a == b).count();
        let added = (accepted + 1).min(left.len());
        counts.round(drafted.len(), accepted, added);
        known += added;
    }
}

#[test]
fn rounds_are_those_of_a_decoder_with_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 30);
    let mut config = support::config(&data, &dir.path().join("run"));
    config.train.epochs = 2.5;
    let place = (&Default::default(), FloatDType::F32);
    let session = Session::<Backend>::open(&config, place).unwrap();
    let run = trainer::checkpoint::RunDir::new(&config.checkpoint.run_dir);
    let mut state = TrainState::start(&session, &run, (Start::Fresh, &World::alone())).unwrap();
    let mut loader = session.loader(state.loader, &World::alone()).unwrap();
    while state.step < session.total_steps {
        let group = state.next_group(&mut loader, 1).unwrap().unwrap();
        state.train(&session, group).unwrap();
    }
    assert_eq!(state.loader.epoch, 2, "half a pass is left of the third");

    let dataset = &session.dataset;
    let indices: Vec<usize> = (0..dataset.samples().len()).collect();
    let options = ttt_options(&config);
    let what = EvaluationPlan {
        indices: &indices,
        max_tokens: 96,
        options: &options,
        watch: &Watch::default(),
        stop: None,
    };
    let head = TargetHead::load(&dataset.dir().target()).unwrap();
    let shape = [head.vocab_size, head.hidden_size];
    let table = head.embed_tokens.clone();
    let embed_tokens: Tensor<Flex, 2> =
        Tensor::from_data(TensorData::new(table, shape), &Default::default());
    let frozen = frozen_target::<Flex>(head, &session.vocab, place).unwrap();
    let draft: Eagle3Draft<Flex> = state.draft;
    let lengths = [2, 5];
    let counted = chain_acceptance(&draft, &frozen, (dataset, &lengths), &what).unwrap();
    // The last state points at the next token, but one in 16 is no function of the one before it.
    let top = |row: &[f32]| {
        let logit = |id: &usize| -> f32 {
            let end = (id + 1) * support::HIDDEN;
            let weights = &support::embeddings()[id * support::HIDDEN..end];
            weights.iter().zip(row).map(|(w, x)| w * x).sum()
        };
        (0..support::VOCAB).max_by(|a, b| logit(a).total_cmp(&logit(b))).unwrap() as u32
    };
    let (mut answer_tokens, mut greedy) = (0, 0);
    for &at in &indices {
        let sample = dataset.reader().read(at).unwrap();
        let states = sample.states().last().unwrap().rows.to_f32();
        let (ids, mask) = (sample.sample().input_ids(), sample.sample().loss_mask());
        for at in (1..ids.len()).filter(|&at| mask[at] == 1) {
            answer_tokens += 1;
            let row = &states[(at - 1) * support::HIDDEN..at * support::HIDDEN];
            greedy += u64::from(top(row) == ids[at]);
        }
    }
    assert_eq!((counted.answer_tokens, counted.greedy_tokens), (answer_tokens, greedy));
    assert!(counted.greedy_share() > 0.5);
    for (counts, length) in counted.by_length.into_iter().zip(lengths) {
        let vocabulary = session.vocab.vocabulary().clone();
        let mut decoder = DraftDecoder::new(draft.clone(), embed_tokens.clone(), vocabulary, 64);
        let mut expected = LiveCounts::default();
        let reader = dataset.reader();
        let mut tokens = 0;
        for &at in &indices {
            let sample = reader.read(at).unwrap();
            tokens += sample.sample().trainable_tokens() as u64 - 1;
            decode(&mut decoder, &sample, length, &mut expected);
        }
        assert_eq!(counts, expected, "chains of {length}");
        assert_eq!(counts.tokens, tokens);
        assert!(counts.acceptance_length().unwrap() > 1.2, "{counts:?}");
    }
}
