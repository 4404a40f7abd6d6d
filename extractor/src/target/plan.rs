//! Which part of the model each rank of a tensor-parallel group holds. Knows nothing of devices.

use std::ops::Range;

use super::error::TargetError;
use super::spec::{AttentionSpec, TargetSpec};

/// How routed experts are spread over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExpertPlan {
    /// Whole experts where their count divides, otherwise each expert cut over all ranks.
    #[default]
    Auto,
    /// Whole experts, a contiguous range a rank.
    Whole,
    /// Every expert cut along its intermediate width over all ranks.
    Sharded,
}

/// The share of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlan {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub world_size: usize,
    /// Rows of the embedding table and the head.
    pub vocab: Range<usize>,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key and value heads; equal to `heads` for multi-head latent attention.
    pub kv_heads: Range<usize>,
    /// Columns of the dense MLP's intermediate.
    pub dense: Range<usize>,
    /// Columns of the shared experts' intermediate.
    pub shared: Range<usize>,
    /// Routed experts held here.
    pub experts: Range<usize>,
    /// Columns of each held expert's intermediate.
    pub expert_columns: Range<usize>,
}

impl RankPlan {
    /// The share of `rank` in a group of `tp`, or why the model cannot be split so.
    pub fn new(
        spec: &TargetSpec,
        tp: usize,
        rank: usize,
        experts: ExpertPlan,
    ) -> Result<Self, TargetError> {
        let part = |count: usize| rank * count / tp..(rank + 1) * count / tp;
        let at_least = |what, count: usize| {
            if count < tp { Err(TargetError::Split { tp, what, count }) } else { Ok(part(count)) }
        };
        let (num_heads, num_kv_heads) = match &spec.attention {
            AttentionSpec::Mla(mla) => (mla.num_heads, mla.num_heads),
            AttentionSpec::Gqa(gqa) => (gqa.num_heads, gqa.num_kv_heads),
        };
        let heads = exact("attention heads", num_heads, tp, rank)?;
        let kv_heads = if num_kv_heads < tp && tp.is_multiple_of(num_kv_heads) {
            // Several ranks share a head; each keeps a copy.
            let head = rank * num_kv_heads / tp;
            head..head + 1
        } else {
            exact("key-value heads", num_kv_heads, tp, rank)?
        };
        let mut plan = Self {
            rank,
            world_size: tp,
            vocab: at_least("vocabulary rows", spec.vocab_size)?,
            heads,
            kv_heads,
            dense: at_least("columns of the dense MLP", spec.intermediate_size)?,
            shared: 0..0,
            experts: 0..0,
            expert_columns: 0..0,
        };
        if let Some(moe) = &spec.moe {
            if moe.num_shared_experts > 0 {
                let width = moe.num_shared_experts * moe.intermediate_size;
                plan.shared = at_least("columns of the shared experts", width)?;
            }
            let divides = moe.num_experts.is_multiple_of(tp);
            if experts == ExpertPlan::Whole || (experts == ExpertPlan::Auto && divides) {
                plan.experts = exact("routed experts", moe.num_experts, tp, rank)?;
                plan.expert_columns = 0..moe.intermediate_size;
            } else {
                plan.experts = 0..moe.num_experts;
                plan.expert_columns =
                    exact("columns of a routed expert", moe.intermediate_size, tp, rank)?;
            }
        }
        Ok(plan)
    }
}

/// Floating point operations of one rank for a token, in one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerFlops {
    /// Projections of the attention.
    pub projections: f64,
    /// Scores and values.
    pub attention: f64,
    /// Dense MLP, or shared experts.
    pub mlp: f64,
    /// Router and routed experts, with rows spread evenly over the ranks.
    pub experts: f64,
}

impl LayerFlops {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.projections + self.attention + self.mlp + self.experts
    }
}

impl RankPlan {
    /// Operations of decoder layer `layer` for a token with `context` keys.
    pub fn layer_flops(&self, spec: &TargetSpec, layer: usize, context: f64) -> LayerFlops {
        let hidden = spec.hidden_size;
        let (heads, kv_heads) = (self.heads.len(), self.kv_heads.len());
        let (projections, scores) = match &spec.attention {
            AttentionSpec::Mla(mla) => {
                let qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
                let queries = match mla.q_lora_rank {
                    None => hidden * heads * qk,
                    Some(rank) => rank * (hidden + heads * qk),
                };
                let keys = (mla.kv_lora_rank + mla.qk_rope_head_dim) * hidden
                    + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim);
                (queries + keys + heads * mla.v_head_dim * hidden, heads * (qk + mla.v_head_dim))
            }
            AttentionSpec::Gqa(gqa) => {
                let all = 2 * (heads + kv_heads) * gqa.head_dim;
                (all * hidden, 2 * heads * gqa.head_dim)
            }
        };
        let (mlp, experts) = match &spec.moe {
            Some(moe) if spec.is_moe_layer(layer) => {
                let share = self.experts.len() * self.expert_columns.len();
                let routed = (moe.top_k * 3 * hidden * share) as f64 / moe.num_experts as f64;
                (3 * hidden * self.shared.len(), routed + (moe.num_experts * hidden) as f64)
            }
            _ => (3 * hidden * self.dense.len(), 0.0),
        };
        LayerFlops {
            projections: 2.0 * projections as f64,
            attention: 2.0 * scores as f64 * context,
            mlp: 2.0 * mlp as f64,
            experts: 2.0 * experts,
        }
    }
}

fn exact(
    what: &'static str,
    count: usize,
    tp: usize,
    rank: usize,
) -> Result<Range<usize>, TargetError> {
    if !count.is_multiple_of(tp) {
        return Err(TargetError::Split { tp, what, count });
    }
    let share = count / tp;
    Ok(rank * share..(rank + 1) * share)
}
