//! `extractor check`: compares the engine with expected values of another implementation.

use std::io::Write;
use std::path::PathBuf;

use extractor::cosine::{Cosines, DOUBT, FLOOR, MEDIAN, ROW};
use extractor::golden::{GivenReport, Golden, GoldenReport, LOGIT_NEAR_TIE, ROUTER_NEAR_TIE};
use extractor::target::{Compute, Device, EngineOptions, Exchange, QaNormEps, RankGroup};

/// Arguments of `extractor check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Directory of the model: config.json and safetensors files.
    #[arg(long)]
    model: PathBuf,
    /// Safetensors file with expected states (PROMPT.input_ids, PROMPT.h_k, ...).
    #[arg(long)]
    golden: PathBuf,
    /// Ranks of tensor parallelism.
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// Where to compute: cpu or cuda.
    #[arg(long, default_value_t)]
    device: Device,
    /// How rows cross GPUs: nccl or copies.
    #[arg(long, value_enum, default_value_t)]
    exchange: Exchange,
    /// Number format of the products: bf16 is compared by cosines, f32 by differences.
    #[arg(long, value_enum, default_value_t)]
    compute: Compute,
    /// Epsilon of the MLA latent norms: hf (1e-6) or config; must be that of the golden file.
    #[arg(long, default_value_t = QaNormEps::Hf)]
    qa_norm_eps: QaNormEps,
    /// All prompts in one batch, instead of a batch each.
    #[arg(long)]
    together: bool,
    /// Largest difference that passes, in units of each tensor's rms.
    #[arg(long, default_value_t = 1e-3)]
    tolerance: f64,
}

/// Prints the differences; false if one is above the tolerance or a choice differs.
pub(crate) fn run(args: &CheckArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let golden = Golden::read(&args.golden, args.qa_norm_eps)?;
    let mut target = RankGroup::open(&EngineOptions {
        device: args.device,
        compute: args.compute,
        exchange: args.exchange,
        batch_tokens: golden.longest(args.together),
        tp: args.tp,
        qa_norm_eps: args.qa_norm_eps,
        ..EngineOptions::new(&args.model)
    })?;
    let before = kernels::cuda::allocations();
    let report = golden.compare(&mut target, args.together)?;
    if args.device == Device::Cuda {
        // Caches of continued sequences grow; an extraction has none.
        let allocations = kernels::cuda::allocations() - before;
        writeln!(out, "allocations after start, for caches: {allocations}")?;
    }
    if args.compute.on(args.device) == Compute::Bf16 {
        return judge_cosines(&report, golden.compare_given(&mut target, args.together)?, out);
    }
    print(&report, args.tolerance, out)?;
    Ok(report.agrees(args.tolerance))
}

/// States are judged twice: with the experts that routers chose, and with those of the golden file.
fn judge_cosines(
    report: &GoldenReport,
    given: Option<GivenReport>,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    print_cosines(&report.cosines, Cosines::agrees, out)?;
    writeln!(
        out,
        "experts: {} choices, {} differ; greedy: {} tokens agree",
        report.routed,
        report.misrouted.len(),
        report.greedy
    )?;
    let smallest = |all: &[Cosines], value: fn(&Cosines) -> f64| {
        all.iter().map(value).fold(f64::INFINITY, f64::min)
    };
    let rows = given.as_ref().map_or(&report.cosines, |given| &given.cosines);
    if let Some(given) = &given {
        writeln!(out, "with the experts of the golden file:")?;
        print_cosines(rows, |it| Cosines::rows_agree(std::slice::from_ref(it)), out)?;
        let GivenReport { routed, otherwise, largest_margin, .. } = given;
        writeln!(
            out,
            "experts: {otherwise} of {routed} choices would differ, of margins up to \
             {largest_margin:.6} (at most {DOUBT})"
        )?;
    }
    writeln!(
        out,
        "worst:   median {:.6} (at least {MEDIAN}), clear row {:.6} (at least {FLOOR}); {} row \
         {:.6} (at least {ROW})",
        smallest(&report.cosines, |it| it.median),
        smallest(&report.cosines, |it| it.worst_clear),
        if given.is_some() { "with experts given," } else { "any" },
        smallest(rows, |it| it.worst),
    )?;
    let rows_agree = given.as_ref().map_or_else(|| Cosines::rows_agree(rows), GivenReport::agrees);
    Ok(Cosines::agree(&report.cosines) && rows_agree)
}

fn print_cosines(
    all: &[Cosines],
    agrees: impl Fn(&Cosines) -> bool,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let width = all.iter().map(|c| c.tensor.len()).max().unwrap_or(0).max(6);
    let header = ["tensor", "rows", "median cosine", "worst row", "clear rows", "worst of them"];
    let [tensor, rows, median, worst, clear, of_them] = header;
    writeln!(
        out,
        "{tensor:width$}  {rows:>6}  {median:>13}  {worst:>9}  {clear:>10}  {of_them:>13}"
    )?;
    for cosines in all {
        let mark = if agrees(cosines) { "" } else { "  TOO FAR" };
        let Cosines { tensor, rows, median, worst, clear, worst_clear } = cosines;
        writeln!(
            out,
            "{tensor:width$}  {rows:>6}  {median:>13.6}  {worst:>9.6}  {clear:>10}  \
             {worst_clear:>13.6}{mark}"
        )?;
    }
    Ok(())
}

fn print(report: &GoldenReport, tolerance: f64, out: &mut dyn Write) -> std::io::Result<()> {
    let width = report.differences.iter().map(|d| d.tensor.len()).max().unwrap_or(0).max(6);
    let header = ("tensor", "values", "max abs diff", "rms", "diff / rms");
    let (tensor, values, apart, rms, relative) = header;
    writeln!(out, "{tensor:width$}  {values:>8}  {apart:>12}  {rms:>10}  {relative:>10}")?;
    for difference in &report.differences {
        let (values, apart, rms) = (difference.count, difference.max_abs, difference.rms);
        let relative = difference.relative();
        let mark = if relative < tolerance { "" } else { "  ABOVE TOLERANCE" };
        let tensor = &difference.tensor;
        writeln!(
            out,
            "{tensor:width$}  {values:>8}  {apart:>12.3e}  {rms:>10.3e}  {relative:>10.3e}{mark}"
        )?;
    }
    writeln!(
        out,
        "experts: {} choices, {} differ, {} near ties (margin < {ROUTER_NEAR_TIE:e}) left out",
        report.routed,
        report.misrouted.len(),
        report.routed_near_ties
    )?;
    writeln!(
        out,
        "greedy:  {} tokens agree, {} continuations differ (margin >= {LOGIT_NEAR_TIE:e})",
        report.greedy,
        report.greedy_wrong.len()
    )?;
    for place in report.misrouted.iter().chain(&report.greedy_wrong) {
        writeln!(out, "differs: {place}")?;
    }
    writeln!(out, "worst:   {:.3e} (tolerance {tolerance:e})", report.worst())
}
