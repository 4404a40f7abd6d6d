//! config.json of the speculators format, for vLLM. Knows no tensors.

use serde_json::{Map, Value, json};

use super::{ExportError, ExportOptions, LayerIds, llama, switches};
use crate::checkpoint::Checkpoint;
use crate::target::TargetConfig;

/// Keys of the plain layout that this format keeps at the top level.
const OUTER: [&str; 7] = [
    "architectures",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fc_norm",
    "norm_output",
    "norm_before_fc",
];

pub(super) fn config(
    checkpoint: &Checkpoint,
    target: &TargetConfig,
    (layer_ids, options): (&LayerIds, &ExportOptions),
) -> Result<Map<String, Value>, ExportError> {
    let mut layer = llama::config(checkpoint, target, layer_ids)?;
    layer.retain(|key, _| !OUTER.contains(&key.as_str()) && key != "norm_before_residual");
    // vLLM counts the aux states here, and takes three where nothing is said.
    layer.insert("num_aux_hidden_states".into(), checkpoint.state.draft.num_aux.into());
    let architectures = target.raw().get("architectures").cloned().unwrap_or(json!([]));
    let mut config = Map::new();
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("architectures", json!(["Eagle3DraftModel"]));
    put("speculators_model_type", "eagle3".into());
    put("speculators_version", "0.7.0".into());
    put("draft_vocab_size", checkpoint.state.draft.draft_vocab_size.into());
    put("target_hidden_size", Value::Null);
    // vLLM takes norm_before_residual for true where it is absent.
    for (key, value) in switches(checkpoint) {
        put(key, value.into());
    }
    put("embed_requires_grad", false.into());
    put("eagle_aux_hidden_state_layer_ids", json!(layer_ids.top_level));
    put("tie_word_embeddings", false.into());
    put("transformer_layer_config", layer.into());
    put(
        "speculators_config",
        json!({
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy",
                "speculative_tokens": options.draft_tokens,
                "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }],
            "verifier": { "name_or_path": options.target_name, "architectures": architectures },
        }),
    );
    Ok(config)
}
