//! Disks that are full, read-only or gone, on the real binaries: exit 74 with operation and path,
//! and once there is room again the same run completes the data set.
//!
//! A small tmpfs gives ENOSPC where mounting is allowed; a file size limit gives EFBIG anywhere.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use aerie_tests::interrupt::Watched;
use aerie_tests::{Finished, command, extractor, extractor_within, small};

/// A small file system that is unmounted in the end.
struct Tmpfs(PathBuf);

impl Tmpfs {
    /// `None`, and a line that the test harness does not hold back, where this user may not mount.
    fn mount(path: &Path, kib: u64) -> Option<Self> {
        fs::create_dir_all(path).unwrap();
        if mount(&["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"], path) {
            return Some(Self(path.to_owned()));
        }
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = writeln!(
            std::io::stderr(),
            "\nSKIPPED {test}: no tmpfs may be mounted here. A disk that is full is left to \
             a_file_that_may_not_grow_is_an_error_with_its_path and to shared/tests/faults.rs"
        );
        None
    }

    fn remount(&self, options: &str) {
        assert!(mount(&["-o", &format!("remount,{options}")], &self.0), "remount {options}");
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn mount(args: &[&str], path: &Path) -> bool {
    let mounted = Command::new("mount").args(args).arg(path).output();
    mounted.is_ok_and(|output| output.status.success())
}

/// Takes all the room there is.
fn fill(path: &Path) {
    let mut ballast = fs::File::create(path).unwrap();
    while ballast.write_all(&[0; 4096]).is_ok() {}
}

fn complete(dir: &Path, dataset: &str) {
    small::run(dir, dataset).expect_code(0);
    let audit = small::assert_clean(dir, dataset);
    assert!(audit.stdout.contains(" + 0 pending"), "{audit:?}");
    if !dir.join("straight").exists() {
        small::run(dir, "straight").expect_code(0);
    }
    assert!(small::contents(&dir.join(dataset)) == small::contents(&dir.join("straight")));
}

/// What is committed is whole; at most what was in work is left over.
fn check_survivors(dir: &Path, dataset: &str, what: &str) {
    if !dir.join(dataset).join("manifest.sqlite").exists() {
        return;
    }
    let audit = extractor(dir, &["audit", dataset, "--verify", "all", "--json"]);
    // Before its first transaction a manifest is no manifest yet.
    if let Ok(report) = serde_json::from_str::<serde_json::Value>(&audit.stdout) {
        let findings = report["findings"].as_array().unwrap();
        assert!(findings.iter().all(|f| f["kind"] == "orphan"), "{what}: {findings:?}");
    }
}

/// Too little room is refused at the start, so the room goes away while the run is at work.
#[test]
fn a_disk_that_fills_up_at_any_point_loses_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    let start = |dataset: &str| {
        let mut start = command("extractor", dir, &small::run_args(dataset));
        start.env("RUST_LOG", "info,aerie::shapes=trace");
        Watched::start(start).unwrap()
    };
    let (code, log) = start("counted").finish();
    assert_eq!(code, 0, "{log}");
    let (lines, moments, mut full) = (log.lines().count() as u64, 12, 0);
    for moment in 0..moments {
        let Some(_disk) = Tmpfs::mount(&dir.join("disk"), 16 << 10) else { return };
        let mut child = start("disk/ds");
        child.wait_lines(moment * lines / moments);
        fill(&dir.join("disk/ballast"));
        let (code, log) = child.finish();
        if code != 0 {
            full += 1;
            assert_eq!(code, 74, "moment {moment}: {log}");
            check_survivors(dir, "disk/ds", &format!("moment {moment}"));
        }
        fs::remove_file(dir.join("disk/ballast")).unwrap();
        complete(dir, "disk/ds");
    }
    println!("{full} of {moments} moments were too early for the run to end");
    assert!(full > moments / 2, "{full}");
}

#[test]
fn a_forecast_counts_the_files_of_the_target() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    let args = small::run_args("ds");
    let plan = || {
        let args: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
        let plan = extractor(dir, &[&["plan", "--json"], &args[..]].concat()).expect_code(0);
        serde_json::from_str::<serde_json::Value>(&plan.stdout).unwrap()
    };
    let forecast = plan()["target_bytes"].as_u64().unwrap();
    small::run(dir, "ds").expect_code(0);
    let files = fs::read_dir(dir.join("ds/target")).unwrap();
    let written: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(forecast, written);
    assert_eq!(plan()["target_bytes"], 0);
}

#[test]
fn a_full_disk_is_named_with_operation_and_path() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 40);
    let Some(_disk) = Tmpfs::mount(&dir.join("disk"), 16 << 10) else { return };
    let mut start = command("extractor", dir, &small::run_args("disk/ds"));
    start.env("RUST_LOG", "info,aerie::shapes=trace");
    let mut child = Watched::start(start).unwrap();
    assert!(child.wait_for("stage=\"captured\""));
    fill(&dir.join("disk/ballast"));
    let (code, log) = child.finish();
    assert_eq!(code, 74, "{log}");
    let error = log.lines().find(|line| line.contains("ERROR")).unwrap();
    assert!(error.contains("disk/ds/") && error.contains("No space left"), "{error}");
    assert!(error.contains("make room and start again"), "{error}");
    fs::remove_file(dir.join("disk/ballast")).unwrap();
    complete(dir, "disk/ds");
}

#[test]
fn too_little_space_is_refused_before_the_model_is_loaded() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    let Some(disk) = Tmpfs::mount(&dir.join("disk"), 1 << 10) else { return };
    let mut start = command("extractor", dir, &small::run_args("disk/ds"));
    start.env("RUST_LOG", "info,aerie::shapes=trace");
    let (code, log) = Watched::start(start).unwrap().finish();
    assert_eq!(code, 74, "{log}");
    assert!(log.contains("bytes are needed") && log.contains("are free"), "{log}");
    assert!(!log.contains("stage="), "a batch was run: {log}");
    assert_eq!(fs::read_dir(dir.join("disk/ds/shards")).unwrap().count(), 0);
    disk.remount("size=16m");
    complete(dir, "disk/ds");
}

#[test]
fn a_read_only_disk_is_named_and_its_data_set_can_still_be_read() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    let Some(disk) = Tmpfs::mount(&dir.join("disk"), 16 << 10) else { return };
    extractor(dir, &small::run_args_with("disk/ds", &["--limit", "5"])).expect_code(0);
    disk.remount("ro");
    let refused = small::run(dir, "disk/ds").expect_code(74);
    assert!(refused.stderr.contains("disk/ds"), "{refused:?}");
    assert!(refused.stderr.contains("Read-only file system"), "{refused:?}");
    small::assert_clean(dir, "disk/ds");
    disk.remount("rw");
    complete(dir, "disk/ds");
}

/// Reading a finished data set takes no room. The log of a killed run does, in which case the audit
/// says of what.
#[test]
fn a_full_disk_is_audited_or_the_file_that_lacks_room_is_named() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 40);
    let Some(_disk) = Tmpfs::mount(&dir.join("disk"), 16 << 10) else { return };
    let (ballast, log) = (dir.join("disk/ballast"), dir.join("disk/ds/manifest.sqlite-wal"));
    let mut start = command("extractor", dir, &small::run_args("disk/ds"));
    start.env("RUST_LOG", "info,aerie::shapes=trace");
    let mut child = Watched::start(start).unwrap();
    assert!(child.wait_for("stage=\"written\""));
    child.kill();
    assert!(fs::metadata(&log).unwrap().len() > 0);
    // Lost with a copy of the other two.
    fs::remove_file(dir.join("disk/ds/manifest.sqlite-shm")).unwrap();
    fill(&ballast);
    let refused = extractor(dir, &["audit", "disk/ds"]).expect_code(74);
    assert!(refused.stderr.contains("manifest.sqlite-shm"), "{refused:?}");
    fs::remove_file(&ballast).unwrap();
    complete(dir, "disk/ds");
    // What readers leave; a run that was the last to close the data set leaves neither.
    assert_eq!(fs::metadata(&log).unwrap().len(), 0);
    for suffix in ["wal", "shm"] {
        fs::remove_file(dir.join(format!("disk/ds/manifest.sqlite-{suffix}"))).unwrap();
    }
    fill(&ballast);
    small::assert_clean(dir, "disk/ds");
    extractor(dir, &["query", "disk/ds", "samples"]).expect_code(0);
}

/// The kernel's limit on the size of one file, in units of 512 bytes, as an error and no signal.
fn with_file_limit(dir: &Path, blocks: u64) -> Finished {
    extractor_within(&format!("trap '' XFSZ; ulimit -f {blocks}"), dir, &small::run_args("ds"))
}

#[test]
fn a_file_that_may_not_grow_is_an_error_with_its_path() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    // The database's log, a shard, the target's head.
    for blocks in [0, 8, 64, 300, 700, 3000] {
        let refused = with_file_limit(dir, blocks).expect_code(74);
        assert!(refused.stderr.contains("ERROR"), "{refused:?}");
        check_survivors(dir, "ds", &format!("{blocks} blocks"));
    }
    // With the target's files in place, the limit is met by the shards.
    small::run(dir, "straight").expect_code(0);
    fs::create_dir_all(dir.join("ds/target")).unwrap();
    for entry in fs::read_dir(dir.join("straight/target")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.join("ds/target").join(entry.file_name())).unwrap();
    }
    for blocks in [300, 700] {
        let refused = with_file_limit(dir, blocks).expect_code(74);
        assert!(refused.stderr.contains("ds/shards/.shard-"), "{refused:?}");
        assert!(refused.stderr.contains("File too large"), "{refused:?}");
    }
    complete(dir, "ds");
}

#[test]
fn a_directory_that_goes_away_during_the_run_is_not_quietly_made_again() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 120);
    let mut start = command("extractor", dir, &small::run_args("ds"));
    start.env("RUST_LOG", "info,aerie::shapes=trace");
    let mut child = Watched::start(start).unwrap();
    assert!(child.wait_for("stage=\"captured\""));
    fs::rename(dir.join("ds"), dir.join("moved")).unwrap();
    let (code, log) = child.finish();
    assert_eq!(code, 74, "{log}");
    assert!(log.contains("ds/shards"), "{log}");
    assert!(!dir.join("ds").exists(), "a new directory was made");
    check_survivors(dir, "moved", "moved away");
    fs::rename(dir.join("moved"), dir.join("ds")).unwrap();
    complete(dir, "ds");
}
