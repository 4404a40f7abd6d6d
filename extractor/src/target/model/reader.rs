//! Copies what was asked for out of a forward: embeddings, layers' outputs, choices of experts,
//! logits. Knows nothing of how they are computed.

use shared::LayerIndex;

use super::step::{Stage, Step};
use super::work::Work;
use super::{CapturedLayer, ForwardOutput, Wanted};
use crate::target::collective::{Table, share};
use crate::target::error::TargetError;
use crate::target::ops::{Ops, Rows, Write};
use crate::target::plan::RankPlan;

/// Copies what was asked for into the output.
pub(super) struct Reader<'a> {
    pub(super) wanted: &'a Wanted,
    /// This rank reads values that all ranks hold alike.
    reads: bool,
    /// This rank and the number of ranks: each captures its part of the rows.
    share: (usize, usize),
}

/// A layer's output on its way to the host: a piece of each half.
pub(super) struct Pending<C> {
    layer: LayerIndex,
    shape: [usize; 2],
    pieces: Vec<(usize, C)>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(wanted: &'a Wanted, plan: &RankPlan) -> Self {
        Self { wanted, reads: plan.rank == 0, share: (plan.rank, plan.world_size) }
    }

    pub(super) fn embeddings<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
    ) -> Result<(), TargetError> {
        if !self.wanted.embeddings {
            return Ok(());
        }
        let (rows, first, width) = (step.half.rows, step.half.first, step.hidden_size);
        let Work { half, normed, .. } = &mut *step.work;
        if step.collective.world_size() == 1 {
            output.embeddings.extend(download(step.ops, &half.x)?);
            return Ok(());
        }
        let table = Table { own: Some(&half.x), all: normed, first, width };
        step.collective.gather(&mut [table], rows)?;
        if self.reads {
            let values = first * width..(first + rows) * width;
            output.embeddings.extend(step.ops.download(normed, values)?);
        }
        Ok(())
    }

    /// Captures this rank's rows of the residual stream, which are settled, where it is the output
    /// of a wanted layer; the one after that is `next`.
    pub(super) fn layer<O: Ops>(
        &self,
        pending: &mut Vec<Pending<O::Captured>>,
        step: &mut Step<'_, O>,
        next: usize,
    ) -> Result<(), TargetError> {
        let is_output = |layer: &&LayerIndex| usize::from(layer.0) + 1 == next;
        let Some(&layer) = self.wanted.layers.iter().find(is_output) else { return Ok(()) };
        let (rows, width) = (step.half.rows, step.hidden_size);
        let held = share(step.collective.rank(), step.collective.world_size(), rows);
        // In a bench, ranks that are not there own rows too.
        let (rank, ranks) = self.share;
        let own = 0..share(rank, ranks, rows).len().min(held.len());
        let first = step.half.first + held.start;
        let piece = match own.is_empty() {
            true => None,
            false => Some((first, step.ops.capture(&step.work.half.x, own, width)?)),
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
        output.routers.push((index, ops.routing_to_host(routing)?));
        Ok(())
    }

    pub(super) fn head<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
        head: &O::Linear,
    ) -> Result<(), TargetError> {
        let (range, width) = (step.half.range(), step.hidden_size);
        let Work { normed, head_logits: logits, .. } = &mut *step.work;
        if self.wanted.normed && self.reads {
            let values = range.start * width..range.end * width;
            output.normed.extend(step.ops.download(normed, values)?);
        }
        if self.wanted.logits {
            let input = Rows { of: &*normed, range: Some(range) };
            step.ops.matmul(logits, input, head, Write::Set)?;
            output.logits.extend(download(step.ops, logits)?);
        }
        step.ops.lap(Stage::Rest)
    }
}

fn download<O: Ops>(ops: &mut O, buffer: &O::Buffer) -> Result<Vec<f32>, TargetError> {
    let len = ops.len(buffer);
    ops.download(buffer, 0..len)
}
