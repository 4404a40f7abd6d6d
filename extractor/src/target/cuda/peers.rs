//! Exchange of rows between GPUs of one process by their copy engines, which leaves all
//! multiprocessors to products. Ranks tell each other on the host where their rows lie and which
//! event says that they are there; the GPUs do the waiting. Knows nothing of models.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kernels::cuda::cudarc::driver::{CudaEvent, CudaStream};
use kernels::cuda::{CudaError, copy_on_device, enable_peer_access};

use super::buffer::CudaBuffer;
use super::device::driver;
use crate::target::collective::{Collective, Table, share};
use crate::target::error::TargetError;

/// Posts of a rank that may be unread at a time. A rank posts a third one when all have posted the
/// second, which they do when they have read the first.
const POSTS: usize = 2;

/// What all ranks of a group share.
pub(super) struct PeerGroup {
    world_size: usize,
    board: Mutex<Board>,
    changed: Condvar,
}

#[derive(Default)]
struct Board {
    /// The last posts of every rank.
    posts: Vec<[Post; POSTS]>,
    /// The stream of every rank, once it is there.
    streams: Vec<Option<Arc<CudaStream>>>,
    ended: Option<String>,
}

/// Where a rank's rows lie at meeting `number`, and what says that they are there.
#[derive(Clone, Default)]
struct Post {
    number: u64,
    addresses: Vec<u64>,
    ready: Option<Arc<CudaEvent>>,
}

/// One rank's end of a group.
pub(super) struct PeerRank {
    group: Arc<PeerGroup>,
    rank: usize,
    stream: Arc<CudaStream>,
    /// Recorded in turn.
    ready: [Arc<CudaEvent>; POSTS],
    /// Meetings so far, two an exchange.
    number: u64,
    deadline: Instant,
}

impl PeerGroup {
    /// A group of `world_size` ranks, not connected yet.
    pub(super) fn new(world_size: usize) -> Arc<Self> {
        let board = Board {
            posts: vec![<[Post; POSTS]>::default(); world_size],
            streams: vec![None; world_size],
            ended: None,
        };
        Arc::new(Self { world_size, board: Mutex::new(board), changed: Condvar::new() })
    }

    /// Connects `rank`, whose rows cross on `stream`; returns when all ranks are there.
    pub(super) fn connect(
        self: &Arc<Self>,
        rank: usize,
        stream: Arc<CudaStream>,
    ) -> Result<PeerRank, TargetError> {
        let context = stream.context();
        let event = || context.new_event(None).map(Arc::new).map_err(driver("make an event"));
        let doing = "connect to the other GPUs";
        let wrong = |source| TargetError::Cuda { rank, doing, source };
        let ready = [event().map_err(wrong)?, event().map_err(wrong)?];
        let mut board = self.lock();
        board.streams[rank] = Some(Arc::clone(&stream));
        self.changed.notify_all();
        // Loading, which has no deadline, comes first.
        let deadline = Instant::now() + Duration::from_secs(365 * 24 * 3600);
        while board.streams.iter().any(Option::is_none) {
            board = self.wait(board, rank, deadline)?;
        }
        for peer in board.streams.iter().flatten() {
            enable_peer_access(context, peer.context()).map_err(wrong)?;
        }
        drop(board);
        Ok(PeerRank { group: Arc::clone(self), rank, stream, ready, number: 0, deadline })
    }

    /// Ends the group: present and future waits end with an error that gives `reason`; the first
    /// reason stays.
    pub(super) fn end(&self, reason: &str) {
        self.lock().ended.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change of the board.
    fn wait<'a>(
        &self,
        board: MutexGuard<'a, Board>,
        rank: usize,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, Board>, TargetError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout(board, left);
        let mut board = waited.unwrap_or_else(PoisonError::into_inner).0;
        if Instant::now() >= deadline {
            let late = || format!("rank {rank} waited for the others past the deadline");
            board.ended.get_or_insert_with(late);
            self.changed.notify_all();
        }
        match &board.ended {
            Some(reason) => Err(TargetError::CollectiveEnded { reason: reason.clone() }),
            None => Ok(board),
        }
    }
}

impl PeerRank {
    fn exchanging<T>(&self, result: Result<T, CudaError>) -> Result<T, TargetError> {
        let doing = "exchange rows with other GPUs";
        result.map_err(|source| TargetError::Cuda { rank: self.rank, doing, source })
    }

    /// Tells the others where this rank's rows lie, which the stream has made, and lets the stream
    /// wait for theirs. Returns where each rank's rows lie.
    fn meet(&mut self, addresses: Vec<u64>) -> Result<Vec<Vec<u64>>, TargetError> {
        self.number += 1;
        let (number, place) = (self.number, (self.number % POSTS as u64) as usize);
        let ready = &self.ready[place];
        self.exchanging(ready.record(&self.stream).map_err(driver("record an event")))?;
        let post = Post { number, addresses, ready: Some(Arc::clone(ready)) };
        let mut board = self.group.lock();
        board.posts[self.rank][place] = post;
        self.group.changed.notify_all();
        if let Some(reason) = &board.ended {
            return Err(TargetError::CollectiveEnded { reason: reason.clone() });
        }
        while board.posts.iter().any(|posts| posts[place].number != number) {
            board = self.group.wait(board, self.rank, self.deadline)?;
        }
        let posts: Vec<Post> = board.posts.iter().map(|posts| posts[place].clone()).collect();
        drop(board);
        for peer in self.others() {
            let Some(ready) = &posts[peer].ready else { continue };
            self.exchanging(self.stream.wait(ready).map_err(driver("order streams")))?;
        }
        Ok(posts.into_iter().map(|post| post.addresses).collect())
    }

    /// Lets the stream wait until the others have taken this rank's rows: they may be written over
    /// after that, and often are at once (keys are rotated in place).
    fn until_taken(&mut self) -> Result<(), TargetError> {
        self.meet(Vec::new()).map(drop)
    }

    /// The other ranks, each rank's next one first, so that no GPU is asked by all at once.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.group.world_size);
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    /// Copies `rows` of another rank's rows at `source` to `target`, which are `size` bytes each.
    fn copy(
        &self,
        target: u64,
        (source, rows): (u64, Range<usize>),
        size: usize,
    ) -> Result<(), TargetError> {
        let source = source + (rows.start * size) as u64;
        self.exchanging(copy_on_device(&self.stream, target, source, rows.len() * size))
    }
}

impl Collective<CudaBuffer> for PeerRank {
    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn scatter(
        &mut self,
        parts: &CudaBuffer,
        received: &mut CudaBuffer,
        [rows, width]: [usize; 2],
    ) -> Result<(), TargetError> {
        let ranks = self.group.world_size;
        let own = share(self.rank, ranks, rows);
        self.exchanging(received.set_len(ranks * own.len() * width))?;
        let size = width * parts.dtype().size();
        let places = self.meet(vec![parts.address()])?;
        for peer in self.others() {
            let target = received.address() + (peer * own.len() * size) as u64;
            let source = places[peer].first().copied().unwrap_or(0);
            self.copy(target, (source, own.clone()), size)?;
        }
        self.until_taken()
    }

    fn gather(
        &mut self,
        tables: &mut [Table<'_, CudaBuffer>],
        rows: usize,
    ) -> Result<(), TargetError> {
        let ranks = self.group.world_size;
        let here = share(self.rank, ranks, rows);
        let mut addresses = Vec::with_capacity(tables.len());
        for Table { own, all, first, width } in tables.iter_mut() {
            self.exchanging(all.set_len((*first + rows) * *width))?;
            let size = *width * all.dtype().size();
            let place = all.address() + ((*first + here.start) * size) as u64;
            if let Some(own) = own {
                self.copy(place, (own.address(), 0..here.len()), size)?;
            }
            addresses.push(place);
        }
        let places = self.meet(addresses)?;
        for (index, Table { all, first, width, .. }) in tables.iter().enumerate() {
            let size = width * all.dtype().size();
            for peer in self.others() {
                let theirs = share(peer, ranks, rows);
                let target = all.address() + ((first + theirs.start) * size) as u64;
                let source = places[peer].get(index).copied().unwrap_or(0);
                self.copy(target, (source, 0..theirs.len()), size)?;
            }
        }
        self.until_taken()
    }

    fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }
}

#[cfg(test)]
mod tests {
    use kernels::cuda::{DeviceBuffer, DeviceVector, Dtype, context, download, upload};

    use super::*;

    /// The second rank gives a row and changes its end at once, long before a copy gets there.
    #[test]
    #[ignore = "needs a GPU"]
    fn what_was_given_may_be_written_over() {
        const WIDTH: usize = 1 << 26;
        const END: usize = 1 << 16;
        let group = PeerGroup::new(2);
        let gathered = |rank: usize| {
            let context = context(0).unwrap();
            context.bind_to_thread().unwrap();
            let stream = context.new_stream().unwrap();
            let mut peer = group.connect(rank, Arc::clone(&stream)).unwrap();
            let mut all = CudaBuffer::new(&context, Dtype::F32, Some(WIDTH)).unwrap();
            all.set_len(WIDTH).unwrap();
            upload(&stream, all.address(), &vec![rank as f32; WIDTH]).unwrap();
            let other = DeviceBuffer::from_slice(&stream, &vec![7f32; END]).unwrap();
            let table = Table { own: None, all: &mut all, first: 0, width: WIDTH };
            peer.gather(&mut [table], 1).unwrap();
            if rank == 1 {
                let end = all.address() + 4 * (WIDTH - END) as u64;
                copy_on_device(&stream, end, other.address(), 4 * END).unwrap();
            }
            stream.synchronize().unwrap();
            download(&stream, DeviceVector::<f32>::new(all.address(), WIDTH)).unwrap()
        };
        std::thread::scope(|scope| {
            let giver = scope.spawn(|| gathered(1));
            let taken = gathered(0);
            assert_eq!(taken.iter().position(|&value| value != 1.0), None);
            giver.join().unwrap();
        });
    }

    #[test]
    fn a_missing_rank_ends_the_wait_at_the_deadline_and_the_first_reason_stays() {
        let group = PeerGroup::new(2);
        let waited = group.wait(group.lock(), 1, Instant::now());
        let Err(TargetError::CollectiveEnded { reason }) = waited.map(drop) else { panic!() };
        assert!(reason.contains("rank 1"), "{reason}");
        group.end("rank 0 is gone");
        let ended = group.lock().ended.clone().unwrap();
        assert!(ended.contains("past the deadline"), "{ended}");
    }
}
