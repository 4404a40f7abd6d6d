//! What one forward carries from part to part: the device, the collective, the residual stream.
//! Knows nothing of which parts there are.

use std::time::{Duration, Instant};

use super::work::Work;
use crate::target::collective::Collective;
use crate::target::error::TargetError;
use crate::target::ops::{Ops, Write};

/// Parts of a forward that are timed apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Embedding and final norm.
    Rest,
    /// Norms before the blocks.
    Norms,
    /// Projections of the attention, with rotation.
    Projections,
    /// Scores, softmax and values.
    Attention,
    /// Dense MLP and shared experts.
    Mlp,
    /// Router and routed experts.
    Experts,
    /// Sums across ranks.
    Collective,
    /// Copies to the host.
    Capture,
}

impl Stage {
    /// Every stage, in the order of [`StageTimes`].
    pub const ALL: [Self; 8] = [
        Self::Rest,
        Self::Norms,
        Self::Projections,
        Self::Attention,
        Self::Mlp,
        Self::Experts,
        Self::Collective,
        Self::Capture,
    ];
}

/// Time spent per stage, by [`Stage::ALL`]'s order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes([Duration; Stage::ALL.len()]);

impl StageTimes {
    /// Time of one stage.
    pub fn get(&self, stage: Stage) -> Duration {
        self.0[stage as usize]
    }

    /// Adds time to one stage.
    pub(in crate::target) fn charge(&mut self, stage: Stage, time: Duration) {
        self.0[stage as usize] += time;
    }

    /// Adds the times of another forward.
    pub fn add(&mut self, other: &Self) {
        for (sum, time) in self.0.iter_mut().zip(other.0) {
            *sum += time;
        }
    }
}

/// Charges the time since the last lap to a stage.
#[derive(Debug)]
pub(in crate::target) struct StageClock {
    last: Instant,
    pub(in crate::target) times: StageTimes,
}

impl StageClock {
    pub(in crate::target) fn start() -> Self {
        Self { last: Instant::now(), times: StageTimes::default() }
    }

    pub(in crate::target) fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        self.times.charge(stage, now - self.last);
        self.last = now;
    }
}

/// One forward in progress on one rank. On several ranks a batch goes in two halves, so that the
/// sums of one cross the ranks while the other is computed.
pub(super) struct Step<'a, O: Ops> {
    pub(super) ops: &'a mut O,
    pub(super) collective: &'a mut dyn Collective<O::Buffer>,
    pub(super) work: &'a mut Work<O::Buffer>,
    pub(super) hidden_size: usize,
    /// Tokens of each sequence that its cache holds already; empty where none has a cache.
    pub(super) cached: &'a [usize],
    pub(super) half: Half<'a, O::Rope>,
    /// The half that waits, and whose turn it is: 0 or 1.
    pub(super) other: Option<Half<'a, O::Rope>>,
    pub(super) turn: usize,
}

/// A part of the batch.
pub(super) struct Half<'a, R> {
    /// First row in the batch.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) angles: R,
    /// Sequence starts in the rows, and the total.
    pub(super) cu_seqlens: &'a [usize],
    sum: Sum,
}

impl<'a, R> Half<'a, R> {
    pub(super) fn new(first: usize, cu_seqlens: &'a [usize], angles: R) -> Self {
        let rows = cu_seqlens.last().copied().unwrap_or(0);
        Self { first, rows, angles, cu_seqlens, sum: Sum::None }
    }
}

/// What has become of a sum across ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sum {
    /// There is nothing to add.
    None,
    /// This rank's part is being computed.
    Open,
    /// On its way across the ranks.
    Sent,
}

/// The inputs of the residual stream that a block may name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Input {
    Attended,
    Gate,
}

impl<O: Ops> Step<'_, O> {
    /// Does `work` for every half.
    pub(super) fn each_half(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<(), TargetError>,
    ) -> Result<(), TargetError> {
        work(self)?;
        if self.other.is_some() {
            self.switch();
            work(self)?;
            self.switch();
        }
        Ok(())
    }

    fn switch(&mut self) {
        if let Some(other) = &mut self.other {
            std::mem::swap(&mut self.half, other);
            self.work.switch();
            self.turn = 1 - self.turn;
        }
    }

    /// Adds `input weight^T` to the residual stream; on several ranks, to the sum that
    /// [`Step::send`] starts.
    pub(super) fn project(&mut self, input: Input, weight: &O::Linear) -> Result<(), TargetError> {
        let Work { x, partial, attended, gate, .. } = &mut *self.work;
        let input = match input {
            Input::Attended => attended,
            Input::Gate => gate,
        };
        if self.collective.world_size() == 1 {
            return self.ops.matmul(x, input, weight, Write::Add);
        }
        let write = if self.half.sum == Sum::Open { Write::Add } else { Write::Set };
        self.half.sum = Sum::Open;
        self.ops.matmul(partial, input, weight, write)
    }

    /// Adds the routed experts' output to the same sum.
    pub(super) fn add_experts(
        &mut self,
        routing: &O::Routing,
        held: &O::Experts,
    ) -> Result<(), TargetError> {
        let Work { x, partial, normed, .. } = &mut *self.work;
        if self.collective.world_size() == 1 {
            return self.ops.experts(x, normed, routing, held);
        }
        if self.half.sum != Sum::Open {
            self.ops.zeros(partial, self.half.rows * self.hidden_size)?;
            self.half.sum = Sum::Open;
        }
        self.ops.experts(partial, normed, routing, held)
    }

    /// Starts to sum the ranks' parts.
    pub(super) fn send(&mut self) -> Result<(), TargetError> {
        if self.half.sum == Sum::Open {
            self.collective.start(self.turn, &mut self.work.partial)?;
            self.half.sum = Sum::Sent;
        }
        Ok(())
    }

    /// Adds the sum of the ranks' parts to the residual stream.
    pub(super) fn settle(&mut self) -> Result<(), TargetError> {
        self.send()?;
        if self.half.sum == Sum::Sent {
            self.collective.finish(self.turn)?;
            self.ops.add(&mut self.work.x, &self.work.partial)?;
            self.half.sum = Sum::None;
            self.ops.lap(Stage::Collective)?;
        }
        Ok(())
    }

    /// Norms the residual stream into `work.normed`.
    pub(super) fn norm(&mut self, weight: &O::Buffer, eps: f32) -> Result<(), TargetError> {
        self.settle()?;
        self.ops.rms_norm(&mut self.work.normed, &self.work.x, weight, eps)?;
        self.ops.lap(Stage::Norms)
    }
}
