//! Sums across the ranks of a group. Knows nothing of models; a group is threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::error::TargetError;

/// The collective operations of one rank, over device buffers `B`.
pub(super) trait Collective<B>: Send {
    /// Ranks in the group.
    fn world_size(&self) -> usize;

    /// Replaces `values` on every rank by the sum over all ranks, the same bits everywhere. All
    /// ranks must call it with equal lengths.
    fn all_reduce(&mut self, values: &mut B) -> Result<(), TargetError>;

    /// Starts [`Collective::all_reduce`] for one half of a batch. The values may be read, and the
    /// next sum of that half started, after [`Collective::finish`].
    fn start(&mut self, _half: usize, values: &mut B) -> Result<(), TargetError> {
        self.all_reduce(values)
    }

    /// Lets what the device does next see the sum that was started for `half`.
    fn finish(&mut self, _half: usize) -> Result<(), TargetError> {
        Ok(())
    }

    /// From now on, waiting ends with an error at `deadline`.
    fn set_deadline(&mut self, deadline: Instant);
}

/// The group of one rank: sums are the values themselves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Solo;

impl<B> Collective<B> for Solo {
    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _values: &mut B) -> Result<(), TargetError> {
        Ok(())
    }

    fn set_deadline(&mut self, _deadline: Instant) {}
}

/// One rank of a group of CPU threads. Partial sums are added in rank order, so results do not
/// depend on which thread came first.
#[derive(Debug)]
pub(super) struct Threads {
    rank: usize,
    deadline: Instant,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    barrier: Mutex<Barrier>,
    changed: Condvar,
    partials: Vec<RwLock<Vec<f32>>>,
    sums: Vec<RwLock<Vec<f32>>>,
}

#[derive(Debug, Default)]
struct Barrier {
    arrived: usize,
    generation: u64,
    ended: Option<String>,
}

/// Ends a group from outside, so that no rank waits for one that is gone.
#[derive(Clone, Debug)]
pub(super) struct Ender(Arc<Shared>);

impl Threads {
    /// The ranks of a group of `world_size`, and the handle that ends it.
    pub(super) fn group(world_size: usize) -> (Vec<Self>, Ender) {
        let slots = || (0..world_size).map(|_| RwLock::default()).collect();
        let shared = Arc::new(Shared {
            barrier: Mutex::default(),
            changed: Condvar::new(),
            partials: slots(),
            sums: slots(),
        });
        let deadline = Instant::now() + Duration::from_secs(600);
        let ranks =
            (0..world_size).map(|rank| Self { rank, deadline, shared: Arc::clone(&shared) });
        (ranks.collect(), Ender(shared))
    }

    fn wait(&self) -> Result<(), TargetError> {
        let world_size = self.shared.partials.len();
        let mut barrier = self.shared.lock();
        let generation = barrier.generation;
        barrier.arrived += 1;
        if barrier.arrived == world_size {
            barrier.arrived = 0;
            barrier.generation += 1;
            self.shared.changed.notify_all();
        }
        loop {
            if let Some(reason) = &barrier.ended {
                return Err(TargetError::CollectiveEnded { reason: reason.clone() });
            }
            if barrier.generation != generation {
                return Ok(());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("rank {} waited for the others past the deadline", self.rank);
                barrier.ended = Some(reason);
                self.shared.changed.notify_all();
                continue;
            }
            let waited = self.shared.changed.wait_timeout(barrier, left);
            barrier = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Barrier> {
        self.barrier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ender {
    /// Every present and future wait of the group ends with an error that gives `reason`; the first
    /// reason stays.
    pub(super) fn end(&self, reason: &str) {
        self.0.lock().ended.get_or_insert_with(|| reason.to_owned());
        self.0.changed.notify_all();
    }
}

impl Collective<Vec<f32>> for Threads {
    fn world_size(&self) -> usize {
        self.shared.partials.len()
    }

    fn all_reduce(&mut self, values: &mut Vec<f32>) -> Result<(), TargetError> {
        let world_size = self.shared.partials.len();
        let len = values.len();
        std::mem::swap(&mut *write(&self.shared.partials[self.rank]), values);
        self.wait()?;
        let part = |rank: usize| rank * len / world_size..(rank + 1) * len / world_size;
        {
            let own = part(self.rank);
            let mut sum = write(&self.shared.sums[self.rank]);
            sum.clear();
            sum.resize(own.len(), 0.0);
            for (rank, partial) in self.shared.partials.iter().enumerate() {
                let partial = read(partial);
                let Some(partial) = partial.get(own.clone()).filter(|_| partial.len() == len)
                else {
                    return Err(TargetError::Reply {
                        rank,
                        found: format!("{} values to sum", partial.len()),
                        expected: format!("{len}"),
                    });
                };
                sum.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
            }
        }
        self.wait()?;
        values.resize(len, 0.0);
        for (rank, sum) in self.shared.sums.iter().enumerate() {
            values[part(rank)].copy_from_slice(&read(sum));
        }
        Ok(())
    }

    fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }
}

fn read(slot: &RwLock<Vec<f32>>) -> std::sync::RwLockReadGuard<'_, Vec<f32>> {
    slot.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(slot: &RwLock<Vec<f32>>) -> std::sync::RwLockWriteGuard<'_, Vec<f32>> {
    slot.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_ranks<T: Send>(
        ranks: Vec<Threads>,
        work: impl Fn(usize, &mut Threads) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let handles: Vec<_> = ranks
                .into_iter()
                .enumerate()
                .map(|(rank, mut collective)| {
                    let work = &work;
                    scope.spawn(move || work(rank, &mut collective))
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        })
    }

    /// (1e8 + 1) - 1e8 is 0 in f32 but 1e8 - 1e8 + 1 is 1: only one order gives this sum.
    #[test]
    fn sums_are_taken_in_rank_order_and_repeat() {
        let (ranks, _) = Threads::group(3);
        let sums = on_ranks(ranks, |rank, collective| {
            (0..50)
                .map(|round| {
                    let value = [1e8, -1e8, 1.0][rank];
                    let mut values = vec![value; 5 + round];
                    collective.all_reduce(&mut values).unwrap();
                    values
                })
                .collect::<Vec<_>>()
        });
        for rounds in sums {
            for (round, values) in rounds.into_iter().enumerate() {
                assert_eq!(values, vec![1.0; 5 + round]);
            }
        }
    }

    #[test]
    fn ending_the_group_releases_the_ranks_that_wait() {
        let (mut ranks, ender) = Threads::group(3);
        let absent = ranks.pop();
        let results = on_ranks(ranks, |rank, collective| {
            if rank == 0 {
                ender.end("rank 2 is gone");
            }
            collective.all_reduce(&mut vec![1.0])
        });
        drop(absent);
        for result in results {
            let Err(TargetError::CollectiveEnded { reason }) = result else { panic!("{result:?}") };
            assert_eq!(reason, "rank 2 is gone");
        }
    }

    #[test]
    fn a_missing_rank_ends_the_others_at_the_deadline() {
        let (mut ranks, _) = Threads::group(2);
        let absent = ranks.pop();
        let results = on_ranks(ranks, |_, collective| {
            Collective::<Vec<f32>>::set_deadline(collective, Instant::now());
            collective.all_reduce(&mut vec![1.0])
        });
        drop(absent);
        assert!(matches!(results[0], Err(TargetError::CollectiveEnded { .. })), "{results:?}");
    }

    #[test]
    fn unequal_lengths_are_an_error() {
        let (ranks, ender) = Threads::group(2);
        let results = on_ranks(ranks, |rank, collective| {
            let result = collective.all_reduce(&mut vec![1.0; 2 + rank]);
            ender.end("a rank failed");
            result
        });
        assert!(results.iter().all(Result::is_err), "{results:?}");
    }
}
