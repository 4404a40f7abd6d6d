//! Several processes train one draft, here as threads that meet over TCP: the loss curve, the
//! checkpoints and a continued run are those of one process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::net::TcpListener;
use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use serde_json::Value;
use trainer::Param;
use trainer::acceptance::EvaluateError;
use trainer::checkpoint::{Checkpoint, Parts, RunDir};
use trainer::config::FitConfig;
use trainer::exchange::{self, Transport};
use trainer::fit::{self, FitError, FitReport, Session, Start, TrainState};
use trainer::shards::Shards;
use trainer::watch::Watch;
use trainer::world::{Place, World, WorldError};

type Backend = Autodiff<Flex>;

fn nobody_is_lost(error: &WorldError) {
    panic!("{error}");
}

fn run(config: &FitConfig, start: Start, world: &World) -> Result<FitReport, FitError> {
    let guards = (&Shutdown::default(), &Watch::default());
    fit::run::<Backend>(config, (start, world), (&Default::default(), FloatDType::F32), guards)
}

/// Does `work` in `size` processes that have met; what they give, by rank.
fn together<R: Send>(size: usize, work: impl Fn(&World) -> R + Sync) -> Vec<R> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let process = |rank| {
            let work = &work;
            scope.spawn(move || {
                let master = ("127.0.0.1".to_owned(), port);
                let place = Place { rank, size, local_rank: rank, master };
                let world = World::join(place, "same", nobody_is_lost).unwrap();
                let result = work(&world);
                world.finish();
                result
            })
        };
        let threads: Vec<_> = (0..size).map(process).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Trains with `size` processes; their reports by rank.
fn train(config: &FitConfig, start: Start, size: usize) -> Vec<FitReport> {
    together(size, |world| run(config, start, world).unwrap())
}

/// Values of a name in metrics.jsonl, by step.
fn curve(run_dir: &Path, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(RunDir::new(run_dir).metrics()).unwrap();
    let value = |line: &str| serde_json::from_str::<Value>(line).unwrap()[name].as_f64();
    text.lines().filter_map(value).collect()
}

#[track_caller]
fn near(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let difference = (got - want).abs();
        assert!(difference <= tolerance * want.abs().max(1e-3), "{what} {at}: {got} {want}");
    }
}

/// All weights and moments of a checkpoint.
fn values(dir: &Path) -> Vec<f64> {
    let checkpoint = Checkpoint::load(dir, Parts::Everything).unwrap();
    let files = [checkpoint.weights, checkpoint.optimizer.unwrap()];
    let tensors = files.iter().flat_map(|file| file.tensors.values());
    tensors.flat_map(|tensor| tensor.to_f32().unwrap()).map(f64::from).collect()
}

fn settings(data: &Path, run_dir: &Path) -> FitConfig {
    let mut config = support::config(data, run_dir);
    config.train.epochs = 3.0;
    config.train.accumulate = 12;
    config.train.ema = 0.8;
    config.checkpoint.checkpoint_every = 1;
    config.checkpoint.keep_last = 1000;
    config.checkpoint.eval_every = 2;
    // An epoch does not fill its last step, so that some processes have no batch in it.
    config.data.max_tokens = 64;
    config
}

#[test]
fn any_number_of_processes_trains_the_same_draft() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 90);
    let alone = dir.path().join("alone");
    let report = train(&settings(&data, &alone), Start::Fresh, 1).remove(0);
    assert!(report.steps >= 9, "{report:?}");
    for size in [2, 3, 4] {
        let out = dir.path().join(format!("of-{size}"));
        let config = settings(&data, &out);
        let reports = train(&config, Start::Fresh, size);
        for other in &reports {
            let same = (other.steps, other.tokens, other.acceptance_length.is_some());
            assert_eq!(same, (report.steps, report.tokens, true), "{size} processes");
        }
        for name in ["train/loss", "train/acc_0", "grad_norm", "eval/acceptance_length"] {
            near(name, &curve(&out, name), &curve(&alone, name), 2e-4);
        }
        near("state", &values(&reports[0].checkpoint), &values(&report.checkpoint), 2e-2);
        // What two processes began, one ends.
        if size == 2 {
            let half = report.steps / 2;
            let continued = dir.path().join("continued");
            let kept = RunDir::new(&continued).checkpoint(half);
            std::fs::create_dir_all(&kept).unwrap();
            for entry in std::fs::read_dir(RunDir::new(&out).checkpoint(half)).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
            }
            let mut config = config;
            config.checkpoint.run_dir = continued;
            let ended = train(&config, Start::Resume, 1).remove(0);
            assert_eq!((ended.steps, ended.new_steps), (report.steps, report.steps - half));
            near("continued", &values(&ended.checkpoint), &values(&report.checkpoint), 2e-2);
        }
    }
}

/// A step counts as one without rows where no process has any, and only there.
#[test]
fn steps_without_rows_are_those_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset_without_rows(&data, 24, false);
    let result = |size: usize| {
        let mut config = settings(&data, &dir.path().join(format!("of-{size}")));
        (config.data.max_tokens, config.data.held_out) = (1, 0.0);
        (config.train.accumulate, config.train.epochs, config.train.weight_decay) = (2, 1.0, 0.1);
        let report = train(&config, Start::Fresh, size).remove(0);
        let updates = Checkpoint::load_state(&report.checkpoint).unwrap().updates;
        (report.steps, updates, curve(&config.checkpoint.run_dir, "train/rows"), report.checkpoint)
    };
    let [alone, two] = [1, 2].map(result);
    assert_eq!((alone.0, alone.1, &alone.2), (two.0, two.1, &two.2));
    let empty = alone.2.iter().filter(|&&rows| rows == 0.0).count() as u64;
    assert!(empty > 0 && alone.1 == Some(12 - empty), "{alone:?}");
    near("state", &values(&two.3), &values(&alone.3), 2e-2);
}

#[test]
fn sums_and_copies_are_those_of_all_processes() {
    let lists = together(3, |world| {
        let place = (&Default::default(), FloatDType::F32, Transport::Auto);
        let sizes = [[1, 1], [3, 5], [7, 33], [64, 100]];
        exchange::compare::<Flex>(world, &sizes, place).unwrap()
    });
    for list in lists {
        assert_eq!(list.len(), 3 * 4 * 4);
        list.iter().for_each(|difference| assert_eq!(difference.value, 0.0, "{difference:?}"));
    }
}

/// A part that only points into the whole parameter would keep all of its memory.
#[test]
fn a_process_keeps_memory_for_its_own_rows_only() {
    together(3, |world| {
        let crossing: (&[_], _, _) = (&[], FloatDType::F32, Transport::Auto);
        let shards = Shards::<Flex>::join(world, &Default::default(), crossing).unwrap();
        for (rows, own) in [(6, 2 * world.rank()..2 * world.rank() + 2), (5, 0..5)] {
            let values: Vec<f32> = (0..2 * rows).map(|at| at as f32).collect();
            let whole = Param::from_vec(values.clone(), &[rows, 2], &Default::default());
            let Param::Matrix(part) = shards.keep(whole) else { panic!("a matrix") };
            let part = part.into_primitive().tensor();
            assert_eq!(part.storage::<f32>(), &values[2 * own.start..2 * own.end]);
        }
    });
}

#[test]
fn a_signal_to_one_process_stops_all_after_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = settings(&data, &dir.path().join("run"));
    config.train.accumulate = 2;
    let reports = together(2, |world| {
        let stop = Shutdown::default();
        if world.rank() == 1 {
            stop.request();
        }
        let (start, cpu) = ((Start::Fresh, world), Default::default());
        let guards = (&stop, &Watch::default());
        fit::run::<Backend>(&config, start, (&cpu, FloatDType::F32), guards).unwrap()
    });
    for (rank, report) in reports.iter().enumerate() {
        assert_eq!((report.stopped, report.steps), (true, 0), "rank {rank}");
    }
    assert_eq!(RunDir::new(&config.checkpoint.run_dir).steps().unwrap(), [0]);
}

/// A checkpoint of a step that is one to evaluate after, from a process that had no time for it.
#[test]
fn an_evaluation_that_a_stop_cuts_off_is_made_up_for() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 40);
    let mut config = support::config(&data, &dir.path().join("straight"));
    config.train.max_steps = 4;
    (config.checkpoint.eval_every, config.checkpoint.eval_samples) = (2, 3);
    let straight = run(&config, Start::Fresh, &World::alone()).unwrap();
    let expected = curve(&config.checkpoint.run_dir, "eval/acceptance_length");
    assert_eq!(expected.len(), 2);

    config.checkpoint.run_dir = dir.path().join("stopped");
    let place = (&Default::default(), FloatDType::F32);
    let (run_dir, alone) = (RunDir::new(&config.checkpoint.run_dir), World::alone());
    let session = Session::<Backend>::open(&config, place).unwrap();
    let mut state = TrainState::start(&session, &run_dir, (Start::Fresh, &alone)).unwrap();
    let mut loader = session.loader(state.loader, &alone).unwrap();
    for _ in 0..2 {
        let group = state.next_group(&mut loader, 1).unwrap().unwrap();
        state.train(&session, group).unwrap();
    }
    state.checkpoint(&session).unwrap().unwrap().save(&run_dir).unwrap();
    // No more samples than asked for, and none once a stop is asked for.
    assert!(session.split.held_out.len() > 3);
    assert_eq!(
        session.evaluate(&state.draft, (&Watch::default(), None)).unwrap().unwrap().samples,
        3
    );
    let stop = Shutdown::default();
    stop.request();
    let cut = session.evaluate(&state.draft, (&Watch::default(), Some(&stop)));
    assert!(matches!(cut, Err(FitError::Evaluate(EvaluateError::Stopped))));

    let start = (Start::Resume, &alone);
    let report = fit::run::<Backend>(&config, start, place, (&stop, &Watch::default())).unwrap();
    assert_eq!((report.stopped, report.steps, report.acceptance_length), (true, 2, None));
    let report = run(&config, Start::Resume, &alone).unwrap();
    assert_eq!(curve(&config.checkpoint.run_dir, "eval/acceptance_length"), expected);
    assert_eq!(report.acceptance_length, straight.acceptance_length);
}

#[test]
fn batches_that_do_not_divide_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset(&data, 20);
    let mut config = settings(&data, &dir.path().join("run"));
    config.train.accumulate = 3;
    for error in together(2, |world| run(&config, Start::Fresh, world).unwrap_err()) {
        assert_eq!(error.exit_code(), 78);
        assert!(error.to_string().contains("multiple of 2"), "{error}");
    }
}
