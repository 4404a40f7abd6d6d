//! `trainer fit`: trains a draft head, or continues a run.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use burn::backend::{Autodiff, Cuda, Flex};
use extractor::shutdown::Shutdown;
use trainer::checkpoint::{Checkpoint, CheckpointError, RunDir};
use trainer::fit::{self, FitError, FitReport, Start};
use trainer::watch::{Standstill, Watch};
use trainer::world::Place as Seat;

use super::device::{DeviceArgs, Place};
use super::flags::ConfigFlags;
use super::{Stopped, end_saying};

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
    let (start, fallback) = match &args.resume {
        None => (Start::Fresh, None),
        Some(run) => (Start::Resume, Some(newest(run, args.allow_older)?.join("config.toml"))),
    };
    let mut config = args.flags.resolve(fallback)?.config;
    if let Some(run) = &args.resume {
        config.checkpoint.run_dir.clone_from(run);
    }
    start.check(&config)?;
    let (place, dtype, world) =
        args.device.open_in_world(config.train.compute, &config.to_toml())?;
    let watch = Watch::start(config.train.step_deadline, end)?;
    let (start, guards) = ((start, &world), (&stop, &watch));
    let cpu = (&Default::default(), dtype);
    let report = match place {
        Place::Cpu => fit::run::<Autodiff<Flex>>(&config, start, cpu, guards),
        Place::Cuda(device) => fit::run::<Autodiff<Cuda>>(&config, start, (&device, dtype), guards),
    };
    let report = report.map_err(|error| match (error, &args.resume) {
        (FitError::Checkpoint(error), Some(run)) => advised(error, run),
        (error, _) => error.into(),
    })?;
    world.finish();
    match (world.is_first(), args.json) {
        (true, true) => writeln!(out, "{}", serde_json::to_string(&report)?)?,
        (true, false) => print(&report, out)?,
        (false, _) => {}
    }
    match report.stopped {
        true => Err(Stopped.into()),
        false => Ok(true),
    }
}

/// What stands still can't be asked to end. A checkpoint in work keeps its temporary name.
fn end(stands: &Standstill) {
    end_saying(stands.to_string(), stands.exit_code());
}

/// The checkpoint to continue from.
fn newest(run: &Path, allow_older: bool) -> anyhow::Result<PathBuf> {
    let first = Seat::from_env()?.is_none_or(|seat| seat.rank == 0);
    let found = sound(&RunDir::new(run), (allow_older, first)).map_err(|error| advised(error, run));
    if first {
        return found;
    }
    found.context(
        "every process of a run reads its checkpoint: the run directory must be on a folder that \
         all of them share",
    )
}

/// The same, its settings compared with their digest. Of several processes the first one sets
/// damaged ones aside, before it meets the others; these only pass over them.
fn sound(run: &RunDir, (allow_older, first): (bool, bool)) -> Result<PathBuf, CheckpointError> {
    if allow_older && first {
        run.set_damaged_aside()?;
    }
    let newest = match allow_older && !first {
        true => run.newest_sound()?,
        false => run.latest()?,
    };
    // Before a damaged file is taken for settings of the user.
    Checkpoint::load_identity(&newest)?;
    Ok(newest)
}

/// Adds what to do about a checkpoint that is damaged.
fn advised(error: CheckpointError, run: &Path) -> anyhow::Error {
    let damaged = error.is_damage();
    let error = anyhow::Error::from(error);
    match damaged {
        true => error.context(format!(
            "the newest checkpoint of {} is damaged; --allow-older sets it aside and continues \
             from the newest sound one",
            run.display()
        )),
        false => error,
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
