//! The target with its second chances: opened when first needed, opened again after it ran out of
//! memory, with the batch in halves. Knows no files.

use shared::LayerIndex;

use crate::batch::TokenBatch;
use crate::capture::Capture;
use crate::target::{EngineOptions, TargetError, TargetModel};

/// Opens the target; tests open one that misbehaves.
pub(super) type Opener<'a> =
    dyn Fn(&EngineOptions) -> Result<Box<dyn TargetModel>, TargetError> + 'a;

/// A part of a batch, and what came of it.
pub(super) enum Part {
    /// Its states.
    Captured(TokenBatch, Capture),
    /// A single sample that needs more memory than there is, and the target's words.
    TooLarge(TokenBatch, String),
}

/// Runs batches on a target.
pub(super) struct Attempts<'a> {
    pub(super) open: &'a Opener<'a>,
    pub(super) options: EngineOptions,
    pub(super) layers: &'a [LayerIndex],
    /// Opened on the first batch: a finished data set needs no model.
    pub(super) target: Option<Box<dyn TargetModel>>,
}

impl Attempts<'_> {
    /// Captures a batch whole, or in as many parts as memory asks for.
    pub(super) fn run(&mut self, batch: TokenBatch) -> Result<Vec<Part>, TargetError> {
        let mut waiting = vec![batch];
        let mut parts = Vec::new();
        while let Some(batch) = waiting.pop() {
            match self.prefill(&batch) {
                Ok(capture) => parts.push(Part::Captured(batch, capture)),
                Err(error @ TargetError::OutOfMemory { .. }) if self.is_open() => {
                    // An error ends the ranks, so the next part needs new ones.
                    self.target = None;
                    match batch.halves() {
                        Some((first, second)) => {
                            tracing::warn!("{error}: trying again with half of it");
                            waiting.extend([second, first]);
                        }
                        None => parts.push(Part::TooLarge(batch, error.to_string())),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(parts)
    }

    /// Whether an error of [`Self::run`] came from a target at work. One that could not be opened
    /// has seen no sample.
    pub(super) fn is_open(&self) -> bool {
        self.target.is_some()
    }

    fn prefill(&mut self, batch: &TokenBatch) -> Result<Capture, TargetError> {
        let target = match &mut self.target {
            Some(target) => target,
            none => none.insert((self.open)(&self.options)?),
        };
        target.prefill(batch, self.layers)
    }
}
