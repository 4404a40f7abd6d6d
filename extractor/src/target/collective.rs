//! Exchange of rows between the ranks of a group. Knows nothing of models; on the CPU a group is
//! threads of one process.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::error::TargetError;

/// The collective operations of one rank, over device buffers `B`. All ranks call the same ones in
/// the same order, with equal numbers of rows. Of any rows, each rank owns the [`share`] that has
/// its number. What a rank has given may be written over by whatever the device is given after the
/// call.
pub(super) trait Collective<B>: Send {
    /// Ranks in the group.
    fn world_size(&self) -> usize;

    /// This rank.
    fn rank(&self) -> usize;

    /// Gives every rank its share of the rows of `parts`, [rows, width], and fills `received`,
    /// [ranks, own rows, width], with what the others gave; this rank's place in it is left alone.
    fn scatter(
        &mut self,
        parts: &B,
        received: &mut B,
        shape: [usize; 2],
    ) -> Result<(), TargetError>;

    /// Gives every rank this rank's share of `rows` rows of each table, and takes theirs.
    fn gather(&mut self, tables: &mut [Table<'_, B>], rows: usize) -> Result<(), TargetError>;

    /// From now on, waiting ends with an error at `deadline`.
    fn set_deadline(&mut self, deadline: Instant);
}

/// A table of which every rank has made its share of the rows.
#[derive(Debug)]
pub(super) struct Table<'a, B> {
    /// This rank's share, [own rows, width]; absent where it is in its place already.
    pub own: Option<&'a B>,
    /// Where all rows go, [first + rows, width].
    pub all: &'a mut B,
    /// The first of them.
    pub first: usize,
    /// Values a row.
    pub width: usize,
}

/// The rows, of `rows`, that a rank owns.
pub(super) fn share(rank: usize, ranks: usize, rows: usize) -> Range<usize> {
    rank * rows / ranks..(rank + 1) * rows / ranks
}

/// The group of one rank, which has nothing to exchange.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Solo;

impl<B> Collective<B> for Solo {
    fn world_size(&self) -> usize {
        1
    }

    fn rank(&self) -> usize {
        0
    }

    fn scatter(&mut self, _: &B, _: &mut B, _: [usize; 2]) -> Result<(), TargetError> {
        Ok(())
    }

    fn gather(&mut self, _: &mut [Table<'_, B>], _: usize) -> Result<(), TargetError> {
        Ok(())
    }

    fn set_deadline(&mut self, _deadline: Instant) {}
}

/// One rank of a group of CPU threads.
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
    /// What each rank gives.
    slots: Vec<RwLock<Vec<f32>>>,
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
        let shared = Arc::new(Shared {
            barrier: Mutex::default(),
            changed: Condvar::new(),
            slots: (0..world_size).map(|_| RwLock::default()).collect(),
        });
        let deadline = Instant::now() + Duration::from_secs(600);
        let ranks =
            (0..world_size).map(|rank| Self { rank, deadline, shared: Arc::clone(&shared) });
        (ranks.collect(), Ender(shared))
    }

    fn wait(&self) -> Result<(), TargetError> {
        let world_size = self.shared.slots.len();
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

    /// Shows `own` to the others, and `take`s what each rank shows.
    fn exchange(
        &self,
        own: &[f32],
        mut take: impl FnMut(usize, &[f32]) -> Result<(), TargetError>,
    ) -> Result<(), TargetError> {
        {
            let slot = self.shared.slots[self.rank].write();
            let mut slot = slot.unwrap_or_else(PoisonError::into_inner);
            slot.clear();
            slot.extend_from_slice(own);
        }
        self.wait()?;
        for (rank, slot) in self.shared.slots.iter().enumerate() {
            take(rank, &slot.read().unwrap_or_else(PoisonError::into_inner))?;
        }
        // Nobody shows the next before all have taken this.
        self.wait()
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

fn expect_values(rank: usize, found: usize, expected: usize) -> Result<(), TargetError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (format!("{found} values to exchange"), expected.to_string());
    Err(TargetError::Reply { rank, found, expected })
}

impl Collective<Vec<f32>> for Threads {
    fn world_size(&self) -> usize {
        self.shared.slots.len()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn scatter(
        &mut self,
        parts: &Vec<f32>,
        received: &mut Vec<f32>,
        [rows, width]: [usize; 2],
    ) -> Result<(), TargetError> {
        let ranks = self.shared.slots.len();
        let own = share(self.rank, ranks, rows);
        let size = own.len() * width;
        received.resize(ranks * size, 0.0);
        self.exchange(parts, |rank, part| {
            expect_values(rank, part.len(), rows * width)?;
            if rank != self.rank {
                received[rank * size..(rank + 1) * size]
                    .copy_from_slice(&part[own.start * width..own.end * width]);
            }
            Ok(())
        })
    }

    fn gather(
        &mut self,
        tables: &mut [Table<'_, Vec<f32>>],
        rows: usize,
    ) -> Result<(), TargetError> {
        let ranks = self.shared.slots.len();
        for Table { own, all, first, width } in tables {
            all.resize((*first + rows) * *width, 0.0);
            let place = share(self.rank, ranks, rows);
            let place = (*first + place.start) * *width..(*first + place.end) * *width;
            let own = own.map_or_else(|| all[place].to_vec(), Vec::clone);
            self.exchange(&own, |rank, part| {
                let place = share(rank, ranks, rows);
                expect_values(rank, part.len(), place.len() * *width)?;
                all[(*first + place.start) * *width..(*first + place.end) * *width]
                    .copy_from_slice(part);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }
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

    /// Rows do not divide by ranks, and fewer rows than ranks leave some without.
    #[test]
    fn every_row_reaches_its_owner_and_comes_back() {
        const WIDTH: usize = 3;
        for rows in [0, 1, 2, 3, 5, 7, 11] {
            let (ranks, _) = Threads::group(3);
            on_ranks(ranks, |rank, collective| {
                let value =
                    |rank: usize, row: usize, col: usize| (1000 * rank + 10 * row + col) as f32;
                let table = |rank| -> Vec<f32> {
                    (0..rows * WIDTH).map(|i| value(rank, i / WIDTH, i % WIDTH)).collect()
                };
                let mut received = Vec::new();
                collective.scatter(&table(rank), &mut received, [rows, WIDTH]).unwrap();
                let own = share(rank, 3, rows);
                let of = |from: usize| {
                    let size = own.len() * WIDTH;
                    received[from * size..(from + 1) * size].to_vec()
                };
                for from in (0..3).filter(|&from| from != rank) {
                    assert_eq!(of(from), table(from)[own.start * WIDTH..own.end * WIDTH]);
                }
                // Each rank's share of table 7 comes together behind two rows of something else.
                let shared = table(7)[own.start * WIDTH..own.end * WIDTH].to_vec();
                let mut all = vec![-1.0; 2 * WIDTH];
                let table_of = Table { own: Some(&shared), all: &mut all, first: 2, width: WIDTH };
                collective.gather(&mut [table_of], rows).unwrap();
                assert_eq!(all[2 * WIDTH..], table(7));
                assert_eq!(all[..2 * WIDTH], [-1.0; 2 * WIDTH]);
                // The same with the share in its place.
                all[2 * WIDTH..].fill(0.0);
                all[(2 + own.start) * WIDTH..(2 + own.end) * WIDTH].copy_from_slice(&shared);
                let in_place = Table { own: None, all: &mut all, first: 2, width: WIDTH };
                collective.gather(&mut [in_place], rows).unwrap();
                assert_eq!(all[2 * WIDTH..], table(7));
            });
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
            collective.scatter(&vec![1.0], &mut Vec::new(), [1, 1])
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
            collective.scatter(&vec![1.0], &mut Vec::new(), [1, 1])
        });
        drop(absent);
        assert!(matches!(results[0], Err(TargetError::CollectiveEnded { .. })), "{results:?}");
    }

    #[test]
    fn unequal_lengths_are_an_error() {
        let (ranks, ender) = Threads::group(2);
        let results = on_ranks(ranks, |rank, collective| {
            let rows = 2 + rank;
            let result = collective.scatter(&vec![1.0; rows], &mut Vec::new(), [rows, 1]);
            ender.end("a rank failed");
            result
        });
        assert!(results.iter().all(Result::is_err), "{results:?}");
    }
}
