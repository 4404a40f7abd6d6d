//! `trainer check`: compares the training step with golden files, and the operations of a device
//! with their plain forms.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use burn::backend::{Autodiff, Cuda, Flex};
use burn::tensor::FloatDType;
use trainer::config::Compute;
use trainer::cosines;
use trainer::exchange::{self, Transport};
use trainer::golden::{Difference, GoldenCase};
use trainer::gradcheck;

use super::device::{DeviceArgs, Place, parse_compute, parse_transport};

/// Compare loss, metrics and gradients of a training step with golden files.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// Golden files (safetensors).
    #[arg(long, required_unless_present_any = ["ops", "cosines", "exchange"], num_args = 1..,
          value_name = "FILE")]
    golden: Vec<PathBuf>,
    /// Compare every operation of the device, and its gradients, with plain forms on the CPU.
    #[arg(long)]
    ops: bool,
    /// Compare the gradients of a step in bf16 with those in f32, at a size of some 30 million
    /// parameters; on CUDA those of a head of 65,536 ids too.
    #[arg(long)]
    cosines: bool,
    /// Compare sums and copies across the processes of torchrun's environment with the right ones:
    /// by nccl, by copies, or auto.
    #[arg(long, num_args = 0..=1, default_missing_value = "auto", value_parser = parse_transport,
          value_name = "TRANSPORT")]
    exchange: Option<Transport>,
    /// Compute every row at every step instead of those the loss can see.
    #[arg(long)]
    dense: bool,
    /// f32, or bf16: golden files then show how far gradients turn away from those in f32.
    #[arg(long, default_value = "f32", value_parser = parse_compute)]
    compute: Compute,
    /// Largest difference allowed; gradients are relative to their largest entry. 1e-4 for f32,
    /// 1e-3 for a cosine and 3e-2 for an operation in bf16.
    #[arg(long)]
    tolerance: Option<f64>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Prints a line for each compared value; false when one is above the tolerance.
pub(crate) fn run(args: &CheckArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    if let Some(transport) = args.exchange {
        return exchange(args, transport, out);
    }
    let (place, dtype) = args.device.open(args.compute)?;
    let exact = dtype == FloatDType::F32;
    let mut passed = true;
    for path in &args.golden {
        let context = || format!("checking {}", path.display());
        let case = GoldenCase::open(path).with_context(context)?;
        let list = match (&place, exact) {
            (Place::Cpu, _) => case.compare::<Autodiff<Flex>>(!args.dense, &Default::default()),
            (Place::Cuda(device), true) => case.compare::<Autodiff<Cuda>>(!args.dense, device),
            (Place::Cuda(device), false) => case.compare_types::<Autodiff<Cuda>>(dtype, device),
        };
        let list = list.with_context(context)?;
        writeln!(out, "{}", path.display())?;
        passed &= print(&list, args.tolerance.unwrap_or(if exact { 1e-4 } else { 1e-3 }), out)?;
    }
    if args.ops {
        let list = match &place {
            Place::Cpu => gradcheck::compare::<Autodiff<Flex>>(dtype, &Default::default()),
            Place::Cuda(device) => gradcheck::compare::<Autodiff<Cuda>>(dtype, device),
        };
        writeln!(out, "operations")?;
        passed &= print(&list?, args.tolerance.unwrap_or(if exact { 1e-4 } else { 3e-2 }), out)?;
    }
    if args.cosines {
        let list = match &place {
            Place::Cpu => cosines::compare::<Autodiff<Flex>>(dtype, &Default::default())?,
            Place::Cuda(device) => {
                let mut list = cosines::compare::<Autodiff<Cuda>>(dtype, device)?;
                list.extend(cosines::compare_head::<Autodiff<Cuda>>(dtype, device)?);
                list
            }
        };
        writeln!(out, "cosines")?;
        passed &= print(&list, args.tolerance.unwrap_or(1e-3), out)?;
    }
    Ok(passed)
}

fn exchange(args: &CheckArgs, transport: Transport, out: &mut dyn Write) -> anyhow::Result<bool> {
    let (place, dtype, world) = args.device.open_in_world(args.compute, "check")?;
    // The last one is more than what crosses in one piece.
    let sizes = [[1, 1], [3, 5], [7, 33], [64, 100], [2048, 512], [6000, 4000]];
    let list = match &place {
        Place::Cpu => {
            let place = (&Default::default(), dtype, transport);
            exchange::compare::<Flex>(&world, &sizes[..5], place)
        }
        Place::Cuda(device) => {
            exchange::compare::<Cuda>(&world, &sizes, (device, dtype, transport))
        }
    };
    let list = list?;
    world.finish();
    writeln!(out, "exchange, rank {} of {}", world.rank(), world.size())?;
    Ok(print(&list, args.tolerance.unwrap_or(0.0), out)?)
}

fn print(list: &[Difference], tolerance: f64, out: &mut dyn Write) -> std::io::Result<bool> {
    let mut passed = true;
    for Difference { name, value } in list {
        let right = *value <= tolerance;
        passed &= right;
        let verdict = if right { "" } else { "  above the tolerance" };
        writeln!(out, "  {name:<64} {value:9.2e}{verdict}")?;
    }
    Ok(passed)
}
