//! `trainer evaluate`: acceptance of a draft, on recorded text or live.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use burn::backend::{Cuda, Flex};
use burn::tensor::FloatDType;
use serde::Serialize;
use shared::LayerIndex;
use trainer::acceptance::{Acceptance, Evaluation, EvaluationPlan, chain_acceptance, evaluate};
use trainer::config::{Compute, FitConfig};
use trainer::dataset::ManifestDataset;
use trainer::fit::{frozen_target, ttt_options};
use trainer::live::LiveCounts;
use trainer::ops::DraftOps;
use trainer::target::TargetHead;
use trainer::trained::TrainedDraft;
use trainer::ttt::TttOptions;
use trainer::watch::Watch;
use trainer::{Eagle3Draft, FrozenTarget};

use super::Usage;
use super::device::{DeviceArgs, Place};
use super::live::LiveArgs;

/// Measure how many drafted tokens the target would accept.
#[derive(clap::Args)]
pub(crate) struct EvaluateArgs {
    /// Run directory (its best checkpoint), checkpoint or export.
    #[arg(value_name = "DRAFT", required_unless_present = "draft")]
    path: Option<PathBuf>,
    /// The same as a flag.
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    draft: Option<PathBuf>,
    /// Data set written by `extractor run`.
    #[arg(long, value_name = "DIR", required_unless_present = "live", conflicts_with = "live")]
    dataset: Option<PathBuf>,
    /// Only the samples kept out of training (the default).
    #[arg(long, conflicts_with_all = ["all", "live"])]
    held_out: bool,
    /// All samples.
    #[arg(long, conflicts_with = "live")]
    all: bool,
    /// Share of held-out samples; the run's own by default, 0.05 for an export.
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with_all = ["all", "live"])]
    held_out_share: Option<f64>,
    /// Drafted tokens, 1 to 16; the run's ttt_steps by default.
    #[arg(long, value_name = "N", value_parser = drafted_tokens,
        conflicts_with_all = ["chain", "live"])]
    ttt_steps: Option<usize>,
    /// Count the rounds of speculative decoding with chains of N drafted tokens, on answers that
    /// the target wrote greedily.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = drafted_tokens,
        conflicts_with = "live")]
    chain: Vec<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    // Of the draft on a data set: f32 on the CPU, the run's type on CUDA. With --live of the
    // target: always f32, for texts are compared token for token.
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    live: LiveArgs,
}

/// Answers below this share of top tokens were not written greedily; states rounded to bf16 or fp8
/// change a few.
const GREEDY: f64 = 0.99;

/// A share of held-out samples.
fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|error| format!("{error}"))?;
    match (0.0..1.0).contains(&share) {
        true => Ok(share),
        false => Err("expected a share from 0 to below 1; --all takes every sample".to_owned()),
    }
}

fn drafted_tokens(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=16).contains(count));
    count.ok_or_else(|| "1 to 16 drafted tokens are expected".to_owned())
}

/// Rounds of decoding with one length of chain.
#[derive(Serialize)]
struct ChainReport {
    /// Most tokens drafted a round.
    drafted: usize,
    /// Tokens a round, bonus token included.
    acceptance_length: f64,
    /// Share of rounds in which the token of each position was accepted.
    acceptance_rate: Vec<f64>,
    #[serde(flatten)]
    counts: LiveCounts,
}

#[derive(Serialize)]
struct ChainsReport {
    samples: usize,
    /// Share of the answers' tokens that are the target's top token.
    greedy_share: f64,
    chains: Vec<ChainReport>,
}

/// Prints acceptance by depth.
pub(crate) fn run(args: &EvaluateArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let Some(draft) = args.path.as_ref().or(args.draft.as_ref()) else {
        bail!(Usage("a draft is needed: a run, checkpoint or export directory".into()));
    };
    let trained = TrainedDraft::open(draft)?;
    if args.live.live {
        return super::live::run(&args.live, &trained, (args.device.of_engine()?, args.json), out);
    }
    let compute = match trained.config.as_ref().map(|config| config.train.compute) {
        Some(Compute::F32) => Compute::F32,
        _ => Compute::Auto,
    };
    match args.device.open(compute)? {
        (Place::Cpu, dtype) => measure::<Flex>(args, &trained, (&Default::default(), dtype), out),
        (Place::Cuda(device), dtype) => measure::<Cuda>(args, &trained, (&device, dtype), out),
    }
}

fn measure<B: DraftOps>(
    args: &EvaluateArgs,
    trained: &TrainedDraft,
    place: (&B::Device, FloatDType),
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let Some(dataset) = &args.dataset else {
        bail!(Usage("--dataset DIR is needed: the data set written by `extractor run`".into()));
    };
    let recorded = Recorded::<B>::open(args, trained, (dataset, place))?;
    if !args.chain.is_empty() {
        return chains(args, &recorded, out);
    }
    let evaluation = recorded.evaluate().with_context(|| recorded.name())?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&evaluation)?)?;
        return Ok(true);
    }
    writeln!(out, "draft    {}", trained.path.display())?;
    let which = if args.all { "all" } else { "held out" };
    writeln!(out, "samples  {} ({which}), teacher-forced", evaluation.samples)?;
    print(&evaluation, out)?;
    Ok(true)
}

/// The draft, samples to measure it on, and the target's head that belongs to them.
struct Recorded<'a, B: DraftOps> {
    trained: &'a TrainedDraft,
    draft: Eagle3Draft<B>,
    dataset: ManifestDataset,
    indices: Vec<usize>,
    frozen: FrozenTarget<B>,
    config: FitConfig,
    steps: Option<usize>,
    watch: Watch,
}

impl<'a, B: DraftOps> Recorded<'a, B> {
    fn open(
        args: &EvaluateArgs,
        trained: &'a TrainedDraft,
        (path, (device, dtype)): (&Path, (&B::Device, FloatDType)),
    ) -> anyhow::Result<Self> {
        let dataset = ManifestDataset::open(path)?;
        let layers = &dataset.spec().layers;
        let aux = layers.get(..layers.len().saturating_sub(1)).unwrap_or_default();
        if aux != trained.aux_layers {
            let list = |layers: &[LayerIndex]| {
                layers.iter().map(LayerIndex::to_string).collect::<Vec<_>>().join(",")
            };
            bail!(Usage(format!(
                "the draft reads the states of layers {}, the data set holds {} before its last: \
                 name a data set that was extracted with the draft's layers",
                list(&trained.aux_layers),
                list(aux)
            )));
        }
        let config = trained.config.clone().unwrap_or_default();
        let fingerprint = dataset.fingerprint().to_string();
        if trained.dataset_fingerprint.as_ref().is_some_and(|stored| *stored != fingerprint) {
            tracing::warn!("this is not the data set the draft was trained on");
        }
        let share = args.held_out_share.unwrap_or(config.data.held_out);
        match &trained.config {
            Some(own) if !args.all && share > own.data.held_out => bail!(Usage(format!(
                "the run held out {} of the samples: with --held-out-share {share} others that it \
                 was trained on would be among them; leave the flag out, or give --all",
                own.data.held_out
            ))),
            None if !args.all && args.held_out_share.is_none() => tracing::warn!(
                "an export does not say what was held out: {share} is taken; if the run held out \
                 less, give that as --held-out-share, or samples it was trained on are among these"
            ),
            _ => {}
        }
        let split = dataset.split(share);
        let indices = match args.all {
            true => (0..dataset.samples().len()).collect(),
            false => split.held_out,
        };
        if indices.is_empty() {
            bail!(Usage("no sample is held out: give --held-out-share, or --all".into()));
        }
        let head = TargetHead::load(&dataset.dir().target())?;
        let frozen = frozen_target::<B>(head, &trained.vocab, (device, dtype))?;
        let draft = trained.draft::<B>(device)?.with_dtype(dtype);
        let (steps, watch) = (args.ttt_steps, Watch::default());
        Ok(Self { trained, draft, dataset, indices, frozen, config, steps, watch })
    }

    fn name(&self) -> String {
        format!("evaluating on {}", self.dataset.dir().root().display())
    }

    fn options(&self) -> TttOptions {
        let options = ttt_options(&self.config);
        TttOptions {
            steps: self.steps.unwrap_or(options.steps),
            teacher_rows: B::TEACHER_ROWS,
            ..options
        }
    }

    fn plan<'b>(&'b self, options: &'b TttOptions) -> EvaluationPlan<'b> {
        let max_tokens = self.config.data.max_tokens;
        let watch = &self.watch;
        EvaluationPlan { indices: &self.indices, max_tokens, options, watch, stop: None }
    }

    fn evaluate(&self) -> anyhow::Result<Evaluation> {
        let options = self.options();
        Ok(evaluate(&self.draft, &self.frozen, &self.dataset, &self.plan(&options))?)
    }
}

fn chains<B: DraftOps>(
    args: &EvaluateArgs,
    recorded: &Recorded<'_, B>,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let options = recorded.options();
    let dataset = (&recorded.dataset, args.chain.as_slice());
    let counted =
        chain_acceptance(&recorded.draft, &recorded.frozen, dataset, &recorded.plan(&options))
            .with_context(|| recorded.name())?;
    let greedy_share = counted.greedy_share();
    if greedy_share < GREEDY {
        tracing::warn!(
            "{:.1} % of the answers' tokens are the target's top token: these answers were not \
                written greedily, and the rounds are not those of any decoding",
            100.0 * greedy_share
        );
    }
    // Where one length has rounds, all have.
    let report = |(&drafted, counts): (&usize, LiveCounts)| {
        let (acceptance_length, acceptance_rate) =
            (counts.acceptance_length()?, counts.acceptance_rate());
        Some(ChainReport { drafted, acceptance_length, acceptance_rate, counts })
    };
    let chains = args.chain.iter().zip(counted.by_length).filter_map(report);
    let samples = recorded.indices.len();
    let report = ChainsReport { samples, greedy_share, chains: chains.collect() };
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        return Ok(true);
    }
    writeln!(out, "draft    {}", recorded.trained.path.display())?;
    writeln!(
        out,
        "samples  {}; {:.1} % of the answers' tokens are the target's top token",
        report.samples,
        100.0 * report.greedy_share
    )?;
    for ChainReport { drafted, acceptance_length, acceptance_rate, counts } in &report.chains {
        let rates: Vec<String> = acceptance_rate.iter().map(|rate| format!("{rate:.3}")).collect();
        writeln!(
            out,
            "chain of {drafted}: {acceptance_length:.3} tokens a round, bonus token included \
                ({} tokens in {} rounds; accepted by position {})",
            counts.tokens,
            counts.rounds,
            rates.join(" ")
        )?;
    }
    Ok(true)
}

fn print(evaluation: &Evaluation, out: &mut dyn Write) -> std::io::Result<()> {
    let all = &evaluation.all;
    writeln!(out, "depth      rows    acc  full_acc  conditional  alpha  length incl. bonus")?;
    for depth in 0..all.rows.len() {
        if all.rows[depth] == 0 {
            writeln!(out, "{depth:>5}  no rows")?;
            continue;
        }
        writeln!(
            out,
            "{depth:>5}  {:>8}  {:.3}     {:.3}        {:.3}  {:.3}  {:.3}",
            all.rows[depth],
            all.acc[depth],
            all.full_acc[depth],
            all.conditional_acc[depth],
            all.alpha[depth],
            all.acceptance_length_by_drafts[depth],
        )?;
    }
    line(out, "acceptance length", all)?;
    for bucket in &evaluation.by_length {
        let name = match bucket.up_to_tokens {
            Some(end) => format!("  samples up to {end} tokens ({})", bucket.samples),
            None => format!("  longer samples ({})", bucket.samples),
        };
        line(out, &name, &bucket.acceptance)?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, name: &str, acceptance: &Acceptance) -> std::io::Result<()> {
    writeln!(
        out,
        "{name}: {:.3} with the bonus token, {:.3} without",
        acceptance.acceptance_length, acceptance.accepted_drafts
    )
}
