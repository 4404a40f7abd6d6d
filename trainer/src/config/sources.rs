//! Where configuration values come from: defaults, a file, flags; and what may change on resume.
//! Knows no meaning of any key.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;
use toml::{Table, Value};

use super::FitConfig;
use super::keys::{self, KEYS, Key, Kind};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built in.
    Default,
    /// The configuration file.
    File(PathBuf),
    /// The command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Flag => f.write_str("flag"),
        }
    }
}

/// A value given on the command line.
#[derive(Clone, Debug)]
pub struct Override {
    /// Which key.
    pub key: &'static Key,
    /// The text as given.
    pub text: String,
}

impl Override {
    fn value(&self) -> Result<Value, ConfigError> {
        let text = self.text.trim();
        let parsed = match self.key.kind {
            Kind::Text | Kind::Dir => Some(Value::String(self.text.clone())),
            Kind::Bool => text.parse().ok().map(Value::Boolean),
            Kind::Number => number(text),
            Kind::List if text.is_empty() => Some(Value::Array(Vec::new())),
            Kind::List => {
                let items: Option<Vec<Value>> = text.split(',').map(|t| number(t.trim())).collect();
                items.map(Value::Array)
            }
        };
        parsed.ok_or_else(|| ConfigError::Value {
            key: format!("{}.{}", self.key.section, self.key.name),
            value: self.text.clone(),
            expected: match self.key.kind {
                Kind::Bool => "true or false",
                Kind::List => "numbers separated by commas",
                _ => "a number",
            }
            .to_owned(),
        })
    }
}

fn number(text: &str) -> Option<Value> {
    let whole = text.parse().ok().map(Value::Integer);
    whole.or_else(|| text.parse().ok().filter(|v: &f64| v.is_finite()).map(Value::Float))
}

/// A configuration and the origin of every value.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The values.
    pub config: FitConfig,
    /// Origin by `section.key`; keys that are derived from the target are absent.
    pub origins: BTreeMap<String, Origin>,
}

impl Resolved {
    /// Defaults, then the file, then flags: later ones win. Values are not yet validated, so that
    /// `trainer config` can print an incomplete configuration.
    pub fn load(file: Option<&Path>, flags: &[Override]) -> Result<Self, ConfigError> {
        let mut origins = BTreeMap::new();
        for name in flatten(&table(&FitConfig::default())).into_keys() {
            origins.insert(name, Origin::Default);
        }
        let mut merged = Table::new();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
            merged = parse(&text, path)?;
            // Reported against the file alone, so that the error names the right source.
            decode(&merged, &path.display().to_string())?;
            for name in flatten(&merged).into_keys() {
                origins.insert(name, Origin::File(path.to_owned()));
            }
        }
        for flag in flags {
            let section =
                merged.entry(flag.key.section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = section {
                section.insert(flag.key.name.to_owned(), flag.value()?);
            }
            origins.insert(format!("{}.{}", flag.key.section, flag.key.name), Origin::Flag);
        }
        Ok(Self { config: decode(&merged, "the command line")?, origins })
    }

    /// The built-in value of a key as TOML; `None` where the target decides, or the user has to.
    pub fn default_of(key: &Key) -> Option<String> {
        let values = flatten(&table(&FitConfig::default()));
        let value = values.get(&format!("{}.{}", key.section, key.name))?;
        let text = value.trim_matches(['"', '[', ']']);
        Some(text.to_owned()).filter(|text| !text.is_empty())
    }

    /// The whole configuration as TOML, each key with its meaning and origin as a comment.
    pub fn annotated(&self) -> String {
        let values = flatten(&table(&self.config));
        let mut text = String::new();
        let mut section = "";
        for key in KEYS {
            if key.section != section {
                section = key.section;
                text.push_str(&format!("{}[{section}]\n", if text.is_empty() { "" } else { "\n" }));
            }
            let name = format!("{section}.{}", key.name);
            match (values.get(&name), self.origins.get(&name)) {
                (Some(value), origin) => {
                    let origin = origin.unwrap_or(&Origin::Default);
                    text.push_str(&format!("{} = {value}  # {} ({origin})\n", key.name, key.help));
                }
                (None, _) => text.push_str(&format!("# {} =  # {}\n", key.name, key.help)),
            }
        }
        text
    }
}

impl FitConfig {
    /// Reads the TOML form that a checkpoint stores.
    pub fn from_toml(text: &str, path: &Path) -> Result<Self, ConfigError> {
        decode(&parse(text, path)?, &path.display().to_string())
    }

    /// The TOML form that a checkpoint stores.
    pub fn to_toml(&self) -> String {
        table(self).to_string()
    }

    /// Fields that differ from those a run was started with and may not.
    pub fn changes_from(&self, stored: &Self) -> Vec<FieldChange> {
        self.changes(stored, |key| !key.may_change)
    }

    /// The type asked for, where it is another one.
    pub fn compute_changed(&self, stored: &Self) -> Vec<FieldChange> {
        self.changes(stored, |key| key.section == "train" && key.name == "compute")
    }

    fn changes(&self, stored: &Self, of: impl Fn(&Key) -> bool) -> Vec<FieldChange> {
        let (old, new) = (flatten(&table(stored)), flatten(&table(self)));
        let shown = |values: &BTreeMap<String, String>, name: &str| {
            values.get(name).cloned().unwrap_or_else(|| "(from the target)".to_owned())
        };
        KEYS.iter()
            .filter(|key| of(key))
            .map(|key| format!("{}.{}", key.section, key.name))
            .filter(|name| old.get(name) != new.get(name))
            .map(|name| FieldChange {
                stored: shown(&old, &name),
                current: shown(&new, &name),
                name,
            })
            .collect()
    }
}

/// A configuration field that differs from the stored one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// `section.key`.
    pub name: String,
    /// Value in the checkpoint.
    pub stored: String,
    /// Value given now.
    pub current: String,
}

impl fmt::Display for FieldChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} in the checkpoint, {} now", self.name, self.stored, self.current)
    }
}

fn parse(text: &str, path: &Path) -> Result<Table, ConfigError> {
    text.parse().map_err(|source| ConfigError::Syntax { path: path.to_owned(), source })
}

fn decode(table: &Table, origin: &str) -> Result<FitConfig, ConfigError> {
    serde_path_to_error::deserialize(Value::Table(table.clone())).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().message().trim().to_owned();
        let known = path.split_once('.').is_some_and(|(s, n)| keys::find(s, n).is_some());
        let hint = if known { "" } else { " (`trainer config` lists all keys)" };
        ConfigError::Field { origin: origin.to_owned(), path, message: format!("{message}{hint}") }
    })
}

fn table(config: &FitConfig) -> Table {
    // Every field is a number, text, bool or list, so this cannot fail.
    Table::try_from(config).unwrap_or_default()
}

fn flatten(table: &Table) -> BTreeMap<String, String> {
    let mut flat = BTreeMap::new();
    for (section, value) in table {
        if let Value::Table(keys) = value {
            for (key, value) in keys {
                flat.insert(format!("{section}.{key}"), value.to_string());
            }
        }
    }
    flat
}

/// A configuration that cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("reading the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not valid TOML", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's reason with line and column.
        #[source]
        source: toml::de::Error,
    },
    /// A key that does not exist, or a value of the wrong type.
    #[error("{origin}: `{path}`: {message}")]
    Field {
        /// File name, or the command line.
        origin: String,
        /// Key path.
        path: String,
        /// What is wrong with it.
        message: String,
    },
    /// A value outside its range.
    #[error("`{key}` is {}: expected {expected}", shown(value))]
    Value {
        /// Key path.
        key: String,
        /// The value given; empty where there is none.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A resumed run with other settings.
    #[error("the run was started with other settings; use a new run_dir, or the stored \
        values:\n  {}", list(.0))]
    Changed(Vec<FieldChange>),
}

fn shown(value: &str) -> String {
    if value.is_empty() { "not set".to_owned() } else { format!("`{value}`") }
}

fn list(changes: &[FieldChange]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}

impl ConfigError {
    /// Process exit code: 74 when the file cannot be read, else 78.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            _ => 78,
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn flag(section: &str, name: &str, text: &str) -> Override {
        Override { key: keys::find(section, name).unwrap(), text: text.to_owned() }
    }

    #[test]
    fn the_key_table_is_exactly_the_fields_of_the_structs() {
        let mut full = FitConfig::default();
        let draft = &mut full.draft;
        for size in [
            &mut draft.draft_vocab_size,
            &mut draft.intermediate_size,
            &mut draft.num_attention_heads,
            &mut draft.num_key_value_heads,
            &mut draft.head_dim,
            &mut draft.q_lora_rank,
            &mut draft.kv_lora_rank,
            &mut draft.qk_nope_head_dim,
            &mut draft.qk_rope_head_dim,
            &mut draft.v_head_dim,
        ] {
            *size = Some(1);
        }
        (draft.rope_theta, draft.rms_norm_eps) = (Some(1.0), Some(1.0));
        let fields: Vec<String> = flatten(&table(&full)).into_keys().collect();
        let mut listed: Vec<String> =
            KEYS.iter().map(|k| format!("{}.{}", k.section, k.name)).collect();
        listed.sort();
        assert_eq!(fields, listed);
        let mut flags: Vec<&str> = KEYS.iter().map(|k| k.name).collect();
        flags.sort_unstable();
        assert!(flags.windows(2).all(|pair| pair[0] != pair[1]), "flags must be unique");
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fit.toml");
        std::fs::write(&path, "[train]\nlr = 0.5\nseed = 3\n").unwrap();
        let resolved = Resolved::load(
            Some(&path),
            &[flag("train", "lr", "0.25"), flag("draft", "force_tokens", "3, 4")],
        )
        .unwrap();
        let train = &resolved.config.train;
        assert_eq!((train.lr, train.seed, train.ttt_steps), (0.25, 3, 7));
        assert_eq!(resolved.config.draft.force_tokens, [3, 4]);
        assert_eq!(resolved.origins["train.lr"], Origin::Flag);
        assert_eq!(resolved.origins["train.seed"], Origin::File(path));
        assert_eq!(resolved.origins["train.clip"], Origin::Default);
    }

    #[test]
    fn errors_name_the_key_and_what_is_expected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fit.toml");
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Resolved::load(Some(&path), &[]).unwrap_err().to_string()
        };
        assert!(load("[train]\nlearning_rate = 1\n").contains("learning_rate"));
        assert!(load("[train]\nlr = 'fast'\n").contains("train.lr"));
        assert!(load("[draft]\nlayout = 'gpt'\n").contains("draft.layout"));
        let error = Resolved::load(None, &[flag("draft", "fc_norm", "maybe")]).unwrap_err();
        assert!(error.to_string().contains("true or false"), "{error}");
        assert_eq!(error.exit_code(), 78);
    }

    #[test]
    fn only_fields_that_cannot_change_the_weights_may_differ_on_resume() {
        let stored = FitConfig::default();
        let mut now = stored.clone();
        now.checkpoint.keep_last = 9;
        now.data.prefetch = 7;
        assert_eq!(now.changes_from(&stored), []);
        now.train.lr = 0.125;
        now.draft.head_dim = Some(4);
        let changes = now.changes_from(&stored);
        let names: Vec<&str> = changes.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["draft.head_dim", "train.lr"]);
        assert_eq!((changes[1].stored.as_str(), changes[1].current.as_str()), ("0.0001", "0.125"));
    }

    #[test]
    fn the_stored_form_reads_back_equal() {
        let mut config = FitConfig::default();
        config.draft.q_lora_rank = Some(48);
        config.data.dataset = "a b/ü".into();
        let back = FitConfig::from_toml(&config.to_toml(), Path::new("state.json")).unwrap();
        assert_eq!(back, config);
    }

    #[test]
    fn the_printed_form_is_valid_and_equal() {
        let resolved = Resolved::load(None, &[flag("train", "lr", "0.01")]).unwrap();
        let back = FitConfig::from_toml(&resolved.annotated(), Path::new("printed")).unwrap();
        assert_eq!(back, resolved.config);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let mut config = FitConfig::default();
        config.data.dataset = "d".into();
        config.checkpoint.run_dir = "r".into();
        config.validate().unwrap();
        config.data.held_out = 1.0;
        assert!(config.validate().unwrap_err().to_string().contains("data.held_out"));
        config.data.held_out = 0.1;
        config.train.lr = f64::NAN;
        assert!(config.validate().unwrap_err().to_string().contains("train.lr"));
        config.train.lr = 0.1;
        config.draft.q_lora_rank = Some(48);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("draft.q_lora_rank` is `48`") && error.contains("llama"), "{error}");
        config.draft.layout = crate::config::Layout::Mla;
        config.validate().unwrap();
    }

    /// Each of these once ended in a panic, in weights that are not numbers, or in the name of
    /// another key.
    #[test]
    fn extreme_values_are_refused_by_the_name_of_their_own_key() {
        let mut config = FitConfig::default();
        config.data.dataset = "d".into();
        config.checkpoint.run_dir = "r".into();
        type Change = fn(&mut FitConfig);
        let changes: [(&str, Change); 8] = [
            ("train.lr_floor", |c| {
                (c.train.schedule, c.train.lr_floor) = (crate::schedule::Decay::Step, 0.1);
            }),
            ("data.prefetch", |c| c.data.prefetch = usize::MAX),
            ("train.adam_eps", |c| c.train.adam_eps = 1e-60),
            ("train.weight_decay", |c| c.train.weight_decay = f64::INFINITY),
            ("train.clip", |c| c.train.clip = -1.0),
            ("train.noise", |c| c.train.noise = f64::NAN),
            ("checkpoint.eval_every", |c| c.checkpoint.eval_every = 0),
            ("checkpoint.keep_last", |c| c.checkpoint.keep_last = 0),
        ];
        for (key, change) in changes {
            let mut changed = config.clone();
            change(&mut changed);
            let text = changed.validate_new().unwrap_err().to_string();
            assert!(text.starts_with(&format!("`{key}`")), "{text}");
        }
    }
}
