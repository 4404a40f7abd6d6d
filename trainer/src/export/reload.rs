//! Reads an exported draft back from its files alone, as an engine does, and repeats a step with
//! it. Knows nothing of how the files were written.

use std::path::{Path, PathBuf};

use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use serde_json::Value;
use shared::LayerIndex;

use super::layer_ids::LayerIds;
use super::loaders;
use super::{Engine, ExportError, ExportLayout};
use crate::checkpoint::Checkpoint;
use crate::decode::{DraftDecoder, NewRows};
use crate::draft::{AttentionConfig, DraftConfig, DraftVocabulary, Eagle3Draft, Param, Yarn};
use crate::ops::DraftOps;
use crate::tensors::TensorFile;
use crate::vocab::VocabMap;

/// A draft read from `config.json` and `model.safetensors`.
#[derive(Clone, Debug)]
pub struct ExportedDraft {
    /// Sizes and switches.
    pub draft: DraftConfig,
    /// Parameters by the draft's own names.
    pub weights: TensorFile,
    /// Draft vocabulary.
    pub vocab: VocabMap,
    /// Layers whose outputs an engine will feed it.
    pub aux_layers: Vec<LayerIndex>,
    /// Ids in `eagle_config`, where there are any.
    pub(super) nested_ids: Option<Vec<u16>>,
}

impl ExportedDraft {
    /// Reads a directory written by an export, or by another trainer in one of the layouts.
    pub fn load(dir: &Path) -> Result<Self, ExportError> {
        let config = ConfigFile::read(dir)?;
        let path = dir.join("model.safetensors");
        let file = TensorFile::read(&path)?;
        let draft = config.draft(&file)?;
        let vocab = match file.tensors.get("d2t") {
            None if draft.draft_vocab_size == draft.vocab_size => {
                VocabMap::full(draft.vocab_size, "exported")
            }
            None => {
                return Err(config.error(
                    "draft_vocab_size",
                    "is below vocab_size, but the file holds no d2t: the draft ids mean nothing",
                ));
            }
            Some(d2t) => {
                let wrong = |name: &str| config.error(name, "has the wrong type");
                let d2t = d2t.to_i64().ok_or_else(|| wrong("d2t"))?;
                let t2d = file.get("t2d", &path)?.to_bool().ok_or_else(|| wrong("t2d"))?;
                VocabMap::from_tensors(&d2t, &t2d, "exported".to_owned(), 1.0)?
            }
        };
        let aux_layers = config.aux_layers()?;
        let nested_ids = config.outer.get("eagle_config").and_then(|eagle| config.ids(eagle).ok());
        Ok(Self { draft, weights: loaders::by_parameter(&file), vocab, aux_layers, nested_ids })
    }

    /// The draft with its parameters on a device.
    pub fn draft<B: Backend>(&self, device: &B::Device) -> Result<Eagle3Draft<B>, ExportError> {
        let path = Path::new("model.safetensors");
        Eagle3Draft::from_parameters(self.draft.clone(), &mut |name, shape| {
            Ok(Param::from_vec(self.weights.f32(name, shape, path)?, shape, device))
        })
    }
}

/// Replays the loaders of a layout on the files of a directory; their names.
pub(super) fn replay(
    dir: &Path,
    layout: ExportLayout,
    engine: Engine,
) -> Result<Vec<&'static str>, ExportError> {
    let file = TensorFile::read(&dir.join("model.safetensors"))?;
    let config = ConfigFile::read(dir)?;
    config.check_traps()?;
    loaders::replay(&file, &config.draft(&file)?, (layout, engine))
}

/// Further steps that are compared: what is fed back shows from the second on.
const GOLDEN_STEPS: usize = 3;

/// Logits `[rows + 3, draft vocabulary]`: of the first step over the golden rows of a checkpoint,
/// and of three more behind the last of them.
pub fn golden_logits<B: DraftOps>(
    draft: Eagle3Draft<B>,
    golden: &TensorFile,
) -> Result<Vec<f32>, ExportError> {
    let path = Path::new("golden.safetensors");
    let (width, num_aux) = (draft.config().hidden_size, draft.config().num_aux);
    let rows = golden.get("input_ids", path)?.shape.first().copied().unwrap_or(0);
    let embeds = golden.f32("embeds", &[rows, width], path)?;
    let states: Vec<Vec<f32>> = (0..num_aux)
        .map(|n| golden.f32(&format!("aux.{n}"), &[rows, width], path))
        .collect::<Result<_, _>>()?;
    let rows_of = |row: usize| {
        states.iter().flat_map(move |state| &state[row * width..(row + 1) * width]).copied()
    };
    let aux: Vec<f32> = (0..rows).flat_map(rows_of).collect();
    let table = Tensor::from_data(TensorData::new(embeds, [rows, width]), &draft.device());
    // The embeddings are those of the golden rows, so row numbers stand for tokens.
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let size = draft.config().draft_vocab_size;
    let vocabulary = DraftVocabulary::first(size, size);
    let mut decoder = DraftDecoder::new(draft, table, vocabulary, rows + GOLDEN_STEPS);
    let mut logits = decoder.extend_with_logits(NewRows { aux: &aux, next_tokens: &tokens });
    // The same tokens for both drafts, whichever each would choose.
    let behind: Vec<u32> = tokens.iter().copied().cycle().take(GOLDEN_STEPS).collect();
    logits.extend(decoder.logits_behind(&behind));
    Ok(logits)
}

/// Largest difference of golden logits between a checkpoint and an export, over the largest logit.
pub(super) fn golden_difference(
    checkpoint: &Checkpoint,
    exported: &ExportedDraft,
) -> Result<f64, ExportError> {
    let device = Default::default();
    let expected = golden_logits::<Flex>(checkpoint.draft(&device)?, &checkpoint.golden)?;
    let found = golden_logits::<Flex>(exported.draft(&device)?, &checkpoint.golden)?;
    let pairs = expected.iter().zip(&found);
    let mut largest = 0.0f64;
    for difference in pairs.map(|(a, b)| f64::from((a - b).abs())) {
        // A NaN must win, and f64::max would drop it.
        largest = if difference.is_nan() { difference } else { largest.max(difference) };
    }
    let scale = expected.iter().fold(0.0f64, |max, v| max.max(f64::from(v.abs())));
    Ok(largest / scale.max(f64::MIN_POSITIVE))
}

/// A config.json as an engine reads it.
struct ConfigFile {
    path: PathBuf,
    outer: Value,
}

impl ConfigFile {
    fn read(dir: &Path) -> Result<Self, ExportError> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path)
            .map_err(|source| ExportError::Io { path: path.clone(), source })?;
        let outer = serde_json::from_str(&text).map_err(|error| ExportError::Config {
            path: path.clone(),
            key: "(whole file)".to_owned(),
            problem: error.to_string(),
        })?;
        Ok(Self { path, outer })
    }

    fn error(&self, key: &str, problem: &str) -> ExportError {
        let (path, key) = (self.path.clone(), key.to_owned());
        ExportError::Config { path, key, problem: problem.to_owned() }
    }

    /// A key of the decoder layer: inside `transformer_layer_config` in the speculators format.
    fn get(&self, key: &str) -> Option<&Value> {
        let inner = self.outer.get("transformer_layer_config").and_then(|inner| inner.get(key));
        inner.or_else(|| self.outer.get(key)).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str) -> Result<usize, ExportError> {
        let size = self.get(key).and_then(Value::as_u64).filter(|size| *size > 0);
        let size = size.ok_or_else(|| self.error(key, "is not a size above 0"))?;
        Ok(size as usize)
    }

    fn real(&self, key: &str) -> Result<f64, ExportError> {
        let value = self.get(key).and_then(Value::as_f64);
        value.ok_or_else(|| self.error(key, "is not a number"))
    }

    /// A norm switch. Absent means false, except the one that vLLM's speculators reader takes for
    /// true.
    fn switch(&self, key: &str) -> bool {
        let speculators = self.outer.get("speculators_model_type").is_some();
        let default = speculators && key == "norm_before_residual";
        self.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    fn architecture(&self) -> &str {
        let first = self.outer.get("architectures").and_then(|list| list.get(0));
        first.and_then(Value::as_str).unwrap_or_default()
    }

    fn draft(&self, file: &TensorFile) -> Result<DraftConfig, ExportError> {
        let hidden_size = self.size("hidden_size")?;
        let mla = match self.architecture() {
            "LlamaForCausalLMEagle3" | "Eagle3DraftModel" => false,
            "Eagle3DeepseekV2ForCausalLM" => true,
            other => {
                let problem = format!("`{other}` is no draft layout that is known here");
                return Err(self.error("architectures", &problem));
            }
        };
        let attention = match mla {
            false => AttentionConfig::Gqa {
                num_key_value_heads: self.size("num_key_value_heads")?,
                head_dim: self.size("head_dim")?,
            },
            true => AttentionConfig::Mla {
                q_lora_rank: self.size("q_lora_rank")?,
                kv_lora_rank: self.size("kv_lora_rank")?,
                qk_nope_head_dim: self.size("qk_nope_head_dim")?,
                qk_rope_head_dim: self.size("qk_rope_head_dim")?,
                v_head_dim: self.size("v_head_dim")?,
            },
        };
        // The width of fc says how many aux states there are; what engines count is checked apart.
        let fc_width = file.tensors.get("fc.weight").and_then(|fc| fc.shape.get(1)).copied();
        let config = DraftConfig {
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_attention_heads: self.size("num_attention_heads")?,
            attention,
            rms_norm_eps: self.real("rms_norm_eps")?,
            rope_theta: self.real("rope_theta")?,
            yarn: self.yarn(mla)?,
            vocab_size: self.size("vocab_size")?,
            draft_vocab_size: self.size("draft_vocab_size")?,
            num_aux: fc_width.unwrap_or(3 * hidden_size) / hidden_size,
            fc_norm: self.switch("fc_norm"),
            norm_output: self.switch("norm_output"),
            norm_before_residual: self.switch("norm_before_residual"),
        };
        if self.switch("norm_before_fc") {
            return Err(self.error("norm_before_fc", "is a variant that is not implemented here"));
        }
        config.validate()?;
        Ok(config)
    }

    fn yarn(&self, mla: bool) -> Result<Option<Yarn>, ExportError> {
        let Some(scaling) = self.get("rope_scaling") else { return Ok(None) };
        let real = |key: &str| {
            let value = scaling.get(key).and_then(Value::as_f64);
            value.ok_or_else(|| self.error(&format!("rope_scaling.{key}"), "is not a number"))
        };
        for key in ["type", "rope_type"] {
            if scaling.get(key).and_then(Value::as_str) != Some("yarn") {
                return Err(self.error(&format!("rope_scaling.{key}"), "is not yarn"));
            }
        }
        let yarn = Yarn {
            factor: real("factor")?,
            original_max_position_embeddings: real("original_max_position_embeddings")? as usize,
            beta_fast: real("beta_fast")?,
            beta_slow: real("beta_slow")?,
            mscale: real("mscale")?,
            mscale_all_dim: real("mscale_all_dim")?,
        };
        if !mla {
            // Llama drafts: engines ignore mscale and multiply cosine and sine by this.
            let attn_factor = scaling.get("attn_factor").and_then(Value::as_f64).unwrap_or(1.0);
            let multiplier = (0.1 * yarn.factor.ln() + 1.0) * attn_factor;
            if (multiplier - 1.0).abs() > 1e-6 {
                let problem = format!(
                    "leads engines to multiply cosine and sine by {multiplier:.5}: the draft was \
                     trained with 1"
                );
                return Err(self.error("rope_scaling.attn_factor", &problem));
            }
        }
        Ok(Some(yarn))
    }

    fn ids(&self, parent: &Value) -> Result<Vec<u16>, ExportError> {
        let key = "eagle_aux_hidden_state_layer_ids";
        let list = parent.get(key).and_then(Value::as_array);
        let ids = list.and_then(|list| {
            list.iter().map(|id| u16::try_from(id.as_u64()?).ok()).collect::<Option<Vec<u16>>>()
        });
        ids.ok_or_else(|| self.error(key, "is missing: engines would guess the layers"))
    }

    fn aux_layers(&self) -> Result<Vec<LayerIndex>, ExportError> {
        let layers = LayerIds::read_by_vllm(&self.ids(&self.outer)?);
        let key = "eagle_aux_hidden_state_layer_ids";
        layers.ok_or_else(|| self.error(key, "holds 0, which means the embeddings"))
    }

    /// Aux states as engines count them: said, as many as the nested ids, or three.
    fn counted_aux(&self) -> Result<usize, ExportError> {
        match (self.get("num_aux_hidden_states"), self.outer.get("eagle_config")) {
            (Some(_), _) => self.size("num_aux_hidden_states"),
            (None, Some(eagle)) => Ok(self.ids(eagle)?.len()),
            (None, None) => Ok(3),
        }
    }

    /// Fields with which engines were seen to fail or to guess.
    fn check_traps(&self) -> Result<(), ExportError> {
        let keys = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let inner = self.outer.get("transformer_layer_config").unwrap_or(&Value::Null);
        for map in [keys(&self.outer), keys(inner)] {
            if map.get("use_cache").is_some_and(Value::is_null) {
                return Err(self.error("use_cache", "is null, which vLLM refuses"));
            }
            if map.contains_key("num_nextn_predict_layers") {
                return Err(self.error("num_nextn_predict_layers", "makes SGLang fail"));
            }
        }
        if self.outer.get("tie_word_embeddings") != Some(&Value::Bool(false)) {
            return Err(self.error("tie_word_embeddings", "must be false"));
        }
        self.size("max_position_embeddings")?;
        let explicit = |key: &str| self.outer.get(key).and_then(Value::as_bool).is_some();
        if let Some(key) = ["norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"]
            .into_iter()
            .find(|key| !explicit(key))
        {
            return Err(self.error(key, "must be explicit: engines default it differently"));
        }
        if self.counted_aux()? != self.ids(&self.outer)?.len() {
            return Err(self.error("num_aux_hidden_states", "is not what engines would count"));
        }
        let (old, new) = (self.get("rope_scaling"), self.get("rope_parameters"));
        let same = |key: &str| {
            let left = old.and_then(|old| old.get(key)).or_else(|| self.get(key));
            left.is_none() || left == new.and_then(|new| new.get(key))
        };
        match ["rope_theta", "factor", "attn_factor", "beta_fast"].into_iter().find(|k| !same(k)) {
            Some(key) => Err(self.error(key, "differs between rope_scaling and rope_parameters")),
            None => Ok(()),
        }
    }
}
