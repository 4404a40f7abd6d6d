//! What can go wrong in the target engine. Knows nothing of command lines; exit codes are a number.

use std::path::PathBuf;
use std::time::Duration;

use kernels::cuda::CudaError;
use shared::{Digest, LayerIndex};
use thiserror::Error;

use super::weights::WeightsError;

/// Exit code after the death of a rank: another try may succeed.
pub const EXIT_DIED: u8 = 75;

/// An error of the target engine. See [`TargetError::exit_code`].
#[derive(Debug, Error)]
pub enum TargetError {
    /// `config.json` could not be read.
    #[error("{path}: cannot be read; --model must name a directory that holds config.json")]
    ConfigRead {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// `config.json` is not a JSON object.
    #[error("{path}: not a JSON object; a Hugging Face config.json is expected")]
    ConfigJson {
        /// The file.
        path: PathBuf,
        /// Where parsing stopped.
        #[source]
        source: serde_json::Error,
    },
    /// An architecture this engine does not know.
    #[error("model_type `{model_type}` is not supported; supported are {supported}")]
    UnsupportedModel {
        /// What the configuration says.
        model_type: String,
        /// The known ones, comma separated.
        supported: String,
    },
    /// A field of the configuration is missing, out of range or contradicts another.
    #[error("config.json: `{field}` {problem}")]
    ConfigField {
        /// Dotted name of the field.
        field: String,
        /// What was expected and what came.
        problem: String,
    },
    /// The model cannot be split over that many ranks.
    #[error("{count} {what} cannot be split over --tp {tp}; use a --tp that divides {count}")]
    Split {
        /// Requested ranks.
        tp: usize,
        /// What has to be split.
        what: &'static str,
        /// How many there are.
        count: usize,
    },
    /// An option outside its range.
    #[error("{option} is {value}: {expected}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What came.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The checkpoint is unreadable, incomplete or of another shape than the configuration.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The device is missing or not usable.
    #[error("device {device} is not available: {reason}")]
    Device {
        /// The device asked for.
        device: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// A GPU or a library for it is missing, or refuses.
    #[error("rank {rank}: {doing}")]
    Cuda {
        /// Which rank.
        rank: usize,
        /// What it was doing.
        doing: &'static str,
        /// What was refused, and with which code.
        #[source]
        source: CudaError,
    },
    /// A collective operation between GPUs was refused.
    #[error("rank {rank}: {operation} of NCCL answered {code}: {meaning}")]
    Nccl {
        /// Which rank.
        rank: usize,
        /// Name of the operation.
        operation: &'static str,
        /// Name and number of the answer.
        code: String,
        /// What it means, and what to do.
        meaning: &'static str,
    },
    /// The model and the batch need more memory than a GPU has free.
    #[error(
        "rank {rank}: {needed} are needed, {free} are free on GPU {rank} of {total}; take fewer \
         --batch-tokens ({tokens} now) or more GPUs\n{plan}"
    )]
    Memory {
        /// Which rank.
        rank: usize,
        /// Bytes, written out.
        needed: String,
        /// Bytes, written out.
        free: String,
        /// Bytes, written out.
        total: String,
        /// Tokens of a batch.
        tokens: usize,
        /// What the memory is for.
        plan: String,
    },
    /// A batch has more tokens than memory was taken for.
    #[error("the batch has {tokens} tokens, memory was taken for {limit}; raise --batch-tokens")]
    BatchTooLarge {
        /// Tokens of the batch.
        tokens: usize,
        /// Tokens at most.
        limit: usize,
    },
    /// A token id the model has no embedding for.
    #[error(
        "token id {id} at position {position}: the vocabulary has {vocab_size} ids; \
         do tokenizer and model belong together?"
    )]
    TokenId {
        /// Position in the packed batch.
        position: usize,
        /// The id.
        id: u32,
        /// Ids below this are valid.
        vocab_size: usize,
    },
    /// A layer the model does not have.
    #[error("layer {layer} was requested, but the model has layers 0 to {last}")]
    Layer {
        /// The request.
        layer: LayerIndex,
        /// Highest valid layer.
        last: usize,
    },
    /// More tokens of a cache were to be kept than it holds.
    #[error("cache {cache} holds {held} tokens, {keep} were to be kept")]
    Cache {
        /// The cache.
        cache: u64,
        /// Tokens in it.
        held: usize,
        /// Tokens to keep.
        keep: usize,
    },
    /// A forward without tokens.
    #[error("the batch has no tokens")]
    EmptyBatch,
    /// A sequence is longer than the positions of the model.
    #[error(
        "a sequence of {tokens} tokens exceeds max_position_embeddings {limit}; cut or drop it"
    )]
    TooLong {
        /// Tokens in the sequence.
        tokens: usize,
        /// Positions the model has.
        limit: usize,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// Which rank.
        rank: usize,
        /// Text of the panic.
        message: String,
    },
    /// A rank's thread could not be started.
    #[error("no thread could be started for rank {rank}")]
    RankThread {
        /// Which rank.
        rank: usize,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// This rank stopped because another one did.
    #[error("the collective was ended: {reason}")]
    CollectiveEnded {
        /// What the rank that ended it said.
        reason: String,
    },
    /// A batch took longer than its deadline.
    #[error(
        "no answer from ranks {waiting:?} within {:.1} s: a GPU or rank hangs, or the batch is too \
         large for it (--batch-tokens)",
        .limit.as_secs_f64()
    )]
    Deadline {
        /// Ranks that have not answered.
        waiting: Vec<usize>,
        /// The deadline of a batch.
        limit: Duration,
    },
    /// A rank's forward ended with an error of device or engine.
    #[error("rank {rank} died")]
    RankFailed {
        /// Which rank.
        rank: usize,
        /// What it said.
        #[source]
        source: Box<TargetError>,
    },
    /// A rank has run another batch than the others.
    #[error(
        "rank {rank} ran another batch ({found}) than was sent ({expected}): \
         nothing of it is kept"
    )]
    Desync {
        /// Which rank.
        rank: usize,
        /// Digest of the batch as it was sent.
        expected: Digest,
        /// Digest of what the rank ran.
        found: Digest,
    },
    /// A batch needs more memory than there is.
    #[error("rank {rank} is out of memory with a batch of {tokens} tokens")]
    OutOfMemory {
        /// Which rank.
        rank: usize,
        /// Tokens of the batch.
        tokens: usize,
    },
    /// The ranks were ended by an earlier error.
    #[error("the ranks of this target ended after an earlier error; open it again")]
    GroupEnded,
    /// Ranks disagree, or a reply has another shape than was asked for.
    #[error("rank {rank} answered {found}, {expected} was expected; this is a bug in the engine")]
    Reply {
        /// Which rank.
        rank: usize,
        /// Shape or kind that came.
        found: String,
        /// Shape or kind that was expected.
        expected: String,
    },
}

impl TargetError {
    /// Process exit code: 65 bad data, 69 device missing, 70 bug, 74 I/O, 75 try again, 78 config.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::ConfigRead { .. } => 74,
            Self::Weights(error) => error.exit_code(),
            Self::ConfigJson { .. }
            | Self::UnsupportedModel { .. }
            | Self::ConfigField { .. }
            | Self::TokenId { .. }
            | Self::EmptyBatch
            | Self::TooLong { .. } => 65,
            Self::Device { .. } | Self::Memory { .. } => 69,
            Self::Cuda { source, .. } => source.exit_code(),
            Self::Split { .. }
            | Self::Option { .. }
            | Self::Layer { .. }
            | Self::BatchTooLarge { .. } => 78,
            Self::Deadline { .. }
            | Self::RankThread { .. }
            | Self::Nccl { .. }
            | Self::RankPanicked { .. }
            | Self::RankFailed { .. }
            | Self::Desync { .. }
            | Self::OutOfMemory { .. }
            | Self::CollectiveEnded { .. }
            | Self::GroupEnded => EXIT_DIED,
            Self::Cache { .. } | Self::Reply { .. } => 70,
        }
    }

    /// True where a rank died, so that another try may succeed.
    pub fn is_death(&self) -> bool {
        self.exit_code() == EXIT_DIED
    }

    /// What an error of device or engine is called when it comes from a forward.
    pub(crate) fn of_forward(self, rank: usize) -> Self {
        match self.exit_code() {
            69 | 70 => Self::RankFailed { rank, source: Box::new(self) },
            _ => self,
        }
    }

    /// What an error in the middle of a batch of `tokens` is called where memory was short.
    pub(crate) fn of_batch(self, tokens: usize) -> Self {
        match self {
            Self::Cuda { rank, source, .. } if source.is_out_of_memory() => {
                Self::OutOfMemory { rank, tokens }
            }
            _ => self,
        }
    }

    /// True where this error only says that another rank failed first.
    pub(crate) fn is_consequence(&self) -> bool {
        matches!(self, Self::CollectiveEnded { .. })
    }
}
