//! What can go wrong with a CUDA device, and what to do about it.

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use cudarc::nvrtc::result::NvrtcError;

/// A CUDA library that is missing, or refuses.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// A shared library can't be found.
    #[error("{library} is missing: {hint}")]
    MissingLibrary {
        /// File name without suffix.
        library: &'static str,
        /// Where it comes from.
        hint: &'static str,
    },
    /// There is no device of that number.
    #[error(
        "device {ordinal} is asked for, {found} CUDA devices are here \
         (CUDA_VISIBLE_DEVICES hides others)"
    )]
    NoDevice {
        /// Number that was asked for.
        ordinal: usize,
        /// Devices found.
        found: usize,
    },
    /// The kernels need bf16 tensor cores.
    #[error("a device of compute capability {major}.{minor}: 8.0 or later is needed")]
    OldDevice {
        /// Major version.
        major: i32,
        /// Minor version.
        minor: i32,
    },
    /// Memory is short.
    #[error(
        "{needed} bytes are asked for, {free} are free on the device: make the batch smaller or \
         use more GPUs"
    )]
    OutOfMemory {
        /// Bytes asked for.
        needed: usize,
        /// Bytes free.
        free: usize,
    },
    /// The driver refuses an operation, or an earlier launch went wrong.
    #[error("CUDA driver: {operation}")]
    Driver {
        /// What was tried.
        operation: String,
        /// The driver's answer.
        #[source]
        source: DriverError,
    },
    /// A kernel source does not compile.
    #[error("NVRTC: {file} for {arch}:\n{log}")]
    Compile {
        /// Source file.
        file: String,
        /// Architecture.
        arch: String,
        /// The compiler's words.
        log: String,
        /// The compiler's answer.
        #[source]
        source: NvrtcError,
    },
    /// cuBLASLt refuses an operation.
    #[error("cuBLASLt: {operation}")]
    Blas {
        /// What was tried.
        operation: String,
        /// The library's answer.
        #[source]
        source: CublasError,
    },
    /// The caller's views do not fit together, or a kernel does not exist for them.
    #[error("a launch that can't be made (a bug of the caller): {0}")]
    Shape(String),
}

impl CudaError {
    /// 69: the device or a library is missing; 70: a bug; 75: worth another try.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::MissingLibrary { .. }
            | Self::NoDevice { .. }
            | Self::OldDevice { .. }
            | Self::OutOfMemory { .. } => 69,
            Self::Driver { .. } => 75,
            Self::Compile { .. } | Self::Blas { .. } | Self::Shape(_) => 70,
        }
    }

    /// Whether less would have been enough.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Driver { source, .. } => source.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            Self::Blas { source, .. } => source.0 == cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED,
            _ => false,
        }
    }

    pub(super) fn shape(what: impl Into<String>) -> Self {
        Self::Shape(what.into())
    }

    /// Names the operation that the driver refused.
    pub(super) fn driver(operation: impl Into<String>) -> impl FnOnce(DriverError) -> Self {
        let operation = operation.into();
        |source| Self::Driver { operation, source }
    }

    pub(super) fn blas(operation: impl Into<String>) -> impl FnOnce(CublasError) -> Self {
        let operation = operation.into();
        |source| Self::Blas { operation, source }
    }
}
