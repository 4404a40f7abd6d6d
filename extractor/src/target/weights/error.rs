//! What can be wrong with a checkpoint. Knows nothing of models.

use std::io;
use std::path::PathBuf;

/// Why weights cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The operating system refused.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The directory holds neither an index nor a safetensors file.
    #[error(
        "{} holds no model.safetensors.index.json and no *.safetensors file; name the directory \
         of a downloaded model",
        dir.display()
    )]
    NoFiles {
        /// The directory.
        dir: PathBuf,
    },
    /// The index is not a JSON object with a `weight_map` from names to files.
    #[error("{}: not an index of weights; download the file again", path.display())]
    IndexSyntax {
        /// The index.
        path: PathBuf,
        /// What the parser met.
        source: serde_json::Error,
    },
    /// A bias or norm that config.json says nothing of.
    #[error(
        "{name} is in the checkpoint, but by config.json the model has no such parameter: take \
         weights and configuration from one place, or another model (this one is not supported)"
    )]
    Unread {
        /// The parameter.
        name: String,
    },
    /// The index is larger than any real one.
    #[error("{}: {bytes} bytes of index, at most {limit} are read", path.display())]
    IndexTooLarge {
        /// The index.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest accepted.
        limit: u64,
    },
    /// The index names a file by a path, which could leave the directory.
    #[error(
        "{}: {entry:?} is not the bare name of a .safetensors file; entries must name files \
         beside the index",
        path.display()
    )]
    IndexPath {
        /// The index.
        path: PathBuf,
        /// The entry.
        entry: String,
    },
    /// The index names a file that is not there.
    #[error(
        "{}: the index names {file}, which is not in the directory; complete the download",
        path.display()
    )]
    IndexedFileMissing {
        /// The index.
        path: PathBuf,
        /// The file.
        file: String,
    },
    /// Index and files disagree on where a tensor is.
    #[error(
        "{}: tensor {tensor} {problem}; index and files are of different downloads",
        path.display()
    )]
    IndexMismatch {
        /// The index.
        path: PathBuf,
        /// Name in the file.
        tensor: String,
        /// In which way they disagree.
        problem: String,
    },
    /// The header claims a size that no real file has.
    #[error("{}: header of {bytes} bytes, at most {limit} are read", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// Size the file claims.
        bytes: u64,
        /// The largest accepted.
        limit: u64,
    },
    /// The header is not what the safetensors format asks for.
    #[error("{}: malformed header: {reason}; download the file again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file ends before its tensors do.
    #[error(
        "{}: {found} bytes, but its header describes {expected}; complete the download",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the header describes.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The file became shorter while it was in use.
    #[error(
        "{}: shrank from {expected} to {found} bytes while in use; do not change a model in use",
        path.display()
    )]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        found: u64,
    },
    /// Two stored names mean the same tensor.
    #[error("{name} is stored twice, in {first} and in {second}; remove one of the files")]
    Duplicate {
        /// Logical name.
        name: String,
        /// A file.
        first: String,
        /// Another file, or the same.
        second: String,
    },
    /// A tensor that the model needs is not in the checkpoint.
    #[error(
        "{} holds no tensor {name}{}",
        dir.display(),
        closest.as_ref().map(|name| format!(" (the closest name is {name})")).unwrap_or_default()
    )]
    MissingTensor {
        /// The directory.
        dir: PathBuf,
        /// Logical name.
        name: String,
        /// The most similar name there is.
        closest: Option<String>,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error(
        "{name} has shape {found:?}, expected {expected:?}; are config and weights of one model?"
    )]
    WrongShape {
        /// Logical name.
        name: String,
        /// Shape asked for.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor has a number format that cannot be read here.
    #[error("{name} is stored as {found}, expected {expected}")]
    WrongDtype {
        /// Logical name.
        name: String,
        /// Formats that would do.
        expected: &'static str,
        /// Format in the file.
        found: String,
    },
    /// A quantised tensor has parts that this reader does not apply.
    #[error("{name} changes the meaning of a quantised weight and is not supported")]
    Unsupported {
        /// Logical name of the part.
        name: String,
    },
    /// A slice reaches beyond the tensor.
    #[error("{name}: rows {rows:?} and columns {cols:?} are not all inside {shape:?}")]
    SliceOutside {
        /// Logical name.
        name: String,
        /// Rows asked for.
        rows: std::ops::Range<usize>,
        /// Columns asked for.
        cols: std::ops::Range<usize>,
        /// Shape of the tensor.
        shape: [usize; 2],
    },
}

impl WeightsError {
    /// Exit code of a command that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io { .. } | Self::Shrank { .. } => 74,
            Self::NoFiles { .. } => 78,
            Self::SliceOutside { .. } => 70,
            _ => 65,
        }
    }
}
