//! Signals, the writer's lock and closed pipes on the real binaries.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::path::Path;
use std::process::Stdio;

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

#[test]
fn a_signal_ends_the_run_after_its_batch_and_the_next_run_goes_on() {
    for name in ["TERM", "INT"] {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path();
        let child = running(dir, "ds", &[]);
        child.signal(name);
        let (code, log) = child.finish();
        assert_eq!(code, 143, "{name}: {log}");
        assert!(log.contains("rerun to continue"), "{name}: {log}");
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
