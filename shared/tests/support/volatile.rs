//! A disk that loses power: what was not synced may be gone, cut short or under its old name, as
//! after a power failure on a file system that promises no more than POSIX.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use shared::files::{Files, ProductFile, RealFiles};

/// A change of a directory that is not on stable storage yet.
#[derive(Clone, Debug)]
enum Entry {
    Created(PathBuf),
    Renamed(PathBuf, PathBuf),
}

#[derive(Debug, Default)]
struct State {
    done: usize,
    /// No operation succeeds from this one on; 0 for never.
    off_at: usize,
    /// Bytes of each written file that are on stable storage.
    synced: BTreeMap<PathBuf, u64>,
    /// Oldest first.
    entries: Vec<Entry>,
}

/// Which promise the disk breaks even without a power failure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lies {
    Nothing,
    /// Syncing a file does nothing.
    AboutFiles,
    /// Syncing a directory does nothing.
    AboutDirectories,
}

/// The real file system, with a memory of what is on stable storage.
#[derive(Clone, Debug)]
pub struct VolatileFiles(Arc<Mutex<State>>, Lies);

impl VolatileFiles {
    /// The power goes off at operation `off_at`, counted from 1.
    pub fn new(off_at: usize, lies: Lies) -> Self {
        Self(Arc::new(Mutex::new(State { off_at, ..State::default() })), lies)
    }

    /// Operations so far.
    pub fn operations(&self) -> usize {
        self.0.lock().unwrap().done
    }

    /// Applies the loss: every change that was not synced is kept, lost or done by half.
    pub fn lose(&self, mut random: impl FnMut(u64) -> u64) {
        let state = std::mem::take(&mut *self.0.lock().unwrap());
        for (path, synced) in &state.synced {
            let Ok(length) = fs::metadata(path).map(|it| it.len()) else { continue };
            if length > *synced {
                let kept = synced + random(length - synced + 1);
                OpenOptions::new().write(true).open(path).unwrap().set_len(kept).unwrap();
            }
        }
        // From the newest back, so that an undone rename finds its file.
        for entry in state.entries.iter().rev().filter(|_| random(2) == 0) {
            match entry {
                Entry::Created(path) => drop(fs::remove_file(path)),
                Entry::Renamed(from, to) => drop(fs::rename(to, from)),
            }
        }
    }

    fn step(&self) -> io::Result<std::sync::MutexGuard<'_, State>> {
        let mut state = self.0.lock().unwrap();
        state.done += 1;
        match state.off_at != 0 && state.done >= state.off_at {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(state),
        }
    }
}

struct VolatileFile {
    file: File,
    path: PathBuf,
    files: VolatileFiles,
}

impl Write for VolatileFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        drop(self.files.step()?);
        self.file.write(&buffer[..buffer.len().min(900)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ProductFile for VolatileFile {
    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.files.step()?;
        if self.files.1 != Lies::AboutFiles {
            state.synced.insert(self.path.clone(), self.file.metadata()?.len());
        }
        Ok(())
    }
}

impl Files for VolatileFiles {
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>> {
        let mut state = self.step()?;
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        state.synced.insert(path.to_owned(), 0);
        state.entries.push(Entry::Created(path.to_owned()));
        Ok(Box::new(VolatileFile { file, path: path.to_owned(), files: self.clone() }))
    }
    fn open_read(&self, path: &Path) -> io::Result<File> {
        drop(self.step()?);
        RealFiles.open_read(path)
    }
    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.step()?;
        RealFiles.publish(from, to)?;
        if let Some(synced) = state.synced.remove(from) {
            state.synced.insert(to.to_owned(), synced);
        }
        state.entries.push(Entry::Renamed(from.to_owned(), to.to_owned()));
        Ok(())
    }
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        // Replaced are only small files that are written again when they are missing.
        drop(self.step()?);
        RealFiles.replace(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.step()?;
        if self.1 != Lies::AboutDirectories {
            state.entries.retain(|entry| match entry {
                Entry::Created(at) | Entry::Renamed(_, at) => at.parent() != Some(path),
            });
        }
        Ok(())
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        drop(self.step()?);
        RealFiles.create_dir(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.step()?;
        state.synced.remove(path);
        RealFiles.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        drop(self.step()?);
        RealFiles.remove_dir(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        drop(self.step()?);
        RealFiles.list(path)
    }
}
