//! What the trainer needs of the target: its config.json, embeddings, final norm and head. Knows
//! no layers and no weights format but `DATASET/target/`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shared::target_files;
use thiserror::Error;

use crate::config::{ConfigError, DraftSection, Layout, RopeScaling};
use crate::draft::{AttentionConfig, DraftConfig, Yarn};
use crate::tensors::{TensorFile, TensorFileError};

/// Largest draft vocabulary chosen without being asked for.
const DEFAULT_DRAFT_VOCAB: usize = 32_000;

/// The target's config.json. Multimodal targets keep the language model's under `text_config`.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetConfig {
    raw: Value,
}

impl TargetConfig {
    /// Takes a parsed config.json; checks the keys that every use needs.
    pub fn new(raw: Value) -> Result<Self, TargetError> {
        let config = Self { raw };
        for key in ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"] {
            config.required(key)?;
        }
        Ok(config)
    }

    /// The file as it was.
    pub fn raw(&self) -> &Value {
        &self.raw
    }

    /// A key of the language model, or of the top level where it is only there.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let inner = self.raw.get("text_config").and_then(|text| text.get(key));
        inner.or_else(|| self.raw.get(key)).filter(|value| !value.is_null())
    }

    /// A size above 0, if the key is there.
    pub fn size(&self, key: &str) -> Option<usize> {
        self.get(key).and_then(Value::as_u64).filter(|v| *v > 0).map(|v| v as usize)
    }

    /// First of `architectures`: the class by which engines choose their code; empty without one.
    pub fn architecture(&self) -> &str {
        let first = self.raw.get("architectures").and_then(|list| list.get(0));
        first.and_then(Value::as_str).unwrap_or_default()
    }

    fn required(&self, key: &str) -> Result<usize, TargetError> {
        self.size(key).ok_or_else(|| TargetError::Key {
            key: key.to_owned(),
            found: self.get(key).map_or("nothing".to_owned(), Value::to_string),
        })
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> Result<usize, TargetError> {
        self.required("hidden_size")
    }

    /// Decoder layers.
    pub fn num_hidden_layers(&self) -> Result<usize, TargetError> {
        self.required("num_hidden_layers")
    }

    /// Rows of the embedding.
    pub fn vocab_size(&self) -> Result<usize, TargetError> {
        self.required("vocab_size")
    }

    /// Ids that end an answer.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let one = |value: &Value| value.as_u64().map(|id| id as u32);
        match self.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(one).collect(),
            Some(value) => one(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Id that begins a text, if any.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.get("bos_token_id").and_then(Value::as_u64).map(|id| id as u32)
    }

    fn real(&self, key: &str, default: f64) -> f64 {
        let nested = self.get("rope_parameters").and_then(|rope| rope.get(key));
        self.get(key).or(nested).and_then(Value::as_f64).unwrap_or(default)
    }

    /// YaRN of the target. Another kind of scaling is an error.
    fn yarn(&self) -> Result<Option<Yarn>, TargetError> {
        let Some(scaling) = self.get("rope_scaling").or_else(|| self.get("rope_parameters")) else {
            return Ok(None);
        };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
        match kind {
            None | Some("default") => return Ok(None),
            Some("yarn") => {}
            Some(other) => return Err(TargetError::RopeScaling(other.to_owned())),
        }
        let real =
            |key: &str, default: f64| scaling.get(key).and_then(Value::as_f64).unwrap_or(default);
        let original = scaling.get("original_max_position_embeddings").and_then(Value::as_u64);
        Ok(Some(Yarn {
            factor: real("factor", 1.0),
            original_max_position_embeddings: original.unwrap_or(0) as usize,
            beta_fast: real("beta_fast", 32.0),
            beta_slow: real("beta_slow", 1.0),
            mscale: real("mscale", 1.0),
            mscale_all_dim: real("mscale_all_dim", real("mscale", 1.0)),
        }))
    }

    /// The draft's sizes: those given, else the target's.
    pub fn draft_config(
        &self,
        section: &DraftSection,
        num_aux: usize,
    ) -> Result<DraftConfig, TargetError> {
        let vocab_size = self.vocab_size()?;
        let attention = match section.layout {
            Layout::Llama => self.gqa(section)?,
            Layout::Mla => self.mla(section)?,
        };
        let yarn = match section.rope_scaling {
            RopeScaling::Target => self.yarn()?,
            RopeScaling::None => None,
        };
        let config = DraftConfig {
            hidden_size: self.hidden_size()?,
            intermediate_size: self.given_or(
                section.intermediate_size,
                "intermediate_size",
                "intermediate_size",
            )?,
            num_attention_heads: self.heads(section)?,
            attention,
            rms_norm_eps: section.rms_norm_eps.unwrap_or(self.real("rms_norm_eps", 1e-6)),
            rope_theta: section.rope_theta.unwrap_or(self.real("rope_theta", 10_000.0)),
            yarn,
            vocab_size,
            draft_vocab_size: section
                .draft_vocab_size
                .unwrap_or(vocab_size.min(DEFAULT_DRAFT_VOCAB)),
            num_aux,
            fc_norm: section.fc_norm,
            norm_output: section.norm_output,
            norm_before_residual: section.norm_before_residual,
        };
        config.validate()?;
        Ok(config)
    }

    fn heads(&self, section: &DraftSection) -> Result<usize, TargetError> {
        self.given_or(section.num_attention_heads, "num_attention_heads", "num_attention_heads")
    }

    fn gqa(&self, section: &DraftSection) -> Result<AttentionConfig, TargetError> {
        let heads = self.heads(section)?;
        // A latent-attention target has no head_dim: its value heads have the width of a head.
        let head_dim = section.head_dim.or(self.size("head_dim")).or(self.size("v_head_dim"));
        let hidden = self.hidden_size()?;
        let groups = section.num_key_value_heads.or(self.size("num_key_value_heads"));
        Ok(AttentionConfig::Gqa {
            num_key_value_heads: groups.unwrap_or(heads),
            head_dim: head_dim.unwrap_or(hidden / heads),
        })
    }

    fn mla(&self, section: &DraftSection) -> Result<AttentionConfig, TargetError> {
        let get = |given, key| self.given_or(given, key, key);
        Ok(AttentionConfig::Mla {
            q_lora_rank: get(section.q_lora_rank, "q_lora_rank")?,
            kv_lora_rank: get(section.kv_lora_rank, "kv_lora_rank")?,
            qk_nope_head_dim: get(section.qk_nope_head_dim, "qk_nope_head_dim")?,
            qk_rope_head_dim: get(section.qk_rope_head_dim, "qk_rope_head_dim")?,
            v_head_dim: get(section.v_head_dim, "v_head_dim")?,
        })
    }

    fn given_or(&self, given: Option<usize>, name: &str, key: &str) -> Result<usize, TargetError> {
        given.or(self.size(key)).ok_or_else(|| {
            TargetError::Config(ConfigError::Value {
                key: format!("draft.{name}"),
                value: String::new(),
                expected: format!("a size: the target's config.json has no {key}"),
            })
        })
    }
}

/// The frozen parts of the target that training reads, as f32 on the host.
#[derive(Clone, Debug)]
pub struct TargetHead {
    /// config.json.
    pub config: TargetConfig,
    /// Rows of the embedding and head.
    pub vocab_size: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// `[V, H]`.
    pub embed_tokens: Vec<f32>,
    /// Weight of the final norm, `[H]`.
    pub norm: Vec<f32>,
    /// `[V, H]`.
    pub lm_head: Vec<f32>,
    /// Epsilon of the final norm.
    pub rms_norm_eps: f64,
}

impl TargetHead {
    /// Loads `DATASET/target/config.json` and `head.safetensors`.
    pub fn load(dir: &Path) -> Result<Self, TargetError> {
        let config = Self::load_config(dir)?;
        let path = dir.join("head.safetensors");
        std::fs::metadata(&path)
            .map_err(|source| TargetError::Read { path: path.clone(), source })?;
        let faults = target_files::faults(dir)
            .map_err(|source| TargetError::Read { path: dir.to_owned(), source })?;
        if !faults.is_empty() {
            return Err(TargetError::Damaged { path: dir.to_owned(), faults });
        }
        let file = TensorFile::read(&path)?;
        let (vocab_size, hidden_size) = (config.vocab_size()?, config.hidden_size()?);
        let stored_eps = file.metadata.get("rms_norm_eps").and_then(|text| text.parse().ok());
        let eps = stored_eps.unwrap_or(config.real("rms_norm_eps", 1e-6));
        let matrix = |name: &str| file.f32(name, &[vocab_size, hidden_size], &path);
        let head = Self {
            vocab_size,
            hidden_size,
            embed_tokens: matrix("embed_tokens.weight")?,
            norm: file.f32("norm.weight", &[hidden_size], &path)?,
            lm_head: matrix("lm_head.weight")?,
            rms_norm_eps: eps,
            config,
        };
        let parts = [
            ("embed_tokens.weight", &head.embed_tokens),
            ("norm.weight", &head.norm),
            ("lm_head.weight", &head.lm_head),
        ];
        let finite = |values: &[f32]| values.iter().all(|v| v.is_finite());
        if let Some((name, _)) = parts.into_iter().find(|(_, values)| !finite(values)) {
            return Err(TargetError::NotFinite { path, name });
        }
        Ok(head)
    }

    /// Loads `config.json` of a directory.
    pub fn load_config(dir: &Path) -> Result<TargetConfig, TargetError> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path)
            .map_err(|source| TargetError::Read { path: path.clone(), source })?;
        let raw =
            serde_json::from_str(&text).map_err(|source| TargetError::Json { path, source })?;
        TargetConfig::new(raw)
    }
}

/// A target directory that cannot be used.
#[derive(Debug, Error)]
pub enum TargetError {
    /// The operating system refused.
    #[error(
        "reading {}: `extractor run` writes it, and writes it again where it is missing",
        path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
    /// config.json is not JSON.
    #[error("{} is not valid JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        #[source]
        source: serde_json::Error,
    },
    /// A key that is needed is missing or no size.
    #[error("the target's config.json has {found} for {key}: a whole number above 0 is needed")]
    Key {
        /// The key.
        key: String,
        /// What is there.
        found: String,
    },
    /// RoPE scaling that the draft does not implement.
    #[error(
        "the target's rope scaling is `{0}`, which the draft cannot take over: set \
            draft.rope_scaling = \"none\""
    )]
    RopeScaling(String),
    /// A file was changed since the extractor wrote it.
    #[error(
        "{}/{}: remove that directory, `extractor run` writes it again",
        path.display(),
        faults.join(", ")
    )]
    Damaged {
        /// `DATASET/target`.
        path: PathBuf,
        /// What is wrong with which file.
        faults: Vec<String>,
    },
    /// A weight is NaN or infinite.
    #[error("{}: {name} holds values that are not finite", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: &'static str,
    },
    /// The head's file.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// A size that must be given.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Sizes that do not fit each other.
    #[error(transparent)]
    Draft(#[from] crate::draft::DraftConfigError),
}

impl TargetError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            Self::Tensors(error) => error.exit_code(),
            Self::Config(error) => error.exit_code(),
            Self::Draft(error) => error.exit_code(),
            Self::RopeScaling(_) => 78,
            _ => 65,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kimi() -> TargetConfig {
        TargetConfig::new(json!({
            "eos_token_id": 11, "text_config": {
            "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 40000, "intermediate_size": 96,
            "num_attention_heads": 4, "num_key_value_heads": 4,
            "q_lora_rank": 16, "kv_lora_rank": 24,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "rope_theta": 50000.0,
            "rms_norm_eps": 1e-5, "eos_token_id": [7, 9], "rope_scaling": {"type": "yarn",
            "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}}))
        .unwrap()
    }

    #[test]
    fn sizes_left_out_are_the_targets() {
        let section = DraftSection { layout: Layout::Mla, ..DraftSection::default() };
        let draft = kimi().draft_config(&section, 3).unwrap();
        assert_eq!(draft.draft_vocab_size, 32_000);
        assert_eq!(draft.intermediate_size, 96);
        assert_eq!(draft.yarn.unwrap().factor, 64.0);
        let llama = kimi().draft_config(&DraftSection::default(), 3).unwrap();
        let expected = AttentionConfig::Gqa { num_key_value_heads: 4, head_dim: 12 };
        assert_eq!(llama.attention, expected);
        assert_eq!(kimi().eos_token_ids(), [7, 9]);
    }

    #[test]
    fn given_sizes_win_and_missing_ones_are_named() {
        let plain = TargetConfig::new(json!({
            "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 100,
            "num_attention_heads": 4, "intermediate_size": 64}))
        .unwrap();
        let section = DraftSection { head_dim: Some(6), ..DraftSection::default() };
        let draft = plain.draft_config(&section, 3).unwrap();
        assert_eq!(draft.attention, AttentionConfig::Gqa { num_key_value_heads: 4, head_dim: 6 });
        let section = DraftSection { layout: Layout::Mla, ..DraftSection::default() };
        let error = plain.draft_config(&section, 3).unwrap_err();
        assert!(error.to_string().contains("draft.q_lora_rank"), "{error}");
        assert_eq!(error.exit_code(), 78);
        let error = TargetConfig::new(json!({"hidden_size": 0})).unwrap_err();
        assert!(error.to_string().contains("hidden_size"), "{error}");
    }

    #[test]
    fn unknown_rope_scaling_is_refused_unless_turned_off() {
        let mut raw = kimi().raw().clone();
        raw["text_config"]["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0});
        let target = TargetConfig::new(raw).unwrap();
        let error = target.draft_config(&DraftSection::default(), 3).unwrap_err();
        assert!(error.to_string().contains("llama3"), "{error}");
        let section = DraftSection { rope_scaling: RopeScaling::None, ..DraftSection::default() };
        assert_eq!(target.draft_config(&section, 3).unwrap().yarn, None);
    }
}
