//! Batches in the order of (seed, epoch), read ahead by a thread, and where that order stands.
//! Knows no model.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use crate::collate::{HostBatch, collate, plan};
use crate::dataset::{DatasetError, ManifestDataset};

/// Position in the order of batches: the next one to be trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// Passes finished.
    pub epoch: u64,
    /// Batches of this pass already used.
    pub position: u64,
}

/// What decides the batches of a run.
#[derive(Clone, Debug)]
pub struct LoaderPlan {
    /// Samples to use, as indices of the data set.
    pub indices: Vec<usize>,
    /// Seed of the order.
    pub seed: u64,
    /// Passes.
    pub epochs: u64,
    /// Tokens of a batch.
    pub max_tokens: usize,
}

impl LoaderPlan {
    /// The batches of an epoch as lists of sample indices.
    pub fn batches(&self, dataset: &ManifestDataset, epoch: u64) -> Vec<Vec<usize>> {
        let order = dataset.order(&self.indices, self.seed, epoch);
        let lengths: Vec<usize> = order.iter().map(|&at| dataset.samples()[at].tokens).collect();
        plan(&order, &lengths, self.max_tokens)
    }

    /// Groups of `accumulate` batches over all epochs; a group never spans two epochs.
    pub fn total_steps(&self, dataset: &ManifestDataset, accumulate: usize) -> u64 {
        let groups = |epoch| self.batches(dataset, epoch).len().div_ceil(accumulate) as u64;
        (0..self.epochs).map(groups).sum()
    }
}

/// A batch and the position after it.
#[derive(Debug)]
pub struct Loaded {
    /// The batch.
    pub batch: HostBatch,
    /// Position after it.
    pub next: LoaderState,
}

type Item = Result<Loaded, DatasetError>;

/// Reads batches ahead on a thread of its own, at most a given number.
#[derive(Debug)]
pub struct Loader {
    batches: Option<Receiver<Item>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Starts reading at `state`, `prefetch` batches ahead.
    pub fn start(
        dataset: Arc<ManifestDataset>,
        plan: LoaderPlan,
        state: LoaderState,
        prefetch: usize,
    ) -> Self {
        let (sender, batches) = sync_channel(prefetch.max(1));
        let thread = std::thread::spawn(move || read_ahead(&dataset, &plan, state, &sender));
        Self { batches: Some(batches), thread: Some(thread) }
    }

    /// The next batch; `None` after the last epoch.
    pub fn next_batch(&mut self) -> Result<Option<Loaded>, DatasetError> {
        let Some(batches) = &self.batches else { return Ok(None) };
        match batches.recv() {
            Ok(item) => item.map(Some),
            // The sender is gone: finished, unless the thread panicked.
            Err(_) => {
                self.batches = None;
                match self.thread.take().map(JoinHandle::join) {
                    Some(Err(_)) => Err(DatasetError::Stopped),
                    _ => Ok(None),
                }
            }
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Closing the channel first ends a thread that waits for room in it.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_ahead(
    dataset: &ManifestDataset,
    plan: &LoaderPlan,
    from: LoaderState,
    sender: &SyncSender<Item>,
) {
    let mut reader = dataset.reader();
    for epoch in from.epoch..plan.epochs {
        let batches = plan.batches(dataset, epoch);
        let skip = if epoch == from.epoch { from.position as usize } else { 0 };
        for (at, batch) in batches.iter().enumerate().skip(skip) {
            let last = at + 1 == batches.len();
            let next = match last {
                true => LoaderState { epoch: epoch + 1, position: 0 },
                false => LoaderState { epoch, position: at as u64 + 1 },
            };
            let documents: Result<Vec<_>, _> = batch.iter().map(|&at| reader.read(at)).collect();
            let item = documents
                .and_then(|documents| Ok(collate(&documents)?))
                .map(|batch| Loaded { batch, next });
            let failed = item.is_err();
            if sender.send(item).is_err() || failed {
                return;
            }
        }
    }
}
