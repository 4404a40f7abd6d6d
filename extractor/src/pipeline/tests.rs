//! Ranks that die, lie or run out of memory in the middle of an extraction.

use std::path::Path;
use std::time::Duration;

use shared::{LayerIndex, Verify, audit};

use super::*;
use crate::config::LayerChoice;
use crate::target::fault::{Fault, Kind, Spoil, When};
use crate::target::{self, Compute, EngineOptions, RankGroup, TargetError, TargetModel};

/// Tokens of every line's sample, in order. Two lines make a batch.
const LENGTHS: [usize; 8] = [20, 21, 22, 23, 24, 25, 26, 27];

fn config(dir: &Path) -> ExtractConfig {
    let prompts = dir.join("prompts.jsonl");
    let line = |(start, tokens): (usize, usize)| {
        let ids: Vec<usize> = (0..tokens).map(|at| 100 + 31 * start + at).collect();
        let mask: Vec<usize> = (0..tokens).map(|at| usize::from(at > 4)).collect();
        serde_json::json!({"input_ids": ids, "loss_mask": mask}).to_string() + "\n"
    };
    let text: String = LENGTHS.into_iter().enumerate().map(line).collect();
    shared::durable::write_file(&prompts, text.as_bytes()).unwrap();
    let mut config = ExtractConfig::default();
    // A binary that was carried elsewhere is run in a root of the repository.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/nano-kimi");
    config.target.model = Some(if source.exists() { source } else { "models/nano-kimi".into() });
    config.target.tp = 2;
    config.data.prompts = vec![prompts];
    config.capture.layers = LayerChoice::List(vec![2, 7]);
    config.run.dataset = Some(dir.join("ds"));
    config.run.batch_tokens = 50;
    config.run.shard_bytes = 1 << 16;
    config.run.reject_limit = 0.5;
    config
}

fn run_faulty(dir: &Path, faults: &[Fault]) -> Result<RunReport, PipelineError> {
    run_config(&config(dir), faults)
}

fn run_config(config: &ExtractConfig, faults: &[Fault]) -> Result<RunReport, PipelineError> {
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let mut options = options.clone();
        options.faults = faults.to_vec();
        if faults.iter().any(|fault| [Kind::Hang, Kind::Device(Spoil::Hangs)].contains(&fault.kind))
        {
            options.deadline = Duration::from_secs(2);
        }
        Ok(Box::new(RankGroup::open(&options)?))
    };
    run_with(config, &Shutdown::default(), &open)
}

fn on_rank_1(when: When, kind: Kind) -> Fault {
    Fault { rank: 1, when, kind }
}

/// Committed, rejected and pending lines; all bytes are as they should be.
fn lines(dir: &Path) -> (u64, u64, u64) {
    let report = audit(&dir.join("ds"), Verify::All).unwrap();
    assert!(report.clean(), "{:?}", report.findings);
    let counts = report.conservation;
    (counts.committed, counts.rejected, counts.pending)
}

fn reasons(dir: &Path) -> String {
    let manifest = Manifest::open_read(&dir.join("ds")).unwrap();
    let table = manifest.list(shared::manifest::Listing::Rejects).unwrap();
    table.rows.iter().flatten().map(|cell| format!("{cell}\n")).collect()
}

#[test]
fn a_rank_that_dies_ends_the_run_with_75_and_keeps_what_was_captured() {
    for kind in [Kind::Panic, Kind::Error, Kind::Hang, Kind::Desync] {
        let dir = tempfile::tempdir().unwrap();
        let died = on_rank_1(When::HasSequence(24), kind);
        let error = run_faulty(dir.path(), &[died]).unwrap_err();
        assert_eq!(error.exit_code(), 75, "{kind:?}: {error}");
        let desync = matches!(error, PipelineError::Target(TargetError::Desync { rank: 1, .. }));
        assert_eq!(desync, kind == Kind::Desync, "{error}");
        // A desync is there from the first batch on; nothing of it is kept.
        let kept = if desync { 0 } else { 4 };
        assert_eq!(lines(dir.path()), (kept, 0, 8 - kept), "{kind:?}");
        // The cause is gone: what was with it in the batch is tried again and completed.
        run_faulty(dir.path(), &[]).unwrap();
        assert_eq!(lines(dir.path()), (8, 0, 0), "{kind:?}");
    }
}

/// A target that never gives its memory back, as with a driver that does not answer.
struct Clinging(RankGroup);

impl TargetModel for Clinging {
    fn spec(&self) -> &TargetSpec {
        self.0.spec()
    }

    fn prefill(
        &mut self,
        batch: &crate::batch::TokenBatch,
        layers: &[LayerIndex],
    ) -> Result<crate::capture::Capture, TargetError> {
        self.0.prefill(batch, layers)
    }

    fn extend(
        &mut self,
        request: &target::ExtendRequest<'_>,
    ) -> Result<target::Extension, TargetError> {
        self.0.extend(request)
    }

    fn drop_cache(&mut self, cache: target::CacheId) {
        self.0.drop_cache(cache);
    }
}

impl Drop for Clinging {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Not a test of its own: a run in which a rank hangs, in a process whose orderly end hangs, and
/// in which `clinging` says whether the target's end does too.
#[test]
fn child() {
    let Ok(dir) = std::env::var("AERIE_HANGING_RUN") else { return };
    let clings = std::env::var("AERIE_CLINGING").is_ok();
    target::hang_at_exit();
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let mut options = options.clone();
        options.faults = vec![on_rank_1(When::HasSequence(24), Kind::Hang)];
        options.deadline = Duration::from_secs(2);
        let group = RankGroup::open(&options)?;
        Ok(if clings { Box::new(Clinging(group)) } else { Box::new(group) })
    };
    let error = run_with(&config(Path::new(&dir)), &Shutdown::default(), &open).unwrap_err();
    // What `main` does.
    target::exit_at_once(error.exit_code());
}

#[test]
fn a_rank_that_is_stuck_in_the_driver_does_not_keep_the_process() {
    for clings in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "pipeline::tests::child", "--nocapture"]);
        child.env("AERIE_HANGING_RUN", dir.path());
        if clings {
            child.env("AERIE_CLINGING", "1");
        }
        let output = child.output().unwrap();
        assert_eq!(output.status.code(), Some(75), "clings: {clings}, {output:?}");
        assert_eq!(lines(dir.path()), (4, 0, 4), "clings: {clings}");
        run_faulty(dir.path(), &[]).unwrap();
        assert_eq!(lines(dir.path()), (8, 0, 0), "clings: {clings}");
    }
}

#[test]
fn a_sample_that_kills_three_times_becomes_a_reject_and_takes_no_other_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let poison = [on_rank_1(When::HasSequence(25), Kind::Panic)];
    // The first time its neighbour dies with it, then it is alone.
    for committed in [4, 5, 5] {
        let error = run_faulty(dir.path(), &poison).unwrap_err();
        assert_eq!(error.exit_code(), 75);
        assert_eq!(lines(dir.path()), (committed, 0, 8 - committed));
    }
    let report = run_faulty(dir.path(), &poison).unwrap();
    assert_eq!(report.outcome, Outcome::Completed);
    assert_eq!(lines(dir.path()), (7, 1, 0));
    let reasons = reasons(dir.path());
    assert!(reasons.contains("target_crash") && reasons.contains("3 times"), "{reasons}");
    assert!(reasons.contains("out of luck"), "{reasons}");
}

/// On a machine that has enough memory, or whose fault is mended.
#[test]
fn what_the_machine_was_to_blame_for_can_be_tried_again() {
    let full = [on_rank_1(When::LargerThan(26), Kind::OutOfMemory)];
    let poison = [on_rank_1(When::HasSequence(25), Kind::Panic)];
    for (fault, reason, other) in
        [(&full, "out_of_memory", "target_crash"), (&poison, "target_crash", "out_of_memory")]
    {
        let dir = tempfile::tempdir().unwrap();
        assert!((0..9).any(|_| run_faulty(dir.path(), fault).is_ok()));
        assert_eq!(lines(dir.path()), (7, 1, 0));
        let forget = |reason: &str| {
            let manifest = Manifest::open_existing(&dir.path().join("ds")).unwrap();
            manifest.forget_rejects(&[reason]).unwrap()
        };
        assert_eq!(forget(other), 0);
        assert_eq!(lines(dir.path()), (7, 1, 0));
        assert_eq!(forget(reason), 1);
        assert_eq!(lines(dir.path()), (7, 0, 1));
        run_faulty(dir.path(), &[]).unwrap();
        assert_eq!(lines(dir.path()), (8, 0, 0));
    }
}

#[test]
fn a_target_that_cannot_start_is_held_against_no_sample() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let refuses = |_: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        Err(TargetError::RankThread { rank: 1, source: std::io::ErrorKind::WouldBlock.into() })
    };
    for _ in 0..5 {
        let error = run_with(&config, &Shutdown::default(), &refuses).unwrap_err();
        assert_eq!(error.exit_code(), 75);
        assert_eq!(lines(dir.path()), (0, 0, 8));
    }
    run_faulty(dir.path(), &[]).unwrap();
    assert_eq!(lines(dir.path()), (8, 0, 0));
}

#[test]
fn lines_that_are_appended_during_a_run_are_left_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let path = &config.data.prompts[0];
    let first = std::fs::read_to_string(path).unwrap().lines().next().unwrap().to_owned();
    let more = format!("not json\n{}\n", first.replace("[100,", "[99,"));
    // The target is opened for the first batch, when the plan is made.
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, more.as_bytes()).unwrap();
        target::open(options)
    };
    run_with(&config, &Shutdown::default(), &open).unwrap();
    assert_eq!(lines(dir.path()), (8, 0, 0));
    run_with(&config, &Shutdown::default(), &target::open).unwrap();
    assert_eq!(lines(dir.path()), (9, 1, 0));
}

#[test]
fn a_prompts_file_that_is_cut_during_a_run_is_said_and_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let path = &config.data.prompts[0];
    let whole = std::fs::read_to_string(path).unwrap();
    let three: String = whole.split_inclusive('\n').take(3).collect();
    // The target is opened for the first batch. Intake has the file open, so it is cut in place.
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(three.len() as u64).unwrap();
        target::open(options)
    };
    // Read before the cut, as long as it is so short; its copy is longer than what is read ahead.
    let long = whole.repeat(1 + (1 << 19) / whole.len());
    shared::durable::write_file(path, long.as_bytes()).unwrap();
    let error = run_with(&config, &Shutdown::default(), &open).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    let words = shared::error_chain::in_words(&error);
    assert!(words.contains("was changed after it was looked at first"), "{words}");
    // The last waited for others to fill its batch.
    assert_eq!(lines(dir.path()).0, 7);
    shared::durable::write_file(path, long.as_bytes()).unwrap();
    run_with(&config, &Shutdown::default(), &target::open).unwrap();
    let (committed, rejected, pending) = lines(dir.path());
    assert_eq!((committed, rejected, pending), (8, 0, 0));
}

#[test]
fn a_prompts_file_that_is_rewritten_during_a_run_is_not_mixed_with_its_other_version() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let path = &config.data.prompts[0];
    let text = std::fs::read_to_string(path).unwrap();
    // Longer than what is read ahead; the last line, which is read after the rewriting, is new.
    let many = text.repeat(1 + (1 << 19) / text.len());
    let last = |id: &str| text.lines().next().unwrap().replace("[100,", id);
    let (one, other) = (many.clone() + &last("[98,"), many + &last("[99,"));
    assert_eq!(one.len(), other.len());
    shared::durable::write_file(path, one.as_bytes()).unwrap();
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, other.as_bytes()).unwrap();
        target::open(options)
    };
    let error = run_with(&config, &Shutdown::default(), &open).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    let words = shared::error_chain::in_words(&error);
    assert!(words.contains("prompts.jsonl was changed after it was looked at"), "{words}");
    assert_eq!(lines(dir.path()).0, 7, "what was captured is kept");
    // Either version is whole, and what was read is part of both.
    run_with(&config, &Shutdown::default(), &target::open).unwrap();
    assert_eq!(lines(dir.path()), (9, 0, 0));
}

#[test]
fn a_batch_that_needs_too_much_memory_is_split_and_a_sample_that_does_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let full = [on_rank_1(When::LargerThan(26), Kind::OutOfMemory)];
    let report = run_faulty(dir.path(), &full).unwrap();
    assert_eq!(report.written.samples, 7);
    assert_eq!(lines(dir.path()), (7, 1, 0));
    let reasons = reasons(dir.path());
    assert!(reasons.contains("out_of_memory") && reasons.contains("27 tokens"), "{reasons}");
}

#[test]
fn states_that_are_not_finite_are_quarantined_counted_and_fail_the_run() {
    for value in [f32::NAN, f32::INFINITY] {
        let dir = tempfile::tempdir().unwrap();
        let when = When::HasSequence(23);
        let fault = Fault { rank: 0, when, kind: Kind::Value(LayerIndex(7), value) };
        let error = run_faulty(dir.path(), &[fault]).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        let counted = matches!(error, PipelineError::NonFinite { non_finite: 1, committed: 7 });
        assert!(counted, "{error}");
        assert_eq!(lines(dir.path()), (7, 1, 0));
        let reasons = reasons(dir.path());
        assert!(reasons.contains("non_finite") && reasons.contains("layer 7"), "{reasons}");
        assert!(!reasons.contains("layer 2"), "{reasons}");
    }
}

#[test]
fn lines_that_repeat_a_quarantined_sample_are_rejected_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let path = &config.data.prompts[0];
    let text = std::fs::read_to_string(path).unwrap();
    let bad = text.lines().nth(3).unwrap();
    // Once before the sample has been run, once after.
    let text = text.replace(bad, &format!("{bad}\n{bad}")) + bad;
    shared::durable::write_file(path, text.as_bytes()).unwrap();
    for kind in [Kind::Value(LayerIndex(7), f32::NAN), Kind::OutOfMemory] {
        let fault = Fault { rank: 0, when: When::HasSequence(23), kind };
        let outcome = run_config(&config, &[fault]).map(|report| report.outcome);
        let finished =
            matches!(outcome, Ok(Outcome::Completed) | Err(PipelineError::NonFinite { .. }));
        assert!(finished, "{kind:?}: {outcome:?}");
        assert_eq!(lines(dir.path()), (7, 3, 0), "{kind:?}");
        std::fs::remove_dir_all(dir.path().join("ds")).unwrap();
    }
}

#[test]
fn a_stop_is_heard_while_the_run_is_planned() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let model = config.model().unwrap();
    let spec = TargetSpec::read(model).unwrap();
    let encoder = Encoder::load(model, config.data.encode_options(&spec)).unwrap();
    let contract = config.capture_spec(&spec).unwrap();
    let stop = Shutdown::default();
    let plan = |stop| Plan::make(&config, &encoder, &contract, None, stop).unwrap().lines;
    assert_eq!(plan(&stop), 8);
    stop.request();
    assert_eq!(plan(&stop), 0);
    let report = run_with(&config, &stop, &target::open).unwrap();
    assert_eq!(report.outcome, Outcome::Stopped);
    // Neither the files nor the run were registered.
    assert_eq!(lines(dir.path()), (0, 0, 0));
    run_faulty(dir.path(), &[]).unwrap();
    assert_eq!(lines(dir.path()), (8, 0, 0));
}

/// The run of [`config`] on one GPU.
fn config_on_gpu(dir: &Path) -> ExtractConfig {
    let mut config = config(dir);
    config.target.device = crate::target::Device::Cuda;
    config.target.tp = 1;
    config
}

#[test]
#[ignore = "needs a GPU"]
fn on_a_gpu_too_a_rank_that_dies_ends_the_run_with_75() {
    for kind in [Kind::Panic, Kind::Error, Kind::Hang, Kind::Desync] {
        let dir = tempfile::tempdir().unwrap();
        let config = config_on_gpu(dir.path());
        let fault = Fault { rank: 0, when: When::HasSequence(24), kind };
        let started = Instant::now();
        let error = run_config(&config, &[fault]).unwrap_err();
        println!("{kind:?}: {:.1} s, {error}", started.elapsed().as_secs_f64());
        assert_eq!(error.exit_code(), EXIT_DIED, "{kind:?}: {error}");
        let kept = if kind == Kind::Desync { 0 } else { 4 };
        assert_eq!(lines(dir.path()), (kept, 0, 8 - kept), "{kind:?}");
        run_config(&config, &[]).unwrap();
        assert_eq!(lines(dir.path()), (8, 0, 0), "{kind:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn on_a_gpu_too_a_batch_without_memory_is_split() {
    let dir = tempfile::tempdir().unwrap();
    let full = Fault { rank: 0, when: When::LargerThan(26), kind: Kind::OutOfMemory };
    let report = run_config(&config_on_gpu(dir.path()), &[full]).unwrap();
    assert_eq!(report.written.samples, 7);
    assert_eq!(lines(dir.path()), (7, 1, 0));
}

/// More tokens than any GPU has room for: refused before weights are read, with the numbers.
#[test]
#[ignore = "needs a GPU"]
fn on_a_gpu_a_batch_that_can_never_fit_is_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config_on_gpu(dir.path());
    config.run.batch_tokens = 1 << 24;
    config.data.max_tokens = 1 << 24;
    config.target.compute = Compute::F32;
    let error = run_config(&config, &[]).unwrap_err();
    println!("{error}");
    assert_eq!(error.exit_code(), 69);
    for part in ["are needed", "are free", "--batch-tokens", "residual stream"] {
        assert!(error.to_string().contains(part), "no {part}: {error}");
    }
    assert_eq!(lines(dir.path()), (0, 0, 8));
}

/// Not a test of its own: a run on a GPU that fails, in a process whose orderly end hangs.
#[test]
#[ignore = "needs a GPU, and another test to start it"]
fn child_on_gpu() {
    let Ok(dir) = std::env::var("AERIE_HANGING_RUN") else { return };
    let how = match std::env::var("AERIE_SPOIL").as_deref() {
        Ok("hangs") => Spoil::Hangs,
        _ => Spoil::BadAddress,
    };
    target::hang_at_exit();
    let fault = Fault { rank: 0, when: When::HasSequence(24), kind: Kind::Device(how) };
    let error = run_config(&config_on_gpu(Path::new(&dir)), &[fault]).unwrap_err();
    println!("{error}");
    target::exit_at_once(error.exit_code());
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_that_fails_or_hangs_does_not_keep_the_process() {
    for how in ["fails", "hangs"] {
        let dir = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "pipeline::tests::child_on_gpu", "--nocapture"])
            .env("AERIE_HANGING_RUN", dir.path())
            .env("AERIE_SPOIL", how)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{how}: {:.1} s, {said}", started.elapsed().as_secs_f64());
        assert_eq!(output.status.code(), Some(75), "{output:?}");
        assert_eq!(lines(dir.path()), (4, 0, 4), "{how}");
        run_config(&config_on_gpu(dir.path()), &[]).unwrap();
        assert_eq!(lines(dir.path()), (8, 0, 0), "{how}");
    }
}

/// The same rows in e4m3 from the GPU and from its plain twin on the CPU, within the noise of the
/// products; the recorded error is that of the format.
#[test]
#[ignore = "needs a GPU"]
fn states_quantised_on_the_gpu_are_those_of_the_twin() {
    let dir = tempfile::tempdir().unwrap();
    let mut states = Vec::new();
    for device in [crate::target::Device::Cpu, crate::target::Device::Cuda] {
        let mut config = config_on_gpu(dir.path());
        config.target.device = device;
        config.target.compute = crate::target::Compute::F32;
        config.capture.dtype = shared::StateDtype::Fp8;
        config.run.dataset = Some(dir.path().join(device.to_string()));
        run_config(&config, &[]).unwrap();
        let path = config.run.dataset.unwrap();
        let report = audit(&path, Verify::All).unwrap();
        assert!(report.clean(), "{:?}", report.findings);
        println!("{device}: {:?}", report.storage_errors);
        assert!(report.storage_errors.iter().all(|it| (0.005..0.04).contains(&it.error)));
        let manifest = Manifest::open_read(&path).unwrap();
        let row = &manifest.samples().unwrap()[0];
        let shard = path.join("shards").join(&row.shard_file);
        let reader = shared::ShardReader::open(&shard, &shared::HeaderLimits::SHARD).unwrap();
        states.push((reader.read(row.id).unwrap(), report.storage_errors));
    }
    let [(one, errors), (other, other_errors)] = &states[..] else { panic!("two devices") };
    for (a, b) in one.states().iter().zip(other.states()) {
        let (a, b) = (a.rows.to_f32(), b.rows.to_f32());
        let apart: f32 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f32 = a.iter().map(|a| a * a).sum();
        println!("relative difference of the states {:.2e}", (apart / size).sqrt());
        // A value near the middle of two codes may go to either.
        assert!((apart / size).sqrt() < 0.01);
    }
    for (a, b) in errors.iter().zip(other_errors) {
        assert!((a.error - b.error).abs() < 0.01 * a.error, "{a:?} {b:?}");
    }
}
