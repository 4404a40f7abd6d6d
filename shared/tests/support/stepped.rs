//! Disk operations that a test can count, fail or die in.
#![allow(dead_code, unreachable_pub)]

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use shared::files::{Files, ProductFile, RealFiles};

type Step = dyn Fn(&'static str) -> io::Result<()> + Send + Sync;

/// The real file system; asks before each operation, by its name.
#[derive(Clone)]
pub struct SteppedFiles(Arc<Step>);

impl SteppedFiles {
    pub fn new(step: impl Fn(&'static str) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(step))
    }

    fn step(&self, name: &'static str) -> io::Result<()> {
        (self.0)(name)
    }
}

impl fmt::Debug for SteppedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SteppedFiles")
    }
}

struct SteppedFile(Box<dyn ProductFile>, SteppedFiles);

impl Write for SteppedFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.1.step("write")?;
        // Short writes are no errors.
        self.0.write(&buffer[..buffer.len().min(700)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl ProductFile for SteppedFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.step("sync")?;
        self.0.sync()
    }
}

impl Files for SteppedFiles {
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>> {
        self.step("create_new")?;
        Ok(Box::new(SteppedFile(RealFiles.create_new(path)?, self.clone())))
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
}
