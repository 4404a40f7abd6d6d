//! What one forward carries from part to part: the device, the collective, the residual stream.
//! Knows nothing of which parts there are.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::GivenExperts;
use super::work::Work;
use crate::target::collective::{Collective, Table, share};
use crate::target::error::TargetError;
use crate::target::ops::{Norm, Ops, Parts, Rows, Write};

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
    /// Waiting for rows of other ranks, beyond what runs beside it.
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

/// One forward in progress on one rank. On several ranks each owns a share of the rows of the
/// residual stream, and a batch goes in two halves: the rows of one cross the ranks, and the owner
/// sums and norms them, while the other half is computed.
pub(super) struct Step<'a, O: Ops> {
    pub(super) ops: &'a mut O,
    pub(super) collective: &'a mut dyn Collective<O::Buffer>,
    pub(super) work: &'a mut Work<O::Buffer>,
    pub(super) hidden_size: usize,
    /// Tokens of each sequence that its cache holds already; empty where none has a cache.
    pub(super) cached: &'a [usize],
    pub(super) experts: &'a GivenExperts,
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

    /// Its rows in the batch.
    pub(super) fn range(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }
}

/// What this rank's part of a sum across ranks is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sum {
    /// There is nothing to add.
    None,
    /// To be added to the residual stream.
    Open,
    /// The residual stream itself.
    Fresh,
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

    /// Takes up the other half, if there is one.
    pub(super) fn switch(&mut self) {
        if let Some(other) = &mut self.other {
            std::mem::swap(&mut self.half, other);
            self.work.switch();
            self.turn = 1 - self.turn;
        }
    }

    /// Nothing crosses ranks.
    pub(super) fn is_alone(&self) -> bool {
        self.collective.world_size() == 1
    }

    /// Does `work` of this half while the other is computed; [`Step::arrive`] waits for it.
    pub(super) fn aside(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), TargetError>,
    ) -> Result<(), TargetError> {
        if self.is_alone() {
            return work(self);
        }
        self.ops.aside(self.turn)?;
        work(self)?;
        self.ops.abreast(self.turn)
    }

    /// Lets what follows see what was done aside for this half; waiting is charged to `stage`.
    pub(super) fn arrive(&mut self, stage: Stage) -> Result<(), TargetError> {
        if self.is_alone() {
            return Ok(());
        }
        self.ops.join(self.turn)?;
        self.ops.lap(stage)
    }

    /// This rank's rows of this half, in the batch.
    pub(super) fn own(&self) -> Range<usize> {
        let (rank, ranks) = (self.collective.rank(), self.collective.world_size());
        let own = share(rank, ranks, self.half.rows);
        self.half.first + own.start..self.half.first + own.end
    }

    /// Looks up the embeddings of `ids`, this half's; the table starts at id `first`.
    pub(super) fn embed(
        &mut self,
        table: &O::Linear,
        ids: &[u32],
        first: usize,
    ) -> Result<(), TargetError> {
        let half = &mut self.work.half;
        if self.collective.world_size() == 1 {
            return self.ops.embed(&mut half.x, table, ids, first);
        }
        self.half.sum = Sum::Fresh;
        self.ops.embed(&mut half.partial, table, ids, first)?;
        self.send()
    }

    /// Adds `input weight^T` to the residual stream; on several ranks, to this rank's part of the
    /// sum.
    pub(super) fn project(&mut self, input: Input, weight: &O::Linear) -> Result<(), TargetError> {
        let alone = self.is_alone();
        let Work { half, attended, gate, .. } = &mut *self.work;
        let input = match input {
            Input::Attended => attended,
            Input::Gate => gate,
        };
        if alone {
            return self.ops.matmul(&mut half.x, Rows::all(input), weight, Write::Add);
        }
        let write = if self.half.sum == Sum::Open { Write::Add } else { Write::Set };
        self.half.sum = Sum::Open;
        self.ops.matmul(&mut half.partial, Rows::all(input), weight, write)
    }

    /// Adds the routed experts' output for this half to the same sum.
    pub(super) fn combine(&mut self, routing: &O::Routing) -> Result<(), TargetError> {
        let rows = self.half.range();
        if self.is_alone() {
            return self.ops.combine(&mut self.work.half.x, routing, rows);
        }
        let partial = &mut self.work.half.partial;
        if self.half.sum != Sum::Open {
            self.ops.zeros(partial, self.half.rows * self.hidden_size)?;
            self.half.sum = Sum::Open;
        }
        self.ops.combine(partial, routing, rows)
    }

    /// This rank's part of the sum is complete.
    pub(super) fn send(&mut self) -> Result<(), TargetError> {
        if self.is_alone() { Ok(()) } else { self.ops.mark(self.turn) }
    }

    /// Adds the sum of the ranks' parts to this rank's rows of the residual stream. With a `norm`,
    /// weights and epsilon, norms them into their place in `work.normed`.
    pub(super) fn settle(&mut self, norm: Option<(&O::Buffer, f32)>) -> Result<(), TargetError> {
        let (rank, ranks) = (self.collective.rank(), self.collective.world_size());
        let first = self.own().start;
        let Work { half, received, normed: out, .. } = &mut *self.work;
        let norm = norm.map(|(weight, eps)| Norm { out, first, weight, eps });
        let sum = std::mem::replace(&mut self.half.sum, Sum::None);
        if sum == Sum::None {
            let Some(norm) = norm else { return Ok(()) };
            self.ops.rms_norm(&half.x, norm)?;
            return self.ops.lap(Stage::Norms);
        }
        let (rows, width) = (self.half.rows, self.hidden_size);
        self.collective.scatter(&half.partial, received, [rows, width])?;
        let rows = share(rank, ranks, rows);
        let parts = Parts { own: &half.partial, received, rank, ranks, rows, width };
        let write = if sum == Sum::Fresh { Write::Set } else { Write::Add };
        self.ops.add_parts(&mut half.x, &parts, write, norm)
    }

    /// Brings all rows of this half that [`Step::settle`] has normed into `work.normed`.
    pub(super) fn gather_normed(&mut self) -> Result<(), TargetError> {
        let (first, width) = (self.half.first, self.hidden_size);
        let table = Table { own: None, all: &mut self.work.normed, first, width };
        self.collective.gather(&mut [table], self.half.rows)
    }
}
