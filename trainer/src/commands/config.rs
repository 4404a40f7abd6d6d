//! `trainer config`: the resolved configuration, with meaning and origin of each value.

use std::io::Write;

use super::flags::ConfigFlags;

/// Print the configuration that `trainer fit` would use.
#[derive(clap::Args)]
pub(crate) struct ConfigArgs {
    /// Print one JSON object of values.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ConfigFlags,
}

/// Prints TOML that `--config` reads back.
pub(crate) fn run(args: &ConfigArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let resolved = args.flags.resolve(None)?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&resolved.config)?)?;
    } else {
        write!(out, "{}", resolved.annotated())?;
    }
    Ok(true)
}
