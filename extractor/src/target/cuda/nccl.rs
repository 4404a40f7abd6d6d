//! Exchange of rows between GPUs of one process: one communicator a rank, and the end of the whole
//! group. Knows nothing of models.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use kernels::cuda::cudarc::driver::CudaStream;
use kernels::cuda::{Communicator, CudaError, Message, NcclId, Way, copy_on_device};

use super::buffer::CudaBuffer;
use super::device::driver;
use crate::target::collective::{Collective, Table, share};
use crate::target::error::TargetError;

/// What all ranks of a group share.
pub(super) struct NcclGroup {
    id: NcclId,
    /// The communicator of every rank, once it has one.
    comms: Vec<OnceLock<Communicator>>,
    ended: Mutex<Option<String>>,
}

/// One rank's end of a group.
pub(super) struct NcclRank {
    group: Arc<NcclGroup>,
    rank: usize,
    /// Where rows cross the ranks, in the order of what is done with them.
    stream: Arc<CudaStream>,
}

impl NcclGroup {
    /// A group of `world_size` ranks, not connected yet.
    pub(super) fn new(world_size: usize) -> Result<Arc<Self>, TargetError> {
        let id = NcclId::new().map_err(refused(0, "open NCCL"))?;
        let comms = (0..world_size).map(|_| OnceLock::new()).collect();
        Ok(Arc::new(Self { id, comms, ended: Mutex::new(None) }))
    }

    /// Connects `rank`, whose rows cross on `stream`; returns when all ranks are there.
    pub(super) fn connect(
        self: &Arc<Self>,
        rank: usize,
        stream: Arc<CudaStream>,
    ) -> Result<NcclRank, TargetError> {
        let wrong = || refused(rank, "connect to NCCL");
        let bound = stream.context().bind_to_thread();
        bound.map_err(driver("make the context current")).map_err(wrong())?;
        let comm = Communicator::connect(self.id, [rank, self.comms.len()]).map_err(wrong())?;
        // Every rank connects once.
        let _ = self.comms[rank].set(comm);
        Ok(NcclRank { group: Arc::clone(self), rank, stream })
    }

    /// Ends the group: work under way is given up, later work is refused with `reason`; the first
    /// reason stays.
    pub(super) fn end(&self, reason: &str) {
        self.ended().get_or_insert_with(|| reason.to_owned());
        self.comms.iter().filter_map(OnceLock::get).for_each(Communicator::abort);
    }

    fn ended(&self) -> MutexGuard<'_, Option<String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NcclRank {
    fn exchanging(&self) -> impl FnOnce(CudaError) -> TargetError + use<> {
        let rank = self.rank;
        move |source| TargetError::Cuda { rank, doing: "exchange rows with other ranks", source }
    }

    /// Starts messages to and from other ranks, all at once.
    fn exchange(&self, messages: &[Message]) -> Result<(), TargetError> {
        if let Some(reason) = self.group.ended().clone() {
            return Err(TargetError::CollectiveEnded { reason });
        }
        let Some(comm) = self.group.comms[self.rank].get() else { return Ok(()) };
        comm.exchange(messages, &self.stream).map_err(refused(self.rank, "exchange rows"))
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank;
        (0..self.group.comms.len()).filter(move |&rank| rank != own)
    }
}

/// Some rows of a buffer whose rows are `width` wide.
fn message(
    way: Way,
    buffer: &CudaBuffer,
    (rows, width): (Range<usize>, usize),
    peer: usize,
) -> Message {
    let dtype = buffer.dtype();
    let address = buffer.address() + (rows.start * width * dtype.size()) as u64;
    Message { way, address, len: rows.len() * width, dtype, peer }
}

impl Collective<CudaBuffer> for NcclRank {
    fn world_size(&self) -> usize {
        self.group.comms.len()
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
        let ranks = self.group.comms.len();
        let own = share(self.rank, ranks, rows).len();
        received.set_len(ranks * own * width).map_err(self.exchanging())?;
        let received = &*received;
        let messages: Vec<Message> = self
            .others()
            .flat_map(|peer| {
                let theirs = (share(peer, ranks, rows), width);
                let ours = (peer * own..(peer + 1) * own, width);
                [
                    message(Way::Send, parts, theirs, peer),
                    message(Way::Receive, received, ours, peer),
                ]
            })
            .collect();
        self.exchange(&messages)
    }

    fn gather(
        &mut self,
        tables: &mut [Table<'_, CudaBuffer>],
        rows: usize,
    ) -> Result<(), TargetError> {
        let ranks = self.group.comms.len();
        let own = share(self.rank, ranks, rows);
        let mut messages = Vec::new();
        for Table { own: mine, all, first, width } in tables {
            let (first, width) = (*first, *width);
            let size = width * all.dtype().size();
            let here = first + own.start..first + own.end;
            all.set_len((first + rows) * width).map_err(self.exchanging())?;
            if let Some(mine) = mine {
                let place = all.address() + (here.start * size) as u64;
                copy_on_device(&self.stream, place, mine.address(), own.len() * size)
                    .map_err(self.exchanging())?;
            }
            let all = &**all;
            messages.extend(self.others().flat_map(|peer| {
                let theirs = share(peer, ranks, rows);
                let theirs = (first + theirs.start..first + theirs.end, width);
                [
                    message(Way::Send, all, (here.clone(), width), peer),
                    message(Way::Receive, all, theirs, peer),
                ]
            }));
        }
        self.exchange(&messages)
    }

    fn set_deadline(&mut self, _deadline: Instant) {
        // Nothing waits here: the device does, with its own deadline.
    }
}

fn refused(rank: usize, doing: &'static str) -> impl FnOnce(CudaError) -> TargetError {
    move |source| match source {
        CudaError::Nccl { operation, code, meaning } => {
            TargetError::Nccl { rank, operation, code, meaning }
        }
        source => TargetError::Cuda { rank, doing, source },
    }
}
