//! Sizes and switches of a draft, and the names and shapes of its parameters that follow from
//! them. Knows no tensors.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Everything that decides the shapes and the arithmetic of an EAGLE-3 draft.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftConfig {
    /// Width of the residual stream, equal to the target's.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Kind of attention and its sizes.
    pub attention: AttentionConfig,
    /// Added to the mean square in every norm of the draft.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Long-context blend of the rotary frequencies.
    #[serde(default)]
    pub yarn: Option<Yarn>,
    /// Rows of the target's embedding and head.
    pub vocab_size: usize,
    /// Rows of the draft's head.
    pub draft_vocab_size: usize,
    /// Captured target states that enter `fc`.
    #[serde(default = "three")]
    pub num_aux: usize,
    /// One norm for each auxiliary state before `fc`.
    #[serde(default)]
    pub fc_norm: bool,
    /// The next step receives the normed output of the layer instead of the plain one.
    #[serde(default)]
    pub norm_output: bool,
    /// The layer's residual is the normed hidden state instead of the plain one.
    #[serde(default)]
    pub norm_before_residual: bool,
}

fn three() -> usize {
    3
}

/// Sizes of the attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionConfig {
    /// Grouped heads with rotated halves, as in Llama.
    Gqa {
        /// Key and value heads; divides the query heads.
        num_key_value_heads: usize,
        /// Entries of one head.
        head_dim: usize,
    },
    /// Latent attention with interleaved rotation, as in DeepSeek-V3.
    Mla {
        /// Width of the compressed query.
        q_lora_rank: usize,
        /// Width of the compressed key and value.
        kv_lora_rank: usize,
        /// Entries of a query or key head that are not rotated.
        qk_nope_head_dim: usize,
        /// Entries that are rotated; this part of the key is shared by all heads.
        qk_rope_head_dim: usize,
        /// Entries of a value head.
        v_head_dim: usize,
    },
}

/// YaRN extension of the rotary frequencies. Cosine and sine are never scaled, which is right
/// for `mscale == mscale_all_dim` only, so that is required.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// How many times the context is extended.
    pub factor: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
    /// Turns over the original context above which a pair keeps its frequency.
    pub beta_fast: f64,
    /// Turns below which a pair is slowed by the whole factor.
    pub beta_slow: f64,
    /// Strength of the attention correction.
    pub mscale: f64,
    /// Its counterpart for the softmax scale.
    pub mscale_all_dim: f64,
}

/// Largest size of anything in a draft.
const LARGEST: usize = 1 << 24;

/// A draft configuration that cannot be built.
#[derive(Debug, Error)]
pub enum DraftConfigError {
    /// A size that must be at least one is zero.
    #[error("draft config: {field} is 0; it must be at least 1")]
    Zero {
        /// Name of the key.
        field: &'static str,
    },
    /// A size that no draft has, and whose products may not fit any number.
    #[error("draft config: {field} is {size}; it must be at most {LARGEST}")]
    TooLarge {
        /// Name of the key.
        field: &'static str,
        /// Its value.
        size: usize,
    },
    /// Key and value heads do not divide the query heads.
    #[error(
        "draft config: {heads} attention heads cannot be shared by {groups} key/value heads; \
         num_key_value_heads must divide num_attention_heads"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        groups: usize,
    },
    /// Rotation works on pairs.
    #[error("draft config: {field} is {size}; rotation needs an even size")]
    OddRotation {
        /// Name of the key.
        field: &'static str,
        /// Its value.
        size: usize,
    },
    /// More draft tokens than target tokens.
    #[error(
        "draft config: draft_vocab_size {draft} is larger than vocab_size {target}; \
         a draft vocabulary is a part of the target's"
    )]
    Vocabulary {
        /// Draft tokens.
        draft: usize,
        /// Target tokens.
        target: usize,
    },
    /// A real number outside its range.
    #[error("draft config: {field} is {value}; expected {expected}")]
    Range {
        /// Name of the key.
        field: &'static str,
        /// Its value.
        value: f64,
        /// What is allowed.
        expected: &'static str,
    },
}

impl DraftConfigError {
    /// Exit code of a run that ends with this error.
    pub fn exit_code(&self) -> u8 {
        78
    }
}

impl DraftConfig {
    /// Checks every size and number; all other functions rely on it.
    pub fn validate(&self) -> Result<(), DraftConfigError> {
        self.validate_sizes()?;
        let (field, rotated) = match self.attention {
            AttentionConfig::Gqa { num_key_value_heads: groups, head_dim } => {
                if !self.num_attention_heads.is_multiple_of(groups) {
                    return Err(DraftConfigError::Heads {
                        heads: self.num_attention_heads,
                        groups,
                    });
                }
                ("head_dim", head_dim)
            }
            AttentionConfig::Mla { qk_rope_head_dim, .. } => ("qk_rope_head_dim", qk_rope_head_dim),
        };
        if !rotated.is_multiple_of(2) {
            return Err(DraftConfigError::OddRotation { field, size: rotated });
        }
        if self.draft_vocab_size > self.vocab_size {
            return Err(DraftConfigError::Vocabulary {
                draft: self.draft_vocab_size,
                target: self.vocab_size,
            });
        }
        require("rms_norm_eps", self.rms_norm_eps, "above 0", |x| x > 0.0)?;
        require("rope_theta", self.rope_theta, "above 1", |x| x > 1.0)?;
        let Some(yarn) = self.yarn else { return Ok(()) };
        require("yarn.factor", yarn.factor, "at least 1", |x| x >= 1.0)?;
        require("yarn.beta_fast", yarn.beta_fast, "above 0", |x| x > 0.0)?;
        require("yarn.beta_slow", yarn.beta_slow, "above 0", |x| x > 0.0)?;
        require("yarn.mscale", yarn.mscale, "the value of yarn.mscale_all_dim", |x| {
            x == yarn.mscale_all_dim
        })
    }

    fn validate_sizes(&self) -> Result<(), DraftConfigError> {
        let mut sizes = vec![
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("vocab_size", self.vocab_size),
            ("draft_vocab_size", self.draft_vocab_size),
            ("num_aux", self.num_aux),
        ];
        match self.attention {
            AttentionConfig::Gqa { num_key_value_heads, head_dim } => sizes.extend([
                ("attention.num_key_value_heads", num_key_value_heads),
                ("attention.head_dim", head_dim),
            ]),
            AttentionConfig::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            } => sizes.extend([
                ("attention.q_lora_rank", q_lora_rank),
                ("attention.kv_lora_rank", kv_lora_rank),
                ("attention.qk_nope_head_dim", qk_nope_head_dim),
                ("attention.qk_rope_head_dim", qk_rope_head_dim),
                ("attention.v_head_dim", v_head_dim),
            ]),
        }
        if let Some(yarn) = self.yarn {
            sizes.push((
                "yarn.original_max_position_embeddings",
                yarn.original_max_position_embeddings,
            ));
        }
        match sizes.into_iter().find(|&(_, size)| size == 0 || size > LARGEST) {
            Some((field, 0)) => Err(DraftConfigError::Zero { field }),
            Some((field, size)) => Err(DraftConfigError::TooLarge { field, size }),
            None => Ok(()),
        }
    }

    /// Factor of the attention scores before the softmax. With MLA and YaRN it carries the square
    /// of the attention correction.
    pub fn attention_scale(&self) -> f64 {
        match self.attention {
            AttentionConfig::Gqa { head_dim, .. } => (head_dim as f64).powf(-0.5),
            AttentionConfig::Mla { qk_nope_head_dim, qk_rope_head_dim, .. } => {
                let correction = self
                    .yarn
                    .map_or(1.0, |yarn| 0.1 * yarn.mscale_all_dim * yarn.factor.ln() + 1.0);
                ((qk_nope_head_dim + qk_rope_head_dim) as f64).powf(-0.5) * correction.powi(2)
            }
        }
    }

    /// Entries of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        match self.attention {
            AttentionConfig::Gqa { head_dim, .. } => head_dim,
            AttentionConfig::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
        }
    }

    /// Exported name and shape of every trainable parameter: norms `[size]`, matrices
    /// `[out, in]`. The order is that of [`super::Eagle3Draft::parameters`].
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let mut shapes = vec![("fc.weight".to_owned(), vec![h, self.num_aux * h])];
        if self.fc_norm {
            shapes.extend((0..self.num_aux).map(|n| (format!("fc_norm.{n}.weight"), vec![h])));
        }
        let mut push = |name: &str, shape: &[usize]| {
            shapes.push((format!("midlayer.{name}.weight"), shape.to_vec()));
        };
        push("input_layernorm", &[h]);
        push("hidden_norm", &[h]);
        for (name, shape) in self.attention_shapes() {
            push(&format!("self_attn.{name}"), &shape);
        }
        push("post_attention_layernorm", &[h]);
        push("mlp.gate_proj", &[i, h]);
        push("mlp.up_proj", &[i, h]);
        push("mlp.down_proj", &[h, i]);
        shapes.push(("norm.weight".to_owned(), vec![h]));
        shapes.push(("lm_head.weight".to_owned(), vec![self.draft_vocab_size, h]));
        shapes
    }

    fn attention_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (h, heads) = (self.hidden_size, self.num_attention_heads);
        match self.attention {
            AttentionConfig::Gqa { num_key_value_heads: groups, head_dim } => vec![
                ("q_proj", vec![heads * head_dim, 2 * h]),
                ("k_proj", vec![groups * head_dim, 2 * h]),
                ("v_proj", vec![groups * head_dim, 2 * h]),
                ("o_proj", vec![h, heads * head_dim]),
            ],
            AttentionConfig::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim: nope,
                qk_rope_head_dim: rope,
                v_head_dim,
            } => vec![
                ("q_a_proj", vec![q_lora_rank, 2 * h]),
                ("q_a_layernorm", vec![q_lora_rank]),
                ("q_b_proj", vec![heads * (nope + rope), q_lora_rank]),
                ("kv_a_proj_with_mqa", vec![kv_lora_rank + rope, 2 * h]),
                ("kv_a_layernorm", vec![kv_lora_rank]),
                ("kv_b_proj", vec![heads * (nope + v_head_dim), kv_lora_rank]),
                ("o_proj", vec![h, heads * v_head_dim]),
            ],
        }
    }
}

fn require(
    field: &'static str,
    value: f64,
    expected: &'static str,
    allowed: impl Fn(f64) -> bool,
) -> Result<(), DraftConfigError> {
    if value.is_finite() && allowed(value) {
        return Ok(());
    }
    Err(DraftConfigError::Range { field, value, expected })
}
