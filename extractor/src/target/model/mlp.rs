//! The gated MLP of dense layers, and the shared experts, which have the same form.

use std::ops::Range;

use super::load::Loader;
use super::step::{Input, Stage, Step};
use super::work::Work;
use crate::target::error::TargetError;
use crate::target::ops::{Ops, Rows};
use crate::target::weights::Slice;

pub(super) struct Mlp<O: Ops> {
    gate_up: O::GateUp,
    down: O::Linear,
}

impl<O: Ops> Mlp<O> {
    /// The dense MLP under `prefix`.
    pub(super) fn load(loader: &mut Loader<'_, O>, prefix: &str) -> Result<Self, TargetError> {
        let (width, columns) = (loader.spec.intermediate_size, loader.plan.dense.clone());
        Self::load_columns(loader, prefix, width, columns)
    }

    /// The shared experts of `width` columns together, under `prefix`.
    pub(super) fn load_shared(
        loader: &mut Loader<'_, O>,
        prefix: &str,
        width: usize,
    ) -> Result<Self, TargetError> {
        let columns = loader.plan.shared.clone();
        Self::load_columns(loader, prefix, width, columns)
    }

    /// `columns` of an intermediate of width `width`.
    fn load_columns(
        loader: &mut Loader<'_, O>,
        prefix: &str,
        width: usize,
        columns: Range<usize>,
    ) -> Result<Self, TargetError> {
        let hidden = loader.spec.hidden_size;
        let slice = Slice { rows: columns.clone(), cols: 0..hidden };
        let dims = [width, hidden];
        let gate_up = loader.ops.load_gate_up(loader.source, prefix, dims, &slice)?;
        let down = loader.cols(&format!("{prefix}.down_proj"), [hidden, width], columns)?;
        Ok(Self { gate_up, down })
    }

    /// Adds the MLP of this half's rows of `work.normed` to the residual stream's sum.
    pub(super) fn forward(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let range = Some(step.half.range());
        let Work { normed, gate, up, .. } = &mut *step.work;
        step.ops.gated((gate, up), Rows { of: normed, range }, &self.gate_up)?;
        step.project(Input::Gate, &self.down)?;
        step.ops.lap(Stage::Mlp)
    }
}
