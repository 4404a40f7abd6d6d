//! Shards: safetensors files of about 1 GiB that hold whole samples and never change once sealed.
//! The only place that knows tensor names. Knows no manifest.

mod layout;
mod reader;
mod writer;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub(crate) use layout::tensors_per_sample;
pub(crate) use reader::open_header;
pub use reader::{ShardReader, read_header};
pub use writer::ShardWriter;

use crate::contract::{ContractError, LayerIndex};
use crate::digest::Digest;
use crate::durable::DurableError;
use crate::header::HeaderError;
use crate::sample::{SampleError, SampleId};

/// Version of names, types and metadata in a shard.
pub const FORMAT_VERSION: u32 = 1;

/// Number of a shard in its data set, 0 to 999,999.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShardId(pub u32);

impl ShardId {
    /// The bare name of the shard's file.
    pub fn file_name(self) -> String {
        format!("shard-{:06}.safetensors", self.0)
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06}", self.0)
    }
}

impl FromStr for ShardId {
    type Err = ShardError;

    /// Reads a bare file name; anything else, a path above all, is an error.
    fn from_str(name: &str) -> Result<Self, ShardError> {
        let malformed = || ShardError::FileName(name.chars().take(80).collect());
        let digits = name
            .strip_prefix("shard-")
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .filter(|digits| digits.len() == 6 && digits.bytes().all(|d| d.is_ascii_digit()))
            .ok_or_else(malformed)?;
        digits.parse().map(Self).map_err(|_| malformed())
    }
}

/// One tensor of a sample, as recorded in the manifest.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TensorRecord {
    /// Name in the shard.
    pub name: String,
    /// safetensors name of the type, as `BF16`.
    pub dtype: String,
    /// Axes.
    pub shape: Vec<usize>,
    /// Root mean square; only for hidden states.
    pub rms: Option<f64>,
    /// Largest absolute value; only for hidden states.
    pub absmax: Option<f64>,
}

/// One sample of a sealed shard.
#[derive(Clone, PartialEq, Debug)]
pub struct ShardEntry {
    /// Its id.
    pub sample_id: SampleId,
    /// Its tokens.
    pub tokens: usize,
    /// Tokens with loss mask 1.
    pub trainable_tokens: usize,
    /// Its tensors.
    pub tensors: Vec<TensorRecord>,
    /// What storing cost, by layer; not known of a shard that was read.
    pub storage_errors: Vec<(LayerIndex, f64)>,
}

/// A shard on stable storage that the manifest does not know yet.
#[derive(Clone, PartialEq, Debug)]
pub struct SealedShard {
    /// Its number.
    pub id: ShardId,
    /// Its bare file name.
    pub file: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// BLAKE3 of the file.
    pub digest: Digest,
    /// Digest of the fingerprint it was written under.
    pub fingerprint: Digest,
    /// Its samples, in the order pushed.
    pub entries: Vec<ShardEntry>,
}

/// Why a shard can't be written or read.
#[derive(Debug, Error)]
pub enum ShardError {
    /// Not `shard-NNNNNN.safetensors`.
    #[error("`{0}` is not a shard: the name must be shard-NNNNNN.safetensors, without a path")]
    FileName(String),
    /// The same sample twice in one shard.
    #[error("sample {0} is in the shard already")]
    Duplicate(SampleId),
    /// No more tensors fit under the header's limits.
    #[error("the shard holds {samples} samples, no more fit its header: seal it (has_room)")]
    Full {
        /// Samples in it.
        samples: usize,
    },
    /// The sample was checked against another spec.
    #[error("sample {sample} does not fit the shard's spec")]
    OtherSpec {
        /// The sample concerned.
        sample: SampleId,
        /// What differs.
        #[source]
        source: ContractError,
    },
    /// The file's header is refused.
    #[error("{} is refused", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: HeaderError,
    },
    /// The header is sound but not one of our shards.
    #[error("{}: {reason}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A sample that the shard does not hold.
    #[error("{}: sample {sample} is not in this shard", path.display())]
    NoSample {
        /// The file.
        path: PathBuf,
        /// The sample wanted.
        sample: SampleId,
    },
    /// Token ids or mask are unusable, or do not hash to the sample's id.
    #[error("{}: sample {sample}", path.display())]
    Sample {
        /// The file.
        path: PathBuf,
        /// The sample concerned.
        sample: SampleId,
        /// What is wrong.
        #[source]
        source: SampleError,
    },
    /// Ids and mask changed since they were named.
    #[error(
        "{}: the ids and mask named {sample} hash to {found}: bytes changed on disk",
        path.display()
    )]
    SampleChanged {
        /// The file.
        path: PathBuf,
        /// The name in the header.
        sample: SampleId,
        /// The hash of what is there.
        found: SampleId,
    },
    /// The states are not what the contract says.
    #[error("{}: sample {sample}", path.display())]
    Contract {
        /// The file.
        path: PathBuf,
        /// The sample concerned.
        sample: SampleId,
        /// What is wrong.
        #[source]
        source: ContractError,
    },
    /// The file's bytes are not those that were sealed.
    #[error(
        "{}: digest {found}, sealed as {expected}: bytes changed on disk (`extractor audit DATASET \
         --verify all --repair --yes` sets the shard aside for the next run)", path.display()
    )]
    Digest {
        /// The file.
        path: PathBuf,
        /// Digest in the manifest.
        expected: Digest,
        /// Digest of the file.
        found: Digest,
    },
    /// The disk said no.
    #[error(transparent)]
    Io(#[from] DurableError),
}

impl ShardError {
    /// 65 for bad data, 70 for misuse of the writer, 74 for the disk.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io(error) => error.exit_code(),
            Self::Duplicate(_) | Self::Full { .. } | Self::OtherSpec { .. } => 70,
            _ => 65,
        }
    }
}
