//! The power fails at every disk operation: whatever of the unsynced is lost, each committed row
//! keeps its bytes, nothing half done is visible, and the next run completes the data set.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use shared::*;
use support::volatile::{Lies, VolatileFiles};
use support::*;

const SAMPLES: u64 = 5;
/// Different losses for each operation.
const LOSSES: u64 = 4;

/// One run that loses power at an operation. False when the run was over before.
fn power_loss(off_at: usize, seed: u64, lies: Lies) -> Option<Vec<Finding>> {
    let home = tempdir();
    let root = home.path().join("data");
    let samples = samples(&spec(StateDtype::Bf16), SAMPLES);
    let files = VolatileFiles::new(off_at, lies);
    let outcome = run(&DatasetDir::with_files(&root, Arc::new(files.clone())), &samples);
    let over = files.operations() < off_at;
    assert_eq!(outcome.is_ok(), over, "operation {off_at}");
    let mut state = seed;
    files.lose(|limit| random(&mut state) % limit);
    // Before the manifest there is nothing to lose.
    let findings = audit(&root, Verify::All).map_or(Vec::new(), |report| report.findings);
    let lost: Vec<Finding> =
        findings.into_iter().filter(|finding| finding.kind != FindingKind::Orphan).collect();
    if lies == Lies::Nothing {
        assert_eq!(lost, [], "operation {off_at}, seed {seed}");
        run(&DatasetDir::new(&root), &samples).unwrap();
        let report = audit(&root, Verify::All).unwrap();
        assert_eq!(report.findings, [], "operation {off_at}, seed {seed}");
        assert_eq!((report.samples as u64, report.conservation.pending), (SAMPLES, 0));
    }
    (!over).then_some(lost)
}

#[test]
fn what_is_committed_survives_a_power_failure_at_any_operation() {
    let mut operations = 0;
    for off_at in 1.. {
        let going = (0..LOSSES).all(|seed| power_loss(off_at, seed, Lies::Nothing).is_some());
        if !going {
            break;
        }
        operations = off_at;
    }
    assert!(operations > 20, "only {operations} operations");
}

/// The test above would pass on any disk if nothing were ever lost; on a disk that lies it must
/// not.
#[test]
fn a_disk_that_lies_about_syncing_is_found_out() {
    for lies in [Lies::AboutFiles, Lies::AboutDirectories] {
        let found = (10..60).any(|off_at| {
            let lost = |seed| power_loss(off_at, seed, lies).is_some_and(|lost| !lost.is_empty());
            (0..LOSSES).any(lost)
        });
        assert!(found, "{lies:?}");
    }
}
