//! Everything needed to continue a run bit for bit, as one directory that is complete or absent.
//! Knows no data set and no loss.

mod run_dir;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType};
use serde::{Deserialize, Serialize};
use shared::durable::{self, DurableError};
use shared::sums::{self, SUMS};
use shared::{Digest, LayerIndex};
use thiserror::Error;

pub use self::run_dir::{RunDir, RunLock};
use crate::config::{ConfigError, FitConfig};
use crate::dataset::SampleSet;
use crate::draft::{DraftConfig, Eagle3Draft, Param, ParamShapeError};
use crate::loader::LoaderState;
use crate::ops::DraftOps;
use crate::optimizer::{Named, nothing};
use crate::target::{TargetConfig, TargetError};
use crate::tensors::{HostTensor, TensorFile, TensorFileError};
use crate::vocab::{VocabError, VocabMap};

/// Version of the directory's layout.
const FORMAT: u32 = 1;
/// Lists the BLAKE3 digest of every other file, in the format of `b3sum`; written last.
const STATE: &str = "state.json";
const CONFIG: &str = "config.toml";
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const VOCAB: &str = "vocab.safetensors";
const GOLDEN: &str = "golden.safetensors";
/// Prefix of the parameters beside their average.
pub const TRAINED: &str = "trained.";
/// Prefix of the first moments.
pub const FIRST: &str = "first.";
/// Prefix of the second moments.
pub const SECOND: &str = "second.";

/// The best checkpoint of a run so far, by acceptance on the held-out samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its optimizer step.
    pub step: u64,
    /// Its expected acceptance length, the bonus token included.
    pub acceptance_length: f64,
}

/// Where a run computes, and in which type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Computed {
    /// `cpu` or `cuda`.
    pub device: String,
    /// Type of states and products: `f32` or `bf16`.
    pub dtype: String,
}

impl Computed {
    /// On the device of backend `B`, in `dtype`.
    pub fn on<B: DraftOps>(dtype: FloatDType) -> Self {
        Self { device: B::DEVICE.to_owned(), dtype: DType::from(dtype).name().to_owned() }
    }
}

impl std::fmt::Display for Computed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.dtype, self.device)
    }
}

/// The small part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// Version of the layout.
    pub format: u32,
    /// Optimizer steps taken.
    pub step: u64,
    /// Updates made, where steps without trained rows make them fewer than the steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updates: Option<u64>,
    /// Where the data order continues.
    pub loader: LoaderState,
    /// Seed of weights and order.
    pub seed: u64,
    /// Optimizer steps of the whole run, which the schedule depends on.
    pub total_steps: u64,
    /// Expected acceptance length of this checkpoint, if it was evaluated.
    pub acceptance_length: Option<f64>,
    /// Best checkpoint up to this one.
    pub best: Option<Best>,
    /// Sizes and switches of the draft.
    pub draft: DraftConfig,
    /// Captured layers: aux states in order, then the teacher's.
    pub layers: Vec<LayerIndex>,
    /// config.json of the target.
    pub target: serde_json::Value,
    /// Digest of the vocabulary mapping.
    pub vocab_digest: String,
    /// Share of trained tokens the draft vocabulary covers.
    pub vocab_coverage: f64,
    /// Digest of the data set's fingerprint.
    pub dataset_fingerprint: String,
    /// The data set's samples; absent in checkpoints of before they were noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SampleSet>,
    /// Where and how it was computed; absent in checkpoints of before it was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed: Option<Computed>,
}

/// So few digits that JSON gives the same value back: of a value with all of its digits the reader
/// may miss the last bit.
pub fn exact_in_json(value: f64) -> f64 {
    (value * 1e12).round() / 1e12
}

/// A checkpoint in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Step, position, identity.
    pub state: CheckpointState,
    /// The configuration the run was started with.
    pub config: FitConfig,
    /// f32 parameters by exported name; their moving average where `train.ema` keeps one.
    pub weights: TensorFile,
    /// Moments as `first.NAME` and `second.NAME`, and beside an average the parameters themselves
    /// as `trained.NAME`; absent when loaded for inference.
    pub optimizer: Option<TensorFile>,
    /// The draft vocabulary.
    pub vocab: VocabMap,
    /// A few rows of input for the check after export: `input_ids`, `embeds`, `aux.0` and on.
    pub golden: TensorFile,
}

/// Whether to read the optimizer's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// All, to continue training.
    Everything,
    /// Without moments, to evaluate or export. Their digest is not checked either.
    Inference,
}

impl Checkpoint {
    /// Writes `RUN/checkpoints/step-NNNNNNNN`: under a temporary name, every file synced, then
    /// renamed and the parent synced. A checkpoint of that step that exists is an error.
    pub fn save(&self, run: &RunDir) -> Result<PathBuf, CheckpointError> {
        let target = run.checkpoint(self.state.step);
        let temporary = run.temporary(self.state.step);
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| CheckpointError::Io { path, source }
        };
        std::fs::create_dir_all(&temporary).map_err(at(&temporary))?;
        let mut sums = String::new();
        for (name, bytes) in self.files()? {
            durable::write_file(&temporary.join(name), &bytes)?;
            sums.push_str(&sums::line(name, &Digest::of(&bytes)));
        }
        durable::write_file(&temporary.join(SUMS), sums.as_bytes())?;
        durable::publish_dir(&temporary, &target)?;
        Ok(target)
    }

    fn files(&self) -> Result<Vec<(&'static str, Vec<u8>)>, CheckpointError> {
        let mut vocab = TensorFile::default();
        vocab.tensors.insert("d2t".into(), HostTensor::i64(&self.vocab.d2t()));
        vocab.tensors.insert("t2d".into(), HostTensor::bool(self.vocab.t2d()));
        let state = serde_json::to_vec_pretty(&self.state)
            .map_err(|source| CheckpointError::State { path: STATE.into(), source })?;
        let mut files = vec![
            (WEIGHTS, self.weights.encode()?),
            (VOCAB, vocab.encode()?),
            (GOLDEN, self.golden.encode()?),
            (CONFIG, self.config.to_toml().into_bytes()),
            (STATE, state),
        ];
        if let Some(optimizer) = &self.optimizer {
            files.push((OPTIMIZER, optimizer.encode()?));
        }
        Ok(files)
    }

    /// Reads a checkpoint directory; every byte read is checked against its digest first.
    pub fn load(dir: &Path, parts: Parts) -> Result<Self, CheckpointError> {
        let sums = read_sums(dir)?;
        let read = |name: &str| read_checked(dir, name, &sums);
        let path = |name: &str| dir.join(name);
        let (state, config) = Self::load_identity(dir)?;
        let vocab = Self::load_vocab(dir, &state)?;
        let tensors = |name: &str| -> Result<TensorFile, CheckpointError> {
            Ok(TensorFile::decode(&read(name)?, &path(name))?)
        };
        Ok(Self {
            config,
            weights: tensors(WEIGHTS)?,
            optimizer: match parts {
                Parts::Everything => Some(tensors(OPTIMIZER)?),
                Parts::Inference => None,
            },
            vocab,
            golden: tensors(GOLDEN)?,
            state,
        })
    }

    /// Reads and checks the draft vocabulary of the checkpoint with this `state`.
    pub fn load_vocab(dir: &Path, state: &CheckpointState) -> Result<VocabMap, CheckpointError> {
        let path = dir.join(VOCAB);
        let mapping = TensorFile::decode(&read_checked(dir, VOCAB, &read_sums(dir)?)?, &path)?;
        let wrong = |name: &str| CheckpointError::Tensor { path: path.clone(), name: name.into() };
        let d2t = mapping.get("d2t", &path)?.to_i64().ok_or_else(|| wrong("d2t"))?;
        let t2d = mapping.get("t2d", &path)?.to_bool().ok_or_else(|| wrong("t2d"))?;
        let digest = state.vocab_digest.clone();
        Ok(VocabMap::from_tensors(&d2t, &t2d, digest, state.vocab_coverage)?)
    }

    /// Reads and checks the small part of a checkpoint only.
    pub fn load_state(dir: &Path) -> Result<CheckpointState, CheckpointError> {
        let bytes = read_checked(dir, STATE, &read_sums(dir)?)?;
        let path = dir.join(STATE);
        let state: CheckpointState = serde_json::from_slice(&bytes)
            .map_err(|source| CheckpointError::State { path: path.clone(), source })?;
        match state.format {
            FORMAT => Ok(state),
            found => Err(CheckpointError::Format { path, found }),
        }
    }

    /// Reads and checks what tells one run from another: the small part and the settings.
    pub fn load_identity(dir: &Path) -> Result<(CheckpointState, FitConfig), CheckpointError> {
        let state = Self::load_state(dir)?;
        let bytes = read_checked(dir, CONFIG, &read_sums(dir)?)?;
        let config = FitConfig::from_toml(&String::from_utf8_lossy(&bytes), &dir.join(CONFIG))?;
        Ok((state, config))
    }

    /// The target's config.json.
    pub fn target(&self) -> Result<TargetConfig, CheckpointError> {
        Ok(TargetConfig::new(self.state.target.clone())?)
    }

    /// The draft with its parameters on a device.
    pub fn draft<B: Backend>(&self, device: &B::Device) -> Result<Eagle3Draft<B>, CheckpointError> {
        let path = Path::new(WEIGHTS);
        Eagle3Draft::from_parameters(self.state.draft.clone(), &mut |name, shape| {
            Ok(Param::from_vec(self.weights.f32(name, shape, path)?, shape, device))
        })
    }

    /// First and second moments in the order of the draft's parameters, of each what `keep` makes
    /// of it before the next is loaded, and [`nothing`] of what is frozen.
    pub fn moments<B: Backend>(
        &self,
        device: &B::Device,
        keep: impl Fn(Param<B>) -> Param<B>,
    ) -> Result<(Named<B>, Named<B>), CheckpointError> {
        Ok((self.stored(FIRST, device, &keep)?, self.stored(SECOND, device, &keep)?))
    }

    /// The draft as it was trained, where the weights are an average of it.
    pub fn trained_draft<B: Backend>(
        &self,
        device: &B::Device,
    ) -> Result<Eagle3Draft<B>, CheckpointError> {
        let mut stored = self.stored(TRAINED, device, &|whole| whole)?.into_iter();
        let next = &mut |name: &str, _: &[usize]| match stored.next() {
            Some((_, param)) => Ok(param),
            None => Err(CheckpointError::Tensor { path: OPTIMIZER.into(), name: name.into() }),
        };
        Eagle3Draft::from_parameters(self.state.draft.clone(), next)
    }

    fn stored<B: Backend>(
        &self,
        prefix: &str,
        device: &B::Device,
        keep: &dyn Fn(Param<B>) -> Param<B>,
    ) -> Result<Named<B>, CheckpointError> {
        let (path, frozen) = (Path::new(OPTIMIZER), self.config.draft.frozen());
        let file = self.optimizer.as_ref().ok_or_else(|| CheckpointError::Missing {
            path: path.into(),
            why: "it was loaded for inference",
        })?;
        let read = |(name, shape): (String, Vec<usize>)| {
            if prefix != TRAINED && frozen == Some(name.as_str()) {
                return Ok((name, nothing(device)));
            }
            let values = file.f32(&format!("{prefix}{name}"), &shape, path)?;
            Ok((name, keep(Param::from_vec(values, &shape, device))))
        };
        self.state.draft.parameter_shapes().into_iter().map(read).collect()
    }
}

fn read_sums(dir: &Path) -> Result<BTreeMap<String, Digest>, CheckpointError> {
    let path = dir.join(SUMS);
    let text = std::fs::read_to_string(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::Missing {
            path: path.clone(),
            why: "a complete checkpoint has one: is this a checkpoint directory?",
        },
        _ => CheckpointError::Io { path: path.clone(), source },
    })?;
    Ok(sums::entries(&text).flatten().map(|(name, sum)| (name.to_owned(), sum)).collect())
}

fn read_checked(
    dir: &Path,
    name: &str,
    sums: &BTreeMap<String, Digest>,
) -> Result<Vec<u8>, CheckpointError> {
    let path = dir.join(name);
    let Some(&expected) = sums.get(name) else {
        return Err(CheckpointError::Missing { path, why: "BLAKE3SUMS does not list it" });
    };
    let bytes = std::fs::read(&path)
        .map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
    let found = Digest::of(&bytes);
    if expected == found {
        Ok(bytes)
    } else {
        Err(CheckpointError::Digest { path, expected, found })
    }
}

/// A checkpoint that cannot be written or must not be used.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("reading or writing {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
    /// Writing durably.
    #[error(transparent)]
    Durable(#[from] DurableError),
    /// A file that should be there.
    #[error("{} is missing: {why}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// Why it is expected, or where it went.
        why: &'static str,
    },
    /// Bytes changed since they were written.
    #[error("{} was changed or damaged: its BLAKE3 is {found}, {expected} was written",
        path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// Digest in BLAKE3SUMS.
        expected: Digest,
        /// Digest of the bytes.
        found: Digest,
    },
    /// The best checkpoint of a run, or what tells which that is.
    #[error("the best checkpoint of {} is damaged; {}", run.display(), instead(sound.as_deref()))]
    Best {
        /// The run directory.
        run: PathBuf,
        /// Newest checkpoint that is not damaged.
        sound: Option<PathBuf>,
        /// What is wrong.
        #[source]
        cause: Box<CheckpointError>,
    },
    /// state.json is no state.
    #[error("{} does not describe a checkpoint", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        #[source]
        source: serde_json::Error,
    },
    /// Another layout.
    #[error("{} has format {found}, this version reads {FORMAT}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// A tensor of the wrong type.
    #[error("{}: {name} has the wrong type", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// No checkpoint in a run directory.
    #[error(
        "{} holds no complete checkpoint: the run_dir of an earlier `trainer fit` is expected",
        path.display()
    )]
    None {
        /// The run directory.
        path: PathBuf,
    },
    /// Nothing is there.
    #[error(
        "{} does not exist: a run directory, a checkpoint or an export is expected", .0.display()
    )]
    NotThere(PathBuf),
    /// Another process trains in the run directory.
    #[error("{} is in use by another `trainer fit` ({holder})", path.display())]
    Locked {
        /// The run directory.
        path: PathBuf,
        /// What the lock file says about its holder.
        holder: String,
    },
    /// A tensor file inside.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The mapping inside.
    #[error(transparent)]
    Vocab(#[from] VocabError),
    /// The configuration inside.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The target's configuration inside.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Parameters that do not fit the draft's sizes.
    #[error(transparent)]
    Shape(#[from] ParamShapeError),
}

/// What to do about a damaged best checkpoint.
fn instead(sound: Option<&Path>) -> String {
    match sound {
        Some(path) => format!("{} is sound: name it in place of the run", path.display()),
        None => "and no other one of it is sound".to_owned(),
    }
}

impl CheckpointError {
    /// Whether the files are not those that were written, so that an older checkpoint may do.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            Self::Durable(_) | Self::Locked { .. } | Self::None { .. } | Self::Format { .. } => {
                false
            }
            // Under a digest that is right they are another version's.
            Self::Config(_) | Self::State { .. } => false,
            _ => true,
        }
    }

    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io { .. } => 74,
            Self::Durable(error) => error.exit_code(),
            Self::Locked { .. } => 73,
            Self::Best { cause, .. } => cause.exit_code(),
            Self::Tensors(error) => error.exit_code(),
            Self::Vocab(error) => error.exit_code(),
            Self::Config(error) => error.exit_code(),
            Self::Target(error) => error.exit_code(),
            _ => 65,
        }
    }
}
