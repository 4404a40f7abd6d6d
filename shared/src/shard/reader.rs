//! Reads shards: every sample is checked against the contract again. Knows no manifest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;

use super::layout::{self, SampleTensors};
use super::{ShardEntry, ShardError, writer};
use crate::contract::{CaptureSpec, CapturedSample, LayerState, StateDtype, StateRows};
use crate::digest::Digest;
use crate::durable::at;
use crate::files::{Files, RealFiles};
use crate::header::{HeaderLimits, ShardHeader, TensorEntry};
use crate::sample::{SampleId, TokenSample};

/// Reads a file from its start without its cursor, which threads share.
struct FromStart<'a> {
    file: &'a File,
    position: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.position)?;
        self.position += read as u64;
        Ok(read)
    }
}

/// The checked header of any safetensors file. Links, devices and FIFOs are refused.
pub fn read_header(path: &Path, limits: &HeaderLimits) -> Result<ShardHeader, ShardError> {
    open_header(&RealFiles, path, limits).map(|(_, _, header)| header)
}

/// The file, its size, and its checked header.
pub(crate) fn open_header(
    files: &dyn Files,
    path: &Path,
    limits: &HeaderLimits,
) -> Result<(File, u64, ShardHeader), ShardError> {
    let file = files.open_read(path).map_err(at("opening", path))?;
    let bytes = file.metadata().map_err(at("opening", path))?.len();
    let header = ShardHeader::read(BufReader::new(&file), bytes, limits)
        .map_err(|source| ShardError::Header { path: path.to_path_buf(), source })?;
    Ok((file, bytes, header))
}

/// An open shard. Only its header is in memory.
#[derive(Debug)]
pub struct ShardReader {
    path: PathBuf,
    file: File,
    bytes: u64,
    header: ShardHeader,
    spec: CaptureSpec,
    fingerprint: Digest,
    samples: BTreeMap<SampleId, SampleTensors>,
}

impl ShardReader {
    /// Opens a shard and checks its header: limits, metadata, and exactly the tensors of whole
    /// samples. Symbolic links, devices and FIFOs are refused.
    pub fn open(path: &Path, limits: &HeaderLimits) -> Result<Self, ShardError> {
        Self::open_with(&RealFiles, path, limits)
    }

    /// [`Self::open`] through given operations.
    pub fn open_with(
        files: &dyn Files,
        path: &Path,
        limits: &HeaderLimits,
    ) -> Result<Self, ShardError> {
        let (file, bytes, header) = open_header(files, path, limits)?;
        let refused = |reason| ShardError::Layout { path: path.to_path_buf(), reason };
        let (spec, fingerprint) = layout::read_metadata(&header.metadata).map_err(refused)?;
        let samples = layout::locate(&header, &spec).map_err(refused)?;
        Ok(Self { path: path.to_path_buf(), file, bytes, header, spec, fingerprint, samples })
    }

    /// Compares the whole file with the digest it was sealed under. Reads every byte once.
    pub fn verify(&self, expected: &Digest) -> Result<(), ShardError> {
        let whole = FromStart { file: &self.file, position: 0 };
        let (found, _) = Digest::of_reader(whole).map_err(at("reading", &self.path))?;
        if found != *expected {
            let (path, expected) = (self.path.clone(), *expected);
            return Err(ShardError::Digest { path, expected, found });
        }
        Ok(())
    }

    /// Ids of the samples, ascending.
    pub fn sample_ids(&self) -> Vec<SampleId> {
        self.samples.keys().copied().collect()
    }

    /// Tokens of a sample, if it is here. Reads nothing.
    pub fn tokens(&self, id: SampleId) -> Option<usize> {
        self.samples.get(&id).map(|tensors| tensors.tokens)
    }

    /// Names, types, axes and metadata.
    pub fn header(&self) -> &ShardHeader {
        &self.header
    }

    /// What its samples contain.
    pub fn spec(&self) -> &CaptureSpec {
        &self.spec
    }

    /// Digest of the fingerprint it was written under.
    pub fn fingerprint(&self) -> &Digest {
        &self.fingerprint
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads one sample: token ids and mask hash to its id, states are finite.
    pub fn read(&self, id: SampleId) -> Result<CapturedSample, ShardError> {
        let path = || self.path.clone();
        let tensors = self
            .samples
            .get(&id)
            .ok_or_else(|| ShardError::NoSample { path: path(), sample: id })?;
        let sample = self.read_tokens(id, tensors)?;
        let mut states = Vec::with_capacity(tensors.layers.len());
        for (layer, (values, scale)) in self.spec.layers.iter().zip(&tensors.layers) {
            let rows = match self.spec.dtype {
                StateDtype::Bf16 => StateRows::Bf16(self.values::<bf16>(*values)?),
                StateDtype::Fp8 => StateRows::Fp8 {
                    codes: self.values(*values)?,
                    scales: scale.map_or(Ok(Vec::new()), |scale| self.values(scale))?,
                },
            };
            let shape = vec![tensors.tokens, self.spec.hidden_size];
            states.push(LayerState { layer: *layer, shape, rows });
        }
        CapturedSample::new(sample, &self.spec, states, &[])
            .map_err(|source| ShardError::Contract { path: path(), sample: id, source })
    }

    /// Reads only token ids and loss mask of a sample.
    pub fn read_sample(&self, id: SampleId) -> Result<TokenSample, ShardError> {
        let path = || self.path.clone();
        match self.samples.get(&id) {
            Some(tensors) => self.read_tokens(id, tensors),
            None => Err(ShardError::NoSample { path: path(), sample: id }),
        }
    }

    /// Reads a sample and describes it as the manifest does.
    pub fn describe(&self, id: SampleId) -> Result<ShardEntry, ShardError> {
        self.read(id).map(|captured| writer::entry(&captured))
    }

    fn read_tokens(&self, id: SampleId, at: &SampleTensors) -> Result<TokenSample, ShardError> {
        let path = || self.path.clone();
        let sample = TokenSample::new(self.values(at.input_ids)?, self.values(at.loss_mask)?)
            .map_err(|source| ShardError::Sample { path: path(), sample: id, source })?;
        if sample.id() != id {
            return Err(ShardError::SampleChanged { path: path(), sample: id, found: sample.id() });
        }
        Ok(sample)
    }

    /// The tensor's values; the header's check made its bytes a whole number of them.
    fn values<T: bytemuck::Pod>(&self, tensor: usize) -> Result<Vec<T>, ShardError> {
        let Some(TensorEntry { start, bytes, .. }) = self.header.tensors.get(tensor) else {
            let reason = "tensor index out of range".to_owned();
            return Err(ShardError::Layout { path: self.path.clone(), reason });
        };
        let mut values = vec![T::zeroed(); *bytes as usize / size_of::<T>()];
        self.file
            .read_exact_at(bytemuck::cast_slice_mut(&mut values), *start)
            .map_err(at("reading", &self.path))?;
        Ok(values)
    }
}
