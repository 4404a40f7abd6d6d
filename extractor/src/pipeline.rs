//! The whole extraction, in the order in which the data moves.

mod report;

use std::time::Instant;

use shared::manifest::Manifest;

use self::report::Record;
pub use self::report::{Outcome, PipelineError, RunReport};
use crate::config::ExtractConfig;
use crate::encode::Encoder;
use crate::fingerprint::fingerprint;
use crate::intake::Intake;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::shutdown::Shutdown;
use crate::sink::ShardSink;
use crate::target::{self, TargetSpec};
use crate::target_dir;

/// conversation -> tokens + loss mask -> batch -> ranks -> capture -> shard -> manifest
///
/// Rerunning continues: lines that have an outcome are skipped. Stops between batches when asked
/// to; whatever was captured by then is committed.
pub fn run(config: &ExtractConfig, stop: &Shutdown) -> Result<RunReport, PipelineError> {
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
    let mut target = None;
    let intake = Intake::open(&config.intake(), &encoder, Some(&manifest))?;
    for unit in intake.batches(config.run.batch_tokens) {
        if stop.requested() {
            break;
        }
        let unit = unit?;
        if unit.batch.tokens() == 0 {
            sink.note(unit.sources);
            continue;
        }
        // Opened on the first batch: a finished data set needs no model.
        let target = match &mut target {
            Some(target) => target,
            none => none.insert(target::open(&config.engine_options()?)?),
        };
        let started = Instant::now();
        let capture = target.prefill(&unit.batch, &contract.layers)?;
        let target_s = started.elapsed().as_secs_f64();
        sink.write(&unit.batch, &capture, unit.sources)?;
        let disk_s = started.elapsed().as_secs_f64() - target_s;
        progress.advance(unit.batch.tokens() as u64, target_s, disk_s);
    }
    let written = sink.finish()?;
    progress.finish();
    record.end(written, &progress, stop.requested())
}
