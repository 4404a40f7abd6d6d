//! The recorded data set as training sees it: which samples, in which split, in which order. Knows
//! no batches and no tensors on a device.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use shared::manifest::{Manifest, ManifestError};
use shared::{
    CaptureSpec, CapturedSample, DatasetDir, Digest, HeaderLimits, SampleId, ShardError,
    ShardReader, TokenSample,
};
use thiserror::Error;

/// Open shards kept at a time by one reader.
const OPEN_SHARDS: usize = 64;

/// One committed sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleEntry {
    /// Content hash.
    pub id: SampleId,
    /// File name inside `shards/`.
    pub shard_file: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Tokens with loss mask 1.
    pub trainable_tokens: usize,
}

/// A data set opened read-only.
#[derive(Clone, Debug)]
pub struct ManifestDataset {
    dir: DatasetDir,
    spec: CaptureSpec,
    fingerprint: Digest,
    samples: Vec<SampleEntry>,
    verify: Verify,
    digests: HashMap<String, Digest>,
    /// Shards whose bytes were found to be those that were sealed.
    verified: Arc<Mutex<HashSet<FileState>>>,
}

/// Whether shards are compared with their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Each once, before anything of it is used.
    #[default]
    First,
    /// Not at all: for file systems that check by themselves.
    Never,
}

/// A file as it was when it was looked at: name, inode, bytes, time of change.
type FileState = (String, u64, u64, i64, i64);

/// Indices of samples that are trained on, and of those that are not. Disjoint by construction:
/// each sample's id decides alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Trained on.
    pub train: Vec<usize>,
    /// Kept for evaluation.
    pub held_out: Vec<usize>,
}

/// Which samples a data set holds, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleSet {
    /// How many.
    pub count: usize,
    /// BLAKE3 over their ids in order, in hex.
    pub digest: String,
}

impl std::fmt::Display for SampleSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} samples (digest {})", self.count, self.digest)
    }
}

impl ManifestDataset {
    /// Opens `DIR/manifest.sqlite`; reads no shard yet.
    pub fn open(dir: &Path) -> Result<Self, DatasetError> {
        let manifest = Manifest::open_read(dir)?;
        let samples = manifest.samples()?.into_iter().map(|row| SampleEntry {
            id: row.id,
            shard_file: row.shard_file,
            tokens: row.tokens,
            trainable_tokens: row.trainable_tokens,
        });
        let mut samples: Vec<SampleEntry> = samples.collect();
        samples.sort_by_key(|sample| sample.id);
        if samples.is_empty() {
            return Err(DatasetError::Empty { path: dir.display().to_string() });
        }
        let (spec, fingerprint) = (manifest.spec().clone(), manifest.fingerprint().digest());
        let digests = manifest.shards()?.into_iter().map(|row| (row.file, row.digest)).collect();
        Ok(Self {
            dir: DatasetDir::new(dir),
            spec,
            fingerprint,
            samples,
            verify: Verify::First,
            digests,
            verified: Arc::default(),
        })
    }

    /// The same data set with another rule for digests.
    pub fn with_verify(self, verify: Verify) -> Self {
        Self { verify, ..self }
    }

    /// Layers, width and storage type of every sample.
    pub fn spec(&self) -> &CaptureSpec {
        &self.spec
    }

    /// Digest of everything that decided the recorded bytes.
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// Where its files are.
    pub fn dir(&self) -> &DatasetDir {
        &self.dir
    }

    /// All samples, ordered by id.
    pub fn samples(&self) -> &[SampleEntry] {
        &self.samples
    }

    /// All samples, in short: two data sets with the same ones split, count and order them alike.
    pub fn sample_set(&self) -> SampleSet {
        let mut hasher = blake3::Hasher::new();
        self.samples.iter().for_each(|sample| {
            hasher.update(&sample.id.0);
        });
        SampleSet { count: self.samples.len(), digest: hasher.finalize().to_hex().to_string() }
    }

    /// Splits by a hash of each sample's id: about `held_out` of the samples are kept out, the same
    /// ones whatever else is in the data set.
    pub fn split(&self, held_out: f64) -> Split {
        let (held_out, train) =
            (0..self.samples.len()).partition(|&at| is_held_out(self.samples[at].id, held_out));
        Split { train, held_out }
    }

    /// The order of `indices` in an epoch: a function of seed, epoch and sample ids only.
    pub fn order(&self, indices: &[usize], seed: u64, epoch: u64) -> Vec<usize> {
        let key = |&at: &usize| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(b"order").update(&seed.to_le_bytes()).update(&epoch.to_le_bytes());
            hasher.update(&self.samples[at].id.0);
            *hasher.finalize().as_bytes()
        };
        let mut order = indices.to_vec();
        order.sort_by_cached_key(key);
        order
    }

    /// Reads the whole shard the first time that it is used in this state.
    fn verify(&self, reader: &ShardReader, file: &str) -> Result<(), DatasetError> {
        let missing = || DatasetError::Closed { shard: file.to_owned() };
        let digest = self.digests.get(file).ok_or_else(missing)?;
        let state = std::fs::metadata(reader.path())
            .ok()
            .map(|it| (file.to_owned(), it.ino(), it.len(), it.ctime(), it.ctime_nsec()));
        // Not held while reading: threads verify different shards at the same time.
        let verified = || self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if state.as_ref().is_some_and(|state| verified().contains(state)) {
            return Ok(());
        }
        reader.verify(digest)?;
        verified().extend(state);
        Ok(())
    }

    /// A reader of samples with its own open shards, for any number of threads.
    pub fn reader(&self) -> SampleReader<'_> {
        SampleReader { dataset: self, verify: self.verify, open: Mutex::default() }
    }

    /// A reader that compares no shard with its digest, only the tokens of each sample with its id:
    /// to look at tokens of samples whose states another reader verifies before they are used.
    pub fn quick_reader(&self) -> SampleReader<'_> {
        SampleReader { verify: Verify::Never, ..self.reader() }
    }
}

/// Whether a sample belongs to the held-out share.
pub fn is_held_out(id: SampleId, share: f64) -> bool {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"held out").update(&id.0);
    let mut word = [0; 8];
    hasher.finalize_xof().fill(&mut word);
    // 53 bits fit an f64 exactly.
    ((u64::from_le_bytes(word) >> 11) as f64) < share * (1u64 << 53) as f64
}

/// An open shard once it is known to be that of the data set; held while it is being found out.
type Opened = Arc<Mutex<Option<Arc<ShardReader>>>>;

/// Reads samples of a data set, keeping some shards open.
pub struct SampleReader<'a> {
    dataset: &'a ManifestDataset,
    verify: Verify,
    open: Mutex<HashMap<String, Opened>>,
}

impl SampleReader<'_> {
    /// Ids, mask and states of the sample at an index of [`ManifestDataset::samples`], checked
    /// against the contract again.
    pub fn read(&self, at: usize) -> Result<CapturedSample, DatasetError> {
        let id = self.dataset.samples[at].id;
        self.with_shard(at, |shard| shard.read(id))
    }

    /// Ids and mask only.
    pub fn read_tokens(&self, at: usize) -> Result<TokenSample, DatasetError> {
        let id = self.dataset.samples[at].id;
        self.with_shard(at, |shard| shard.read_sample(id))
    }

    fn with_shard<T>(
        &self,
        at: usize,
        read: impl FnOnce(&ShardReader) -> Result<T, ShardError>,
    ) -> Result<T, DatasetError> {
        let file = &self.dataset.samples[at].shard_file;
        let place = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            if !open.contains_key(file) && open.len() >= OPEN_SHARDS {
                open.clear();
            }
            open.entry(file.clone()).or_default().clone()
        };
        let shard = {
            let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
            match &*place {
                Some(shard) => shard.clone(),
                None => place.insert(Arc::new(self.open(file)?)).clone(),
            }
        };
        Ok(read(&shard)?)
    }

    fn open(&self, file: &str) -> Result<ShardReader, DatasetError> {
        let path = self.dataset.dir.shards().join(file);
        let reader = ShardReader::open(&path, &HeaderLimits::SHARD)?;
        if *reader.fingerprint() != self.dataset.fingerprint {
            return Err(DatasetError::Fingerprint {
                shard: file.to_owned(),
                expected: self.dataset.fingerprint,
                found: *reader.fingerprint(),
            });
        }
        if self.verify == Verify::First {
            self.dataset.verify(&reader, file)?;
        }
        Ok(reader)
    }
}

/// A data set that cannot be trained on.
#[derive(Debug, Error)]
pub enum DatasetError {
    /// The manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A shard or a sample in it.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Nothing recorded yet.
    #[error("{path} holds no committed sample: run `extractor run` first")]
    Empty {
        /// The data set.
        path: String,
    },
    /// A split without training samples.
    #[error("no sample of {samples} can be trained on: {reason}")]
    NoTraining {
        /// Samples in the data set.
        samples: usize,
        /// Why not.
        reason: &'static str,
    },
    /// Samples whose loss masks leave nothing to train.
    #[error(
        "none of the {samples} samples to train on has a row that can be trained, of {tokens} \
            trained tokens in all: a row needs {rule}; look at the loss masks (`extractor query \
            DATASET samples`), and extract the conversations again with whole answers trained"
    )]
    NoRows {
        /// Samples to train on.
        samples: usize,
        /// Their trained tokens.
        tokens: usize,
        /// What makes a row.
        rule: &'static str,
    },
    /// A shard of another data set.
    #[error(
        "{shard} was written under fingerprint {found}, the manifest has {expected}: it belongs \
            to another data set"
    )]
    Fingerprint {
        /// The shard's file.
        shard: String,
        /// Digest in the manifest.
        expected: Digest,
        /// Digest in the shard.
        found: Digest,
    },
    /// A shard that was opened and is not.
    #[error("{shard} is not open")]
    Closed {
        /// The shard's file.
        shard: String,
    },
    /// Layers that cannot feed a draft.
    #[error(
        "the data set holds {layers} layers: a draft needs at least one aux state and the last \
            layer's"
    )]
    Layers {
        /// Captured layers.
        layers: usize,
    },
    /// The last captured layer is not the target's last.
    #[error(
        "the last captured layer is {found}, the target's last is {expected}: the teacher would \
            be the wrong state; record layer {expected} too"
    )]
    Teacher {
        /// Last captured layer.
        found: u16,
        /// Last layer of the target.
        expected: usize,
    },
    /// A batch whose parts do not fit.
    #[error(transparent)]
    Batch(#[from] crate::batch::BatchError),
    /// Memory that batches are laid out in.
    #[error(transparent)]
    Room(#[from] crate::ops::DeviceFault),
    /// Threads that the system does not give.
    #[error("starting threads that read the data set: {reason}")]
    Threads {
        /// The system's words.
        reason: String,
    },
    /// The prefetching thread ended without a reason.
    #[error("the thread that reads the data set stopped unexpectedly")]
    Stopped,
}

impl DatasetError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Manifest(error) => error.exit_code(),
            Self::Shard(error) => error.exit_code(),
            Self::Room(fault) => fault.exit_code,
            Self::Threads { .. } => 75,
            Self::Closed { .. } | Self::Stopped => 70,
            _ => 65,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> SampleId {
        SampleId::of(&[n], &[1])
    }

    #[test]
    fn the_held_out_share_is_met_and_grows_by_inclusion() {
        let count = |share: f64| (0..4000).filter(|&n| is_held_out(id(n), share)).count();
        assert_eq!((count(0.0), count(1.0)), (0, 4000));
        assert!((350..450).contains(&count(0.1)), "{}", count(0.1));
        // A larger share keeps every sample out that a smaller one does.
        assert!((0..4000).all(|n| !is_held_out(id(n), 0.1) || is_held_out(id(n), 0.2)));
    }
}
