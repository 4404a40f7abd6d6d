//! `trainer evaluate`: acceptance of a draft, on recorded text or live.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use burn::backend::Flex;
use burn::tensor::FloatDType;
use serde::Serialize;
use shared::LayerIndex;
use trainer::FrozenTarget;
use trainer::acceptance::{Acceptance, Evaluation, EvaluationPlan, chain_acceptance, evaluate};
use trainer::config::FitConfig;
use trainer::dataset::ManifestDataset;
use trainer::fit::{frozen_target, ttt_options};
use trainer::live::LiveCounts;
use trainer::target::TargetHead;
use trainer::trained::TrainedDraft;
use trainer::watch::Watch;

use super::Usage;
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
    #[arg(long, value_name = "DIR", required_unless_present = "live")]
    dataset: Option<PathBuf>,
    /// Only the samples kept out of training (the default).
    #[arg(long, conflicts_with = "all")]
    held_out: bool,
    /// All samples.
    #[arg(long)]
    all: bool,
    /// Share of held-out samples; the run's own by default, 0.05 for an export.
    #[arg(long, value_name = "SHARE")]
    held_out_share: Option<f64>,
    /// Drafted tokens, 1 to 16; the run's ttt_steps by default.
    #[arg(long, value_name = "N", value_parser = drafted_tokens)]
    ttt_steps: Option<usize>,
    /// Count the rounds of speculative decoding with chains of N drafted tokens, on answers that
    /// the target wrote greedily.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = drafted_tokens)]
    chain: Vec<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    live: LiveArgs,
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
    chains: Vec<ChainReport>,
}

/// Prints acceptance by depth.
pub(crate) fn run(args: &EvaluateArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let Some(draft) = args.path.as_ref().or(args.draft.as_ref()) else {
        bail!(Usage("a draft is needed: a run, checkpoint or export directory".into()));
    };
    let trained = TrainedDraft::open(draft)?;
    if args.live.live {
        return super::live::run(&args.live, &trained, args.json, out);
    }
    let Some(dataset) = &args.dataset else {
        bail!(Usage("--dataset DIR is needed: the data set written by `extractor run`".into()));
    };
    let recorded = Recorded::open(args, &trained, dataset)?;
    if !args.chain.is_empty() {
        return chains(args, &trained, &recorded, out);
    }
    let evaluation = recorded.evaluate(&trained).with_context(|| recorded.name())?;
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

/// Samples to measure on, and the target's head that belongs to them.
struct Recorded {
    dataset: ManifestDataset,
    indices: Vec<usize>,
    frozen: FrozenTarget<Flex>,
    config: FitConfig,
    steps: Option<usize>,
}

impl Recorded {
    fn open(args: &EvaluateArgs, trained: &TrainedDraft, path: &Path) -> anyhow::Result<Self> {
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
        let split = dataset.split(args.held_out_share.unwrap_or(config.data.held_out));
        let indices = match args.all {
            true => (0..dataset.samples().len()).collect(),
            false => split.held_out,
        };
        if indices.is_empty() {
            bail!(Usage("no sample is held out: give --held-out-share, or --all".into()));
        }
        let head = TargetHead::load(&dataset.dir().target())?;
        let place = (&Default::default(), FloatDType::F32);
        let frozen = frozen_target::<Flex>(head, &trained.vocab, place)?;
        Ok(Self { dataset, indices, frozen, config, steps: args.ttt_steps })
    }

    fn name(&self) -> String {
        format!("evaluating on {}", self.dataset.dir().root().display())
    }

    fn evaluate(&self, trained: &TrainedDraft) -> anyhow::Result<Evaluation> {
        let mut options = ttt_options(&self.config);
        options.steps = self.steps.unwrap_or(options.steps);
        let max_tokens = self.config.data.max_tokens;
        let what = EvaluationPlan {
            indices: &self.indices,
            max_tokens,
            options: &options,
            watch: &Watch::default(),
        };
        let draft = trained.draft::<Flex>(&Default::default())?;
        Ok(evaluate(&draft, &self.frozen, &self.dataset, &what)?)
    }
}

fn chains(
    args: &EvaluateArgs,
    trained: &TrainedDraft,
    recorded: &Recorded,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let options = ttt_options(&recorded.config);
    let max_tokens = recorded.config.data.max_tokens;
    let what = EvaluationPlan {
        indices: &recorded.indices,
        max_tokens,
        options: &options,
        watch: &Watch::default(),
    };
    let draft = trained.draft::<Flex>(&Default::default())?;
    let dataset = (&recorded.dataset, args.chain.as_slice());
    let counts = chain_acceptance(&draft, &recorded.frozen, dataset, &what)
        .with_context(|| recorded.name())?;
    let chains = args.chain.iter().zip(counts).map(|(&drafted, counts)| ChainReport {
        drafted,
        acceptance_length: counts.acceptance_length(),
        acceptance_rate: counts.acceptance_rate(),
        counts,
    });
    let report = ChainsReport { samples: recorded.indices.len(), chains: chains.collect() };
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        return Ok(true);
    }
    writeln!(out, "draft    {}", trained.path.display())?;
    writeln!(out, "samples  {}, as greedy decoding would go", report.samples)?;
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
