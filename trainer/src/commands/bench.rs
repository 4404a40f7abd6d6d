//! `trainer bench`: time of one training step on synthetic data, beside the speed of a plain
//! matrix product on the same cores or, in `bench_cuda`, the same GPU.

use std::io::Write;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use kernels::gemm::{Threads, peak};
use trainer::config::Compute;
use trainer::cost::{ProductCost, products};
use trainer::draft::AttentionConfig;
use trainer::exchange::Transport;
use trainer::masks::{RowPlan, row_masks};
use trainer::ops::Activations;
use trainer::{
    BatchTokens, DraftConfig, DraftVocabulary, Eagle3Draft, FrozenTarget, TargetWeights,
    TrainBatch, TttOptions, ttt_step,
};

use super::Usage;
use super::device::{DeviceArgs, Place, parse_compute, parse_transport};

type B = Autodiff<Flex>;

/// Time training steps on synthetic data. In torchrun's environment each process takes a batch a
/// step (on the CPU each for itself), and the first one prints.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Width of the residual stream.
    #[arg(long, default_value_t = 576)]
    pub(super) hidden: usize,
    /// Width of the MLP.
    #[arg(long, default_value_t = 1536)]
    pub(super) intermediate: usize,
    /// Query heads.
    #[arg(long, default_value_t = 9)]
    pub(super) heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 3)]
    pub(super) kv_heads: usize,
    /// Entries of a head.
    #[arg(long, default_value_t = 64)]
    pub(super) head_dim: usize,
    /// Target vocabulary.
    #[arg(long, default_value_t = 49152)]
    pub(super) vocab: usize,
    /// Draft vocabulary.
    #[arg(long, default_value_t = 8192)]
    pub(super) draft_vocab: usize,
    /// Rows of the packed batch.
    #[arg(long, default_value_t = 1024)]
    pub(super) tokens: usize,
    /// Rows of one document.
    #[arg(long, default_value_t = 256)]
    pub(super) document: usize,
    /// Steps of the draft.
    #[arg(long, default_value_t = 7)]
    pub(super) steps: usize,
    /// Share of each document, at its end, that is trained.
    #[arg(long, default_value_t = 0.5)]
    pub(super) answer_fraction: f64,
    /// Compute every row at every step.
    #[arg(long)]
    pub(super) dense: bool,
    /// Timed repetitions; the fastest counts.
    #[arg(long, default_value_t = 5)]
    pub(super) repeat: usize,
    /// Teacher states whose logits exist at a time.
    #[arg(long, default_value_t = 512)]
    pub(super) teacher_rows: usize,
    /// Time each product alone too (CUDA).
    #[arg(long)]
    pub(super) shapes: bool,
    /// How gradients and parameters cross between the GPUs of several processes: copies (by copy
    /// engines, within a host), nccl, or auto: copies where they can.
    #[arg(long, default_value = "auto", value_parser = parse_transport)]
    pub(super) exchange: Transport,
    /// Make gate and up of the MLP again in the backward pass.
    #[arg(long)]
    pub(super) recompute: bool,
    /// Type of states and products.
    #[arg(long, default_value = "auto", value_parser = parse_compute)]
    compute: Compute,
    #[command(flatten)]
    device: DeviceArgs,
}

impl BenchArgs {
    pub(super) fn config(&self) -> DraftConfig {
        DraftConfig {
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_attention_heads: self.heads,
            attention: AttentionConfig::Gqa {
                num_key_value_heads: self.kv_heads,
                head_dim: self.head_dim,
            },
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            yarn: None,
            vocab_size: self.vocab,
            draft_vocab_size: self.draft_vocab,
            num_aux: 3,
            fc_norm: false,
            norm_output: false,
            norm_before_residual: false,
        }
    }

    pub(super) fn tokens(&self) -> anyhow::Result<BatchTokens> {
        let document = self.document.clamp(1, self.tokens.max(1));
        let prompt = (document as f64 * (1.0 - self.answer_fraction)) as usize;
        let ids = (0..self.tokens).map(|row| ((row * 7919) % self.vocab) as u32).collect();
        let mask: Vec<u8> =
            (0..self.tokens).map(|row| u8::from(row % document >= prompt)).collect();
        let mut offsets: Vec<usize> = (0..self.tokens).step_by(document).collect();
        offsets.push(self.tokens);
        Ok(BatchTokens::new(ids, &mask, offsets)?)
    }

    pub(super) fn options(&self) -> TttOptions {
        TttOptions {
            steps: self.steps,
            row_sparse: !self.dense,
            teacher_rows: self.teacher_rows,
            activations: match self.recompute {
                true => Activations::Recompute,
                false => Activations::Keep,
            },
            ..TttOptions::default()
        }
    }

    /// The products of one step, forward and backward.
    pub(super) fn products(&self, tokens: &BatchTokens, dense: bool) -> Vec<ProductCost> {
        let options = self.options();
        let plan = match dense {
            true => RowPlan::dense(self.tokens, self.steps),
            false => {
                RowPlan::sparse(tokens, &row_masks(tokens, self.steps, options.mask_mode, &[]))
            }
        };
        products(&self.config(), tokens, &plan, options.activations)
    }

    /// Their floating-point operations.
    pub(super) fn flop(&self, tokens: &BatchTokens, dense: bool) -> f64 {
        self.products(tokens, dense).iter().map(|cost| cost.forward + cost.backward).sum()
    }
}

/// Prints times, rates and the share of the speed of a plain product.
pub(crate) fn run(args: &BenchArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    if args.tokens == 0 || args.steps == 0 {
        return Err(Usage("--tokens and --steps are expected to be at least 1".into()).into());
    }
    args.config().validate()?;
    let (place, dtype, world) = args.device.open_in_world(args.compute, "bench")?;
    let passed = match place {
        Place::Cpu if world.is_first() => run_cpu(args, out),
        Place::Cpu => run_cpu(args, &mut std::io::sink()),
        Place::Cuda(device) => super::bench_cuda::run(args, (&device, dtype, &world), out),
    };
    world.finish();
    passed
}

fn run_cpu(args: &BenchArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let device = Default::default();
    let tokens = args.tokens()?;
    let fresh = Eagle3Draft::init(args.config(), 1, &device)?;
    let random = |rows: usize, width: usize, spread: f64| {
        Tensor::<B, 2>::random([rows, width], Distribution::Normal(0.0, spread), &device)
    };
    let weights = TargetWeights {
        embed_tokens: random(args.vocab, args.hidden, 0.02),
        norm: Tensor::ones([args.hidden], &device),
        norm_eps: 1e-5,
        lm_head: random(args.vocab, args.hidden, 0.02),
    };
    let every = (args.vocab / args.draft_vocab).max(1) as u32;
    let ids: Vec<u32> = (0..args.draft_vocab as u32).map(|id| id * every).collect();
    let target = FrozenTarget::new(weights, DraftVocabulary::from_targets(ids, args.vocab)?)?;
    let aux = random(args.tokens, 3 * args.hidden, 1.0);
    let batch = TrainBatch::new(tokens, aux, random(args.tokens, args.hidden, 1.0))?;

    let (mut forward, mut backward, mut loss) = (f64::INFINITY, f64::INFINITY, 0.0);
    let mut total = f64::INFINITY;
    for _ in 0..args.repeat.max(1) {
        let start = Instant::now();
        let draft = Eagle3Draft::<B>::tracked(&fresh);
        let output = ttt_step(&draft, &target, &batch, &args.options())?;
        loss = output.metrics().loss(args.options().step_decay);
        let middle = start.elapsed().as_secs_f64();
        let mut gradients = output.backward();
        let gradients = draft.gradients(&mut gradients);
        let end = start.elapsed().as_secs_f64();
        drop(gradients);
        (forward, backward) = (forward.min(middle), backward.min(end - middle));
        total = total.min(end);
    }
    let gflop = args.flop(batch.tokens(), args.dense) / 1e9;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let limit = peak(Threads(threads));
    writeln!(out, "loss             {loss:10.4}")?;
    writeln!(out, "forward          {:10.1} ms", forward * 1e3)?;
    writeln!(out, "backward         {:10.1} ms", backward * 1e3)?;
    writeln!(out, "step             {:10.1} ms", total * 1e3)?;
    writeln!(out, "tokens           {:10.1} /s", args.tokens as f64 / total)?;
    writeln!(out, "products         {gflop:10.1} GFLOP a step")?;
    writeln!(out, "speed            {:10.1} GFLOP/s", gflop / total)?;
    writeln!(out, "plain product    {limit:10.1} GFLOP/s")?;
    writeln!(out, "share of it      {:10.1} %", 100.0 * gflop / total / limit)?;
    Ok(true)
}
