//! Burn's tensors as the views that launches take, and new tensors without gaps. Knows no
//! arithmetic.

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;
use burn::tensor::{DType, Int, Shape, Tensor, TensorData, TensorPrimitive};
use burn_cubecl::tensor::CubeTensor;
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;
use kernels::cuda::{DeviceHeads, DeviceMatrix, DeviceVector, Dtype};

use super::engine::note_fault;
use crate::ops::DeviceFault;

/// A float tensor of the backend.
pub(super) type T<const D: usize> = Tensor<Cuda, D>;
/// An integer tensor of the backend, i32.
pub(super) type Ids = Tensor<Cuda, 1, Int>;

/// Bytes that the size of a large tensor's memory is a multiple of.
const GRAIN: usize = 2 << 20;

type Raw = CubeTensor<CudaRuntime>;

fn fault(message: String) {
    note_fault(DeviceFault { message, exit_code: 70 });
}

/// The primitive, with the values of a row side by side.
fn raw<const D: usize>(tensor: &T<D>) -> Raw {
    tensor.clone().into_primitive().tensor()
}

fn tensor<const D: usize>(raw: Raw) -> T<D> {
    Tensor::from_primitive(TensorPrimitive::Float(raw))
}

/// Address of the first value. All that burn was given before has been enqueued afterwards.
fn address(raw: &Raw) -> u64 {
    match raw.client.get_resource(raw.handle.clone()) {
        Ok(resource) => resource.resource().ptr,
        Err(error) => {
            fault(format!("address of a tensor {raw:?}: {error:?}"));
            0
        }
    }
}

fn dtype(raw: &Raw) -> Dtype {
    match raw.dtype {
        DType::BF16 => Dtype::Bf16,
        DType::F32 => Dtype::F32,
        other => {
            fault(format!("a tensor of type {other:?}; only f32 and bf16 are computed with"));
            Dtype::F32
        }
    }
}

/// The tensor itself if the values of a row lie side by side and no rows share memory; else a copy.
pub(super) fn in_rows<const D: usize>(x: T<D>) -> T<D> {
    let raw = raw(&x);
    let (shape, strides) = (raw.meta.shape(), raw.meta.strides());
    let last = D - 1;
    let beside = shape[last] == 1 || strides[last] == 1;
    let apart = (0..last).all(|at| shape[at] == 1 || strides[at] > 0);
    match beside && apart {
        true => x,
        false => tensor(burn_cubecl::kernel::into_contiguous(raw)),
    }
}

/// The tensor if nobody else holds its memory; else a copy.
pub(super) fn exclusive<const D: usize>(x: T<D>) -> T<D> {
    let x = in_rows(x);
    let raw: Raw = x.into_primitive().tensor();
    match raw.can_mut() {
        true => tensor(raw),
        false => tensor::<D>(raw).mul_scalar(1.0),
    }
}

/// The tensor, and where an operation that reads and writes place by place may put its result: the
/// same memory if nobody else holds it, else new memory.
pub(super) fn in_place<const D: usize>(x: T<D>) -> (T<D>, T<D>) {
    let raw: Raw = x.into_primitive().tensor();
    let alone = raw.can_mut();
    let x = tensor::<D>(raw);
    let out = match alone {
        true => x.clone(),
        false => empty(x.dims(), (&x.device(), x.dtype())),
    };
    (x, out)
}

/// View of a matrix, or of a vector as one row. The tensor comes from [`in_rows`] or [`empty`].
pub(super) fn matrix<const D: usize>(x: &T<D>) -> DeviceMatrix {
    let raw = raw(x);
    let (shape, strides) = (raw.meta.shape(), raw.meta.strides());
    let (rows, cols, stride) = match D {
        1 => (1, shape[0], shape[0]),
        _ => (shape[0], shape[1], strides[0].max(shape[1])),
    };
    DeviceMatrix { address: address(&raw), rows, cols, row_stride: stride, dtype: dtype(&raw) }
}

/// View of heads `[rows, heads, width]`.
pub(super) fn heads(x: &T<3>) -> DeviceHeads {
    let raw = raw(x);
    let (shape, strides) = (raw.meta.shape(), raw.meta.strides());
    DeviceHeads {
        address: address(&raw),
        rows: shape[0],
        row_stride: strides[0],
        head_stride: strides[1],
        dtype: dtype(&raw),
    }
}

/// `[rows, heads, width]` without gaps as a matrix `[rows, heads * width]`.
pub(super) fn flat(x: &T<3>) -> Option<DeviceMatrix> {
    let raw = raw(x);
    let [rows, heads, width] = x.dims();
    let strides = raw.meta.strides();
    let whole = (heads == 1 || strides[1] == width) && (rows == 1 || strides[0] == heads * width);
    let shape = [rows, heads * width];
    whole.then(|| DeviceMatrix::packed(address(&raw), shape, dtype(&raw)))
}

/// View of a vector of f32.
pub(super) fn vector(x: &T<1>) -> DeviceVector<f32> {
    let raw = raw(x);
    if raw.dtype != DType::F32 {
        fault(format!("a vector of type {:?} where f32 is needed", raw.dtype));
    }
    DeviceVector::new(address(&raw), x.dims()[0])
}

/// View of row numbers.
pub(super) fn ids(x: &Ids) -> DeviceVector<u32> {
    let raw: Raw = x.clone().into_primitive();
    if raw.dtype != DType::I32 {
        fault(format!("row numbers of type {:?} where i32 is needed", raw.dtype));
    }
    DeviceVector::new(address(&raw), x.dims()[0])
}

/// A tensor without gaps, of any values.
pub(super) fn empty<const D: usize>(
    shape: [usize; D],
    (device, dtype): (&CudaDevice, DType),
) -> T<D> {
    let client = CudaRuntime::client(device);
    let bytes = shape.iter().product::<usize>().max(1) * dtype.size();
    // Rows of steps differ by a few; in whole grains one step's memory serves the next.
    let grain = if bytes < 8 * GRAIN { 1 } else { GRAIN };
    let handle = client.empty(bytes.next_multiple_of(grain));
    tensor(CubeTensor::new_contiguous(client, device.clone(), Shape::from(shape), handle, dtype))
}

/// Integers for kernels, without values.
pub(super) fn empty_ids(count: usize, device: &CudaDevice) -> Ids {
    let client = CudaRuntime::client(device);
    let handle = client.empty(count.max(1) * 4);
    let shape = Shape::from([count]);
    let raw = CubeTensor::new_contiguous(client, device.clone(), shape, handle, DType::I32);
    Tensor::from_primitive(raw)
}

/// Copies numbers to the device.
pub(super) fn upload(values: Vec<u32>, device: &CudaDevice) -> Ids {
    let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), device)
}

/// Copies f32 values to the device.
pub(super) fn upload_floats(values: &[f32], device: &CudaDevice) -> T<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), (device, DType::F32))
}
