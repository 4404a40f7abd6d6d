//! Batches in the order of (seed, epoch), read ahead by threads, and where that order stands.
//! Knows no model.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use rayon::ThreadPool;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::collate::{HostBatch, collate, plan};
use crate::dataset::{DatasetError, ManifestDataset};
use crate::input::Rooms;

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
    /// Passes; a fraction ends within a pass.
    pub epochs: f64,
    /// Tokens of a batch.
    pub max_tokens: usize,
    /// Which of how many processes reads: batch `n` of an epoch belongs to process `n` modulo
    /// their number.
    pub share: (usize, usize),
}

impl LoaderPlan {
    /// The batches of an epoch as lists of sample indices.
    pub fn batches(&self, dataset: &ManifestDataset, epoch: u64) -> Vec<Vec<usize>> {
        let order = dataset.order(&self.indices, self.seed, epoch);
        let lengths: Vec<usize> = order.iter().map(|&at| dataset.samples()[at].tokens).collect();
        plan(&order, &lengths, self.max_tokens)
    }

    /// Groups of `accumulate` batches over all epochs, none of which spans two: at least one, at
    /// most `limit` if that is not 0. Epochs that the limit cuts off are not planned.
    pub fn total_steps(&self, dataset: &ManifestDataset, accumulate: usize, limit: u64) -> u64 {
        let limit = if limit > 0 { limit } else { u64::MAX };
        let groups = |epoch| self.batches(dataset, epoch).len().div_ceil(accumulate) as u64;
        let mut steps = 0;
        for epoch in 0..self.epochs as u64 {
            if steps >= limit {
                return limit;
            }
            steps += groups(epoch);
        }
        let rest = self.epochs.fract() * groups(self.epochs as u64) as f64;
        (steps + rest.round() as u64).clamp(1, limit)
    }
}

/// A batch and the position after it.
#[derive(Debug)]
pub struct Loaded<M = Vec<u8>> {
    /// The batch; `None` where it belongs to another process.
    pub batch: Option<HostBatch<M>>,
    /// Position after it.
    pub next: LoaderState,
    /// Seconds it took to read and lay out.
    pub seconds: f64,
}

type Item<M> = Result<Loaded<M>, DatasetError>;

/// Reads batches ahead on threads of its own, at most a given number.
#[derive(Debug)]
pub struct Loader<M = Vec<u8>> {
    batches: Option<Receiver<Item<M>>>,
    thread: Option<JoinHandle<()>>,
}

/// How a loader reads.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Batches ahead.
    pub prefetch: usize,
    /// Threads.
    pub threads: usize,
}

impl<M: AsRef<[u8]> + AsMut<[u8]> + Send + 'static> Loader<M> {
    /// Starts reading at `state` into memory of `rooms`.
    pub fn start<R: Rooms<Room = M>>(
        dataset: Arc<ManifestDataset>,
        plan: LoaderPlan,
        state: LoaderState,
        (reading, rooms): (Reading, R),
    ) -> Self {
        let (sender, batches) = sync_channel(reading.prefetch.max(1));
        let thread = std::thread::spawn(move || {
            let threads = rayon::ThreadPoolBuilder::new().num_threads(reading.threads.max(1));
            let outcome = match threads.build() {
                Ok(threads) => read_ahead(&dataset, &plan, state, (&threads, &rooms, &sender)),
                Err(error) => Err(DatasetError::Threads { reason: error.to_string() }),
            };
            if let Err(error) = outcome {
                let _ = sender.send(Err(error));
            }
        });
        Self { batches: Some(batches), thread: Some(thread) }
    }

    /// The next batch; `None` after the last epoch.
    pub fn next_batch(&mut self) -> Result<Option<Loaded<M>>, DatasetError> {
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

impl<M> Drop for Loader<M> {
    fn drop(&mut self) {
        // Closing the channel first ends a thread that waits for room in it.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_ahead<R: Rooms>(
    dataset: &ManifestDataset,
    plan: &LoaderPlan,
    from: LoaderState,
    (threads, rooms, sender): (&ThreadPool, &R, &SyncSender<Item<R::Room>>),
) -> Result<(), DatasetError> {
    let reader = dataset.reader();
    for epoch in from.epoch..plan.epochs.ceil() as u64 {
        let batches = plan.batches(dataset, epoch);
        let skip = if epoch == from.epoch { from.position as usize } else { 0 };
        for (at, batch) in batches.iter().enumerate().skip(skip) {
            let clock = Instant::now();
            let last = at + 1 == batches.len();
            let next = match last {
                true => LoaderState { epoch: epoch + 1, position: 0 },
                false => LoaderState { epoch, position: at as u64 + 1 },
            };
            if at % plan.share.1 != plan.share.0 {
                if sender.send(Ok(Loaded { batch: None, next, seconds: 0.0 })).is_err() {
                    return Ok(());
                }
                continue;
            }
            let documents: Vec<_> = threads.install(|| {
                batch.par_iter().map(|&at| reader.read(at)).collect::<Result<_, _>>()
            })?;
            let batch = collate(&documents, |bytes| Ok::<_, DatasetError>(rooms.take(bytes)?))?;
            let seconds = clock.elapsed().as_secs_f64();
            if sender.send(Ok(Loaded { batch: Some(batch), next, seconds })).is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}
