//! Every disk operation fails in turn, once and for ever: nothing committed is lost, nothing half
//! done is visible, and the next run completes the data set.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shared::files::{Files, RealFiles};
use shared::*;
use support::stepped::SteppedFiles;
use support::*;

fn exit_code(error: &(dyn std::error::Error + 'static)) -> u8 {
    let manifest = error.downcast_ref::<ManifestError>().map(ManifestError::exit_code);
    manifest.or(error.downcast_ref::<ShardError>().map(ShardError::exit_code)).unwrap()
}

const EIO: i32 = 5;
/// No space, quota, read-only file system.
const FULL: [i32; 3] = [28, 122, 30];

/// Counts operations and fails the one numbered `fail_at`, or it and all after it.
fn failing(done: Arc<AtomicUsize>, fail_at: usize, for_ever: bool, errno: i32) -> SteppedFiles {
    SteppedFiles::new(move |_| {
        let step = done.fetch_add(1, Ordering::Relaxed) + 1;
        match step == fail_at || (for_ever && step > fail_at) {
            true => Err(io::Error::from_raw_os_error(errno)),
            false => Ok(()),
        }
    })
}

/// Fails operation 1, 2, 3 ... of a run until one passes untouched; returns their number.
fn fail_each(for_ever: bool, errno: i32) -> usize {
    let spec = spec(StateDtype::Bf16);
    let samples = samples(&spec, 5);
    for fail_at in 1.. {
        let home = tempdir();
        let root = home.path().join("data");
        let done = Arc::new(AtomicUsize::new(0));
        let files = failing(done.clone(), fail_at, for_ever, errno);
        let outcome = run(&DatasetDir::with_files(&root, Arc::new(files)), &samples);
        if done.load(Ordering::Relaxed) < fail_at {
            outcome.unwrap();
            return fail_at - 1;
        }
        let error = outcome.unwrap_err();
        assert_eq!(exit_code(error.as_ref()), 74, "operation {fail_at}: {error}");
        assert!(error.to_string().contains(home.path().to_str().unwrap()), "no path in: {error}");
        // What was committed before the failure is whole already.
        if root.join("manifest.sqlite").exists() && Manifest::open_read(&root).is_ok() {
            let report = audit(&root, Verify::All).unwrap();
            assert!(
                report.findings.iter().all(|finding| finding.kind == FindingKind::Orphan),
                "operation {fail_at}: {:?}",
                report.findings
            );
        }
        run(&DatasetDir::new(&root), &samples).unwrap();
        let report = audit(&root, Verify::All).unwrap();
        assert_eq!(report.findings, [], "operation {fail_at}");
        assert_eq!((report.samples, report.conservation.pending), (5, 0));
        assert_eq!(fs::read_dir(root.join("shards")).unwrap().count(), report.shards);
    }
    unreachable!()
}

#[test]
fn each_operation_fails_once() {
    // Create, write, sync, publish and sync of the directory, for three shards at the least.
    assert!(fail_each(false, EIO) >= 15);
}

#[test]
fn each_operation_fails_for_ever() {
    assert!(fail_each(true, EIO) >= 15);
}

#[test]
fn a_disk_that_is_full_or_read_only_from_some_operation_on() {
    for errno in FULL {
        assert!(fail_each(true, errno) >= 15);
    }
}

/// The kernel forgets the pages of a sync that did not succeed: a second one would succeed and
/// prove nothing.
#[test]
fn a_sync_is_never_tried_again() {
    let samples = samples(&spec(StateDtype::Bf16), 5);
    for (name, other) in [("sync", "publish"), ("sync_dir", "create_new")] {
        let home = tempdir();
        let log = Arc::new(Mutex::new(Vec::new()));
        let seen = log.clone();
        // The last sync of its kind before a shard is committed: the first after a write.
        let files = SteppedFiles::new(move |step| {
            let mut log = seen.lock().unwrap();
            log.push(step);
            match step == name && log.contains(&"write") {
                true => Err(io::Error::from_raw_os_error(EIO)),
                false => Ok(()),
            }
        });
        let root = home.path().join("data");
        run(&DatasetDir::with_files(&root, Arc::new(files)), &samples).unwrap_err();
        let log = log.lock().unwrap();
        let written = log.iter().position(|step| *step == "write").unwrap();
        let after = &log[written..];
        assert_eq!(after.iter().filter(|step| **step == name).count(), 1, "{after:?}");
        let failed = after.iter().position(|step| *step == name).unwrap();
        assert!(!after[failed..].contains(&other), "{after:?}");
    }
}

#[test]
fn short_writes_and_interruptions_are_invisible() {
    let home = tempdir();
    let count = Arc::new(AtomicUsize::new(0));
    // Every other write is interrupted by a signal; those that are not are short.
    let files = SteppedFiles::new(move |step| {
        let odd = step == "write" && count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        if odd { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    });
    let samples = samples(&spec(StateDtype::Bf16), 5);
    let root = home.path().join("data");
    run(&DatasetDir::with_files(&root, Arc::new(files)), &samples).unwrap();
    let report = audit(&root, Verify::All).unwrap();
    assert_eq!((report.findings.len(), report.samples), (0, 5));
}

/// Nothing may be named before it is on stable storage, nor be counted on before its name is.
#[test]
fn a_shard_is_synced_then_named_then_its_directory_synced() {
    let dir = tempdir();
    fs::create_dir(dir.path().join("shards")).unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    let seen = log.clone();
    let files = SteppedFiles::new(move |name| {
        seen.lock().unwrap().push(name);
        Ok(())
    });
    let home = DatasetDir::with_files(dir.path(), Arc::new(files));
    let spec = spec(StateDtype::Bf16);
    let mut writer = ShardWriter::create(&home, ShardId(0), &spec, &Digest([0; 32])).unwrap();
    writer.push(&captured(&spec, 3, 1)).unwrap();
    writer.seal().unwrap();
    let mut log = log.lock().unwrap().clone();
    log.dedup();
    assert_eq!(log, ["create_new", "write", "sync", "publish", "sync_dir"]);
}

#[test]
fn a_published_file_is_never_replaced() {
    let dir = tempdir();
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    fs::write(&old, "old").unwrap();
    fs::write(&new, "new").unwrap();
    let error = RealFiles.publish(&new, &old).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read_to_string(&old).unwrap(), "old");
}

#[test]
fn written_files_replace_whole_and_have_ordinary_modes() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempdir();
    let path = dir.path().join("config.json");
    durable::write_file(&path, b"first").unwrap();
    durable::write_file(&path, b"second").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"second");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    fs::write(dir.path().join("plain"), "").unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
    assert_eq!(mode("config.json"), mode("plain"));
}

#[test]
fn a_directory_is_published_once() {
    let dir = tempdir();
    let (temporary, target) = (dir.path().join(".step.tmp"), dir.path().join("step"));
    for expected in [true, false] {
        fs::create_dir(&temporary).unwrap();
        fs::write(temporary.join("weights"), "w").unwrap();
        assert_eq!(durable::publish_dir(&temporary, &target).is_ok(), expected);
    }
    assert_eq!(fs::read_to_string(target.join("weights")).unwrap(), "w");
}
