//! Why live decoding stops. Knows only the errors of its parts.

use std::path::PathBuf;

use extractor::encode::EncoderError;
use extractor::target::TargetError;
use extractor::target::weights::WeightsError;
use thiserror::Error;

/// Live decoding that could not be done, or that was not lossless.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The target engine.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The target's embeddings.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Tokenizer or chat template.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// The prompts file.
    #[error("reading prompts {}", path.display())]
    Prompts {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A line that is no prompt.
    #[error("{}:{line}: {reason}", path.display())]
    Prompt {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A prompt that leaves no room for an answer.
    #[error(
        "a prompt of {prompt} tokens needs {needed} positions with its answer and drafts, \
            {longest} are possible: lower --max-new-tokens or leave the prompt out"
    )]
    Length {
        /// Tokens of the prompt.
        prompt: usize,
        /// With answer and drafts.
        needed: usize,
        /// Positions of target or draft.
        longest: usize,
    },
    /// The engine replied with less than was asked for.
    #[error("the target engine returned no {what} for row {row}")]
    Reply {
        /// What is missing.
        what: &'static str,
        /// Row of the forward.
        row: usize,
    },
    /// NaN or infinity in the target's logits.
    #[error("the target's largest logit of row {row} is not finite")]
    NotFinite {
        /// Row of the forward.
        row: usize,
    },
    /// Speculative and plain decoding differ: a defect of engine, cache or accounting.
    #[error(
        "{prompt}: the texts differ at generated token {position}: plain greedy decoding gives \
            {greedy:?}, speculative decoding {speculative:?}"
    )]
    NotLossless {
        /// Which prompt.
        prompt: String,
        /// Index into the generated tokens.
        position: usize,
        /// Token of plain decoding; `None` when its text ended.
        greedy: Option<u32>,
        /// Token of speculative decoding; `None` when its text ended.
        speculative: Option<u32>,
    },
}

impl LiveError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Target(error) => error.exit_code(),
            Self::Weights(error) => error.exit_code(),
            Self::Encoder(error) => error.exit_code(),
            Self::Prompts { .. } => 74,
            Self::Prompt { .. } | Self::NotFinite { .. } => 65,
            Self::Length { .. } => 78,
            Self::Reply { .. } | Self::NotLossless { .. } => 70,
        }
    }
}
