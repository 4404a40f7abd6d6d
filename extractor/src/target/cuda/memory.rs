//! What the memory of a GPU is used for, computed before any of it is taken. Pure arithmetic;
//! knows no driver.

use std::fmt;
use std::sync::Arc;

use kernels::cuda::Dtype;
use kernels::cuda::cudarc::driver::CudaContext;
use shared::StateDtype;

use super::capture::Form;
use super::device::{Device, driver};
use super::experts::ExpertSizes;
use super::gemm::{WORKSPACE_BYTES, padded_rows};
use super::grouped::Grouped;
use super::lanes::LANES;
use super::routing::RoutingMemory;
use super::weights::expert_formats;
use crate::target::error::TargetError;
use crate::target::model::rooms;
use crate::target::ops::{ExpertShare, Precision, Room};
use crate::target::plan::RankPlan;
use crate::target::source::Source;
use crate::target::spec::{AttentionSpec, MoeSpec, TargetSpec};
use crate::target::weights::PackedFormat;

/// Memory that kernels and cuBLASLt take for themselves: 13 to 22 MB were seen on an H200.
const LIBRARIES: u64 = 16 << 20;
/// Memory that NCCL takes: 1.07 GB were seen between two H200.
const NCCL: u64 = 1 << 30;

/// What one rank is to hold.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) spec: &'a TargetSpec,
    pub(super) plan: &'a RankPlan,
    /// Ranks that rows are exchanged with, itself one; a bench has fewer than the plan.
    pub(super) ranks: usize,
    /// Whether NCCL carries the rows.
    pub(super) nccl: bool,
    pub(super) source: &'a Source,
    pub(super) dtype: Dtype,
    /// Tokens of the largest batch.
    pub(super) tokens: usize,
    /// Whether the device has products of experts that decode INT4.
    pub(super) decodes: bool,
    /// How captured states are stored.
    pub(super) states: StateDtype,
}

impl Load<'_> {
    /// How captured rows travel.
    pub(super) fn captured(&self) -> Form {
        Form::new(self.dtype, self.spec.hidden_size, self.states)
    }

    /// Rows of a layer that this rank captures.
    pub(super) fn share(&self) -> usize {
        self.tokens.div_ceil(self.plan.world_size)
    }
}

/// Bytes by use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryPlan {
    tokens: usize,
    lines: Vec<(&'static str, u64)>,
}

impl MemoryPlan {
    pub(super) fn new(load: &Load<'_>) -> Self {
        let mut lines = vec![("weights", dense_weights(load))];
        let tokens = load.tokens;
        let size = load.dtype.size();
        if let Some(moe) = &load.spec.moe {
            let sizes = expert_sizes(load, moe);
            lines.push(("experts", expert_weights(load, moe)));
            lines.push(("work of the experts", (sizes.work(tokens) * size) as u64));
            if !sizes.grouped {
                lines.push(("workspace of experts", (LANES * WORKSPACE_BYTES) as u64));
            }
            let choice: usize = RoutingMemory::values(&sizes, tokens).iter().sum();
            lines.push(("choice of experts", choice as u64 * 4));
        }
        let rooms = rooms(load.spec, load.plan, load.ranks).0;
        let rooms = rooms.into_iter().filter(|room| room.width > 0);
        lines.extend(rooms.map(|room| (room.name, room_bytes(&room, load.dtype, tokens))));
        lines.push(("captured rows", load.captured().all_bytes(load.share()) as u64));
        lines.push(("positions and ids", inputs(load.spec, tokens).iter().sum::<usize>() as u64));
        let products = 1 + usize::from(load.ranks > 1);
        lines.push(("workspace of products", (products * WORKSPACE_BYTES) as u64));
        lines.push(("kernels and libraries", LIBRARIES));
        if load.nccl {
            lines.push(("exchange between ranks", NCCL));
        }
        Self { tokens, lines }
    }

    /// All bytes.
    pub(super) fn total(&self) -> u64 {
        self.lines.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of weights and of experts.
    pub(super) fn weights(&self) -> u64 {
        let is_weight = |name: &str| name == "weights" || name == "experts";
        self.lines.iter().filter(|(name, _)| is_weight(name)).map(|(_, bytes)| bytes).sum()
    }
}

/// Prints the plan, and refuses one that is larger than the free memory.
pub(super) fn require(device: &Device, plan: &MemoryPlan) -> Result<(), TargetError> {
    let rank = device.rank;
    let memory = device.context.mem_get_info().map_err(driver("ask for free memory"));
    let (free, total) = device.doing("ask for free memory", memory)?;
    tracing::info!(rank, "memory {plan}, of {} free", gib(free as u64));
    if plan.total() > free as u64 {
        return Err(TargetError::Memory {
            rank,
            needed: gib(plan.total()),
            free: gib(free as u64),
            total: gib(total as u64),
            tokens: plan.tokens,
            plan: plan.to_string(),
        });
    }
    Ok(())
}

/// An error of the start, with the numbers where it says that memory is short.
pub(super) fn explained(
    error: TargetError,
    context: &Arc<CudaContext>,
    load: &Load<'_>,
) -> TargetError {
    let (rank, memory) = match (&error, context.mem_get_info()) {
        (TargetError::Cuda { rank, source, .. }, Ok(memory)) if source.is_out_of_memory() => {
            (*rank, memory)
        }
        _ => return error,
    };
    let plan = MemoryPlan::new(load);
    let (free, total) = memory;
    TargetError::Memory {
        rank,
        needed: gib(plan.total()),
        free: format!("with a part of that taken {}", gib(free as u64)),
        total: gib(total as u64),
        tokens: plan.tokens,
        plan: plan.to_string(),
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "for batches of {} tokens:", self.tokens)?;
        for (name, bytes) in &self.lines {
            writeln!(f, "  {name:24} {:>12}", gib(*bytes))?;
        }
        write!(f, "  {:24} {:>12}", "together", gib(self.total()))
    }
}

/// Bytes, written out.
pub(super) fn gib(bytes: u64) -> String {
    format!("{:.3} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// Bytes of a buffer for batches of `tokens`.
fn room_bytes(room: &Room, dtype: Dtype, tokens: usize) -> u64 {
    (room_values(room, tokens) * precision(room.precision, dtype).size()) as u64
}

/// Values of a buffer for batches of `tokens`; padding of products included.
pub(super) fn room_values(room: &Room, tokens: usize) -> usize {
    room.width * padded_rows(tokens.div_ceil(room.ranks))
}

/// Number format of a buffer on this device.
pub(super) fn precision(precision: Precision, dtype: Dtype) -> Dtype {
    match precision {
        Precision::Compute => dtype,
        Precision::Single => Dtype::F32,
    }
}

/// Bytes of ids, positions, cosines and sines of a batch, starts of queries and of keys in two
/// halves, and the tables of cosines and sines.
pub(super) fn inputs(spec: &TargetSpec, tokens: usize) -> [usize; 10] {
    let pairs = spec.rope.dim / 2;
    let table = spec.max_position_embeddings * pairs * 4;
    let angles = tokens * pairs * 4;
    let starts = (tokens + 1) * 4;
    let ids = tokens * 4;
    [ids, ids, angles, angles, starts, starts, starts, starts, table, table]
}

/// Sizes of the routed experts on one rank.
pub(super) fn expert_sizes(load: &Load<'_>, moe: &MoeSpec) -> ExpertSizes {
    let Load { spec, plan, .. } = load;
    let (columns, hidden) = (plan.expert_columns.len(), spec.hidden_size);
    let (held, mut formats) = (plan.experts.len(), expert_layers(load, moe));
    let grouped = |formats| Grouped::fits(formats, held, [columns, hidden]);
    ExpertSizes {
        first: plan.experts.start,
        held,
        columns,
        hidden,
        top_k: moe.top_k,
        num_experts: moe.num_experts,
        grouped: load.decodes && formats.all(grouped),
    }
}

/// Formats of the experts of every layer that has some.
fn expert_layers<'a>(
    load: &'a Load<'_>,
    moe: &MoeSpec,
) -> impl Iterator<Item = [PackedFormat; 2]> + use<'a> {
    let share = expert_share(load, moe);
    let layers = (0..load.spec.num_layers).filter(|&layer| load.spec.is_moe_layer(layer));
    layers.map(move |layer| {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        expert_formats(load.source, &prefix, &share, load.dtype)
    })
}

fn expert_share(load: &Load<'_>, moe: &MoeSpec) -> ExpertShare {
    ExpertShare {
        experts: load.plan.experts.clone(),
        columns: load.plan.expert_columns.clone(),
        width: moe.intermediate_size,
        hidden: load.spec.hidden_size,
    }
}

/// Bytes of everything but the routed experts. Norms and biases are f32.
fn dense_weights(load: &Load<'_>) -> u64 {
    let Load { spec, plan, dtype, .. } = *load;
    let hidden = spec.hidden_size;
    let (matrices, vectors) = match &spec.attention {
        AttentionSpec::Mla(mla) => {
            let qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
            let heads = plan.heads.len();
            let (queries, norm) = match mla.q_lora_rank {
                None => (heads * qk * hidden, 0),
                Some(rank) => (rank * (hidden + heads * qk), rank),
            };
            let latent = (mla.kv_lora_rank + mla.qk_rope_head_dim) * hidden;
            let expand = heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank;
            let out = hidden * heads * mla.v_head_dim;
            (queries + latent + expand + out, norm + mla.kv_lora_rank)
        }
        AttentionSpec::Gqa(gqa) => {
            let width = (plan.heads.len() + 2 * plan.kv_heads.len()) * gqa.head_dim;
            let out = plan.heads.len() * gqa.head_dim;
            let bias = if gqa.qkv_bias { width } else { 0 };
            let norms = if gqa.qk_norm { 2 * gqa.head_dim } else { 0 };
            ((width + out) * hidden, bias + norms)
        }
    };
    let tables = if spec.tie_word_embeddings { 1 } else { 2 };
    let mut values = tables * plan.vocab.len() * hidden + spec.num_layers * matrices;
    let mut floats = hidden + spec.num_layers * (vectors + 2 * hidden);
    for layer in 0..spec.num_layers {
        match &spec.moe {
            Some(moe) if spec.is_moe_layer(layer) => {
                values += moe.num_experts * hidden + 3 * hidden * plan.shared.len();
                floats += moe.num_experts;
            }
            _ => values += 3 * hidden * plan.dense.len(),
        }
    }
    (values * dtype.size() + floats * 4) as u64
}

fn expert_weights(load: &Load<'_>, moe: &MoeSpec) -> u64 {
    let (columns, hidden) = (load.plan.expert_columns.len(), load.spec.hidden_size);
    let matrix = |format: PackedFormat, dims| format.code_bytes(dims) + format.scale_bytes(dims);
    let bytes = expert_layers(load, moe).map(|[gate_up, down]| {
        2 * matrix(gate_up, [columns, hidden]) + matrix(down, [hidden, columns])
    });
    (load.plan.experts.len() * bytes.sum::<usize>()) as u64
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use safetensors::SafeTensors;

    use super::*;
    use crate::target::options::EngineOptions;
    use crate::target::weights::Checkpoint;

    fn repository(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
    }

    fn plans(model: &str, tp: usize, tokens: usize) -> (u64, Vec<MemoryPlan>) {
        let dir = repository(model);
        let spec = TargetSpec::read(&dir).unwrap();
        let source = Source::Checkpoint(Checkpoint::open(&dir).unwrap());
        let options = EngineOptions { tp, ..EngineOptions::new(&dir) };
        let plans = options.plans(&spec).unwrap();
        let plan = |plan| {
            let (decodes, ranks, nccl, source, spec) = (false, tp, tp > 1, &source, &spec);
            let (dtype, states) = (Dtype::Bf16, StateDtype::Bf16);
            MemoryPlan::new(&Load {
                spec,
                plan,
                ranks,
                nccl,
                source,
                dtype,
                tokens,
                decodes,
                states,
            })
        };
        (stored(&dir), plans.iter().map(plan).collect())
    }

    /// Bytes of the weights as files have them, but that vectors are held in f32, everything
    /// else that is not packed in bf16, and shapes not at all.
    fn stored(dir: &Path) -> u64 {
        let mut sum = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(path).unwrap();
            for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let elements: usize = tensor.shape().iter().product();
                sum += match tensor.shape().len() {
                    // Nothing of pictures is read.
                    _ if name.starts_with("vision_tower") || name.starts_with("mm_") => 0,
                    _ if name.ends_with("weight_shape") => 0,
                    1 => 4 * elements,
                    _ if name.ends_with(".weight") => 2 * elements,
                    _ => tensor.data().len(),
                };
            }
        }
        sum as u64
    }

    /// Checked against the files themselves, which know nothing of the plan's formulas.
    #[test]
    fn weights_of_one_rank_are_those_of_the_files() {
        for model in ["models/nano-kimi", "tests/fixtures/tiny-odd", "tests/fixtures/stories260k"] {
            let (stored, plans) = plans(model, 1, 64);
            assert_eq!(plans[0].weights(), stored, "{model}: {}", plans[0]);
        }
    }

    /// Experts in INT4 whose sides are multiples of 128 need no lanes.
    #[test]
    fn products_that_decode_take_what_fits_them() {
        for (model, fits) in [("models/nano-kimi", true), ("tests/fixtures/tiny-odd", false)] {
            let dir = repository(model);
            let spec = TargetSpec::read(&dir).unwrap();
            let source = Source::Checkpoint(Checkpoint::open(&dir).unwrap());
            let plans = EngineOptions::new(&dir).plans(&spec).unwrap();
            let grouped = |decodes| {
                let (plan, source, spec) = (&plans[0], &source, &spec);
                let (dtype, states) = (Dtype::Bf16, StateDtype::Bf16);
                let (ranks, nccl, tokens) = (1, false, 64);
                let load = Load { spec, plan, ranks, nccl, source, dtype, tokens, decodes, states };
                expert_sizes(&load, spec.moe.as_ref().unwrap()).grouped
            };
            assert_eq!([grouped(true), grouped(false)], [fits, false], "{model}");
        }
    }

    #[test]
    fn more_ranks_need_less_each_and_more_tokens_need_more() {
        let (stored, two) = plans("models/nano-kimi", 2, 64);
        assert!(two.iter().all(|plan| plan.weights() < stored));
        assert!(two.iter().map(MemoryPlan::weights).sum::<u64>() >= stored);
        let (_, larger) = plans("models/nano-kimi", 2, 128);
        assert_eq!(larger[0].weights(), two[0].weights());
        assert!(larger[0].total() > two[0].total());
    }

    #[test]
    fn the_plan_names_every_use_in_gib() {
        let (_, plans) = plans("models/nano-kimi", 1, 64);
        let text = plans[0].to_string();
        for part in ["batches of 64 tokens", "experts", "residual stream", "captured", "GiB"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
