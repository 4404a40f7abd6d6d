//! `trainer bench --device cuda`: whole optimizer steps on a GPU, what their time is spent on, and
//! the floor that the products alone would take.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use burn::backend::cuda::CudaDevice;
use burn::backend::{Autodiff, Cuda};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, FloatDType, Tensor};
use kernels::cuda::CudaError;
use trainer::cost::{Keeping, MemoryPlan};
use trainer::cuda::{Part, settle, start_timer, take_times, tensor_memory};
use trainer::draft::ParamShapeError;
use trainer::ops::DraftGradients;
use trainer::optimizer::{AdamW, AdamWConfig};
use trainer::reduction::Reduction;
use trainer::shards::Shards;
use trainer::world::World;
use trainer::{
    DraftOps, DraftVocabulary, Eagle3Draft, FrozenTarget, Param, TargetWeights, TrainBatch,
    TttOptions, ttt_step,
};

use super::bench::BenchArgs;

type B = Autodiff<Cuda>;

const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, clip: 0.5, frozen: None };
/// Side of the square product that shows what the GPU can do.
const SQUARE: usize = 8192;

/// Draft, target and batch of the bench.
struct Setting {
    draft: Eagle3Draft<Cuda>,
    optimizer: AdamW<Cuda>,
    target: FrozenTarget<B>,
    batch: TrainBatch<B>,
    options: TttOptions,
    shards: Shards<Cuda>,
}

/// Milliseconds of a step, on average over steps that follow each other.
struct Timed {
    whole: f64,
    parts: Vec<f64>,
    loss: f64,
}

fn random(
    [rows, cols]: [usize; 2],
    spread: f64,
    (device, dtype): (&CudaDevice, FloatDType),
) -> Tensor<Cuda, 2> {
    let float = (device, DType::F32);
    let random = |rows| {
        Tensor::<Cuda, 2>::random([rows, cols], Distribution::Normal(0.0, spread), float)
            .cast(dtype)
    };
    // Large matrices repeat a part, so that no f32 copy of the whole is ever there.
    match rows % 16 {
        0 if rows >= 65_536 => {
            <Cuda as Backend>::memory_persistent_allocations(device, random(rows / 16), |x| {
                x.repeat_dim(0, 16)
            })
        }
        _ => random(rows),
    }
}

impl Setting {
    fn new(
        args: &BenchArgs,
        place: (&CudaDevice, FloatDType),
        world: &World,
    ) -> anyhow::Result<Self> {
        let (device, _) = place;
        let exact = (device, FloatDType::F32);
        let param = |shape: &[usize]| match *shape {
            [rows, cols] => Param::Matrix(random([rows, cols], 0.02, exact)),
            _ => Param::Vector(Tensor::ones([shape[0]], (device, DType::F32))),
        };
        let draft =
            <Cuda as Backend>::memory_persistent_allocations(device, args.config(), |config| {
                Eagle3Draft::<Cuda>::from_parameters::<ParamShapeError>(config, &mut |_, shape| {
                    Ok(param(shape))
                })
            })?;
        let crossing = (&*args.config().parameter_shapes(), place.1, args.exchange);
        let shards = Shards::join(world, device, crossing)?;
        let optimizer = AdamW::new(ADAMW, &draft, &shards);
        let (optimizer, draft) = optimizer.with_working_copy(draft, (place.1, &shards));
        let matrix = |shape, spread| Tensor::<B, 2>::from_inner(random(shape, spread, place));
        let weights = TargetWeights {
            embed_tokens: matrix([args.vocab, args.hidden], 0.02),
            norm: Tensor::ones([args.hidden], (device, DType::F32)),
            norm_eps: 1e-5,
            lm_head: matrix([args.vocab, args.hidden], 0.02),
        };
        let every = (args.vocab / args.draft_vocab).max(1) as u32;
        let ids: Vec<u32> = (0..args.draft_vocab as u32).map(|id| id * every).collect();
        let vocabulary = DraftVocabulary::from_targets(ids, args.vocab)?;
        let aux = matrix([args.tokens, 3 * args.hidden], 1.0);
        let last_hidden = matrix([args.tokens, args.hidden], 1.0);
        Ok(Self {
            draft,
            optimizer,
            shards,
            target: FrozenTarget::new(weights, vocabulary)?,
            batch: TrainBatch::new(args.tokens()?, aux, last_hidden)?,
            options: TttOptions {
                teacher_rows: args.teacher_rows.max(<Cuda as DraftOps>::TEACHER_ROWS),
                ..args.options()
            },
        })
    }

    /// A whole optimizer step, as `trainer fit` takes it; gives the loss.
    fn step(&mut self, device: &CudaDevice) -> anyhow::Result<f64> {
        let tracked = Eagle3Draft::<B>::tracked(&self.draft);
        let reduction = Arc::new(Reduction::new(&self.draft, &self.shards, None));
        let counting = reduction.follow(&tracked);
        let mut output = ttt_step(&tracked, &self.target, &self.batch, &self.options)?;
        let mut gradients = output.backward();
        output.fetch();
        reduction.add(tracked.received(&mut gradients));
        let loss = output.metrics().loss(self.options.step_decay);
        drop((output, tracked, counting));
        let gradients = Cuda::on_device(device, || reduction.finish(&self.draft))?;
        self.optimizer.update(&mut self.draft, gradients, (1e-4, &self.shards))?;
        match <Cuda as DraftOps>::fault(device) {
            Some(fault) => Err(fault.into()),
            None => Ok(loss),
        }
    }

    fn steps(&mut self, count: usize, device: &CudaDevice) -> anyhow::Result<Timed> {
        settle(device)?;
        take_times(device)?;
        let clock = Instant::now();
        let mut loss = 0.0;
        for _ in 0..count {
            loss = self.step(device)?;
        }
        settle(device)?;
        let whole = clock.elapsed().as_secs_f64() * 1e3 / count as f64;
        let parts = take_times(device)?.into_iter().map(|part| part / count as f64).collect();
        Ok(Timed { whole, parts, loss })
    }
}

/// TFLOP/s of a square product of bf16 matrices, or of f32 ones.
fn ceiling((device, dtype): (&CudaDevice, FloatDType)) -> Result<f64, CudaError> {
    const TIMES: usize = 20;
    let matrix = || random([SQUARE, SQUARE], 1.0, (device, dtype));
    let (x, weight) = (matrix(), matrix());
    drop(Cuda::project(x.clone(), weight.clone()));
    settle(device)?;
    take_times(device)?;
    for _ in 0..TIMES {
        drop(Cuda::project(x.clone(), weight.clone()));
    }
    let gemm = take_times(device)?.into_iter().sum::<f64>();
    Ok(2.0 * (SQUARE as f64).powi(3) * TIMES as f64 / gemm / 1e9)
}

/// TFLOP/s of each kind of product alone, 20 times in a row: forward, gradient of the input, and
/// gradient of the weight added to a sum.
fn shapes(
    args: &BenchArgs,
    place: (&CudaDevice, FloatDType),
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let (q, kv) = (args.heads * args.head_dim, args.kv_heads * args.head_dim);
    let (h, inner) = (args.hidden, args.intermediate);
    let list = [
        ("queries", q, h),
        ("keys", kv, h),
        ("attention output", h, q),
        ("gate", inner, h),
        ("down", h, inner),
        ("draft head", args.draft_vocab, h),
    ];
    for (name, rows, cols) in list {
        let (x, weight) =
            (random([args.tokens, cols], 1.0, place), random([rows, cols], 0.02, place));
        let gradient = random([args.tokens, rows], 1.0, place);
        let mut sum = random([rows, cols], 1.0, place);
        let flop = 2.0 * (args.tokens * rows * cols) as f64;
        let mut rates = [0.0; 3];
        for (kind, rate) in rates.iter_mut().enumerate() {
            take_times(place.0)?;
            for _ in 0..20 {
                match kind {
                    0 => drop(Cuda::project(x.clone(), weight.clone())),
                    1 => drop(Cuda::project_input_gradient(
                        gradient.clone(),
                        weight.clone(),
                        0..cols,
                        None,
                    )),
                    _ => {
                        let (gradient, x) = (gradient.clone(), x.clone());
                        sum = Cuda::project_weight_gradient(gradient, x, (0, cols), Some(sum));
                    }
                }
            }
            *rate = flop * 20.0 / take_times(place.0)?.into_iter().sum::<f64>() / 1e9;
        }
        let shape = format!("{} x {rows} x {cols}", args.tokens);
        let [forward, input, weight] = rates;
        writeln!(out, "  {name:<17}{shape:<24}{forward:7.0}{input:7.0}{weight:7.0} TFLOP/s")?;
    }
    Ok(())
}

/// Prints times, rates, parts, floors and memory.
pub(super) fn run(
    args: &BenchArgs,
    (device, dtype, world): (&CudaDevice, FloatDType, &World),
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let place = (device, dtype);
    let start = Instant::now();
    let mut setting = Setting::new(args, place, world)?;
    // What making it took goes back.
    <Cuda as Backend>::memory_cleanup(device);
    let first = setting.steps(1, device)?;
    let ready = start.elapsed().as_secs_f64();
    setting.steps(1, device)?;
    let steps = setting.steps(args.repeat.max(1), device)?;
    // Apart, because measuring parts takes time too.
    start_timer(device)?;
    let apart = setting.steps(args.repeat.max(1), device)?;
    let [free, all] = settle(device)?;
    let [kept, reserved] = tensor_memory(device);
    let tokens = setting.batch.tokens().clone();
    let (sparse, dense) = (args.flop(&tokens, args.dense), args.flop(&tokens, true));
    drop(setting);
    let limit = ceiling(place)?;
    let floor = |flop: f64| flop / limit / 1e9;
    let part = |part: Part| apart.parts.get(part as usize).copied().unwrap_or(0.0);
    let rest = apart.whole - apart.parts.iter().sum::<f64>();
    if !world.is_first() {
        return Ok(true);
    }
    writeln!(out, "loss             {:10.4} (first step {:.4})", steps.loss, first.loss)?;
    writeln!(out, "step             {:10.1} ms (mean of {})", steps.whole, args.repeat.max(1))?;
    let rate = (world.size() * args.tokens) as f64 / steps.whole * 1e3;
    writeln!(out, "tokens           {rate:10.0} /s on {} GPU(s)", world.size())?;
    for (name, which) in [
        ("gemm", Part::Gemm),
        ("attention", Part::Attention),
        ("loss", Part::Loss),
        ("optimizer", Part::Optimizer),
        ("rows", Part::Rows),
        ("exchange", Part::Exchange),
    ] {
        writeln!(out, "  {name:<15}{:10.1} ms", part(which))?;
    }
    writeln!(out, "  {:<15}{rest:10.1} ms", "rest")?;
    let speed = sparse / part(Part::Gemm).max(1e-9) / 1e9;
    writeln!(out, "products         {:10.1} TFLOP a step, {speed:.0} TFLOP/s", sparse / 1e12)?;
    for cost in args.products(&tokens, args.dense) {
        let [forward, backward] = [cost.forward, cost.backward].map(|flop| flop / 1e12);
        writeln!(out, "  {:<17}{forward:8.2} forward {backward:8.2} backward", cost.name)?;
    }
    writeln!(out, "gemm ceiling     {limit:10.1} TFLOP/s ({SQUARE}^3)")?;
    let share = |flop: f64| 100.0 * floor(flop) / steps.whole;
    writeln!(out, "dense floor      {:10.1} ms, {:.1} % of the step", floor(dense), share(dense))?;
    writeln!(
        out,
        "sparse floor     {:10.1} ms, {:.1} % of the step",
        floor(sparse),
        share(sparse)
    )?;
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let value_bytes = DType::from(place.1).size() as u64;
    let keeping =
        Keeping { value_bytes, average: false, processes: world.size(), frozen: ADAMW.frozen };
    let plan = MemoryPlan::new(&args.config(), [args.tokens, args.steps], keeping);
    let total = gb(plan.total(args.options().activations));
    writeln!(out, "memory plan      {total:10.2} GB: {plan}")?;
    writeln!(out, "between steps    {:10.2} GB, reserved {:.2}", gb(kept), gb(reserved))?;
    let used = (all - free) as u64;
    writeln!(out, "device memory    {:10.2} GB in use of {:.1}", gb(used), gb(all as u64))?;
    writeln!(out, "first step after {ready:10.1} s, itself {:.1} ms", first.whole)?;
    if args.shapes {
        shapes(args, place, out)?;
    }
    Ok(true)
}
