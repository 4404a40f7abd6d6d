//! One GPU of a rank: its context, streams, kernels and products, and waiting for it with a
//! deadline. Knows no model.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::cuda::cudarc::driver::result::{DriverError, stream::get_priority_range};
use kernels::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use kernels::cuda::{Blas, CudaError, CudaKernels, Dtype, Launcher};

use super::gemm::WORKSPACE_BYTES;
use crate::target::error::TargetError;

/// How long a wait spins before it sleeps: longer than a router takes, shorter than anybody minds.
const SPIN: Duration = Duration::from_micros(300);

/// A GPU and what runs on it.
pub(super) struct Device {
    pub(super) rank: usize,
    pub(super) context: Arc<CudaContext>,
    /// Everything in the order of the model.
    pub(super) compute: Arc<CudaStream>,
    /// What decodes the weights of the next experts.
    pub(super) decode: Arc<CudaStream>,
    /// Copies of captured rows to the host.
    pub(super) copy: Arc<CudaStream>,
    pub(super) kernels: CudaKernels,
    blas: Blas,
    /// What runs beside the compute stream; only where ranks are several.
    side: Option<Side>,
    /// Number format of products and activations.
    pub(super) dtype: Dtype,
    /// Waiting ends then.
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
}

/// A stream beside the compute stream, on which rows cross the ranks.
struct Side {
    stream: Arc<CudaStream>,
    blas: Blas,
    /// Work goes to this stream now.
    is_current: bool,
    /// Of each half of a batch: its part of a sum is complete.
    marked: [CudaEvent; 2],
    /// Of each half: its work on this stream is done.
    done: [CudaEvent; 2],
}

impl Device {
    /// Opens GPU number `gpu` of this process for `rank`.
    pub(super) fn open(
        (rank, gpu): (usize, usize),
        dtype: Dtype,
        limit: Duration,
    ) -> Result<Self, TargetError> {
        let open = |doing| move |source| TargetError::Cuda { rank, doing, source };
        let context = kernels::cuda::context(gpu).map_err(open("open the GPU"))?;
        let stream = || context.new_stream().map_err(driver("make a stream"));
        let compute = stream().map_err(open("open the GPU"))?;
        // A few blocks that products wait for: they go first.
        let decode =
            get_priority_range().and_then(|(_, first)| context.new_stream_with_priority(first));
        let decode = decode.map_err(driver("make a stream")).map_err(open("open the GPU"))?;
        let copy = stream().map_err(open("open the GPU"))?;
        let cache = kernel_cache();
        let kernels =
            CudaKernels::load(&context, cache.as_deref()).map_err(open("compile the kernels"))?;
        let blas = Blas::new(&compute, WORKSPACE_BYTES).map_err(open("open cuBLASLt"))?;
        // Loading has no deadline.
        let deadline = Instant::now() + Duration::from_secs(365 * 24 * 3600);
        Ok(Self {
            rank,
            context,
            compute,
            decode,
            copy,
            kernels,
            blas,
            side: None,
            dtype,
            deadline,
            limit,
        })
    }

    /// Makes what runs beside the compute stream. Its kernels go first: other ranks wait for them.
    pub(super) fn open_side(&mut self) -> Result<Arc<CudaStream>, CudaError> {
        let stream = get_priority_range()
            .and_then(|(_, first)| self.context.new_stream_with_priority(first))
            .map_err(driver("make a stream"))?;
        self.side = Some(Side {
            blas: Blas::new(&stream, WORKSPACE_BYTES)?,
            stream: Arc::clone(&stream),
            is_current: false,
            marked: [self.event()?, self.event()?],
            done: [self.event()?, self.event()?],
        });
        Ok(stream)
    }

    /// Whether work goes beside the compute stream now.
    pub(super) fn is_aside(&self) -> bool {
        self.side.as_ref().is_some_and(|side| side.is_current)
    }

    /// The stream that work goes to.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        match &self.side {
            Some(side) if side.is_current => &side.stream,
            _ => &self.compute,
        }
    }

    /// Products on that stream.
    pub(super) fn products(&mut self) -> &mut Blas {
        match &mut self.side {
            Some(side) if side.is_current => &mut side.blas,
            _ => &mut self.blas,
        }
    }

    /// What the compute stream has been given of a half is what [`Device::go_aside`] waits for.
    pub(super) fn mark(&self, half: usize) -> Result<(), CudaError> {
        let Some(side) = &self.side else { return Ok(()) };
        side.marked[half].record(&self.compute).map_err(driver("record an event"))
    }

    /// Work goes beside the compute stream, after what was marked.
    pub(super) fn go_aside(&mut self, half: usize) -> Result<(), CudaError> {
        let Some(side) = &mut self.side else { return Ok(()) };
        side.is_current = true;
        side.stream.wait(&side.marked[half]).map_err(driver("order streams"))
    }

    /// Work goes to the compute stream again.
    pub(super) fn come_back(&mut self, half: usize) -> Result<(), CudaError> {
        let Some(side) = &mut self.side else { return Ok(()) };
        side.is_current = false;
        side.done[half].record(&side.stream).map_err(driver("record an event"))
    }

    /// The compute stream waits for what went beside it.
    pub(super) fn join(&self, half: usize) -> Result<(), CudaError> {
        let Some(side) = &self.side else { return Ok(()) };
        self.compute.wait(&side.done[half]).map_err(driver("order streams"))
    }

    /// Launches on the stream that work goes to.
    pub(super) fn launch(&self) -> Launcher<'_> {
        self.kernels.on(self.stream())
    }

    /// Names what was being done in an error.
    pub(super) fn doing<T>(
        &self,
        doing: &'static str,
        result: Result<T, CudaError>,
    ) -> Result<T, TargetError> {
        let rank = self.rank;
        result.map_err(|source| TargetError::Cuda { rank, doing, source })
    }

    /// An event for ordering streams.
    pub(super) fn event(&self) -> Result<CudaEvent, CudaError> {
        self.context.new_event(None).map_err(driver("make an event"))
    }

    /// Writes to a bad address, or lets the compute stream wait for a value that nobody writes.
    #[cfg(test)]
    pub(super) fn spoil(&self, how: crate::target::fault::Spoil) {
        use kernels::cuda::cudarc::driver::sys;
        use kernels::cuda::{DeviceBuffer, DeviceMatrix};
        if how == crate::target::fault::Spoil::BadAddress {
            let nowhere = DeviceMatrix::packed(1 << 12, [16, 64], Dtype::F32);
            self.launch().zero(&nowhere).unwrap();
            return;
        }
        let never = DeviceBuffer::from_slice(&self.compute, &[0u32; 4]).unwrap();
        self.settle("hang").unwrap();
        // SAFETY: the address stays valid, for the memory is given up without being freed.
        let answer =
            unsafe { sys::cuStreamWaitValue32_v2(self.compute.cu_stream(), never.address(), 1, 1) };
        assert_eq!(answer, sys::CUresult::CUDA_SUCCESS);
        std::mem::forget(never);
    }

    /// Waits for all work on the stream that work goes to.
    pub(super) fn settle(&self, doing: &'static str) -> Result<(), TargetError> {
        let event = self.doing(doing, self.event())?;
        self.doing(doing, event.record(self.stream()).map_err(driver("record an event")))?;
        self.wait(doing, &event)
    }

    /// Waits until the GPU has passed `event`, or the deadline.
    pub(super) fn wait(&self, doing: &'static str, event: &CudaEvent) -> Result<(), TargetError> {
        let start = Instant::now();
        loop {
            let passed = event.try_is_complete().map_err(driver("wait for the GPU"));
            if self.doing(doing, passed)? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= self.deadline {
                tracing::error!(rank = self.rank, doing, "the GPU has not finished in time");
                return Err(TargetError::Deadline { waiting: vec![self.rank], limit: self.limit });
            }
            match now - start {
                spun if spun < SPIN => std::hint::spin_loop(),
                _ => std::thread::sleep(SPIN / 6),
            }
        }
    }
}

/// Names the operation that the driver refused.
pub(super) fn driver(operation: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |source| CudaError::Driver { operation: operation.to_owned(), source }
}

/// Where compiled kernels are kept between runs.
fn kernel_cache() -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os("AERIE_KERNEL_CACHE") {
        return Some(PathBuf::from(dir));
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Some(cache.or_else(home)?.join("aerie").join("kernels"))
}
