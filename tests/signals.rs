//! Signals, the writer's lock and closed pipes on the real binaries.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]
#![allow(clippy::print_stdout, reason = "measured times")]

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use aerie_tests::interrupt::Watched;
use aerie_tests::{command, extractor, small};

/// Starts a run whose log is longer than a pipe holds, so that it can't end while nobody reads,
/// and returns when its first batch has been captured.
fn running(dir: &Path, dataset: &str, changes: &[&str]) -> Watched {
    small::write_prompts(dir, 120);
    let mut start = command("extractor", dir, &small::run_args_with(dataset, changes));
    start.env("RUST_LOG", "info,aerie::shapes=trace");
    let mut child = Watched::start(start).unwrap();
    assert!(child.wait_for("stage=\"captured\""), "{:?}", child.finish());
    child
}

/// The last run as the manifest has it.
fn last_run(dir: &Path) -> serde_json::Value {
    let runs = extractor(dir, &["query", "ds", "runs", "--json"]).expect_code(0);
    serde_json::from_str(runs.stdout.lines().last().unwrap()).unwrap()
}

/// Completes the data set and compares it with one that nobody stopped.
fn complete(dir: &Path) {
    small::run(dir, "ds").expect_code(0);
    small::assert_clean(dir, "ds");
    small::run(dir, "straight").expect_code(0);
    assert!(small::contents(&dir.join("ds")) == small::contents(&dir.join("straight")));
}

#[test]
fn a_second_writer_is_told_who_the_first_is_and_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let first = running(home.path(), "ds", &[]);
    first.signal("STOP");
    let second = small::run(home.path(), "ds").expect_code(73);
    assert!(second.stderr.contains(&format!("process {}", first.id())), "{second:?}");
    first.signal("CONT");
    let (code, log) = first.finish();
    assert_eq!(code, 0, "{log}");
    small::assert_clean(home.path(), "ds");
    let runs = extractor(home.path(), &["query", "ds", "runs", "--json"]).expect_code(0);
    assert_eq!(runs.stdout.lines().count(), 1, "the second writer left a row: {}", runs.stdout);
    // The kernel has released the lock of a process that is gone, however it went.
    let killed = running(home.path(), "other", &[]);
    assert!(killed.kill());
    extractor(home.path(), &small::run_args("other")).expect_code(0);
}

/// Sends a signal and waits for the end.
fn ended_by(child: Watched, name: &str) -> (i32, String) {
    child.signal(name);
    let sent = Instant::now();
    let (code, log) = child.finish();
    let took = sent.elapsed();
    println!("ended {:.3} s after SIG{name}", took.as_secs_f64());
    (code, log)
}

/// Stops the child where it is, and lets it go on after `meanwhile`.
fn frozen<T>(child: &Watched, meanwhile: impl FnOnce() -> T) -> T {
    child.signal("STOP");
    let stat = format!("/proc/{}/stat", child.id());
    // `T` is stopped; one that has ended in between does not stop any more.
    let state = || fs::read_to_string(&stat).ok()?.rsplit(") ").next()?.chars().next();
    while state().is_some_and(|state| "RSD".contains(state)) {
        std::thread::yield_now();
    }
    let result = meanwhile();
    child.signal("CONT");
    result
}

#[test]
fn a_signal_ends_the_run_after_its_batch_and_the_next_run_goes_on() {
    for name in ["TERM", "INT"] {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path();
        let child = running(dir, "ds", &[]);
        let (code, log) = ended_by(child, name);
        assert_eq!(code, 143, "{name}: {log}");
        assert!(log.contains("rerun to continue"), "{name}: {log}");
        assert!(log.contains(" s after the signal"), "{name}: {log}");
        assert_eq!(last_run(dir)["outcome"], "stopped");
        let audit = small::assert_clean(dir, "ds");
        assert!(!audit.stdout.contains(" + 0 pending"), "{name}: {audit:?}");
        assert!(small::committed(&dir.join("ds")) > 0, "the batch in flight was not committed");
        complete(dir);
    }
}

#[test]
fn a_second_signal_ends_the_run_at_once() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    // One batch is the whole input, so a run that finishes its batch finishes altogether.
    let child = running(dir, "ds", &["--batch-tokens", "100000"]);
    child.signal("STOP");
    child.signal("TERM");
    child.signal("INT");
    child.signal("CONT");
    let (code, log) = child.finish();
    assert_eq!(code, 143, "{log}");
    assert_eq!(last_run(dir)["outcome"], serde_json::Value::Null, "the run came to its end: {log}");
    complete(dir);
}

#[test]
fn a_batch_in_flight_is_committed_within_the_grace() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 60);
    // One batch is the whole input: the signal meets it while the ranks are at work.
    let mut start =
        command("extractor", dir, &small::run_args_with("ds", &["--batch-tokens", "100000"]));
    start.env("RUST_LOG", "info,aerie::shapes=trace,sqlx=off");
    let mut child = Watched::start(start).unwrap();
    assert!(child.wait_for("stage="), "{:?}", child.finish());
    let (code, log) = ended_by(child, "TERM");
    assert_eq!(code, 143, "{log}");
    let audit = small::assert_clean(dir, "ds");
    assert!(audit.stdout.contains(" + 0 pending"), "{audit:?}");
}

#[test]
fn a_run_that_is_frozen_for_a_while_writes_the_same_bytes() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let mut child = running(dir, "ds", &[]);
    for _ in 0..5 {
        frozen(&child, || ());
        child.wait_lines(40);
    }
    let (code, log) = child.finish();
    assert_eq!(code, 0, "{log}");
    complete(dir);
}

/// Whatever the moment at which the writer stands still, readers see whole batches: nothing but
/// what is in work is unknown to the manifest, and the numbers of rows agree.
#[test]
fn readers_beside_a_writer_see_consistent_data() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let read = || {
        let audit = extractor(dir, &["audit", "ds", "--verify", "all", "--json"]).expect_code(0);
        let report: serde_json::Value = serde_json::from_str(&audit.stdout).unwrap();
        let samples = extractor(dir, &["query", "ds", "samples", "--json"]).expect_code(0);
        (report["samples"].as_u64().unwrap(), samples.stdout.lines().count() as u64)
    };
    let mut child = running(dir, "ds", &[]);
    let (mut readings, mut last) = (0, 0);
    while child.wait_for("stage=\"captured\"") {
        // Frozen, the writer can't move between the two readings; running, it can only add.
        let (audited, listed) = frozen(&child, read);
        assert_eq!(audited, listed, "{last} before");
        let (audited, listed) = read();
        assert!(last <= audited && audited <= listed, "{last}, {audited}, {listed}");
        last = listed;
        readings += 1;
        child.wait_lines(100);
    }
    let (code, log) = child.finish();
    assert_eq!(code, 0, "{log}");
    println!("{readings} readings beside the writer, twice each");
    assert!(readings > 3, "{readings} readings");
    complete(dir);
}

#[test]
fn a_signal_ends_training_after_a_checkpoint_and_resuming_gives_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 24);
    small::run(dir, "ds").expect_code(0);
    let settings = "[data]\ndataset = \"ds\"\nheld_out = 0\nmax_tokens = 128\n\
        [draft]\ndraft_vocab_size = 256\nintermediate_size = 32\nnum_attention_heads = 2\n\
        num_key_value_heads = 1\nhead_dim = 16\n\
        [train]\nepochs = 100\nmax_steps = 60\nttt_steps = 2\n\
        [checkpoint]\ncheckpoint_every = 2\nrun_dir = \"straight\"\n";
    fs::write(dir.join("fit.toml"), settings).unwrap();
    let fit = |place: &str, run: &str| {
        command("trainer", dir, &["fit", "--config", "fit.toml", place, run])
    };
    assert_eq!(Watched::start(fit("--run-dir", "straight")).unwrap().finish().0, 0);
    for name in ["TERM", "INT"] {
        let mut start = fit("--run-dir", name);
        start.env("RUST_LOG", "info,aerie::steps=trace");
        let mut child = Watched::start(start).unwrap();
        assert!(child.wait_for("prune"), "{:?}", child.finish());
        frozen(&child, || ());
        let (code, log) = ended_by(child, name);
        assert_eq!(code, 143, "{name}: {log}");
        assert!(log.contains("--resume"), "{name}: {log}");
        let metrics = fs::read_to_string(dir.join(name).join("metrics.jsonl")).unwrap();
        let steps = metrics.lines().count();
        assert!(steps < 60, "{name}: it came to its end");
        assert!(dir.join(format!("{name}/checkpoints/step-{steps:08}/BLAKE3SUMS")).is_file());
        assert_eq!(Watched::start(fit("--resume", name)).unwrap().finish().0, 0);
        for file in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
            let last = |run: &str| dir.join(run).join("checkpoints/step-00000060").join(file);
            assert!(fs::read(last(name)).unwrap() == fs::read(last("straight")).unwrap(), "{file}");
        }
    }
}

#[test]
fn output_that_finds_no_room_is_an_error_of_the_disk_and_costs_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 40);
    let run = small::run_args("ds");
    let run: Vec<&str> = run.iter().map(String::as_str).collect();
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for args in [
        run.as_slice(),
        &[&run, &["--json"][..]].concat(),
        // More than is buffered, so that the command itself meets the error.
        &["query", "ds", "samples", "--json"],
        &["query", "ds", "samples"],
        &["audit", "ds"],
    ] {
        let ended = command("extractor", dir, args).stdout(full()).output().unwrap();
        let words = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(74), "{args:?}: {words}");
        assert!(words.contains("writing to standard output"), "{args:?}: {words}");
        assert!(words.contains("No space left on device"), "{args:?}: {words}");
    }
    let ended = command("trainer", dir, &["config"]).stdout(full()).output().unwrap();
    let words = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(74), "{words}");
    assert!(words.contains("writing to standard output"), "{words}");
    // What went wrong before there was anything to say comes first.
    let wrong = [&run, &["--revision", "abc"][..]].concat();
    let ended = command("extractor", dir, &wrong).stdout(full()).output().unwrap();
    assert_eq!(ended.status.code(), Some(78));
    complete(dir);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 10);
    let run = small::run_args("ds");
    let run: Vec<&str> = run.iter().map(String::as_str).collect();
    for (binary, args) in [
        ("extractor", run.as_slice()),
        ("extractor", &["query", "ds", "samples", "--json"]),
        ("extractor", &["audit", "ds"]),
        ("trainer", &["config"]),
    ] {
        let mut child = command(binary, dir, args).stdout(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{binary} {args:?}");
    }
    small::assert_clean(dir, "ds");
}
