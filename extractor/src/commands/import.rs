//! `extractor import`: states that another tool wrote become a data set.

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use extractor::config::{ConfigArgs, LayerChoice, Origin};
use extractor::import::{self, ImportOptions};
use extractor::shutdown::Shutdown;

use super::{Usage, run};

/// Arguments of `extractor import`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImportArgs {
    /// Files, or folders whose .safetensors files are meant.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    from: Vec<PathBuf>,
    /// The list vLLM was given (eagle_aux_hidden_state_layer_ids): id k is the output of layer k-1.
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "layers")]
    vllm_layer_ids: Option<Vec<u16>>,
    /// Which tool made the files, for the fingerprint: name, version, quantisation.
    #[arg(long, value_name = "TEXT", default_value = "not stated")]
    made_by: String,
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Imports what is missing and prints what was done.
pub(crate) fn run(args: &ImportArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let resolved = args.config.resolve()?;
    let mut config = resolved.config;
    if let Some(ids) = &args.vllm_layer_ids {
        config.capture.layers = LayerChoice::List(layers_of(ids)?);
    } else if resolved.origins.get("capture.layers") == Some(&Origin::Default) {
        bail!(Usage(
            "the files do not say which layers they hold: pass --vllm-layer-ids with the list \
             that vLLM was given, or --layers with 0-based layers whose outputs they are"
                .into()
        ));
    }
    let options = ImportOptions { from: args.from.clone(), made_by: args.made_by.clone() };
    let report = import::run(&config, &options, &Shutdown::on_signals()?)?;
    run::finish(&report, "files", args.json, out)
}

/// vLLM's id k is the state that enters layer k, the output of layer k-1.
fn layers_of(ids: &[u16]) -> anyhow::Result<Vec<u16>> {
    let layer = |id: &u16| id.checked_sub(1);
    ids.iter().map(layer).collect::<Option<_>>().ok_or_else(|| {
        Usage("--vllm-layer-ids: id 0 is the embeddings, not the output of a layer".into()).into()
    })
}
