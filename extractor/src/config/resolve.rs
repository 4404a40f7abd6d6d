//! Lays the sources of configuration over one another and remembers which one won. Knows keys
//! only by their names.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use super::{ConfigArgs, ConfigError, ExtractConfig};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The configuration file.
    File {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command-line flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// A checked configuration and the origin of each of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The values.
    pub config: ExtractConfig,
    /// Origin by `section.key`; every key is there.
    pub origins: BTreeMap<String, Origin>,
}

impl ConfigArgs {
    /// Defaults, then the file, then the environment, then flags; checked.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        let mut layered = Layered::of_defaults();
        if let Some(path) = self.file() {
            layered.put_file(path)?;
        }
        for (key, value) in self.given() {
            let origin = if self.is_from_environment(key) {
                Origin::Environment(format!("AERIE_{}", key.to_uppercase()))
            } else {
                Origin::Flag(key.replace('_', "-"))
            };
            layered.put_anywhere(key, value.clone(), origin);
        }
        layered.finish()
    }
}

struct Layered {
    sections: Map<String, Value>,
    origins: BTreeMap<String, Origin>,
}

impl Layered {
    fn of_defaults() -> Self {
        let sections = match serde_json::to_value(ExtractConfig::default()) {
            Ok(Value::Object(sections)) => sections,
            _ => Map::new(),
        };
        let keys = sections.iter().flat_map(|(section, keys)| {
            let names = keys.as_object().into_iter().flat_map(Map::keys);
            names.map(move |key| (format!("{section}.{key}"), Origin::Default))
        });
        Self { origins: keys.collect(), sections }
    }

    fn put_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let broken = |detail: String| ConfigError::Toml { path: path.into(), detail };
        let spans = DeTable::parse(&text).map_err(|error| broken(error.to_string()))?;
        let values: Map<String, Value> =
            toml::from_str(&text).map_err(|error| broken(error.to_string()))?;
        let line_of = |byte: usize| 1 + text.bytes().take(byte).filter(|&b| b == b'\n').count();
        for (section, content) in spans.get_ref() {
            let unknown = |byte: usize, key: String, hint: String| ConfigError::UnknownKey {
                path: path.into(),
                line: line_of(byte),
                key,
                hint,
            };
            let name = section.get_ref().as_ref();
            let known = self.sections.get(name).and_then(Value::as_object);
            let (Some(known), DeValue::Table(keys)) = (known, content.get_ref()) else {
                let sections = self.sections.keys().map(String::as_str).collect::<Vec<_>>();
                let hint = format!("the sections are [{}]", sections.join("], ["));
                return Err(unknown(section.span().start, name.into(), hint));
            };
            let known: Vec<String> = known.keys().cloned().collect();
            for key in keys.keys() {
                let (byte, key) = (key.span().start, key.get_ref().as_ref());
                if !known.iter().any(|name| name == key) {
                    let hint = format!("[{name}] has {}", known.join(", "));
                    return Err(unknown(byte, format!("{name}.{key}"), hint));
                }
                let value = values.get(name).and_then(|section| section.get(key));
                let origin = Origin::File { path: path.into(), line: line_of(byte) };
                self.put(name, key, value.cloned().unwrap_or_default(), origin);
            }
        }
        Ok(())
    }

    /// Flags name keys without their section; keys are unique over all sections.
    fn put_anywhere(&mut self, key: &str, value: Value, origin: Origin) {
        let section = self.sections.iter().find(|(_, keys)| keys.get(key).is_some());
        if let Some(section) = section.map(|(section, _)| section.clone()) {
            self.put(&section, key, value, origin);
        }
    }

    fn put(&mut self, section: &str, key: &str, value: Value, origin: Origin) {
        if let Some(slot) = self.sections.get_mut(section).and_then(|keys| keys.get_mut(key)) {
            *slot = value;
            self.origins.insert(format!("{section}.{key}"), origin);
        }
    }

    fn finish(self) -> Result<Resolved, ConfigError> {
        let origin_of = |path: &str| {
            let key = |key: &&String| path.strip_prefix(key.as_str()).is_some();
            let key = self.origins.keys().filter(key).max_by_key(|key| key.len());
            key.and_then(|key| self.origins.get(key)).cloned().unwrap_or(Origin::Default)
        };
        let config: ExtractConfig = serde_path_to_error::deserialize(Value::Object(
            self.sections.clone(),
        ))
        .map_err(|error| {
            let key = error.path().to_string();
            let origin = origin_of(&key);
            ConfigError::Value { key, origin, detail: error.into_inner().to_string() }
        })?;
        if let Some((key, detail)) = config.out_of_range() {
            return Err(ConfigError::Value { key: key.into(), origin: origin_of(key), detail });
        }
        Ok(Resolved { config, origins: self.origins })
    }
}
