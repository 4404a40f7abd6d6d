//! The writing process dies at every disk operation, and at moments of nobody's choosing: what is
//! committed stays, and running again completes the data set.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shared::*;
use support::stepped::SteppedFiles;
use support::*;

const SAMPLES: u64 = 7;

/// Not a test of its own: the process that dies. Aborts at operation `AERIE_ABORT_AT`.
#[test]
fn child() {
    let (Ok(dir), Ok(abort_at)) = (env::var("AERIE_CHILD_DIR"), env::var("AERIE_ABORT_AT")) else {
        return;
    };
    let (done, abort_at) = (AtomicUsize::new(0), abort_at.parse::<usize>().unwrap());
    let files = SteppedFiles::new(move |name| {
        if done.fetch_add(1, Ordering::Relaxed) + 1 == abort_at {
            std::process::abort();
        }
        println!("step {name}");
        Ok(())
    });
    let dir = DatasetDir::with_files(dir, Arc::new(files));
    run(&dir, &samples(&spec(StateDtype::Bf16), SAMPLES)).unwrap();
}

fn start(dir: &Path, abort_at: usize) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("AERIE_CHILD_DIR", dir)
        .env("AERIE_ABORT_AT", abort_at.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Nothing committed is lost or damaged; at most what was in work is left over.
fn check_survivors(dir: &Path, what: &str) {
    if let Ok(report) = audit(dir, Verify::All) {
        let only_leftovers =
            report.findings.iter().all(|finding| finding.kind == FindingKind::Orphan);
        assert!(only_leftovers, "{what}: {:?}", report.findings);
    }
}

fn complete(dir: &Path, what: &str) {
    run(&DatasetDir::new(dir), &samples(&spec(StateDtype::Bf16), SAMPLES)).unwrap();
    let report = audit(dir, Verify::All).unwrap();
    assert_eq!(report.findings, [], "{what}");
    let Conservation { committed, pending, .. } = report.conservation;
    assert_eq!((committed, pending), (SAMPLES, 0), "{what}");
}

#[test]
fn death_at_every_disk_operation() {
    for abort_at in 1.. {
        let home = tempdir();
        let root = home.path().join("data");
        let output = start(&root, abort_at).wait_with_output().unwrap();
        if output.status.success() {
            assert!(abort_at > 20, "only {abort_at} operations");
            return;
        }
        let what = format!("aborted at operation {abort_at}");
        check_survivors(&root, &what);
        complete(&root, &what);
    }
}

#[test]
fn kill_9_during_any_operation_and_again_during_the_resume() {
    let steps = 30;
    for lines in 0..steps {
        let home = tempdir();
        let root = home.path().join("data");
        // The second process resumes what the first left, and is killed as well.
        for after in [lines, lines / 2] {
            let mut child = start(&root, usize::MAX);
            let mut told = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut seen = 0;
            while seen < after {
                match told.next() {
                    Some(line) => seen += usize::from(line.unwrap().contains("step")),
                    None => break,
                }
            }
            // SIGKILL, at whatever it is doing now: a transaction of SQLite as well.
            child.kill().unwrap();
            child.wait().unwrap();
            check_survivors(&root, &format!("killed after {after} operations"));
        }
        complete(&root, &format!("killed after {lines} operations"));
    }
}
