//! What changes during a run, one optimizer step at a time. Knows no files but through
//! checkpoints.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Distribution, FloatDType, Tensor};
use shared::SampleId;

use super::{FitError, InputTimes, Session, Start, identity};
use crate::batch::TrainBatch;
use crate::checkpoint::{
    Best, Checkpoint, CheckpointState, Computed, FIRST, Parts, RunDir, SECOND, TRAINED,
    exact_in_json,
};
use crate::collate::HostBatch;
use crate::config::{FitConfig, LmHeadInit, MaskMode, NoiseKind};
use crate::draft::Eagle3Draft;
use crate::exchange::ExchangeOps;
use crate::input::{InputOps, RoomOf};
use crate::loader::{Loader, LoaderState};
use crate::metrics::TttMetrics;
use crate::ops::{DraftOps, HandOver};
use crate::optimizer::{AdamW, AdamWConfig, Kept, Named};
use crate::reduction::Reduction;
use crate::run_log::{Record, put_depths};
use crate::schedule::Schedule;
use crate::shards::Shards;
use crate::tensors::{HostTensor, TensorFile};
use crate::ttt::{TttError, TttOptions, step_rows, ttt_step};
use crate::watch::{Phase, Watch};
use crate::world::World;

/// Held during a training step. burn 0.21 keeps one graph for the process: a thread that tidies it
/// up can take away a step that another thread has yet to run, and a gradient then silently lacks
/// one of its parts (seen about once in 1,500 steps on four threads).
static GRAPH: Mutex<()> = Mutex::new(());

/// Weights, moments and position of a run.
#[derive(Debug)]
pub struct TrainState<B: AutodiffBackend<InnerBackend: ExchangeOps>> {
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
    /// Times of the input in this process.
    pub input: InputTimes,
    /// What the processes of the run keep of it.
    pub shards: Shards<B::InnerBackend>,
    /// Told how steps, evaluations and checkpoints go on.
    pub watch: Watch,
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
    /// The line of metrics.jsonl; `stall` is the share of the time spent waiting for input. Of a
    /// step without trained rows nothing was measured.
    pub fn record(&self, tokens_per_second: f64, stall: f64) -> Record {
        let mut record = Record::new();
        if self.metrics.has_trained_rows() {
            record.insert("train/loss".into(), self.loss.into());
            put_depths(&mut record, "train/acc", &self.metrics.acc());
            record.insert("train/accepted_drafts".into(), self.metrics.accept_len().into());
            record.insert("grad_norm".into(), self.grad_norm.into());
        }
        record.insert("train/rows".into(), self.metrics.step_rows.first().copied().into());
        record.insert("lr".into(), self.rate.into());
        record.insert("perf/tokens_per_second".into(), tokens_per_second.round().into());
        record.insert("perf/input_stall".into(), stall.into());
        record
    }

    /// A few words for the progress line.
    pub fn summary(&self, best: Option<Best>, stall: f64) -> String {
        let best = best.map_or(String::new(), |best| {
            format!("  best acceptance {:.3} at step {}", best.acceptance_length, best.step)
        });
        let first = self.metrics.acc().first().copied().unwrap_or_default();
        let trained = match self.metrics.has_trained_rows() {
            true => format!("loss {:.3}  acc_0 {first:.3}", self.loss),
            false => "no trained row".to_owned(),
        };
        format!("{trained}  input stall {:.1} %{best}", 100.0 * stall)
    }
}

impl<B> TrainState<B>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    /// Fresh weights, or those of the newest checkpoint.
    pub fn start(
        session: &Session<B>,
        run: &RunDir,
        (start, world): (Start, &World),
    ) -> Result<Self, FitError> {
        let (shapes, transport) = (session.draft.parameter_shapes(), session.config.train.exchange);
        let shards = Shards::join(world, &session.device, (&shapes, session.dtype, transport))?;
        match start {
            Start::Fresh => Self::fresh(session, shards),
            Start::Resume => Self::resume(session, run, shards),
        }
    }

    fn fresh(session: &Session<B>, shards: Shards<B::InnerBackend>) -> Result<Self, FitError> {
        let config = &session.config;
        let device = &session.device;
        let init = |sizes| Eagle3Draft::<B::InnerBackend>::init(sizes, config.train.seed, device);
        let mut draft = B::memory_persistent_allocations(device, session.draft.clone(), init)?;
        if config.draft.lm_head_init == LmHeadInit::Target {
            draft = draft.with_lm_head(session.draft_rows_of_lm_head().cast(FloatDType::F32))?;
        }
        let optimizer = AdamW::new(adamw(config), &draft, &shards);
        let average = draft.parameters();
        let (optimizer, draft) = prepared(session, optimizer, (draft, average), &shards);
        Ok(Self {
            optimizer,
            draft,
            step: 0,
            loader: LoaderState::default(),
            best: None,
            acceptance_length: None,
            input: InputTimes::default(),
            shards,
            watch: Watch::default(),
        })
    }

    fn resume(
        session: &Session<B>,
        run: &RunDir,
        shards: Shards<B::InnerBackend>,
    ) -> Result<Self, FitError> {
        let checkpoint = Checkpoint::load(&run.latest()?, Parts::Everything)?;
        let state = &checkpoint.state;
        if state.vocab_digest != session.vocab.digest() {
            let (stored, current) = (state.vocab_digest.clone(), session.vocab.digest().to_owned());
            return Err(FitError::OtherVocab { stored, current });
        }
        identity::require_same_draft(&state.draft, &session.draft)?;
        let (first, second) = checkpoint.moments(&session.device, |whole| shards.keep(whole))?;
        let updates = state.updates.unwrap_or(state.step);
        let optimizer = AdamW::from_moments(adamw(&session.config), updates, first, second);
        let kept = checkpoint.draft(&session.device)?;
        let (draft, average) = match session.config.train.ema > 0.0 {
            true => (checkpoint.trained_draft(&session.device)?, kept.parameters()),
            false => (kept, Vec::new()),
        };
        let (optimizer, draft) = prepared(session, optimizer, (draft, average), &shards);
        Ok(Self {
            draft,
            optimizer,
            step: state.step,
            loader: state.loader,
            best: run.existing(state.best),
            acceptance_length: state.acceptance_length,
            input: InputTimes::default(),
            shards,
            watch: Watch::default(),
        })
    }

    /// This process's batches of the next optimizer step, which takes up to `count` over all
    /// processes, never across epochs; `None` after the last.
    pub fn next_group(
        &mut self,
        loader: &mut Loader<RoomOf<B>>,
        count: usize,
    ) -> Result<Option<Vec<HostBatch<RoomOf<B>>>>, FitError> {
        let (mut group, mut taken) = (Vec::new(), 0);
        let epoch = self.loader.epoch;
        while taken < count && self.loader.epoch == epoch {
            let clock = Instant::now();
            let Some(loaded) = loader.next_batch()? else { break };
            self.watch.goes_on();
            if let Some(batch) = loaded.batch {
                self.input.add(clock.elapsed().as_secs_f64(), loaded.seconds);
                group.push(batch);
            }
            self.loader = loaded.next;
            taken += 1;
        }
        Ok((taken > 0).then_some(group))
    }

    /// One optimizer step over this process's group of batches. A loss or gradient that is not
    /// finite is an error before anything has changed.
    pub fn train(
        &mut self,
        session: &Session<B>,
        group: Vec<HostBatch<RoomOf<B>>>,
    ) -> Result<StepOutcome, FitError> {
        let world = self.shards.world().clone();
        let divisors = group_divisors(session, &group, &world)?;
        let options = TttOptions { divisors: Some(divisors.clone()), ..session.options.clone() };
        let Passed { gradients, mut metrics, tokens } = self.passes(session, group, &options)?;
        let mut sums = metrics.sums();
        sums.push(tokens as f64);
        world.sum(&mut sums)?;
        metrics.set_sums(&sums);
        metrics.step_divisor = divisors;
        let (rate, grad_norm) = self.update(session, &gradients, metrics.has_trained_rows())?;
        let loss = metrics.loss(options.step_decay);
        let tokens = sums.last().map_or(0, |&tokens| tokens as u64);
        Ok(StepOutcome { loss, metrics, grad_norm, rate, tokens })
    }

    /// Forward and backward over the batches.
    fn passes(
        &self,
        session: &Session<B>,
        group: Vec<HostBatch<RoomOf<B>>>,
        options: &TttOptions,
    ) -> Result<Passed<B::InnerBackend>, FitError> {
        let _alone = GRAPH.lock().unwrap_or_else(PoisonError::into_inner);
        let frozen = self.optimizer.frozen();
        let mut passed = Passed {
            gradients: Arc::new(Reduction::new(&self.draft, &self.shards, frozen)),
            metrics: TttMetrics::zeros(options.steps),
            tokens: 0,
        };
        let mut after = group.len();
        for host in group {
            after -= 1;
            passed.tokens += host.tokens.rows() as u64;
            let samples = host.samples.clone();
            let [aux, last_hidden] = B::unpack(host.states, (&session.device, session.dtype));
            let aux = noisy::<B>(aux, &session.config, (self.step, &samples));
            let batch = TrainBatch::new(host.tokens, aux, last_hidden)?;
            let tracked = Eagle3Draft::<B>::tracked(&self.draft);
            let _counting = if after == 0 { passed.gradients.follow(&tracked) } else { None };
            let mut output = ttt_step(&tracked, &session.frozen, &batch, options)?;
            // The backward pass goes to the device before the host waits for the loss.
            let mut back = output.backward();
            output.fetch();
            let mut sums = output.metrics();
            sums.step_divisor = options.divisors.clone().unwrap_or_default();
            let loss = sums.loss(options.step_decay);
            if !loss.is_finite() {
                let samples = samples.iter().map(ToString::to_string).collect::<Vec<_>>();
                let samples = samples.join(", ");
                return Err(FitError::LossNotFinite { step: self.step, loss, samples });
            }
            passed.gradients.add(tracked.received(&mut back));
            passed.metrics.add(&sums);
            self.watch.goes_on();
        }
        Ok(passed)
    }

    /// Takes the step; rate and gradient norm. Of a step in which no process has `trained` a row
    /// nothing asks for an update: decay and moments alone would move the weights.
    fn update(
        &mut self,
        session: &Session<B>,
        gradients: &Reduction<B::InnerBackend>,
        trained: bool,
    ) -> Result<(f64, f64), FitError> {
        let train = &session.config.train;
        let schedule = Schedule {
            peak: train.lr,
            warmup_steps: train.warmup_steps,
            total_steps: session.total_steps,
            decay: train.schedule,
            floor: train.lr_floor,
            milestones: (train.lr_milestones.clone(), train.lr_factor),
        };
        let rate = schedule.rate(self.step);
        let step = (rate, &self.shards);
        let gradients = B::on_device(&session.device, || gradients.finish(&self.draft))?;
        let norm = match trained {
            true => {
                let updated = self.optimizer.update(&mut self.draft, gradients, step);
                updated.map_err(|error| error.in_step(self.step))?
            }
            false => 0.0,
        };
        if let Some(fault) = B::InnerBackend::fault(&session.device) {
            return Err(TttError::from(fault).into());
        }
        self.step += 1;
        self.acceptance_length = None;
        Ok((rate, norm))
    }

    /// Notes the acceptance length of the present weights; true when they are the best so far.
    pub fn judge(&mut self, acceptance_length: f64) -> bool {
        let acceptance_length = exact_in_json(acceptance_length);
        self.acceptance_length = Some(acceptance_length);
        let better = self.best.is_none_or(|best| acceptance_length > best.acceptance_length);
        if better {
            self.best = Some(Best { step: self.step, acceptance_length });
        }
        better
    }

    /// Everything needed to continue from here, on the first process; `None` on the others. All
    /// take part. Values that are not finite are an error.
    pub fn checkpoint(&self, session: &Session<B>) -> Result<Option<Checkpoint>, FitError> {
        let (mut weights, mut optimizer) = (TensorFile::default(), TensorFile::default());
        let (first, averages) = (self.shards.world().is_first(), self.optimizer.averages());
        self.watch.at(Phase::Checkpoint, self.step);
        let mut bad = None;
        self.optimizer.each(&self.draft, &self.shards, &mut |what, name, param| {
            self.watch.goes_on();
            if !first {
                return;
            }
            let (file, prefix) = match what {
                Kept::Weight if averages => (&mut optimizer, TRAINED),
                Kept::Weight | Kept::Average => (&mut weights, ""),
                Kept::First => (&mut optimizer, FIRST),
                Kept::Second => (&mut optimizer, SECOND),
            };
            let (name, values) = (format!("{prefix}{name}"), param.to_vec());
            if !values.iter().all(|value| value.is_finite()) {
                bad.get_or_insert_with(|| name.clone());
            }
            file.tensors.insert(name, HostTensor::f32(&values, &param.shape()));
        })?;
        if let Some(name) = bad {
            return Err(FitError::StateNotFinite { step: self.step, name });
        }
        if !first {
            return Ok(None);
        }
        Ok(Some(Checkpoint {
            state: CheckpointState {
                format: 1,
                step: self.step,
                updates: Some(self.optimizer.steps()).filter(|&updates| updates != self.step),
                loader: self.loader,
                seed: session.config.train.seed,
                total_steps: session.total_steps,
                acceptance_length: self.acceptance_length,
                best: self.best,
                draft: session.draft.clone(),
                layers: session.dataset.spec().layers.clone(),
                target: session.target.raw().clone(),
                vocab_digest: session.vocab.digest().to_owned(),
                vocab_coverage: exact_in_json(session.vocab.coverage()),
                dataset_fingerprint: session.dataset.fingerprint().to_string(),
                samples: Some(session.dataset.sample_set()),
                computed: Some(Computed::on::<B>(session.dtype)),
            },
            config: session.config.clone(),
            weights,
            optimizer: Some(optimizer),
            vocab: session.vocab.clone(),
            golden: session.golden.clone(),
        }))
    }

    /// The draft to evaluate: the average where one is kept. All processes take part.
    pub fn evaluated(&self) -> Result<Eagle3Draft<B::InnerBackend>, FitError> {
        let Some(average) = self.optimizer.average(&self.draft, &self.shards)? else {
            return Ok(self.draft.clone());
        };
        let dtype = self.draft.dtype();
        let mut average = average.into_iter();
        let averaged = self.draft.map(|_, old| average.next().map_or(old, |(_, param)| param));
        Ok(averaged.with_dtype(dtype))
    }
}

/// Adds the noise that seed, step and samples decide.
fn noisy<B: Backend>(
    aux: Tensor<B, 2>,
    config: &FitConfig,
    (step, samples): (u64, &[SampleId]),
) -> Tensor<B, 2> {
    let (size, kind) = (config.train.noise, config.train.noise_kind);
    if size == 0.0 {
        return aux;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"noise").update(&config.train.seed.to_le_bytes()).update(&step.to_le_bytes());
    samples.iter().for_each(|id| {
        hasher.update(&id.0);
    });
    let mut seed = [0; 8];
    hasher.finalize_xof().fill(&mut seed);
    let distribution = match kind {
        NoiseKind::Uniform => Distribution::Uniform(-size, size),
        NoiseKind::Normal => Distribution::Normal(0.0, size),
    };
    let device = aux.device();
    B::seed(&device, u64::from_le_bytes(seed));
    let noise = Tensor::<B, 2>::random(aux.dims(), distribution, (&device, DType::F32));
    let dtype = FloatDType::from(aux.dtype());
    aux + noise.cast(dtype)
}

/// What the passes over a group of batches gave.
struct Passed<B: ExchangeOps> {
    gradients: Arc<Reduction<B>>,
    metrics: TttMetrics,
    tokens: u64,
}

/// The optimizer's part of this process, and the draft to compute with.
fn prepared<B>(
    session: &Session<B>,
    mut optimizer: AdamW<B::InnerBackend>,
    (draft, average): (Eagle3Draft<B::InnerBackend>, Named<B::InnerBackend>),
    shards: &Shards<B::InnerBackend>,
) -> (AdamW<B::InnerBackend>, Eagle3Draft<B::InnerBackend>)
where
    B: AutodiffBackend,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let config = &session.config;
    if config.train.ema > 0.0 {
        optimizer = optimizer.with_average(config.train.ema, average, shards);
    }
    optimizer.with_working_copy(draft, (session.dtype, shards))
}

fn adamw(config: &FitConfig) -> AdamWConfig {
    let train = &config.train;
    AdamWConfig {
        beta1: train.beta1,
        beta2: train.beta2,
        eps: train.adam_eps,
        weight_decay: train.weight_decay,
        clip: train.clip,
        frozen: config.draft.frozen(),
    }
}

/// Rows each step's loss sum is divided by, over all batches of the group in all processes.
fn group_divisors<B: AutodiffBackend, M>(
    session: &Session<B>,
    group: &[HostBatch<M>],
    world: &World,
) -> Result<Vec<f64>, FitError> {
    let steps = session.options.steps;
    let mut total = vec![0.0; steps];
    for batch in group {
        let rows = match session.config.train.mask_mode {
            MaskMode::Chain => step_rows(&batch.tokens, steps),
            MaskMode::SpecForge => vec![batch.tokens.rows() as u64; steps],
        };
        total.iter_mut().zip(rows).for_each(|(total, rows)| *total += rows as f64);
    }
    world.sum(&mut total)?;
    Ok(total.into_iter().map(|rows| rows.max(1.0)).collect())
}
