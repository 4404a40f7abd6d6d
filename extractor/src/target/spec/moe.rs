//! Reads the mixture of experts of a `config.json`, whose names differ by family.

use kernels::router::Scoring;

use super::{Fields, MoeSpec, TargetError};

impl MoeSpec {
    /// Every layer is routed, by a softmax over all experts, without a bias or shared experts.
    pub(super) fn qwen3(fields: &Fields<'_>) -> Result<Self, TargetError> {
        let sparse_step = fields.size_or("decoder_sparse_step", 1..=1024, 1)?;
        fields.require("decoder_sparse_step", sparse_step == 1, || {
            format!("is {sparse_step}; only 1, every layer, is supported")
        })?;
        let dense_layers = fields.ids("mlp_only_layers")?;
        fields.require("mlp_only_layers", dense_layers.is_empty(), || {
            format!("names {} layers; none is supported", dense_layers.len())
        })?;
        // The second name is that of transformers 5.
        let num_experts = match fields.optional_size("num_experts", 1..=1 << 14)? {
            Some(experts) => experts,
            None => fields.size("num_local_experts", 1..=1 << 14)?,
        };
        let moe = Self {
            num_experts,
            scoring: Scoring::Softmax,
            top_k: fields.size("num_experts_per_tok", 1..=1024)?,
            intermediate_size: fields.size("moe_intermediate_size", 1..=1 << 20)?,
            num_shared_experts: 0,
            num_groups: 1,
            topk_group: 1,
            norm_topk_prob: fields.flag_or("norm_topk_prob", false)?,
            routed_scaling_factor: 1.0,
            first_dense_layers: 0,
            layer_freq: 1,
        };
        moe.check(fields)?;
        Ok(moe)
    }

    pub(super) fn deepseek(fields: &Fields<'_>) -> Result<Self, TargetError> {
        let scoring = fields.text_or("scoring_func", "sigmoid")?;
        fields.require("scoring_func", scoring == "sigmoid", || {
            format!("is `{scoring}`; only sigmoid is supported")
        })?;
        let method = fields.text_or("topk_method", "noaux_tc")?;
        fields.require("topk_method", method == "noaux_tc", || {
            format!("is `{method}`; only noaux_tc is supported")
        })?;
        let moe = Self {
            num_experts: fields.size("n_routed_experts", 1..=1 << 14)?,
            scoring: Scoring::Sigmoid,
            top_k: fields.size("num_experts_per_tok", 1..=1024)?,
            intermediate_size: fields.size("moe_intermediate_size", 1..=1 << 20)?,
            num_shared_experts: fields.size_or("n_shared_experts", 0..=1024, 0)?,
            num_groups: fields.size_or("n_group", 1..=1024, 1)?,
            topk_group: fields.size_or("topk_group", 1..=1024, 1)?,
            norm_topk_prob: fields.flag_or("norm_topk_prob", true)?,
            routed_scaling_factor: fields
                .optional_number("routed_scaling_factor", 1e-6..=1e6)?
                .unwrap_or(1.0) as f32,
            first_dense_layers: fields.size_or("first_k_dense_replace", 0..=1024, 0)?,
            layer_freq: fields.size_or("moe_layer_freq", 1..=1024, 1)?,
        };
        moe.check(fields)?;
        Ok(moe)
    }

    fn check(&self, fields: &Fields<'_>) -> Result<(), TargetError> {
        let Self { num_experts, num_groups, topk_group, top_k, .. } = *self;
        fields.require("n_group", num_experts.is_multiple_of(num_groups), || {
            format!("is {num_groups}, which does not divide n_routed_experts, {num_experts}")
        })?;
        fields.require("topk_group", topk_group <= num_groups, || {
            format!("is {topk_group}, more than n_group, {num_groups}")
        })?;
        let per_group = num_experts / num_groups;
        // A group is scored by its two best experts.
        fields.require("n_group", num_groups == 1 || per_group >= 2, || {
            format!("is {num_groups}, which leaves {per_group} expert a group; two are needed")
        })?;
        let eligible = topk_group * per_group;
        fields.require("num_experts_per_tok", top_k <= eligible, || {
            format!("is {top_k}, but only {eligible} experts are in the kept groups")
        })
    }
}
