//! config.json of `Eagle3DeepseekV2ForCausalLM`. Knows no tensors.

use serde_json::{Map, Value};

use super::{ExportError, LayerIds, common, put_rope};
use crate::checkpoint::Checkpoint;
use crate::draft::{AttentionConfig, Yarn};
use crate::target::TargetConfig;

pub(super) fn config(
    checkpoint: &Checkpoint,
    target: &TargetConfig,
    layer_ids: &LayerIds,
) -> Result<Map<String, Value>, ExportError> {
    let mut config = Map::new();
    config.insert("architectures".into(), vec!["Eagle3DeepseekV2ForCausalLM"].into());
    config.insert("model_type".into(), "kimi_k2".into());
    config.extend(common(checkpoint, target, layer_ids)?);
    let draft = &checkpoint.state.draft;
    config.insert("num_key_value_heads".into(), draft.num_attention_heads.into());
    if let AttentionConfig::Mla {
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
    } = draft.attention
    {
        for (key, value) in [
            ("q_lora_rank", q_lora_rank),
            ("kv_lora_rank", kv_lora_rank),
            ("qk_nope_head_dim", qk_nope_head_dim),
            ("qk_rope_head_dim", qk_rope_head_dim),
            ("v_head_dim", v_head_dim),
        ] {
            config.insert(key.into(), value.into());
        }
    }
    // The engines' DeepSeek attention reads mscale and mscale_all_dim itself.
    let yarn = draft.yarn.unwrap_or_else(|| plain_rope(target));
    put_rope(&mut config, (draft.rope_theta, Some(yarn)), true);
    Ok(config)
}

/// YaRN that changes nothing. vLLM's older MLA draft ignores `rope_theta` where there is no
/// scaling, and takes any scaling for YaRN; this is the one form that all versions read as plain
/// RoPE.
fn plain_rope(target: &TargetConfig) -> Yarn {
    Yarn {
        factor: 1.0,
        original_max_position_embeddings: target.size("max_position_embeddings").unwrap_or(1),
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
    }
}
