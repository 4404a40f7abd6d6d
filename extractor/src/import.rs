//! States that another tool wrote become a data set: a file is a sample, judged by the contract,
//! committed by the sink that extractions use. Runs no model.

mod files;
mod masks;
mod naming;
mod values;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use shared::contract::ContractError;
use shared::digest::Digest;
use shared::files::{Files, RealFiles};
use shared::manifest::{InputFile, Manifest, SourceOutcome, SourceRecord};
use shared::{CaptureSpec, CapturedSample, LayerState, SampleId};
use thiserror::Error;

use self::files::{Contents, Refusal, StatesFile};
use self::masks::Masks;
use crate::capture::LayerRows;
use crate::config::ExtractConfig;
use crate::conversation::{Body, Conversation};
use crate::encode::{Encoded, Encoder};
use crate::fingerprint;
use crate::pipeline::{PipelineError, Record, RunReport};
use crate::progress::Progress;
use crate::reject::{Fault, RejectReason, Source};
use crate::shutdown::Shutdown;
use crate::sink::{ShardSink, Written};
use crate::target::weights::{Checkpoint, WeightsError};
use crate::target::{TargetError, TargetSpec};
use crate::target_dir;

/// The form of file that is read, for the fingerprint.
pub(crate) const FORM: &str = "safetensors: hidden_states [tokens, layers, hidden], token_ids";

/// A state after the final norm has, divided by the norm's weight, an rms of 1 in every row; so
/// many rows and so little difference are no accident.
const NORMED_ROWS: usize = 4;
const NORMED_DIFFERENCE: f64 = 0.01;

/// What is imported, beside the configuration.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Files, and folders whose `.safetensors` files are meant.
    pub from: Vec<PathBuf>,
    /// What the user says of the tool that made them; goes into the fingerprint.
    pub made_by: String,
}

/// Why an import ended early.
#[derive(Debug, Error)]
pub enum ImportError {
    /// A folder without files to import.
    #[error(
        "{} holds no .safetensors files: name the folder that vLLM's connector wrote to, or \
         `hidden_states` of speculators", .0.display()
    )]
    Empty(PathBuf),
    /// A file in a form that is not read.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// The name of a file that has been imported stands for other bytes now.
    #[error(
        "{0} was imported, and has other bytes now: restore it, or import into a new data set; \
         where it is another file of the same name, give it with its full path"
    )]
    Changed(String),
    /// Nothing says what the draft is trained on.
    #[error(
        "{} has no `loss_mask`: pass the conversations it was made from with --prompts, which are \
         encoded for their masks", .0.display()
    )]
    NoMasks(PathBuf),
    /// The disk said no.
    #[error("reading {}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl ImportError {
    /// Process exit code: 65 bad data, 74 I/O, 78 configuration.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Empty(_) | Self::Refused { .. } | Self::Changed(_) => 65,
            Self::NoMasks(_) => 78,
            Self::Read { .. } => 74,
        }
    }
}

/// files -> tokens + loss mask + states -> shard -> manifest
///
/// In the manifest a file is an input of one line. Rerunning continues: files that have given a
/// sample are known by their bytes, those that were rejected are judged again.
pub fn run(
    config: &ExtractConfig,
    options: &ImportOptions,
    stop: &Shutdown,
) -> Result<RunReport, PipelineError> {
    let files = files::list(&options.from)?;
    let model = config.model()?;
    let target = TargetSpec::read(model)?;
    let spec = config.capture_spec(&target)?;
    let encoder = Encoder::load(model, config.data.encode_options(&target))?;
    let final_norm = final_norm(model, spec.hidden_size).map_err(TargetError::from)?;
    let masks = match config.data.prompts.as_slice() {
        [] => None,
        prompts => Some(Masks::read(prompts, &encoder)?),
    };
    let fingerprint = fingerprint::of_import(config, &target, &encoder, &spec, &options.made_by)?;
    let manifest = Manifest::open_for_write(config.dataset()?, &fingerprint, &spec)?;
    target_dir::publish(manifest.dir(), model, &target)?;

    let record = Record::begin(&manifest, config, &[], "files")?;
    let bytes: u64 = files.iter().filter_map(|it| it.metadata().ok()).map(|it| it.len()).sum();
    let mut progress = Progress::start(bytes / spec.bytes_per_token().max(1) as u64, "files");
    let judge = Judge { encoder: &encoder, spec: &spec, masks, final_norm };
    let mut importer = Importer {
        seen: manifest.committed_samples()?,
        sink: ShardSink::new(&manifest, config.run.shard_bytes),
        non_finite: 0,
        manifest: &manifest,
        judge,
    };
    let limit = config.run.limit.map_or(files.len(), |limit| limit as usize);
    let ended = match importer.take_all(files.iter().take(limit), &mut progress, stop) {
        Ok(()) => Ok(()),
        // Of a file: what came before it is committed, as it can't be after an error of the sink.
        Err(error @ PipelineError::Import(_)) => Err(error),
        Err(error) => return Err(error),
    };
    let written = Written { non_finite: importer.non_finite, ..importer.sink.finish()? };
    progress.finish();
    match ended {
        Ok(()) => record.end(written, &progress, stop.requested()),
        Err(error) => Err(record.fail(written, &progress, error)?),
    }
}

fn final_norm(model: &Path, hidden_size: usize) -> Result<Vec<f32>, WeightsError> {
    Checkpoint::open(model)?.tensor("model.norm", &[hidden_size])
}

struct Importer<'a> {
    manifest: &'a Manifest,
    judge: Judge<'a>,
    sink: ShardSink<'a>,
    /// Samples of the data set.
    seen: HashSet<SampleId>,
    non_finite: u64,
}

impl Importer<'_> {
    fn take_all<'a>(
        &mut self,
        mut files: impl Iterator<Item = &'a PathBuf>,
        progress: &mut Progress,
        stop: &Shutdown,
    ) -> Result<(), PipelineError> {
        while !stop.requested()
            && let Some(path) = files.next()
        {
            if !self.is_done(path)? {
                self.take(path, progress)?;
            }
        }
        match files.count() {
            0 => {}
            left => tracing::info!("{left} files were not looked at; import again to go on"),
        }
        Ok(())
    }

    /// Whether this very file gave a sample. Names and sizes are shared by files of different
    /// folders, so it is known by its bytes.
    fn is_done(&self, path: &Path) -> Result<bool, PipelineError> {
        let file = path.display().to_string();
        let Some(row) = self.manifest.known_sources(&file)?.remove(&1) else { return Ok(false) };
        if matches!(row.outcome, SourceOutcome::Rejected(_)) {
            return Ok(false);
        }
        let digest = RealFiles.open_read(path).and_then(Digest::of_reader);
        let (digest, _) = digest.map_err(reading(path))?;
        if !digest.0.starts_with(&row.digest) {
            return Err(ImportError::Changed(file).into());
        }
        Ok(true)
    }

    /// Reads one file and hands its sample or its fault to the sink.
    fn take(&mut self, path: &Path, progress: &mut Progress) -> Result<(), PipelineError> {
        let started = Instant::now();
        let source = Source { file: Arc::from(path), line: 1 };
        let opened = StatesFile::open(path);
        let (digest, bytes) = match &opened {
            Ok(file) => file.digest().map_err(reading(path))?,
            Err(_) => (Digest::of(b""), 0),
        };
        let judged = opened.and_then(|file| {
            let judged = self.judge.judge(&file, &source, &self.seen)?;
            file.require_unchanged().map(|()| judged)
        });
        let file = path.display().to_string();
        let input = InputFile { file: file.clone(), lines: 1, blank: 0, bytes, digest };
        self.manifest.register_input(&input)?;
        let record = |outcome, truncated| {
            let mut short = [0; 16];
            short.copy_from_slice(&digest.0[..16]);
            SourceRecord { file, line: 1, digest: short, outcome, truncated }
        };
        let read_s = started.elapsed().as_secs_f64();
        let mut tokens = 0;
        match judged {
            Ok(Judged::Fresh(sample, truncated)) => {
                let id = sample.sample().id();
                self.seen.insert(id);
                tokens = sample.sample().tokens() as u64;
                self.sink.add(sample, record(SourceOutcome::Committed(id), truncated))?;
            }
            Ok(Judged::Duplicate(id, truncated)) => {
                self.sink.note(vec![record(SourceOutcome::Duplicate(id), truncated)]);
            }
            Err(Refusal::Fault(fault)) => {
                let reject = fault.at(source);
                if reject.reason == RejectReason::NonFinite {
                    self.non_finite += 1;
                    tracing::error!("{reject}");
                } else {
                    tracing::debug!("{reject}");
                }
                let reason = format!("{}: {}", reject.reason, reject.detail);
                self.sink.note(vec![record(SourceOutcome::Rejected(reason), false)]);
            }
            Err(Refusal::NoMasks) => return Err(ImportError::NoMasks(path.to_path_buf()).into()),
            Err(Refusal::Io(error)) => return Err(reading(path)(error).into()),
        }
        progress.advance(tokens, read_s, started.elapsed().as_secs_f64() - read_s);
        Ok(())
    }
}

/// What a sound file gives.
enum Judged {
    /// A sample, and whether its end was cut off.
    Fresh(CapturedSample, bool),
    /// A sample that the data set has.
    Duplicate(SampleId, bool),
}

/// Everything that a file is held against.
struct Judge<'a> {
    encoder: &'a Encoder,
    spec: &'a CaptureSpec,
    masks: Option<Masks>,
    /// Weight of the target's final norm, [hidden].
    final_norm: Vec<f32>,
}

impl Judge<'_> {
    fn judge(
        &self,
        file: &StatesFile,
        source: &Source,
        seen: &HashSet<SampleId>,
    ) -> Result<Judged, Refusal> {
        let contents = file.contents()?;
        let ids = contents.token_ids(self.spec)?;
        // Before the mask is looked for: this is found out from the header alone.
        let tensor = contents.states_tensor(ids.len(), self.spec)?;
        let Encoded { sample, truncated } = self.sample(&contents, ids, source)?;
        if seen.contains(&sample.id()) {
            return Ok(Judged::Duplicate(sample.id(), truncated));
        }
        let layers = contents.states(tensor, sample.input_ids(), self.spec)?;
        if layers.last().is_some_and(|rows| self.is_normed(rows)) {
            return Err(bad_states(
                "the last state was taken after the final norm, the one before it is expected: \
                 extract it again (vLLM: layer id = number of layers)",
            ));
        }
        let shape = vec![sample.tokens(), self.spec.hidden_size];
        let (mut states, mut errors) = (Vec::new(), Vec::new());
        for (&layer, values) in self.spec.layers.iter().zip(layers) {
            let (rows, error) = values.store(0..shape[0], shape[1], self.spec.dtype);
            errors.extend(error.map(|error| (layer, error)));
            states.push(LayerState { layer, shape: shape.clone(), rows });
        }
        let captured = CapturedSample::new(sample, self.spec, states, &[]).map_err(|error| {
            let reason = match error {
                ContractError::NonFinite { .. } => RejectReason::NonFinite,
                _ => RejectReason::BadStates,
            };
            Refusal::Fault(Fault::new(reason, error.to_string()))
        })?;
        Ok(Judged::Fresh(captured.with_storage_errors(errors), truncated))
    }

    /// Ids and mask: the file's own mask, or that of the prompt with these ids.
    fn sample(
        &self,
        contents: &Contents<'_>,
        ids: Vec<u32>,
        source: &Source,
    ) -> Result<Encoded, Refusal> {
        if let Some(loss_mask) = contents.loss_mask(ids.len())? {
            let body = Body::Tokens { input_ids: ids, loss_mask };
            let row = Conversation { source: source.clone(), body };
            let reject = |reject: crate::reject::Reject| Fault::new(reject.reason, reject.detail);
            return self.encoder.encode(&row).map_err(|it| Refusal::Fault(reject(it)));
        }
        let vocab_size = self.encoder.options().vocab_size.unwrap_or(usize::MAX);
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocab_size) {
            let detail = format!("token_ids[{at}] is {}; the model has {vocab_size} ids", ids[at]);
            return Err(Refusal::Fault(Fault::new(RejectReason::IdOutOfVocab, detail)));
        }
        let masks = self.masks.as_ref().ok_or(Refusal::NoMasks)?;
        let missing = |detail| Refusal::Fault(Fault::new(RejectReason::NoLossMask, detail));
        masks.find(&ids).cloned().map_err(missing)
    }

    fn is_normed(&self, rows: &LayerRows) -> bool {
        let values = rows.to_f32();
        let mut rows = values.chunks_exact(self.final_norm.len().max(1));
        rows.len() >= NORMED_ROWS
            && rows.all(|row| {
                let weighted = row.iter().zip(&self.final_norm).filter(|(_, w)| w.abs() > 1e-6);
                let (squares, count) = weighted.fold((0.0, 0.0), |(squares, count), (&x, &w)| {
                    (squares + f64::from(x / w).powi(2), count + 1.0)
                });
                ((squares / count).sqrt() - 1.0).abs() < NORMED_DIFFERENCE
            })
    }
}

fn bad_states(detail: impl Into<String>) -> Refusal {
    Refusal::Fault(Fault::new(RejectReason::BadStates, detail))
}

fn reading(path: &Path) -> impl FnOnce(io::Error) -> ImportError {
    move |source| ImportError::Read { path: path.to_path_buf(), source }
}
