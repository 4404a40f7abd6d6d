//! The target model: the frozen network whose hidden states are recorded.

mod collective;
mod config;
mod cpu;
mod cuda;
mod error;
mod experts;
#[cfg(test)]
pub(crate) mod fault;
mod group;
mod kv;
mod model;
mod ops;
mod options;
mod plan;
mod ranks;
mod source;
mod spec;
mod unread;
pub mod weights;

use shared::LayerIndex;

pub(crate) use self::cuda::LastResort;
#[cfg(test)]
pub(crate) use self::cuda::hang_at_exit;
pub use self::cuda::{FreeMemory, exit_at_once};
pub use self::error::{EXIT_DIED, TargetError};
pub use self::group::{Probe, RankGroup};
pub use self::model::{GivenExperts, Stage, StageTimes, Wanted};
pub use self::ops::RouterChoice;
pub use self::options::{Compute, Device, EngineOptions, Exchange};
pub use self::plan::{ExpertPlan, LayerFlops, RankPlan};
pub use self::spec::{
    AttentionSpec, GqaSpec, MlaSpec, MoeSpec, QaNormEps, RopeScaling, RopeSpec, TargetSpec,
    YarnSpec,
};
use crate::batch::TokenBatch;
use crate::capture::Capture;

/// Opens the model of a checkpoint directory and starts its ranks.
pub fn open(options: &EngineOptions) -> Result<Box<dyn TargetModel>, TargetError> {
    Ok(Box::new(RankGroup::open(options)?))
}

/// TFLOP/s of the largest bf16 products of the first GPU, measured now: what nothing exceeds.
pub fn gemm_ceiling() -> Result<f64, TargetError> {
    cuda::ceiling()
}

/// Identifies a KV cache that a target holds between calls of [`TargetModel::extend`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CacheId(pub u64);

/// What one [`TargetModel::extend`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Extension {
    /// States of the new tokens at the requested layers.
    pub capture: Capture,
    /// Row-major [new tokens, vocab] logits.
    pub logits: Vec<f32>,
}

/// The frozen model, as the pipeline sees it.
pub trait TargetModel: Send {
    /// Dimensions and names of the model.
    fn spec(&self) -> &TargetSpec;

    /// Runs every sample of the batch through the model, each attending only to itself, and
    /// returns the states of the requested layers in batch order.
    fn prefill(
        &mut self,
        batch: &TokenBatch,
        layers: &[LayerIndex],
    ) -> Result<Capture, TargetError>;

    /// Cuts the cache back to its first `keep` tokens, appends `tokens`, and returns the logits
    /// and states of the appended ones. An unknown `cache` starts empty (`keep` must be 0).
    fn extend(&mut self, request: &ExtendRequest<'_>) -> Result<Extension, TargetError>;

    /// Forgets a cache.
    fn drop_cache(&mut self, cache: CacheId);
}

/// Arguments of [`TargetModel::extend`].
#[derive(Clone, Copy, Debug)]
pub struct ExtendRequest<'a> {
    /// Which cache to extend.
    pub cache: CacheId,
    /// Tokens of the cache to keep.
    pub keep: usize,
    /// Token ids to append.
    pub tokens: &'a [u32],
    /// Layers whose outputs to return.
    pub layers: &'a [LayerIndex],
}
