//! The order of streams in a forward on several ranks, checked without a GPU. [`Watched`] computes
//! on the CPU and keeps account of which stream uses which values when: two uses of the same values
//! on two streams, one of them a write, must be ordered by marks and joins.

mod ops;

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use shared::LayerIndex;

use self::ops::Watched;
use super::{ForwardRequest, Model, Parts, Wanted};
use crate::target::CacheId;
use crate::target::collective::{Collective, Table, Threads, share};
use crate::target::error::TargetError;
use crate::target::ops::Ops;
use crate::target::options::EngineOptions;
use crate::target::plan::RankPlan;
use crate::target::source::Source;
use crate::target::spec::TargetSpec;
use crate::target::weights::Checkpoint;

const COMPUTE: usize = 0;
const SIDE: usize = 1;

/// How much of each stream's work is known to be done where a stream stands.
type Seen = [u64; 2];

/// What each stream is known to have waited for.
#[derive(Debug, Default)]
struct Account {
    /// The stream that work goes to.
    current: usize,
    seen: [Seen; 2],
    marked: [Seen; 2],
    done: [Seen; 2],
    doing: &'static str,
    races: Vec<String>,
}

/// A use of some values by one stream.
#[derive(Debug)]
struct Use {
    values: Range<usize>,
    stream: usize,
    time: u64,
    writes: bool,
    doing: &'static str,
}

/// Values and who used them.
#[derive(Debug, Default)]
struct Buffer {
    name: &'static str,
    values: Vec<f32>,
    uses: RefCell<Vec<Use>>,
}

/// All of a buffer, rows that a product adds for its plans included.
const ALL: Range<usize> = 0..usize::MAX;

impl Account {
    /// The current stream is given something to do.
    fn start(&mut self, doing: &'static str) {
        self.seen[self.current][self.current] += 1;
        self.doing = doing;
    }

    fn reads(&mut self, buffer: &Buffer, values: Range<usize>) {
        self.uses(buffer, values, false);
    }

    fn writes(&mut self, buffer: &Buffer, values: Range<usize>) {
        self.uses(buffer, values, true);
    }

    fn uses(&mut self, buffer: &Buffer, values: Range<usize>, writes: bool) {
        if values.is_empty() {
            return;
        }
        let (stream, doing) = (self.current, self.doing);
        let mut uses = buffer.uses.borrow_mut();
        for earlier in uses.iter() {
            let meets = earlier.values.start < values.end && values.start < earlier.values.end;
            let ordered = earlier.time <= self.seen[stream][earlier.stream];
            if meets && (writes || earlier.writes) && !ordered {
                let (name, other, place) = (buffer.name, earlier.doing, &earlier.values);
                self.races.push(format!("{doing} {values:?} of {name}, {other} {place:?}"));
            }
        }
        if writes {
            let covers = |part: &Range<usize>| values.start <= part.start && part.end <= values.end;
            uses.retain(|earlier| !covers(&earlier.values));
        }
        uses.push(Use { values, stream, time: self.seen[stream][stream], writes, doing });
    }

    fn mark(&mut self, half: usize) {
        self.marked[half] = self.seen[COMPUTE];
    }

    fn aside(&mut self, half: usize) {
        self.current = SIDE;
        wait(&mut self.seen[SIDE], self.marked[half]);
    }

    fn abreast(&mut self, half: usize) {
        self.current = COMPUTE;
        self.done[half] = self.seen[SIDE];
    }

    fn join(&mut self, half: usize) {
        wait(&mut self.seen[COMPUTE], self.done[half]);
    }
}

fn wait(seen: &mut Seen, event: Seen) {
    for (seen, event) in seen.iter_mut().zip(event) {
        *seen = event.max(*seen);
    }
}

/// The account of a rank, shared by its device and its end of the collective.
#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Account>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap()
    }

    fn start(&self, doing: &'static str) -> MutexGuard<'_, Account> {
        let mut account = self.lock();
        account.start(doing);
        account
    }
}

/// A rank whose rows cross on the side stream, in the order of what is asked for.
struct WatchedRank {
    threads: Threads,
    account: Shared,
}

impl Collective<Buffer> for WatchedRank {
    fn world_size(&self) -> usize {
        Collective::<Vec<f32>>::world_size(&self.threads)
    }

    fn rank(&self) -> usize {
        Collective::<Vec<f32>>::rank(&self.threads)
    }

    fn scatter(
        &mut self,
        parts: &Buffer,
        received: &mut Buffer,
        [rows, width]: [usize; 2],
    ) -> Result<(), TargetError> {
        let mut account = self.account.start("scatter");
        assert_eq!(account.current, SIDE);
        account.reads(parts, 0..rows * width);
        account.writes(received, ALL);
        drop(account);
        self.threads.scatter(&parts.values, &mut received.values, [rows, width])
    }

    fn gather(&mut self, tables: &mut [Table<'_, Buffer>], rows: usize) -> Result<(), TargetError> {
        let (rank, ranks) = (self.rank(), self.world_size());
        let mut account = self.account.start("gather");
        assert_eq!(account.current, SIDE);
        for Table { own, all, first, width } in tables.iter() {
            for of in 0..ranks {
                let rows = share(of, ranks, rows);
                let place = (first + rows.start) * width..(first + rows.end) * width;
                match own {
                    None if of == rank => account.reads(all, place),
                    Some(own) if of == rank => {
                        account.reads(own, 0..place.len());
                        account.writes(all, place);
                    }
                    _ => account.writes(all, place),
                }
            }
        }
        drop(account);
        let plain = |Table { own, all, first, width }| Table {
            own: own.map(|own: &Buffer| &own.values),
            all: &mut all.values,
            first,
            width,
        };
        let mut plain: Vec<_> = tables
            .iter_mut()
            .map(|table| {
                let Table { own, all, first, width } = table;
                plain(Table { own: *own, all: &mut **all, first: *first, width: *width })
            })
            .collect();
        self.threads.gather(&mut plain, rows)
    }

    fn set_deadline(&mut self, deadline: Instant) {
        Collective::<Vec<f32>>::set_deadline(&mut self.threads, deadline);
    }
}

/// Batches of two halves after one another, of one, of fewer rows than ranks, and in a cache.
fn requests() -> Vec<ForwardRequest> {
    let wanted = Wanted {
        layers: vec![LayerIndex(0), LayerIndex(2), LayerIndex(4)],
        embeddings: true,
        normed: true,
        logits: true,
        routers: true,
        ..Wanted::default()
    };
    let request = |cu_seqlens: &[usize], cache| {
        let tokens = *cu_seqlens.last().unwrap() as u32;
        let (cu_seqlens, wanted) = (cu_seqlens.to_vec(), wanted.clone());
        let ids = (0..tokens).map(|id| 7 * id % 300).collect();
        ForwardRequest { ids, cu_seqlens, cache, wanted, overlap: true }
    };
    let cache = CacheId(1);
    let states = Wanted { layers: vec![LayerIndex(1)], ..Wanted::default() };
    vec![
        request(&[0, 9, 14, 21], None),
        request(&[0, 6], None),
        request(&[0, 1, 2], None),
        ForwardRequest { wanted: states, ..request(&[0, 5, 11], None) },
        request(&[0, 4], Some((cache, 0))),
        request(&[0, 3], Some((cache, 2))),
        request(&[0, 12, 14], None),
    ]
}

/// What was not ordered on any of `tp` ranks.
fn races(model: &str, tp: usize) -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
    let spec = TargetSpec::read(&dir).unwrap();
    let options = EngineOptions { tp, ..EngineOptions::new(&dir) };
    let plans = options.plans(&spec).unwrap();
    let source = Source::Checkpoint(Checkpoint::open(&dir).unwrap());
    let run = |plan: &RankPlan, threads: Threads| {
        let account = Shared::default();
        let parts = Parts {
            ops: Watched::new(account.clone()),
            collective: Box::new(WatchedRank { threads, account: account.clone() }),
            source: &source,
            spec: &spec,
            plan: plan.clone(),
            qa_norm_eps: options.qa_norm_eps,
        };
        let mut model = Model::load(parts).unwrap();
        for request in requests() {
            model.forward(&request).unwrap();
        }
        std::mem::take(&mut account.lock().races)
    };
    std::thread::scope(|scope| {
        let (ranks, _) = Threads::group(tp);
        let ranks = plans.iter().zip(ranks);
        let threads: Vec<_> =
            ranks.map(|(plan, threads)| scope.spawn(|| run(plan, threads))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn streams_are_ordered_where_they_use_the_same_values() {
    for model in ["models/nano-kimi", "tests/fixtures/tiny-odd", "tests/fixtures/stories260k"] {
        for tp in [2, 4] {
            let races = races(model, tp);
            let first = races.first();
            assert!(races.is_empty(), "{model} on {tp}: {} races, {first:?}", races.len());
        }
    }
}

#[test]
fn a_missing_mark_and_a_missing_join_are_found() {
    let found = |marks: bool, joins: bool| {
        let account = Shared::default();
        let mut ops = Watched::new(account.clone());
        let mut buffer = Buffer::default();
        ops.zeros(&mut buffer, 8).unwrap();
        if marks {
            ops.mark(0).unwrap();
        }
        ops.aside(0).unwrap();
        ops.zeros(&mut buffer, 8).unwrap();
        ops.abreast(0).unwrap();
        if joins {
            ops.join(0).unwrap();
        }
        ops.download(&buffer, 0..4).unwrap();
        account.lock().races.len()
    };
    assert_eq!([found(true, true), found(false, true), found(true, false)], [0, 1, 1]);
}
