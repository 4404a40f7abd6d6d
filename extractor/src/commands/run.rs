//! `extractor run`: the extraction, and its summary.

use std::io::Write;

use extractor::config::ConfigArgs;
use extractor::pipeline::{self, Outcome, RunReport};
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
    finish(&report, "lines", args.json, out)
}

/// Prints what was done with the lines or files of the input; an error if it was stopped.
pub(super) fn finish(
    report: &RunReport,
    unit: &str,
    json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let written = &report.written;
    if json {
        serde_json::to_writer(&mut *out, report)?;
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
        writeln!(out, "{}", report.conservation.in_words(unit))?;
    }
    match report.outcome {
        Outcome::Completed => Ok(true),
        Outcome::Stopped => Err(Stopped.into()),
    }
}
