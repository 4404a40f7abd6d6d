//! `extractor config`: the resolved configuration with the origin of each value.

use std::io::Write;

use extractor::config::{ConfigArgs, Resolved};
use serde_json::{Value, json};

/// Print the resolved configuration and where each value came from.
#[derive(clap::Args)]
pub(crate) struct ConfigCommandArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// One JSON object in place of TOML.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ConfigCommandArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let resolved = args.config.resolve()?;
    if args.json {
        let origins = resolved.origins.iter().map(|(key, from)| (key.clone(), from.to_string()));
        let origins: serde_json::Map<_, Value> = origins.map(|(k, v)| (k, v.into())).collect();
        writeln!(out, "{}", json!({ "config": resolved.config, "origins": origins }))?;
    } else {
        write_toml(&resolved, out)?;
    }
    Ok(true)
}

/// TOML that can be read back; unset values are comments.
fn write_toml(resolved: &Resolved, out: &mut dyn Write) -> anyhow::Result<()> {
    let sections = serde_json::to_value(&resolved.config)?;
    for (index, (section, keys)) in sections.as_object().into_iter().flatten().enumerate() {
        writeln!(out, "{}[{section}]", if index == 0 { "" } else { "\n" })?;
        for (key, value) in keys.as_object().into_iter().flatten() {
            let line = match value {
                Value::Null => format!("# {key} is not set"),
                value => format!("{key} = {}", inline(value)?),
            };
            let origin = resolved.origins.get(&format!("{section}.{key}"));
            let origin = origin.map(ToString::to_string).unwrap_or_default();
            writeln!(out, "{line:<48} # {origin}")?;
        }
    }
    Ok(())
}

fn inline(value: &Value) -> anyhow::Result<String> {
    let mut text = String::new();
    serde::Serialize::serialize(value, toml::ser::ValueSerializer::new(&mut text))?;
    Ok(text)
}
