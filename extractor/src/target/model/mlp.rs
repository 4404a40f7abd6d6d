//! The gated MLP of dense layers, and the shared experts, which have the same form.

use super::load::Loader;
use super::step::{Input, Stage, Step};
use super::work::Work;
use crate::target::error::TargetError;
use crate::target::ops::{Expert, Ops, Write};

pub(super) struct Mlp<O: Ops> {
    weights: Expert<O::Linear>,
}

impl<O: Ops> Mlp<O> {
    /// The dense MLP under `prefix`.
    pub(super) fn load(loader: &mut Loader<'_, O>, prefix: &str) -> Result<Self, TargetError> {
        let (width, columns) = (loader.spec.intermediate_size, loader.plan.dense.clone());
        Ok(Self { weights: loader.mlp(prefix, width, columns)? })
    }

    /// The shared experts of `width` columns together, under `prefix`.
    pub(super) fn load_shared(
        loader: &mut Loader<'_, O>,
        prefix: &str,
        width: usize,
    ) -> Result<Self, TargetError> {
        let columns = loader.plan.shared.clone();
        Ok(Self { weights: loader.mlp(prefix, width, columns)? })
    }

    /// Adds the MLP of `work.normed` to the residual stream's sum; the caller settles it.
    pub(super) fn forward(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let Work { normed, gate, up, .. } = &mut *step.work;
        step.ops.matmul(gate, normed, &self.weights.gate, Write::Set)?;
        step.ops.matmul(up, normed, &self.weights.up, Write::Set)?;
        step.ops.silu_mul(gate, up)?;
        step.project(Input::Gate, &self.weights.down)?;
        step.ops.lap(Stage::Mlp)
    }
}
