//! `extractor bench`: prefill rate of a target, beside the product rate of the same machine.

mod report;
mod shape;

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use extractor::batch::TokenBatch;
use extractor::target::{
    Compute, Device, EngineOptions, Exchange, FreeMemory, RankGroup, StageTimes, TargetModel,
    Wanted, gemm_ceiling,
};
use shared::{LayerIndex, TokenSample};

use self::report::Measured;
use self::shape::Shape;
use super::Usage;

/// Arguments of `extractor bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Directory of the model: config.json and safetensors files.
    #[arg(long, required_unless_present = "shape", conflicts_with = "shape")]
    model: Option<PathBuf>,
    /// Random weights in the dimensions of a model instead; needs --device cuda.
    #[arg(long, value_enum)]
    shape: Option<Shape>,
    /// Decoder layers of the shape.
    #[arg(long, default_value_t = 4, requires = "shape")]
    layers: usize,
    /// Which rank's share of the shape the first GPU holds.
    #[arg(long, default_value_t = 0, requires = "shape")]
    as_rank: usize,
    /// Ranks that the shape is spread over.
    #[arg(long, default_value_t = 8, requires = "shape")]
    of: usize,
    /// GPUs, each with a rank's share; sums go across them.
    #[arg(long, default_value_t = 1, requires = "shape")]
    gpus: usize,
    /// Where to compute: cpu or cuda.
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// How rows cross GPUs: nccl or copies.
    #[arg(long, value_enum, default_value_t)]
    exchange: Exchange,
    /// Number format of the products.
    #[arg(long, value_enum, default_value_t)]
    compute: Compute,
    /// Tokens a batch.
    #[arg(long, default_value_t = 2048)]
    tokens: usize,
    /// Tokens a sequence.
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Ranks of tensor parallelism.
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// CPU threads of all ranks together; one a core if not given.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Batches that are timed; one more warms up.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

/// Prints tokens/s, operations a second and where the time goes.
pub(crate) fn run(args: &BenchArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let (tokens, seq_len) = (args.tokens, args.seq_len);
    let refused = |text: String| Err(Usage(text).into());
    if seq_len == 0 || tokens < seq_len {
        return refused(format!(
            "--tokens {tokens} is expected to be at least --seq-len {seq_len}, and that at least 1"
        ));
    }
    if args.repeats == 0 {
        return refused("--repeats 0 measures nothing: at least 1 is expected".into());
    }
    if args.shape.is_some() && args.device != Device::Cuda {
        return refused("--shape needs --device cuda; name a --model to measure the CPU".into());
    }
    let memory = match args.device {
        Device::Cuda => Some(FreeMemory::watch()?),
        Device::Cpu => None,
    };
    // Before the memory is taken: the ceiling wants a little of its own.
    let ceiling = match args.device {
        Device::Cuda => gemm_ceiling()?,
        Device::Cpu => {
            let threads = args.threads.map_or_else(std::thread::available_parallelism, Ok)?;
            kernels::gemm::peak(kernels::Threads(threads.get())) / 1e3
        }
    };
    let mut target = open(args)?;
    let batch = batch(args, ids(args, &target))?;
    let before = kernels::cuda::allocations();
    let measured = measure(&mut target, &batch, args, ceiling)?;
    measured.print(&target, args, out)?;
    if let (Some(memory), Some(planned)) = (memory, target.planned_bytes().first()) {
        let taken = memory.taken()?;
        writeln!(
            out,
            "memory     {:10.3}  GB planned for the first rank, {:.3} taken ({:+.1} %); \
             allocations after start: {}",
            *planned as f64 / 1e9,
            taken as f64 / 1e9,
            100.0 * (taken as f64 / *planned as f64 - 1.0),
            kernels::cuda::allocations() - before
        )?;
    }
    Ok(true)
}

fn open(args: &BenchArgs) -> anyhow::Result<RankGroup> {
    let tp = if args.shape.is_some() { args.of } else { args.tp };
    let options = EngineOptions {
        device: args.device,
        compute: args.compute,
        exchange: args.exchange,
        batch_tokens: args.tokens,
        tp,
        threads: args.threads,
        ..EngineOptions::new(args.model.clone().unwrap_or_default())
    };
    Ok(match args.shape {
        None => RankGroup::open(&options)?,
        Some(shape) => {
            let spec = shape.spec(args.layers)?;
            RankGroup::open_shape(&options, spec, [args.as_rank, args.gpus])?
        }
    })
}

/// Ids below this have embeddings on the ranks that there are.
fn ids(args: &BenchArgs, target: &RankGroup) -> std::ops::Range<usize> {
    let vocab = || target.plans().iter().map(|plan| plan.vocab.clone());
    match args.shape {
        None => 0..target.spec().vocab_size,
        Some(_) => {
            let start = vocab().map(|part| part.start).min().unwrap_or(0);
            start..vocab().map(|part| part.end).max().unwrap_or(1)
        }
    }
}

fn measure(
    target: &mut RankGroup,
    batch: &TokenBatch,
    args: &BenchArgs,
    ceiling: f64,
) -> anyhow::Result<Measured> {
    let layers = target.spec().num_layers;
    // The last layer makes all run; on a GPU the one before leaves while it does.
    let mut wanted = vec![LayerIndex(u16::try_from(layers - 1)?)];
    if args.device == Device::Cuda && layers > 1 {
        wanted.insert(0, LayerIndex(u16::try_from(layers - 2)?));
    }
    let wanted = Wanted { layers: wanted, ..Wanted::default() };
    target.probe(batch, wanted.clone())?.capture.recycle();
    let mut runs: Vec<(Duration, StageTimes)> = Vec::with_capacity(args.repeats);
    let mut captured = 0;
    for _ in 0..args.repeats {
        let start = Instant::now();
        let probe = target.probe(batch, wanted.clone())?;
        runs.push((start.elapsed(), probe.times));
        captured = probe.capture.layers.iter().map(|layer| layer.rows.bytes()).sum();
        probe.capture.recycle();
    }
    runs.sort_by_key(|(time, _)| *time);
    let best = runs.first().map_or(Duration::ZERO, |(time, _)| *time);
    let (median, times) = runs.get(runs.len() / 2).copied().context("no batch was timed")?;
    Ok(Measured { tokens: batch.tokens(), ceiling, best, median, times, captured })
}

fn batch(args: &BenchArgs, ids: std::ops::Range<usize>) -> anyhow::Result<TokenBatch> {
    let mut state = 1u64;
    let samples = (0..args.tokens / args.seq_len)
        .map(|_| {
            let ids = (0..args.seq_len).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (ids.start as u64 + (state >> 33) % ids.len().max(1) as u64) as u32
            });
            TokenSample::new(ids.collect(), vec![0; args.seq_len])
        })
        .collect::<Result<_, _>>()?;
    Ok(TokenBatch::new(samples))
}
