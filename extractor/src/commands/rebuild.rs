//! `extractor rebuild`: a lost manifest made again from the shards.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use shared::Manifest;

/// Arguments of `extractor rebuild`.
#[derive(clap::Args)]
pub(crate) struct RebuildArgs {
    /// Directory of the data set.
    dataset: PathBuf,
    /// Print the result as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Rebuilds and prints what was found; false when a shard had to be set aside.
pub(crate) fn run(args: &RebuildArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let found = Manifest::rebuild(&args.dataset)
        .with_context(|| format!("rebuilding the manifest of {}", args.dataset.display()))?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&found)?)?;
    } else {
        writeln!(out, "{} shards, {} samples", found.shards, found.samples)?;
        for (file, reason) in &found.refused {
            writeln!(out, "set aside in quarantine/: {file}: {reason}")?;
        }
        if !found.refused.is_empty() {
            writeln!(
                out,
                "to take one in after all: mend it, move it back to shards/, move manifest.sqlite \
                 away, and rebuild again"
            )?;
        }
        writeln!(out, "lines and rejects are not in shards: the next `extractor run` finds them")?;
    }
    Ok(found.refused.is_empty())
}
