//! Ranks that die, lie or run out of memory in the middle of an extraction.

use std::path::Path;
use std::time::Duration;

use shared::{LayerIndex, Verify, audit};

use super::*;
use crate::config::LayerChoice;
use crate::target::fault::{Fault, Kind, When};
use crate::target::{EngineOptions, RankGroup, TargetError, TargetModel};

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
    config.target.model = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/nano-kimi"));
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
    let open = |options: &EngineOptions| -> Result<Box<dyn TargetModel>, TargetError> {
        let mut options = options.clone();
        options.faults = faults.to_vec();
        if faults.iter().any(|fault| fault.kind == Kind::Hang) {
            options.deadline = Duration::from_secs(2);
        }
        Ok(Box::new(RankGroup::open(&options)?))
    };
    run_with(&config(dir), &Shutdown::default(), &open)
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
