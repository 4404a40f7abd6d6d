//! The `extractor` binary.

mod commands;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

#[derive(Debug, Parser)]
enum Command {
    /// Compare the engine with expected values.
    Check(commands::check::CheckArgs),
    /// Measure the prefill rate.
    Bench(commands::bench::BenchArgs),
}

fn main() -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let passed = match Command::parse() {
        Command::Check(args) => commands::check::run(&args, &mut out),
        Command::Bench(args) => commands::bench::run(&args, &mut out),
    }?;
    out.flush()?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
