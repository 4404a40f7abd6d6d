//! Memory of a GPU that other processes of the same host write into through its copy engines, and
//! words in it that say what has arrived. Knows nothing of what the bytes mean.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};

use super::memory::copy_on_device;
use super::{CudaError, DeviceBuffer, ensure};

/// Bytes of the handle by which another process opens a [`PeerMemory`].
pub const PEER_HANDLE_BYTES: usize = 64;

/// This process's memory, and its view of that of the others. It is never freed: CUDA wants all
/// others to have closed it before, and the end of the processes does both.
#[derive(Debug)]
pub struct PeerMemory {
    context: Arc<CudaContext>,
    bytes: usize,
    own: u64,
    /// Addresses in this process, by rank; this rank's is `own`.
    ranks: Vec<u64>,
}

impl PeerMemory {
    /// `bytes` zero bytes.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let memory = DeviceBuffer::new(context, bytes)?;
        let own = memory.address();
        std::mem::forget(memory);
        // SAFETY: just allocated with this size; the call after it waits for the zeros.
        unsafe { sys::cuMemsetD8_v2(own, 0, bytes).result() }
            .map_err(CudaError::driver("fill memory with zeros"))?;
        context.synchronize().map_err(CudaError::driver("wait for the context"))?;
        Ok(Self { context: context.clone(), bytes, own, ranks: Vec::new() })
    }

    /// What another process needs to open this memory.
    pub fn handle(&self) -> Result<[u8; PEER_HANDLE_BYTES], CudaError> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; PEER_HANDLE_BYTES] };
        // SAFETY: the address is the start of an allocation, and `handle` outlives the call.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, self.own).result() }
            .map_err(CudaError::driver("share memory with other processes"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Opens the memory of all ranks by their handles; this one is `rank`.
    pub fn open(self, rank: usize, handles: &[[u8; PEER_HANDLE_BYTES]]) -> Result<Self, CudaError> {
        self.context.bind_to_thread().map_err(CudaError::driver("make the context current"))?;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let address = |(other, bytes): (usize, &[u8; PEER_HANDLE_BYTES])| {
            if other == rank {
                return Ok(self.own);
            }
            let handle =
                sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
            let mut address = 0;
            // SAFETY: `address` outlives the call; the driver checks the handle.
            unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags).result() }
                .map_err(CudaError::driver(format!("open the memory of rank {other}")))?;
            Ok(address)
        };
        let ranks = handles.iter().enumerate().map(address).collect::<Result<_, CudaError>>()?;
        Ok(Self { ranks, ..self })
    }

    /// Address of a place in this rank's own memory.
    pub fn own(&self, offset: usize) -> u64 {
        self.own + offset as u64
    }

    /// Copies `bytes` from an address of this GPU to a place in a rank's memory.
    pub fn push(
        &self,
        (rank, offset): (usize, usize),
        (from, bytes): (u64, usize),
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        copy_on_device(stream, self.place(rank, offset, bytes)?, from, bytes)
    }

    /// Writes a word of a rank's memory once everything before on the stream is done and seen.
    pub fn tell(
        &self,
        (rank, offset): (usize, usize),
        value: u32,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let address = self.place(rank, offset, 4)?;
        // SAFETY: the word is in memory that is never freed. Flags 0: after a memory barrier.
        unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), address, value, 0).result() }
            .map_err(CudaError::driver(format!("write a word of rank {rank}")))
    }

    /// The stream goes on once a word of this rank's own memory is at least `value`.
    pub fn wait(&self, offset: usize, value: u32, stream: &CudaStream) -> Result<(), CudaError> {
        ensure(offset + 4 <= self.bytes, || format!("word at {offset} of {} bytes", self.bytes))?;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word is in memory that is never freed.
        unsafe {
            sys::cuStreamWaitValue32_v2(stream.cu_stream(), self.own(offset), value, flags).result()
        }
        .map_err(CudaError::driver("wait for a word"))
    }

    fn place(&self, rank: usize, offset: usize, bytes: usize) -> Result<u64, CudaError> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        match self.ranks.get(rank) {
            Some(start) if fits => Ok(start + offset as u64),
            _ => Err(CudaError::shape(format!(
                "{bytes} bytes at {offset} of rank {rank}: {} ranks have {} bytes each",
                self.ranks.len(),
                self.bytes
            ))),
        }
    }
}
