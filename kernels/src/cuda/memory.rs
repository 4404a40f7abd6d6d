//! Memory of a device, pinned memory of the host, and copies between them. Knows nothing of what
//! the bytes mean.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::{CudaError, DeviceMatrix, DeviceVector, Dtype};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// How often this process has taken device memory or pinned memory.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Memory on a device, freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Uninitialised memory of at least one byte.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        context.bind_to_thread().map_err(CudaError::driver("make the context current"))?;
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: nobody reads the memory before it is written; see the views' promise.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|source| {
            match result::mem_get_info() {
                Ok((free, _)) if free < bytes => CudaError::OutOfMemory { needed: bytes, free },
                _ => CudaError::driver(format!("allocate {bytes} bytes"))(source),
            }
        })?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// Memory that holds `values`.
    pub fn from_slice<T: Pod>(stream: &CudaStream, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::new(stream.context(), size_of_val(values))?;
        upload(stream, buffer.address, values)?;
        Ok(buffer)
    }

    /// Device address of the first byte, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A matrix without gaps at the start of the memory.
    pub fn matrix(&self, shape: [usize; 2], dtype: Dtype) -> DeviceMatrix {
        DeviceMatrix::packed(self.address, shape, dtype)
    }

    /// A vector at the start of the memory.
    pub fn vector<T>(&self, len: usize) -> DeviceVector<T> {
        DeviceVector::new(self.address, len)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let bound = self.context.bind_to_thread();
        // SAFETY: allocated by `new` and freed only here; cuMemFree waits for work in flight.
        if let Err(error) = bound.and_then(|()| unsafe { result::free_sync(self.address) }) {
            tracing::warn!(%error, bytes = self.bytes, "device memory not freed");
        }
    }
}

/// Page-locked memory of the host: copies to and from it overlap with kernels.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Arc<CudaContext>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, reached through `&mut` to write and `&` to read.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Zeroed page-locked memory.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let wrong = || CudaError::driver(format!("allocate {bytes} bytes of pinned memory"));
        context.bind_to_thread().map_err(wrong())?;
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: flags 0 ask for plain page-locked memory; it is zeroed before anybody sees it.
        let pointer = unsafe {
            let pointer = result::malloc_host(bytes.max(1), 0).map_err(wrong())?.cast::<u8>();
            pointer.write_bytes(0, bytes.max(1));
            pointer
        };
        Ok(Self { context: context.clone(), pointer, bytes })
    }

    /// The bytes. After [`PinnedBuffer::start_download`] they are settled once the stream has
    /// passed an event recorded behind the copy.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and zeroed by `new`, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, to be written; not while a copy is under way.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Starts to copy `bytes` from a device address to `offset` in the buffer. The buffer must
    /// stay alive and unread until the stream has passed.
    pub fn start_download(
        &mut self,
        stream: &CudaStream,
        offset: usize,
        (address, bytes): (u64, usize),
    ) -> Result<(), CudaError> {
        let total = self.bytes;
        let Some(target) = offset.checked_add(bytes).filter(|&end| end <= total) else {
            let what = format!("{bytes} bytes to offset {offset} of {total} pinned bytes");
            return Err(CudaError::shape(what));
        };
        let target = &mut self.as_mut_slice()[offset..target];
        bind(stream)?;
        // SAFETY: the target is page-locked and large enough; its life is the caller's promise.
        unsafe { result::memcpy_dtoh_async(target, address, stream.cu_stream()) }
            .map_err(CudaError::driver(format!("copy {bytes} bytes to pinned memory")))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let bound = self.context.bind_to_thread();
        // SAFETY: allocated by `new` and freed only here.
        if let Err(error) = bound.and_then(|()| unsafe { result::free_host(self.pointer.cast()) }) {
            tracing::warn!(%error, bytes = self.bytes, "pinned memory not freed");
        }
    }
}

fn bind(stream: &CudaStream) -> Result<(), CudaError> {
    let bound = stream.context().bind_to_thread();
    bound.map_err(CudaError::driver("make the context current"))
}

/// Copies `values` to a device address, in the order of the stream. `values` may be reused at
/// once: the driver has taken them when this returns.
pub fn upload<T: Pod>(stream: &CudaStream, address: u64, values: &[T]) -> Result<(), CudaError> {
    if values.is_empty() {
        return Ok(());
    }
    bind(stream)?;
    // SAFETY: pageable memory is staged before the call returns; the target is the view's promise.
    unsafe { result::memcpy_htod_async(address, values, stream.cu_stream()) }
        .map_err(CudaError::driver(format!("copy {} bytes to the device", size_of_val(values))))
}

/// Copies a vector to the host and waits for it.
pub fn download<T: Pod>(stream: &CudaStream, vector: DeviceVector<T>) -> Result<Vec<T>, CudaError> {
    let mut values = vec![T::zeroed(); vector.len];
    if values.is_empty() {
        return Ok(values);
    }
    bind(stream)?;
    let wrong = || CudaError::driver(format!("copy {} bytes to the host", size_of_val(&*values)));
    let wrong_copy = wrong();
    let wrong_wait = wrong();
    // SAFETY: `values` is as long as the copy and lives until the stream has passed it, below.
    unsafe { result::memcpy_dtoh_async(&mut values, vector.address, stream.cu_stream()) }
        .map_err(wrong_copy)?;
    stream.synchronize().map_err(wrong_wait)?;
    Ok(values)
}

/// Copies bytes from one device address to another, in the order of the stream.
pub fn copy_on_device(
    stream: &CudaStream,
    target: u64,
    source: u64,
    bytes: usize,
) -> Result<(), CudaError> {
    if bytes == 0 {
        return Ok(());
    }
    bind(stream)?;
    // SAFETY: both ends are promised by the caller, as for every launch.
    unsafe { result::memcpy_dtod_async(target, source, bytes, stream.cu_stream()) }
        .map_err(CudaError::driver(format!("copy {bytes} bytes on the device")))
}

/// Lets work in `context` read and write the memory of `peer`'s device. Nothing to do where both
/// are the same.
pub fn enable_peer_access(
    context: &Arc<CudaContext>,
    peer: &Arc<CudaContext>,
) -> Result<(), CudaError> {
    if context.cu_ctx() == peer.cu_ctx() {
        return Ok(());
    }
    context.bind_to_thread().map_err(CudaError::driver("make the context current"))?;
    // SAFETY: both contexts are alive; the flags must be 0.
    match unsafe { sys::cuCtxEnablePeerAccess(peer.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        answer => answer.result().map_err(CudaError::driver("reach the memory of another GPU")),
    }
}
