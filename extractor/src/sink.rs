//! Captured batches to shards and manifest: cuts a batch into samples, checks each against the
//! contract, and commits a shard when it is full. Knows nothing of models.

use std::collections::HashMap;
use std::ops::Range;

use serde::Serialize;
use shared::contract::ContractError;
use shared::manifest::{Manifest, ManifestError, SourceOutcome, SourceRecord};
use shared::shard::{SealedShard, ShardError, ShardId, ShardWriter};
use shared::{CapturedSample, LayerIndex, LayerState, SampleId};
use thiserror::Error;

use crate::batch::TokenBatch;
use crate::capture::{Capture, LayerCapture};

/// Why captured states are not in the data set.
#[derive(Debug, Error)]
pub enum SinkError {
    /// The states do not satisfy the contract.
    #[error("batch {batch}")]
    Contract {
        /// Number of the batch in this run.
        batch: u64,
        /// What is wrong, with the likely cause.
        #[source]
        source: ContractError,
    },
    /// A capture whose rows are not those of the batch.
    #[error("batch {batch}: layer {layer} has {got} values, {expected} were expected")]
    Rows {
        /// Number of the batch in this run.
        batch: u64,
        /// Captured layer.
        layer: LayerIndex,
        /// tokens x hidden.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// A shard could not be written.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The manifest could not be written.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

impl SinkError {
    /// Exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Contract { .. } => 65,
            Self::Rows { .. } => 70,
            Self::Shard(error) => error.exit_code(),
            Self::Manifest(error) => error.exit_code(),
        }
    }
}

/// What a sink has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Written {
    /// Samples committed.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Shards sealed.
    pub shards: u64,
    /// Bytes of sealed shards.
    pub bytes: u64,
    /// Samples refused because their states were not finite.
    pub non_finite: u64,
}

/// Collects samples into shards.
pub struct ShardSink<'a> {
    manifest: &'a Manifest,
    shard_bytes: u64,
    shard: Option<ShardWriter>,
    /// Sealed, but not committed before the batch they belong to is complete.
    sealed: Vec<SealedShard>,
    /// The line that each sample not committed yet came from.
    origins: HashMap<SampleId, SourceRecord>,
    /// Rejects and duplicates not recorded yet.
    notes: Vec<SourceRecord>,
    /// Samples with non-finite states, and what was found.
    quarantined: HashMap<SampleId, String>,
    batches: u64,
    written: Written,
}

impl<'a> ShardSink<'a> {
    /// A sink that seals a shard once it holds `shard_bytes` of tensors and its batch is complete.
    ///
    /// A batch is committed as a whole, in several shards if it is large: a run that continues then
    /// forms the same batches as one that was never interrupted, and the same batches give the same
    /// bytes, which other batches need not.
    pub fn new(manifest: &'a Manifest, shard_bytes: u64) -> Self {
        Self {
            manifest,
            shard_bytes,
            shard: None,
            sealed: Vec::new(),
            origins: HashMap::new(),
            notes: Vec::new(),
            quarantined: HashMap::new(),
            batches: 0,
            written: Written::default(),
        }
    }

    /// Adds a captured batch, or a part of one. The records of its samples must have been given
    /// with [`Self::note`].
    pub fn write(&mut self, batch: &TokenBatch, capture: &Capture) -> Result<(), SinkError> {
        self.require_rows(batch, capture)?;
        for sample in self.check(batch, capture)? {
            self.push(sample)?;
        }
        Ok(())
    }

    /// Adds a sample that was captured elsewhere, and the record of where; a batch of its own.
    pub fn add(&mut self, sample: CapturedSample, record: SourceRecord) -> Result<(), SinkError> {
        self.note(vec![record]);
        self.push(sample)?;
        self.end_batch()
    }

    /// The batch is complete: commits if there is a full shard.
    pub fn end_batch(&mut self) -> Result<(), SinkError> {
        self.batches += 1;
        let full = self.shard.as_ref().is_some_and(|it| it.bytes() >= self.shard_bytes);
        if full || !self.sealed.is_empty() {
            self.commit()?;
        }
        Ok(())
    }

    /// Rejects every sample of a batch that the target cannot run.
    pub fn reject(&mut self, batch: &TokenBatch, reason: &str) {
        for sample in batch.samples() {
            tracing::error!(sample = %sample.id(), "rejected: {reason}");
            self.quarantine(sample.id(), reason.to_owned());
        }
    }

    /// Seals what is left. Called once, at the end of a run or when it is asked to stop.
    pub fn finish(mut self) -> Result<Written, SinkError> {
        self.commit()?;
        Ok(self.written)
    }

    fn require_rows(&self, batch: &TokenBatch, capture: &Capture) -> Result<(), SinkError> {
        let expected = batch.tokens() * capture.hidden_size;
        match capture.layers.iter().find(|layer| layer.rows.len() != expected) {
            None => Ok(()),
            Some(LayerCapture { layer, rows }) => Err(SinkError::Rows {
                batch: self.batches,
                layer: *layer,
                expected,
                got: rows.len(),
            }),
        }
    }

    fn check(
        &mut self,
        batch: &TokenBatch,
        capture: &Capture,
    ) -> Result<Vec<CapturedSample>, SinkError> {
        let spec = self.manifest.spec();
        let batch_tokens: Vec<usize> = batch.samples().iter().map(|s| s.tokens()).collect();
        let mut captured = Vec::with_capacity(batch_tokens.len());
        for (sample, rows) in batch.samples().iter().zip(batch.cu_seqlens().windows(2)) {
            let (states, errors) = self.slice(sample.id(), capture, rows[0]..rows[1]);
            match CapturedSample::new(sample.clone(), spec, states, &batch_tokens) {
                Ok(sample) => captured.push(sample.with_storage_errors(errors)),
                Err(error @ ContractError::NonFinite { .. }) => {
                    tracing::error!("quarantined: {error}");
                    self.written.non_finite += 1;
                    self.quarantine(sample.id(), format!("non_finite: {error}"));
                }
                Err(source) => return Err(SinkError::Contract { batch: self.batches, source }),
            }
        }
        Ok(captured)
    }

    /// The states of the sample in these rows, and what storing them has cost.
    fn slice(
        &self,
        id: SampleId,
        capture: &Capture,
        rows: Range<usize>,
    ) -> (Vec<LayerState>, Vec<(LayerIndex, f64)>) {
        let (hidden, dtype) = (capture.hidden_size, self.manifest.spec().dtype);
        let mut errors = Vec::new();
        let mut cut = |layer: &LayerCapture| {
            let shape = vec![rows.len(), hidden];
            tracing::trace!(
                target: "aerie::shapes",
                stage = "sliced", batch = self.batches, sample = %id, layer = layer.layer.0,
                ?shape, %dtype
            );
            let (rows, error) = layer.rows.store(rows.clone(), hidden, dtype);
            errors.extend(error.map(|error| (layer.layer, error)));
            LayerState { layer: layer.layer, shape, rows }
        };
        let states = capture.layers.iter().map(&mut cut).collect();
        (states, errors)
    }

    fn quarantine(&mut self, id: SampleId, reason: String) {
        if let Some(record) = self.origins.remove(&id) {
            let outcome = SourceOutcome::Rejected(reason.clone());
            self.notes.push(SourceRecord { outcome, ..record });
        }
        self.quarantined.insert(id, reason);
    }

    /// Adds records of lines.
    pub fn note(&mut self, sources: Vec<SourceRecord>) {
        for record in sources {
            match record.outcome {
                SourceOutcome::Committed(id) => {
                    self.origins.insert(id, record);
                }
                SourceOutcome::Duplicate(_) | SourceOutcome::Rejected(_) => self.notes.push(record),
            }
        }
    }

    /// The notes, with a line that repeats a quarantined sample as rejected as the sample: before
    /// the sample was run or after, whenever the line was read.
    fn take_notes(&mut self) -> Vec<SourceRecord> {
        let mut notes = std::mem::take(&mut self.notes);
        for note in &mut notes {
            if let SourceOutcome::Duplicate(id) = note.outcome
                && let Some(reason) = self.quarantined.get(&id)
            {
                note.outcome = SourceOutcome::Rejected(reason.clone());
            }
        }
        notes
    }

    fn push(&mut self, sample: CapturedSample) -> Result<(), SinkError> {
        let shard = match &mut self.shard {
            Some(shard) => shard,
            none => {
                let (dir, spec) = (self.manifest.dir(), self.manifest.spec());
                let fingerprint = self.manifest.fingerprint().digest();
                let committed = self.manifest.next_shard_id()?;
                let id = ShardId(committed.0 + self.sealed.len() as u32);
                none.insert(ShardWriter::create(dir, id, spec, &fingerprint)?)
            }
        };
        shard.push_owned(sample)?;
        // A little too large is better than two shards for one batch.
        if shard.bytes() >= self.shard_bytes + self.shard_bytes / 4 || !shard.has_room() {
            self.seal()?;
        }
        Ok(())
    }

    fn seal(&mut self) -> Result<(), SinkError> {
        if let Some(shard) = self.shard.take() {
            self.sealed.push(shard.seal()?);
        }
        Ok(())
    }

    /// Shards on stable storage first, their rows second: a row is proof of the bytes.
    fn commit(&mut self) -> Result<(), SinkError> {
        self.seal()?;
        let sealed = std::mem::take(&mut self.sealed);
        let entries = || sealed.iter().flat_map(|shard| &shard.entries);
        if !sealed.is_empty() {
            let lines: Vec<SourceRecord> =
                entries().filter_map(|e| self.origins.remove(&e.sample_id)).collect();
            self.manifest.commit_shards(&sealed, &lines)?;
        }
        let notes = self.take_notes();
        self.manifest.record_sources(&notes)?;
        self.written.shards += sealed.len() as u64;
        self.written.bytes += sealed.iter().map(|shard| shard.bytes).sum::<u64>();
        self.written.samples += entries().count() as u64;
        self.written.tokens += entries().map(|e| e.tokens as u64).sum::<u64>();
        for shard in &sealed {
            for tensor in shard.entries.iter().flat_map(|entry| &entry.tensors) {
                tracing::trace!(
                    target: "aerie::shapes",
                    stage = "written", shard = %shard.id, name = tensor.name,
                    shape = ?tensor.shape, dtype = tensor.dtype
                );
            }
        }
        Ok(())
    }
}
