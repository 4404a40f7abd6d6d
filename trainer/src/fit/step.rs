//! What changes during a run, one optimizer step at a time. Knows no files but through
//! checkpoints.

use std::sync::{Mutex, PoisonError};

use burn::tensor::FloatDType;
use burn::tensor::backend::AutodiffBackend;

use super::{FitError, Session, Start};
use crate::acceptance::Evaluation;
use crate::checkpoint::{Best, Checkpoint, CheckpointState, Parts, RunDir, to_tensors};
use crate::collate::HostBatch;
use crate::config::{ConfigError, FitConfig, LmHeadInit, MaskMode};
use crate::draft::Eagle3Draft;
use crate::loader::{Loader, LoaderState};
use crate::metrics::TttMetrics;
use crate::ops::DraftOps;
use crate::optimizer::{AdamW, AdamWConfig, Named, add_scaled};
use crate::run_log::{Record, put_depths};
use crate::schedule::Schedule;
use crate::tensors::TensorFile;
use crate::ttt::{TttError, TttOptions, step_rows, ttt_step};

/// Held during a training step. burn 0.21 keeps one graph for the process: a thread that tidies it
/// up can take away a step that another thread has yet to run, and a gradient then silently lacks
/// one of its parts (seen about once in 1,500 steps on four threads).
static GRAPH: Mutex<()> = Mutex::new(());

/// Weights, moments and position of a run.
#[derive(Debug)]
pub struct TrainState<B: AutodiffBackend> {
    /// Parameters.
    pub draft: Eagle3Draft<B::InnerBackend>,
    /// Moments.
    pub optimizer: AdamW<B::InnerBackend>,
    /// Optimizer steps taken.
    pub step: u64,
    /// Next batch.
    pub loader: LoaderState,
    /// Best evaluation so far.
    pub best: Option<Best>,
    /// Acceptance length of the present weights, if just measured.
    pub acceptance_length: Option<f64>,
}

/// Numbers of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Loss as minimised.
    pub loss: f64,
    /// Sums of all its batches.
    pub metrics: TttMetrics,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub rate: f64,
    /// Tokens of its batches.
    pub tokens: u64,
}

impl StepOutcome {
    /// The line of metrics.jsonl.
    pub fn record(&self, tokens_per_second: f64) -> Record {
        let mut record = Record::new();
        record.insert("train/loss".into(), self.loss.into());
        put_depths(&mut record, "train/acc", &self.metrics.acc());
        record.insert("train/accepted_drafts".into(), self.metrics.accept_len().into());
        record.insert("train/rows".into(), self.metrics.step_rows.first().copied().into());
        record.insert("lr".into(), self.rate.into());
        record.insert("grad_norm".into(), self.grad_norm.into());
        record.insert("perf/tokens_per_second".into(), tokens_per_second.round().into());
        record
    }

    /// A few words for the progress line.
    pub fn summary<B: AutodiffBackend>(&self, state: &TrainState<B>) -> String {
        let best = state.best.map_or(String::new(), |best| {
            format!("  best acceptance {:.3} at step {}", best.acceptance_length, best.step)
        });
        let first = self.metrics.acc().first().copied().unwrap_or_default();
        format!("loss {:.3}  acc_0 {first:.3}{best}", self.loss)
    }
}

impl<B> TrainState<B>
where
    B: AutodiffBackend + DraftOps,
    B::InnerBackend: DraftOps,
{
    /// Fresh weights, or those of the newest checkpoint.
    pub fn start(session: &Session<B>, run: &RunDir, start: Start) -> Result<Self, FitError> {
        match start {
            Start::Fresh if !run.steps()?.is_empty() => {
                Err(FitError::RunExists { path: run.root().to_owned() })
            }
            Start::Fresh => Self::fresh(session),
            Start::Resume => Self::resume(session, run),
        }
    }

    fn fresh(session: &Session<B>) -> Result<Self, FitError> {
        let config = &session.config;
        let device = &session.device;
        let init = |sizes| Eagle3Draft::<B::InnerBackend>::init(sizes, config.train.seed, device);
        let mut draft = B::memory_persistent_allocations(device, session.draft.clone(), init)?;
        if config.draft.lm_head_init == LmHeadInit::Target {
            draft = draft.with_lm_head(session.draft_rows_of_lm_head().cast(FloatDType::F32))?;
        }
        let optimizer = AdamW::new(adamw(config), &draft);
        let (optimizer, draft) = optimizer.with_working_copy(draft, session.dtype);
        Ok(Self {
            optimizer,
            draft,
            step: 0,
            loader: LoaderState::default(),
            best: None,
            acceptance_length: None,
        })
    }

    fn resume(session: &Session<B>, run: &RunDir) -> Result<Self, FitError> {
        let checkpoint = Checkpoint::load(&run.latest()?, Parts::Everything)?;
        let changes = session.config.changes_from(&checkpoint.config);
        if !changes.is_empty() {
            return Err(ConfigError::Changed(changes).into());
        }
        let state = &checkpoint.state;
        let current = session.dataset.fingerprint().to_string();
        if state.dataset_fingerprint != current {
            let stored = state.dataset_fingerprint.clone();
            return Err(FitError::OtherDataset { stored, current });
        }
        if state.vocab_digest != session.vocab.digest() {
            let (stored, current) = (state.vocab_digest.clone(), session.vocab.digest().to_owned());
            return Err(FitError::OtherVocab { stored, current });
        }
        let (first, second) = checkpoint.moments(&session.device)?;
        let optimizer = AdamW::from_moments(adamw(&session.config), state.step, first, second);
        let draft = checkpoint.draft(&session.device)?;
        let (optimizer, draft) = optimizer.with_working_copy(draft, session.dtype);
        Ok(Self {
            draft,
            optimizer,
            step: state.step,
            loader: state.loader,
            best: state.best,
            acceptance_length: state.acceptance_length,
        })
    }

    /// The batches of the next optimizer step: up to `count`, never across epochs.
    pub fn next_group(
        &mut self,
        loader: &mut Loader,
        count: usize,
    ) -> Result<Option<Vec<HostBatch>>, FitError> {
        let mut group = Vec::new();
        let epoch = self.loader.epoch;
        while group.len() < count && self.loader.epoch == epoch {
            let Some(loaded) = loader.next_batch()? else { break };
            group.push(loaded.batch);
            self.loader = loaded.next;
        }
        Ok((!group.is_empty()).then_some(group))
    }

    /// One optimizer step over a group of batches. A loss or gradient that is not finite is an
    /// error before anything has changed.
    pub fn train(
        &mut self,
        session: &Session<B>,
        group: Vec<HostBatch>,
    ) -> Result<StepOutcome, FitError> {
        let _alone = GRAPH.lock().unwrap_or_else(PoisonError::into_inner);
        let divisors = group_divisors(session, &group);
        let options = TttOptions { divisors: Some(divisors.clone()), ..session.options.clone() };
        let (mut metrics, mut gradients, mut tokens) = (TttMetrics::default(), None, 0);
        for host in group {
            tokens += host.tokens.rows() as u64;
            let samples = host.samples.clone();
            let batch = host.to_device::<B>(&session.device, session.dtype)?;
            let tracked = Eagle3Draft::<B>::tracked(&self.draft);
            let mut output = ttt_step(&tracked, &session.frozen, &batch, &options)?;
            // The backward pass goes to the device before the host waits for the loss.
            let mut back = output.backward();
            output.fetch();
            let mut sums = output.metrics();
            sums.step_divisor.clone_from(&divisors);
            let loss = sums.loss(options.step_decay);
            if !loss.is_finite() {
                let samples = samples.iter().map(ToString::to_string).collect::<Vec<_>>();
                let samples = samples.join(", ");
                return Err(FitError::LossNotFinite { step: self.step, loss, samples });
            }
            if sums.step_rows.iter().any(|&rows| rows > 0) {
                let more = tracked.gradients(&mut back);
                gradients = Some(match gradients {
                    None => more,
                    total => add_scaled(total, more, 1.0),
                });
            }
            metrics.add(&sums);
        }
        metrics.step_divisor = divisors;
        let (rate, grad_norm) = self.update(session, gradients)?;
        let loss = metrics.loss(options.step_decay);
        Ok(StepOutcome { loss, metrics, grad_norm, rate, tokens })
    }

    fn update(
        &mut self,
        session: &Session<B>,
        gradients: Option<Named<B::InnerBackend>>,
    ) -> Result<(f64, f64), FitError> {
        let train = &session.config.train;
        let schedule = Schedule {
            peak: train.lr,
            warmup_steps: train.warmup_steps,
            total_steps: session.total_steps,
            decay: train.schedule,
            floor: train.lr_floor,
        };
        let rate = schedule.rate(self.step);
        // A group without a trained row still counts as a step, or the schedule would not end.
        let zeros = |(name, param): (String, crate::draft::Param<B::InnerBackend>)| {
            (name, param.zeros_like())
        };
        let gradients =
            gradients.unwrap_or_else(|| self.draft.parameters().into_iter().map(zeros).collect());
        let norm = self.optimizer.update(&mut self.draft, gradients, rate)?;
        if let Some(fault) = B::InnerBackend::fault(&session.device) {
            return Err(TttError::from(fault).into());
        }
        self.step += 1;
        self.acceptance_length = None;
        Ok((rate, norm))
    }

    /// Notes an evaluation of the present weights; true when they are the best so far.
    pub fn judge(&mut self, evaluation: &Evaluation) -> bool {
        let acceptance_length = evaluation.all.acceptance_length;
        self.acceptance_length = Some(acceptance_length);
        let better = self.best.is_none_or(|best| acceptance_length > best.acceptance_length);
        if better {
            self.best = Some(Best { step: self.step, acceptance_length });
        }
        better
    }

    /// Everything needed to continue from here.
    pub fn checkpoint(&self, session: &Session<B>) -> Checkpoint {
        let (mut weights, mut optimizer) = (TensorFile::default(), TensorFile::default());
        to_tensors(&self.optimizer.weights(&self.draft), "", &mut weights);
        let (first, second) = self.optimizer.moments();
        to_tensors(first, "first.", &mut optimizer);
        to_tensors(second, "second.", &mut optimizer);
        Checkpoint {
            state: CheckpointState {
                format: 1,
                step: self.step,
                loader: self.loader,
                seed: session.config.train.seed,
                total_steps: session.total_steps,
                acceptance_length: self.acceptance_length,
                best: self.best,
                draft: session.draft.clone(),
                layers: session.dataset.spec().layers.clone(),
                target: session.target.raw().clone(),
                vocab_digest: session.vocab.digest().to_owned(),
                vocab_coverage: session.vocab.coverage(),
                dataset_fingerprint: session.dataset.fingerprint().to_string(),
            },
            config: session.config.clone(),
            weights,
            optimizer: Some(optimizer),
            vocab: session.vocab.clone(),
            golden: session.golden.clone(),
        }
    }
}

fn adamw(config: &FitConfig) -> AdamWConfig {
    let train = &config.train;
    AdamWConfig {
        beta1: train.beta1,
        beta2: train.beta2,
        eps: train.adam_eps,
        weight_decay: train.weight_decay,
        clip: train.clip,
    }
}

/// Rows each step's loss sum is divided by, over all batches of the group.
fn group_divisors<B: AutodiffBackend>(session: &Session<B>, group: &[HostBatch]) -> Vec<f64> {
    let steps = session.options.steps;
    let mut total = vec![0; steps];
    for batch in group {
        let rows = match session.config.train.mask_mode {
            MaskMode::Chain => step_rows(&batch.tokens, steps),
            MaskMode::SpecForge => vec![batch.tokens.rows() as u64; steps],
        };
        total.iter_mut().zip(rows).for_each(|(total, rows)| *total += rows);
    }
    total.into_iter().map(|rows| rows.max(1) as f64).collect()
}
