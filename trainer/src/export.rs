//! A checkpoint as the files that vLLM and SGLang load: `config.json` and `model.safetensors`,
//! loaded back through each engine's own rules before they get their name. Knows no training.

mod error;
mod layer_ids;
mod llama;
mod loaders;
mod mla;
mod names;
mod reload;
mod speculators;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value, json};
use shared::durable;

pub use self::error::ExportError;
pub use self::layer_ids::{Engine, LayerIds, SglangRule};
pub use self::reload::{ExportedDraft, golden_logits};
use crate::checkpoint::Checkpoint;
use crate::draft::{AttentionConfig, Yarn};
use crate::target::TargetConfig;
use crate::tensors::{HostTensor, TensorFile};

/// Largest difference of golden logits, relative to the largest logit: rounding of the weights.
const BF16_LIMIT: f64 = 0.05;
const F32_LIMIT: f64 = 1e-5;

/// Which engine's files to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportLayout {
    /// `LlamaForCausalLMEagle3`: vLLM and SGLang.
    Llama,
    /// `Eagle3DeepseekV2ForCausalLM`: vLLM and SGLang.
    Mla,
    /// The speculators format: vLLM.
    Speculators,
}

/// Stored type of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportDtype {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
}

/// Token embeddings of a target.
#[derive(Clone, Debug)]
pub struct Embeddings {
    /// `[V, H]`.
    pub values: Vec<f32>,
    /// Data set that they come from.
    pub from: PathBuf,
}

/// What to write.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Engine's layout.
    pub layout: ExportLayout,
    /// Stored type.
    pub dtype: ExportDtype,
    /// Which engines the layer ids must be right for.
    pub engine: Engine,
    /// The target's embeddings, to be written too.
    pub embeddings: Option<Embeddings>,
    /// Drafted tokens a round that the speculators format proposes.
    pub draft_tokens: usize,
    /// Name of the target that the speculators format records.
    pub target_name: String,
}

impl ExportOptions {
    /// Engines that read the ids: of the speculators format only vLLM.
    fn readers(&self) -> Engine {
        match self.layout {
            ExportLayout::Speculators => Engine::Vllm,
            _ => self.engine,
        }
    }
}

/// An engine that can serve a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Server {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// What was written and checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    /// The directory.
    pub path: PathBuf,
    /// Layout.
    pub layout: ExportLayout,
    /// Ids written.
    pub layer_ids: LayerIds,
    /// Tensors in the file.
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: usize,
    /// Engines whose layer ids were asked for and read back.
    pub servers: Vec<Server>,
    /// Loaders whose rules were replayed on the file.
    pub loaders: Vec<&'static str>,
    /// Largest difference of golden logits between checkpoint and export, over the largest logit.
    pub golden_difference: f64,
    /// What a user should know.
    pub warnings: Vec<String>,
}

/// Writes `out`, which must not exist. It appears only after the files have been loaded back
/// through every loader's rules and gave the checkpoint's logits.
pub fn export(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
) -> Result<ExportReport, ExportError> {
    if out.exists() {
        return Err(ExportError::Exists { path: out.to_owned() });
    }
    check_layout(checkpoint, options.layout)?;
    check_switches(checkpoint, options)?;
    let target = checkpoint.target()?;
    let (layers, num_aux) = (&checkpoint.state.layers, checkpoint.state.draft.num_aux);
    let layer_ids = LayerIds::of(layers, num_aux, (options.readers(), target.architecture()))?;
    let config = match options.layout {
        ExportLayout::Llama => llama::config(checkpoint, &target, &layer_ids)?,
        ExportLayout::Mla => mla::config(checkpoint, &target, &layer_ids)?,
        ExportLayout::Speculators => {
            speculators::config(checkpoint, &target, (&layer_ids, options))?
        }
    };
    let config = with_dtype(config, options);
    let tensors = tensors(checkpoint, options)?;
    let bytes = tensors.encode()?;
    let text = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";

    let temporary = temporary(out);
    let io = |source| ExportError::Io { path: temporary.clone(), source };
    std::fs::create_dir_all(&temporary).map_err(io)?;
    let written = durable::write_file(&temporary.join("model.safetensors"), &bytes)
        .and_then(|()| durable::write_file(&temporary.join("config.json"), text.as_bytes()));
    let checked = written
        .map_err(ExportError::from)
        .and_then(|()| check(checkpoint, &temporary, (options, &layer_ids)))
        .and_then(|checked| {
            durable::publish_dir(&temporary, out)?;
            Ok(checked)
        });
    if checked.is_err() {
        // The error above is the one to report; a left-over directory is only untidy.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    let (loaders, golden_difference) = checked?;
    Ok(ExportReport {
        path: out.to_owned(),
        layout: options.layout,
        warnings: warnings(checkpoint, options),
        servers: servers(checkpoint, options),
        layer_ids,
        tensors: tensors.tensors.len(),
        bytes: bytes.len(),
        loaders,
        golden_difference,
    })
}

fn check(
    checkpoint: &Checkpoint,
    dir: &Path,
    (options, layer_ids): (&ExportOptions, &LayerIds),
) -> Result<(Vec<&'static str>, f64), ExportError> {
    let loaders = reload::replay(dir, options.layout, options.engine)?;
    let exported = ExportedDraft::load(dir)?;
    let expected = &checkpoint.state.layers[..checkpoint.state.draft.num_aux];
    let mut lists = vec![(&layer_ids.top_level, Some(exported.aux_layers.clone()))];
    if options.readers() == Engine::Current {
        let rule = SglangRule::of(checkpoint.target()?.architecture());
        let read = rule.and_then(|rule| rule.read(exported.nested_ids.as_ref()?));
        lists.push((&layer_ids.nested, read));
    }
    for (written, read) in lists {
        if read.as_deref() != Some(expected) {
            return Err(ExportError::LayerIds {
                written: format!("{written:?}"),
                meant: format!("{expected:?}"),
                read: format!("{read:?}"),
            });
        }
    }
    let difference = reload::golden_difference(checkpoint, &exported)?;
    let limit = match options.dtype {
        ExportDtype::Bf16 => BF16_LIMIT,
        ExportDtype::F32 => F32_LIMIT,
    };
    if difference.is_nan() || difference > limit {
        return Err(ExportError::Golden { difference, limit });
    }
    Ok((loaders, difference))
}

fn temporary(out: &Path) -> PathBuf {
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    out.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

fn check_layout(checkpoint: &Checkpoint, layout: ExportLayout) -> Result<(), ExportError> {
    let mla = matches!(checkpoint.state.draft.attention, AttentionConfig::Mla { .. });
    match (mla, layout) {
        (true, ExportLayout::Mla) => Ok(()),
        (false, ExportLayout::Llama | ExportLayout::Speculators) => Ok(()),
        (true, _) => Err(ExportError::Layout { draft: "mla", allowed: "mla" }),
        (false, _) => Err(ExportError::Layout { draft: "llama", allowed: "llama or speculators" }),
    }
}

/// Refuses switches that the engine asked for does not have: it would ignore them and guess wrong.
fn check_switches(checkpoint: &Checkpoint, options: &ExportOptions) -> Result<(), ExportError> {
    if options.engine != Engine::SglangOld {
        return Ok(());
    }
    let engine = "an old SGLang";
    if options.layout == ExportLayout::Speculators {
        return Err(ExportError::Unsupported { flag: "the speculators format", engine });
    }
    match switches(checkpoint).into_iter().find(|(_, on)| *on) {
        Some((flag, _)) => Err(ExportError::Unsupported { flag, engine }),
        None => Ok(()),
    }
}

fn tensors(checkpoint: &Checkpoint, options: &ExportOptions) -> Result<TensorFile, ExportError> {
    let draft = &checkpoint.state.draft;
    let store = |values: &[f32], shape: &[usize]| match options.dtype {
        ExportDtype::Bf16 => HostTensor::bf16(values, shape),
        ExportDtype::F32 => HostTensor::f32(values, shape),
    };
    let mut file = TensorFile::default();
    let path = Path::new("weights.safetensors");
    for (name, shape) in draft.parameter_shapes() {
        let values = checkpoint.weights.f32(&name, &shape, path)?;
        let exported = names::exported(&name, options.layout);
        file.tensors.insert(exported, store(&values, &shape));
    }
    if !checkpoint.vocab.is_full() {
        file.tensors.insert("d2t".into(), HostTensor::i64(&checkpoint.vocab.d2t()));
        file.tensors.insert("t2d".into(), HostTensor::bool(checkpoint.vocab.t2d()));
    }
    if let Some(embeddings) = &options.embeddings {
        check_embeddings(checkpoint, embeddings)?;
        let shape = [draft.vocab_size, draft.hidden_size];
        file.tensors.insert("embed_tokens.weight".into(), store(&embeddings.values, &shape));
    }
    // Loaders of the field look for this key.
    file.metadata.insert("format".into(), "pt".into());
    Ok(file)
}

/// Compares embeddings with the golden rows: what the draft was fed with in training.
fn check_embeddings(checkpoint: &Checkpoint, given: &Embeddings) -> Result<(), ExportError> {
    let draft = &checkpoint.state.draft;
    let (expected, width) = ([draft.vocab_size, draft.hidden_size], draft.hidden_size);
    let (values, from) = (&given.values, &given.from);
    if values.len() != expected.iter().product::<usize>() {
        let (from, found) = (from.clone(), values.len());
        return Err(ExportError::Embeddings { from, found, expected });
    }
    let path = Path::new("golden.safetensors");
    let ids = checkpoint.golden.get("input_ids", path)?.to_i64().unwrap_or_default();
    let trained = checkpoint.golden.f32("embeds", &[ids.len(), width], path)?;
    let row = |id: i64| values.get(usize::try_from(id).ok()? * width..)?.get(..width);
    let mut rows = ids.into_iter().zip(trained.chunks_exact(width));
    match rows.find(|&(id, trained)| row(id) != Some(trained)) {
        None => Ok(()),
        Some((id, _)) => Err(ExportError::OtherEmbeddings {
            from: from.clone(),
            trained: checkpoint.config.data.dataset.clone(),
            id,
        }),
    }
}

fn with_dtype(mut config: Map<String, Value>, options: &ExportOptions) -> Map<String, Value> {
    let dtype = match options.dtype {
        ExportDtype::Bf16 => "bfloat16",
        ExportDtype::F32 => "float32",
    };
    config.insert("torch_dtype".into(), dtype.into());
    config
}

/// Fields that every layout shares: sizes, ids and switches, all explicit because engines differ
/// in their defaults.
fn common(
    checkpoint: &Checkpoint,
    target: &TargetConfig,
    layer_ids: &LayerIds,
) -> Result<Map<String, Value>, ExportError> {
    let draft = &checkpoint.state.draft;
    let max_position = target.size("max_position_embeddings").ok_or(ExportError::TargetKey {
        key: "max_position_embeddings",
        why: "it bounds the draft's rotary table in every engine",
    })?;
    let mut config = Map::new();
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("hidden_size", draft.hidden_size.into());
    put("intermediate_size", draft.intermediate_size.into());
    put("num_hidden_layers", 1.into());
    put("num_attention_heads", draft.num_attention_heads.into());
    put("hidden_act", "silu".into());
    put("rms_norm_eps", draft.rms_norm_eps.into());
    put("attention_bias", false.into());
    put("max_position_embeddings", max_position.into());
    put("vocab_size", draft.vocab_size.into());
    put("draft_vocab_size", draft.draft_vocab_size.into());
    put("tie_word_embeddings", false.into());
    for key in ["bos_token_id", "eos_token_id"] {
        if let Some(value) = target.get(key) {
            put(key, value.clone());
        }
    }
    for (key, value) in switches(checkpoint) {
        put(key, value.into());
    }
    put("eagle_aux_hidden_state_layer_ids", json!(layer_ids.top_level));
    let mut eagle = Map::new();
    eagle.insert("eagle_aux_hidden_state_layer_ids".into(), json!(layer_ids.nested));
    eagle.insert("use_aux_hidden_state".into(), true.into());
    for (key, value) in switches(checkpoint) {
        eagle.insert(key.into(), value.into());
    }
    put("eagle_config", eagle.into());
    Ok(config)
}

/// Norm switches, explicit even where false: engines default them differently.
fn switches(checkpoint: &Checkpoint) -> [(&'static str, bool); 4] {
    let draft = &checkpoint.state.draft;
    [
        ("norm_before_residual", draft.norm_before_residual),
        ("norm_before_fc", false),
        ("fc_norm", draft.fc_norm),
        ("norm_output", draft.norm_output),
    ]
}

/// Both schemas of the rotary settings. `attn_factor` makes an engine that multiplies cosine and
/// sine by `0.1 ln(factor) + 1` multiply by 1, as in training.
fn put_rope(config: &mut Map<String, Value>, (theta, yarn): (f64, Option<Yarn>), mla: bool) {
    let mut parameters = Map::new();
    parameters.insert("rope_theta".into(), theta.into());
    config.insert("rope_theta".into(), theta.into());
    let Some(yarn) = yarn else {
        parameters.insert("rope_type".into(), "default".into());
        config.insert("rope_parameters".into(), parameters.into());
        return;
    };
    let mut scaling = Map::new();
    scaling.insert("type".into(), "yarn".into());
    scaling.insert("rope_type".into(), "yarn".into());
    scaling.insert("factor".into(), yarn.factor.into());
    let original = yarn.original_max_position_embeddings;
    scaling.insert("original_max_position_embeddings".into(), original.into());
    scaling.insert("beta_fast".into(), yarn.beta_fast.into());
    scaling.insert("beta_slow".into(), yarn.beta_slow.into());
    scaling.insert("mscale".into(), yarn.mscale.into());
    scaling.insert("mscale_all_dim".into(), yarn.mscale_all_dim.into());
    if mla {
        // Older vLLM takes everything from here, and 10000 for a base that it does not find.
        scaling.insert("rope_theta".into(), theta.into());
    } else {
        let factor = 1.0 / (0.1 * yarn.factor.ln() + 1.0);
        scaling.insert("attn_factor".into(), factor.into());
    }
    parameters.extend(scaling.clone());
    config.insert("rope_scaling".into(), scaling.into());
    config.insert("rope_parameters".into(), parameters.into());
}

/// Engines that the files were written for and that know what the draft needs.
fn servers(checkpoint: &Checkpoint, options: &ExportOptions) -> Vec<Server> {
    // No SGLang has this switch.
    let vllm_alone = checkpoint.state.draft.norm_before_residual;
    match options.readers() {
        Engine::SglangOld => vec![Server::Sglang],
        Engine::Current if !vllm_alone => vec![Server::Vllm, Server::Sglang],
        Engine::Current | Engine::Vllm => vec![Server::Vllm],
    }
}

fn warnings(checkpoint: &Checkpoint, options: &ExportOptions) -> Vec<String> {
    let draft = &checkpoint.state.draft;
    let mut warnings = Vec::new();
    if draft.norm_before_residual && options.layout == ExportLayout::Llama {
        warnings.push("norm_before_residual is served by vLLM only, not by SGLang".to_owned());
    }
    if draft.norm_output && options.layout == ExportLayout::Speculators {
        warnings.push("norm_output needs a vLLM with vllm#46488".to_owned());
    }
    if options.layout == ExportLayout::Mla {
        warnings.push("vLLM serves MLA drafts of DeepSeek-like targets from 0.18 on".to_owned());
    }
    warnings
}
