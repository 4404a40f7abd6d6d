//! Where values lie on a device: addresses, shapes and strides. Knows nothing of who owns the
//! memory; a view is a promise of its maker that the memory is there while launches use it.

use std::marker::PhantomData;
use std::ops::Range;

/// Type of the values of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    /// 16-bit brain float; computed with in f32.
    Bf16,
    /// 32-bit float.
    F32,
}

impl Dtype {
    /// Bytes of a value.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// As it appears in the names of kernels.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// A row-major matrix on the device whose rows start `row_stride` values apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceMatrix {
    /// Device address of the first value.
    pub address: u64,
    /// Rows.
    pub rows: usize,
    /// Values in a row.
    pub cols: usize,
    /// Values from the start of a row to that of the next; at least `cols`.
    pub row_stride: usize,
    /// Type of the values.
    pub dtype: Dtype,
}

impl DeviceMatrix {
    /// A matrix [rows, cols] without gaps between its rows.
    pub fn packed(address: u64, [rows, cols]: [usize; 2], dtype: Dtype) -> Self {
        Self { address, rows, cols, row_stride: cols, dtype }
    }

    /// The same rows, of which only the columns of `range` count.
    pub fn columns(self, range: Range<usize>) -> Self {
        let address = self.address + (range.start * self.dtype.size()) as u64;
        Self { address, cols: range.len(), ..self }
    }

    /// Some of the rows.
    pub fn row_range(self, range: Range<usize>) -> Self {
        let address = self.address + (range.start * self.row_stride * self.dtype.size()) as u64;
        Self { address, rows: range.len(), ..self }
    }

    /// Shape, for messages and comparisons.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Bytes of the values, without gaps.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.size()
    }

    /// Whether sixteen bytes at a time, eight values at a time, can be read everywhere.
    pub(super) fn in_vectors(&self) -> bool {
        self.address.is_multiple_of(16)
            && (self.row_stride * self.dtype.size()).is_multiple_of(16)
            && self.cols.is_multiple_of(8)
    }

    /// As kernels receive it.
    pub(super) fn arg(&self) -> MatArg {
        MatArg { address: self.address, stride: self.row_stride as i64 }
    }
}

/// A vector of `T` on the device, without gaps.
#[derive(Debug)]
pub struct DeviceVector<T> {
    /// Device address of the first value.
    pub address: u64,
    /// Values.
    pub len: usize,
    of: PhantomData<fn() -> T>,
}

impl<T> Clone for DeviceVector<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceVector<T> {}

impl<T> DeviceVector<T> {
    /// `len` values at a device address.
    pub fn new(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }

    /// Some of the values.
    pub fn range(self, range: Range<usize>) -> Self {
        let address = self.address + (range.start * size_of::<T>()) as u64;
        Self::new(address, range.len())
    }
}

/// Heads of a packed [rows, heads, width] tensor, or of one inside wider rows: value `i` of head
/// `h` of row `r` is at `r * row_stride + h * head_stride + i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceHeads {
    /// Device address of the first value of the first head.
    pub address: u64,
    /// Rows (tokens).
    pub rows: usize,
    /// Values from one row to the next.
    pub row_stride: usize,
    /// Values from one head to the next.
    pub head_stride: usize,
    /// Type of the values.
    pub dtype: Dtype,
}

impl DeviceHeads {
    /// The heads of `matrix`, whose rows are [heads, width], the first at column `offset` and the
    /// next ones `head_stride` further each.
    pub fn of(matrix: DeviceMatrix, head_stride: usize, offset: usize) -> Self {
        Self {
            address: matrix.address + (offset * matrix.dtype.size()) as u64,
            rows: matrix.rows,
            row_stride: matrix.row_stride,
            head_stride,
            dtype: matrix.dtype,
        }
    }

    /// Whether every head of every row starts at a multiple of sixteen bytes.
    pub(super) fn in_vectors(&self) -> bool {
        let size = self.dtype.size();
        self.address.is_multiple_of(16)
            && (self.row_stride * size).is_multiple_of(16)
            && (self.head_stride * size).is_multiple_of(16)
    }

    /// As kernels receive it.
    pub(super) fn arg(&self) -> HeadsArg {
        HeadsArg {
            address: self.address,
            row_stride: self.row_stride as i64,
            head_stride: self.head_stride as i64,
        }
    }
}

/// `struct Mat` of prelude.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MatArg {
    pub(super) address: u64,
    pub(super) stride: i64,
}

/// `struct Heads` of prelude.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadsArg {
    pub(super) address: u64,
    pub(super) row_stride: i64,
    pub(super) head_stride: i64,
}
