//! Names and slices of a model's tensors. Knows nothing of how they are stored.

use std::ops::Range;

use crate::target::error::TargetError;
use crate::target::ops::Ops;
use crate::target::plan::RankPlan;
use crate::target::source::Source;
use crate::target::spec::{QaNormEps, TargetSpec};
use crate::target::weights::Slice;

/// Everything that building a part of the model needs.
pub(super) struct Loader<'a, O: Ops> {
    pub(super) ops: &'a mut O,
    pub(super) source: &'a Source,
    pub(super) spec: &'a TargetSpec,
    pub(super) plan: &'a RankPlan,
    pub(super) qa_norm_eps: QaNormEps,
}

impl<O: Ops> Loader<'_, O> {
    /// Rows `rows` of the matrix `name` of `dims` = [out, in].
    pub(super) fn rows(
        &mut self,
        name: &str,
        dims: [usize; 2],
        rows: Range<usize>,
    ) -> Result<O::Linear, TargetError> {
        self.ops.load_linear(self.source, name, dims, &Slice { rows, cols: 0..dims[1] })
    }

    /// Columns `cols` of the matrix `name` of `dims` = [out, in].
    pub(super) fn cols(
        &mut self,
        name: &str,
        dims: [usize; 2],
        cols: Range<usize>,
    ) -> Result<O::Linear, TargetError> {
        self.ops.load_linear(self.source, name, dims, &Slice { rows: 0..dims[0], cols })
    }

    /// The whole matrix `name`.
    pub(super) fn whole(&mut self, name: &str, dims: [usize; 2]) -> Result<O::Linear, TargetError> {
        self.rows(name, dims, 0..dims[0])
    }

    /// The whole vector `name`.
    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<O::Buffer, TargetError> {
        self.ops.load_vector(self.source, name, len, 0..len)
    }
}

/// `range` of heads as a range of rows or columns, each head `width` wide.
pub(super) fn heads(range: &Range<usize>, width: usize) -> Range<usize> {
    range.start * width..range.end * width
}
