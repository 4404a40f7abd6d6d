//! The extractor's command line: one subcommand a file of `commands`.

mod commands;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Records the hidden states of a large target model for training EAGLE-3 draft heads.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Plan(commands::plan::PlanArgs),
    Config(commands::config::ConfigCommandArgs),
}

fn main() -> ExitCode {
    let mut out = std::io::stdout().lock();
    let result = match Cli::parse().command {
        Command::Plan(args) => commands::plan::run(&args, &mut out),
        Command::Config(args) => commands::config::run(&args, &mut out),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    use extractor::{config::ConfigError, plan::PlanError};
    let config = || error.downcast_ref::<ConfigError>().map(ConfigError::exit_code);
    error.downcast_ref::<PlanError>().map(PlanError::exit_code).or_else(config).unwrap_or(70)
}
