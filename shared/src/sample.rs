//! One tokenised conversation and its identity. Knows nothing of hidden states or files.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Content hash of a sample: the first 16 bytes of BLAKE3 over its token ids and loss mask.
///
/// Two input lines that tokenise to the same ids and mask are one sample.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId(pub [u8; 16]);

impl SampleId {
    /// Hashes ids (little-endian u32) and mask bytes, each preceded by its length.
    pub fn of(input_ids: &[u32], loss_mask: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(input_ids.len() as u64).to_le_bytes());
        for id in input_ids {
            hasher.update(&id.to_le_bytes());
        }
        hasher.update(&(loss_mask.len() as u64).to_le_bytes());
        hasher.update(loss_mask);
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(id)
    }
}

impl fmt::Display for SampleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SampleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SampleId({self})")
    }
}

impl Serialize for SampleId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for SampleId {
    type Err = SampleError;

    fn from_str(text: &str) -> Result<Self, SampleError> {
        let malformed = || SampleError::MalformedId(text.chars().take(64).collect());
        if text.len() != 32 || !text.is_ascii() {
            return Err(malformed());
        }
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(pair).map_err(|_| malformed())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| malformed())?;
        }
        Ok(Self(id))
    }
}

/// Token ids of one conversation and, for each, whether the draft is trained on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSample {
    id: SampleId,
    input_ids: Vec<u32>,
    loss_mask: Vec<u8>,
}

impl TokenSample {
    /// Checks that there is at least one token, that ids and mask have equal length and that the
    /// mask holds only 0 and 1.
    pub fn new(input_ids: Vec<u32>, loss_mask: Vec<u8>) -> Result<Self, SampleError> {
        if input_ids.is_empty() {
            return Err(SampleError::Empty);
        }
        if input_ids.len() != loss_mask.len() {
            return Err(SampleError::LengthsDiffer {
                input_ids: input_ids.len(),
                loss_mask: loss_mask.len(),
            });
        }
        if let Some(position) = loss_mask.iter().position(|&m| m > 1) {
            return Err(SampleError::MaskValue { position, value: loss_mask[position] });
        }
        Ok(Self { id: SampleId::of(&input_ids, &loss_mask), input_ids, loss_mask })
    }

    /// Content hash.
    pub fn id(&self) -> SampleId {
        self.id
    }

    /// Token ids, [tokens].
    pub fn input_ids(&self) -> &[u32] {
        &self.input_ids
    }

    /// 1 where the token belongs to an answer, [tokens].
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Number of tokens, at least 1.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Number of tokens with loss mask 1.
    pub fn trainable_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&m| m == 1).count()
    }
}

/// What makes token ids and a loss mask unusable as a sample.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SampleError {
    /// No tokens at all.
    #[error("the sample has no tokens")]
    Empty,
    /// Ids and mask of different length.
    #[error("{input_ids} input_ids but {loss_mask} loss_mask values: they must be equally many")]
    LengthsDiffer {
        /// Number of token ids.
        input_ids: usize,
        /// Number of mask values.
        loss_mask: usize,
    },
    /// A mask value other than 0 and 1.
    #[error("loss_mask[{position}] is {value}: only 0 and 1 are allowed")]
    MaskValue {
        /// Index into the mask.
        position: usize,
        /// The value found there.
        value: u8,
    },
    /// A sample id that is not 32 hex digits.
    #[error("`{0}` is not a sample id: 32 hex digits are expected")]
    MalformedId(String),
}
