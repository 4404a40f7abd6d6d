//! Dimensions of real models, for benches without their weights.

use clap::ValueEnum;
use extractor::target::{TargetError, TargetSpec};
use serde_json::json;

/// A model's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shape {
    /// Kimi-K2.5 with INT4 experts.
    #[value(name = "kimi-k2.5")]
    KimiK25,
}

impl Shape {
    /// The dimensions with `layers` layers, all of which have routed experts: the one dense layer
    /// of the whole model costs the same to one part in a hundred.
    pub(crate) fn spec(self, layers: usize) -> Result<TargetSpec, TargetError> {
        let Self::KimiK25 = self;
        TargetSpec::from_json(&json!({
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "num_hidden_layers": layers,
            "vocab_size": 163_840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": true,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50_000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": false,
            "tie_word_embeddings": true,
            "max_position_embeddings": 262_144,
            "bos_token_id": 163_584,
            "eos_token_id": 163_586,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0
            }
        }))
    }

    /// Layers of the whole model.
    pub(crate) fn layers(self) -> usize {
        let Self::KimiK25 = self;
        61
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_eight_has_eight_heads_and_48_experts() {
        let spec = Shape::KimiK25.spec(4).unwrap();
        let plan =
            extractor::target::RankPlan::new(&spec, 8, 0, extractor::target::ExpertPlan::Auto);
        let plan = plan.unwrap();
        assert_eq!((plan.heads.len(), plan.experts.len()), (8, 48));
        // The published numbers: 202.2 MFLOP of projections, of which 30.3 are on every rank;
        // 704.6 of routed and 88.1 of shared experts, 5.5 of the router on every rank.
        let flops = plan.layer_flops(&spec, 0, 1024.0);
        let near = |found: f64, expected: f64| (found / 1e6 - expected).abs() < 0.1;
        assert!(near(flops.projections, 30.28 + (202.2 - 30.28) / 8.0), "{flops:?}");
        assert!(near(flops.experts, 704.64 / 8.0 + 5.5), "{flops:?}");
        assert!(near(flops.mlp, 88.08 / 8.0), "{flops:?}");
        assert!(near(flops.attention, 2.0 * 8.0 * 320.0 * 1024.0 / 1e6), "{flops:?}");
    }
}
