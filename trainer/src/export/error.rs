//! Why an export is refused. Knows only the errors of its parts.

use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::CheckpointError;
use crate::draft::{DraftConfigError, ParamShapeError};
use crate::target::TargetError;
use crate::tensors::TensorFileError;
use crate::vocab::VocabError;

/// An export that was refused or failed its own check; nothing stays under the given name.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The directory is there already.
    #[error("{} exists: choose another directory, or remove it", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
    /// Writing durably.
    #[error(transparent)]
    Durable(#[from] shared::DurableError),
    /// The draft does not have the layout's attention.
    #[error(
        "this draft was trained with draft.layout = \"{draft}\": export it with --layout {allowed}"
    )]
    Layout {
        /// Its layout.
        draft: &'static str,
        /// Layouts that fit.
        allowed: &'static str,
    },
    /// The checkpoint does not say which layers its states came from.
    #[error(
        "the checkpoint names {found} captured layers, its draft reads {num_aux} aux states and \
            a teacher: without the layers an engine would guess them and accept almost nothing"
    )]
    NoLayerIds {
        /// Layers it names.
        found: usize,
        /// Aux states of the draft.
        num_aux: usize,
    },
    /// Ids that one engine would misread.
    #[error("aux states from layer {first} cannot be served by {engine}: {why}")]
    FirstLayer {
        /// First aux layer.
        first: u16,
        /// Which engine.
        engine: &'static str,
        /// Its rule.
        why: &'static str,
    },
    /// A target whose ids SGLang reads in a way that is not known here.
    #[error(
        "how SGLang numbers the layers of `{architecture}` is not known here, and ids that it \
            misreads cost almost all acceptance: --engine vllm writes ids for vLLM alone"
    )]
    UnknownTarget {
        /// First of the target's `architectures`.
        architecture: String,
    },
    /// Ids that did not survive writing and reading.
    #[error("layer ids {written} should mean {meant} but read back as {read}")]
    LayerIds {
        /// Ids written.
        written: String,
        /// Layers they should mean.
        meant: String,
        /// Layers an engine would capture.
        read: String,
    },
    /// A key the target's config.json lacks.
    #[error("the target's config.json has no {key}: {why}")]
    TargetKey {
        /// The key.
        key: &'static str,
        /// What it is needed for.
        why: &'static str,
    },
    /// Embeddings of another size.
    #[error(
        "{} has {found} embedding values, the draft's target {expected:?}: name a data set of that \
            target", from.display()
    )]
    Embeddings {
        /// Data set that they come from.
        from: PathBuf,
        /// Number of values.
        found: usize,
        /// Rows and width.
        expected: [usize; 2],
    },
    /// Embeddings of another target.
    #[error(
        "the embeddings of {} are not those of {}, with which the draft was trained: token {id} \
            has other values; name a data set of the same target", from.display(), trained.display()
    )]
    OtherEmbeddings {
        /// Data set that they come from.
        from: PathBuf,
        /// Data set of the training.
        trained: PathBuf,
        /// First token with another embedding.
        id: i64,
    },
    /// A switch an engine does not know.
    #[error("{flag} is not served by {engine}")]
    Unsupported {
        /// The switch.
        flag: &'static str,
        /// The engine.
        engine: &'static str,
    },
    /// The exported config.json cannot be understood.
    #[error("{}: {key}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A loader would not find a tensor, or not use one.
    #[error("{loader} would {problem}: {names}")]
    Loader {
        /// Whose rules.
        loader: &'static str,
        /// What happens.
        problem: &'static str,
        /// To which tensors.
        names: String,
    },
    /// The exported draft computes something else.
    #[error(
        "the exported draft's logits differ from the checkpoint's by {difference:.2e} of the \
            largest logit, {limit:.0e} is allowed"
    )]
    Golden {
        /// Largest difference.
        difference: f64,
        /// Allowed.
        limit: f64,
    },
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The target's configuration.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A tensor file.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The vocabulary mapping.
    #[error(transparent)]
    Vocab(#[from] VocabError),
    /// Sizes read back.
    #[error(transparent)]
    Draft(#[from] DraftConfigError),
    /// Parameters read back.
    #[error(transparent)]
    Shape(#[from] ParamShapeError),
}

impl ExportError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exists { .. }
            | Self::Layout { .. }
            | Self::FirstLayer { .. }
            | Self::UnknownTarget { .. }
            | Self::Unsupported { .. } => 78,
            Self::Io { .. } | Self::Durable(_) => 74,
            Self::LayerIds { .. } | Self::Golden { .. } => 70,
            Self::Checkpoint(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            Self::Tensors(error) => error.exit_code(),
            Self::Vocab(error) => error.exit_code(),
            _ => 65,
        }
    }
}
