//! The command line of the extractor: one match, and exit codes.

mod commands;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use commands::{
    audit, bench, check, config, import, inspect, plan, query, rebuild, retry, run, seal,
};
use extractor::output::{Output, OutputFault, written};
use extractor::shutdown::EXIT_STOPPED;
use extractor::target::{EXIT_DIED, exit_at_once};
use tracing_subscriber::EnvFilter;

/// Records the hidden states of a large target model for training EAGLE-3 draft heads.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log this too; `shapes` logs the shape and type of every tensor at every stage.
    #[arg(long, global = true, value_enum, help_heading = "Logging")]
    trace: Vec<Trace>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Trace {
    Shapes,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Extract hidden states; rerunning continues where the last run ended.
    Run(run::RunArgs),
    /// Make a data set of states that another tool wrote; rerunning continues.
    Import(import::ImportArgs),
    /// Forecast samples, tokens, bytes and time without loading the model.
    Plan(plan::PlanArgs),
    /// Check a data set against its manifest.
    Audit(audit::AuditArgs),
    /// Make a lost manifest again from the shards.
    Rebuild(rebuild::RebuildArgs),
    /// Make rejects pending again that lack of memory or a dying target was to blame for.
    Retry(retry::RetryArgs),
    /// Make a finished data set read-only, one file without a log, fit for copying.
    Seal(seal::SealArgs),
    /// List what the manifest knows.
    Query(query::QueryArgs),
    /// Show the tensors of a shard, a sample, or another tool's file.
    Inspect(inspect::InspectArgs),
    /// Print the resolved configuration and the origin of each value.
    Config(config::ConfigCommandArgs),
    /// Compare this engine with reference states.
    Check(check::CheckArgs),
    /// Measure the prefill rate beside the machine's matrix product rate.
    Bench(bench::BenchArgs),
}

/// The work up to here is committed, and a signal ended the run.
#[derive(Debug, thiserror::Error)]
#[error("stopped by a signal; everything captured is committed, rerun to continue")]
struct Stopped;

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_log(&cli.trace);
    let mut out = Output::blocks();
    let outcome = match &cli.command {
        Command::Run(args) => run::run(args, &mut out),
        Command::Import(args) => import::run(args, &mut out),
        Command::Plan(args) => plan::run(args, &mut out),
        Command::Audit(args) => audit::run(args, &mut out),
        Command::Rebuild(args) => rebuild::run(args, &mut out),
        Command::Retry(args) => retry::run(args, &mut out),
        Command::Seal(args) => seal::run(args, &mut out),
        Command::Query(args) => query::run(args, &mut out),
        Command::Inspect(args) => inspect::run(args, &mut out),
        Command::Config(args) => config::run(args, &mut out),
        Command::Check(args) => check::run(args, &mut out),
        Command::Bench(args) => bench::run(args, &mut out),
    };
    match written(outcome, out) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            tracing::error!("{error:#}");
            match exit_code(&error) {
                // A rank may be stuck in the driver, and an orderly exit would wait for it.
                code @ EXIT_DIED => exit_at_once(code),
                code => ExitCode::from(code),
            }
        }
    }
}

/// Words go to stderr: `RUST_LOG` decides which, `--trace` adds to them.
fn start_log(traces: &[Trace]) {
    let mut filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    if traces.contains(&Trace::Shapes)
        && let Ok(directive) = "aerie::shapes=trace".parse()
    {
        filter = filter.add_directive(directive);
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// The exit code of the first cause that has one; 70 for an error that nobody classified.
fn exit_code(error: &anyhow::Error) -> u8 {
    macro_rules! code_of {
        ($cause:expr, $($error:ty),* $(,)?) => {
            None$(.or_else(|| $cause.downcast_ref::<$error>().map(<$error>::exit_code)))*
        };
    }
    let code = |cause: &(dyn std::error::Error + 'static)| {
        let stopped = cause.downcast_ref::<Stopped>().map(|_| EXIT_STOPPED);
        stopped.or_else(|| {
            code_of!(
                cause,
                commands::Usage,
                OutputFault,
                extractor::pipeline::PipelineError,
                extractor::plan::PlanError,
                extractor::config::ConfigError,
                extractor::target::TargetError,
                extractor::golden::GoldenError,
                shared::ManifestError,
                shared::ShardError,
            )
        })
    };
    error.chain().find_map(code).unwrap_or(70)
}
