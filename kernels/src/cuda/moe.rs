//! Launches of the mixture of experts: choice, grouping of rows by expert, weighted sums. Knows
//! nothing of the experts' weights.

use super::rows::{tiled, vector_width};
use super::views::MatArg;
use super::{CudaError, DeviceMatrix, DeviceVector, Dtype, Launcher, Shape, ensure};
use crate::router::Scoring;

/// Most experts that a router chooses among.
pub const MAX_EXPERTS: usize = 1024;
/// Most groups of experts.
pub const MAX_EXPERT_GROUPS: usize = 32;
/// Most experts that are chosen among in registers.
const FEW_EXPERTS: usize = 384;
/// (row, choice) pairs that one warp puts in order.
const CHUNK: usize = 512;

/// How experts are chosen; see [`crate::router::RouterRule`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RouteRule {
    /// Scores of the experts.
    pub scoring: Scoring,
    /// Experts chosen for a row.
    pub top_k: usize,
    /// Groups of neighbouring experts of equal size; 1 for none.
    pub groups: usize,
    /// Groups that may be chosen from.
    pub kept_groups: usize,
    /// Whether the chosen weights are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// Where the router writes.
#[derive(Clone, Copy, Debug)]
pub struct RoutingViews {
    /// Expert numbers, row-major [rows, top_k].
    pub indices: DeviceVector<u32>,
    /// Weights, row-major [rows, top_k].
    pub weights: DeviceVector<f32>,
    /// Selection score of the last expert chosen minus that of the best one left: [rows].
    pub margins: DeviceVector<f32>,
}

/// Rows grouped by expert, for the experts `first..first + counts.len` held here. Within an
/// expert, rows keep their order.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    /// Number of the first expert held.
    pub first: usize,
    /// The rows of each held expert start at a multiple of this many rows.
    pub align: usize,
    /// Rows of each held expert: [held].
    pub counts: DeviceVector<u32>,
    /// Where the rows of each held expert start among all, and the end last: [held + 1].
    pub offsets: DeviceVector<u32>,
    /// Row of x of each grouped row: [rows * top_k + held * (align - 1)] values, of which those
    /// of experts count.
    pub sources: DeviceVector<u32>,
    /// Grouped row of every (row, choice), or u32::MAX where the expert is not held.
    pub places: DeviceVector<u32>,
    /// At least [`Permutation::scratch_len`] values.
    pub scratch: DeviceVector<u32>,
}

impl Permutation {
    /// Values of scratch that grouping `choices` = rows * top_k choices among `held` experts needs.
    pub fn scratch_len(choices: usize, held: usize) -> usize {
        choices.div_ceil(CHUNK) * held
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RouteArgs {
    logits: MatArg,
    bias: u64,
    indices: u64,
    weights: u64,
    margins: u64,
    rows: u32,
    experts: u32,
    top_k: u32,
    groups: u32,
    kept_groups: u32,
    normalise: u32,
    softmax: u32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PermuteArgs {
    indices: u64,
    counts: u64,
    offsets: u64,
    sources: u64,
    places: u64,
    scratch: u64,
    choices: u32,
    top_k: u32,
    first: u32,
    held: u32,
    chunks: u32,
    align: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgs {
    out: MatArg,
    x: MatArg,
    sources: u64,
    rows: u32,
    cols: u32,
    x_rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CombineArgs {
    out: MatArg,
    x: MatArg,
    places: u64,
    weights: u64,
    rows: u32,
    cols: u32,
    top_k: u32,
    x_rows: u32,
}

impl Launcher<'_> {
    /// Chooses the experts for every row of `logits` (f32, [rows, experts]); equal scores go to the
    /// lowest number. NaN is chosen last.
    pub fn route(
        &self,
        logits: &DeviceMatrix,
        bias: DeviceVector<f32>,
        rule: &RouteRule,
        out: &RoutingViews,
    ) -> Result<(), CudaError> {
        let RouteRule { scoring, top_k, groups, kept_groups, normalise, scale } = *rule;
        let [rows, experts] = logits.shape();
        let fits = logits.dtype == Dtype::F32
            && bias.len == experts
            && (1..=MAX_EXPERTS).contains(&experts)
            && (1..=MAX_EXPERT_GROUPS).contains(&groups)
            && experts.is_multiple_of(groups)
            && (1..=groups).contains(&kept_groups)
            && (1..=experts / groups * kept_groups).contains(&top_k)
            && out.indices.len == rows * top_k
            && out.weights.len == rows * top_k
            && out.margins.len == rows;
        ensure(fits, || format!("route {rule:?} of {logits:?}, {bias:?} in {out:?}"))?;
        if rows == 0 {
            return Ok(());
        }
        let args = RouteArgs {
            logits: logits.arg(),
            bias: bias.address,
            indices: out.indices.address,
            weights: out.weights.address,
            margins: out.margins.address,
            rows: rows as u32,
            experts: experts as u32,
            top_k: top_k as u32,
            groups: groups as u32,
            kept_groups: kept_groups as u32,
            normalise: u32::from(normalise),
            softmax: u32::from(scoring == Scoring::Softmax),
            scale,
        };
        if kept_groups == groups && experts <= FEW_EXPERTS && top_k <= 32 {
            return self.launch("route_top_k_few", Shape::new(rows.div_ceil(4), 128)?, &args);
        }
        let shared = (4 * experts * 2 * size_of::<f32>()) as u32;
        let shape = Shape { shared, ..Shape::new(rows.div_ceil(4), 128)? };
        self.launch("route_top_k", shape, &args)
    }

    /// Groups the (row, choice) pairs of `indices` [rows, top_k] by expert.
    pub fn permute(
        &self,
        indices: DeviceVector<u32>,
        top_k: usize,
        out: &Permutation,
    ) -> Result<(), CudaError> {
        let (choices, held) = (indices.len, out.counts.len);
        let fits = (1..=MAX_EXPERTS).contains(&held)
            && top_k > 0
            && choices.is_multiple_of(top_k)
            && u32::try_from(choices).is_ok_and(|choices| choices < u32::MAX)
            && out.offsets.len == held + 1
            && out.align > 0
            && out.sources.len >= choices + held * (out.align - 1)
            && out.places.len == choices
            && out.scratch.len >= Permutation::scratch_len(choices, held);
        ensure(fits, || format!("permute {indices:?} by {top_k} in {out:?}"))?;
        let chunks = choices.div_ceil(CHUNK);
        let args = PermuteArgs {
            indices: indices.address,
            counts: out.counts.address,
            offsets: out.offsets.address,
            sources: out.sources.address,
            places: out.places.address,
            scratch: out.scratch.address,
            choices: choices as u32,
            top_k: top_k as u32,
            first: out.first as u32,
            held: held as u32,
            chunks: chunks as u32,
            align: out.align as u32,
        };
        let counters = Shape { shared: (held * 4) as u32, ..Shape::new(chunks, 32)? };
        if chunks > 0 {
            self.launch("permute_count", counters, &args)?;
        }
        self.launch("permute_scan", Shape::new(held, 256)?, &args)?;
        self.launch("permute_offsets", Shape::new(1, 1024)?, &args)?;
        if chunks > 0 {
            self.launch("permute_place", counters, &args)?;
        }
        Ok(())
    }

    /// `out[i] = x[sources[i]]`, converted where the types differ.
    pub fn gather_rows(
        &self,
        out: &DeviceMatrix,
        x: &DeviceMatrix,
        sources: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let fits = out.rows == sources.len && out.cols == x.cols;
        ensure(fits, || format!("gather_rows {sources:?} of {x:?} in {out:?}"))?;
        if out.rows == 0 || out.cols == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, x]);
        let args = GatherArgs {
            out: out.arg(),
            x: x.arg(),
            sources: sources.address,
            rows: out.rows as u32,
            cols: out.cols as u32,
            x_rows: x.rows as u32,
        };
        let name = format!("gather_rows_{}_{}_v{width}", x.dtype.name(), out.dtype.name());
        self.launch(&name, tiled(out.rows, out.cols, width)?, &args)
    }

    /// `out[r] += sum over k of weights[r, k] * x[places[r, k]]`, leaving out places of u32::MAX.
    /// Summed in f32 in the order of k, rounded once: the same bits every time.
    pub fn combine(
        &self,
        out: &DeviceMatrix,
        x: &DeviceMatrix,
        places: DeviceVector<u32>,
        weights: DeviceVector<f32>,
    ) -> Result<(), CudaError> {
        let fits = places.len == weights.len
            && out.cols == x.cols
            && (out.rows == 0 || places.len.is_multiple_of(out.rows));
        ensure(fits, || format!("combine {places:?}, {weights:?} of {x:?} in {out:?}"))?;
        if out.rows == 0 || out.cols == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, x]);
        let args = CombineArgs {
            out: out.arg(),
            x: x.arg(),
            places: places.address,
            weights: weights.address,
            rows: out.rows as u32,
            cols: out.cols as u32,
            top_k: (places.len / out.rows) as u32,
            x_rows: x.rows as u32,
        };
        let name = format!("combine_{}_{}_v{width}", x.dtype.name(), out.dtype.name());
        self.launch(&name, tiled(out.rows, out.cols, width)?, &args)
    }
}
