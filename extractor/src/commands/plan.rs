//! `extractor plan`: what a run would do, before any weight is loaded.

use std::io::Write;

use extractor::config::ConfigArgs;
use extractor::plan::Plan;

/// Forecast a run: samples, tokens, rejects, bytes and time. Loads no weights.
///
/// Exits with 1 when the data set would not fit or too many lines are rejected, and refuses a data
/// set as the run would, with its exit code.
#[derive(clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Expected tokens a second, for instance from `extractor bench`.
    #[arg(long, value_name = "RATE", value_parser = positive)]
    tokens_per_second: Option<f64>,
    /// One JSON object in place of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let config = args.config.resolve()?.config;
    let plan = Plan::standalone(&config, args.tokens_per_second)?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&plan)?)?;
    } else {
        write_table(&plan, out)?;
    }
    Ok(plan.succeeds())
}

fn write_table(plan: &Plan, out: &mut dyn Write) -> std::io::Result<()> {
    let layers = plan.layers.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
    let mean = plan.tokens as f64 / plan.samples.max(1) as f64;
    let share = 100.0 * plan.trainable_tokens as f64 / plan.tokens.max(1) as f64;
    writeln!(out, "lines        {:>12}", plan.lines)?;
    if plan.known_lines > 0 {
        writeln!(out, "done already {:>12}", plan.known_lines)?;
    }
    writeln!(out, "samples      {:>12}   {} cut off at max_tokens", plan.samples, plan.truncated)?;
    writeln!(out, "duplicates   {:>12}", plan.duplicates)?;
    let rate = 100.0 * plan.reject_rate();
    let limit = 100.0 * plan.reject_limit;
    writeln!(out, "rejects      {:>12}   {rate:.1} %, limit {limit:.1} %", plan.rejected)?;
    for (reason, count) in &plan.rejects {
        writeln!(out, "  {reason:<22} {count:>6}")?;
    }
    for example in &plan.examples {
        writeln!(out, "  first: {example}")?;
    }
    writeln!(out, "tokens       {:>12}   mean {mean:.0}, longest {}", plan.tokens, plan.longest)?;
    writeln!(out, "trainable    {:>12}   {share:.1} %", plan.trainable_tokens)?;
    writeln!(out, "batches      {:>12}", plan.batches)?;
    writeln!(out, "states       {:>12}   layers {layers}", bytes(plan.state_bytes))?;
    writeln!(out, "target files {:>12}", bytes(plan.target_bytes))?;
    let all = bytes(plan.total_bytes + plan.target_bytes);
    writeln!(out, "on disk      {all:>12}   {} shards", plan.shards)?;
    match plan.free_bytes {
        Some(free) if plan.fits() => writeln!(out, "free space   {:>12}", bytes(free))?,
        Some(free) => writeln!(out, "free space   {:>12}   TOO LITTLE", bytes(free))?,
        None => writeln!(out, "free space   {:>12}   set --dataset to see it", "unknown")?,
    }
    let assumed = if plan.rate_assumed {
        ", an assumption: measure with `extractor bench` and pass --tokens-per-second"
    } else {
        ""
    };
    let (seconds, rate) = (plan.seconds, plan.tokens_per_second);
    writeln!(out, "time         {:>12}   at {rate:.0} tokens/s{assumed}", duration(seconds))
}

fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let name = units.get(unit).copied().unwrap_or_default();
    if unit == 0 { format!("{count} {name}") } else { format!("{value:.1} {name}") }
}

fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| format!("a number above 0 is expected, not {text:?}"))
}
