//! `extractor seal`: the end of writing.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use shared::Manifest;

/// Arguments of `extractor seal`.
#[derive(clap::Args)]
pub(crate) struct SealArgs {
    /// Directory of the data set.
    dataset: PathBuf,
}

/// Seals and says how to read it.
pub(crate) fn run(args: &SealArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let dataset = args.dataset.display();
    Manifest::seal(&args.dataset).with_context(|| format!("sealing {dataset}"))?;
    writeln!(out, "sealed; readers may use file:{dataset}/manifest.sqlite?immutable=1")?;
    Ok(true)
}
