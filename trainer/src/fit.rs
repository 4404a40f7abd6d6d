//! The training loop: data set -> loader -> training-time test -> optimizer -> acceptance ->
//! checkpoint -> report. Knows no file format and no arithmetic of the draft.

mod error;
mod identity;
mod session;
mod split;
mod stall;
mod step;

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use serde::Serialize;

pub use self::error::FitError;
pub use self::session::{Session, frozen_target, ttt_options};
pub use self::stall::InputTimes;
pub use self::step::{StepOutcome, TrainState};
use crate::acceptance::{EvaluateError, Evaluation};
use crate::checkpoint::{Checkpoint, Computed, RunDir, RunLock};
use crate::config::{ConfigError, FitConfig};
use crate::dataset::ManifestDataset;
use crate::exchange::ExchangeOps;
use crate::input::InputOps;
use crate::ops::{DraftOps, HandOver};
use crate::run_log::RunLog;
use crate::vocab::VocabMap;
use crate::watch::{Phase, Watch};
use crate::world::World;

/// Whether a run starts or continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// From fresh weights; a run directory with checkpoints is refused.
    Fresh,
    /// From the newest checkpoint of the run directory.
    Resume,
}

impl Start {
    /// Checks the settings; a run that was begun may have some that a new one may not.
    pub fn check(self, config: &FitConfig) -> Result<(), ConfigError> {
        match self {
            Self::Fresh => config.validate_new(),
            Self::Resume => config.validate(),
        }
    }
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitReport {
    /// Optimizer steps taken in all.
    pub steps: u64,
    /// Of these, in this process.
    pub new_steps: u64,
    /// Whether it was asked to stop before the last step.
    pub stopped: bool,
    /// Tokens of the batches of these new steps, over all processes of the run.
    pub tokens: u64,
    /// Wall time of this process's loop.
    pub seconds: f64,
    /// Of it, seconds spent waiting for input.
    pub seconds_waited: f64,
    /// Share of the trained tokens the draft vocabulary covers.
    pub vocab_coverage: f64,
    /// Samples trained on and held out.
    pub samples: (usize, usize),
    /// Newest checkpoint.
    pub checkpoint: PathBuf,
    /// Best checkpoint by acceptance on held-out samples.
    pub best: PathBuf,
    /// Its expected acceptance length, the bonus token included; `None` without held-out samples.
    pub acceptance_length: Option<f64>,
}

/// Trains a draft as configured and keeps its checkpoints in the run directory. States and products
/// are of type `dtype`, sums of the optimizer in f32. Every process of `world` calls this; the
/// first one writes. Ends after the step in work, with a checkpoint, when `stop` is requested in
/// any process, and tells `watch` how it goes on.
pub fn run<B>(
    config: &FitConfig,
    (start, world): (Start, &World),
    place: (&B::Device, FloatDType),
    (stop, watch): (&Shutdown, &Watch),
) -> Result<FitReport, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    start.check(config)?;
    let run = RunDir::new(&config.checkpoint.run_dir);
    let _lock = claim(&run, start, world)?;
    watch.at(Phase::Data, 0);
    let session = open::<B>(config, &run, (start, world, watch), place)?;
    // Each reads the data set in its own time; from here on they go together.
    together(world, watch)?;
    watch.at(Phase::Start, 0);
    let mut state = begin(&session, &run, (start, world, watch))?;
    let mut loader = session.loader(state.loader, world)?;
    let mut log = open_log(&session, &run, (&state, start))?;
    let mut done = Done::before(state.step);
    resume_evaluation(&session, &mut state, (&mut log, start, stop))?;
    let mut saved = start == Start::Resume;
    while state.step < session.total_steps {
        // All end after the same step, whenever the signal comes to each. The first may still be
        // writing a checkpoint: its own watch ends that.
        watch.rest();
        done.stopped = world.any(stop.requested())?;
        if done.stopped {
            break;
        }
        watch.at(Phase::Step, state.step + 1);
        let Some(group) = state.next_group(&mut loader, config.train.accumulate)? else { break };
        let outcome = state.train(&session, group)?;
        let stall = done.step(&outcome, &state.input);
        if let Some(log) = &mut log {
            log.record(state.step, outcome.record(done.tokens_per_second(), stall))?;
        }
        saved = evaluate_and_save(&session, &mut state, (&mut log, &run, stop))?;
        if let Some(log) = &mut log {
            log.progress(state.step, &outcome.summary(state.best, stall));
        }
    }
    if !saved {
        save(&session, &state, &run)?;
    }
    // The others have to find what the first one reports.
    together(world, watch)?;
    Ok(report(&session, &state, (&run, &log, done)))
}

/// What this process did in its loop.
struct Done {
    clock: Instant,
    first_step: u64,
    stopped: bool,
    tokens: u64,
    /// Steps without a trained row.
    empty: u64,
}

impl Done {
    fn before(first_step: u64) -> Self {
        Self { clock: Instant::now(), first_step, stopped: false, tokens: 0, empty: 0 }
    }

    /// Counts a step; the share of the time so far that was spent waiting for input.
    fn step(&mut self, outcome: &StepOutcome, input: &InputTimes) -> f64 {
        self.tokens += outcome.tokens;
        self.empty += u64::from(!outcome.metrics.has_trained_rows());
        input.share(self.clock.elapsed().as_secs_f64())
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.clock.elapsed().as_secs_f64()
    }
}

/// Takes the run directory for this run, in the first process.
fn claim(run: &RunDir, start: Start, world: &World) -> Result<Option<RunLock>, FitError> {
    if start == Start::Resume {
        // Of a directory without a run nothing is made.
        run.latest()?;
    }
    Ok(world.is_first().then(|| run.claim()).transpose()?)
}

/// Waits for the other processes.
fn together(world: &World, watch: &Watch) -> Result<(), FitError> {
    watch.rest();
    world.from_first(0.0)?;
    Ok(())
}

/// Fresh weights or those of the newest checkpoint, of the same step in all processes.
fn begin<B>(
    session: &Session<B>,
    run: &RunDir,
    (start, world, watch): (Start, &World, &Watch),
) -> Result<TrainState<B>, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let mut state = TrainState::start(session, run, (start, world))?;
    state.watch = watch.clone();
    let expected = world.from_first(state.step as f64)? as u64;
    match state.step == expected {
        true => Ok(state),
        false => Err(FitError::OtherStep { expected, found: state.step }),
    }
}

/// The first process's log.
fn open_log<B>(
    session: &Session<B>,
    run: &RunDir,
    (state, start): (&TrainState<B>, Start),
) -> Result<Option<RunLog>, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    if !state.shards.world().is_first() {
        return Ok(None);
    }
    if start == Start::Fresh {
        run.set_metrics_aside()?;
    }
    // An evaluation that is not made again keeps its record.
    let evaluated = state.acceptance_length.is_some() || !evaluation_is_due(session, state);
    Ok(Some(RunLog::open(&run.metrics(), (state.step, evaluated), session.total_steps)?))
}

/// What came of the run; warns of what its user may want to change.
fn report<B>(
    session: &Session<B>,
    state: &TrainState<B>,
    (run, log, done): (&RunDir, &Option<RunLog>, Done),
) -> FitReport
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let (seconds, new_steps) = (done.clock.elapsed().as_secs_f64(), state.step - done.first_step);
    if let Some(why) = state.input.explain(seconds) {
        tracing::warn!("{why}");
    }
    if let Some(log) = log {
        log.finish();
        if done.empty > 0 {
            tracing::warn!(
                "{} of {new_steps} steps had no trained row and changed nothing: raise \
                    data.max_tokens or train.accumulate, or leave samples without answers out; \
                    with mask_mode = \"specforge\" also where the draft vocabulary lacks what the \
                    target says",
                done.empty
            );
        }
    }
    FitReport {
        steps: state.step,
        new_steps,
        stopped: done.stopped,
        tokens: done.tokens,
        seconds,
        seconds_waited: state.input.waited(),
        vocab_coverage: session.vocab.coverage(),
        samples: (session.split.train.len(), session.split.held_out.len()),
        // Not looked up: only the first process need see what it wrote.
        checkpoint: run.checkpoint(state.step),
        best: run.checkpoint(state.best.map_or(state.step, |best| best.step)),
        acceptance_length: state.best.map(|best| best.acceptance_length),
    }
}

/// The data set and what follows from it, if the run may start or go on with it.
fn open<B>(
    config: &FitConfig,
    run: &RunDir,
    (start, world, watch): (Start, &World, &Watch),
    place: (&B::Device, FloatDType),
) -> Result<Session<B>, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let dataset = ManifestDataset::open(&config.data.dataset)?;
    check_start(config, (run, &dataset), (start, world), Computed::on::<B>(place.1))?;
    let kept = if start == Start::Resume { kept_vocab(run)? } else { None };
    Session::over(dataset, config, (world.size(), kept, watch), place)
}

/// Refuses what can be refused before any shard is read.
fn check_start(
    config: &FitConfig,
    (run, dataset): (&RunDir, &ManifestDataset),
    (start, world): (Start, &World),
    computed: Computed,
) -> Result<(), FitError> {
    let (accumulate, size) = (config.train.accumulate, world.size());
    if !accumulate.is_multiple_of(size) {
        return Err(FitError::Accumulate { accumulate, size });
    }
    match start {
        Start::Fresh if run.all_steps()?.is_empty() => Ok(()),
        Start::Fresh => Err(FitError::RunExists { path: run.root().to_owned() }),
        Start::Resume => identity::require_same_run(config, (run, dataset), computed),
    }
}

/// The draft vocabulary of a run that continues: its samples have been compared, so their tokens
/// need not be counted again. `None` where the checkpoint is too old to tell.
fn kept_vocab(run: &RunDir) -> Result<Option<VocabMap>, FitError> {
    let latest = run.latest()?;
    let state = Checkpoint::load_state(&latest)?;
    Ok(state.samples.is_some().then(|| Checkpoint::load_vocab(&latest, &state)).transpose()?)
}

/// Evaluates and saves where the settings, the end of the run or a better draft ask for it; true
/// when it has saved.
fn evaluate_and_save<B>(
    session: &Session<B>,
    state: &mut TrainState<B>,
    (log, run, stop): (&mut Option<RunLog>, &RunDir, &Shutdown),
) -> Result<bool, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let (last, keep) = (state.step == session.total_steps, &session.config.checkpoint);
    let mut improved = false;
    if last || state.step.is_multiple_of(keep.eval_every) {
        // Of a finished run the last evaluation belongs to the result.
        improved = evaluate(session, state, (log, (!last).then_some(stop)))?;
    }
    if !last && !improved && !state.step.is_multiple_of(keep.checkpoint_every) {
        return Ok(false);
    }
    tracing::trace!(target: "aerie::steps", step = state.step, "checkpoint");
    save(session, state, run)?;
    tracing::trace!(target: "aerie::steps", step = state.step, "prune");
    if state.shards.world().is_first() {
        run.prune(keep.keep_last, state.best)?;
    }
    Ok(true)
}

/// Makes up for an evaluation that the stop of the earlier process cut off.
fn resume_evaluation<B>(
    session: &Session<B>,
    state: &mut TrainState<B>,
    (log, start, stop): (&mut Option<RunLog>, Start, &Shutdown),
) -> Result<(), FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    let due = evaluation_is_due(session, state);
    if start == Start::Resume && due && state.step > 0 && state.acceptance_length.is_none() {
        evaluate(session, state, (log, Some(stop)))?;
    }
    Ok(())
}

fn evaluation_is_due<B>(session: &Session<B>, state: &TrainState<B>) -> bool
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    state.step.is_multiple_of(session.config.checkpoint.eval_every)
}

/// Evaluates on the first process and tells the others; true for the best so far. Without a result
/// where `stop` cuts it off.
fn evaluate<B>(
    session: &Session<B>,
    state: &mut TrainState<B>,
    (log, stop): (&mut Option<RunLog>, Option<&Shutdown>),
) -> Result<bool, FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    if session.split.held_out.is_empty() {
        return Ok(false);
    }
    state.watch.at(Phase::Evaluation, state.step);
    let draft = state.evaluated()?;
    let mut length = f64::NAN;
    if let Some(log) = log {
        match session.evaluate(&draft, (&state.watch, stop)) {
            Ok(Some(evaluation)) => {
                length = evaluation.all.acceptance_length;
                log.record(state.step, evaluation_record(&evaluation))?;
            }
            Ok(None) | Err(FitError::Evaluate(EvaluateError::Stopped)) => {}
            Err(error) => return Err(error),
        }
    }
    state.watch.rest();
    let length = state.shards.world().from_first(length)?;
    Ok(!length.is_nan() && state.judge(length))
}

/// Gathers a checkpoint from all processes; the first one writes it.
fn save<B>(session: &Session<B>, state: &TrainState<B>, run: &RunDir) -> Result<(), FitError>
where
    B: HandOver + DraftOps + InputOps,
    B::InnerBackend: DraftOps + ExchangeOps,
{
    if let Some(checkpoint) = state.checkpoint(session)? {
        checkpoint.save(run)?;
    }
    Ok(())
}

fn evaluation_record(evaluation: &Evaluation) -> crate::run_log::Record {
    let mut record = crate::run_log::Record::new();
    let all = &evaluation.all;
    record.insert("eval/acceptance_length".into(), all.acceptance_length.into());
    record.insert("eval/accepted_drafts".into(), all.accepted_drafts.into());
    for (name, values) in [
        ("eval/acc", &all.acc),
        ("eval/full_acc", &all.full_acc),
        ("eval/alpha", &all.alpha),
        ("eval/loss", &all.loss),
    ] {
        crate::run_log::put_depths(&mut record, name, values);
    }
    record
}
