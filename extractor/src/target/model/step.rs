//! What one forward carries from part to part: the device, the collective, the residual stream.
//! Knows nothing of which parts there are.

use std::time::{Duration, Instant};

use crate::target::collective::Collective;
use crate::target::error::TargetError;
use crate::target::ops::{HeldExperts, Ops, Write};

/// Buffers that live as long as the model, so that layers allocate nothing.
#[derive(Debug)]
pub(super) struct Work<B> {
    /// Residual stream, [rows, hidden].
    pub(super) x: B,
    /// This rank's part of a sum across ranks.
    partial: B,
    /// Normed input of a block, [rows, hidden].
    pub(super) normed: B,
    pub(super) q: B,
    pub(super) q_latent: B,
    pub(super) latent: B,
    pub(super) kv: B,
    pub(super) k_pe: B,
    pub(super) k: B,
    pub(super) v: B,
    pub(super) spare: B,
    pub(super) attended: B,
    pub(super) gate: B,
    pub(super) up: B,
    pub(super) logits: B,
}

impl<B> Work<B> {
    pub(super) fn new(mut buffer: impl FnMut() -> B) -> Self {
        Self {
            x: buffer(),
            partial: buffer(),
            normed: buffer(),
            q: buffer(),
            q_latent: buffer(),
            latent: buffer(),
            kv: buffer(),
            k_pe: buffer(),
            k: buffer(),
            v: buffer(),
            spare: buffer(),
            attended: buffer(),
            gate: buffer(),
            up: buffer(),
            logits: buffer(),
        }
    }
}

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

    /// Adds the times of another forward.
    pub fn add(&mut self, other: &Self) {
        for (sum, time) in self.0.iter_mut().zip(other.0) {
            *sum += time;
        }
    }
}

/// Charges the time since the last lap to a stage.
#[derive(Debug)]
pub(super) struct StageClock {
    last: Instant,
    pub(super) times: StageTimes,
}

impl StageClock {
    pub(super) fn start() -> Self {
        Self { last: Instant::now(), times: StageTimes::default() }
    }

    pub(super) fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        self.times.0[stage as usize] += now - self.last;
        self.last = now;
    }
}

/// One forward in progress on one rank.
pub(super) struct Step<'a, O: Ops> {
    pub(super) ops: &'a mut O,
    pub(super) collective: &'a mut dyn Collective<O::Buffer>,
    pub(super) work: &'a mut Work<O::Buffer>,
    pub(super) clock: StageClock,
    pub(super) rows: usize,
    pub(super) hidden_size: usize,
    pub(super) angles: O::Rope,
    /// Sequence starts in the rows, and the total.
    pub(super) cu_seqlens: &'a [usize],
    /// Tokens of each sequence that its cache holds already; empty where none has a cache.
    pub(super) cached: &'a [usize],
    /// The partial sum holds something.
    pub(super) has_partial: bool,
}

/// The inputs of the residual stream that a block may name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Input {
    Attended,
    Gate,
}

impl<O: Ops> Step<'_, O> {
    /// Adds `input weight^T` to the residual stream; on several ranks, to the sum that
    /// [`Step::settle`] completes.
    pub(super) fn project(&mut self, input: Input, weight: &O::Linear) -> Result<(), TargetError> {
        let Work { x, partial, attended, gate, .. } = &mut *self.work;
        let input = match input {
            Input::Attended => attended,
            Input::Gate => gate,
        };
        if self.collective.world_size() == 1 {
            return self.ops.matmul(x, input, weight, Write::Add);
        }
        let write = if self.has_partial { Write::Add } else { Write::Set };
        self.has_partial = true;
        self.ops.matmul(partial, input, weight, write)
    }

    /// Adds the routed experts' output to the same sum.
    pub(super) fn add_experts(
        &mut self,
        routing: &O::Routing,
        held: &HeldExperts<O::Linear>,
    ) -> Result<(), TargetError> {
        let Work { x, partial, normed, .. } = &mut *self.work;
        if self.collective.world_size() == 1 {
            return self.ops.experts(x, normed, routing, held);
        }
        if !self.has_partial {
            self.ops.zeros(partial, self.rows * self.hidden_size)?;
            self.has_partial = true;
        }
        self.ops.experts(partial, normed, routing, held)
    }

    /// Sums the ranks' parts and adds them to the residual stream.
    pub(super) fn settle(&mut self) -> Result<(), TargetError> {
        if !std::mem::take(&mut self.has_partial) {
            return Ok(());
        }
        self.collective.all_reduce(&mut self.work.partial)?;
        self.ops.add(&mut self.work.x, &self.work.partial)?;
        self.clock.lap(Stage::Collective);
        Ok(())
    }

    /// Norms the residual stream into `work.normed`.
    pub(super) fn norm(&mut self, weight: &O::Buffer, eps: f32) -> Result<(), TargetError> {
        self.ops.rms_norm(&mut self.work.normed, &self.work.x, weight, eps)?;
        self.clock.lap(Stage::Norms);
        Ok(())
    }
}
