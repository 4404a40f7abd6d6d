//! One packed batch for the trainer and the frozen target it is compared with. Knows nothing of
//! the draft or of files.

use burn::tensor::{FloatDType, Tensor, backend::Backend};
use thiserror::Error;

use crate::draft::DraftVocabulary;
use crate::ops::{RowIndex, TeacherHead};
use crate::unroll::RotaryCache;

/// Token ids, loss mask and document borders of a packed batch of `T` rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchTokens {
    input_ids: Vec<u32>,
    loss_mask: Vec<bool>,
    doc_offsets: Vec<usize>,
}

/// A batch whose parts do not fit together.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BatchError {
    /// Ids and mask differ in length.
    #[error("batch has {input_ids} input ids and {loss_mask} loss mask entries; expected as many")]
    Lengths {
        /// Number of ids.
        input_ids: usize,
        /// Number of mask entries.
        loss_mask: usize,
    },
    /// Offsets must start with 0, ascend and end with the number of rows.
    #[error("document offsets {offsets:?} do not run from 0 to {rows} in ascending order")]
    Offsets {
        /// What came.
        offsets: Vec<usize>,
        /// Rows of the batch.
        rows: usize,
    },
    /// A tensor has another shape than rows and widths ask for.
    #[error("{what} has shape {found:?}; expected {expected:?}")]
    Shape {
        /// Name of the tensor.
        what: &'static str,
        /// Shape that is needed.
        expected: [usize; 2],
        /// Shape that came.
        found: [usize; 2],
    },
    /// A token id outside the embedding.
    #[error("input id {id} at row {row} is outside the vocabulary of {vocab_size} tokens")]
    Token {
        /// The id.
        id: u32,
        /// Its row.
        row: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
}

impl BatchError {
    /// Exit code of a run that ends with this error.
    pub fn exit_code(&self) -> u8 {
        65
    }
}

impl BatchTokens {
    /// Checks lengths and offsets. A mask entry counts as set when it is not 0; `doc_offsets` is
    /// `[0, end of document 0, ...]`; documents may be empty.
    pub fn new(
        input_ids: Vec<u32>,
        loss_mask: &[u8],
        doc_offsets: Vec<usize>,
    ) -> Result<Self, BatchError> {
        if input_ids.len() != loss_mask.len() {
            return Err(BatchError::Lengths {
                input_ids: input_ids.len(),
                loss_mask: loss_mask.len(),
            });
        }
        let rows = input_ids.len();
        let ends = (doc_offsets.first(), doc_offsets.last());
        if ends != (Some(&0), Some(&rows)) || !doc_offsets.is_sorted() {
            return Err(BatchError::Offsets { offsets: doc_offsets, rows });
        }
        let loss_mask = loss_mask.iter().map(|&mark| mark != 0).collect();
        Ok(Self { input_ids, loss_mask, doc_offsets })
    }

    /// Token ids, `[T]`.
    pub fn input_ids(&self) -> &[u32] {
        &self.input_ids
    }

    /// Which tokens the draft is trained on, `[T]`.
    pub fn loss_mask(&self) -> &[bool] {
        &self.loss_mask
    }

    /// `[0, end of document 0, ..., T]`.
    pub fn doc_offsets(&self) -> &[usize] {
        &self.doc_offsets
    }

    /// Rows `T` of the batch.
    pub fn rows(&self) -> usize {
        self.input_ids.len()
    }
}

/// A packed batch with the target's states.
#[derive(Clone, Debug)]
pub struct TrainBatch<B: Backend> {
    pub(crate) tokens: BatchTokens,
    /// `[T, num_aux * H]`.
    pub(crate) aux: Tensor<B, 2>,
    /// `[T, H]`.
    pub(crate) last_hidden: Tensor<B, 2>,
}

impl<B: Backend> TrainBatch<B> {
    /// Joins tokens with the auxiliary states side by side, `[T, num_aux * H]`, and the last
    /// state before the final norm, `[T, H]`.
    pub fn new(
        tokens: BatchTokens,
        aux: Tensor<B, 2>,
        last_hidden: Tensor<B, 2>,
    ) -> Result<Self, BatchError> {
        for (what, tensor) in [("aux states", &aux), ("last hidden state", &last_hidden)] {
            let found = tensor.dims();
            if found[0] != tokens.rows() {
                return Err(BatchError::Shape { what, expected: [tokens.rows(), found[1]], found });
            }
        }
        Ok(Self { tokens, aux, last_hidden })
    }

    /// The same batch with states of type `dtype`.
    pub fn with_dtype(self, dtype: FloatDType) -> Self {
        let (aux, last_hidden) = (self.aux.cast(dtype), self.last_hidden.cast(dtype));
        Self { aux, last_hidden, ..self }
    }

    /// Ids, mask and documents.
    pub fn tokens(&self) -> &BatchTokens {
        &self.tokens
    }
}

/// What the trainer needs of the target model. Never trained.
#[derive(Clone, Debug)]
pub struct FrozenTarget<B: Backend> {
    /// `[V, H]`.
    pub(crate) embed_tokens: Tensor<B, 2>,
    pub(crate) head: TeacherHead<B>,
    pub(crate) vocabulary: DraftVocabulary,
    /// Not of the target, but it lives as long.
    pub(crate) rotary: RotaryCache<B>,
}

/// Tensors of the target head, as captured.
#[derive(Clone, Debug)]
pub struct TargetWeights<B: Backend> {
    /// Token embedding, `[V, H]`.
    pub embed_tokens: Tensor<B, 2>,
    /// Final norm, `[H]`.
    pub norm: Tensor<B, 1>,
    /// Added to the mean square in the final norm.
    pub norm_eps: f64,
    /// Output head, `[V, H]`.
    pub lm_head: Tensor<B, 2>,
}

impl<B: Backend> FrozenTarget<B> {
    /// Checks that embedding, norm, head and vocabulary are of one model.
    pub fn new(weights: TargetWeights<B>, vocabulary: DraftVocabulary) -> Result<Self, BatchError> {
        let [_, width] = weights.embed_tokens.dims();
        let expected = [vocabulary.in_draft().len(), width];
        let shapes = [
            ("target embed_tokens", weights.embed_tokens.dims()),
            ("target lm_head", weights.lm_head.dims()),
            ("target norm", [expected[0], weights.norm.dims()[0]]),
        ];
        for (what, found) in shapes {
            if found != expected {
                return Err(BatchError::Shape { what, expected, found });
            }
        }
        let device = weights.embed_tokens.device();
        let draft_to_target = RowIndex::new(vocabulary.draft_to_target().to_vec(), &device);
        let TargetWeights { embed_tokens, norm, norm_eps, lm_head } = weights;
        let head = TeacherHead { norm, norm_eps, lm_head, draft_to_target };
        Ok(Self { embed_tokens, head, vocabulary, rotary: RotaryCache::new() })
    }

    /// The same target with matrices of type `dtype`; its norm stays as it is.
    pub fn with_dtype(self, dtype: FloatDType) -> Self {
        let lm_head = self.head.lm_head.cast(dtype);
        let head = TeacherHead { lm_head, ..self.head };
        Self { embed_tokens: self.embed_tokens.cast(dtype), head, ..self }
    }

    /// Which of the `V` tokens the draft predicts.
    pub fn vocabulary(&self) -> &DraftVocabulary {
        &self.vocabulary
    }

    /// Rows of the target's head that belong to the draft vocabulary, `[draft vocabulary, H]`:
    /// a start for the draft's own head.
    pub fn draft_rows_of_lm_head(&self) -> Tensor<B, 2> {
        self.head.lm_head.clone().select(0, self.head.draft_to_target.tensor())
    }
}
