//! Every CUDA kernel against its plain-Rust twin, for the test and for the check that is carried
//! to a GPU machine. Knows nothing of how results are printed.

#![allow(dead_code, reason = "the test and the example each use a part")]

pub(crate) mod attention;
pub(crate) mod dequant;
pub(crate) mod experts;
pub(crate) mod moe;
pub(crate) mod products;
pub(crate) mod rows;
pub(crate) mod stats;
pub(crate) mod train_attention;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use half::bf16;
use kernels::cuda::cudarc::driver::CudaStream;
use kernels::cuda::{
    Blas, CudaError, CudaKernels, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype, SOURCES,
    TRAIN_SOURCES, download,
};

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// A device with everything loaded.
pub(crate) struct Gpu {
    pub(crate) kernels: CudaKernels,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) blas: Blas,
    pub(crate) rng: Rng,
    /// Small shapes only, for compute-sanitizer.
    pub(crate) quick: bool,
}

/// One kernel's comparison.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&mut Gpu) -> Outcome,
}

/// A name and a comparison.
pub(crate) type Named = (&'static str, fn(&mut Gpu) -> Outcome);

/// All comparisons, simple ones first.
pub(crate) fn cases() -> Vec<Case> {
    let groups = [rows::CASES, moe::CASES, dequant::CASES, stats::CASES, products::CASES];
    (groups.into_iter())
        .chain([experts::CASES, attention::CASES, train_attention::CASES])
        .flatten()
        .map(|&(name, run)| Case { name, run })
        .collect()
}

impl Gpu {
    pub(crate) fn new(quick: bool) -> Result<Self, CudaError> {
        let context = kernels::cuda::context(0)?;
        let cache = std::env::var_os("AERIE_KERNEL_CACHE").map(PathBuf::from);
        let sources = [&SOURCES[..], &TRAIN_SOURCES[2..]].concat();
        let kernels = CudaKernels::load_sources(&context, cache.as_deref(), &sources)?;
        let stream = context
            .new_stream()
            .map_err(|source| CudaError::Driver { operation: "create a stream".into(), source })?;
        let blas = Blas::new(&stream, 32 << 20)?;
        Ok(Self { kernels, stream, blas, rng: Rng(1), quick })
    }

    /// A matrix of `values` on the device whose rows are `pitch` values longer than they need be.
    pub(crate) fn matrix(
        &self,
        values: &[f32],
        [rows, cols]: [usize; 2],
        dtype: Dtype,
        pitch: usize,
    ) -> Outcome<Held> {
        assert_eq!(values.len(), rows * cols);
        let stride = cols + pitch;
        let mut bytes = vec![CANARY; rows * stride * dtype.size() + TAIL];
        for (i, &value) in values.iter().enumerate() {
            let at = (i / cols * stride + i % cols) * dtype.size();
            match dtype {
                Dtype::F32 => bytes[at..][..4].copy_from_slice(&value.to_le_bytes()),
                Dtype::Bf16 => {
                    bytes[at..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
        }
        let buffer = DeviceBuffer::from_slice(&self.stream, &bytes)?;
        let view =
            DeviceMatrix { address: buffer.address(), rows, cols, row_stride: stride, dtype };
        Ok(Held { buffer, view })
    }

    /// The values of a matrix, after a look at the bytes around its rows.
    pub(crate) fn values(&self, held: &Held) -> Outcome<Vec<f32>> {
        let DeviceMatrix { rows, cols, row_stride, dtype, .. } = held.view;
        let bytes: Vec<u8> = download(&self.stream, held.buffer.vector(held.buffer.bytes()))?;
        let size = dtype.size();
        for (at, &byte) in bytes.iter().enumerate() {
            let (row, col) = (at / (row_stride * size).max(1), at % (row_stride * size).max(1));
            if (row >= rows || col >= cols * size) && byte != CANARY {
                return Err(format!("a write outside the row: row {row}, byte {col}").into());
            }
        }
        let value = |i: usize| {
            let at = (i / cols * row_stride + i % cols) * size;
            match dtype {
                Dtype::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|b| bytes[at + b])),
                Dtype::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            }
        };
        Ok((0..rows * cols).map(value).collect())
    }

    pub(crate) fn vector<T: bytemuck::Pod>(&self, values: &[T]) -> Outcome<HeldVector<T>> {
        let buffer = DeviceBuffer::from_slice(&self.stream, values)?;
        let view = buffer.vector(values.len());
        Ok(HeldVector { buffer, view })
    }

    pub(crate) fn vector_values<T: bytemuck::Pod>(
        &self,
        vector: &HeldVector<T>,
    ) -> Outcome<Vec<T>> {
        Ok(download(&self.stream, vector.view)?)
    }

    /// Shapes that take the path of eight values a step (multiples of eight) and that of one,
    /// without and with gaps between rows.
    pub(crate) fn shapes(&self) -> Vec<([usize; 2], usize)> {
        let mut shapes = vec![
            ([1, 1], 0),
            ([3, 5], 3),
            ([7, 64], 0),
            ([33, 136], 8),
            ([5, 72], 3),
            ([2, 4104], 8),
        ];
        if !self.quick {
            shapes.extend([([300, 7168], 0), ([1000, 96], 160), ([65, 7169], 7), ([70_001, 8], 0)]);
        }
        shapes
    }
}

/// Byte that fills the gaps.
const CANARY: u8 = 0xA5;
/// Bytes behind the last row.
const TAIL: usize = 64;

/// A matrix and its memory.
pub(crate) struct Held {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) view: DeviceMatrix,
}

/// A vector and its memory.
pub(crate) struct HeldVector<T> {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) view: DeviceVector<T>,
}

/// Random numbers (splitmix64).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// About normal, of unit variance.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    /// Values as `dtype` can hold them.
    pub(crate) fn values(&mut self, len: usize, dtype: Dtype) -> Vec<f32> {
        (0..len).map(|_| round(self.normal(), dtype)).collect()
    }
}

pub(crate) fn round(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

pub(crate) const TYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F32];

pub(crate) fn type_pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    TYPES.into_iter().flat_map(|a| TYPES.into_iter().map(move |b| (a, b)))
}

/// Allowed difference: one rounding of the type, and a little of f32.
pub(crate) fn near(what: &str, got: &[f32], want: &[f32], dtype: Dtype) -> Outcome {
    let relative = if dtype == Dtype::Bf16 { 1.0 / 128.0 } else { 2e-5 };
    within(what, got, want, (relative, 2e-5))
}

/// `|got - want| <= relative * |want| + absolute` everywhere, or an error that says where not.
pub(crate) fn within(
    what: &str,
    got: &[f32],
    want: &[f32],
    (relative, absolute): (f32, f32),
) -> Outcome {
    if got.len() != want.len() {
        return Err(format!("{what}: {} values, {} expected", got.len(), want.len()).into());
    }
    let bad = |&i: &usize| {
        let (got, want) = (got[i], want[i]);
        let equal = got == want || (got.is_nan() && want.is_nan());
        !(equal || (got - want).abs() <= relative * want.abs() + absolute)
    };
    let wrong: Vec<usize> = (0..got.len()).filter(bad).collect();
    let Some(&first) = wrong.first() else { return Ok(()) };
    let last = wrong[wrong.len() - 1];
    let worst = wrong.iter().map(|&i| (got[i] - want[i]).abs()).fold(0.0, f32::max);
    Err(format!(
        "{what}: {} of {} values wrong, the first at {first}: {} instead of {}, the last at \
         {last}, worst difference {worst}",
        wrong.len(),
        got.len(),
        got[first],
        want[first]
    )
    .into())
}

/// Equality, or an error that says where not.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Outcome {
    if got.len() != want.len() {
        return Err(format!("{what}: {} values, {} expected", got.len(), want.len()).into());
    }
    match (0..got.len()).find(|&i| got[i] != want[i]) {
        None => Ok(()),
        Some(i) => {
            let count = (0..got.len()).filter(|&i| got[i] != want[i]).count();
            let (len, got, want) = (got.len(), &got[i], &want[i]);
            Err(format!("{what}: {count} of {len} wrong, at {i} {got:?} instead of {want:?}")
                .into())
        }
    }
}
