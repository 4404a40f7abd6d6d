//! The `trainer` command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod commands {
    pub(crate) mod check;
}

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(commands::check::CheckArgs),
}

fn main() -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let passed = match &Arguments::parse().command {
        Command::Check(args) => commands::check::run(args, &mut out)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
