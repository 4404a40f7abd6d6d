//! The `trainer` command line: one subcommand a file, and the exit code of each kind of error.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use extractor::output::{Output, written};
use extractor::target::{EXIT_DIED, exit_at_once};

mod commands;

/// Train EAGLE-3 draft heads, measure their acceptance, export them.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Only warnings and errors on stderr.
    #[arg(long, global = true, help_heading = "Logging")]
    quiet: bool,
    /// More on stderr.
    #[arg(long, global = true, conflicts_with = "quiet", help_heading = "Logging")]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    Fit(commands::fit::FitArgs),
    Evaluate(commands::evaluate::EvaluateArgs),
    Export(commands::export::ExportArgs),
    Check(commands::check::CheckArgs),
    Bench(commands::bench::BenchArgs),
    Config(commands::config::ConfigArgs),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    log(&arguments);
    let mut out = Output::lines();
    let outcome = match &arguments.command {
        Command::Fit(args) => commands::fit::run(args, &mut out),
        Command::Evaluate(args) => commands::evaluate::run(args, &mut out),
        Command::Export(args) => commands::export::run(args, &mut out),
        Command::Check(args) => commands::check::run(args, &mut out),
        Command::Bench(args) => commands::bench::run(args, &mut out),
        Command::Config(args) => commands::config::run(args, &mut out),
    };
    match written(outcome, out) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            tracing::error!("{error:#}");
            match commands::exit_code(&error) {
                // A device that does not answer would keep an orderly exit waiting.
                code @ EXIT_DIED => exit_at_once(code),
                code => ExitCode::from(code),
            }
        }
    }
}

fn log(arguments: &Arguments) {
    let level = match (arguments.quiet, arguments.verbose) {
        (true, _) => "warn",
        (_, true) => "debug",
        _ => "info",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .init();
}
