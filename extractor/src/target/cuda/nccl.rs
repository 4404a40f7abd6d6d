//! Sums across GPUs of one process: a thin wrapper over NCCL's C functions, whose errors name
//! operation, rank and code. Knows nothing of models.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kernels::cuda::cudarc::driver::{CudaEvent, CudaStream};
use kernels::cuda::cudarc::nccl::result::{self, NcclError, NcclStatus};
use kernels::cuda::cudarc::nccl::sys::{self, ncclDataType_t, ncclResult_t};
use kernels::cuda::{CudaError, Dtype};

use super::buffer::CudaBuffer;
use super::device::driver;
use crate::target::collective::Collective;
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
    /// Where values are computed and read.
    compute: Arc<CudaStream>,
    /// Where they are summed.
    stream: Arc<CudaStream>,
    /// Of each half: the values are there; the sum is.
    computed: [CudaEvent; 2],
    summed: [CudaEvent; 2],
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

    /// Connects `rank`, whose GPU is current on this thread; returns when all ranks are there.
    pub(super) fn connect(
        self: &Arc<Self>,
        rank: usize,
        compute: &Arc<CudaStream>,
    ) -> Result<NcclRank, TargetError> {
        let context = compute.context();
        let open = || {
            context.bind_to_thread().map_err(driver("make the context current"))?;
            let event = || context.new_event(None).map_err(driver("make an event"));
            let stream = context.new_stream().map_err(driver("make a stream"))?;
            Ok((stream, [event()?, event()?], [event()?, event()?]))
        };
        let (stream, computed, summed) = open().map_err(|source| TargetError::Cuda {
            rank,
            doing: "connect to NCCL",
            source,
        })?;
        let mut comm = std::ptr::null_mut();
        let (ranks, own) = (self.world_size as i32, rank as i32);
        // SAFETY: `comm` outlives the call, and every rank calls with the same id.
        let answer = unsafe { result::comm_init_rank(&mut comm, ranks, self.id, own) };
        check(rank, "ncclCommInitRank", answer)?;
        *lock(&self.comms[rank]) = Some(Comm(comm));
        let (group, compute) = (Arc::clone(self), Arc::clone(compute));
        Ok(NcclRank { group, rank, compute, stream, computed, summed })
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

    /// Lets `to` wait for what `from` has been given.
    fn order(
        &self,
        event: &CudaEvent,
        from: Option<&CudaStream>,
        to: Option<&CudaStream>,
    ) -> Result<(), TargetError> {
        let recorded = from.map_or(Ok(()), |stream| event.record(stream));
        let ordered = recorded.and_then(|()| to.map_or(Ok(()), |stream| stream.wait(event)));
        ordered.map_err(driver("order streams")).map_err(|source| TargetError::Cuda {
            rank: self.rank,
            doing: "sum across ranks",
            source,
        })
    }
}

impl Collective<CudaBuffer> for NcclRank {
    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn all_reduce(&mut self, values: &mut CudaBuffer) -> Result<(), TargetError> {
        self.start(0, values)?;
        self.finish(0)
    }

    fn start(&mut self, half: usize, values: &mut CudaBuffer) -> Result<(), TargetError> {
        self.order(&self.computed[half], Some(&self.compute), Some(&self.stream))?;
        let (address, len) = (values.address(), values.len());
        let kind = data_type(values.dtype());
        let sum = sys::ncclRedOp_t::ncclSum;
        let stream = self.stream.cu_stream().cast();
        self.call("ncclAllReduce", |comm| {
            let (from, to) = (address as *const _, address as *mut _);
            // SAFETY: the buffer has `len` values of this type, and work on it is in the order of
            // this stream.
            unsafe { result::all_reduce(from, to, len, kind, sum, comm, stream) }
        })?;
        self.order(&self.summed[half], Some(&self.stream), None)
    }

    fn finish(&mut self, half: usize) -> Result<(), TargetError> {
        self.order(&self.summed[half], None, Some(&self.compute))
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
        let error = check(3, "ncclAllReduce", answer).unwrap_err();
        let text = error.to_string();
        for part in ["rank 3", "ncclAllReduce", "ncclSystemError (2)", "/dev/shm"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.exit_code(), 75);
        assert!(check(0, "ncclAllReduce", Ok(NcclStatus::Success)).is_ok());
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
