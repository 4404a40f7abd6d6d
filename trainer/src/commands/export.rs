//! `trainer export`: a checkpoint as the files of vLLM and SGLang.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use trainer::checkpoint::{Parts, RunDir};
use trainer::draft::AttentionConfig;
use trainer::export::{
    self, Embeddings, Engine, ExportDtype, ExportLayout, ExportOptions, ExportReport, Server,
};
use trainer::target::TargetHead;

use super::at_least_one;

/// Write config.json and model.safetensors for vLLM and SGLang, and load them back.
#[derive(clap::Args)]
pub(crate) struct ExportArgs {
    /// Checkpoint directory, or a run directory for its best checkpoint.
    checkpoint: PathBuf,
    /// Directory to write; it must not exist.
    out: PathBuf,
    /// Layout; by default the one of the draft's attention.
    #[arg(long, value_enum)]
    layout: Option<Layout>,
    /// Stored type of the weights.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Engines that must read the layer ids correctly: current (vLLM, and SGLang since 2026-05-16),
    /// vllm, or sglang-old. Only these engines' launch lines are printed.
    #[arg(long, value_enum, default_value = "current")]
    engine: EngineName,
    /// Write the target's embeddings too, read from --dataset and compared with those that the
    /// draft was trained with. Engines share the target's anyway.
    #[arg(long, requires = "dataset")]
    with_embeddings: bool,
    /// Data set whose target/ holds the embeddings.
    #[arg(long, value_name = "DATASET")]
    dataset: Option<PathBuf>,
    /// Drafted tokens a round, as the speculators format and the launch lines propose.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = at_least_one)]
    draft_tokens: usize,
    /// Name or directory of the target: for the launch lines, and for the speculators format, from
    /// which vLLM takes the target.
    #[arg(long, value_name = "NAME", required_if_eq("layout", "speculators"))]
    target_name: Option<String>,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Layout {
    Llama,
    Mla,
    Speculators,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Dtype {
    Bf16,
    F32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum EngineName {
    Current,
    Vllm,
    SglangOld,
}

/// Exports and prints what was written and how to serve it.
pub(crate) fn run(args: &ExportArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let (path, checkpoint) = RunDir::open(&args.checkpoint, Parts::Inference)?;
    let embeddings = match &args.dataset {
        Some(dataset) if args.with_embeddings => Some(Embeddings {
            values: TargetHead::load(&dataset.join("target"))?.embed_tokens,
            from: dataset.clone(),
        }),
        _ => None,
    };
    let mla = matches!(checkpoint.state.draft.attention, AttentionConfig::Mla { .. });
    let options = ExportOptions {
        layout: match args.layout {
            Some(Layout::Llama) => ExportLayout::Llama,
            Some(Layout::Mla) => ExportLayout::Mla,
            Some(Layout::Speculators) => ExportLayout::Speculators,
            None if mla => ExportLayout::Mla,
            None => ExportLayout::Llama,
        },
        dtype: match args.dtype {
            Dtype::Bf16 => ExportDtype::Bf16,
            Dtype::F32 => ExportDtype::F32,
        },
        engine: match args.engine {
            EngineName::Current => Engine::Current,
            EngineName::Vllm => Engine::Vllm,
            EngineName::SglangOld => Engine::SglangOld,
        },
        embeddings,
        draft_tokens: args.draft_tokens,
        target_name: target_name(args).to_owned(),
    };
    let report = export::export(&checkpoint, &args.out, &options)
        .with_context(|| format!("exporting {}", path.display()))?;
    for warning in &report.warnings {
        tracing::warn!("{warning}");
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report, args, out)?;
    }
    Ok(true)
}

fn print(report: &ExportReport, args: &ExportArgs, out: &mut dyn Write) -> std::io::Result<()> {
    let ids = &report.layer_ids;
    writeln!(out, "written        {}", report.path.display())?;
    writeln!(out, "tensors        {} ({} bytes)", report.tensors, report.bytes)?;
    writeln!(out, "layer ids      {:?}, in eagle_config {:?}", ids.top_level, ids.nested)?;
    writeln!(out, "loads in       {}", report.loaders.join(", "))?;
    let difference = report.golden_difference;
    writeln!(out, "golden steps   differ by {difference:.1e} of the largest logit")?;
    report.servers.iter().try_for_each(|server| writeln!(out, "{}", launch(*server, report, args)))
}

fn target_name(args: &ExportArgs) -> &str {
    args.target_name.as_deref().unwrap_or("TARGET_MODEL")
}

/// How a server is started with the draft.
fn launch(server: Server, report: &ExportReport, args: &ExportArgs) -> String {
    let (n, dir, target) = (args.draft_tokens, report.path.display(), target_name(args));
    match (server, report.layout) {
        (Server::Vllm, ExportLayout::Speculators) => format!("vllm serve {dir}"),
        (Server::Vllm, _) => format!(
            "vllm serve {target} --speculative-config \
                '{{\"method\":\"eagle3\",\"model\":\"{dir}\",\"num_speculative_tokens\":{n}}}'"
        ),
        (Server::Sglang, _) => format!(
            "python -m sglang.launch_server --model-path {target} \
             --speculative-algorithm EAGLE3 \
             --speculative-draft-model-path {dir} --speculative-num-steps {n} \
             --speculative-eagle-topk 1 --speculative-num-draft-tokens {} \
             --speculative-draft-attention-backend fa3",
            n + 1
        ),
    }
}
