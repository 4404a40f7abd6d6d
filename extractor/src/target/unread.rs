//! Parameters of a checkpoint that its configuration does not speak of: a bias or a norm that is
//! there and would not be applied. Knows no values.

use super::error::TargetError;
use super::spec::{AttentionSpec, TargetSpec};
use super::weights::{Checkpoint, WeightsError};

/// Refuses biases and norms in the layers of `spec` that this engine would leave out.
pub(super) fn refuse(checkpoint: &Checkpoint, spec: &TargetSpec) -> Result<(), TargetError> {
    let is_unread = |name: &&str| {
        let in_layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        in_layer.is_some_and(|(layer, part)| {
            let is_here = layer.parse::<usize>().is_ok_and(|layer| layer < spec.num_layers);
            is_here && is_bias_or_norm(part) && !is_read(part, &spec.attention)
        })
    };
    match checkpoint.names().find(is_unread) {
        None => Ok(()),
        Some(name) => Err(WeightsError::Unread { name: name.to_owned() }.into()),
    }
}

fn is_bias_or_norm(part: &str) -> bool {
    part.ends_with(".bias") || part.ends_with("norm.weight")
}

fn is_read(part: &str, attention: &AttentionSpec) -> bool {
    if matches!(part, "input_layernorm.weight" | "post_attention_layernorm.weight") {
        return true;
    }
    let Some(part) = part.strip_prefix("self_attn.") else { return false };
    match attention {
        AttentionSpec::Mla(mla) => match part {
            "q_a_layernorm.weight" => mla.q_lora_rank.is_some(),
            part => part == "kv_a_layernorm.weight",
        },
        AttentionSpec::Gqa(gqa) => match part {
            "q_norm.weight" | "k_norm.weight" => gqa.qk_norm,
            "q_proj.bias" | "k_proj.bias" | "v_proj.bias" => gqa.qkv_bias,
            _ => false,
        },
    }
}
