//! Launches of the attention of the training-time test, forward and backward. Knows nothing of
//! projections or of steps before.

use super::tensor_map::TensorMap;
use super::views::HeadsArg;
use super::{
    AttentionVariant, CudaError, DeviceHeads, DeviceVector, Dtype, Launcher, Shape, ensure,
};

/// Widest head.
const MAX_WIDTH: usize = 256;
/// Most steps whose keys a row may have of its own.
pub const MAX_OWN: usize = 15;

/// Sizes and plan of an attention.
#[derive(Clone, Copy, Debug)]
pub struct TrainPlan {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of queries and keys.
    pub qk_dim: usize,
    /// Width of values.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// By query row the end of the step-0 keys it sees; ascending within a document.
    pub visible: DeviceVector<u32>,
    /// By document: first query, end of queries, first key, end of keys; row-major [documents, 4].
    pub segments: DeviceVector<u32>,
    /// Most queries and most keys of a document.
    pub longest: [usize; 2],
    /// The kernels for step-0 keys; the fastest for shapes and device if not said.
    pub variant: Option<AttentionVariant>,
}

/// Operands of one launch. All of one type.
#[derive(Clone, Copy, Debug)]
pub struct TrainOperands {
    /// [queries, heads, qk_dim].
    pub q: DeviceHeads,
    /// Step-0 keys, [keys, kv_heads, qk_dim].
    pub k: DeviceHeads,
    /// Step-0 values, [keys, kv_heads, v_dim].
    pub v: DeviceHeads,
    /// [queries, heads, v_dim]: written by the forward pass, gradient of the output for the others.
    pub out: DeviceHeads,
    /// Logarithm of each softmax's denominator, row-major [queries, heads].
    pub lse: DeviceVector<f32>,
}

/// What a row made itself at one step: keys, values and in which row they are.
#[derive(Clone, Copy, Debug)]
pub struct OwnStep {
    /// [rows of the step, kv_heads, qk_dim].
    pub keys: DeviceHeads,
    /// [rows of the step, kv_heads, v_dim].
    pub values: DeviceHeads,
    /// By query row.
    pub rows: DeviceVector<u32>,
    /// What the gradients of keys and values are added to; only for the backward pass.
    pub gradients: Option<[DeviceHeads; 2]>,
}

/// Gradient views of the own keys' launch.
#[derive(Clone, Copy, Debug)]
pub struct OwnGradient {
    /// Gradient of the output, [queries, heads, v_dim].
    pub d_out: DeviceHeads,
    /// Written if there are own keys: their part of the queries' gradient.
    pub d_q: DeviceHeads,
    /// Written: the output along its gradient, row-major [queries, heads].
    pub delta: DeviceVector<f32>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct TrainAttentionArgs {
    q: HeadsArg,
    k: HeadsArg,
    v: HeadsArg,
    out: HeadsArg,
    d_first: HeadsArg,
    d_second: HeadsArg,
    lse: u64,
    delta: u64,
    visible: u64,
    segments: u64,
    heads: u32,
    kv_heads: u32,
    qk_dim: u32,
    v_dim: u32,
    accumulate: u32,
    scale: f32,
}

/// The same for the kernels that copy by TMA.
#[repr(C)]
#[derive(Clone, Copy)]
struct WgmmaArgs {
    /// Of q, k, v and out.
    maps: [TensorMap; 4],
    base: TrainAttentionArgs,
    /// Blocks of 128 rows of the longest document.
    blocks: u32,
    documents: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct OwnArgs {
    q: HeadsArg,
    out: HeadsArg,
    d_out: HeadsArg,
    d_q: HeadsArg,
    keys: [HeadsArg; MAX_OWN],
    values: [HeadsArg; MAX_OWN],
    d_keys: [HeadsArg; MAX_OWN],
    d_values: [HeadsArg; MAX_OWN],
    own: [u64; MAX_OWN],
    lse: u64,
    delta: u64,
    rows: u32,
    heads: u32,
    kv_heads: u32,
    qk_dim: u32,
    v_dim: u32,
    steps: u32,
    scale: f32,
}

const NONE: HeadsArg = HeadsArg { address: 0, row_stride: 0, head_stride: 0 };

/// Which of the three kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Keys,
    Queries,
}

/// Rows of the tiles that the kernels of Hopper copy, and bytes of shared memory they need.
struct WgmmaTiles {
    queries: usize,
    keys: usize,
    shared: usize,
}

impl WgmmaTiles {
    fn of(pass: Pass, plan: &TrainPlan) -> Self {
        let (qk, v) = (plan.qk_dim, plan.v_dim);
        let wide = qk > 128;
        // What is resident, and stages of what streams; barriers, and room to align.
        let (queries, keys, values) = match pass {
            Pass::Forward => (128, 128, 128 * (3 * qk + 2 * v)),
            Pass::Keys if wide => (32, 128, (128 + 3 * 32) * (qk + v)),
            Pass::Keys => (64, 128, (128 + 3 * 64) * (qk + v)),
            Pass::Queries if wide => (128, 64, (128 + 3 * 64) * (qk + v)),
            Pass::Queries => (128, 128, 128 * (4 * qk + 3 * v)),
        };
        let columns = if pass == Pass::Keys { 3 * 3 * 4 * queries } else { 0 };
        Self { queries, keys, shared: 2 * values + columns + 1024 + 256 }
    }

    fn maps(&self, plan: &TrainPlan, x: &TrainOperands) -> Result<[TensorMap; 4], CudaError> {
        let TrainPlan { heads, kv_heads, qk_dim, v_dim, .. } = *plan;
        Ok([
            TensorMap::of(&x.q, [heads, qk_dim], self.queries)?,
            TensorMap::of(&x.k, [kv_heads, qk_dim], self.keys)?,
            TensorMap::of(&x.v, [kv_heads, v_dim], self.keys)?,
            TensorMap::of(&x.out, [heads, v_dim], self.queries)?,
        ])
    }
}

impl TrainPlan {
    fn check(&self, x: &TrainOperands) -> Result<(), CudaError> {
        let fits = self.heads > 0
            && self.kv_heads > 0
            && self.heads.is_multiple_of(self.kv_heads)
            && (1..=MAX_WIDTH).contains(&self.qk_dim)
            && (1..=MAX_WIDTH).contains(&self.v_dim)
            && self.visible.len == x.q.rows
            && x.out.rows == x.q.rows
            && x.k.rows == x.v.rows
            && x.lse.len == x.q.rows * self.heads
            && self.segments.len.is_multiple_of(4)
            && self.segments.len / 4 <= 65_535
            && self.heads <= 65_535
            && [x.k, x.v, x.out].iter().all(|view| view.dtype == x.q.dtype);
        ensure(fits, || format!("{self:?} of {x:?}"))
    }

    /// Whether the tensor-core kernels take these shapes.
    fn fits_tensor_cores(&self, views: &[&DeviceHeads]) -> bool {
        views.iter().all(|view| view.dtype == Dtype::Bf16 && view.in_vectors() && view.rows > 0)
            && [(192, 128), (128, 128), (64, 64)].contains(&(self.qk_dim, self.v_dim))
    }

    /// Four values a step where widths and addresses allow it.
    fn lanes(&self, views: &[&DeviceHeads]) -> usize {
        let whole = |view: &&DeviceHeads| {
            let bytes = 4 * view.dtype.size();
            view.address.is_multiple_of(bytes as u64)
                && view.row_stride.is_multiple_of(4)
                && view.head_stride.is_multiple_of(4)
        };
        let widths = self.qk_dim.is_multiple_of(4) && self.v_dim.is_multiple_of(4);
        if widths && views.iter().all(whole) { 4 } else { 1 }
    }
}

impl Launcher<'_> {
    /// Attention of the queries against the step-0 keys, with `lse`.
    pub fn train_attention(&self, plan: &TrainPlan, x: &TrainOperands) -> Result<(), CudaError> {
        self.attention_pass(plan, x, (Pass::Forward, [x.out, x.out], x.lse, false))
    }

    /// Gradients of step-0 keys and values, added to what is there. `x.out` is the gradient of the
    /// output; `delta` comes from [`Launcher::own_gradient`].
    pub fn train_attention_keys(
        &self,
        plan: &TrainPlan,
        x: &TrainOperands,
        delta: DeviceVector<f32>,
        gradients: [DeviceHeads; 2],
    ) -> Result<(), CudaError> {
        self.attention_pass(plan, x, (Pass::Keys, gradients, delta, true))
    }

    /// Gradient of the queries through the step-0 keys, written, or added to what is there.
    pub fn train_attention_queries(
        &self,
        plan: &TrainPlan,
        x: &TrainOperands,
        delta: DeviceVector<f32>,
        (gradient, add): (DeviceHeads, bool),
    ) -> Result<(), CudaError> {
        self.attention_pass(plan, x, (Pass::Queries, [gradient, gradient], delta, add))
    }

    fn attention_pass(
        &self,
        plan: &TrainPlan,
        x: &TrainOperands,
        (pass, written, delta, accumulate): (Pass, [DeviceHeads; 2], DeviceVector<f32>, bool),
    ) -> Result<(), CudaError> {
        plan.check(x)?;
        ensure(delta.len == x.lse.len, || format!("delta of {} values", delta.len))?;
        let documents = plan.segments.len / 4;
        if documents == 0 || x.q.rows == 0 {
            return Ok(());
        }
        let views = [&x.q, &x.k, &x.v, &x.out, &written[0], &written[1]];
        let (kind, longest, heads) = match pass {
            Pass::Forward => ("", plan.longest[0], plan.heads),
            Pass::Keys => ("_keys", plan.longest[1], plan.kv_heads),
            Pass::Queries => ("_queries", plan.longest[0], plan.heads),
        };
        let (qk, v) = (plan.qk_dim, plan.v_dim);
        let variant = self.train_variant(plan, &views)?;
        let (name, rows, threads, shared) = match variant {
            AttentionVariant::Wgmma => {
                let tiles = WgmmaTiles::of(pass, plan);
                (format!("train_attention{kind}_wgmma_{qk}_{v}"), 128, 384, tiles.shared)
            }
            AttentionVariant::Mma => {
                // A tile of 128 rows and two of 64 columns, in bf16.
                let resident = if pass == Pass::Forward { qk } else { qk + v };
                let shared = 2 * (128 * resident + 2 * 64 * (qk + v));
                (format!("train_attention{kind}_mma_{qk}_{v}"), 128, 256, shared)
            }
            AttentionVariant::Any => {
                let (dtype, lanes) = (x.q.dtype.name(), plan.lanes(&views));
                (format!("train_attention{kind}_any_{dtype}_v{lanes}"), 8, 256, 0)
            }
        };
        let base = TrainAttentionArgs {
            q: x.q.arg(),
            k: x.k.arg(),
            v: x.v.arg(),
            out: x.out.arg(),
            d_first: written[0].arg(),
            d_second: written[1].arg(),
            lse: x.lse.address,
            delta: delta.address,
            visible: plan.visible.address,
            segments: plan.segments.address,
            heads: plan.heads as u32,
            kv_heads: plan.kv_heads as u32,
            qk_dim: qk as u32,
            v_dim: v as u32,
            accumulate: u32::from(accumulate),
            scale: plan.scale,
        };
        let blocks = u32::try_from(longest.div_ceil(rows)).unwrap_or(u32::MAX);
        let (block, shared) = ((threads, 1, 1), shared as u32);
        if variant != AttentionVariant::Wgmma {
            let grid = (blocks, heads as u32, documents as u32);
            return self.launch(&name, Shape { grid, block, shared }, &base);
        }
        // Blocks stay, and go over pairs of rows: those with much and with little work.
        let pairs = longest.div_ceil(rows).div_ceil(2) * heads * documents;
        ensure(u32::try_from(pairs).is_ok(), || format!("{pairs} pieces of attention"))?;
        let grid = (pairs.clamp(1, self.kernels.multiprocessors()) as u32, 1, 1);
        let maps = WgmmaTiles::of(pass, plan).maps(plan, x)?;
        let args = WgmmaArgs { maps, base, blocks, documents: documents as u32 };
        self.launch(&name, Shape { grid, block, shared }, &args)
    }

    /// The kernels for step-0 keys that the plan asks for, or the fastest.
    fn train_variant(
        &self,
        plan: &TrainPlan,
        views: &[&DeviceHeads],
    ) -> Result<AttentionVariant, CudaError> {
        let hopper = self.kernels.arch().name() == "sm_90a";
        let fits = |variant: &AttentionVariant| match variant {
            AttentionVariant::Wgmma => hopper && plan.fits_tensor_cores(views),
            AttentionVariant::Mma => plan.fits_tensor_cores(views),
            AttentionVariant::Any => true,
        };
        let all = [AttentionVariant::Wgmma, AttentionVariant::Mma, AttentionVariant::Any];
        let asked = plan.variant.is_none_or(|variant| fits(&variant));
        ensure(asked, || format!("attention by {:?} of {plan:?}", plan.variant))?;
        let fastest = all.into_iter().find(fits).unwrap_or(AttentionVariant::Any);
        Ok(plan.variant.unwrap_or(fastest))
    }

    /// Takes the keys that rows made themselves into output and `lse` of the forward pass.
    pub fn merge_own(
        &self,
        plan: &TrainPlan,
        x: &TrainOperands,
        own: &[OwnStep],
    ) -> Result<(), CudaError> {
        plan.check(x)?;
        if own.is_empty() || x.q.rows == 0 {
            return Ok(());
        }
        let args = own_args(plan, x, own, None)?;
        self.own_pass("own", plan, x.q.dtype, &args)
    }

    /// `delta`, and the gradients through the own keys. `x.out` is the output itself. Without own
    /// keys `d_q` is not written.
    pub fn own_gradient(
        &self,
        plan: &TrainPlan,
        x: &TrainOperands,
        own: &[OwnStep],
        gradient: &OwnGradient,
    ) -> Result<(), CudaError> {
        plan.check(x)?;
        if x.q.rows == 0 {
            return Ok(());
        }
        let args = own_args(plan, x, own, Some(gradient))?;
        self.own_pass("own_backward", plan, x.q.dtype, &args)?;
        if own.is_empty() || plan.heads == plan.kv_heads {
            return Ok(());
        }
        self.own_pass("own_shared", plan, x.q.dtype, &args)
    }

    fn own_pass(
        &self,
        kind: &str,
        plan: &TrainPlan,
        dtype: Dtype,
        (args, step): &(OwnArgs, usize),
    ) -> Result<(), CudaError> {
        let heads = if kind == "own_shared" { plan.kv_heads } else { plan.heads };
        let widest = plan.qk_dim.max(plan.v_dim);
        let lanes = if *step < 8 { 32 } else { widest.div_ceil(8).next_power_of_two().max(8) };
        let name = format!("train_attention_{kind}_{}_{step}_{lanes}", dtype.name());
        let parts = args.rows as usize * heads;
        ensure(u32::try_from(parts).is_ok(), || format!("{parts} rows of heads"))?;
        self.launch(&name, Shape::new(parts.div_ceil(256 / lanes), 256)?, args)
    }
}

fn own_args(
    plan: &TrainPlan,
    x: &TrainOperands,
    own: &[OwnStep],
    gradient: Option<&OwnGradient>,
) -> Result<(OwnArgs, usize), CudaError> {
    let mut views = vec![&x.q, &x.out];
    for step in own {
        views.extend([&step.keys, &step.values]);
        views.extend(step.gradients.iter().flatten());
    }
    if let Some(gradient) = gradient {
        views.extend([&gradient.d_out, &gradient.d_q]);
    }
    let fits = own.len() <= MAX_OWN
        && views.iter().all(|view| view.dtype == x.q.dtype)
        && own.iter().all(|step| step.rows.len == x.q.rows)
        && own.iter().all(|step| step.gradients.is_some() == gradient.is_some())
        && gradient.is_none_or(|g| g.delta.len == x.lse.len && g.d_q.rows == x.q.rows);
    ensure(fits, || format!("{} own steps of {x:?}", own.len()))?;
    let mut args = OwnArgs {
        q: x.q.arg(),
        out: x.out.arg(),
        d_out: gradient.map_or(NONE, |g| g.d_out.arg()),
        d_q: gradient.map_or(NONE, |g| g.d_q.arg()),
        keys: [NONE; MAX_OWN],
        values: [NONE; MAX_OWN],
        d_keys: [NONE; MAX_OWN],
        d_values: [NONE; MAX_OWN],
        own: [0; MAX_OWN],
        lse: x.lse.address,
        delta: gradient.map_or(0, |g| g.delta.address),
        rows: x.q.rows as u32,
        heads: plan.heads as u32,
        kv_heads: plan.kv_heads as u32,
        qk_dim: plan.qk_dim as u32,
        v_dim: plan.v_dim as u32,
        steps: own.len() as u32,
        scale: plan.scale,
    };
    for (at, step) in own.iter().enumerate() {
        (args.keys[at], args.values[at]) = (step.keys.arg(), step.values.arg());
        args.own[at] = step.rows.address;
        if let Some([keys, values]) = step.gradients {
            (args.d_keys[at], args.d_values[at]) = (keys.arg(), values.arg());
        }
    }
    let wide = x.q.dtype == Dtype::Bf16
        && plan.qk_dim.is_multiple_of(8)
        && plan.v_dim.is_multiple_of(8)
        && views.iter().all(|view| view.in_vectors());
    let step = match (x.q.dtype, wide) {
        (Dtype::Bf16, true) => 8,
        (Dtype::Bf16, false) => 1,
        (Dtype::F32, _) => plan.lanes(&views),
    };
    Ok((args, step))
}
