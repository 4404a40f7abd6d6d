//! config.json of `LlamaForCausalLMEagle3`. Knows no tensors.

use serde_json::{Map, Value};

use super::{ExportError, LayerIds, common, put_rope};
use crate::checkpoint::Checkpoint;
use crate::draft::AttentionConfig;
use crate::target::TargetConfig;

pub(super) fn config(
    checkpoint: &Checkpoint,
    target: &TargetConfig,
    layer_ids: &LayerIds,
) -> Result<Map<String, Value>, ExportError> {
    let mut config = Map::new();
    config.insert("architectures".into(), vec!["LlamaForCausalLMEagle3"].into());
    config.insert("model_type".into(), "llama".into());
    config.extend(common(checkpoint, target, layer_ids)?);
    if let AttentionConfig::Gqa { num_key_value_heads, head_dim } = checkpoint.state.draft.attention
    {
        config.insert("num_key_value_heads".into(), num_key_value_heads.into());
        config.insert("head_dim".into(), head_dim.into());
    }
    config.insert("mlp_bias".into(), false.into());
    let draft = &checkpoint.state.draft;
    put_rope(&mut config, (draft.rope_theta, draft.yarn), false);
    Ok(config)
}
