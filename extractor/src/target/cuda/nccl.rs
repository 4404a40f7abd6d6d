//! Exchange of rows between GPUs of one process: a thin wrapper over NCCL's C functions, whose
//! errors name operation, rank and code. Knows nothing of models.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kernels::cuda::cudarc::driver::CudaStream;
use kernels::cuda::cudarc::nccl::result::{self, NcclError, NcclStatus};
use kernels::cuda::cudarc::nccl::sys::{self, ncclDataType_t, ncclResult_t};
use kernels::cuda::{CudaError, Dtype, copy_on_device};

use super::buffer::CudaBuffer;
use super::device::driver;
use crate::target::collective::{Collective, Table, share};
use crate::target::error::TargetError;

/// What all ranks of a group share.
pub(super) struct NcclGroup {
    id: sys::ncclUniqueId,
    world_size: usize,
    /// The communicator of every rank, once it has one and until the group ends.
    comms: Vec<Mutex<Option<Comm>>>,
    ended: Mutex<Option<String>>,
}

/// A communicator of NCCL.
struct Comm(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time: the mutex around it sees to it.
unsafe impl Send for Comm {}

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
        // SAFETY: opens and closes the library, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            let source = CudaError::MissingLibrary {
                library: "libnccl.so",
                hint: "more than one GPU needs NCCL: install libnccl2, or put a folder with \
                       libnccl.so (a link to libnccl.so.2 will do) on LD_LIBRARY_PATH",
            };
            return Err(TargetError::Cuda { rank: 0, doing: "open NCCL", source });
        }
        keep_multicast_off();
        let id = result::get_uniqueid().map_err(|error| refused(0, "ncclGetUniqueId", &error))?;
        let comms = (0..world_size).map(|_| Mutex::new(None)).collect();
        Ok(Arc::new(Self { id, world_size, comms, ended: Mutex::new(None) }))
    }

    /// Connects `rank`, whose rows cross on `stream`; returns when all ranks are there.
    pub(super) fn connect(
        self: &Arc<Self>,
        rank: usize,
        stream: Arc<CudaStream>,
    ) -> Result<NcclRank, TargetError> {
        let bound = stream.context().bind_to_thread();
        let bound = bound.map_err(driver("make the context current"));
        let doing = "connect to NCCL";
        bound.map_err(|source| TargetError::Cuda { rank, doing, source })?;
        let mut comm = std::ptr::null_mut();
        let (ranks, own) = (self.world_size as i32, rank as i32);
        // SAFETY: `comm` outlives the call, and every rank calls with the same id.
        let answer = unsafe { result::comm_init_rank(&mut comm, ranks, self.id, own) };
        check(rank, "ncclCommInitRank", answer)?;
        *lock(&self.comms[rank]) = Some(Comm(comm));
        Ok(NcclRank { group: Arc::clone(self), rank, stream })
    }

    /// Ends the group: work under way is given up, later work is refused with `reason`; the first
    /// reason stays.
    pub(super) fn end(&self, reason: &str) {
        lock(&self.ended).get_or_insert_with(|| reason.to_owned());
        for (rank, comm) in self.comms.iter().enumerate() {
            // A rank that is inside NCCL at this moment keeps its communicator.
            let Ok(mut comm) = comm.try_lock() else {
                tracing::warn!(rank, "the rank is inside NCCL and cannot be stopped");
                continue;
            };
            if let Some(Comm(comm)) = comm.take() {
                // SAFETY: taken out of its place, so nobody uses it again.
                let answer = unsafe { result::comm_abort(comm) };
                if let Err(error) = check(rank, "ncclCommAbort", answer) {
                    tracing::warn!(rank, %error, "communicator not given up");
                }
            }
        }
    }
}

impl NcclRank {
    fn exchanging(&self) -> impl FnOnce(CudaError) -> TargetError + use<> {
        let rank = self.rank;
        move |source| TargetError::Cuda { rank, doing: "exchange rows with other ranks", source }
    }

    /// Runs one operation of NCCL on this rank's communicator.
    fn call(
        &self,
        operation: &'static str,
        work: impl FnOnce(sys::ncclComm_t) -> Result<NcclStatus, NcclError>,
    ) -> Result<(), TargetError> {
        let comm = lock(&self.group.comms[self.rank]);
        match &*comm {
            Some(Comm(comm)) => check(self.rank, operation, work(*comm)),
            None => {
                let reason = lock(&self.group.ended).clone().unwrap_or_default();
                Err(TargetError::CollectiveEnded { reason })
            }
        }
    }

    /// Starts messages to and from other ranks, all at once.
    fn exchange(&self, messages: &[Message]) -> Result<(), TargetError> {
        let stream = self.stream.cu_stream().cast();
        self.call("ncclSend and ncclRecv", |comm| {
            result::group_start()?;
            let started =
                messages.iter().filter(|message| message.len > 0).try_for_each(|message| {
                    let Message { kind, address, len, dtype, peer } = *message;
                    let (kind_of, peer) = (data_type(dtype), peer as i32);
                    // SAFETY: the address has `len` values of this type; the stream keeps order.
                    unsafe {
                        match kind {
                            Kind::Send => {
                                result::send(address as *const _, len, kind_of, peer, comm, stream)
                            }
                            Kind::Receive => {
                                result::recv(address as *mut _, len, kind_of, peer, comm, stream)
                            }
                        }
                    }
                    .map(|_| ())
                });
            // The group is closed in any case.
            let ended = result::group_end();
            started.and(ended)
        })
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank;
        (0..self.group.world_size).filter(move |&rank| rank != own)
    }
}

/// Values to send to, or to receive from, another rank.
#[derive(Clone, Copy)]
struct Message {
    kind: Kind,
    address: u64,
    len: usize,
    dtype: Dtype,
    peer: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Send,
    Receive,
}

/// Some rows of a buffer whose rows are `width` wide.
fn message(
    kind: Kind,
    buffer: &CudaBuffer,
    (rows, width): (Range<usize>, usize),
    peer: usize,
) -> Message {
    let dtype = buffer.dtype();
    let address = buffer.address() + (rows.start * width * dtype.size()) as u64;
    Message { kind, address, len: rows.len() * width, dtype, peer }
}

impl Collective<CudaBuffer> for NcclRank {
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
        let own = share(self.rank, ranks, rows).len();
        received.set_len(ranks * own * width).map_err(self.exchanging())?;
        let received = &*received;
        let messages: Vec<Message> = self
            .others()
            .flat_map(|peer| {
                let theirs = (share(peer, ranks, rows), width);
                let ours = (peer * own..(peer + 1) * own, width);
                [
                    message(Kind::Send, parts, theirs, peer),
                    message(Kind::Receive, received, ours, peer),
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
        let ranks = self.group.world_size;
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
                    message(Kind::Send, all, (here.clone(), width), peer),
                    message(Kind::Receive, all, theirs, peer),
                ]
            }));
        }
        self.exchange(&messages)
    }

    fn set_deadline(&mut self, _deadline: Instant) {
        // Nothing waits here: the device does, with its own deadline.
    }
}

fn data_type(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F32 => ncclDataType_t::ncclFloat32,
    }
}

fn check(
    rank: usize,
    operation: &'static str,
    answer: Result<NcclStatus, NcclError>,
) -> Result<(), TargetError> {
    match answer {
        Ok(_) => Ok(()),
        Err(error) => Err(refused(rank, operation, &error)),
    }
}

fn refused(rank: usize, operation: &'static str, NcclError(code): &NcclError) -> TargetError {
    let meaning = match *code {
        ncclResult_t::ncclUnhandledCudaError => {
            "a CUDA call inside NCCL was refused; the log of NCCL_DEBUG=INFO says which"
        }
        ncclResult_t::ncclSystemError => {
            "the system refused; often /dev/shm is too small, or peer access is off"
        }
        ncclResult_t::ncclInternalError => {
            "NCCL found a fault in itself; NCCL_DEBUG=INFO says more"
        }
        ncclResult_t::ncclInvalidArgument => "an argument is wrong; this is a bug in the engine",
        ncclResult_t::ncclInvalidUsage => "NCCL is used wrongly; often two ranks name the same GPU",
        ncclResult_t::ncclRemoteError => "another rank has gone",
        ncclResult_t::ncclTimeout => "another rank did not answer in time",
        _ => "see NCCL's documentation of ncclResult_t",
    };
    let code = format!("{code:?} ({})", *code as u32);
    TargetError::Nccl { rank, operation, code, meaning }
}

/// Multicast over NVLink can put the GPUs of a shared host out of service.
fn keep_multicast_off() {
    const NAME: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: no rank has started yet, so no other thread reads the environment.
        unsafe { std::env::set_var(NAME, "0") };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_rank_operation_code_and_remedy() {
        let answer = Err(NcclError(ncclResult_t::ncclSystemError));
        let error = check(3, "ncclSend", answer).unwrap_err();
        let text = error.to_string();
        for part in ["rank 3", "ncclSend", "ncclSystemError (2)", "/dev/shm"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.exit_code(), 75);
        assert!(check(0, "ncclSend", Ok(NcclStatus::Success)).is_ok());
    }

    #[test]
    fn every_code_has_a_meaning_of_its_own() {
        let codes = [
            ncclResult_t::ncclUnhandledCudaError,
            ncclResult_t::ncclSystemError,
            ncclResult_t::ncclInternalError,
            ncclResult_t::ncclInvalidArgument,
            ncclResult_t::ncclInvalidUsage,
            ncclResult_t::ncclRemoteError,
            ncclResult_t::ncclTimeout,
        ];
        let meanings: std::collections::HashSet<&str> = codes
            .iter()
            .map(|&code| match refused(0, "x", &NcclError(code)) {
                TargetError::Nccl { meaning, .. } => meaning,
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(meanings.len(), codes.len());
    }
}
