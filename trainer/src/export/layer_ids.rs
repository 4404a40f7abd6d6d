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
    /// SGLang before that, which adds one to every id whatever the target; vLLM versions that read
    /// the nested ids would take each state one layer too early.
    SglangOld,
}

/// How SGLang's code of a target reads the nested ids (`set_eagle3_layers_to_capture`, 0.5.23).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Captures {
    /// DeepSeek and Kimi: states that enter the layers, but outputs where the first id is 1.
    Entering,
    /// Llama, Qwen and all others: outputs.
    Outputs,
}

impl Captures {
    /// The rule for a target with this `model_type`.
    pub fn of(model_type: &str) -> Self {
        match model_type.starts_with("deepseek") || model_type.starts_with("kimi") {
            true => Self::Entering,
            false => Self::Outputs,
        }
    }
}

/// Ids as written. `layer N` is the output of 0-based decoder layer N.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerIds {
    /// `eagle_aux_hidden_state_layer_ids`: id k is the state that enters layer k.
    pub top_level: Vec<u16>,
    /// The same key inside `eagle_config`, which SGLang reads.
    pub nested: Vec<u16>,
}

impl LayerIds {
    /// Ids for the aux states among the captured layers (the last is the teacher's).
    pub fn of(
        layers: &[LayerIndex],
        num_aux: usize,
        (engine, captures): (Engine, Captures),
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
            Engine::Current if captures == Captures::Outputs => outputs(),
            // This SGLang takes a list that starts with 1 for one of outputs.
            Engine::Current if aux[0].0 == 0 => {
                return Err(ExportError::FirstLayer {
                    first: 0,
                    engine: "SGLang",
                    why: "its id would be 1, which SGLang reads as layer 1; use --engine vllm, \
                          or capture another layer first",
                });
            }
            Engine::Current => entering.clone(),
        };
        Ok(Self { top_level: entering, nested })
    }

    /// Layers that vLLM captures for a list of ids; `None` when an id means the embeddings.
    pub fn read_by_vllm(ids: &[u16]) -> Option<Vec<LayerIndex>> {
        ids.iter().map(|id| id.checked_sub(1).map(LayerIndex)).collect()
    }

    /// Layers that SGLang captures for the nested list, from 2026-05-16 on.
    pub fn read_by_sglang(ids: &[u16], captures: Captures) -> Option<Vec<LayerIndex>> {
        match (captures, ids.first()) {
            (Captures::Entering, first) if first != Some(&1) => Self::read_by_vllm(ids),
            _ => Some(ids.iter().map(|&id| LayerIndex(id)).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(ids: &[u16]) -> Vec<LayerIndex> {
        ids.iter().map(|&id| LayerIndex(id)).collect()
    }

    /// The table of engine ids for both sets of layers of a 61-layer target, and for one of
    /// SmolLM2, which SGLang runs by its Llama code.
    #[test]
    fn ids_are_those_of_the_table() {
        use Captures::{Entering, Outputs};
        for (captured, engine, captures, top, nested) in [
            ([2, 30, 58, 60], Engine::Current, Entering, [3, 31, 59], [3, 31, 59]),
            ([2, 30, 58, 60], Engine::Vllm, Entering, [3, 31, 59], [3, 31, 59]),
            ([2, 30, 58, 60], Engine::SglangOld, Entering, [3, 31, 59], [2, 30, 58]),
            ([1, 29, 57, 60], Engine::Current, Entering, [2, 30, 58], [2, 30, 58]),
            ([1, 29, 57, 60], Engine::SglangOld, Entering, [2, 30, 58], [1, 29, 57]),
            ([1, 14, 26, 29], Engine::Current, Outputs, [2, 15, 27], [1, 14, 26]),
            ([0, 14, 26, 29], Engine::Current, Outputs, [1, 15, 27], [0, 14, 26]),
            ([1, 14, 26, 29], Engine::Vllm, Outputs, [2, 15, 27], [2, 15, 27]),
        ] {
            let ids = LayerIds::of(&layers(&captured), 3, (engine, captures)).unwrap();
            assert_eq!((ids.top_level.as_slice(), ids.nested.as_slice()), (&top[..], &nested[..]));
            let meant = layers(&captured[..3]);
            assert_eq!(LayerIds::read_by_vllm(&ids.top_level).unwrap(), meant);
            if engine == Engine::Current {
                assert_eq!(LayerIds::read_by_sglang(&ids.nested, captures).unwrap(), meant);
            }
        }
        // The one list that means the same to every SGLang.
        for captures in [Entering, Outputs] {
            let read = LayerIds::read_by_sglang(&[1, 29, 57], captures).unwrap();
            assert_eq!(read, layers(&[1, 29, 57]));
        }
    }

    #[test]
    fn a_targets_model_type_says_which_rule_holds() {
        for kimi in ["kimi_k2", "kimi_k25", "deepseek_v3"] {
            assert_eq!(Captures::of(kimi), Captures::Entering, "{kimi}");
        }
        for dense in ["llama", "qwen2", "qwen3"] {
            assert_eq!(Captures::of(dense), Captures::Outputs, "{dense}");
        }
    }

    #[test]
    fn missing_layers_and_an_ambiguous_first_layer_are_refused() {
        let current = (Engine::Current, Captures::Entering);
        assert!(matches!(
            LayerIds::of(&[], 3, current),
            Err(ExportError::NoLayerIds { found: 0, num_aux: 3 })
        ));
        let first = layers(&[0, 2, 4, 7]);
        assert!(matches!(
            LayerIds::of(&first, 3, current),
            Err(ExportError::FirstLayer { first: 0, .. })
        ));
        let vllm = (Engine::Vllm, Captures::Entering);
        assert_eq!(LayerIds::of(&first, 3, vllm).unwrap().top_level, [1, 3, 5]);
    }
}
