//! `extractor audit`: is the data set what its manifest says?

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use shared::manifest::StorageError;
use shared::{AuditReport, FindingKind, Verify, repair};

/// Arguments of `extractor audit`.
#[derive(clap::Args)]
pub(crate) struct AuditArgs {
    /// Directory of the data set.
    dataset: PathBuf,
    /// How much to read again: all, sample or none.
    #[arg(long, default_value = "sample")]
    verify: Verify,
    /// Move damaged shards to quarantine/, so that the next run extracts their lines again.
    #[arg(long, requires = "yes")]
    repair: bool,
    /// Confirms --repair: the rows of damaged shards are removed from the manifest.
    #[arg(long, requires = "repair")]
    yes: bool,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints the report, after the repair if one is wanted; false when something is wrong.
pub(crate) fn run(args: &AuditArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let audit = || {
        shared::audit(&args.dataset, args.verify)
            .with_context(|| format!("auditing {}", args.dataset.display()))
    };
    let mut report = audit()?;
    if args.repair {
        let done = repair::repair(&args.dataset, &repair::damaged(&report))
            .with_context(|| format!("repairing {}", args.dataset.display()))?;
        for shard in &done.shards {
            tracing::warn!("{shard} is now in quarantine/");
        }
        let (shards, samples) = (done.shards.len(), done.samples);
        tracing::info!("{shards} shards set aside; the next run extracts {samples} samples again");
        report = audit()?;
    }
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        if let Some(object) = value.as_object_mut() {
            object.insert("clean".to_owned(), report.clean().into());
        }
        writeln!(out, "{value}")?;
    } else {
        print(&report, out)?;
    }
    Ok(report.clean())
}

fn print(report: &AuditReport, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "{}", report.conservation.in_words("lines"))?;
    writeln!(
        out,
        "{} shards, {} samples, {} tokens; {} samples read again, {} bytes hashed",
        report.shards, report.samples, report.tokens, report.samples_read, report.bytes_hashed
    )?;
    for StorageError { layer, error, worst, .. } in &report.storage_errors {
        writeln!(out, "layer {layer}: stored within {error:.4} of its rms, {worst:.4} at worst")?;
    }
    for finding in &report.findings {
        let grade = if finding.kind.is_note() { "note" } else { "FAULT" };
        let shard = finding.shard.as_ref().map(|file| format!("{file}: ")).unwrap_or_default();
        writeln!(out, "{grade}: {shard}{}", finding.detail)?;
        for id in finding.samples.iter().take(5) {
            writeln!(out, "    sample {id}")?;
        }
        if finding.samples.len() > 5 {
            writeln!(out, "    and {} more (--json lists all)", finding.samples.len() - 5)?;
        }
    }
    if !repair::damaged(report).is_empty() {
        writeln!(
            out,
            "to mend: `extractor audit DATASET --verify all --repair --yes` moves damaged shards \
             to quarantine/, and the next `extractor run` extracts their lines again"
        )?;
    }
    if report.findings.iter().any(|finding| finding.kind == FindingKind::RowsDisagree) {
        writeln!(
            out,
            "to mend rows: put a sound copy of manifest.sqlite back, or move it away and make it \
             again with `extractor rebuild`"
        )?;
    }
    writeln!(out, "{}", if report.clean() { "clean" } else { "NOT clean" })
}
