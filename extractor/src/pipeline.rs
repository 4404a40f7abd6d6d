//! The whole extraction, in the order in which the data moves.

mod attempts;
mod report;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::time::Instant;

use shared::manifest::Manifest;

use self::attempts::{Attempts, Opener, Part};
use self::report::Record;
pub use self::report::{Outcome, PipelineError, RunReport};
use crate::config::ExtractConfig;
use crate::encode::Encoder;
use crate::fingerprint::fingerprint;
use crate::intake::{Intake, WorkUnit};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::shutdown::Shutdown;
use crate::sink::ShardSink;
use crate::target::{self, TargetSpec};
use crate::target_dir;

/// conversation -> tokens + loss mask -> batch -> ranks -> capture -> shard -> manifest
///
/// Rerunning continues: lines that have an outcome are skipped. Stops between batches when asked
/// to, or when the target dies; whatever was captured by then is committed.
pub fn run(config: &ExtractConfig, stop: &Shutdown) -> Result<RunReport, PipelineError> {
    run_with(config, stop, &target::open)
}

fn run_with(
    config: &ExtractConfig,
    stop: &Shutdown,
    open: &Opener<'_>,
) -> Result<RunReport, PipelineError> {
    let model = config.model()?;
    let spec = TargetSpec::read(model)?;
    let contract = config.capture_spec(&spec)?;
    let encoder = Encoder::load(model, config.data.encode_options(spec.vocab_size))?;
    let fingerprint = fingerprint(config, &encoder, &contract)?;
    let manifest = Manifest::open_for_write(config.dataset()?, &fingerprint, &contract)?;
    let plan = Plan::make(config, &encoder, &contract, Some(&manifest))?;
    plan.require_space()?;
    target_dir::publish(manifest.dir(), model, &spec)?;

    let record = Record::begin(&manifest, config, &plan)?;
    let mut progress = Progress::start(plan.tokens);
    let mut sink = ShardSink::new(&manifest, config.run.shard_bytes);
    let (options, layers) = (config.engine_options()?, contract.layers.as_slice());
    let mut attempts = Attempts { open, options, layers, target: None };
    let intake = Intake::open(&config.intake(), &encoder, Some(&manifest))?;
    let mut died = None;
    for unit in intake.batches(config.run.batch_tokens) {
        if stop.requested() {
            break;
        }
        let WorkUnit { batch, sources } = unit?;
        let (tokens, ids) = (batch.tokens() as u64, batch.ids());
        sink.note(sources);
        if tokens == 0 {
            continue;
        }
        let started = Instant::now();
        let parts = match attempts.run(batch) {
            Ok(parts) => parts,
            Err(error) => {
                if error.is_death() {
                    manifest.record_failure(&ids, &in_words(&error))?;
                }
                died = Some(error);
                break;
            }
        };
        let target_s = started.elapsed().as_secs_f64();
        for part in &parts {
            match part {
                Part::Captured(batch, capture) => sink.write(batch, capture)?,
                Part::TooLarge(batch, words) => {
                    sink.reject(batch, &format!("out_of_memory: {words}"));
                }
            }
        }
        sink.end_batch()?;
        let disk_s = started.elapsed().as_secs_f64() - target_s;
        progress.advance(tokens, target_s, disk_s);
    }
    let written = sink.finish()?;
    progress.finish();
    match died {
        Some(error) => Err(record.fail(written, &progress, error.into())?),
        None => record.end(written, &progress, stop.requested()),
    }
}

/// An error with all its causes.
fn in_words(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
