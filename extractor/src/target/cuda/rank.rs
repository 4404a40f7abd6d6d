//! One rank on one GPU, and the start of a group of them. Knows nothing of requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::cuda::cudarc::driver::result::DriverError;
use kernels::cuda::cudarc::driver::sys::CUresult;
use kernels::cuda::{CudaError, Dtype, device_count};

use super::CudaOps;
use super::device::Device;
use super::memory::Load;
use super::nccl::NcclGroup;
use crate::target::CacheId;
use crate::target::collective::{Collective, Solo};
use crate::target::error::TargetError;
use crate::target::model::{ForwardOutput, ForwardRequest, Model, Parts};
use crate::target::options::{Compute, EngineOptions};
use crate::target::plan::RankPlan;
use crate::target::ranks::{EndGroup, RankWorker, Ranks};
use crate::target::source::Source;
use crate::target::spec::TargetSpec;

/// A model on one GPU.
struct CudaRank {
    model: Model<CudaOps>,
    rank: usize,
}

impl RankWorker for CudaRank {
    fn forward(
        &mut self,
        request: &ForwardRequest,
        batch: u64,
        deadline: Instant,
    ) -> Result<ForwardOutput, TargetError> {
        self.model.collective().set_deadline(deadline);
        self.model.ops().device.deadline = deadline;
        let output = self.model.forward(request)?;
        output.trace_shapes(self.rank, batch);
        Ok(output)
    }

    fn drop_cache(&mut self, id: CacheId) {
        self.model.drop_cache(id);
    }
}

/// Number of GPUs that this process sees, of which `needed` are asked for.
fn require_gpus(needed: usize) -> Result<(), TargetError> {
    let found = match device_count() {
        Ok(found) => found,
        Err(CudaError::Driver { source: DriverError(CUresult::CUDA_ERROR_NO_DEVICE), .. }) => 0,
        Err(source) => return Err(TargetError::Cuda { rank: 0, doing: "look for GPUs", source }),
    };
    if found < needed {
        let reason = format!(
            "{needed} GPUs are asked for (a rank each), {found} are here; lower --tp, or see \
             CUDA_VISIBLE_DEVICES"
        );
        return Err(TargetError::Device { device: "cuda", reason });
    }
    Ok(())
}

/// Starts a rank on each GPU.
pub(in crate::target) fn start(
    options: &EngineOptions,
    spec: &TargetSpec,
    plans: &[RankPlan],
    source: Source,
) -> Result<Ranks, TargetError> {
    require_gpus(plans.len())?;
    let group = match plans.len() {
        1 => None,
        ranks => Some(NcclGroup::new(ranks)?),
    };
    let end: EndGroup = match group.clone() {
        None => Arc::new(|_| {}),
        Some(group) => Arc::new(move |reason| group.end(reason)),
    };
    start_ranks(options, (spec, plans, source), group, end)
}

/// Starts ranks with random weights, each with its share of a group that may be larger. Sums go
/// across the ranks that there are.
pub(in crate::target) fn start_shape(
    options: &EngineOptions,
    spec: &TargetSpec,
    plans: &[RankPlan],
) -> Result<Ranks, TargetError> {
    start(options, spec, plans, Source::Random)
}

fn start_ranks(
    options: &EngineOptions,
    (spec, plans, source): (&TargetSpec, &[RankPlan], Source),
    group: Option<Arc<NcclGroup>>,
    end: EndGroup,
) -> Result<Ranks, TargetError> {
    let (spec, plans) = (spec.clone(), plans.to_vec());
    let (tokens, qa_norm_eps, limit) =
        (options.batch_tokens.max(1), options.qa_norm_eps, options.deadline);
    let dtype = match options.compute.on(options.device) {
        Compute::F32 => Dtype::F32,
        Compute::Bf16 | Compute::Auto => Dtype::Bf16,
    };
    Ranks::start(plans.len(), options.deadline, end, move |rank| {
        let device = Device::open(rank, dtype, limit)?;
        let collective: Box<dyn Collective<_>> = match &group {
            None => Box::new(Solo),
            Some(group) => Box::new(group.connect(rank, &device.compute)?),
        };
        let plan = plans[rank].clone();
        let decodes = dtype == Dtype::Bf16 && device.launch().has_expert_products();
        let load = Load { spec: &spec, plan: &plan, source: &source, dtype, tokens, decodes };
        let ops = CudaOps::new(device, &load)?;
        let parts = Parts { ops, collective, source: &source, spec: &spec, plan, qa_norm_eps };
        let mut model = Model::load(parts)?;
        model.ops().finish_loading()?;
        Ok(CudaRank { model, rank })
    })
}

impl CudaOps {
    /// Waits for the weights and says how much memory is in use.
    fn finish_loading(&mut self) -> Result<(), TargetError> {
        self.device.settle("load weights")?;
        self.progress.report(self.device.rank);
        let memory = self.device.context.mem_get_info();
        let memory = memory.map_err(super::device::driver("ask for free memory"));
        let (free, total) = self.device.doing("ask for free memory", memory)?;
        let used = super::memory::gib((total - free) as u64);
        tracing::info!(rank = self.device.rank, "{used} of the GPU are in use");
        Ok(())
    }
}

/// TFLOP/s that no bf16 product of the first GPU exceeds, measured now.
pub(in crate::target) fn ceiling() -> Result<f64, TargetError> {
    require_gpus(1)?;
    let mut device = Device::open(0, Dtype::Bf16, Duration::from_secs(60))?;
    let Device { blas, compute, .. } = &mut device;
    let measured = super::gemm::ceiling(blas, compute);
    device.doing("measure the ceiling of products", measured)
}
