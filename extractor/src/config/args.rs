//! The flags and environment variables of the configuration, one for each key. Knows which values
//! were given, and how; their meaning is with the keys.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{ExtractConfig, LayerChoice};
use crate::integers::require_kept;
use crate::target::{Compute, Device, Exchange, QaNormEps};

/// The configuration flags, to be flattened into a command's arguments.
#[derive(Clone, Debug, Default)]
pub struct ConfigArgs {
    flags: Flags,
    /// Values that were given, by key.
    given: Map<String, Value>,
    in_environment: BTreeMap<String, bool>,
}

impl ConfigArgs {
    /// The configuration file that was named.
    pub(super) fn file(&self) -> Option<&PathBuf> {
        self.flags.config.as_ref()
    }

    /// Values that were given, by key.
    pub(super) fn given(&self) -> &Map<String, Value> {
        &self.given
    }

    /// Whether a key's value came from the environment and not from a flag.
    pub(super) fn is_from_environment(&self, key: &str) -> bool {
        self.in_environment.get(key).copied().unwrap_or(false)
    }
}

impl clap::Args for ConfigArgs {
    fn augment_args(command: Command) -> Command {
        with_defaults(Flags::augment_args(command))
    }

    fn augment_args_for_update(command: Command) -> Command {
        with_defaults(Flags::augment_args_for_update(command))
    }
}

/// Adds to the help of each flag what holds without it. No default of clap's: it would count as
/// given and win over the file.
fn with_defaults(command: Command) -> Command {
    let sections = serde_json::to_value(ExtractConfig::default()).unwrap_or_default();
    let sections = sections.as_object().into_iter().flat_map(Map::values);
    let defaults: BTreeMap<String, String> = sections
        .filter_map(Value::as_object)
        .flatten()
        .filter_map(|(key, value)| match value {
            Value::String(text) if !text.is_empty() => Some((key.clone(), text.clone())),
            Value::Number(number) => Some((key.clone(), number.to_string())),
            _ => None,
        })
        .collect();
    command.mut_args(|arg| match (defaults.get(arg.get_id().as_str()), arg.get_help()) {
        (Some(default), Some(help)) => {
            let help = format!("{help} [default: {default}]");
            arg.help(help)
        }
        _ => arg,
    })
}

impl FromArgMatches for ConfigArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self { flags: Flags::from_arg_matches(matches)?, ..Self::default() };
        args.read(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.flags.update_from_arg_matches(matches)?;
        self.read(matches)
    }
}

impl ConfigArgs {
    /// Takes what was given. A path without a text form cannot be recorded, so it is refused.
    fn read(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.given = match serde_json::to_value(&self.flags) {
            Ok(Value::Object(given)) => given,
            other => {
                let why = other.err().map_or_else(String::new, |error| error.to_string());
                let message = format!("paths are stored as text, so they must be UTF-8: {why}\n");
                return Err(clap::Error::raw(ErrorKind::InvalidUtf8, message));
            }
        };
        self.given.retain(|_, value| !value.is_null());
        for (key, value) in &mut self.given {
            let environment = matches.value_source(key) == Some(ValueSource::EnvVariable);
            self.in_environment.insert(key.clone(), environment);
            // A flag can be given several values, a variable is one text.
            if let ("prompts", true, Value::Array(files)) = (key.as_str(), environment, value) {
                let parts = files.iter().filter_map(Value::as_str).flat_map(|it| it.split(','));
                *files = parts.map(Value::from).collect();
            }
        }
        Ok(())
    }
}

/// JSON has no other numbers: they would be taken for none at all.
fn finite(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if value.is_finite() { Ok(value) } else { Err("expected a finite number".to_owned()) }
}

#[derive(Clone, Debug, Default, Serialize, clap::Args)]
#[command(next_help_heading = "Configuration (each also a key of the TOML file)")]
struct Flags {
    /// TOML file with the sections [target], [data], [capture], [run].
    #[arg(long, env = "AERIE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,

    /// [target] Directory with config.json, weights and tokenizer.
    #[arg(long, env = "AERIE_MODEL", value_name = "DIR")]
    model: Option<PathBuf>,
    /// [target] Where the model runs.
    #[arg(long, env = "AERIE_DEVICE")]
    device: Option<Device>,
    /// [target] Number format of the products; auto is what the device does best.
    #[arg(long, env = "AERIE_COMPUTE")]
    compute: Option<Compute>,
    /// [target] Number of tensor-parallel ranks.
    #[arg(long, env = "AERIE_TP", value_name = "RANKS")]
    tp: Option<usize>,
    /// [target] How rows cross GPUs.
    #[arg(long, env = "AERIE_EXCHANGE")]
    exchange: Option<Exchange>,
    /// [target] Epsilon of the norms inside latent attention.
    #[arg(long, env = "AERIE_QA_NORM_EPS", value_name = "EPS")]
    qa_norm_eps: Option<QaNormEps>,
    /// [target] Which revision of the model this is, for the fingerprint.
    #[arg(long, env = "AERIE_REVISION", value_name = "TEXT")]
    revision: Option<String>,

    /// [data] JSONL files, read in this order; between several in the variable stand commas.
    #[arg(long, env = "AERIE_PROMPTS", value_name = "FILE", num_args = 1..)]
    prompts: Option<Vec<PathBuf>>,
    /// [data] Longest sample, in tokens.
    #[arg(long, env = "AERIE_MAX_TOKENS", value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// [data] What happens to longer samples: truncate or reject.
    #[arg(long, env = "AERIE_OVERLONG", value_name = "POLICY")]
    overlong: Option<String>,
    /// [data] Samples with fewer trained tokens are rejected.
    #[arg(long, env = "AERIE_MIN_TRAINABLE_TOKENS", value_name = "TOKENS")]
    min_trainable_tokens: Option<usize>,
    /// [data] Train the last answer only.
    #[arg(long, env = "AERIE_LAST_TURN_ONLY", value_name = "BOOL", num_args = 0..=1,
          require_equals = true, default_missing_value = "true")]
    last_turn_only: Option<bool>,
    /// [data] Accept chats and tokenised rows of which every token is trained.
    #[arg(long, env = "AERIE_ALLOW_ALL_TRAINABLE", value_name = "BOOL", num_args = 0..=1,
          require_equals = true, default_missing_value = "true")]
    allow_all_trainable: Option<bool>,
    /// [data] Special tokens whose text in an answer is meant as such, like <think>.
    #[arg(long, env = "AERIE_ANSWER_SPECIALS", value_name = "TOKEN", num_args = 1..,
          value_delimiter = ',')]
    answer_specials: Option<Vec<String>>,
    /// [data] Variables for the chat template, a JSON object.
    #[arg(long, env = "AERIE_CHAT_TEMPLATE_KWARGS", value_name = "JSON",
          value_parser = json_object)]
    chat_template_kwargs: Option<JsonObject>,

    /// [capture] default, eagle3, or layers like 2,30,58,60.
    #[arg(long, env = "AERIE_LAYERS", value_name = "LAYERS")]
    layers: Option<LayerChoice>,
    /// [capture] How states are stored: bf16 or fp8.
    #[arg(long, env = "AERIE_DTYPE", value_name = "DTYPE")]
    dtype: Option<String>,

    /// [run] Directory of the data set.
    #[arg(long, env = "AERIE_DATASET", value_name = "DIR")]
    dataset: Option<PathBuf>,
    /// [run] Wanted tokens of a batch.
    #[arg(long, env = "AERIE_BATCH_TOKENS", value_name = "TOKENS")]
    batch_tokens: Option<usize>,
    /// [run] Wanted bytes of a shard.
    #[arg(long, env = "AERIE_SHARD_BYTES", value_name = "BYTES")]
    shard_bytes: Option<u64>,
    /// [run] Largest share of rejected lines with which a run still succeeds.
    #[arg(long, env = "AERIE_REJECT_LIMIT", value_name = "SHARE", value_parser = finite)]
    reject_limit: Option<f64>,
    /// [run] Stop after this many lines, or files of an import; those done before count too.
    #[arg(long, env = "AERIE_LIMIT", value_name = "LINES")]
    limit: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
struct JsonObject(Map<String, Value>);

fn json_object(text: &str) -> Result<JsonObject, String> {
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
        format!("a JSON object like {{\"thinking\": false}} is expected: {error}")
    })?;
    require_kept(text, map.values()).map_err(|fault| fault.detail)?;
    Ok(JsonObject(map))
}
