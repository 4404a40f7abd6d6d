//! `trainer fit`: trains a draft head, or continues a run.

use std::io::Write;
use std::path::PathBuf;

use burn::backend::{Autodiff, Cuda, Flex};
use extractor::shutdown::Shutdown;
use trainer::checkpoint::RunDir;
use trainer::fit::{self, FitReport, Start};

use super::Stopped;
use super::device::{DeviceArgs, Place};
use super::flags::ConfigFlags;

/// Train a draft head on a data set written by `extractor run`.
#[derive(clap::Args)]
pub(crate) struct FitArgs {
    /// Continue this run from its newest checkpoint. Without --config its stored settings are used.
    #[arg(long, value_name = "RUN")]
    resume: Option<PathBuf>,
    /// Where the newest checkpoint is damaged, set it aside and continue from the newest good one.
    #[arg(long, requires = "resume")]
    allow_older: bool,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    flags: ConfigFlags,
}

/// Trains and prints a report.
pub(crate) fn run(args: &FitArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let stop = Shutdown::on_signals()?;
    if let Some(run) = args.resume.as_ref().filter(|_| args.allow_older) {
        RunDir::new(run).set_damaged_aside()?;
    }
    let (start, fallback) = match &args.resume {
        None => (Start::Fresh, None),
        Some(run) => (Start::Resume, Some(RunDir::new(run).latest()?.join("config.toml"))),
    };
    let mut config = args.flags.resolve(fallback)?.config;
    if let Some(run) = &args.resume {
        config.checkpoint.run_dir.clone_from(run);
    }
    let report = match args.device.open(config.train.compute)? {
        (Place::Cpu, dtype) => {
            fit::run_until::<Autodiff<Flex>>(&config, start, (&Default::default(), dtype), &stop)?
        }
        (Place::Cuda(device), dtype) => {
            fit::run_until::<Autodiff<Cuda>>(&config, start, (&device, dtype), &stop)?
        }
    };
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report, out)?;
    }
    match report.stopped {
        true => Err(Stopped.into()),
        false => Ok(true),
    }
}

fn print(report: &FitReport, out: &mut dyn Write) -> std::io::Result<()> {
    let FitReport { steps, new_steps, tokens, seconds, samples: (train, held_out), .. } = report;
    writeln!(out, "samples            {train} trained on, {held_out} held out")?;
    writeln!(out, "draft vocabulary   covers {:.2} %", 100.0 * report.vocab_coverage)?;
    writeln!(
        out,
        "steps              {steps} ({new_steps} now, {tokens} tokens in {seconds:.1} s)"
    )?;
    if let Some(length) = report.acceptance_length {
        writeln!(out, "acceptance length  {length:.3} (held out, teacher-forced, bonus included)")?;
    }
    writeln!(out, "best checkpoint    {}", report.best.display())?;
    writeln!(out, "newest checkpoint  {}", report.checkpoint.display())
}
