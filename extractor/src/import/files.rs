//! Which files are imported, and what stands in one: safetensors with `hidden_states` [S, n, H]
//! and `token_ids` [S], as vLLM's hidden-states connector and speculators write them. Knows no
//! model; pickles are never opened.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufReader, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use shared::CaptureSpec;
use shared::digest::Digest;
use shared::files::{Files, RealFiles};
use shared::foreign::TOKEN_NAMES;
use shared::header::{HeaderError, HeaderLimits, ShardHeader, TensorEntry};

use super::naming::{self, STATES};
use super::{ImportError, bad_states, reading, values};
use crate::capture::LayerRows;
use crate::reject::{Fault, RejectReason};

/// More tokens than any sample has: `data.max_tokens` ends here too.
const TOKENS_MAX: usize = 1 << 24;

const PICKLE: &str = "a pickle of torch runs code when it is opened, so it is not read: load it in \
     Python with torch.load(FILE, weights_only=True) and write `token_ids` [S], `loss_mask` [S] \
     and `hidden_states` [S, layers, H] with safetensors.torch.save_file. The last state must be \
     the one before the final norm; SpecForge's .ckpt holds the one after it, so extract again \
     instead";
const COMPRESSED: &str = "a compressed file is not read: unpack it first (zstd -d)";

/// The files named and those in folders named, each once; a folder's in order of name.
pub(super) fn list(from: &[PathBuf]) -> Result<Vec<PathBuf>, ImportError> {
    let mut files: Vec<PathBuf> = Vec::new();
    for path in from {
        if !fs::metadata(path).map_err(reading(path))?.is_dir() {
            refuse(path)?;
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        for name in RealFiles.list(path).map_err(reading(path))? {
            let file = path.join(name);
            refuse(&file)?;
            if file.extension().is_some_and(|it| it == "safetensors") {
                files.push(file);
            }
        }
        if files.len() == before {
            return Err(ImportError::Empty(path.clone()));
        }
    }
    let mut seen = std::collections::HashSet::new();
    files.retain(|file| seen.insert(file.clone()));
    Ok(files)
}

fn refuse(path: &Path) -> Result<(), ImportError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let is_pickle = |ending: &&str| name.trim_end_matches(".gz").ends_with(ending);
    let why = if [".pt", ".pth", ".ckpt", ".pkl", ".bin"].iter().any(is_pickle) {
        PICKLE
    } else if name.ends_with(".zst") {
        COMPRESSED
    } else {
        return Ok(());
    };
    Err(ImportError::Refused { path: path.to_path_buf(), why })
}

/// Why a file gives no sample.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The file is at fault.
    Fault(Fault),
    /// It has no loss mask, and there are no prompts.
    NoMasks,
    /// The disk is at fault.
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn bad_file(detail: impl Into<String>) -> Refusal {
    Refusal::Fault(Fault::new(RejectReason::BadFile, detail))
}

fn bad_tokens(detail: impl Into<String>) -> Refusal {
    Refusal::Fault(Fault::new(RejectReason::BadTokens, detail))
}

/// An open file.
pub(super) struct StatesFile {
    file: File,
    bytes: u64,
    /// Seconds and nanoseconds of its last change.
    modified: (i64, i64),
}

impl StatesFile {
    /// Opens a finished regular file. A link in a folder may lead anywhere, so none is followed.
    pub(super) fn open(path: &Path) -> Result<Self, Refusal> {
        if path.is_symlink() {
            return Err(bad_file("a link is not followed: name the file that it leads to"));
        }
        let file = RealFiles.open_read(path).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::NotFound => bad_file(error.to_string()),
            _ => Refusal::Io(error),
        })?;
        if is_being_written(path) {
            return Err(bad_file(
                "its writer holds the .lock beside it: import again when it has finished",
            ));
        }
        let (bytes, modified) = stamp(&file)?;
        Ok(Self { file, bytes, modified })
    }

    /// Refuses what was read if the file was changed meanwhile: its parts and its digest may be of
    /// different versions.
    pub(super) fn require_unchanged(&self) -> Result<(), Refusal> {
        match stamp(&self.file)? == (self.bytes, self.modified) {
            true => Ok(()),
            false => {
                Err(bad_file("it was changed while it was read: import again when it is done"))
            }
        }
    }

    /// BLAKE3 and bytes of the whole file.
    pub(super) fn digest(&self) -> io::Result<(Digest, u64)> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))?;
        Digest::of_reader(file)
    }

    /// Checks the header.
    pub(super) fn contents(&self) -> Result<Contents<'_>, Refusal> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))?;
        let header = ShardHeader::read(BufReader::new(file), self.bytes, &HeaderLimits::FOREIGN)
            .map_err(|error| match error {
                HeaderError::Io(error) => Refusal::Io(error),
                fault => bad_file(fault.to_string()),
            })?;
        if header.metadata.get("format").is_some_and(|format| format == "aerie") {
            return Err(bad_file("this is a shard of a data set already"));
        }
        Ok(Contents { file: &self.file, header })
    }
}

fn stamp(file: &File) -> io::Result<(u64, (i64, i64))> {
    let metadata = file.metadata()?;
    Ok((metadata.len(), (metadata.mtime(), metadata.mtime_nsec())))
}

/// vLLM locks `FILE.lock` while it writes FILE.
fn is_being_written(path: &Path) -> bool {
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let lock = RealFiles.open_read(Path::new(&lock));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// A file with a sound header.
pub(super) struct Contents<'a> {
    file: &'a File,
    header: ShardHeader,
}

impl Contents<'_> {
    /// Token ids, [tokens]: the same under each of their names that is there.
    pub(super) fn token_ids(&self, spec: &CaptureSpec) -> Result<Vec<u32>, Refusal> {
        let mut named = TOKEN_NAMES.iter().filter_map(|name| self.header.tensor(name));
        let Some(first) = named.next() else {
            let none = format!("none of the tensors {} is there", TOKEN_NAMES.join(", "));
            return Err(bad_tokens(match self.header.tensor(STATES) {
                Some(_) => none,
                None => {
                    format!("{none}, and {}", naming::in_place_of_states(&self.header, None, spec))
                }
            }));
        };
        let ids: Vec<u32> = self.integers(first, "a token id")?;
        for other in named {
            let others: Vec<u32> = self.integers(other, "a token id")?;
            if others != ids {
                let common = ids.iter().zip(&others).take_while(|(a, b)| a == b).count();
                return Err(bad_tokens(format!(
                    "{} and {} part at [{common}], and the states are of one of them: have only \
                     that one written",
                    first.name, other.name
                )));
            }
        }
        Ok(ids)
    }

    /// The loss mask, [tokens], if there is one.
    pub(super) fn loss_mask(&self, tokens: usize) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(tensor) = self.header.tensor("loss_mask") else { return Ok(None) };
        let mask: Vec<u8> = self.integers(tensor, "0 or 1")?;
        if mask.len() != tokens {
            let detail = format!("{tokens} token ids, but {} values in loss_mask", mask.len());
            return Err(bad_tokens(detail));
        }
        Ok(Some(mask))
    }

    /// The values of [tokens] integers of any width.
    fn integers<T: TryFrom<i64>>(
        &self,
        tensor: &TensorEntry,
        expected: &str,
    ) -> Result<Vec<T>, Refusal> {
        let (name, dtype, shape) = (&tensor.name, tensor.dtype, &tensor.shape);
        match shape.as_slice() {
            [tokens] if *tokens <= TOKENS_MAX => {}
            [tokens] => return Err(bad_tokens(format!("{name} has {tokens} values"))),
            _ => {
                let detail = format!("{name} has shape {shape:?}, [tokens] is expected");
                return Err(bad_tokens(detail));
            }
        }
        let widen: fn(&[u8]) -> Option<i64> = match dtype {
            Dtype::I64 => |bytes| bytes.try_into().ok().map(i64::from_le_bytes),
            Dtype::I32 => |bytes| bytes.try_into().ok().map(i32::from_le_bytes).map(i64::from),
            Dtype::U32 => |bytes| bytes.try_into().ok().map(u32::from_le_bytes).map(i64::from),
            Dtype::U8 | Dtype::BOOL => |bytes| bytes.first().copied().map(i64::from),
            _ => return Err(bad_tokens(format!("{name} is {dtype}, integers are expected"))),
        };
        let bytes = self.read(tensor.start, tensor.bytes as usize)?;
        let values = bytes.chunks_exact(dtype.bitsize() / 8).enumerate().map(|(at, bytes)| {
            let value = widen(bytes).unwrap_or(-1);
            let fault = || bad_tokens(format!("{name}[{at}] is {value}, {expected} is expected"));
            T::try_from(value).map_err(|_| fault())
        });
        values.collect()
    }

    /// The tensor with the states of so many tokens, [tokens, layers, hidden].
    pub(super) fn states_tensor(
        &self,
        tokens: usize,
        spec: &CaptureSpec,
    ) -> Result<&TensorEntry, Refusal> {
        let tensor = self.header.tensor(STATES).ok_or_else(|| {
            bad_states(naming::in_place_of_states(&self.header, Some(tokens), spec))
        })?;
        if !matches!(tensor.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(bad_states(format!(
                "hidden_states is {}; BF16, F16 or F32 is read: have them written in the type that \
                 the model computes in",
                tensor.dtype
            )));
        }
        match naming::shape_fault(tensor, tokens, spec) {
            None => Ok(tensor),
            Some(fault) => Err(bad_states(fault)),
        }
    }

    /// The first rows of [`Self::states_tensor`], those of the tokens `ids`: one [ids, hidden]
    /// tensor a layer of `spec`.
    pub(super) fn states(
        &self,
        tensor: &TensorEntry,
        ids: &[u32],
        spec: &CaptureSpec,
    ) -> Result<Vec<LayerRows>, Refusal> {
        let width = spec.layers.len() * spec.hidden_size * tensor.dtype.bitsize() / 8;
        let bytes = self.read(tensor.start, ids.len() * width)?;
        let layers = (0..spec.layers.len()).map(|layer| gather(&bytes, layer, tensor.dtype, spec));
        let layers: Vec<LayerRows> = layers.collect();
        match values::fault(&layers, ids, spec) {
            None => Ok(layers),
            Some(fault) => Err(bad_states(fault)),
        }
    }

    fn read(&self, start: u64, bytes: usize) -> Result<Vec<u8>, Refusal> {
        let mut buffer = vec![0; bytes];
        self.file.read_exact_at(&mut buffer, start)?;
        Ok(buffer)
    }
}

/// The rows of one of the layers that alternate in `bytes`.
fn gather(bytes: &[u8], layer: usize, dtype: Dtype, spec: &CaptureSpec) -> LayerRows {
    let width = spec.hidden_size * dtype.bitsize() / 8;
    let rows = bytes.chunks_exact(width.max(1)).skip(layer).step_by(spec.layers.len());
    let halves = rows.clone().flat_map(|row| row.as_chunks().0);
    match dtype {
        Dtype::BF16 => LayerRows::Bf16(halves.map(|&value| bf16::from_le_bytes(value)).collect()),
        Dtype::F16 => {
            LayerRows::F32(halves.map(|&value| f16::from_le_bytes(value).to_f32()).collect())
        }
        _ => {
            let values = rows.flat_map(|row| row.as_chunks().0);
            LayerRows::F32(values.map(|&value| f32::from_le_bytes(value)).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_that_is_changed_while_it_is_read_is_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"states").unwrap();
        let Ok(opened) = StatesFile::open(file.path()) else { panic!("not opened") };
        assert!(opened.require_unchanged().is_ok());
        file.write_all(b"!").unwrap();
        assert!(matches!(opened.require_unchanged(), Err(Refusal::Fault(_))));
    }
}
