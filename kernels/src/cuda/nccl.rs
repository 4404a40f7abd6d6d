//! Collective operations across GPUs: a thin wrapper over NCCL's C functions, whose errors name
//! operation, rank and code. Knows nothing of models, and not how ranks find one another.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclDataType_t, ncclResult_t};

use super::{CudaError, Dtype};

/// What all ranks of a group share; one of them makes it.
#[derive(Clone, Copy)]
pub struct NcclId(sys::ncclUniqueId);

impl NcclId {
    /// Bytes of an id.
    pub const BYTES: usize = 128;

    /// A new id. Opens the library.
    pub fn new() -> Result<Self, CudaError> {
        // SAFETY: opens and closes the library, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::MissingLibrary {
                library: "libnccl.so",
                hint: "more than one GPU needs NCCL: install libnccl2, or put a folder with \
                       libnccl.so (a link to libnccl.so.2 will do) on LD_LIBRARY_PATH",
            });
        }
        keep_multicast_off();
        result::get_uniqueid().map(Self).map_err(|error| refused(0, "ncclGetUniqueId", &error))
    }

    /// The id for another process.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0.internal.map(|byte| byte as u8)
    }

    /// The id from another process.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        keep_multicast_off();
        Self(sys::ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) })
    }
}

/// A communicator of NCCL.
struct Comm(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time: the mutex around it sees to it.
unsafe impl Send for Comm {}

/// Values on a device: address, number and type.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Address of the first value.
    pub address: u64,
    /// Number of values, without gaps.
    pub len: usize,
    /// Their type.
    pub dtype: Dtype,
}

/// One rank's end of a group. Every rank has to call the same operations in the same order; each
/// is enqueued on the stream that is given, and the spans stay alive until that has passed.
pub struct Communicator {
    rank: usize,
    ranks: usize,
    /// Empty once it was given up.
    comm: Mutex<Option<Comm>>,
}

impl Communicator {
    /// Connects `rank` of `ranks`, whose GPU is current on this thread; returns when all are there.
    pub fn connect(id: &NcclId, (rank, ranks): (usize, usize)) -> Result<Self, CudaError> {
        let mut comm = std::ptr::null_mut();
        // SAFETY: `comm` outlives the call, and every rank calls with the same id.
        let answer = unsafe { result::comm_init_rank(&mut comm, ranks as i32, id.0, rank as i32) };
        check(rank, "ncclCommInitRank", answer)?;
        Ok(Self { rank, ranks, comm: Mutex::new(Some(Comm(comm))) })
    }

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Gives up work under way; later operations are refused. A rank that is inside NCCL at this
    /// moment keeps its communicator: `false`.
    pub fn abort(&self) -> Result<bool, CudaError> {
        let mut comm = match self.comm.try_lock() {
            Ok(comm) => comm,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let Some(Comm(comm)) = comm.take() else { return Ok(true) };
        // SAFETY: taken out of its place, so nobody uses it again.
        let answer = unsafe { result::comm_abort(comm) };
        check(self.rank, "ncclCommAbort", answer).map(|()| true)
    }

    /// Replaces the values by their sum over all ranks.
    pub fn all_reduce(&self, values: Span, stream: &CudaStream) -> Result<(), CudaError> {
        let (kind, stream) = (data_type(values.dtype), stream.cu_stream().cast());
        self.call("ncclAllReduce", |comm| {
            let (from, to) = (values.address as *const _, values.address as *mut _);
            let sum = sys::ncclRedOp_t::ncclSum;
            // SAFETY: the span has `len` values of this type, and work on it is in the order of
            // this stream.
            unsafe { result::all_reduce(from, to, values.len, kind, sum, comm, stream) }
        })
    }

    /// Sums `values`, as many parts as ranks, over all ranks, and writes this rank's part of the
    /// sum to `part`.
    pub fn reduce_scatter(
        &self,
        values: Span,
        part: Span,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        self.fits("reduce_scatter", part, values)?;
        let (kind, stream) = (data_type(part.dtype), stream.cu_stream().cast());
        self.call("ncclReduceScatter", |comm| {
            let (from, to) = (values.address as *const _, part.address as *mut _);
            let sum = sys::ncclRedOp_t::ncclSum;
            // SAFETY: `fits` compared the spans; work on them is in the order of this stream.
            unsafe { result::reduce_scatter(from, to, part.len, kind, sum, comm, stream) }
        })
    }

    /// Writes every rank's `part`, one behind the other, to `values`.
    pub fn all_gather(
        &self,
        part: Span,
        values: Span,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        self.fits("all_gather", part, values)?;
        let (kind, stream) = (data_type(part.dtype), stream.cu_stream().cast());
        self.call("ncclAllGather", |comm| {
            let (from, to) = (part.address as *const _, values.address as *mut _);
            // SAFETY: `fits` compared the spans; work on them is in the order of this stream.
            unsafe { result::all_gather(from, to, part.len, kind, comm, stream) }
        })
    }

    fn fits(&self, operation: &str, part: Span, values: Span) -> Result<(), CudaError> {
        super::ensure(part.dtype == values.dtype && part.len * self.ranks == values.len, || {
            format!("{operation} of {} ranks with {values:?} and {part:?}", self.ranks)
        })
    }

    fn call(
        &self,
        operation: &'static str,
        work: impl FnOnce(sys::ncclComm_t) -> Result<NcclStatus, NcclError>,
    ) -> Result<(), CudaError> {
        let comm: MutexGuard<'_, Option<Comm>> =
            self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        match &*comm {
            Some(Comm(comm)) => check(self.rank, operation, work(*comm)),
            None => Err(refused(self.rank, operation, &NcclError(ncclResult_t::ncclRemoteError))),
        }
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
) -> Result<(), CudaError> {
    match answer {
        Ok(_) => Ok(()),
        Err(error) => Err(refused(rank, operation, &error)),
    }
}

fn refused(rank: usize, operation: &'static str, NcclError(code): &NcclError) -> CudaError {
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
        ncclResult_t::ncclInvalidArgument => "an argument is wrong; this is a bug",
        ncclResult_t::ncclInvalidUsage => "NCCL is used wrongly; often two ranks name the same GPU",
        ncclResult_t::ncclRemoteError => "another rank has gone",
        ncclResult_t::ncclTimeout => "another rank did not answer in time",
        _ => "see NCCL's documentation of ncclResult_t",
    };
    let code = format!("{code:?} ({})", *code as u32);
    CudaError::Nccl { rank, operation, code, meaning }
}

/// Multicast over NVLink can put the GPUs of a shared host out of service.
fn keep_multicast_off() {
    const NAME: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: no rank has started yet, so no other thread reads the environment.
        unsafe { std::env::set_var(NAME, "0") };
    }
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
                CudaError::Nccl { meaning, .. } => meaning,
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(meanings.len(), codes.len());
    }

    #[test]
    fn an_id_survives_the_way_to_another_process() {
        let bytes: [u8; NcclId::BYTES] = std::array::from_fn(|at| at as u8 * 2);
        assert_eq!(NcclId::from_bytes(bytes).to_bytes(), bytes);
    }
}
