//! `trainer check`: compares the training step with golden files.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use trainer::golden::{Difference, GoldenCase};

/// Compare loss, metrics and gradients of a training step with golden files.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// Golden files (safetensors).
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    golden: Vec<PathBuf>,
    /// Compute every row at every step instead of those the loss can see.
    #[arg(long)]
    dense: bool,
    /// Largest difference allowed; gradients are relative to their largest entry.
    #[arg(long, default_value_t = 1e-4)]
    tolerance: f64,
}

/// Prints a line for each compared value; false when one is above the tolerance.
pub(crate) fn run(args: &CheckArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let mut passed = true;
    for path in &args.golden {
        let context = || format!("checking {}", path.display());
        let case = GoldenCase::open(path).with_context(context)?;
        let list = case
            .compare::<Autodiff<Flex>>(!args.dense, &Default::default())
            .with_context(context)?;
        writeln!(out, "{}", path.display())?;
        for Difference { name, value } in &list {
            let right = *value <= args.tolerance;
            passed &= right;
            let verdict = if right { "" } else { "  above the tolerance" };
            writeln!(out, "  {name:<52} {value:9.2e}{verdict}")?;
        }
    }
    Ok(passed)
}
