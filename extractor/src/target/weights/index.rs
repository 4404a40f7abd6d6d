//! Which files a checkpoint consists of: its index, or every safetensors file of the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::WeightsError;

const INDEX: &str = "model.safetensors.index.json";
const EXTENSION: &str = ".safetensors";
/// Kimi-K2.5's index has about 25 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The files of a checkpoint by bare name, and where the index says that each tensor is.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) files: BTreeSet<String>,
    /// The index and its map from tensor to file, if there is one.
    pub(super) index: Option<(PathBuf, BTreeMap<String, String>)>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

pub(super) fn list(dir: &Path) -> Result<Listing, WeightsError> {
    let path = dir.join(INDEX);
    if !path.exists() {
        return Ok(Listing { files: glob(dir)?, index: None });
    }
    let io_error = |operation| {
        let path = path.clone();
        move |source| WeightsError::Io { path, operation, source }
    };
    let bytes = fs::metadata(&path).map_err(io_error("measure"))?.len();
    if bytes > MAX_INDEX_BYTES {
        return Err(WeightsError::IndexTooLarge { path, bytes, limit: MAX_INDEX_BYTES });
    }
    let text = fs::read(&path).map_err(io_error("read"))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|source| WeightsError::IndexSyntax { path: path.clone(), source })?;
    let files: BTreeSet<String> = weight_map.values().cloned().collect();
    for file in &files {
        if !is_bare_name(file) {
            return Err(WeightsError::IndexPath { path, entry: file.clone() });
        }
        if !dir.join(file).is_file() {
            return Err(WeightsError::IndexedFileMissing { path, file: file.clone() });
        }
    }
    if files.is_empty() {
        return Err(WeightsError::NoFiles { dir: dir.to_path_buf() });
    }
    Ok(Listing { files, index: Some((path, weight_map)) })
}

fn is_bare_name(name: &str) -> bool {
    name.len() > EXTENSION.len()
        && name.ends_with(EXTENSION)
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c))
}

fn glob(dir: &Path) -> Result<BTreeSet<String>, WeightsError> {
    let io_error = |source| WeightsError::Io {
        path: dir.to_path_buf(),
        operation: "list the directory",
        source,
    };
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(io_error)? {
        let name = entry.map_err(io_error)?.file_name();
        if let Some(name) = name.to_str().filter(|name| is_bare_name(name)) {
            files.insert(name.to_owned());
        }
    }
    if files.is_empty() {
        return Err(WeightsError::NoFiles { dir: dir.to_path_buf() });
    }
    Ok(files)
}

impl Listing {
    /// Checks that a file holds exactly the tensors that the index places in it.
    pub(super) fn check<'a>(
        &self,
        file: &str,
        stored: impl Iterator<Item = &'a String>,
    ) -> Result<(), WeightsError> {
        let Some((path, map)) = &self.index else { return Ok(()) };
        let mismatch = |tensor: &String, problem: String| WeightsError::IndexMismatch {
            path: path.clone(),
            tensor: tensor.clone(),
            problem,
        };
        let stored: BTreeSet<&String> = stored.collect();
        for tensor in &stored {
            if map.get(*tensor).map(String::as_str) != Some(file) {
                let problem = format!("is in {file}, where the index does not place it");
                return Err(mismatch(tensor, problem));
            }
        }
        let placed = map.iter().filter(|(_, of)| *of == file).map(|(tensor, _)| tensor);
        match placed.into_iter().find(|tensor| !stored.contains(tensor)) {
            Some(tensor) => Err(mismatch(tensor, format!("is not in {file}, as the index says"))),
            None => Ok(()),
        }
    }
}
