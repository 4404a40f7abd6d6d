//! The `trainer` command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod commands {
    pub(crate) mod bench;
    pub(crate) mod check;
}

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(commands::bench::BenchArgs),
    Check(commands::check::CheckArgs),
}

fn main() -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let passed = match &Arguments::parse().command {
        Command::Bench(args) => commands::bench::run(args, &mut out)?,
        Command::Check(args) => commands::check::run(args, &mut out)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
