//! A weight file mapped into memory; the unsafe code that this takes. Knows no format.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::WeightsError;

/// A read-only file in memory.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl MappedFile {
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let io_error = |operation| {
            move |source| WeightsError::Io { path: path.to_path_buf(), operation, source }
        };
        let file = File::open(path).map_err(io_error("open"))?;
        let bytes = file.metadata().map_err(io_error("measure"))?.len();
        if bytes == 0 {
            return Err(WeightsError::Truncated {
                path: path.to_path_buf(),
                expected: 8,
                found: 0,
            });
        }
        // SAFETY: the map is read-only and private to this type. Another process could still cut
        // the file short, and reading beyond its end would then raise SIGBUS: `bytes` compares
        // the size with that of the map before every access. Bytes overwritten meanwhile are
        // read as numbers of some value, which no code here relies on.
        let map = unsafe { Mmap::map(&file) }.map_err(io_error("map"))?;
        Ok(Self { path: path.to_path_buf(), file, map })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Name within the directory of the checkpoint.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// A piece of the file, which must lie inside it; checks that the file has not shrunk.
    pub(super) fn bytes(&self, range: Range<usize>) -> Result<&[u8], WeightsError> {
        let truncated = |expected: usize, found: u64| WeightsError::Truncated {
            path: self.path.clone(),
            expected: expected as u64,
            found,
        };
        let now = self.file.metadata().map_err(|source| WeightsError::Io {
            path: self.path.clone(),
            operation: "measure",
            source,
        })?;
        let expected = self.map.len() as u64;
        if now.len() < expected {
            return Err(WeightsError::Shrank {
                path: self.path.clone(),
                expected,
                found: now.len(),
            });
        }
        let end = range.end;
        self.map.get(range).ok_or_else(|| truncated(end, expected))
    }
}
