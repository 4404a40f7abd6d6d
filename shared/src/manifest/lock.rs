//! The lock of the one writer: held by the kernel, so a killed process leaves none behind.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use super::ManifestError;
use crate::durable::DatasetDir;
use crate::provenance;

/// Exclusive lock on `DATASET/LOCK`, released when dropped.
#[derive(Debug)]
pub(super) struct WriterLock {
    _file: File,
}

impl WriterLock {
    /// Takes the lock and writes our process and host into the file.
    pub(super) fn take(dir: &DatasetDir) -> Result<Self, ManifestError> {
        let path = dir.lock();
        let refused = |source| ManifestError::Lock { path: path.clone(), source };
        let mut file = open(&path).map_err(refused)?;
        let mut tries = 0;
        while let Err(error) = file.try_lock() {
            tries += 1;
            match error {
                TryLockError::Error(source) => return Err(refused(source)),
                TryLockError::WouldBlock if tries == 4 => return Err(held(dir, &mut file)),
                // An audit holds the lock for a moment to see whether somebody writes.
                TryLockError::WouldBlock => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        let holder = format!("{} {}\n", std::process::id(), provenance::host());
        file.set_len(0).map_err(refused)?;
        file.write_all(holder.as_bytes()).map_err(refused)?;
        Ok(Self { _file: file })
    }
}

/// Whether some process is writing the data set now.
pub(crate) fn is_held(dir: &DatasetDir) -> bool {
    let file = OpenOptions::new().read(true).open(dir.lock());
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

fn open(path: &Path) -> std::io::Result<File> {
    // Not truncated: until we hold the lock it names the holder.
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn held(dir: &DatasetDir, file: &mut File) -> ManifestError {
    let mut text = String::new();
    // What can't be read is shown as unknown: the lock itself is what matters.
    let _ = file.seek(SeekFrom::Start(0));
    let _ = file.take(512).read_to_string(&mut text);
    let mut words = text.split_whitespace().map(str::to_owned);
    let mut next = || words.next().unwrap_or_else(|| "unknown".to_owned());
    let (pid, host) = (next(), next());
    ManifestError::Locked { dir: dir.root().to_path_buf(), pid, host }
}
