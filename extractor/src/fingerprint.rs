//! Everything that changes the bytes of a data set, gathered into its fingerprint. A value that
//! does not change them (batch size, line limit) stays out, so that a run may resume with another.

use std::path::Path;

use serde_json::{Value, json};
use shared::CaptureSpec;
use shared::digest::Digest;
use shared::fingerprint::Fingerprint;
use shared::manifest::{Manifest, ManifestError};
use shared::shard::FORMAT_VERSION;

use crate::config::{ConfigError, ExtractConfig};
use crate::encode::{Encoder, EncoderError};
use crate::import;
use crate::pipeline::PipelineError;
use crate::target::weights::Checkpoint;
use crate::target::{AttentionSpec, RopeScaling, RopeSpec, TargetError, TargetSpec};
use crate::tokenizer::TokenizerConfig;

/// Raised by hand whenever the engine or the encoder gives other values for the same input.
const NUMERICS_VERSION: u32 = 1;
/// What data sets of earlier versions do not have, see [`as_begun`].
const OF_SMALL_FILES: [&str; 3] = ["target.config", "tokenizer.named_tokens", "tokenizer.stop_ids"];

/// The fingerprint of what `config` would write; `spec` and `encoder` are those of its model.
pub fn fingerprint(
    config: &ExtractConfig,
    spec: &TargetSpec,
    encoder: &Encoder,
    contract: &CaptureSpec,
) -> Result<Fingerprint, PipelineError> {
    let target = &config.target;
    Ok(of_data(config, spec, encoder, contract)?
        .with("numerics", NUMERICS_VERSION.to_string())
        .with("target.device", target.device.to_string())
        .with("target.compute", target.compute.on(target.device).to_string())
        .with("target.tp", target.tp.to_string())
        .with("target.qa_norm_eps", target.qa_norm_eps.to_string()))
}

/// The fingerprint of states that another tool computed: nothing in it speaks of this engine.
/// `made_by` is what the user says of that tool.
pub fn of_import(
    config: &ExtractConfig,
    spec: &TargetSpec,
    encoder: &Encoder,
    contract: &CaptureSpec,
    made_by: &str,
) -> Result<Fingerprint, PipelineError> {
    Ok(of_data(config, spec, encoder, contract)?
        .with("states", "imported")
        .with("states.form", import::FORM)
        .with("states.made_by", made_by))
}

/// What does not depend on who computed the states.
fn of_data(
    config: &ExtractConfig,
    spec: &TargetSpec,
    encoder: &Encoder,
    contract: &CaptureSpec,
) -> Result<Fingerprint, PipelineError> {
    let model = config.model()?;
    let checkpoint = Checkpoint::open(model).map_err(TargetError::from)?;
    let weights = Digest(checkpoint.digest().map_err(TargetError::from)?);
    let layers: Vec<String> = contract.layers.iter().map(ToString::to_string).collect();
    let encode = serde_json::to_string(encoder.options()).map_err(ConfigError::unprintable)?;
    let fingerprint = Fingerprint::default()
        .with("format", FORMAT_VERSION.to_string())
        .with("target.revision", &config.target.revision)
        .with("target.weights", weights.to_string())
        .with("tokenizer_and_template", Digest(encoder.digest()).to_string())
        .with("encoding", encode)
        .with("layers", layers.join(","))
        .with("hidden_size", contract.hidden_size.to_string())
        .with("dtype", contract.dtype.to_string())
        .with("last_state", "pre_norm");
    with_small_files(fingerprint, model, spec, encoder)
}

/// Adds what the JSON files of the model in `dir` decide.
fn with_small_files(
    fingerprint: Fingerprint,
    dir: &Path,
    spec: &TargetSpec,
    encoder: &Encoder,
) -> Result<Fingerprint, PipelineError> {
    let named = TokenizerConfig::load(dir).map_err(EncoderError::from)?.named_tokens();
    let stop_ids: Vec<String> = encoder.stop_ids().iter().map(ToString::to_string).collect();
    let values = [arithmetic(spec).to_string(), json!(named).to_string(), stop_ids.join(",")];
    let fields = OF_SMALL_FILES.into_iter().zip(values);
    Ok(fields.fold(fingerprint, |fingerprint, (name, value)| fingerprint.with(name, value)))
}

/// `current` in the fields that the data set in `dir` has. One that was begun before the model's
/// JSON files were part of the fingerprint goes on without them, for its shards carry the digest of
/// the fingerprint as it was; but it has copies of those files, and they must say the same.
pub fn as_begun(
    current: Fingerprint,
    encoder: &Encoder,
    dir: &Path,
) -> Result<Fingerprint, PipelineError> {
    // What is new, lost or damaged is for the one who opens it to write.
    let Ok(manifest) = Manifest::open_read(dir) else { return Ok(current) };
    let stored = &manifest.fingerprint().fields;
    let has_all = OF_SMALL_FILES.iter().all(|name| stored.contains_key(*name));
    if has_all || manifest.committed_samples()?.is_empty() {
        return Ok(current);
    }
    let is_later = |name: &String| OF_SMALL_FILES.contains(&name.as_str());
    let (later, earlier) = current.fields.into_iter().partition(|(name, _)| is_later(name));
    let (later, earlier) = (Fingerprint { fields: later }, Fingerprint { fields: earlier });
    let copies = manifest.dir().target();
    if !copies.join("config.json").is_file() {
        tracing::warn!("{} has no config.json to compare the model's with", copies.display());
        return Ok(earlier);
    }
    let spec = TargetSpec::read(&copies)?;
    let begun_with = Encoder::load(&copies, encoder.options().clone())?;
    let begun = with_small_files(Fingerprint::default(), &copies, &spec, &begun_with)?;
    match begun.diff(&later) {
        same if same.is_empty() => Ok(earlier),
        changes => Err(ManifestError::FingerprintChanged(changes).into()),
    }
}

/// What of `config.json` decides states and is not in the weights, under its names there. These are
/// compared with data sets of earlier versions: a new one stays out where it has the value that all
/// models had before.
fn arithmetic(spec: &TargetSpec) -> Value {
    let mut fields = json!({
        "rms_norm_eps": spec.rms_norm_eps.to_string(),
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.intermediate_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
    });
    let mut add = |more: Value| {
        if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
            fields.extend(more);
        }
    };
    add(rope(&spec.rope));
    add(match &spec.attention {
        AttentionSpec::Mla(it) => json!({
            "num_attention_heads": it.num_heads,
            "q_lora_rank": it.q_lora_rank,
            "kv_lora_rank": it.kv_lora_rank,
            "qk_nope_head_dim": it.qk_nope_head_dim,
            "qk_rope_head_dim": it.qk_rope_head_dim,
            "v_head_dim": it.v_head_dim,
        }),
        AttentionSpec::Gqa(it) => json!({
            "num_attention_heads": it.num_heads,
            "num_key_value_heads": it.num_kv_heads,
            "head_dim": it.head_dim,
            "qk_norm": it.qk_norm,
            "attention_bias": it.qkv_bias,
        }),
    });
    if let Some(it) = &spec.moe {
        add(json!({
            "n_routed_experts": it.num_experts,
            "num_experts_per_tok": it.top_k,
            "moe_intermediate_size": it.intermediate_size,
            "n_shared_experts": it.num_shared_experts,
            "n_group": it.num_groups,
            "topk_group": it.topk_group,
            "norm_topk_prob": it.norm_topk_prob,
            "routed_scaling_factor": it.routed_scaling_factor.to_string(),
            "first_k_dense_replace": it.first_dense_layers,
            "moe_layer_freq": it.layer_freq,
        }));
    }
    fields
}

fn rope(rope: &RopeSpec) -> Value {
    let scaling = match &rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Yarn(it) => json!({
            "factor": it.factor,
            "original_max_position_embeddings": it.original_max_position_embeddings,
            "beta_fast": it.beta_fast,
            "beta_slow": it.beta_slow,
            "mscale": it.mscale,
            "mscale_all_dim": it.mscale_all_dim,
            "attention_factor": it.attention_factor,
        }),
    };
    json!({
        "rope_theta": rope.theta,
        "rope_dim": rope.dim,
        "rope_interleave": rope.interleaved,
        "rope_scaling": scaling,
    })
}
