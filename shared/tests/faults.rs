//! Every disk operation fails in turn, once and for ever: nothing committed is lost, nothing half
//! done is visible, and the next run completes the data set.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shared::files::{Files, ProductFile, RealFiles};
use shared::*;
use support::*;

/// Counts operations and fails the k-th, or it and all after it.
#[derive(Clone, Debug)]
struct FailingFiles {
    done: Arc<AtomicUsize>,
    fail_at: usize,
    for_ever: bool,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl FailingFiles {
    fn new(fail_at: usize, for_ever: bool) -> Self {
        Self { done: Arc::default(), fail_at, for_ever, log: Arc::default() }
    }

    fn step(&self, name: &'static str) -> io::Result<()> {
        self.log.lock().unwrap().push(name);
        let step = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        match step == self.fail_at || (self.for_ever && step > self.fail_at) {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        }
    }
}

struct FailingFile(Box<dyn ProductFile>, FailingFiles);

impl Write for FailingFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.1.step("write")?;
        // Short writes are no errors.
        self.0.write(&buffer[..buffer.len().min(700)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl ProductFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.step("sync")?;
        self.0.sync()
    }
}

impl Files for FailingFiles {
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>> {
        self.step("create_new")?;
        Ok(Box::new(FailingFile(RealFiles.create_new(path)?, self.clone())))
    }
    fn open_read(&self, path: &Path) -> io::Result<File> {
        self.step("open_read")?;
        RealFiles.open_read(path)
    }
    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step("publish")?;
        RealFiles.publish(from, to)
    }
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step("replace")?;
        RealFiles.replace(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step("sync_dir")?;
        RealFiles.sync_dir(path)
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step("create_dir")?;
        RealFiles.create_dir(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step("remove_file")?;
        RealFiles.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.step("remove_dir")?;
        RealFiles.remove_dir(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.step("list")?;
        RealFiles.list(path)
    }
    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        self.step("free_bytes")?;
        RealFiles.free_bytes(path)
    }
}

/// What a run does: commits the samples that are missing, two to a shard.
fn run(dir: &DatasetDir, samples: &[CapturedSample]) -> Result<(), Box<dyn std::error::Error>> {
    let spec = spec(StateDtype::Bf16);
    let manifest = Manifest::open_for_write_in(dir, &fingerprint(), &spec)?;
    manifest.register_input("prompts.jsonl", samples.len() as u64, 9, &Digest::of(b"i"))?;
    let done = manifest.committed_samples()?;
    let sources = committed(samples, 1);
    let missing: Vec<usize> =
        (0..samples.len()).filter(|&i| !done.contains(&samples[i].sample().id())).collect();
    for pair in missing.chunks(2) {
        let digest = manifest.fingerprint().digest();
        let mut writer = ShardWriter::create(dir, manifest.next_shard_id()?, &spec, &digest)?;
        for &index in pair {
            writer.push(&samples[index])?;
        }
        let records: Vec<SourceRecord> = pair.iter().map(|&i| sources[i].clone()).collect();
        manifest.commit_shard(&writer.seal()?, &records)?;
    }
    Ok(())
}

fn exit_code(error: &(dyn std::error::Error + 'static)) -> u8 {
    let manifest = error.downcast_ref::<ManifestError>().map(ManifestError::exit_code);
    manifest.or(error.downcast_ref::<ShardError>().map(ShardError::exit_code)).unwrap()
}

/// Fails operation 1, 2, 3 ... of a run until one passes untouched; returns their number.
fn fail_each(for_ever: bool) -> usize {
    let spec = spec(StateDtype::Bf16);
    let samples = samples(&spec, 5);
    for fail_at in 1.. {
        let home = tempdir();
        let root = home.path().join("data");
        let files = FailingFiles::new(fail_at, for_ever);
        let done = files.done.clone();
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
    assert!(fail_each(false) >= 15);
}

#[test]
fn each_operation_fails_for_ever() {
    assert!(fail_each(true) >= 15);
}

/// Nothing may be named before it is on stable storage, nor be counted on before its name is.
#[test]
fn a_shard_is_synced_then_named_then_its_directory_synced() {
    let dir = tempdir();
    fs::create_dir(dir.path().join("shards")).unwrap();
    let files = FailingFiles::new(usize::MAX, false);
    let home = DatasetDir::with_files(dir.path(), Arc::new(files.clone()));
    let spec = spec(StateDtype::Bf16);
    let mut writer = ShardWriter::create(&home, ShardId(0), &spec, &Digest([0; 32])).unwrap();
    writer.push(&captured(&spec, 3, 1)).unwrap();
    writer.seal().unwrap();
    let mut log = files.log.lock().unwrap().clone();
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
