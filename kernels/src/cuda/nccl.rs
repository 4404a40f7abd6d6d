//! Sums and copies across GPUs: a thin wrapper over NCCL's C functions, one communicator a rank,
//! whose errors name operation and code. Knows nothing of models.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclDataType_t, ncclResult_t};

use super::views::{DeviceMatrix, Dtype};
use super::{CudaError, ensure};

/// Bytes of [`NcclId`].
pub const NCCL_ID_BYTES: usize = 128;

/// Names a group of ranks; one rank makes it, all others are told.
#[derive(Clone, Copy)]
pub struct NcclId(sys::ncclUniqueId);

/// One rank's end of a group of GPUs. It is not closed when dropped: NCCL waits for the other ranks
/// then, and the end of the process closes it as well.
pub struct Communicator {
    comm: Mutex<Option<Comm>>,
    ranks: usize,
}

/// Values to send to another rank, or to receive from it.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// Which of both.
    pub way: Way,
    /// Address of the first value; the values have no gaps.
    pub address: u64,
    /// Number of values.
    pub len: usize,
    /// Their type.
    pub dtype: Dtype,
    /// The other rank.
    pub peer: usize,
}

/// Which way a message goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// To the other rank.
    Send,
    /// From it.
    Receive,
}

struct Comm(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time: the mutex around it sees to it.
unsafe impl Send for Comm {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl NcclId {
    /// A new group. Says what to install where NCCL is missing.
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
        result::get_uniqueid().map(Self).map_err(|error| refused("ncclGetUniqueId", &error))
    }

    /// The id as it is sent to other processes.
    pub fn to_bytes(self) -> [u8; NCCL_ID_BYTES] {
        self.0.internal.map(|byte| byte as u8)
    }

    /// The id another process has sent.
    pub fn from_bytes(bytes: [u8; NCCL_ID_BYTES]) -> Self {
        Self(sys::ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) })
    }
}

impl Communicator {
    /// Connects `rank` of `ranks`, whose GPU is current on this thread; returns when all are there.
    pub fn connect(id: NcclId, [rank, ranks]: [usize; 2]) -> Result<Self, CudaError> {
        keep_multicast_off();
        let mut comm = std::ptr::null_mut();
        // SAFETY: `comm` outlives the call, and every rank calls with the same id.
        let answer = unsafe { result::comm_init_rank(&mut comm, ranks as i32, id.0, rank as i32) };
        check("ncclCommInitRank", answer)?;
        Ok(Self { comm: Mutex::new(Some(Comm(comm))), ranks })
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Sums `values` of all ranks in place.
    pub fn all_reduce(&self, values: &DeviceMatrix, stream: &CudaStream) -> Result<(), CudaError> {
        let count = packed(values)?;
        self.call("ncclAllReduce", |comm| {
            let (from, to) = (values.address as *const _, values.address as *mut _);
            let kind = data_type(values.dtype);
            // SAFETY: the view has `count` values of this type; work on them is in stream order.
            unsafe { result::all_reduce(from, to, count, kind, SUM, comm, raw(stream)) }
        })
    }

    /// Sums `all [ranks * n, columns]` of all ranks; `own [n, columns]` gets this rank's part.
    pub fn reduce_scatter(
        &self,
        own: &DeviceMatrix,
        all: &DeviceMatrix,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let count = self.parts(own, all)?;
        self.call("ncclReduceScatter", |comm| {
            let (from, to) = (all.address as *const _, own.address as *mut _);
            let kind = data_type(all.dtype);
            // SAFETY: `own` has `count` values and `all` those of every rank, in stream order.
            unsafe { result::reduce_scatter(from, to, count, kind, SUM, comm, raw(stream)) }
        })
    }

    /// Puts the `own [n, columns]` of all ranks into `all [ranks * n, columns]`, by rank.
    pub fn all_gather(
        &self,
        own: &DeviceMatrix,
        all: &DeviceMatrix,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let count = self.parts(own, all)?;
        self.call("ncclAllGather", |comm| {
            let (from, to) = (own.address as *const _, all.address as *mut _);
            let kind = data_type(all.dtype);
            // SAFETY: `own` has `count` values and `all` room for every rank's, in stream order.
            unsafe { result::all_gather(from, to, count, kind, comm, raw(stream)) }
        })
    }

    /// Sends and receives between ranks, all at once; every message has its counterpart on the
    /// other rank. Messages without values are left out.
    pub fn exchange(&self, messages: &[Message], stream: &CudaStream) -> Result<(), CudaError> {
        self.call("ncclSend and ncclRecv", |comm| {
            result::group_start()?;
            let started =
                messages.iter().filter(|message| message.len > 0).try_for_each(|message| {
                    let Message { way, address, len, dtype, peer } = *message;
                    let (kind, peer, stream) = (data_type(dtype), peer as i32, raw(stream));
                    // SAFETY: the address has `len` values of this type until then.
                    let started = unsafe {
                        match way {
                            Way::Send => {
                                result::send(address as *const _, len, kind, peer, comm, stream)
                            }
                            Way::Receive => {
                                result::recv(address as *mut _, len, kind, peer, comm, stream)
                            }
                        }
                    };
                    started.map(drop)
                });
            // The group is closed in any case.
            let ended = result::group_end();
            started.and(ended)
        })
    }

    /// Gives up the work under way; later calls are refused.
    pub fn abort(&self) {
        let Ok(mut comm) = self.comm.try_lock() else {
            tracing::warn!("a rank is inside NCCL and cannot be stopped");
            return;
        };
        if let Some(Comm(comm)) = comm.take() {
            // SAFETY: taken out of its place, so nobody uses it again.
            if let Err(error) = check("ncclCommAbort", unsafe { result::comm_abort(comm) }) {
                tracing::warn!(%error, "communicator not given up");
            }
        }
    }

    fn call(
        &self,
        operation: &'static str,
        work: impl FnOnce(sys::ncclComm_t) -> Result<NcclStatus, NcclError>,
    ) -> Result<(), CudaError> {
        let comm = lock(&self.comm);
        let Some(Comm(comm)) = &*comm else {
            return Err(CudaError::shape(format!("{operation} on a group that has ended")));
        };
        check(operation, work(*comm))
    }

    /// Values of `own`, of which `all` must hold one part a rank.
    fn parts(&self, own: &DeviceMatrix, all: &DeviceMatrix) -> Result<usize, CudaError> {
        let (own_count, count) = (packed(own)?, packed(all)?);
        ensure(own.dtype == all.dtype && own_count * self.ranks == count, || {
            format!("parts {own:?} of {} ranks for {all:?}", self.ranks)
        })?;
        Ok(own_count)
    }
}

const SUM: sys::ncclRedOp_t = sys::ncclRedOp_t::ncclSum;

fn raw(stream: &CudaStream) -> sys::cudaStream_t {
    stream.cu_stream().cast()
}

/// Values of a view without gaps.
fn packed(view: &DeviceMatrix) -> Result<usize, CudaError> {
    ensure(view.rows <= 1 || view.row_stride == view.cols, || {
        format!("an exchange of rows with gaps: {view:?}")
    })?;
    Ok(view.rows * view.cols)
}

fn data_type(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F32 => ncclDataType_t::ncclFloat32,
    }
}

fn check(operation: &'static str, answer: Result<NcclStatus, NcclError>) -> Result<(), CudaError> {
    answer.map(drop).map_err(|error| refused(operation, &error))
}

fn refused(operation: &'static str, NcclError(code): &NcclError) -> CudaError {
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
        ncclResult_t::ncclInvalidArgument => "an argument is wrong; this is a bug of the caller",
        ncclResult_t::ncclInvalidUsage => "NCCL is used wrongly; often two ranks name the same GPU",
        ncclResult_t::ncclRemoteError => "another rank has gone",
        ncclResult_t::ncclTimeout => "another rank did not answer in time",
        _ => "see NCCL's documentation of ncclResult_t",
    };
    let code = format!("{code:?} ({})", *code as u32);
    CudaError::Nccl { operation, code, meaning }
}

/// Multicast over NVLink (NVLS) was never run here. A variable that is set already stays.
fn keep_multicast_off() {
    const NAME: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: Rust's readers of the environment take a lock that this call takes too; NCCL,
        // which reads it without, has no threads before a group is made or joined.
        unsafe { std::env::set_var(NAME, "0") };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_operation_code_and_remedy() {
        let answer = Err(NcclError(ncclResult_t::ncclSystemError));
        let error = check("ncclAllReduce", answer).unwrap_err();
        let text = error.to_string();
        for part in ["ncclAllReduce", "ncclSystemError (2)", "/dev/shm"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.exit_code(), 75);
        assert!(check("ncclAllReduce", Ok(NcclStatus::Success)).is_ok());
    }

    #[test]
    fn parts_of_other_sizes_are_refused() {
        let group = Communicator { comm: Mutex::new(None), ranks: 4 };
        let all = DeviceMatrix::packed(256, [8, 16], Dtype::F32);
        assert_eq!(group.parts(&all.row_range(0..2), &all).unwrap(), 32);
        assert!(group.parts(&all.row_range(0..3), &all).is_err());
        assert!(group.parts(&all.columns(0..4), &all).is_err(), "rows with gaps");
        let other = DeviceMatrix::packed(256, [2, 16], Dtype::Bf16);
        assert!(group.parts(&other, &all).is_err());
    }
}
