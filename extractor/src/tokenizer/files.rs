//! The small JSON files beside a tokenizer, read under limits. Knows their keys, not their
//! meaning to templates.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use super::TokenizerError;

const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// `tokenizer_config.json`, as far as encoding needs it. A missing file is an empty one.
#[derive(Clone, Debug, Default)]
pub struct TokenizerConfig {
    keys: Map<String, Value>,
}

impl TokenizerConfig {
    /// Reads the file from a model directory.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer_config.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let bytes = read_limited(&path, MAX_CONFIG_BYTES)?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(keys)) => Ok(Self { keys }),
            Ok(_) => Err(TokenizerError::Json("an object is expected".into()).within(path)),
            Err(error) => Err(TokenizerError::Json(error.to_string()).within(path)),
        }
    }

    /// `added_tokens_decoder`: names of special tokens by id.
    pub fn added_tokens(&self) -> Result<BTreeMap<u32, String>, TokenizerError> {
        let Some(added) = self.keys.get("added_tokens_decoder") else {
            return Ok(BTreeMap::new());
        };
        let malformed = || TokenizerError::Json("added_tokens_decoder: {id: {content}}".into());
        let added = added.as_object().ok_or_else(malformed)?;
        added
            .iter()
            .map(|(id, token)| {
                let content = token.get("content").unwrap_or(token).as_str();
                let id = id.parse().ok();
                id.zip(content.map(str::to_owned)).ok_or_else(malformed)
            })
            .collect()
    }

    /// Names of `bos_token`, `eos_token` and the like, which templates may print.
    pub fn named_tokens(&self) -> BTreeMap<String, String> {
        let named = self.keys.iter().filter(|(key, _)| key.ends_with("_token"));
        named
            .filter_map(|(key, value)| {
                let content = value.get("content").unwrap_or(value).as_str()?;
                Some((key.clone(), content.to_owned()))
            })
            .collect()
    }

    /// `chat_template`: a string, or a list of named ones of which `default` is meant.
    pub fn chat_template(&self) -> Option<String> {
        match self.keys.get("chat_template")? {
            Value::String(source) => Some(source.clone()),
            Value::Array(named) => {
                let by_name = |name: &str| {
                    named
                        .iter()
                        .find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))
                };
                let only = || named.first().filter(|_| named.len() == 1);
                let entry = by_name("default").or_else(only)?;
                Some(entry.get("template")?.as_str()?.to_owned())
            }
            _ => None,
        }
    }
}

/// `eos_token_id` of generation_config.json and config.json, one id or several; of a config that
/// nests, that of its `text_config` where the outer one says nothing.
pub(crate) fn stop_ids(dir: &Path) -> Result<Vec<u32>, TokenizerError> {
    let mut ids = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let config: Value = serde_json::from_slice(&read_limited(&path, MAX_CONFIG_BYTES)?)
            .map_err(|error| TokenizerError::Json(error.to_string()).within(path))?;
        let inner = || config.get("text_config")?.get("eos_token_id");
        match config.get("eos_token_id").filter(|ids| !ids.is_null()).or_else(inner) {
            Some(Value::Array(list)) => ids.extend(list.iter().filter_map(Value::as_u64)),
            Some(one) => ids.extend(one.as_u64()),
            None => {}
        }
    }
    Ok(ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
}

/// The bytes of a file that has at most `limit` of them.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, TokenizerError> {
    let error = |source| TokenizerError::Read { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(error)?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > limit {
        let bytes = std::fs::metadata(path).map_or(bytes.len() as u64, |meta| meta.len());
        return Err(TokenizerError::TooLarge { path: path.to_path_buf(), bytes, limit });
    }
    Ok(bytes)
}
