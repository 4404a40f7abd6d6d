//! The training loop: data set -> loader -> training-time test -> optimizer -> acceptance ->
//! checkpoint -> report. Knows no file format and no arithmetic of the draft.

mod error;
mod session;
mod step;

use std::path::PathBuf;

use burn::tensor::FloatDType;
use burn::tensor::backend::AutodiffBackend;
use extractor::shutdown::Shutdown;
use serde::Serialize;

pub use self::error::FitError;
pub use self::session::{Session, frozen_target, mapping, ttt_options};
pub use self::step::TrainState;
use crate::acceptance::Evaluation;
use crate::checkpoint::RunDir;
use crate::config::FitConfig;
use crate::ops::DraftOps;
use crate::run_log::RunLog;

/// Whether a run starts or continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// From fresh weights; a run directory with checkpoints is refused.
    Fresh,
    /// From the newest checkpoint of the run directory.
    Resume,
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
    /// Tokens of the batches of this process.
    pub tokens: u64,
    /// Wall time of this process's loop.
    pub seconds: f64,
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
/// are of type `dtype`, sums of the optimizer in f32.
pub fn run<B>(
    config: &FitConfig,
    start: Start,
    place: (&B::Device, FloatDType),
) -> Result<FitReport, FitError>
where
    B: AutodiffBackend + DraftOps,
    B::InnerBackend: DraftOps,
{
    run_until::<B>(config, start, place, &Shutdown::default())
}

/// [`run`] that ends after the step in work, with a checkpoint, when `stop` is requested.
pub fn run_until<B>(
    config: &FitConfig,
    start: Start,
    (device, dtype): (&B::Device, FloatDType),
    stop: &Shutdown,
) -> Result<FitReport, FitError>
where
    B: AutodiffBackend + DraftOps,
    B::InnerBackend: DraftOps,
{
    config.validate()?;
    let run = RunDir::new(&config.checkpoint.run_dir);
    let _lock = run.claim()?;
    let session = Session::<B>::open(config, (device, dtype))?;
    let mut state = TrainState::start(&session, &run, start)?;
    let mut loader = session.loader(state.loader);
    let mut log = RunLog::open(&run.metrics(), state.step, session.total_steps)?;
    let clock = std::time::Instant::now();
    let (first_step, mut tokens) = (state.step, 0);

    while state.step < session.total_steps && !stop.requested() {
        let Some(group) = state.next_group(&mut loader, config.train.accumulate)? else { break };
        let outcome = state.train(&session, group)?;
        tokens += outcome.tokens;
        log.record(state.step, outcome.record(tokens as f64 / clock.elapsed().as_secs_f64()))?;
        let last = state.step == session.total_steps;
        let keep = &config.checkpoint;
        let mut improved = false;
        if (last || state.step.is_multiple_of(keep.eval_every))
            && let Some(evaluation) = session.evaluate(&state.draft)?
        {
            improved = state.judge(&evaluation);
            log.record(state.step, evaluation_record(&evaluation))?;
        }
        if last || improved || state.step.is_multiple_of(keep.checkpoint_every) {
            tracing::trace!(target: "aerie::steps", step = state.step, "checkpoint");
            state.checkpoint(&session).save(&run)?;
            tracing::trace!(target: "aerie::steps", step = state.step, "prune");
            run.prune(keep.keep_last, state.best)?;
        }
        log.progress(state.step, &outcome.summary(&state));
    }
    log.finish();
    if run.steps()?.last() != Some(&state.step) {
        state.checkpoint(&session).save(&run)?;
    }
    Ok(FitReport {
        steps: state.step,
        new_steps: state.step - first_step,
        stopped: stop.requested() && state.step < session.total_steps,
        tokens,
        seconds: clock.elapsed().as_secs_f64(),
        vocab_coverage: session.vocab.coverage(),
        samples: (session.split.train.len(), session.split.held_out.len()),
        checkpoint: run.latest()?,
        best: state.best.map_or(run.latest()?, |best| run.checkpoint(best.step)),
        acceptance_length: state.best.map(|best| best.acceptance_length),
    })
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
