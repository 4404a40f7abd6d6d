//! Which ids mean the captured layers to each engine. The only place that knows engine ids.

use serde::Serialize;
use shared::LayerIndex;

use super::ExportError;

/// Engines that must read the ids correctly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM, and SGLang from 2026-05-16 on (sglang#25454).
    #[default]
    Current,
    /// vLLM only.
    Vllm,
    /// SGLang before that, which adds one to every id; vLLM versions that read the nested ids
    /// would take each state one layer too early.
    SglangOld,
}

/// How SGLang reads the nested ids of a target: `set_eagle3_layers_to_capture` of its model
/// classes, read in 0.5.23.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglangRule {
    /// DeepSeek's family: id k is the state that enters layer k, unless the first id is 1, which
    /// makes them ids of outputs.
    OutputsIfFirstIsOne,
    /// Llama and Qwen: id k is the output of layer k.
    Outputs,
}

impl SglangRule {
    /// The rule of the class that serves a target; `None` for those whose source was not read.
    pub fn of(architecture: &str) -> Option<Self> {
        match architecture {
            "DeepseekV2ForCausalLM"
            | "DeepseekV3ForCausalLM"
            | "DeepseekV32ForCausalLM"
            | "KimiK25ForConditionalGeneration" => Some(Self::OutputsIfFirstIsOne),
            "LlamaForCausalLM"
            | "MistralForCausalLM"
            | "Qwen2ForCausalLM"
            | "Qwen3ForCausalLM"
            | "Qwen2MoeForCausalLM"
            | "Qwen3MoeForCausalLM" => Some(Self::Outputs),
            _ => None,
        }
    }

    /// Layers that SGLang captures for a nested list; `None` when an id means the embeddings.
    pub fn read(self, ids: &[u16]) -> Option<Vec<LayerIndex>> {
        match (self, ids.first()) {
            (Self::Outputs, _) | (_, Some(1)) => {
                Some(ids.iter().map(|&id| LayerIndex(id)).collect())
            }
            _ => LayerIds::read_by_vllm(ids),
        }
    }
}

/// Ids as written. `layer N` is the output of 0-based decoder layer N.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerIds {
    /// `eagle_aux_hidden_state_layer_ids`: id k is the state that enters layer k. What vLLM reads.
    pub top_level: Vec<u16>,
    /// The same key inside `eagle_config`. What SGLang reads.
    pub nested: Vec<u16>,
}

impl LayerIds {
    /// Ids for the aux states among the captured layers (the last is the teacher's) of a target
    /// whose config.json names `architecture`.
    pub fn of(
        layers: &[LayerIndex],
        num_aux: usize,
        (engine, architecture): (Engine, &str),
    ) -> Result<Self, ExportError> {
        if num_aux == 0 || layers.len() != num_aux + 1 {
            return Err(ExportError::NoLayerIds { found: layers.len(), num_aux });
        }
        let aux = &layers[..num_aux];
        let entering: Vec<u16> = aux.iter().map(|layer| layer.0 + 1).collect();
        let outputs = || aux.iter().map(|layer| layer.0).collect();
        let nested = match engine {
            Engine::SglangOld => outputs(),
            Engine::Vllm => entering.clone(),
            Engine::Current => match SglangRule::of(architecture) {
                None => {
                    let architecture = architecture.to_owned();
                    return Err(ExportError::UnknownTarget { architecture });
                }
                Some(SglangRule::Outputs) => outputs(),
                // This SGLang takes a list that starts with 1 for one of outputs.
                Some(SglangRule::OutputsIfFirstIsOne) if aux[0].0 == 0 => {
                    return Err(ExportError::FirstLayer {
                        first: 0,
                        engine: "SGLang",
                        why: "its id would be 1, which SGLang reads as layer 1; use --engine \
                              vllm, or capture another layer first",
                    });
                }
                Some(SglangRule::OutputsIfFirstIsOne) => entering.clone(),
            },
        };
        Ok(Self { top_level: entering, nested })
    }

    /// Layers that vLLM captures for a list of ids; `None` when an id means the embeddings.
    pub fn read_by_vllm(ids: &[u16]) -> Option<Vec<LayerIndex>> {
        ids.iter().map(|id| id.checked_sub(1).map(LayerIndex)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIMI: &str = "KimiK25ForConditionalGeneration";

    fn layers(ids: &[u16]) -> Vec<LayerIndex> {
        ids.iter().map(|&id| LayerIndex(id)).collect()
    }

    /// The table of engine ids for both sets of layers of a 61-layer target.
    #[test]
    fn ids_are_those_of_the_table() {
        for (captured, target, engine, top, nested) in [
            ([2, 30, 58, 60], KIMI, Engine::Current, [3, 31, 59], [3, 31, 59]),
            ([2, 30, 58, 60], KIMI, Engine::Vllm, [3, 31, 59], [3, 31, 59]),
            ([2, 30, 58, 60], KIMI, Engine::SglangOld, [3, 31, 59], [2, 30, 58]),
            ([1, 29, 57, 60], KIMI, Engine::Current, [2, 30, 58], [2, 30, 58]),
            ([1, 29, 57, 60], KIMI, Engine::SglangOld, [2, 30, 58], [1, 29, 57]),
            ([2, 30, 58, 60], "LlamaForCausalLM", Engine::Current, [3, 31, 59], [2, 30, 58]),
            ([0, 2, 4, 60], "Qwen3ForCausalLM", Engine::Current, [1, 3, 5], [0, 2, 4]),
        ] {
            let ids = LayerIds::of(&layers(&captured), 3, (engine, target)).unwrap();
            assert_eq!((ids.top_level.as_slice(), ids.nested.as_slice()), (&top[..], &nested[..]));
            let meant = layers(&captured[..3]);
            assert_eq!(LayerIds::read_by_vllm(&ids.top_level).unwrap(), meant);
            if engine == Engine::Current {
                assert_eq!(SglangRule::of(target).unwrap().read(&ids.nested).unwrap(), meant);
            }
        }
        // The one list that means the same to every SGLang and every target.
        for rule in [SglangRule::Outputs, SglangRule::OutputsIfFirstIsOne] {
            assert_eq!(rule.read(&[1, 29, 57]).unwrap(), layers(&[1, 29, 57]));
        }
    }

    #[test]
    fn what_sglang_might_misread_is_refused() {
        let current = (Engine::Current, KIMI);
        assert!(matches!(
            LayerIds::of(&[], 3, current),
            Err(ExportError::NoLayerIds { found: 0, num_aux: 3 })
        ));
        let first = layers(&[0, 2, 4, 7]);
        assert!(matches!(
            LayerIds::of(&first, 3, current),
            Err(ExportError::FirstLayer { first: 0, .. })
        ));
        assert_eq!(LayerIds::of(&first, 3, (Engine::Vllm, KIMI)).unwrap().top_level, [1, 3, 5]);
        // A target whose class adds one under a condition of its own.
        let error = LayerIds::of(&first, 3, (Engine::Current, "GptOssForCausalLM")).unwrap_err();
        assert!(error.to_string().contains("--engine vllm"), "{error}");
        assert!(LayerIds::of(&first, 3, (Engine::Vllm, "GptOssForCausalLM")).is_ok());
    }
}
