//! Descriptions of tensors for the copy engine of Hopper (TMA), made by the driver. Knows no
//! kernels.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::{CudaError, DeviceHeads};

/// What the copy engine needs to copy boxes of heads; `struct TensorMap` of the sources.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct TensorMap([u64; 16]);

impl TensorMap {
    /// Boxes of `box_rows` rows of 64 values of one head, in the 128-byte swizzle; rows behind the
    /// last read as zeros. The heads are bf16, each a whole number of boxes wide, and start at
    /// multiples of sixteen bytes.
    pub(super) fn of(
        view: &DeviceHeads,
        [heads, width]: [usize; 2],
        box_rows: usize,
    ) -> Result<Self, CudaError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let dims = [width as u64, heads as u64, view.rows as u64];
        let strides = [2 * view.head_stride as u64, 2 * view.row_stride as u64];
        let (boxes, steps) = ([64, 1, box_rows as u32], [1; 3]);
        // SAFETY: the pointers are to live arrays of the lengths that rank 3 asks for. The address
        // is not read here.
        let answer = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                view.address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        answer.result().map_err(CudaError::driver(format!("describe {view:?} for copies")))?;
        Ok(Self(map.opaque))
    }
}
