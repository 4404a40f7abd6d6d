//! `DATASET/target/`: the parts of the target that a data set carries, so that the trainer never
//! needs the whole checkpoint. Knows no layers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use half::bf16;
use shared::durable::{DatasetDir, DurableError, DurableFile};
use shared::sums::SUMS;
use shared::target_files;
use thiserror::Error;

use crate::target::TargetError;
use crate::target::TargetSpec;
use crate::target::weights::{Checkpoint, WeightFormat, WeightsError};

/// Name of the file that holds embeddings, final norm and head.
pub const HEAD_FILE: &str = "head.safetensors";

const CONFIG_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "chat_template.jinja",
];
const ROWS_AT_ONCE: usize = 4096;

/// Why the target's parts are not in the data set.
#[derive(Debug, Error)]
pub enum TargetDirError {
    /// A weight is missing or of another shape.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model's configuration is not usable.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A file of the model cannot be read.
    #[error("reading {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A copy was changed since it was written.
    #[error(
        "{}/{}: the trainer would learn from another target; remove that directory, and run again",
        path.display(),
        faults.join(", ")
    )]
    Damaged {
        /// `DATASET/target`.
        path: PathBuf,
        /// What is wrong with which file.
        faults: Vec<String>,
    },
    /// The copy cannot be written.
    #[error(transparent)]
    Write(#[from] DurableError),
}

impl TargetDirError {
    /// Exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Weights(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            Self::Damaged { .. } => 65,
            Self::Read { .. } => 74,
            Self::Write(error) => error.exit_code(),
        }
    }
}

/// Writes what is not there yet; a file that is there was written whole.
pub fn publish(dir: &DatasetDir, model: &Path, spec: &TargetSpec) -> Result<(), TargetDirError> {
    for name in CONFIG_FILES {
        let (from, to) = (model.join(name), dir.target().join(name));
        if to.exists() || !from.exists() {
            continue;
        }
        let bytes = fs::read(&from)
            .map_err(|source| TargetDirError::Read { path: from.clone(), source })?;
        let mut file = DurableFile::create(dir.files().as_ref(), &to)?;
        file.write_all(&bytes)?;
        file.publish()?;
    }
    let head = dir.target().join(HEAD_FILE);
    if !head.exists() {
        write_head(dir, &Checkpoint::open(model)?, spec, &head)?;
    }
    require_undamaged(&dir.target())?;
    Ok(target_files::record(dir)?)
}

/// Refuses copies in `DATASET/target` that are not as they were written.
pub fn require_undamaged(target: &Path) -> Result<(), TargetDirError> {
    let path = target.to_path_buf();
    match target_files::faults(target) {
        Ok(faults) if faults.is_empty() => Ok(()),
        Ok(faults) => Err(TargetDirError::Damaged { path, faults }),
        Err(source) => Err(TargetDirError::Read { path, source }),
    }
}

/// Bytes that [`publish`] has yet to write into `dataset`, or into a new one.
pub fn bytes_to_write(dataset: Option<&Path>, model: &Path, spec: &TargetSpec) -> u64 {
    let target = dataset.map(|dir| DatasetDir::new(dir).target());
    let is_there = |name: &str| target.as_ref().is_some_and(|dir| dir.join(name).exists());
    let size = |name: &&str| fs::metadata(model.join(name)).map_or(0, |file| file.len());
    let configs: u64 = CONFIG_FILES.iter().filter(|name| !is_there(name)).map(size).sum();
    let listed = |name: &&str| model.join(name).exists() || is_there(name);
    let names = CONFIG_FILES.iter().copied().filter(listed).chain([HEAD_FILE]);
    let list: usize = names.map(target_files::line_bytes).sum();
    let configs = configs + if is_there(SUMS) { 0 } else { list as u64 };
    if is_there(HEAD_FILE) {
        return configs;
    }
    // A checkpoint that can't be opened is an error of the run, not of its forecast.
    let parts = parts(Checkpoint::open(model).ok().as_ref(), spec);
    let tensors: usize = parts.iter().map(Part::bytes).sum();
    configs + (header(&parts, spec).len() + tensors) as u64
}

/// One tensor of the head file.
struct Part {
    name: &'static str,
    source: &'static str,
    shape: Vec<usize>,
    stored_bf16: bool,
}

impl Part {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * if self.stored_bf16 { 2 } else { 4 }
    }
}

fn write_head(
    dir: &DatasetDir,
    checkpoint: &Checkpoint,
    spec: &TargetSpec,
    path: &Path,
) -> Result<(), TargetDirError> {
    let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
    let parts = parts(Some(checkpoint), spec);
    let mut file = DurableFile::create(dir.files().as_ref(), path)?;
    file.write_all(&header(&parts, spec))?;
    for part in &parts {
        let rows = if part.shape.len() == 2 { vocab } else { 1 };
        for start in (0..rows).step_by(ROWS_AT_ONCE) {
            let range = start..rows.min(start + ROWS_AT_ONCE);
            let values = match part.shape.len() {
                2 => checkpoint.rows(part.source, [vocab, hidden], range)?,
                _ => checkpoint.tensor(part.source, &part.shape)?,
            };
            file.write_all(&stored(&values, part.stored_bf16))?;
        }
    }
    file.publish()?;
    Ok(())
}

/// The tensors of the head file, in the format of the checkpoint; in bf16 where it is not there.
fn parts(checkpoint: Option<&Checkpoint>, spec: &TargetSpec) -> [Part; 3] {
    let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
    let head = match spec.tie_word_embeddings {
        true => "model.embed_tokens",
        false => "lm_head",
    };
    let is_bf16 = |source| match checkpoint {
        Some(checkpoint) => checkpoint.format(source) == Some(WeightFormat::Bf16),
        None => true,
    };
    let part = |name, source, shape| Part { name, source, shape, stored_bf16: is_bf16(source) };
    [
        part("embed_tokens.weight", "model.embed_tokens", vec![vocab, hidden]),
        part("lm_head.weight", head, vec![vocab, hidden]),
        part("norm.weight", "model.norm", vec![hidden]),
    ]
}

/// The safetensors header: its length, then JSON padded to a multiple of eight.
fn header(parts: &[Part], spec: &TargetSpec) -> Vec<u8> {
    let mut json = serde_json::Map::new();
    let eps = spec.rms_norm_eps.to_string();
    json.insert("__metadata__".into(), serde_json::json!({ "rms_norm_eps": eps }));
    let mut offset = 0;
    for part in parts {
        let end = offset + part.bytes();
        let dtype = if part.stored_bf16 { "BF16" } else { "F32" };
        json.insert(
            part.name.into(),
            serde_json::json!({
                "dtype": dtype, "shape": part.shape, "data_offsets": [offset, end]
            }),
        );
        offset = end;
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

fn stored(values: &[f32], as_bf16: bool) -> Vec<u8> {
    match as_bf16 {
        true => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        false => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}
