//! Dimensions of a target model, read from `config.json` and checked. Knows nothing of weights.

mod moe;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use clap::ValueEnum;
use kernels::rope::YarnParams;
use kernels::router::Scoring;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::Fields;
use super::error::TargetError;

/// What the engine needs to know of a model. Every number has been checked against its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetSpec {
    /// `model_type` of the configuration, the outer one where it nests.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Attention of every layer.
    pub attention: AttentionSpec,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Mixture of experts, where the model has one.
    pub moe: Option<MoeSpec>,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// First token of a sequence, where the configuration names one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Storage type of the unquantised weights, as the configuration spells it.
    pub dtype: Option<String>,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated width of a head.
    pub dim: usize,
    /// Pairs are (2j, 2j+1); otherwise (j, j + dim/2).
    pub interleaved: bool,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched beyond the trained length.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// YaRN.
    Yarn(YarnSpec),
}

/// YaRN as `config.json` gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct YarnSpec {
    /// Stretch of the low frequencies.
    pub factor: f64,
    /// Length of the first training, in tokens.
    pub original_max_position_embeddings: usize,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is stretched in full.
    pub beta_slow: f64,
    /// Magnitude coefficient of cos and sin, where given.
    pub mscale: Option<f64>,
    /// Magnitude coefficient taken into the softmax scale (MLA) or out of cos and sin.
    pub mscale_all_dim: Option<f64>,
    /// Explicit multiplier of cos and sin, where given.
    pub attention_factor: Option<f64>,
}

/// Shape of the attention.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionSpec {
    /// Multi-head latent attention (DeepSeek-V3, Kimi).
    Mla(MlaSpec),
    /// Grouped-query attention (Llama, Qwen).
    Gqa(GqaSpec),
}

/// Dimensions of multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Width of the query latent; `None` projects queries directly.
    pub q_lora_rank: Option<usize>,
    /// Width of the key-value latent.
    pub kv_lora_rank: usize,
    /// Unrotated width of a query or key head.
    pub qk_nope_head_dim: usize,
    /// Rotated width of a query or key head.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
}

/// Dimensions of grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct GqaSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Queries and keys are normed head by head (Qwen3).
    pub qk_norm: bool,
    /// Query, key and value projections have biases (Qwen2).
    pub qkv_bias: bool,
}

/// Dimensions of the mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Routed experts.
    pub num_experts: usize,
    /// Scores of the experts; with sigmoids there is a bias for the choice.
    pub scoring: Scoring,
    /// Experts a token.
    pub top_k: usize,
    /// Width of a routed expert.
    pub intermediate_size: usize,
    /// Shared experts; they form one MLP of this many times `intermediate_size`.
    pub num_shared_experts: usize,
    /// Groups of experts, of which `topk_group` are kept for a token.
    pub num_groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// Weights of the chosen experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Multiplier of the routed sum.
    pub routed_scaling_factor: f32,
    /// Layers below this are dense.
    pub first_dense_layers: usize,
    /// Every n-th layer from there is routed.
    pub layer_freq: usize,
}

/// Which epsilon the norms of the MLA latents use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum QaNormEps {
    /// 1e-6, as the Hugging Face code of DeepSeek-V3 does whatever the configuration says.
    Hf,
    /// `rms_norm_eps` of the configuration, as vLLM does.
    #[default]
    Config,
}

impl QaNormEps {
    /// The epsilon, given the one of the configuration.
    pub fn epsilon(self, rms_norm_eps: f32) -> f32 {
        match self {
            Self::Hf => 1e-6,
            Self::Config => rms_norm_eps,
        }
    }
}

impl std::fmt::Display for QaNormEps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hf => "hf",
            Self::Config => "config",
        })
    }
}

const DEEPSEEK: [&str; 2] = ["deepseek_v3", "kimi_k2"];
const NESTED: [&str; 1] = ["kimi_k25"];
const GROUPED_QUERY: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen3_moe"];

/// Longest `config.json` in bytes; those of known models have a few thousand.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

fn read_config(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        let problem = format!("more than {MAX_CONFIG_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

impl TargetSpec {
    /// Reads `config.json` of a checkpoint directory.
    pub fn read(dir: &Path) -> Result<Self, TargetError> {
        let path = dir.join("config.json");
        let bytes = read_config(&path)
            .map_err(|source| TargetError::ConfigRead { path: path.clone(), source })?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|source| TargetError::ConfigJson { path, source })?;
        Self::from_json(&value)
    }

    /// Reads a parsed `config.json`.
    pub fn from_json(config: &Value) -> Result<Self, TargetError> {
        let outer = Fields::new(config, "")?;
        let model_type = outer.text("model_type")?.to_owned();
        let (fields, inner_type) = if NESTED.contains(&model_type.as_str()) {
            let inner = outer.object("text_config")?;
            let inner_type = inner.text("model_type")?.to_owned();
            (inner, inner_type)
        } else {
            (outer, model_type.clone())
        };
        if DEEPSEEK.contains(&inner_type.as_str()) {
            Self::deepseek(&fields, model_type)
        } else if GROUPED_QUERY.contains(&inner_type.as_str()) {
            Self::grouped_query(&fields, model_type, &inner_type)
        } else {
            let supported = [&DEEPSEEK[..], &NESTED, &GROUPED_QUERY].concat().join(", ");
            Err(TargetError::UnsupportedModel { model_type: inner_type, supported })
        }
    }

    /// Layer `index` routes to experts rather than through a dense MLP.
    pub fn is_moe_layer(&self, index: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| {
            index >= moe.first_dense_layers && index.is_multiple_of(moe.layer_freq)
        })
    }

    fn deepseek(fields: &Fields<'_>, model_type: String) -> Result<Self, TargetError> {
        let heads = fields.size("num_attention_heads", 1..=1024)?;
        let kv_heads = fields.size_or("num_key_value_heads", 1..=1024, heads)?;
        fields.require("num_key_value_heads", kv_heads == heads, || {
            format!(
                "is {kv_heads}, but multi-head latent attention needs num_attention_heads, {heads}"
            )
        })?;
        fields.refuse_flag("attention_bias", "biases in MLA projections are not supported")?;
        fields.refuse_false("rope_interleave", "half rotation is not supported for MLA")?;
        let attention = MlaSpec {
            num_heads: heads,
            q_lora_rank: fields.optional_size("q_lora_rank", 1..=1 << 16)?,
            kv_lora_rank: fields.size("kv_lora_rank", 1..=1 << 16)?,
            qk_nope_head_dim: fields.size("qk_nope_head_dim", 1..=1024)?,
            qk_rope_head_dim: fields.even("qk_rope_head_dim", 2..=1024)?,
            v_head_dim: fields.size("v_head_dim", 1..=1024)?,
        };
        let rope = RopeSpec::read(fields, attention.qk_rope_head_dim, true)?;
        fields.require("rope_scaling", rope.amplitude() == 1.0, || {
            "scales cos and sin; with MLA, mscale and mscale_all_dim must be equal".to_owned()
        })?;
        let moe = MoeSpec::deepseek(fields)?;
        Self::finish(fields, (model_type, rope, AttentionSpec::Mla(attention), Some(moe)))
    }

    /// `family` is one of [`GROUPED_QUERY`], also where `model_type` wraps it.
    fn grouped_query(
        fields: &Fields<'_>,
        model_type: String,
        family: &str,
    ) -> Result<Self, TargetError> {
        let hidden = fields.size("hidden_size", 1..=1 << 16)?;
        let heads = fields.size("num_attention_heads", 1..=1024)?;
        let kv_heads = fields.size_or("num_key_value_heads", 1..=1024, heads)?;
        fields.require("num_key_value_heads", heads.is_multiple_of(kv_heads), || {
            format!("is {kv_heads}, which does not divide num_attention_heads, {heads}")
        })?;
        let head_dim = match fields.optional_size("head_dim", 2..=1024)? {
            Some(dim) => dim,
            None => {
                fields.require("num_attention_heads", hidden.is_multiple_of(heads), || {
                    format!(
                        "is {heads}, which does not divide hidden_size, {hidden}; give head_dim"
                    )
                })?;
                hidden / heads
            }
        };
        fields.require("head_dim", head_dim.is_multiple_of(2), || {
            format!("is {head_dim}; rotary embedding needs an even number")
        })?;
        fields.refuse_flag("mlp_bias", "biases in the MLP are not supported")?;
        fields.refuse_flag("use_sliding_window", "sliding windows are not supported")?;
        let is_qwen2 = family == "qwen2";
        let bias = fields.flag_or("attention_bias", is_qwen2)?;
        fields.require("attention_bias", is_qwen2 || !bias, || {
            "is true; biases are supported for qwen2 only".to_owned()
        })?;
        let attention = GqaSpec {
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim,
            qk_norm: family.starts_with("qwen3"),
            qkv_bias: bias,
        };
        let rope = RopeSpec::read(fields, head_dim, false)?;
        let moe = match family {
            "qwen3_moe" => Some(MoeSpec::qwen3(fields)?),
            _ => None,
        };
        Self::finish(fields, (model_type, rope, AttentionSpec::Gqa(attention), moe))
    }

    fn finish(
        fields: &Fields<'_>,
        parts: (String, RopeSpec, AttentionSpec, Option<MoeSpec>),
    ) -> Result<Self, TargetError> {
        let (model_type, rope, attention, moe) = parts;
        let activation = fields.text_or("hidden_act", "silu")?;
        fields.require("hidden_act", activation == "silu", || {
            format!("is `{activation}`; only silu is supported")
        })?;
        let dtype = match fields.optional_text("dtype")? {
            Some(dtype) => Some(dtype),
            None => fields.optional_text("torch_dtype")?,
        };
        Ok(Self {
            model_type,
            hidden_size: fields.size("hidden_size", 1..=1 << 16)?,
            num_layers: fields.size("num_hidden_layers", 1..=1024)?,
            vocab_size: fields.size("vocab_size", 1..=1 << 24)?,
            max_position_embeddings: fields.size("max_position_embeddings", 1..=1 << 24)?,
            rms_norm_eps: fields.number("rms_norm_eps", 1e-12..=1e-1)? as f32,
            rope,
            attention,
            intermediate_size: fields.size("intermediate_size", 1..=1 << 20)?,
            moe,
            tie_word_embeddings: fields.flag_or("tie_word_embeddings", false)?,
            bos_token_id: fields.ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.ids("eos_token_id")?,
            dtype: dtype.map(str::to_owned),
        })
    }
}

impl RopeSpec {
    /// `rope_scaling` with `rope_theta` beside it, or transformers 5's `rope_parameters`.
    fn read(fields: &Fields<'_>, dim: usize, interleaved: bool) -> Result<Self, TargetError> {
        let inner = match fields.optional_object("rope_parameters")? {
            Some(parameters) => Some(parameters),
            None => fields.optional_object("rope_scaling")?,
        };
        let outer_theta = fields.optional_number("rope_theta", 1.01..=1e12)?;
        let inner_theta = match &inner {
            Some(inner) => inner.optional_number("rope_theta", 1.01..=1e12)?,
            None => None,
        };
        let theta = inner_theta.or(outer_theta).unwrap_or(10_000.0);
        let scaling = match &inner {
            Some(inner) => RopeScaling::read(inner)?,
            None => RopeScaling::None,
        };
        Ok(Self { theta, dim, interleaved, scaling })
    }

    /// The stretching, as kernels take it.
    pub(super) fn yarn(&self) -> Option<YarnParams> {
        match &self.scaling {
            RopeScaling::None => None,
            RopeScaling::Yarn(yarn) => Some(YarnParams {
                factor: yarn.factor,
                original_max_positions: yarn.original_max_position_embeddings,
                beta_fast: yarn.beta_fast,
                beta_slow: yarn.beta_slow,
            }),
        }
    }

    /// Multiplier of cos and sin.
    pub fn amplitude(&self) -> f64 {
        let RopeScaling::Yarn(yarn) = &self.scaling else { return 1.0 };
        match (yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim) {
            (Some(factor), _, _) => factor,
            (None, Some(own), Some(all)) => yarn.magnitude(own) / yarn.magnitude(all),
            _ => yarn.magnitude(1.0),
        }
    }

    /// Multiplier of the softmax scale of multi-head latent attention.
    pub fn softmax_factor(&self) -> f64 {
        let RopeScaling::Yarn(yarn) = &self.scaling else { return 1.0 };
        yarn.mscale_all_dim.map_or(1.0, |all| yarn.magnitude(all).powi(2))
    }
}

impl RopeScaling {
    fn read(fields: &Fields<'_>) -> Result<Self, TargetError> {
        let kind = match fields.optional_text("rope_type")? {
            Some(kind) => kind,
            None => fields.text_or("type", "default")?,
        };
        match kind {
            "default" => Ok(Self::None),
            "yarn" | "deepseek_yarn" => Ok(Self::Yarn(YarnSpec {
                factor: fields.number("factor", 1.0..=1e6)?,
                original_max_position_embeddings: fields
                    .size("original_max_position_embeddings", 1..=1 << 24)?,
                beta_fast: fields.optional_number("beta_fast", 1e-3..=1e6)?.unwrap_or(32.0),
                beta_slow: fields.optional_number("beta_slow", 1e-3..=1e6)?.unwrap_or(1.0),
                mscale: fields.optional_number("mscale", 0.0..=100.0)?.filter(|&m| m > 0.0),
                mscale_all_dim: fields
                    .optional_number("mscale_all_dim", 0.0..=100.0)?
                    .filter(|&m| m > 0.0),
                attention_factor: fields.optional_number("attention_factor", 1e-3..=1e3)?,
            })),
            other => {
                Err(fields
                    .wrong("rope_type", format!("is `{other}`; supported are default and yarn")))
            }
        }
    }
}

impl YarnSpec {
    fn magnitude(&self, coefficient: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * coefficient * self.factor.ln() + 1.0 }
    }
}
