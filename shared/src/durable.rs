//! Files and directories that are whole and on stable storage before their name exists, and the
//! layout of a data set's directory. Knows no formats.

use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::digest::{Digest, HashingWriter};
use crate::files::{Files, ProductFile, RealFiles};

/// A disk operation that did not succeed: which one, on which path.
#[derive(Debug, Error)]
#[error("{operation} {}{}", path.display(), hint(source))]
pub struct DurableError {
    /// What was being done.
    pub operation: &'static str,
    /// On which path.
    pub path: PathBuf,
    /// What the system said.
    #[source]
    pub source: io::Error,
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (make room and start again: what is committed is kept)"
        }
        _ => "",
    }
}

impl DurableError {
    /// 74: input or output.
    pub fn exit_code(&self) -> u8 {
        74
    }
}

/// Attaches operation and path to the system's error.
pub(crate) fn at<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> DurableError + 'a {
    move |source| DurableError { operation, path: path.to_path_buf(), source }
}

/// Reads a text of at most `most` bytes; the rest of a longer one is left out. Anything but a
/// regular file is refused, for opening a FIFO would wait for its writer.
pub(crate) fn read_small(path: &Path, most: u64) -> io::Result<String> {
    if !std::fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(most).read_to_string(&mut text)?;
    Ok(text)
}

/// The directory of a data set.
#[derive(Clone, Debug)]
pub struct DatasetDir {
    root: PathBuf,
    files: Arc<dyn Files>,
}

impl DatasetDir {
    /// Names the directory on the real file system; touches nothing.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_files(root, Arc::new(RealFiles))
    }

    /// Names the directory; all products go through `files`.
    pub fn with_files(root: impl Into<PathBuf>, files: Arc<dyn Files>) -> Self {
        Self { root: root.into(), files }
    }

    /// Creates the directory with `shards/` and `target/` in it, durably.
    pub fn create(&self) -> Result<(), DurableError> {
        for dir in [self.shards(), self.target()] {
            self.files.create_dir(&dir).map_err(at("creating directory", &dir))?;
        }
        let parent = self.root.parent().filter(|parent| !parent.as_os_str().is_empty());
        for dir in [Some(self.root.as_path()), parent].into_iter().flatten() {
            self.files.sync_dir(dir).map_err(at("syncing directory", dir))?;
        }
        Ok(())
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Sealed shards.
    pub fn shards(&self) -> PathBuf {
        self.root.join("shards")
    }

    /// What the trainer needs of the target model.
    pub fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// The SQLite database.
    pub fn manifest(&self) -> PathBuf {
        self.root.join("manifest.sqlite")
    }

    /// A copy of the settings, for the day the database is lost.
    pub fn settings(&self) -> PathBuf {
        self.root.join("settings.json")
    }

    /// The number after the last committed shard, for the day the database is an old one.
    pub fn committed(&self) -> PathBuf {
        self.root.join("COMMITTED")
    }

    /// Shards that are not trusted any more.
    pub fn quarantine(&self) -> PathBuf {
        self.root.join("quarantine")
    }

    /// Held by the one writer; not the database, whose POSIX locks a second open would drop.
    pub fn lock(&self) -> PathBuf {
        self.root.join("LOCK")
    }

    /// The operations by which products are written.
    pub fn files(&self) -> &Arc<dyn Files> {
        &self.files
    }
}

/// A file that is written under a temporary name and appears whole, or not at all.
pub struct DurableFile<'a> {
    files: &'a dyn Files,
    temporary: PathBuf,
    target: PathBuf,
    writer: Option<HashingWriter<BufWriter<Box<dyn ProductFile>>>>,
}

impl<'a> DurableFile<'a> {
    /// Starts a file that will be called `target`; until then it is `.NAME.PID.tmp` beside it.
    pub fn create(files: &'a dyn Files, target: &Path) -> Result<Self, DurableError> {
        let temporary = temporary_name(target);
        let file = files.create_new(&temporary).map_err(at("creating", &temporary))?;
        let writer = Some(HashingWriter::new(BufWriter::with_capacity(1 << 20, file)));
        Ok(Self { files, temporary, target: target.to_path_buf(), writer })
    }

    /// Appends bytes.
    pub fn write_all(&mut self, bytes: &[u8]) -> Result<(), DurableError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        writer.write_all(bytes).map_err(at("writing", &self.temporary))
    }

    /// Syncs, publishes under the final name without replacing, and syncs the directory.
    pub fn publish(self) -> Result<(Digest, u64), DurableError> {
        self.finish(false)
    }

    /// Like [`Self::publish`], but an older file of that name is replaced.
    pub fn replace(self) -> Result<(Digest, u64), DurableError> {
        self.finish(true)
    }

    fn finish(mut self, replace: bool) -> Result<(Digest, u64), DurableError> {
        let Some(mut writer) = self.writer.take() else { return Ok((Digest::of(&[]), 0)) };
        let outcome = writer
            .flush()
            .map_err(at("writing", &self.temporary))
            .map(|()| writer.finish())
            .and_then(|(buffered, digest, bytes)| {
                let (mut file, _) = buffered.into_parts();
                file.sync().map_err(at("syncing", &self.temporary))?;
                Ok((digest, bytes))
            });
        let named = outcome.and_then(|digest| {
            let renamed = match replace {
                true => self.files.replace(&self.temporary, &self.target),
                false => self.files.publish(&self.temporary, &self.target),
            };
            renamed.map_err(at("publishing", &self.target)).map(|()| digest)
        });
        if named.is_err() {
            // The first error is the one to report.
            let _ = self.files.remove_file(&self.temporary);
        }
        let digest = named?;
        let parent = parent_of(&self.target);
        self.files.sync_dir(parent).map_err(at("syncing directory", parent))?;
        Ok(digest)
    }
}

impl Drop for DurableFile<'_> {
    fn drop(&mut self) {
        if self.writer.take().is_some() {
            let _ = self.files.remove_file(&self.temporary);
        }
    }
}

fn temporary_name(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// Whether a file of this name is one that [`DurableFile`] has not finished.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".tmp")
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes a file atomically and durably; an older one of that name is replaced.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), DurableError> {
    write_file_with(&RealFiles, path, bytes)
}

/// [`write_file`] through given operations.
pub fn write_file_with(files: &dyn Files, path: &Path, bytes: &[u8]) -> Result<(), DurableError> {
    let mut file = DurableFile::create(files, path)?;
    file.write_all(bytes)?;
    file.replace().map(|_| ())
}

/// Publishes a finished directory (its files already durable, as [`write_file`] leaves them) under
/// its final name, which must not exist.
pub fn publish_dir(temporary: &Path, target: &Path) -> Result<(), DurableError> {
    publish_dir_with(&RealFiles, temporary, target)
}

/// [`publish_dir`] through given operations.
pub fn publish_dir_with(
    files: &dyn Files,
    temporary: &Path,
    target: &Path,
) -> Result<(), DurableError> {
    files.sync_dir(temporary).map_err(at("syncing directory", temporary))?;
    files.publish(temporary, target).map_err(at("publishing", target))?;
    let parent = parent_of(target);
    files.sync_dir(parent).map_err(at("syncing directory", parent))
}
