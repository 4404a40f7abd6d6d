//! What a run that continues is held against: settings, data set, samples, vocabulary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use burn::backend::{Autodiff, Flex};
use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use trainer::checkpoint::{Checkpoint, Computed, Parts, RunDir};
use trainer::config::{Compute, FitConfig};
use trainer::dataset::ManifestDataset;
use trainer::fit::{self, FitError, FitReport, Start};
use trainer::schedule::Decay;
use trainer::vocab::VocabMap;
use trainer::watch::Watch;
use trainer::world::World;

fn run(config: &FitConfig, start: Start) -> Result<FitReport, FitError> {
    let place = (&Default::default(), FloatDType::F32);
    let guards = (&Shutdown::default(), &Watch::default());
    fit::run::<Autodiff<Flex>>(config, (start, &World::alone()), place, guards)
}

/// A run of `steps` steps on a data set of 20 samples, `data` and `run` in its folder.
fn begun(steps: u64) -> (tempfile::TempDir, FitConfig) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.path().join("run"));
    config.train.max_steps = steps;
    run(&config, Start::Fresh).unwrap();
    (dir, config)
}

#[test]
fn resuming_with_other_settings_or_data_is_refused() {
    let (dir, config) = begun(2);
    let data = dir.path().join("data");
    let mut other = config.clone();
    other.train.lr = 0.5;
    let error = run(&other, Start::Resume).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("train.lr") && text.contains("0.5") && text.contains("0.005"), "{text}");
    assert_eq!(error.exit_code(), 78);
    // One that has grown, and one of another target.
    let place = |name: &str| dir.path().join(name);
    support::dataset(&place("grown"), 30);
    support::dataset_of("another", &place("other"), 20);
    let refused = |dataset: &str| {
        let mut config = config.clone();
        config.data.dataset = place(dataset);
        // Nobody waits for shards to be read before the answer.
        let _ = std::fs::remove_dir_all(place(dataset).join("shards"));
        let error = run(&config, Start::Resume).unwrap_err();
        assert_eq!(error.exit_code(), 78, "{error}");
        error
    };
    let grown = refused("grown");
    assert!(matches!(&grown, FitError::OtherSamples { .. }), "{grown}");
    let text = grown.to_string();
    assert!(text.contains("30 samples") && text.contains("20 samples"), "{text}");
    let FitError::OtherDataset { stored, current } = refused("other") else { panic!() };
    assert_ne!(stored, current);
    std::fs::remove_dir_all(data.join("shards")).unwrap();
    let error = run(&other, Start::Resume).unwrap_err();
    assert!(error.to_string().contains("train.lr"), "{error}");
    // Only the shards are missing for those who ask for nothing else.
    assert!(matches!(run(&config, Start::Resume), Err(FitError::Dataset(_))));
}

#[test]
fn a_run_is_not_continued_with_another_draft_than_its_own() {
    let (dir, config) = begun(2);
    run(&config, Start::Resume).unwrap();
    let path = dir.path().join("data/target/config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("50000.0", "10000.0")).unwrap();
    let error = run(&config, Start::Resume).unwrap_err();
    assert_eq!(error.exit_code(), 78);
    let words = error.to_string();
    assert!(words.contains("rope_theta is 10000.0, was 50000.0"), "{words}");
}

/// Its metrics and what can still be read of it would be overwritten.
#[test]
fn a_fresh_run_does_not_begin_over_checkpoints_that_lost_their_digests() {
    let (_dir, config) = begun(1);
    let run_dir = RunDir::new(&config.checkpoint.run_dir);
    let metrics = std::fs::read(run_dir.metrics()).unwrap();
    std::fs::remove_file(run_dir.latest().unwrap().join("BLAKE3SUMS")).unwrap();
    assert!(matches!(run(&config, Start::Fresh), Err(FitError::RunExists { .. })));
    assert_eq!(std::fs::read(run_dir.metrics()).unwrap(), metrics);
}

/// Where the draft has the whole vocabulary, no count of tokens tells that samples were added.
#[test]
fn added_samples_are_found_with_a_full_vocabulary_too() {
    let dir = tempfile::tempdir().unwrap();
    support::dataset(&dir.path().join("data"), 20);
    support::dataset(&dir.path().join("grown"), 30);
    let mut config = support::config(&dir.path().join("data"), &dir.path().join("run"));
    (config.draft.draft_vocab_size, config.train.max_steps) = (None, 2);
    run(&config, Start::Fresh).unwrap();
    config.data.dataset = dir.path().join("grown");
    assert!(matches!(run(&config, Start::Resume), Err(FitError::OtherSamples { .. })));
}

#[test]
fn a_continued_run_takes_the_vocabulary_of_its_checkpoint() {
    let (dir, mut config) = begun(1);
    let checkpoint = RunDir::new(&config.checkpoint.run_dir).latest().unwrap();
    let mut kept = Checkpoint::load(&checkpoint, Parts::Everything).unwrap();
    // Counting again would give another digest.
    let (d2t, t2d) = (kept.vocab.d2t(), kept.vocab.t2d().to_vec());
    kept.vocab = VocabMap::from_tensors(&d2t, &t2d, "marked".into(), 0.5).unwrap();
    kept.state.vocab_digest = "marked".into();
    let mut resume = |name: &str, kept: &Checkpoint| {
        config.checkpoint.run_dir = dir.path().join(name);
        kept.save(&RunDir::new(&config.checkpoint.run_dir)).unwrap();
        run(&config, Start::Resume)
    };
    resume("kept", &kept).unwrap();
    // One that is too old to name its samples has its tokens counted.
    kept.state.samples = None;
    assert!(matches!(resume("counted", &kept), Err(FitError::OtherVocab { .. })));
}

#[test]
fn tokens_are_counted_without_a_look_at_the_states_beside_them() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let dataset = ManifestDataset::open(&data).unwrap();
    let shard = dataset.dir().shards().join(&dataset.samples()[0].shard_file);
    let mut bytes = std::fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let quick = dataset.quick_reader();
    assert!((0..20).all(|at| quick.read_tokens(at).is_ok()), "the byte is of a state");
    let error = dataset.reader().read(0).unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
}

#[test]
fn a_run_goes_on_in_the_type_it_was_computed_in() {
    let (dir, mut config) = begun(1);
    let checkpoint = RunDir::new(&config.checkpoint.run_dir).latest().unwrap();
    let mut kept = Checkpoint::load(&checkpoint, Parts::Everything).unwrap();
    let computed = |device: &str, dtype: &str| {
        Some(Computed { device: device.to_owned(), dtype: dtype.to_owned() })
    };
    assert_eq!(kept.state.computed, computed("cpu", "f32"));
    // Said otherwise, it is the same type.
    config.train.compute = Compute::F32;
    let mut resume = |device: &str, dtype: &str| {
        let mut config = config.clone();
        config.checkpoint.run_dir = dir.path().join(format!("{dtype} on {device}"));
        kept.state.computed = computed(device, dtype);
        kept.save(&RunDir::new(&config.checkpoint.run_dir)).unwrap();
        run(&config, Start::Resume)
    };
    resume("cuda", "f32").unwrap();
    let error = resume("cuda", "bf16").unwrap_err();
    assert!(matches!(error, FitError::OtherType { .. }), "{error}");
    assert_eq!(error.exit_code(), 78);
    let words = error.to_string();
    assert!(words.contains("bf16 on cuda") && words.contains("f32 on cpu"), "{words}");
    assert!(words.contains("--device cuda"), "{words}");

    // An earlier version's says what was asked for only.
    let mut older = kept.clone();
    (older.state.computed, older.config.train.compute) = (None, Compute::Bf16);
    config.checkpoint.run_dir = dir.path().join("older");
    older.save(&RunDir::new(&config.checkpoint.run_dir)).unwrap();
    let error = run(&config, Start::Resume).unwrap_err().to_string();
    assert!(error.contains("train.compute: \"bf16\" in the checkpoint, \"f32\" now"), "{error}");
    config.train.compute = Compute::Bf16;
    run(&config, Start::Resume).unwrap();
}

/// Such runs could be begun, and must go on as they began.
#[test]
fn a_floor_that_new_runs_may_not_have_goes_on() {
    let (dir, mut config) = begun(1);
    let checkpoint = RunDir::new(&config.checkpoint.run_dir).latest().unwrap();
    let mut kept = Checkpoint::load(&checkpoint, Parts::Everything).unwrap();
    (kept.config.train.schedule, kept.config.train.lr_floor) = (Decay::Step, 0.1);
    config = kept.config.clone();
    config.checkpoint.run_dir = dir.path().join("older");
    kept.save(&RunDir::new(&config.checkpoint.run_dir)).unwrap();
    run(&config, Start::Resume).unwrap();
    config.checkpoint.run_dir = dir.path().join("new");
    assert!(matches!(run(&config, Start::Fresh), Err(FitError::Config(_))));
}

/// Killed after it made up for an evaluation and before its next checkpoint.
#[test]
fn an_evaluation_that_is_made_up_for_twice_is_recorded_once() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.path().join("straight"));
    config.train.max_steps = 4;
    (config.checkpoint.eval_every, config.checkpoint.checkpoint_every) = (2, 1);
    config.checkpoint.keep_last = 9;
    run(&config, Start::Fresh).unwrap();
    let straight = RunDir::new(&config.checkpoint.run_dir);
    let mut kept = Checkpoint::load(&straight.checkpoint(2), Parts::Everything).unwrap();
    (kept.state.acceptance_length, kept.state.best) = (None, None);
    config.checkpoint.run_dir = dir.path().join("killed");
    let killed = RunDir::new(&config.checkpoint.run_dir);
    kept.save(&killed).unwrap();
    std::fs::copy(straight.metrics(), killed.metrics()).unwrap();
    run(&config, Start::Resume).unwrap();
    let lines = std::fs::read_to_string(killed.metrics()).unwrap();
    let evaluations = lines.lines().filter(|line| line.contains("eval/acceptance_length"));
    assert_eq!(evaluations.count(), 2, "{lines}");
}

#[test]
fn a_log_that_belongs_to_no_checkpoint_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    config.train.max_steps = 1;
    std::fs::create_dir(&out).unwrap();
    let foreign = "{\"step\": 7, \"loss\": 1.5}\n";
    std::fs::write(out.join("metrics.jsonl"), foreign).unwrap();
    run(&config, Start::Fresh).unwrap();
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert_eq!(read("metrics-1.jsonl"), foreign);
    let first = read("metrics.jsonl");
    assert!(first.starts_with("{\"step\":1,"), "{first}");
    // As a run leaves it that was killed before its first checkpoint.
    std::fs::remove_dir_all(out.join("checkpoints")).unwrap();
    run(&config, Start::Fresh).unwrap();
    assert_eq!((read("metrics-1.jsonl"), read("metrics-2.jsonl")), (foreign.to_owned(), first));
}

#[test]
fn nothing_is_made_of_a_run_that_is_not_there() {
    let (dir, mut config) = begun(1);
    config.checkpoint.run_dir = dir.path().join("misspelt");
    assert!(matches!(run(&config, Start::Resume), Err(FitError::Checkpoint(_))));
    assert!(!config.checkpoint.run_dir.exists());
}

#[test]
fn what_is_frozen_has_no_moments_and_goes_on_without() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.path().join("run"));
    (config.draft.freeze_lm_head, config.train.max_steps) = (true, 2);
    config.checkpoint.checkpoint_every = 1;
    let report = run(&config, Start::Fresh).unwrap();
    let load = |path: &std::path::Path| Checkpoint::load(path, Parts::Everything).unwrap();
    let straight = load(&report.checkpoint);
    let moments = straight.optimizer.clone().unwrap();
    assert!(moments.tensors.contains_key("first.fc.weight"));
    assert!(!moments.tensors.keys().any(|name| name.contains("lm_head")));
    std::fs::remove_dir_all(&report.checkpoint).unwrap();
    // Earlier versions kept moments of it, of zeros.
    let run_dir = RunDir::new(&config.checkpoint.run_dir);
    let mut older = load(&run_dir.latest().unwrap());
    let head = older.weights.tensors["lm_head.weight"].clone();
    let moments = older.optimizer.as_mut().unwrap();
    for name in ["first.lm_head.weight", "second.lm_head.weight"] {
        moments.tensors.insert(name.to_owned(), head.clone());
    }
    std::fs::remove_dir_all(run_dir.latest().unwrap()).unwrap();
    older.save(&run_dir).unwrap();
    assert_eq!(load(&run(&config, Start::Resume).unwrap().checkpoint), straight);
}
