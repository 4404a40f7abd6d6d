//! The kernels on CUDA devices: sources compiled at start by NVRTC, typed launches, cuBLASLt.
//! Knows nothing of models, layers or ranks.
//!
//! Every launch is asynchronous on its stream and takes device addresses from the caller, who
//! promises that the memory is there until the stream has passed. Shapes and types are checked on
//! the host before each launch.

mod attention;
mod blas;
mod dequant;
mod error;
mod experts;
mod loader;
mod memory;
mod moe;
mod nccl;
mod peers;
mod rows;
mod shared_stream;
mod stats;
mod tensor_map;
mod train_attention;
mod train_loss;
mod train_rows;
mod views;

pub use attention::{Attention, AttentionVariant, MAX_HEAD_WIDTH};
pub use blas::{Blas, Form, Product};
/// The driver's bindings, so that all crates use the same ones.
pub use cudarc;
pub use dequant::{Fp8BlockWeight, Int4Weight, Nvfp4Weight};
pub use error::CudaError;
pub use experts::{DevicePanels, EXPERT_ALIGN, ExpertWeights};
pub use loader::{
    Arch, Compiled, CudaKernels, SOURCES, TRAIN_SOURCES, compile, context, device_count,
};
pub use memory::{
    DeviceBuffer, PinnedBuffer, allocations, copy_on_device, download, enable_peer_access, upload,
};
pub use moe::{MAX_EXPERT_GROUPS, MAX_EXPERTS, Permutation, RouteRule, RoutingViews};
pub use nccl::{Communicator, Message, NCCL_ID_BYTES, NcclId, Way};
pub use peers::{PEER_HANDLE_BYTES, PeerMemory};
pub use rows::{LatentHeads, RankParts, RopeView, RowNorm};
pub use shared_stream::{PartTimer, SharedStream};
pub use stats::StateStats;
pub use train_attention::{MAX_OWN, OwnGradient, OwnStep, TrainOperands, TrainPlan};
pub use train_loss::{Comparison, RowLoss, RunningSoftmax, TeacherViews};
pub use train_rows::{AdamWNumbers, AdamWViews, NORM_PARTS, NormGradient, SQUARE_PARTS, Turn};
pub use views::{DeviceHeads, DeviceMatrix, DeviceVector, Dtype};

use cudarc::driver::CudaStream;

/// Launches kernels on one stream.
#[derive(Clone, Copy, Debug)]
pub struct Launcher<'a> {
    kernels: &'a CudaKernels,
    stream: &'a CudaStream,
}

impl Launcher<'_> {
    /// The stream.
    pub fn stream(&self) -> &CudaStream {
        self.stream
    }
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    grid: (u32, u32, u32),
    block: (u32, u32, u32),
    /// Bytes of dynamic shared memory.
    shared: u32,
}

impl Shape {
    fn new(blocks: usize, threads: u32) -> Result<Self, CudaError> {
        Ok(Self { grid: (grid(blocks)?, 1, 1), block: (threads, 1, 1), shared: 0 })
    }
}

/// A number of blocks in the x direction.
fn grid(blocks: usize) -> Result<u32, CudaError> {
    match i32::try_from(blocks) {
        Ok(blocks) => Ok(blocks.unsigned_abs()),
        Err(_) => Err(CudaError::shape(format!("{blocks} blocks in one launch"))),
    }
}

/// An error that names `what` unless `holds`.
fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), CudaError> {
    if holds { Ok(()) } else { Err(CudaError::shape(what())) }
}
