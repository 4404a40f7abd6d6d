//! Copies of the rules by which each engine gives tensors of a file to its parameters. Knows no
//! values; written from the engines' loaders, not from our own names.

use std::collections::BTreeMap;

use super::{Engine, ExportError, ExportLayout};
use crate::draft::{AttentionConfig, DraftConfig};
use crate::tensors::TensorFile;

/// One engine's loader of one architecture.
struct Loader {
    name: &'static str,
    /// Parameter a tensor of the file goes to; `None` when the loader skips it.
    map: fn(&str) -> Option<String>,
    /// How the engine calls the decoder layer.
    layer: &'static str,
    /// How it calls the vocabulary mapping.
    mapping: &'static str,
}

const VLLM: Loader = Loader {
    name: "vLLM",
    map: |name| match name {
        "t2d" => None,
        "d2t" => Some("draft_id_to_target_id".to_owned()),
        _ if name.contains("lm_head") => Some(name.to_owned()),
        _ => Some(format!("model.{}", name.replace("midlayer.", "layers.0."))),
    },
    layer: "layers.0",
    mapping: "draft_id_to_target_id",
};

const SGLANG: Loader = Loader {
    name: "SGLang",
    map: |name| match name {
        "t2d" => None,
        "d2t" => Some("hot_token_id".to_owned()),
        _ if name.contains("lm_head") => Some(name.to_owned()),
        _ => Some(format!("model.{}", name.replace("midlayer.", "layers.0."))),
    },
    layer: "layers.0",
    mapping: "hot_token_id",
};

/// Drops names it does not know without a word.
const SGLANG_OLD: Loader = Loader {
    name: "SGLang before its layers were numbered",
    map: |name| match name {
        "t2d" => None,
        "d2t" => Some("hot_token_id".to_owned()),
        _ if name.contains("lm_head") => Some(name.to_owned()),
        _ => Some(format!("model.{name}")),
    },
    layer: "midlayer",
    mapping: "hot_token_id",
};

const SGLANG_MLA: Loader = Loader {
    name: "SGLang (MLA)",
    map: |name| match name {
        "t2d" => None,
        "d2t" => Some("hot_token_id".to_owned()),
        _ if name.starts_with("lm_head.") => Some(name.to_owned()),
        _ => Some(match name.strip_prefix("layers.0.") {
            Some(rest) => format!("model.midlayer.{rest}"),
            None => format!("model.{name}"),
        }),
    },
    layer: "midlayer",
    mapping: "hot_token_id",
};

/// Replays every loader that serves a layout; any tensor unused, unset, of the wrong shape or not
/// finite is an error. Returns the loaders' names.
pub(super) fn replay(
    file: &TensorFile,
    draft: &DraftConfig,
    (layout, engine): (ExportLayout, Engine),
) -> Result<Vec<&'static str>, ExportError> {
    let newer = draft.fc_norm || draft.norm_output;
    let loaders: &[Loader] = match (layout, engine) {
        (ExportLayout::Speculators, _) | (_, Engine::Vllm) => &[VLLM],
        // No SGLang has this switch, no older one the others.
        _ if draft.norm_before_residual => &[VLLM],
        (ExportLayout::Llama, _) if newer => &[VLLM, SGLANG],
        (ExportLayout::Llama, _) => &[VLLM, SGLANG, SGLANG_OLD],
        (ExportLayout::Mla, _) => &[VLLM, SGLANG_MLA],
    };
    for (name, tensor) in &file.tensors {
        if tensor.to_f32().is_some_and(|values| !values.iter().all(|v| v.is_finite())) {
            return Err(ExportError::Loader {
                loader: "every engine",
                problem: "load values that are not finite",
                names: name.clone(),
            });
        }
    }
    loaders.iter().try_for_each(|loader| loader.replay(file, draft))?;
    Ok(loaders.iter().map(|loader| loader.name).collect())
}

/// The tensors of a file by our parameter names, as vLLM would assign them. Mapping and
/// embeddings are left out.
pub(super) fn by_parameter(file: &TensorFile) -> TensorFile {
    let mut parameters = TensorFile::default();
    for (name, tensor) in &file.tensors {
        let Some(assigned) = (VLLM.map)(name).filter(|assigned| assigned != VLLM.mapping) else {
            continue;
        };
        let ours = assigned.strip_prefix("model.").unwrap_or(&assigned);
        if ours != "embed_tokens.weight" {
            let ours = ours.replace("layers.0.", "midlayer.");
            parameters.tensors.insert(ours, tensor.clone());
        }
    }
    parameters
}

impl Loader {
    fn replay(&self, file: &TensorFile, draft: &DraftConfig) -> Result<(), ExportError> {
        let (required, optional) = self.parameters(draft);
        let fail = |problem, names: Vec<String>| ExportError::Loader {
            loader: self.name,
            problem,
            names: names.join(", "),
        };
        let mut assigned = BTreeMap::new();
        for (name, tensor) in &file.tensors {
            let Some(parameter) = (self.map)(name) else { continue };
            let Some(shape) = required.get(&parameter).or_else(|| optional.get(&parameter)) else {
                return Err(fail("not use a tensor", vec![format!("{name} (as {parameter})")]));
            };
            if *shape != tensor.shape {
                let sizes = format!("{parameter} is {:?}, {shape:?} needed", tensor.shape);
                return Err(fail("refuse a shape", vec![sizes]));
            }
            if assigned.insert(parameter.clone(), name).is_some() {
                return Err(fail("set a parameter twice", vec![parameter]));
            }
        }
        let unset: Vec<String> =
            required.keys().filter(|name| !assigned.contains_key(*name)).cloned().collect();
        match unset.is_empty() {
            true => Ok(()),
            false => Err(fail("leave parameters at random values", unset)),
        }
    }

    /// Parameters the engine's model has, and those it can do without.
    fn parameters(&self, draft: &DraftConfig) -> (Shapes, Shapes) {
        let (h, i) = (draft.hidden_size, draft.intermediate_size);
        let layer = self.layer;
        let mut shapes = Shapes::new();
        let mut put = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
        put("model.fc.weight".into(), &[h, draft.num_aux * h]);
        put("model.norm.weight".into(), &[h]);
        put("lm_head.weight".into(), &[draft.draft_vocab_size, h]);
        for norm in ["input_layernorm", "hidden_norm", "post_attention_layernorm"] {
            put(format!("model.{layer}.{norm}.weight"), &[h]);
        }
        for (name, shape) in [("gate_proj", [i, h]), ("up_proj", [i, h]), ("down_proj", [h, i])] {
            put(format!("model.{layer}.mlp.{name}.weight"), &shape);
        }
        for (name, shape) in attention(draft) {
            put(format!("model.{layer}.self_attn.{name}.weight"), &shape);
        }
        if draft.fc_norm {
            for aux in 0..draft.num_aux {
                put(format!("model.fc_norm.{aux}.weight"), &[h]);
            }
        }
        if draft.draft_vocab_size != draft.vocab_size {
            put(self.mapping.into(), &[draft.draft_vocab_size]);
        }
        let embeddings = ("model.embed_tokens.weight".to_owned(), vec![draft.vocab_size, h]);
        (shapes, Shapes::from([embeddings]))
    }
}

type Shapes = BTreeMap<String, Vec<usize>>;

fn attention(draft: &DraftConfig) -> Vec<(&'static str, Vec<usize>)> {
    let (h, heads) = (draft.hidden_size, draft.num_attention_heads);
    match draft.attention {
        AttentionConfig::Gqa { num_key_value_heads, head_dim } => vec![
            ("q_proj", vec![heads * head_dim, 2 * h]),
            ("k_proj", vec![num_key_value_heads * head_dim, 2 * h]),
            ("v_proj", vec![num_key_value_heads * head_dim, 2 * h]),
            ("o_proj", vec![h, heads * head_dim]),
        ],
        AttentionConfig::Mla {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
        } => vec![
            ("q_a_proj", vec![q_lora_rank, 2 * h]),
            ("q_a_layernorm", vec![q_lora_rank]),
            ("q_b_proj", vec![heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank]),
            ("kv_a_proj_with_mqa", vec![kv_lora_rank + qk_rope_head_dim, 2 * h]),
            ("kv_a_layernorm", vec![kv_lora_rank]),
            ("kv_b_proj", vec![heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]),
            ("o_proj", vec![h, heads * v_head_dim]),
        ],
    }
}
