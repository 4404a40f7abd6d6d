//! Copies what was asked for out of a forward: embeddings, layers' outputs, choices of experts,
//! logits. Knows nothing of how they are computed.

use std::ops::Range;

use shared::LayerIndex;

use super::step::{Stage, Step};
use super::work::Work;
use super::{CapturedLayer, ForwardOutput, Wanted};
use crate::target::error::TargetError;
use crate::target::ops::{Ops, Write};
use crate::target::plan::RankPlan;

/// Copies what was asked for into the output.
pub(super) struct Reader<'a> {
    pub(super) wanted: &'a Wanted,
    /// This rank reads values that all ranks hold alike.
    reads: bool,
    /// This rank and the number of ranks, where each captures its part of the rows.
    share: Option<(usize, usize)>,
}

/// A layer's output on its way to the host: a piece of each half.
pub(super) struct Pending<C> {
    layer: LayerIndex,
    shape: [usize; 2],
    pieces: Vec<(usize, C)>,
}

impl<'a> Reader<'a> {
    pub(super) fn new<O: Ops>(wanted: &'a Wanted, plan: &RankPlan) -> Self {
        let share = O::SHARES_CAPTURE.then_some((plan.rank, plan.world_size));
        Self { wanted, reads: plan.rank == 0, share }
    }

    /// Rows, of `rows`, that this rank captures.
    fn own(&self, rows: usize) -> Range<usize> {
        match self.share {
            Some((rank, ranks)) => rank * rows / ranks..(rank + 1) * rows / ranks,
            None if self.reads => 0..rows,
            None => 0..0,
        }
    }

    pub(super) fn embeddings<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
    ) -> Result<(), TargetError> {
        if self.wanted.embeddings && self.reads {
            output.embeddings.extend(download(step.ops, &step.work.x)?);
        }
        Ok(())
    }

    /// Captures the residual stream where it is the output of a wanted layer; the one after that
    /// is `next`. Its sums have arrived by then, or else the device waits for them.
    pub(super) fn layer<O: Ops>(
        &self,
        pending: &mut Vec<Pending<O::Captured>>,
        step: &mut Step<'_, O>,
        next: usize,
    ) -> Result<(), TargetError> {
        step.settle()?;
        let is_output = |layer: &&LayerIndex| usize::from(layer.0) + 1 == next;
        let Some(&layer) = self.wanted.layers.iter().find(is_output) else { return Ok(()) };
        let width = step.hidden_size;
        let rows = step.ops.len(&step.work.x) / width;
        let own = self.own(rows);
        let first = step.half.first + own.start;
        let piece = match own.is_empty() {
            true => None,
            false => Some((first, step.ops.capture(&step.work.x, own, width)?)),
        };
        match pending.last_mut().filter(|pending| pending.layer == layer) {
            Some(pending) => {
                pending.shape[0] += rows;
                pending.pieces.extend(piece);
            }
            None => {
                let pieces = piece.into_iter().collect();
                pending.push(Pending { layer, shape: [rows, width], pieces });
            }
        }
        step.ops.lap(Stage::Capture)
    }

    pub(super) fn collect<O: Ops>(
        &self,
        pending: Vec<Pending<O::Captured>>,
        ops: &mut O,
    ) -> Result<Vec<CapturedLayer>, TargetError> {
        let mut captured = Vec::with_capacity(pending.len());
        for Pending { layer, shape, pieces } in pending {
            let mut arrived = Vec::with_capacity(pieces.len());
            for (first, rows) in pieces {
                arrived.push((first, ops.collect(rows)?));
            }
            let dtype = ops.dtype();
            captured.push(CapturedLayer { layer, shape, dtype, pieces: arrived });
        }
        // Layers come in the order of the model, and go in that of the request.
        let place = |layer| self.wanted.layers.iter().position(|&wanted| wanted == layer);
        captured.sort_by_key(|captured| place(captured.layer));
        Ok(captured)
    }

    pub(super) fn router<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        ops: &mut O,
        (index, routing): (usize, Option<&O::Routing>),
    ) -> Result<(), TargetError> {
        let Some(routing) = routing.filter(|_| self.wanted.routers && self.reads) else {
            return Ok(());
        };
        let choice = ops.routing_to_host(routing)?;
        match output.routers.last_mut().filter(|(layer, _)| *layer == index) {
            Some((_, first)) => first.append(choice),
            None => output.routers.push((index, choice)),
        }
        Ok(())
    }

    pub(super) fn head<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
        head: &O::Linear,
    ) -> Result<(), TargetError> {
        let Work { normed, head_logits: logits, .. } = &mut *step.work;
        if self.wanted.normed && self.reads {
            output.normed.extend(download(step.ops, normed)?);
        }
        if self.wanted.logits {
            step.ops.matmul(logits, normed, head, Write::Set)?;
            output.logits.extend(download(step.ops, logits)?);
        }
        step.ops.lap(Stage::Rest)
    }
}

fn download<O: Ops>(ops: &mut O, buffer: &O::Buffer) -> Result<Vec<f32>, TargetError> {
    let len = ops.len(buffer);
    ops.download(buffer, 0..len)
}
