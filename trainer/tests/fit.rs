//! The training loop on a synthetic data set: it learns, and it continues bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use trainer::checkpoint::{Best, Checkpoint, Parts, RunDir};
use trainer::config::{FitConfig, Layout, Loss, NoiseKind};
use trainer::dataset::ManifestDataset;
use trainer::fit::{self, FitError, FitReport, Session, Start, TrainState};
use trainer::schedule::Decay;
use trainer::watch::Watch;
use trainer::world::World;

type Backend = Autodiff<Flex>;
const F32: FloatDType = FloatDType::F32;

fn run(config: &FitConfig, start: Start) -> Result<FitReport, FitError> {
    let guards = (&Shutdown::default(), &Watch::default());
    fit::run::<Backend>(config, (start, &World::alone()), (&Default::default(), F32), guards)
}

fn bytes(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join(name)).unwrap()
}

#[test]
fn acceptance_rises_and_the_best_checkpoint_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 80);
    let mut config = support::config(&data, &out);
    config.train.epochs = 6.0;
    config.checkpoint.eval_every = 20;
    config.checkpoint.checkpoint_every = 30;
    config.checkpoint.keep_last = 1;
    let report = run(&config, Start::Fresh).unwrap();
    let length = report.acceptance_length.unwrap();
    assert!(length > 2.5, "acceptance length {length}");
    let run_dir = RunDir::new(&out);
    let steps = run_dir.steps().unwrap();
    assert!(steps.len() <= 2 && steps.contains(&report.steps), "{steps:?}");
    assert_eq!(run_dir.best().unwrap(), report.best);
    let log = std::fs::read_to_string(run_dir.metrics()).unwrap();
    for name in ["train/loss", "train/acc_2", "eval/acceptance_length", "lr", "grad_norm"] {
        assert!(log.contains(&format!("\"{name}\"")), "{name}");
    }
    // Started again, a finished run does no work.
    assert_eq!(run(&config, Start::Resume).unwrap().new_steps, 0);
    assert!(matches!(run(&config, Start::Fresh), Err(FitError::RunExists { .. })));
}

/// N steps in one go against k steps, a new process's state, and the rest.
fn resume_is_exact(layout: Layout, accumulate: usize) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 40);
    let mut straight = support::config(&data, &dir.path().join("straight"));
    straight.draft.layout = layout;
    straight.train.epochs = 2.0;
    straight.train.accumulate = accumulate;
    straight.checkpoint.eval_every = 3;
    straight.checkpoint.checkpoint_every = 1;
    straight.checkpoint.keep_last = 1000;
    let report = run(&straight, Start::Fresh).unwrap();
    assert!(report.steps >= 8, "{report:?}");
    for k in [1, 2, report.steps / 2, report.steps - 1] {
        let out = dir.path().join(format!("resumed-{k}"));
        let resumed = FitConfig {
            checkpoint: trainer::config::CheckpointSection {
                run_dir: out.clone(),
                ..straight.checkpoint.clone()
            },
            ..straight.clone()
        };
        // What a killed run leaves: its checkpoints up to k, and a log that goes further.
        for step in 1..=k {
            let from = RunDir::new(&straight.checkpoint.run_dir).checkpoint(step);
            let kept = RunDir::new(&out).checkpoint(step);
            std::fs::create_dir_all(&kept).unwrap();
            for entry in std::fs::read_dir(from).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
            }
        }
        let log = RunDir::new(&out).metrics();
        std::fs::copy(RunDir::new(&straight.checkpoint.run_dir).metrics(), &log).unwrap();
        let again = run(&resumed, Start::Resume).unwrap();
        assert_eq!((again.steps, again.new_steps), (report.steps, report.steps - k));
        for name in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
            let (one, other) = (bytes(&report.checkpoint, name), bytes(&again.checkpoint, name));
            let differing = one.iter().zip(&other).filter(|(a, b)| a != b).count();
            assert!(
                one == other,
                "{name} differs after resuming at {k}: {differing} of {} bytes",
                one.len()
            );
        }
        let losses = |path: &Path| -> Vec<String> {
            let text = std::fs::read_to_string(path).unwrap();
            let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
            text.lines()
                .map(value)
                .map(|v| format!("{} {} {}", v["step"], v["train/loss"], v["eval/loss_0"]))
                .collect()
        };
        assert_eq!(losses(&log), losses(&RunDir::new(&straight.checkpoint.run_dir).metrics()));
    }
}

#[test]
fn resuming_is_bit_exact_llama() {
    resume_is_exact(Layout::Llama, 1);
}

#[test]
fn resuming_is_bit_exact_mla_with_accumulation() {
    resume_is_exact(Layout::Mla, 2);
}

/// Every step of a 50-step run: the state at k, continued, is the state at k + 1. By induction a
/// run that is interrupted anywhere, any number of times, ends with the same bits.
#[test]
fn resuming_at_every_step_of_fifty_is_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 40);
    let mut straight = support::config(&data, &dir.path().join("straight"));
    straight.train.epochs = 100.0;
    straight.train.max_steps = 50;
    straight.train.ttt_steps = 2;
    straight.data.held_out = 0.0;
    straight.checkpoint.checkpoint_every = 1;
    straight.checkpoint.keep_last = 1000;
    assert_eq!(run(&straight, Start::Fresh).unwrap().steps, 50);
    let place = (&Default::default(), F32);
    let session = Session::<Backend>::open(&straight, place).unwrap();
    let original = RunDir::new(&straight.checkpoint.run_dir);
    for k in 1..50 {
        let again = RunDir::new(dir.path().join(format!("from-{k}")));
        let kept = again.checkpoint(k);
        std::fs::create_dir_all(&kept).unwrap();
        for entry in std::fs::read_dir(original.checkpoint(k)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
        }
        let mut state =
            TrainState::start(&session, &again, (Start::Resume, &World::alone())).unwrap();
        let mut loader = session.loader(state.loader, &World::alone()).unwrap();
        let group = state.next_group(&mut loader, straight.train.accumulate).unwrap().unwrap();
        state.train(&session, group).unwrap();
        let saved = state.checkpoint(&session).unwrap().unwrap().save(&again).unwrap();
        for name in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
            let same = bytes(&original.checkpoint(k + 1), name) == bytes(&saved, name);
            assert!(same, "{name} differs after resuming at {k}");
        }
    }
}

/// Everything that changes the path of the weights, at once.
#[test]
fn resuming_is_bit_exact_with_noise_average_frozen_head_and_lk() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 40);
    let mut config = support::config(&data, &dir.path().join("straight"));
    let train = &mut config.train;
    (train.noise, train.noise_kind, train.ema) = (0.1, NoiseKind::Normal, 0.9);
    (train.loss, train.schedule, train.max_steps) = (Loss::Lk, Decay::Step, 8);
    train.epochs = 4.0;
    config.draft.freeze_lm_head = true;
    config.checkpoint.checkpoint_every = 4;
    let straight = run(&config, Start::Fresh).unwrap();
    let old = RunDir::new(&config.checkpoint.run_dir);
    config.checkpoint.run_dir = dir.path().join("resumed");
    let kept = RunDir::new(&config.checkpoint.run_dir).checkpoint(4);
    std::fs::create_dir_all(&kept).unwrap();
    for entry in std::fs::read_dir(old.checkpoint(4)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
    }
    let resumed = run(&config, Start::Resume).unwrap();
    for name in ["weights.safetensors", "optimizer.safetensors"] {
        assert!(bytes(&straight.checkpoint, name) == bytes(&resumed.checkpoint, name), "{name}");
    }
    let load = |parts| Checkpoint::load(&straight.checkpoint, parts).unwrap();
    let head = |step: u64| {
        let checkpoint = Checkpoint::load(&old.checkpoint(step), Parts::Everything).unwrap();
        checkpoint.optimizer.unwrap().tensors["trained.lm_head.weight"].clone()
    };
    assert_eq!(head(4), head(8), "the head is frozen");
    let all = load(Parts::Everything);
    let (average, trained) = (&all.weights, all.optimizer.as_ref().unwrap());
    let different = average.tensors["fc.weight"] != trained.tensors["trained.fc.weight"];
    assert!(different, "the average is not the last weights");
}

/// Values of a name in metrics.jsonl, one a step.
fn curve(run_dir: &Path, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(RunDir::new(run_dir).metrics()).unwrap();
    let value =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()[name].as_f64();
    text.lines().filter_map(value).collect()
}

#[test]
fn the_first_step_has_the_first_rate_and_the_last_is_above_the_floor() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    let train = &mut config.train;
    (train.epochs, train.max_steps, train.warmup_steps) = (9.0, 5, 2);
    (train.lr, train.schedule) = (0.75, Decay::Linear);
    run(&config, Start::Fresh).unwrap();
    let rates = curve(&out, "lr");
    for (rate, expected) in rates.iter().zip([0.375, 0.75, 0.75, 0.5, 0.25]) {
        assert!((rate - expected).abs() < 1e-12, "{rates:?}");
    }
    assert_eq!(rates.len(), 5);
}

#[test]
fn a_step_takes_batches_of_one_epoch_only() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    (config.train.epochs, config.train.accumulate) = (2.0, 1000);
    assert_eq!(run(&config, Start::Fresh).unwrap().steps, 2);
    let rows = curve(&out, "train/rows");
    assert!(rows.len() == 2 && rows[0] == rows[1] && rows[0] > 0.0, "{rows:?}");
}

/// A sample that is a batch of its own is met again in every epoch, but not its noise.
#[test]
fn noise_differs_from_epoch_to_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 12);
    let losses = |name: &str, noise: f64| {
        let mut config = support::config(&data, &dir.path().join(name));
        config.data.max_tokens = 1;
        // Too small a rate to move a weight.
        (config.train.epochs, config.train.noise, config.train.lr) = (2.0, noise, 1e-20);
        run(&config, Start::Fresh).unwrap();
        let mut losses = curve(&dir.path().join(name), "train/loss");
        let mut again = losses.split_off(losses.len() / 2);
        losses.sort_by(f64::total_cmp);
        again.sort_by(f64::total_cmp);
        [losses, again]
    };
    let [first, second] = losses("plain", 0.0);
    assert_eq!(first, second);
    let [first, second] = losses("noisy", 0.5);
    assert!(first.iter().zip(&second).all(|(a, b)| a != b), "{first:?} {second:?}");
}

/// The newest checkpoint names itself as the best; the one before it, to which a run may go back,
/// names an older one.
#[test]
fn a_run_that_goes_back_finds_its_best_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    config.train.max_steps = 3;
    let session = Session::<Backend>::open(&config, (&Default::default(), F32)).unwrap();
    let (run_dir, world) = (RunDir::new(&out), World::alone());
    let mut state = TrainState::start(&session, &run_dir, (Start::Fresh, &world)).unwrap();
    let mut save = |step, best| {
        state.step = step;
        state.best = Some(Best { step: best, acceptance_length: 1.0 + best as f64 });
        state.checkpoint(&session).unwrap().unwrap().save(&run_dir).unwrap();
        run_dir.prune(2, state.best).unwrap();
    };
    let damage = || std::fs::remove_file(run_dir.checkpoint(3).join("BLAKE3SUMS")).unwrap();
    for (step, best) in [(1, 1), (2, 1), (3, 3)] {
        save(step, best);
    }
    assert_eq!(run_dir.steps().unwrap(), [1, 2, 3], "2 names 1");
    damage();
    run_dir.set_damaged_aside().unwrap();
    assert_eq!(run_dir.best().unwrap(), run_dir.checkpoint(1));
    // The same step is damaged again.
    save(3, 3);
    damage();
    run_dir.set_damaged_aside().unwrap();
    let aside = |name: &str| run_dir.checkpoint(3).with_file_name(name).is_dir();
    assert!(aside("damaged-step-00000003") && aside("damaged-step-00000003-2"));
    // Where the best is gone all the same, it is not compared with, and not reported.
    std::fs::remove_dir_all(run_dir.checkpoint(1)).unwrap();
    assert_eq!(run_dir.best().unwrap(), run_dir.checkpoint(2));
    let report = run(&config, Start::Resume).unwrap();
    assert_eq!((report.steps, &report.best), (3, &report.checkpoint));
}

#[test]
fn only_a_longer_acceptance_length_is_better() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let config = support::config(&data, &out);
    let place = (&Default::default(), F32);
    let session = Session::<Backend>::open(&config, place).unwrap();
    let start = (Start::Fresh, &World::alone());
    let mut state = TrainState::start(&session, &RunDir::new(&out), start).unwrap();
    let lengths = [1.5, 1.5, 1.25, 2.0].map(|length| {
        state.step += 1;
        state.judge(length)
    });
    assert_eq!(lengths, [true, false, false, true]);
    assert_eq!(state.best, Some(Best { step: 4, acceptance_length: 2.0 }));
}

/// "Any number of epochs, so many steps" plans no more than these steps.
#[test]
fn epochs_beyond_the_last_step_are_not_planned() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.path().join("run"));
    (config.train.epochs, config.train.max_steps) = (1e15, 2);
    let report = run(&config, Start::Fresh).unwrap();
    assert_eq!((report.steps, report.stopped), (2, false));
}

#[test]
fn accumulated_batches_are_one_large_batch() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 24);
    let first_record = |name: &str, max_tokens: usize, accumulate: usize| {
        let mut config = support::config(&data, &dir.path().join(name));
        config.data.max_tokens = max_tokens;
        config.train.accumulate = accumulate;
        config.train.max_steps = 1;
        run(&config, Start::Fresh).unwrap();
        let log = std::fs::read_to_string(dir.path().join(name).join("metrics.jsonl")).unwrap();
        serde_json::from_str::<serde_json::Value>(log.lines().next().unwrap()).unwrap()
    };
    let (whole, parts) = (first_record("whole", 10_000, 1), first_record("parts", 60, 1000));
    assert_eq!(whole["train/rows"], parts["train/rows"]);
    for name in ["train/loss", "grad_norm", "train/acc_0", "train/acc_2"] {
        let (a, b) = (whole[name].as_f64().unwrap(), parts[name].as_f64().unwrap());
        assert!((a - b).abs() < 1e-5 * a.abs(), "{name}: {a} {b}");
    }
}

#[test]
fn a_run_that_blows_up_stops_before_the_update_and_keeps_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    config.train.lr = 1e30;
    config.train.clip = 0.0;
    config.checkpoint.checkpoint_every = 1;
    let error = run(&config, Start::Fresh).unwrap_err();
    let stopped = matches!(error, FitError::LossNotFinite { .. } | FitError::Gradient(_));
    assert!(stopped && error.exit_code() == 65, "{error}");
    for step in RunDir::new(&out).steps().unwrap() {
        Checkpoint::load(&RunDir::new(&out).checkpoint(step), Parts::Everything).unwrap();
    }
    // No loss follows the last update: its weights are looked at before they are kept.
    config.checkpoint.run_dir = dir.path().join("last");
    (config.train.lr, config.train.max_steps, config.data.held_out) = (1e300, 1, 0.0);
    let error = run(&config, Start::Fresh).unwrap_err();
    assert!(matches!(&error, FitError::StateNotFinite { step: 1, .. }), "{error}");
    assert_eq!(error.exit_code(), 65);
    assert!(RunDir::new(&config.checkpoint.run_dir).steps().unwrap().is_empty());
}

#[test]
fn a_damaged_checkpoint_is_named_and_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &out);
    config.train.max_steps = 1;
    let checkpoint = run(&config, Start::Fresh).unwrap().checkpoint;
    for name in ["weights.safetensors", "optimizer.safetensors", "vocab.safetensors", "state.json"]
    {
        let path = checkpoint.join(name);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let error = Checkpoint::load(&checkpoint, Parts::Everything).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        std::fs::write(&path, &good).unwrap();
    }
    Checkpoint::load(&checkpoint, Parts::Everything).unwrap();
    std::fs::remove_file(checkpoint.join("BLAKE3SUMS")).unwrap();
    assert!(Checkpoint::load(&checkpoint, Parts::Everything).is_err());
    assert_eq!(RunDir::new(&out).steps().unwrap(), Vec::<u64>::new());
}

#[test]
fn order_is_a_function_of_seed_and_epoch_and_splits_are_disjoint() {
    let dir = tempfile::tempdir().unwrap();
    let (small, large) = (dir.path().join("a"), dir.path().join("b"));
    support::dataset(&small, 40);
    support::dataset(&large, 60);
    let (small, large) =
        (ManifestDataset::open(&small).unwrap(), ManifestDataset::open(&large).unwrap());
    let ids = |set: &ManifestDataset, at: &[usize]| -> Vec<_> {
        at.iter().map(|&at| set.samples()[at].id).collect()
    };
    let split = small.split(0.3);
    assert!(!split.train.is_empty() && !split.held_out.is_empty());
    assert_eq!(split.train.len() + split.held_out.len(), 40);
    assert!(split.train.iter().all(|at| !split.held_out.contains(at)));
    // A sample stays on its side when the data set grows.
    let grown = large.split(0.3);
    let held = ids(&large, &grown.held_out);
    assert!(ids(&small, &split.held_out).iter().all(|id| held.contains(id)));

    let order = small.order(&split.train, 1, 0);
    assert_eq!(order, small.order(&split.train, 1, 0));
    assert_ne!(order, small.order(&split.train, 1, 1));
    assert_ne!(order, small.order(&split.train, 2, 0));
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, split.train);
}
