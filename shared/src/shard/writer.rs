//! Writes shards. Samples stay in memory once; their tensors are streamed to the file.
//!
//! The header is written here and not by the safetensors crate: the crate needs all bytes at once
//! or its own (not durable) file, and its metadata come in random order, so that the same samples
//! would not give the same bytes.

use std::collections::HashSet;

use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::layout;
use super::{SealedShard, ShardEntry, ShardError, ShardId, TensorRecord};
use crate::contract::{CaptureSpec, CapturedSample, StateRows};
use crate::diagnosis::{self, Expected};
use crate::digest::Digest;
use crate::durable::{DatasetDir, DurableFile};
use crate::header::HeaderLimits;
use crate::sample::SampleId;

#[cfg(target_endian = "big")]
compile_error!("shards are little-endian and written straight from memory");

/// Collects samples and seals them into one file.
#[derive(Debug)]
pub struct ShardWriter {
    dir: DatasetDir,
    id: ShardId,
    spec: CaptureSpec,
    fingerprint: Digest,
    samples: Vec<CapturedSample>,
    ids: HashSet<SampleId>,
    bytes: u64,
}

/// One tensor to be written: name, type, axes, and its bytes where they are.
struct Part<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl ShardWriter {
    /// Starts an empty shard; touches no file until [`Self::seal`].
    pub fn create(
        dir: &DatasetDir,
        id: ShardId,
        spec: &CaptureSpec,
        fingerprint: &Digest,
    ) -> Result<Self, ShardError> {
        // Also keeps the number inside the six digits of the name.
        let id = id.file_name().parse()?;
        Ok(Self {
            dir: dir.clone(),
            id,
            spec: spec.clone(),
            fingerprint: *fingerprint,
            samples: Vec::new(),
            ids: HashSet::new(),
            bytes: 0,
        })
    }

    /// Whether one more sample fits under the limits of a header (4,096 tensors). Seal when not.
    pub fn has_room(&self) -> bool {
        let tensors = (self.samples.len() + 1) * layout::tensors_per_sample(&self.spec);
        tensors <= HeaderLimits::SHARD.tensors
    }

    /// Keeps a sample until the shard is sealed.
    pub fn push(&mut self, sample: &CapturedSample) -> Result<(), ShardError> {
        self.push_owned(sample.clone())
    }

    /// [`Self::push`] without a copy.
    pub fn push_owned(&mut self, sample: CapturedSample) -> Result<(), ShardError> {
        let id = sample.sample().id();
        if !self.has_room() {
            return Err(ShardError::Full { samples: self.samples.len() });
        }
        self.check_spec(&sample)?;
        if !self.ids.insert(id) {
            return Err(ShardError::Duplicate(id));
        }
        self.bytes += parts(&sample).iter().map(|part| part.bytes.len() as u64).sum::<u64>();
        self.samples.push(sample);
        Ok(())
    }

    fn check_spec(&self, captured: &CapturedSample) -> Result<(), ShardError> {
        let sample = captured.sample().id();
        let differs = |source| ShardError::OtherSpec { sample, source };
        let expected = Expected {
            layers: self.spec.layers.len(),
            tokens: captured.sample().tokens(),
            hidden_size: self.spec.hidden_size,
        };
        let shapes: Vec<&[usize]> = captured.states().iter().map(|s| s.shape.as_slice()).collect();
        diagnosis::check_shapes(&expected, &shapes, &[])
            .map_err(|fault| differs(crate::ContractError::Shapes(Box::new(fault))))?;
        crate::contract::check_layers(&self.spec, captured.states()).map_err(differs)?;
        captured
            .states()
            .iter()
            .try_for_each(|state| crate::contract::check_storage(&self.spec, state))
            .map_err(differs)
    }

    /// Bytes of tensors so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Samples so far.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are no samples yet.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Its number.
    pub fn id(&self) -> ShardId {
        self.id
    }

    /// Writes the file durably: temporary name, fsync, rename without replacing, fsync of the
    /// directory. What an error leaves behind, the next writer of the data set removes.
    pub fn seal(self) -> Result<SealedShard, ShardError> {
        let mut tensors: Vec<Part<'_>> = self.samples.iter().flat_map(parts).collect();
        // Largest elements first, so that every tensor is aligned to its element without padding,
        // which the format does not allow. Stable: samples stay in order.
        tensors.sort_by_key(|part| std::cmp::Reverse(part.dtype.bitsize()));
        let header = self.header(&tensors);
        let file_name = self.id.file_name();
        let path = self.dir.shards().join(&file_name);
        let mut file = DurableFile::create(self.dir.files().as_ref(), &path)?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for part in &tensors {
            file.write_all(part.bytes)?;
        }
        let (digest, bytes) = file.publish()?;
        let entries = self.samples.iter().map(entry).collect();
        let Self { id, fingerprint, .. } = self;
        Ok(SealedShard { id, file: file_name, bytes, digest, fingerprint, entries })
    }

    fn header(&self, tensors: &[Part<'_>]) -> Vec<u8> {
        let metadata: Map<String, Value> = layout::metadata(&self.spec, &self.fingerprint)
            .into_iter()
            .map(|(name, value)| (name.to_owned(), Value::String(value)))
            .collect();
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), Value::Object(metadata));
        let mut start = 0;
        for part in tensors {
            let end = start + part.bytes.len();
            let entry = json!({
                "dtype": part.dtype.to_string(),
                "shape": part.shape,
                "data_offsets": [start, end],
            });
            header.insert(part.name.clone(), entry);
            start = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        text
    }
}

fn parts(captured: &CapturedSample) -> Vec<Part<'_>> {
    let sample = captured.sample();
    let (id, tokens) = (sample.id(), sample.tokens());
    let mut parts = vec![
        Part {
            name: layout::input_ids(id),
            dtype: Dtype::U32,
            shape: vec![tokens],
            bytes: bytemuck::cast_slice(sample.input_ids()),
        },
        Part {
            name: layout::loss_mask(id),
            dtype: Dtype::U8,
            shape: vec![tokens],
            bytes: sample.loss_mask(),
        },
    ];
    for state in captured.states() {
        let (bytes, scales) = match &state.rows {
            StateRows::Bf16(values) => (bytemuck::cast_slice::<bf16, u8>(values), None),
            StateRows::Fp8 { codes, scales } => (codes.as_slice(), Some(scales)),
        };
        parts.push(Part {
            name: layout::states(id, state.layer),
            dtype: layout::state_dtype(state.rows.dtype()),
            shape: state.shape.clone(),
            bytes,
        });
        if let Some(scales) = scales {
            parts.push(Part {
                name: layout::scale(id, state.layer),
                dtype: Dtype::F32,
                shape: vec![tokens],
                bytes: bytemuck::cast_slice(scales),
            });
        }
    }
    parts
}

pub(super) fn entry(captured: &CapturedSample) -> ShardEntry {
    let sample = captured.sample();
    let tensors = parts(captured)
        .into_iter()
        .map(|part| {
            let stats = captured
                .stats()
                .iter()
                .find(|stats| layout::states(sample.id(), stats.layer) == part.name);
            TensorRecord {
                name: part.name,
                dtype: part.dtype.to_string(),
                shape: part.shape,
                rms: stats.map(|stats| stats.rms),
                absmax: stats.map(|stats| f64::from(stats.absmax)),
            }
        })
        .collect();
    ShardEntry {
        sample_id: sample.id(),
        tokens: sample.tokens(),
        trainable_tokens: sample.trainable_tokens(),
        tensors,
        storage_errors: captured.storage_errors().to_vec(),
    }
}
