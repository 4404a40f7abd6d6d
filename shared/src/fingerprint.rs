//! Everything that changes the bytes of a data set, as named text fields. Knows no meanings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::Digest;

/// Named values that must be equal for two runs to write into one data set: target revision and
/// weights digest, quantisation, tokenizer and template digests, layers, dtype, limits and code
/// version.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint {
    /// Value of each field.
    pub fields: BTreeMap<String, String>,
}

/// A field that differs between the stored fingerprint and the current one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FieldChange {
    /// Name of the field.
    pub name: String,
    /// Value in the data set; `None` when it has no such field.
    pub stored: Option<String>,
    /// Value of this run; `None` when it has no such field.
    pub current: Option<String>,
}

impl fmt::Display for FieldChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: &Option<String>| {
            value.as_ref().map_or_else(|| "absent".to_owned(), |value| format!("`{value}`"))
        };
        write!(f, "{}: stored {}, now {}", self.name, show(&self.stored), show(&self.current))
    }
}

impl Fingerprint {
    /// Adds or replaces a field.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// BLAKE3 over names and values in order of names, each preceded by its length.
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for text in self.fields.iter().flat_map(|(name, value)| [name, value]) {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// Fields that differ, `self` being the stored one. Of a field that holds a JSON object only
    /// the keys that differ are named, as `field.key`.
    pub fn diff(&self, current: &Self) -> Vec<FieldChange> {
        let (stored, current) = (self.spread(), current.spread());
        let names: BTreeSet<&String> = stored.keys().chain(current.keys()).collect();
        names
            .into_iter()
            .filter(|name| stored.get(*name) != current.get(*name))
            .map(|name| FieldChange {
                name: name.clone(),
                stored: stored.get(name).cloned(),
                current: current.get(name).cloned(),
            })
            .collect()
    }

    /// The fields, with JSON objects taken apart.
    fn spread(&self) -> BTreeMap<String, String> {
        let mut spread = BTreeMap::new();
        for (name, value) in &self.fields {
            match serde_json::from_str(value) {
                Ok(Value::Object(keys)) if !keys.is_empty() => {
                    let keys = keys.into_iter();
                    spread.extend(keys.map(|(key, value)| {
                        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                        (format!("{name}.{key}"), text)
                    }));
                }
                _ => {
                    spread.insert(name.clone(), value.clone());
                }
            }
        }
        spread
    }
}
