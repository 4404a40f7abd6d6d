//! Which layers' outputs are captured: by name of a preset or one by one. Knows no model but by
//! its number of layers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shared::LayerIndex;

use super::ConfigError;

/// The choice as the user states it; numbers are 0-based decoder layers whose *output* is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum LayerChoice {
    /// 2, L/2, L-3, L-1 of L layers.
    #[default]
    Default,
    /// 1, L/2-1, L-4, L-1 of L layers: what engines read for EAGLE-3 unless told otherwise.
    Eagle3,
    /// One by one.
    List(Vec<u16>),
}

impl LayerChoice {
    /// The layers of a model with `layers` decoder layers: ascending, and the last one is the
    /// model's last, whose state is the teacher's.
    pub fn resolve(&self, layers: usize) -> Result<Vec<LayerIndex>, ConfigError> {
        let fault = |detail: String| Err(ConfigError::Layers(detail));
        let last = i64::try_from(layers).unwrap_or(i64::MAX) - 1;
        let half = i64::try_from(layers / 2).unwrap_or(i64::MAX);
        let wanted: Vec<i64> = match self {
            Self::Default => vec![2, half, last - 2, last],
            Self::Eagle3 => vec![1, half - 1, last - 3, last],
            Self::List(list) => list.iter().copied().map(i64::from).collect(),
        };
        let shown = wanted.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        if !wanted.is_sorted_by(|a, b| a < b) || wanted.first().is_some_and(|&first| first < 0) {
            return match self {
                Self::List(_) => fault(format!("[{shown}] is not ascending, each layer once")),
                preset => fault(format!(
                    "preset `{preset}` gives [{shown}] for {layers} layers, too few to tell apart: \
                     name the layers, for instance [{}, {last}]",
                    last.min(1)
                )),
            };
        }
        match wanted.last() {
            Some(&top) if top == last => {}
            Some(&top) if top > last => {
                return fault(format!(
                    "layer {top} does not exist: the model has layers 0 to {last}"
                ));
            }
            _ => {
                return fault(format!(
                    "[{shown}] has to end with the model's last layer, {last}: its state is the \
                     teacher's"
                ));
            }
        }
        if wanted.len() < 2 {
            return fault(format!(
                "[{shown}] leaves the draft nothing to read: at least one layer besides {last} is \
                 needed"
            ));
        }
        Ok(wanted.into_iter().map(|layer| LayerIndex(u16::try_from(layer).unwrap_or(0))).collect())
    }
}

impl fmt::Display for LayerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Eagle3 => f.write_str("eagle3"),
            Self::List(list) => {
                f.write_str(&list.iter().map(u16::to_string).collect::<Vec<_>>().join(","))
            }
        }
    }
}

impl FromStr for LayerChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "default" => Ok(Self::Default),
            "eagle3" => Ok(Self::Eagle3),
            list => {
                let layers = list.split(',').map(|layer| layer.trim().parse());
                layers.collect::<Result<_, _>>().map(Self::List).map_err(|_| {
                    format!(
                        "`default`, `eagle3` or numbers like 2,30,58,60 are expected, not {text:?}"
                    )
                })
            }
        }
    }
}

impl TryFrom<Value> for LayerChoice {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match value {
            Value::String(text) => text.parse(),
            Value::Array(_) => serde_json::from_value(value)
                .map(Self::List)
                .map_err(|_| "layers are numbers from 0 to 65535".into()),
            _ => Err("`default`, `eagle3` or a list of layers is expected".into()),
        }
    }
}

impl From<LayerChoice> for Value {
    fn from(choice: LayerChoice) -> Self {
        match choice {
            LayerChoice::List(list) => list.into(),
            preset => preset.to_string().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(choice: &str, layers: usize) -> Result<Vec<u16>, String> {
        let resolved = choice.parse::<LayerChoice>().unwrap().resolve(layers);
        resolved.map(|list| list.iter().map(|layer| layer.0).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn presets_give_the_published_layers() {
        assert_eq!(resolve("default", 61).unwrap(), [2, 30, 58, 60]);
        assert_eq!(resolve("eagle3", 61).unwrap(), [1, 29, 57, 60]);
        assert_eq!(resolve("default", 8).unwrap(), [2, 4, 5, 7]);
        assert_eq!(resolve("eagle3", 8).unwrap(), [1, 3, 4, 7]);
        assert_eq!(resolve("eagle3", 32).unwrap(), [1, 15, 28, 31]);
    }

    #[test]
    fn layers_that_cannot_be_meant_are_explained() {
        for (choice, layers, wanted) in [
            ("2,4,8", 8, "layer 8 does not exist"),
            ("2,4", 8, "last layer, 7"),
            ("4,2,7", 8, "ascending"),
            ("4,4,7", 8, "ascending"),
            ("7", 8, "nothing to read"),
            ("default", 5, "too few"),
            ("eagle3", 2, "too few"),
            ("default", 1, "too few"),
        ] {
            let error = resolve(choice, layers).unwrap_err();
            assert!(error.contains(wanted), "{choice} of {layers}: {error}");
        }
        assert!("2;4".parse::<LayerChoice>().is_err());
        assert!(LayerChoice::try_from(serde_json::json!([70000])).is_err());
        assert!(LayerChoice::try_from(serde_json::json!(3)).is_err());
    }
}
