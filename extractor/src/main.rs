//! The command line of the extractor: one match, and exit codes.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use shared::{ManifestError, ShardError};

mod commands {
    pub(crate) mod audit;
    pub(crate) mod inspect;
    pub(crate) mod query;
}

use commands::{audit, inspect, query};

/// Prompts to hidden states, with a manifest.
#[derive(Parser)]
#[command(version)]
enum Command {
    /// Check a data set against its manifest.
    Audit(audit::AuditArgs),
    /// List what the manifest knows.
    Query(query::QueryArgs),
    /// Show the tensors of a shard, a sample, or another tool's file.
    Inspect(inspect::InspectArgs),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let outcome = match Command::parse() {
        Command::Audit(args) => audit::run(&args, &mut out),
        Command::Query(args) => query::run(&args, &mut out),
        Command::Inspect(args) => inspect::run(&args, &mut out),
    };
    let flushed = out.flush();
    match outcome.and_then(|passed| flushed.map(|()| passed).map_err(Into::into)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

fn exit_code(error: &anyhow::Error) -> u8 {
    error
        .chain()
        .find_map(|cause| {
            let manifest = cause.downcast_ref::<ManifestError>().map(ManifestError::exit_code);
            manifest.or_else(|| cause.downcast_ref::<ShardError>().map(ShardError::exit_code))
        })
        .unwrap_or(1)
}
