//! `extractor run`: the extraction, and its summary.

use std::io::Write;

use extractor::config::ConfigArgs;
use extractor::pipeline::{self, Outcome};
use extractor::shutdown::Shutdown;

use crate::Stopped;

/// Arguments of `extractor run`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Extracts what is missing and prints what was done.
pub(crate) fn run(args: &RunArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let config = args.config.resolve()?.config;
    let report = pipeline::run(&config, &Shutdown::on_signals()?)?;
    let (written, lines) = (&report.written, &report.conservation);
    if args.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        writeln!(
            out,
            "{} samples, {} tokens in {} shards, {} bytes, {:.1} s, {:.0} tok/s",
            written.samples,
            written.tokens,
            written.shards,
            written.bytes,
            report.seconds,
            report.tokens_per_second
        )?;
        writeln!(
            out,
            "{} lines = {} committed + {} duplicate + {} rejected + {} pending",
            lines.lines, lines.committed, lines.duplicate, lines.rejected, lines.pending
        )?;
    }
    match report.outcome {
        Outcome::Completed => Ok(true),
        Outcome::Stopped => Err(Stopped.into()),
    }
}
