//! One rank on one GPU, and the start of a group of them. Knows nothing of requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kernels::cuda::cudarc::driver::CudaContext;
use kernels::cuda::cudarc::driver::result::DriverError;
use kernels::cuda::cudarc::driver::sys::CUresult;
use kernels::cuda::{CudaError, Dtype, device_count};

use super::CudaOps;
use super::buffer::CudaBuffer;
use super::device::Device;
use super::memory::{Load, MemoryPlan};
use super::nccl::NcclGroup;
use super::peers::PeerGroup;
use crate::target::CacheId;
use crate::target::collective::{Collective, Solo};
use crate::target::error::TargetError;
use crate::target::model::{ForwardOutput, ForwardRequest, Model, Parts};
use crate::target::options::{Compute, EngineOptions, Exchange};
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
        let output = self.model.forward(request);
        let output = output.map_err(|error| error.of_batch(request.ids.len()))?;
        output.trace_shapes(self.rank, batch);
        Ok(output)
    }

    fn drop_cache(&mut self, id: CacheId) {
        self.model.drop_cache(id);
    }

    #[cfg(test)]
    fn spoil(&mut self, how: crate::target::fault::Spoil) {
        self.model.ops().device.spoil(how);
    }
}

fn dtype(options: &EngineOptions) -> Dtype {
    match options.compute.on(options.device) {
        Compute::F32 => Dtype::F32,
        Compute::Bf16 | Compute::Auto => Dtype::Bf16,
    }
}

/// Free bytes of the first GPU, watched from before anything is taken.
pub struct FreeMemory {
    context: Arc<CudaContext>,
    before: usize,
}

impl FreeMemory {
    /// Looks at the first GPU, whose context is made for it and stays.
    pub fn watch() -> Result<Self, TargetError> {
        require_gpus(1)?;
        let asked = |source| TargetError::Cuda { rank: 0, doing: "ask for free memory", source };
        let context = kernels::cuda::context(0).map_err(asked)?;
        let memory = context.mem_get_info().map_err(super::device::driver("ask for free memory"));
        let (before, _) = memory.map_err(asked)?;
        Ok(Self { context, before })
    }

    /// Bytes taken since, by everybody.
    pub fn taken(&self) -> Result<u64, TargetError> {
        let memory = self.context.mem_get_info();
        let memory = memory.map_err(super::device::driver("ask for free memory"));
        let (free, _) = memory.map_err(|source| TargetError::Cuda {
            rank: 0,
            doing: "ask for free memory",
            source,
        })?;
        Ok(self.before.saturating_sub(free) as u64)
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

/// Starts a rank on each GPU. Returns too how many bytes each has planned to take.
pub(in crate::target) fn start(
    options: &EngineOptions,
    spec: &TargetSpec,
    plans: &[RankPlan],
    source: Source,
) -> Result<(Ranks, Vec<u64>), TargetError> {
    super::limits::check(spec)?;
    let gpus = if ranks_share_gpus() { 1 } else { plans.len() };
    require_gpus(gpus)?;
    let group = Group::new(plans.len(), options.exchange)?;
    let end: EndGroup = match group.clone() {
        Group::Alone => Arc::new(|_| {}),
        Group::Nccl(group) => Arc::new(move |reason| group.end(reason)),
        Group::Peers(group) => Arc::new(move |reason| group.end(reason)),
    };
    let planned = Arc::new(Mutex::new(vec![0; plans.len()]));
    let ranks = start_ranks(options, (spec, plans, source), (group, end), Arc::clone(&planned))?;
    let planned = planned.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok((ranks, planned))
}

/// How rows cross the ranks.
#[derive(Clone)]
enum Group {
    Alone,
    Nccl(Arc<NcclGroup>),
    Peers(Arc<PeerGroup>),
}

impl Group {
    fn new(ranks: usize, exchange: Exchange) -> Result<Self, TargetError> {
        Ok(match exchange {
            _ if ranks == 1 => Self::Alone,
            Exchange::Copies => Self::Peers(PeerGroup::new(ranks)),
            // NCCL wants a GPU for every rank.
            Exchange::Nccl if ranks_share_gpus() => Self::Peers(PeerGroup::new(ranks)),
            Exchange::Nccl => Self::Nccl(NcclGroup::new(ranks)?),
        })
    }

    fn connect(&self, device: &mut Device) -> Result<Box<dyn Collective<CudaBuffer>>, TargetError> {
        let rank = device.rank;
        let mut side = || {
            let stream = device.open_side();
            device.doing("make a stream", stream)
        };
        Ok(match self {
            Self::Alone => Box::new(Solo),
            Self::Nccl(group) => Box::new(group.connect(rank, side()?)?),
            Self::Peers(group) => Box::new(group.connect(rank, side()?)?),
        })
    }
}

/// All ranks compute on the first GPU (AERIE_RANKS_SHARE_GPU=1): slow, but what several ranks do
/// can be checked where there is one.
fn ranks_share_gpus() -> bool {
    std::env::var_os("AERIE_RANKS_SHARE_GPU").is_some_and(|value| value == "1")
}

/// Starts ranks with random weights, each with its share of a group that may be larger. Sums go
/// across the ranks that there are.
pub(in crate::target) fn start_shape(
    options: &EngineOptions,
    spec: &TargetSpec,
    plans: &[RankPlan],
) -> Result<(Ranks, Vec<u64>), TargetError> {
    start(options, spec, plans, Source::Random)
}

fn start_ranks(
    options: &EngineOptions,
    (spec, plans, source): (&TargetSpec, &[RankPlan], Source),
    (group, end): (Group, EndGroup),
    planned: Arc<Mutex<Vec<u64>>>,
) -> Result<Ranks, TargetError> {
    let (spec, plans) = (spec.clone(), plans.to_vec());
    let (tokens, qa_norm_eps, limit) =
        (options.batch_tokens.max(1), options.qa_norm_eps, options.deadline);
    let states = options.states;
    #[cfg(test)]
    let faults = options.faults.clone();
    let dtype = dtype(options);
    Ranks::start(plans.len(), options.deadline, end, move |rank| {
        let gpu = if ranks_share_gpus() { 0 } else { rank };
        let mut device = Device::open((rank, gpu), dtype, limit)?;
        let collective = group.connect(&mut device)?;
        let plan = plans[rank].clone();
        let decodes = dtype == Dtype::Bf16 && device.launch().has_expert_products();
        let context = Arc::clone(&device.context);
        let (spec, source, ranks) = (&spec, &source, plans.len());
        let nccl = matches!(group, Group::Nccl(_));
        let held = &plan;
        let load = Load { spec, plan: held, ranks, nccl, source, dtype, tokens, decodes, states };
        let explained = |error| super::memory::explained(error, &context, &load);
        let total = MemoryPlan::new(&load).total();
        planned.lock().unwrap_or_else(PoisonError::into_inner)[rank] = total;
        let ops = CudaOps::new(device, &load).map_err(explained)?;
        let plan = plan.clone();
        let parts = Parts { ops, collective, source, spec, plan, qa_norm_eps };
        let mut model = Model::load(parts).map_err(explained)?;
        model.ops().finish_loading()?;
        let worker = CudaRank { model, rank };
        #[cfg(test)]
        let worker = crate::target::fault::Faulty { worker, rank, faults: faults.clone() };
        Ok(worker)
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
    let mut device = Device::open((0, 0), Dtype::Bf16, Duration::from_secs(60))?;
    let compute = Arc::clone(&device.compute);
    let measured = super::gemm::ceiling(device.products(), &compute);
    device.doing("measure the ceiling of products", measured)
}
