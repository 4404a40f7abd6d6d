//! Weights of a checkpoint on disk: safetensors files, mapped into memory, read tensor by tensor
//! and slice by slice into f32. Knows names, shapes and number formats, but no model.
//!
//! Names are logical: those of a text-only checkpoint (`model.layers.0...`, `lm_head`), also where
//! the files say `language_model.model.layers.0...` or `language_model.layers.0...`.

mod error;
mod format;
mod header;
mod index;
mod mapped;
mod packed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use error::WeightsError;
pub use format::WeightFormat;
use header::{Dtype, Entry};
pub use header::{MAX_HEADER_BYTES, MAX_TENSORS};
pub use kernels::dequant::Region as Slice;
use mapped::MappedFile;
pub use packed::{PackedFormat, PackedWeight};

/// An open checkpoint. Several threads may read from it at once.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<WeightFile>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
struct WeightFile {
    mapped: MappedFile,
    header_end: usize,
}

/// A tensor under its logical name.
#[derive(Debug)]
struct Tensor {
    file: usize,
    entry: Entry,
}

impl Checkpoint {
    /// Opens the files that the index of `dir` names, or all its safetensors files if it has no
    /// index, and checks every header. Reads no weights yet.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let listing = index::list(dir)?;
        let mut checkpoint =
            Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        for name in &listing.files {
            let mapped = MappedFile::open(&dir.join(name))?;
            let header = header::read(&mapped)?;
            listing.check(name, header.tensors.keys())?;
            checkpoint.files.push(WeightFile { mapped, header_end: header.end });
            checkpoint.add(header.tensors)?;
        }
        Ok(checkpoint)
    }

    /// Adds the tensors of the last file.
    fn add(&mut self, stored: BTreeMap<String, Entry>) -> Result<(), WeightsError> {
        let file = self.files.len() - 1;
        for (name, entry) in stored {
            let name = logical_name(name);
            if let Some(first) = self.tensors.get(&name) {
                let first = self.file_of(first).mapped.name();
                let second = self.files.last().map_or_else(String::new, |f| f.mapped.name());
                return Err(WeightsError::Duplicate { name, first, second });
            }
            self.tensors.insert(name, Tensor { file, entry });
        }
        Ok(())
    }

    /// Files that the checkpoint is read from, by name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.mapped.path())
    }

    /// Logical names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name (with or without `.weight`) or a linear layer in
    /// any of the known formats.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some() || self.format(name).is_some()
    }

    /// How the weight of the linear layer `name` (without `.weight`) is stored, decided by the
    /// parts present and their number formats; `None` if it is not there or in no known format.
    pub fn format(&self, name: &str) -> Option<WeightFormat> {
        format::detect(self, name)
    }

    /// Values of a slice of the weight of the linear layer `name` (without `.weight`), row-major,
    /// decoded to f32. `shape` is that of the whole weight, [out, in]; only the bytes of the
    /// slice's rows are read.
    pub fn linear(
        &self,
        name: &str,
        shape: [usize; 2],
        slice: &Slice,
    ) -> Result<Vec<f32>, WeightsError> {
        require_inside(name, shape, slice)?;
        format::decode(self, name, shape, slice)
    }

    /// Values of an unquantised tensor of the given shape, row-major; `name` with or without
    /// `.weight`.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, WeightsError> {
        let part = self.part(name, shape)?;
        let mut out = vec![0.0; shape.iter().product()];
        part.widen(&mut out, 0)?;
        Ok(out)
    }

    /// Values of some rows of an unquantised tensor of shape [rows, columns], row-major; `name`
    /// with or without `.weight`.
    pub fn rows(
        &self,
        name: &str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Vec<f32>, WeightsError> {
        let slice = Slice { rows, cols: 0..shape[1] };
        self.linear(name.strip_suffix(".weight").unwrap_or(name), shape, &slice)
    }

    /// Identifies the weights: BLAKE3 over every file in order of name, of each its name, its
    /// length, its header, and 16 pieces of 64 KiB at even distances from the start to the end of
    /// the data (all data if that is less). A change of single weights between the pieces goes
    /// unnoticed; another model, another quantisation or another revision does not.
    pub fn digest(&self) -> Result<[u8; 32], WeightsError> {
        const PIECES: usize = 16;
        const PIECE: usize = 64 << 10;
        let mut hasher = blake3::Hasher::new();
        for WeightFile { mapped, header_end } in &self.files {
            let (name, len) = (mapped.name(), mapped.len());
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(&(len as u64).to_le_bytes());
            hasher.update(mapped.bytes(0..*header_end)?);
            if len - header_end <= PIECES * PIECE {
                hasher.update(mapped.bytes(*header_end..len)?);
                continue;
            }
            let span = len - header_end - PIECE;
            for piece in 0..PIECES {
                // In u128, because a span of terabytes times 15 is close to the end of u64.
                let offset = (span as u128 * piece as u128 / (PIECES as u128 - 1)) as usize;
                let start = header_end + offset;
                hasher.update(mapped.bytes(start..start + PIECE)?);
            }
        }
        Ok(*hasher.finalize().as_bytes())
    }

    fn find(&self, name: &str) -> Option<(String, &Tensor)> {
        if let Some(tensor) = self.tensors.get(name) {
            return Some((name.to_owned(), tensor));
        }
        let name = format!("{name}.weight");
        self.tensors.get(&name).map(|tensor| (name, tensor))
    }

    /// A tensor whose shape is as expected.
    fn part(&self, name: &str, shape: &[usize]) -> Result<Part<'_>, WeightsError> {
        let (name, tensor) = self.find(name).ok_or_else(|| self.missing(name))?;
        if tensor.entry.shape != shape {
            let (expected, found) = (shape.to_vec(), tensor.entry.shape.clone());
            return Err(WeightsError::WrongShape { name, expected, found });
        }
        let bytes = self.file_of(tensor).mapped.bytes(tensor.entry.bytes.clone())?;
        Ok(Part { name, dtype: &tensor.entry.dtype, bytes })
    }

    fn file_of(&self, tensor: &Tensor) -> &WeightFile {
        &self.files[tensor.file]
    }

    fn missing(&self, name: &str) -> WeightsError {
        WeightsError::MissingTensor {
            dir: self.dir.clone(),
            name: name.to_owned(),
            closest: closest(name, self.tensors.keys()),
        }
    }
}

/// A stored tensor, whole.
struct Part<'a> {
    name: String,
    dtype: &'a Dtype,
    bytes: &'a [u8],
}

impl<'a> Part<'a> {
    fn wrong_dtype(&self, expected: &'static str) -> WeightsError {
        let (name, found) = (self.name.clone(), self.dtype.to_string());
        WeightsError::WrongDtype { name, expected, found }
    }

    /// The bytes, if the number format is the expected one.
    fn of(&self, dtype: Dtype, expected: &'static str) -> Result<&'a [u8], WeightsError> {
        if *self.dtype == dtype { Ok(self.bytes) } else { Err(self.wrong_dtype(expected)) }
    }

    /// Widens the elements from number `first` on to f32, as many as `out` holds.
    fn widen(&self, out: &mut [f32], first: usize) -> Result<(), WeightsError> {
        match self.dtype {
            Dtype::F32 => convert(out, self.bytes, first, f32::from_le_bytes),
            Dtype::Bf16 => convert(out, self.bytes, first, |bytes| {
                f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
            }),
            Dtype::F16 => {
                convert(out, self.bytes, first, |bytes| half::f16::from_le_bytes(bytes).to_f32());
            }
            _ => return Err(self.wrong_dtype("BF16, F16 or F32")),
        }
        Ok(())
    }
}

fn convert<const N: usize>(
    out: &mut [f32],
    bytes: &[u8],
    first: usize,
    value: impl Fn([u8; N]) -> f32,
) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, &element) in out.iter_mut().zip(elements.iter().skip(first)) {
        *out = value(element);
    }
}

/// Refuses a slice that reaches beyond the matrix `name` of `shape`.
fn require_inside(name: &str, shape: [usize; 2], slice: &Slice) -> Result<(), WeightsError> {
    let inside = |range: &Range<usize>, size| range.start <= range.end && range.end <= size;
    if inside(&slice.rows, shape[0]) && inside(&slice.cols, shape[1]) {
        return Ok(());
    }
    let (name, rows, cols) = (name.to_owned(), slice.rows.clone(), slice.cols.clone());
    Err(WeightsError::SliceOutside { name, rows, cols, shape })
}

/// The name without the prefixes that multimodal checkpoints put before the language model.
fn logical_name(stored: String) -> String {
    match stored.strip_prefix("language_model.") {
        Some(rest) if rest.starts_with("model.") || rest.starts_with("lm_head.") => rest.to_owned(),
        Some(rest) => format!("model.{rest}"),
        None => stored,
    }
}

/// The name that shares most of its start and end with `name`, if little is left between; how a
/// weight is stored does not count.
fn closest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> Option<String> {
    const MAX_DIFFERENCE: usize = 8;
    let shared = |a: &mut dyn Iterator<Item = u8>, b: &mut dyn Iterator<Item = u8>| {
        a.zip(b).take_while(|(a, b)| a == b).count()
    };
    let name = layer_of(name);
    let difference = |other: &str| {
        let other = layer_of(other);
        let prefix = shared(&mut name.bytes(), &mut other.bytes());
        let suffix = shared(&mut name.bytes().rev(), &mut other.bytes().rev());
        let shorter = name.len().min(other.len());
        name.len().max(other.len()) - (prefix + suffix).min(shorter)
    };
    let (difference, closest) =
        names.map(|other| (difference(other), other)).min_by_key(|(difference, _)| *difference)?;
    (difference <= MAX_DIFFERENCE && difference < name.len()).then(|| closest.clone())
}

/// The name without the part of a weight.
fn layer_of(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((layer, part)) if part.starts_with("weight") => layer,
        _ => name,
    }
}
