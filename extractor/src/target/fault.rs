//! Ranks that misbehave, for tests: this module exists in test builds only. Knows no model.

use std::time::Instant;

use shared::{Digest, LayerIndex};

use super::CacheId;
use super::error::TargetError;
use super::model::{ForwardOutput, ForwardRequest};
use super::ranks::RankWorker;
use crate::capture::LayerRows;

/// One thing that goes wrong on one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// Which rank.
    pub(crate) rank: usize,
    /// In which batches.
    pub(crate) when: When,
    /// What happens.
    pub(crate) kind: Kind,
}

/// The batches in which a fault shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum When {
    /// Every batch with a sequence of so many tokens.
    HasSequence(usize),
    /// Every batch of more tokens than this.
    LargerThan(usize),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Panic,
    Error,
    Hang,
    /// Something is wrong with the device of the rank.
    Device(Spoil),
    /// The rank runs another batch than it was sent.
    Desync,
    OutOfMemory,
    /// A value of a layer's output, from that layer on, in the first token of the sequence.
    Value(LayerIndex, f32),
}

/// What is wrong with a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Spoil {
    /// It never finishes, as with a kernel that never ends.
    Hangs,
    /// A kernel writes where there is no memory.
    BadAddress,
}

impl When {
    fn holds(self, request: &ForwardRequest) -> bool {
        match self {
            Self::HasSequence(tokens) => start_of(request, tokens).is_some(),
            Self::LargerThan(tokens) => request.ids.len() > tokens,
        }
    }
}

/// First row of the sequence with so many tokens.
fn start_of(request: &ForwardRequest, tokens: usize) -> Option<usize> {
    let mut sequences = request.cu_seqlens.windows(2);
    sequences.find(|ends| ends[1] - ends[0] == tokens).map(|ends| ends[0])
}

/// A worker with faults.
pub(super) struct Faulty<W> {
    pub(super) worker: W,
    pub(super) rank: usize,
    pub(super) faults: Vec<Fault>,
}

impl<W> Faulty<W> {
    fn kinds(&self, request: &ForwardRequest) -> Vec<(When, Kind)> {
        // A value is on whichever rank holds its row.
        let is_here = |fault: &Fault| match fault.kind {
            Kind::Value(..) => true,
            _ => fault.rank == self.rank,
        };
        let here = |fault: &&Fault| is_here(fault) && fault.when.holds(request);
        self.faults.iter().filter(here).map(|fault| (fault.when, fault.kind)).collect()
    }
}

/// The batch with its first token changed.
fn other(request: &ForwardRequest) -> ForwardRequest {
    let mut other = request.clone();
    other.ids[0] = u32::from(other.ids[0] == 0);
    other
}

impl<W: RankWorker> RankWorker for Faulty<W> {
    fn forward(
        &mut self,
        request: &ForwardRequest,
        batch: u64,
        deadline: Instant,
    ) -> Result<ForwardOutput, TargetError> {
        let kinds = self.kinds(request);
        for (_, kind) in &kinds {
            match kind {
                Kind::Panic => panic!("out of luck"),
                Kind::Error => {
                    let reason = "an injected error".to_owned();
                    return Err(TargetError::Device { device: "cpu", reason });
                }
                Kind::Hang => loop {
                    std::thread::park();
                },
                Kind::Desync => return self.worker.forward(&other(request), batch, deadline),
                Kind::OutOfMemory => {
                    let tokens = request.ids.len();
                    return Err(TargetError::OutOfMemory { rank: self.rank, tokens });
                }
                Kind::Device(how) => self.worker.spoil(*how),
                Kind::Value(..) => {}
            }
        }
        let mut output = self.worker.forward(request, batch, deadline)?;
        for (when, kind) in kinds {
            let Kind::Value(first, value) = kind else { continue };
            let row = match when {
                When::HasSequence(tokens) => start_of(request, tokens).unwrap_or(0),
                _ => 0,
            };
            for captured in output.captured.iter_mut().filter(|it| it.layer >= first) {
                let width = captured.shape[1];
                for (start, rows) in &mut captured.pieces {
                    let LayerRows::F32(values) = rows else { continue };
                    let place = row.checked_sub(*start).map(|row| row * width);
                    if let Some(slot) = place.and_then(|place| values.get_mut(place)) {
                        *slot = value;
                    }
                }
            }
        }
        Ok(output)
    }

    fn drop_cache(&mut self, id: CacheId) {
        self.worker.drop_cache(id);
    }

    fn received(&self, request: &ForwardRequest) -> Digest {
        let desync = |fault: &Fault| fault.rank == self.rank && fault.kind == Kind::Desync;
        match self.faults.iter().any(desync) {
            true => other(request).digest(),
            false => request.digest(),
        }
    }
}
