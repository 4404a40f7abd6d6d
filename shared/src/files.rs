//! Every disk operation by which products come to be, behind a trait, so that tests can fail any
//! one of them. Knows no formats.

use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, OFlags, RenameFlags};
use rustix::io::Errno;

/// A file being written.
pub trait ProductFile: Write + Send {
    /// Puts all bytes on stable storage. Must never be retried after an error: the kernel may
    /// have dropped the dirty pages and would report success.
    fn sync(&mut self) -> io::Result<()>;
}

impl ProductFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The disk operations of shards, manifests' directories and checkpoints.
pub trait Files: Debug + Send + Sync {
    /// Creates a file that must not exist yet.
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>>;
    /// Opens a regular file for reading; symbolic links, devices and FIFOs are errors.
    fn open_read(&self, path: &Path) -> io::Result<File>;
    /// Renames; an existing `to` is an error (`AlreadyExists`).
    fn publish(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames, replacing a file at `to`.
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Puts a directory's entries on stable storage.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a directory and its parents; one that exists is fine.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory with everything in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Names in a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<OsString>>;
}

/// The real file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealFiles;

impl Files for RealFiles {
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>> {
        Ok(Box::new(OpenOptions::new().write(true).create_new(true).open(path)?))
    }

    fn open_read(&self, path: &Path) -> io::Result<File> {
        // NONBLOCK: opening a FIFO must not wait for its writer.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
        let file = OpenOptions::new().read(true).custom_flags(flags as i32).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(file)
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // Some file systems lack the flag; a hard link never replaces either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if !from.is_dir() => {
                rustix::fs::linkat(CWD, from, CWD, to, AtFlags::empty())?;
                fs::remove_file(from)
            }
            renamed => Ok(renamed?),
        }
    }

    #[allow(clippy::disallowed_methods)]
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let mut names = fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }
}
