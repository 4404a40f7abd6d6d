//! `extractor retry`: rejects that the machine was to blame for become pending again.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use extractor::reject::RejectReason;
use shared::Manifest;

/// Arguments of `extractor retry`.
#[derive(clap::Args)]
pub(crate) struct RetryArgs {
    /// Directory of the data set.
    dataset: PathBuf,
    /// Reasons as `extractor query DATASET rejects` shows them, before the colon. Others recur
    /// unless the program has changed.
    #[arg(long, value_delimiter = ',', value_parser = parse_reason,
          default_values = ["out_of_memory", "target_crash"])]
    reason: Vec<RejectReason>,
}

/// Forgets the rejects and says what is left to do.
pub(crate) fn run(args: &RetryArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let dataset = args.dataset.display();
    let wrong = || format!("looking for rejects in {dataset}");
    let manifest = Manifest::open_existing(&args.dataset).with_context(wrong)?;
    let reasons: Vec<&str> = args.reason.iter().map(|reason| reason.name()).collect();
    let lines = manifest.forget_rejects(&reasons).with_context(wrong)?;
    writeln!(
        out,
        "{lines} rejects are pending again; the next `extractor run` or `import` tries them"
    )?;
    writeln!(out, "{}", manifest.conservation()?.in_words("lines"))?;
    Ok(true)
}

fn parse_reason(text: &str) -> Result<RejectReason, String> {
    let known = RejectReason::ALL.iter().find(|reason| reason.name() == text);
    known.copied().ok_or_else(|| {
        let names: Vec<&str> = RejectReason::ALL.iter().map(|reason| reason.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}
