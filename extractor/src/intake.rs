//! Input lines to work: which lines are done already, which are rejects or duplicates, and batches
//! of the samples that are left. Knows nothing of models or shards.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use shared::manifest::{Failure, Manifest, ManifestError, SourceOutcome, SourceRecord, SourceRow};
use shared::{SampleId, TokenSample};
use thiserror::Error;

use crate::batch::{Batcher, TokenBatch};
use crate::encode::Encoder;
use crate::input_file::Survey;
use crate::prompts::{Line, Prompts, PromptsError};
use crate::reject::{Reject, RejectReason};
use crate::shutdown::Shutdown;

/// A sample at which the target died so often is a reject.
pub const MAX_FAILURES: u64 = 3;

/// Why the input cannot be turned into work.
#[derive(Debug, Error)]
pub enum IntakeError {
    /// A file cannot be read.
    #[error(transparent)]
    Prompts(#[from] PromptsError),
    /// The manifest cannot be read.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A line that was extracted before has other content now.
    #[error(
        "{file}:{line} changed since it was extracted into this data set: restore the file, or \
         extract into a new data set"
    )]
    ChangedLine {
        /// The input file.
        file: String,
        /// 1-based line number.
        line: u64,
    },
    /// The chat template does not end.
    #[error("{file}:{line}: {detail}")]
    Endless {
        /// The input file.
        file: String,
        /// 1-based line number.
        line: u64,
        /// What did not end, and what to do.
        detail: String,
    },
}

impl IntakeError {
    /// Exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Prompts(error) => error.exit_code(),
            Self::Manifest(error) => error.exit_code(),
            Self::ChangedLine { .. } | Self::Endless { .. } => 65,
        }
    }
}

/// What one line of input turned out to be.
#[derive(Debug)]
pub enum Admission {
    /// Done in an earlier run.
    Known,
    /// A sample to extract, and the record that will commit its line.
    Fresh(TokenSample, SourceRecord),
    /// The same sample as a line before it.
    Duplicate(SourceRecord),
    /// Unusable.
    Rejected(Reject, SourceRecord),
}

/// Samples of one forward, and the outcome of every line read since the last unit. The line of the
/// sample that closed the batch is among them, although that sample comes with the next unit.
#[derive(Debug)]
pub struct WorkUnit {
    /// The samples; empty when only rejects and duplicates were left.
    pub batch: TokenBatch,
    /// One record a line that has not been recorded yet.
    pub sources: Vec<SourceRecord>,
}

/// Limits of [`Intake`].
#[derive(Clone, Debug)]
pub struct IntakeOptions {
    /// Input files, in order.
    pub prompts: Vec<PathBuf>,
    /// Tokens of a batch; a longer sample forms a batch of its own.
    pub batch_tokens: usize,
    /// Stop after this many lines of input.
    pub limit: Option<u64>,
}

/// Iterator over the lines of all input files that decides what each of them is.
pub struct Intake<'a> {
    lines: Prompts,
    encoder: &'a Encoder,
    known: HashMap<String, HashMap<u64, SourceRow>>,
    seen: HashSet<SampleId>,
    failures: HashMap<SampleId, Failure>,
    lines_left: u64,
    stop: Shutdown,
}

impl<'a> Intake<'a> {
    /// Opens the input files and loads what the manifest, if there is one, knows of their lines.
    pub fn open(
        options: &IntakeOptions,
        encoder: &'a Encoder,
        manifest: Option<&Manifest>,
    ) -> Result<Self, IntakeError> {
        let lines = Prompts::open(&options.prompts)?;
        let (mut known, mut seen) = (HashMap::new(), HashSet::new());
        if let Some(manifest) = manifest {
            for path in &options.prompts {
                let name = path.display().to_string();
                let rows = manifest.known_sources(&name)?;
                known.insert(name, rows);
            }
            seen = manifest.committed_samples()?;
        }
        let failures = manifest.map_or(Ok(HashMap::new()), Manifest::failures)?;
        let lines_left = options.limit.unwrap_or(u64::MAX);
        let stop = Shutdown::default();
        Ok(Self { lines, encoder, known, seen, failures, lines_left, stop })
    }

    /// Reads the input files as they were surveyed; a later run reads what was appended since.
    pub fn within(mut self, inputs: &[Survey]) -> Self {
        self.lines = self.lines.as_surveyed(inputs);
        self
    }

    /// Ends, as if the input did, once a stop is asked for.
    pub fn while_not(mut self, stop: &Shutdown) -> Self {
        self.stop = stop.clone();
        self
    }

    /// Groups the fresh samples, in input order, into batches of at most `batch_tokens`. A sample
    /// at which the target has died is a batch of its own, so that it takes no other with it again.
    pub fn batches(self, batch_tokens: usize) -> Batches<'a> {
        let batcher = Batcher::new(batch_tokens);
        Batches { intake: self, batcher, suspect: None, exhausted: false }
    }

    fn admit(&mut self, line: Line) -> Result<Admission, IntakeError> {
        let record = |outcome, truncated| SourceRecord {
            file: line.source.file.display().to_string(),
            line: line.source.line,
            digest: line.digest,
            outcome,
            truncated,
        };
        let file = line.source.file.display().to_string();
        if let Some(row) = self.known.get(&file).and_then(|rows| rows.get(&line.source.line)) {
            match (row.digest == line.digest, &row.outcome) {
                (true, _) => return Ok(Admission::Known),
                // Nothing was made of it, so it may be mended, or be whole at last.
                (false, SourceOutcome::Rejected(_)) => {}
                (false, _) => {
                    return Err(IntakeError::ChangedLine { file, line: line.source.line });
                }
            }
        }
        let encoded = match line.parsed.and_then(|it| self.encoder.encode(&it)) {
            Ok(encoded) => encoded,
            // Not the fault of this line alone, and perhaps of none.
            Err(reject) if self.encoder.is_endless() => {
                let (line, detail) = (line.source.line, reject.detail);
                return Err(IntakeError::Endless { file, line, detail });
            }
            Err(reject) => {
                tracing::debug!("{reject}");
                let reason = format!("{}: {}", reject.reason, reject.detail);
                let record = record(SourceOutcome::Rejected(reason), false);
                return Ok(Admission::Rejected(reject, record));
            }
        };
        let id = encoded.sample.id();
        if let Some(failure) = self.failures.get(&id).filter(|it| it.count >= MAX_FAILURES) {
            let Failure { count, error } = failure;
            let detail = format!("the target died at it {count} times, lastly with: {error}");
            let reject =
                Reject { source: line.source.clone(), reason: RejectReason::TargetCrash, detail };
            let reason = format!("{}: {}", reject.reason, reject.detail);
            return Ok(Admission::Rejected(reject, record(SourceOutcome::Rejected(reason), false)));
        }
        if !self.seen.insert(id) {
            let record = record(SourceOutcome::Duplicate(id), encoded.truncated);
            return Ok(Admission::Duplicate(record));
        }
        let record = record(SourceOutcome::Committed(id), encoded.truncated);
        Ok(Admission::Fresh(encoded.sample, record))
    }
}

impl Iterator for Intake<'_> {
    type Item = Result<Admission, IntakeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stop.requested() {
            return None;
        }
        self.lines_left = self.lines_left.checked_sub(1)?;
        let line = self.lines.next()?;
        Some(line.map_err(IntakeError::from).and_then(|line| self.admit(line)))
    }
}

/// Iterator of [`Intake::batches`].
pub struct Batches<'a> {
    intake: Intake<'a>,
    batcher: Batcher,
    /// Waits until the batch before it is out.
    suspect: Option<TokenSample>,
    exhausted: bool,
}

impl Batches<'_> {
    fn next_unit(&mut self) -> Result<Option<WorkUnit>, IntakeError> {
        let mut sources = Vec::new();
        if let Some(sample) = self.suspect.take() {
            return Ok(Some(WorkUnit { batch: TokenBatch::new(vec![sample]), sources }));
        }
        while !self.exhausted {
            match self.intake.next().transpose()? {
                None => self.exhausted = true,
                Some(Admission::Known) => {}
                Some(Admission::Duplicate(record) | Admission::Rejected(_, record)) => {
                    sources.push(record);
                }
                Some(Admission::Fresh(sample, record)) => {
                    sources.push(record);
                    let suspect = self.intake.failures.contains_key(&sample.id());
                    let batch = if suspect {
                        self.suspect = Some(sample);
                        match self.batcher.finish() {
                            None => self.suspect.take().map(|it| TokenBatch::new(vec![it])),
                            before => before,
                        }
                    } else {
                        self.batcher.push(sample)
                    };
                    if let Some(batch) = batch {
                        return Ok(Some(WorkUnit { batch, sources }));
                    }
                }
            }
        }
        let last = self.batcher.finish();
        let empty = last.is_none() && sources.is_empty();
        let batch = last.unwrap_or_else(|| TokenBatch::new(Vec::new()));
        Ok((!empty).then_some(WorkUnit { batch, sources }))
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<WorkUnit, IntakeError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_unit().transpose()
    }
}
