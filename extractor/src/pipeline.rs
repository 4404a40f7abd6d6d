//! The whole extraction, in the order in which the data moves.

mod attempts;
mod report;
#[cfg(test)]
mod tests;
mod writer;

use std::time::{Duration, Instant};

use shared::error_chain::in_words;
use shared::manifest::Manifest;

use self::attempts::{Attempts, Opener};
pub(crate) use self::report::Record;
pub use self::report::{Outcome, PipelineError, RunReport};
use self::writer::{Work, Writer};
use crate::address_space;
use crate::config::ExtractConfig;
use crate::encode::Encoder;
use crate::fingerprint::{as_begun, fingerprint};
use crate::intake::{Intake, IntakeError, WorkUnit};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::shutdown::Shutdown;
use crate::sink::ShardSink;
use crate::target::{self, EXIT_DIED, LastResort, TargetSpec};
use crate::target_dir;

/// Time for committing and clearing up after the death of a rank.
const GRACE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// conversation -> tokens + loss mask -> batch -> ranks -> capture -> shard -> manifest
///
/// Rerunning continues: lines that have an outcome are skipped. Stops between batches when asked
/// to, when the target dies, or when an input file has changed; whatever was captured by then is
/// committed. A run that is stopped before its plan is made leaves no record.
pub fn run(config: &ExtractConfig, stop: &Shutdown) -> Result<RunReport, PipelineError> {
    run_with(config, stop, &target::open)
}

fn run_with(
    config: &ExtractConfig,
    stop: &Shutdown,
    open: &Opener<'_>,
) -> Result<RunReport, PipelineError> {
    let model = config.model()?;
    address_space::require(model, config.engine_options()?.all_threads())?;
    let spec = TargetSpec::read(model)?;
    let contract = config.capture_spec(&spec)?;
    let encoder = Encoder::load(model, config.data.encode_options(&spec))?;
    let dataset = config.dataset()?;
    let fingerprint = fingerprint(config, &spec, &encoder, &contract)?;
    let fingerprint = as_begun(fingerprint, &encoder, dataset)?;
    let manifest = Manifest::open_for_write(dataset, &fingerprint, &contract)?;
    let plan = Plan::make(config, &encoder, &contract, Some(&manifest), stop)?;
    if stop.requested() {
        return Ok(RunReport::nothing_done(manifest.conservation()?));
    }
    plan.require_space()?;
    target_dir::publish(manifest.dir(), model, &spec)?;

    let inputs = plan.inputs.iter().map(|input| &input.file);
    let record = Record::begin(&manifest, config, inputs, "lines")?;
    let mut progress = Progress::start(plan.tokens, "target");
    // Outlives the target, whose end may hang.
    let mut last_resort = LastResort::default();
    let (options, layers) = (config.engine_options()?, contract.layers.as_slice());
    let mut attempts = Attempts { open, options, layers, target: None };
    let intake = Intake::open(&config.intake(), &encoder, Some(&manifest))?;
    let intake = intake.within(&plan.inputs).while_not(stop);
    let units = intake.batches(config.run.batch_tokens);
    let (written, ended) = std::thread::scope(|scope| {
        let sink = ShardSink::new(&manifest, config.run.shard_bytes);
        let writer = Writer::start(scope, sink).map_err(PipelineError::WriterThread)?;
        let ended = extract(units, &mut attempts, (&writer, &manifest), &mut progress, stop);
        if matches!(&ended, Err(PipelineError::Target(error)) if error.is_death()) {
            last_resort.arm(GRACE, EXIT_DIED);
        }
        // However it ended: what was captured by then is committed.
        Ok::<_, PipelineError>((writer.finish()?, ended))
    })?;
    progress.finish();
    if let Some(since) = stop.since() {
        tracing::info!("everything is committed {:.1} s after the signal", since.as_secs_f64());
    }
    match ended {
        Err(error) => Err(record.fail(written, &progress, error)?),
        Ok(()) => record.end(written, &progress, stop.requested()),
    }
}

/// Runs batch after batch, until the input or the writer ends or a stop is requested; an error is
/// that of the input, or of the target that died.
fn extract(
    units: impl Iterator<Item = Result<WorkUnit, IntakeError>>,
    attempts: &mut Attempts<'_>,
    (writer, manifest): (&Writer<'_>, &Manifest),
    progress: &mut Progress,
    stop: &Shutdown,
) -> Result<(), PipelineError> {
    for unit in units {
        if stop.requested() {
            break;
        }
        let WorkUnit { batch, sources } = unit?;
        let (tokens, ids) = (batch.tokens() as u64, batch.ids());
        if !writer.give(Work::Notes(sources)) {
            break;
        }
        if tokens == 0 {
            continue;
        }
        let started = Instant::now();
        let parts = match attempts.run(batch) {
            Ok(parts) => parts,
            Err(error) => {
                if error.is_death() && attempts.is_open() {
                    manifest.record_failure(&ids, &in_words(&error))?;
                }
                return Err(error.into());
            }
        };
        let target_s = started.elapsed().as_secs_f64();
        if !writer.give(Work::Batch(parts)) {
            break;
        }
        let disk_s = started.elapsed().as_secs_f64() - target_s;
        progress.advance(tokens, target_s, disk_s);
    }
    Ok(())
}
