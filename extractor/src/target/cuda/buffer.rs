//! Values on a GPU: buffers of a forward and weight matrices. Knows nothing of what they mean.

use std::sync::Arc;

use kernels::cuda::cudarc::driver::CudaContext;
use kernels::cuda::{CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype};

/// Values of a forward. Memory is taken when the buffer is made, but for the few that grow.
#[derive(Debug)]
pub(in crate::target) struct CudaBuffer {
    context: Arc<CudaContext>,
    memory: Option<DeviceBuffer>,
    dtype: Dtype,
    /// Values in use.
    len: usize,
    grows: bool,
}

impl CudaBuffer {
    /// A buffer of at most `capacity` values, or one that grows.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        dtype: Dtype,
        capacity: Option<usize>,
    ) -> Result<Self, CudaError> {
        let memory = match capacity {
            Some(values) => Some(DeviceBuffer::new(context, values * dtype.size())?),
            None => None,
        };
        let (context, grows) = (Arc::clone(context), capacity.is_none());
        Ok(Self { context, memory, dtype, len: 0, grows })
    }

    /// Values in use.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Number format of the values.
    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Device address of the first value; 0 where there is no memory yet.
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceBuffer::address)
    }

    /// Values that fit.
    fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes() / self.dtype.size())
    }

    /// Makes room for `len` values and uses them. The first `kept` survive where the memory has
    /// to move; `copy` moves them, to the new memory from the old.
    pub(super) fn resize(
        &mut self,
        len: usize,
        kept: usize,
        copy: impl FnOnce(u64, u64, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if len > self.capacity() {
            if !self.grows {
                let capacity = self.capacity();
                return Err(CudaError::Shape(format!("{len} values in a buffer of {capacity}")));
            }
            let capacity = len.max(2 * self.capacity());
            let memory = DeviceBuffer::new(&self.context, capacity * self.dtype.size())?;
            if kept > 0 {
                copy(memory.address(), self.address(), kept * self.dtype.size())?;
            }
            self.memory = Some(memory);
        }
        self.len = len;
        Ok(())
    }

    /// Makes room for `len` values of which none is kept.
    pub(super) fn set_len(&mut self, len: usize) -> Result<(), CudaError> {
        self.resize(len, 0, |_, _, _| Ok(()))
    }

    /// The values as rows of `width`.
    pub(super) fn rows(&self, width: usize) -> DeviceMatrix {
        let rows = self.len / width.max(1);
        DeviceMatrix::packed(self.address(), [rows, width], self.dtype)
    }

    /// The values as `rows` rows, also beyond those in use where `rows` is larger.
    pub(super) fn padded(&self, rows: usize, width: usize) -> Result<DeviceMatrix, CudaError> {
        if rows * width > self.capacity() {
            let capacity = self.capacity();
            let shape = format!("[{rows}, {width}] in a buffer of {capacity} values");
            return Err(CudaError::Shape(shape));
        }
        Ok(DeviceMatrix::packed(self.address(), [rows, width], self.dtype))
    }

    /// f32 values, for norms and biases.
    pub(super) fn floats(&self) -> DeviceVector<f32> {
        DeviceVector::new(self.address(), self.len)
    }
}

/// A weight matrix [out, in] that products read as it is.
#[derive(Debug)]
pub(in crate::target) struct CudaLinear {
    pub(super) memory: DeviceBuffer,
    pub(super) out: usize,
    pub(super) input: usize,
    pub(super) dtype: Dtype,
}

impl CudaLinear {
    pub(super) fn matrix(&self) -> DeviceMatrix {
        self.memory.matrix([self.out, self.input], self.dtype)
    }
}
