//! The whole extraction, in the order in which the data moves.

use shared::CaptureSpec;
use shared::fingerprint::Fingerprint;
use shared::manifest::{Manifest, RunEnd, RunStart};
use shared::provenance::Provenance;
use thiserror::Error;

use crate::config::ExtractConfig;
use crate::encode::Encoder;
use crate::forecast::Forecast;
use crate::intake::Intake;
use crate::progress::Progress;
use crate::shutdown::Shutdown;
use crate::sink::{ShardSink, Written};
use crate::target::{self, spec::TargetSpec};
use crate::target_dir;

/// conversation -> tokens + loss mask -> batch -> ranks -> capture -> shard -> manifest
///
/// Rerunning continues: lines that have an outcome are skipped. Stops between batches when asked
/// to; whatever was captured by then is committed.
pub fn run(config: &ExtractConfig, stop: &Shutdown) -> Result<RunReport, PipelineError> {
    let spec = TargetSpec::read(&config.target.model)?;
    let encoder = Encoder::load(&config.target.model, config.encode_options(&spec))?;
    let contract = config.capture_spec(&spec)?;
    let fingerprint = fingerprint(config, &encoder, &contract)?;
    let manifest = Manifest::open_for_write(&config.run.dataset, &fingerprint, &contract)?;
    let forecast = Forecast::of(&config.intake(), &encoder, &manifest)?;
    forecast.require_space(manifest.dir().root())?;
    target_dir::publish(manifest.dir(), &config.target.model, &spec)?;

    let record = Record::begin(&manifest, config)?;
    let mut progress = Progress::start(forecast.fresh_tokens);
    let mut sink = ShardSink::new(&manifest, config.run.shard_bytes);
    if forecast.fresh_samples > 0 {
        let mut target = target::open(&config.engine_options())?;
        for unit in Intake::open(&config.intake(), &encoder, &manifest)?.batches(config.run.batch_tokens) {
            if stop.requested() {
                break;
            }
            let unit = unit?;
            let capture = progress.target(|| target.prefill(&unit.batch, &contract.layers))?;
            progress.disk(|| sink.write(&unit.batch, &capture, unit.sources))?;
        }
    }
    let written = progress.disk(|| sink.finish())?;
    progress.finish();
    record.end(&manifest, &written, &progress, stop.requested())
}
