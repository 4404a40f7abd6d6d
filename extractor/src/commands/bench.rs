//! `extractor bench`: prefill rate of a target, beside the product rate of the same machine.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use extractor::batch::TokenBatch;
use extractor::target::{EngineOptions, RankGroup, Stage, StageTimes, TargetModel, Wanted};
use shared::{LayerIndex, TokenSample};

/// Arguments of `extractor bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Directory of the model: config.json and safetensors files.
    #[arg(long)]
    model: PathBuf,
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

/// Prints tokens/s, GFLOP/s and where the time goes.
pub(crate) fn run(args: &BenchArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    ensure!(args.seq_len > 0 && args.tokens >= args.seq_len, "--tokens must be at least --seq-len");
    ensure!(args.repeats > 0, "--repeats must be at least 1");
    let options =
        EngineOptions { tp: args.tp, threads: args.threads, ..EngineOptions::new(&args.model) };
    let mut target = RankGroup::open(&options)?;
    let (vocab_size, num_layers) = (target.spec().vocab_size, target.spec().num_layers);
    let batch = batch(args, vocab_size)?;
    let last = LayerIndex(u16::try_from(num_layers - 1)?);
    let wanted = Wanted { layers: vec![last], ..Wanted::default() };
    target.probe(&batch, wanted.clone())?;
    let mut times = StageTimes::default();
    let mut rates = Vec::with_capacity(args.repeats);
    for _ in 0..args.repeats {
        let start = Instant::now();
        let probe = target.probe(&batch, wanted.clone())?;
        rates.push(batch.tokens() as f64 / start.elapsed().as_secs_f64());
        times.add(&probe.times);
    }
    // A token sees half its sequence on average.
    let flops = target.spec().flops_per_token(num_layers, args.seq_len / 2);
    rates.sort_by(f64::total_cmp);
    let rate = rates[rates.len() / 2];
    let gflops = rate * flops / 1e9;
    let threads = args.threads.map_or_else(std::thread::available_parallelism, Ok)?.get();
    let peak = kernels::gemm::peak(kernels::Threads(threads));
    writeln!(
        out,
        "tokens/s   {rate:10.1}  (median of {}, best {:.1})",
        args.repeats,
        rates[rates.len() - 1]
    )?;
    writeln!(out, "GFLOP/s    {gflops:10.1}  ({:.1} MFLOP/token)", flops / 1e6)?;
    writeln!(
        out,
        "of peak    {:10.3}  (f32 product peak {peak:.1} GFLOP/s, {threads} threads)",
        gflops / peak
    )?;
    let tokens = (batch.tokens() * args.repeats) as f64;
    for stage in Stage::ALL {
        let micros = times.get(stage).as_secs_f64() * 1e6 / tokens;
        writeln!(
            out,
            "{:10} {micros:10.2}  us/token on rank 0",
            format!("{stage:?}").to_lowercase()
        )?;
    }
    Ok(true)
}

fn batch(args: &BenchArgs, vocab_size: usize) -> anyhow::Result<TokenBatch> {
    let mut state = 1u64;
    let samples = (0..args.tokens / args.seq_len)
        .map(|_| {
            let ids = (0..args.seq_len).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 33) % vocab_size as u64) as u32
            });
            TokenSample::new(ids.collect(), vec![0; args.seq_len])
        })
        .collect::<Result<_, _>>()?;
    Ok(TokenBatch::new(samples))
}
