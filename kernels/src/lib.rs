//! Numeric kernels in plain Rust, f32 throughout: products, norms, rotary embedding, attention,
//! routing, activation, and the decoding of quantised weights; and in [`cuda`] the same on CUDA
//! devices.
//!
//! Knows nothing of models, files or tensor parallelism. Work is shared out through rayon's
//! current pool, and no result depends on how many threads did it.

pub mod activation;
pub mod attention;
pub mod cuda;
pub mod dequant;
pub mod experts;
pub mod gemm;
pub mod norm;
pub mod reference;
pub mod rope;
pub mod router;
mod simd;

/// How many threads of rayon's current pool a kernel may use; 1 keeps it on the calling thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Threads(pub usize);

impl Threads {
    /// The calling thread alone.
    pub const ONE: Self = Self(1);
}
