//! The device functions a model is made of. Knows nothing of layers, ranks or requests.

use std::ops::Range;

use kernels::router::{RouterRule, Scoring};

use super::error::TargetError;
use super::model::{Stage, StageTimes};
use super::source::Source;
use super::spec::RopeSpec;
use super::weights::Slice;
use crate::capture::LayerRows;

/// The device functions of one rank. Buffers live on the device between calls; lengths are in
/// values, row-major. `out` buffers are resized by the function that writes them and never alias
/// its inputs.
///
/// Preconditions on lengths are the caller's: they are checked with the plan when a model is
/// built, so a violation is a bug and may panic.
pub(super) trait Ops: Send {
    /// Values on the device.
    type Buffer: Send;
    /// A weight matrix [out, in] in the form the device multiplies with.
    type Linear: Send;
    /// Rotary angles of the positions of one forward.
    type Rope: Send;
    /// Experts chosen for the rows of one forward.
    type Routing: Send;
    /// Routed experts of one layer that this rank holds.
    type Experts: Send;
    /// Gate and up projections of an MLP, which have the same input.
    type GateUp: Send;
    /// States on their way to the host.
    type Captured: Send;

    /// An empty buffer that will hold no more than `room` says.
    fn buffer(&mut self, room: Room) -> Result<Self::Buffer, TargetError>;

    /// Name of the number format of states.
    fn dtype(&self) -> &'static str;

    /// Values in a buffer.
    fn len(&self, buffer: &Self::Buffer) -> usize;

    /// Copies `range` of a buffer to the host.
    fn download(
        &mut self,
        buffer: &Self::Buffer,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TargetError>;

    /// Starts to copy whole `rows` of a buffer `width` wide to the host; the buffer may be
    /// overwritten at once.
    fn capture(
        &mut self,
        buffer: &Self::Buffer,
        rows: Range<usize>,
        width: usize,
    ) -> Result<Self::Captured, TargetError>;

    /// Waits for what [`Ops::capture`] started.
    fn collect(&mut self, captured: Self::Captured) -> Result<LayerRows, TargetError>;

    /// Starts to time a forward.
    fn start_clock(&mut self) -> Result<(), TargetError>;

    /// Charges the device's time since the last lap to `stage`.
    fn lap(&mut self, stage: Stage) -> Result<(), TargetError>;

    /// Times since [`Ops::start_clock`]; the device has finished when it returns.
    fn times(&mut self) -> Result<StageTimes, TargetError>;

    /// Reads this rank's slice of a weight matrix whose whole is `dims` = [out, in].
    fn load_linear(
        &mut self,
        source: &Source,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<Self::Linear, TargetError>;

    /// Reads this rank's slice of the two matrices `prefix`.gate_proj and `prefix`.up_proj.
    fn load_gate_up(
        &mut self,
        source: &Source,
        prefix: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<Self::GateUp, TargetError>;

    /// Reads `range` of a vector (norm weight, bias) of `len` values.
    fn load_vector(
        &mut self,
        source: &Source,
        name: &str,
        len: usize,
        range: Range<usize>,
    ) -> Result<Self::Buffer, TargetError>;

    /// A vector of `len` zeros, in place of one that a model does not have.
    fn zero_vector(&mut self, len: usize) -> Result<Self::Buffer, TargetError>;

    /// Reads routed experts, named `prefix` and their index.
    fn load_experts(
        &mut self,
        source: &Source,
        prefix: &str,
        share: &ExpertShare,
    ) -> Result<Self::Experts, TargetError>;

    /// Angles for `positions`, one a row, from row `first` of the batch on.
    fn rope_angles(
        &mut self,
        spec: &RopeSpec,
        positions: &[u32],
        first: usize,
    ) -> Result<Self::Rope, TargetError>;

    /// `out[r] = table[ids[r] - first]`, or zeros where the id is outside the table: the table may
    /// be a slice of the vocabulary that starts at `first`.
    fn embed(
        &mut self,
        out: &mut Self::Buffer,
        table: &Self::Linear,
        ids: &[u32],
        first: usize,
    ) -> Result<(), TargetError>;

    /// `out = weight * x / rms(x)` over rows as wide as `weight`.
    fn rms_norm(
        &mut self,
        x: &Self::Buffer,
        norm: Norm<'_, Self::Buffer>,
    ) -> Result<(), TargetError>;

    /// `out = x weight^T`, or `out += x weight^T`; x is [rows, in].
    fn matmul(
        &mut self,
        out: &mut Self::Buffer,
        x: Rows<'_, Self::Buffer>,
        weight: &Self::Linear,
        write: Write,
    ) -> Result<(), TargetError>;

    /// `out = ` `row` repeated `rows` times.
    fn repeat_row(
        &mut self,
        out: &mut Self::Buffer,
        row: &Self::Buffer,
        rows: usize,
    ) -> Result<(), TargetError>;

    /// Sets `len` values to zero.
    fn zeros(&mut self, out: &mut Self::Buffer, len: usize) -> Result<(), TargetError>;

    /// `x = sum of the parts`, or `x +=`; summed in f32 in the order of the ranks and rounded
    /// once. Then, where it is asked for, the norm of the rows of `x` as they are stored.
    fn add_parts(
        &mut self,
        x: &mut Self::Buffer,
        parts: &Parts<'_, Self::Buffer>,
        write: Write,
        norm: Option<Norm<'_, Self::Buffer>>,
    ) -> Result<(), TargetError>;

    /// What was asked for up to now of a half of the batch, 0 or 1, is what [`Ops::aside`] waits
    /// for.
    fn mark(&mut self, _half: usize) -> Result<(), TargetError> {
        Ok(())
    }

    /// From now on functions run beside those that are not aside, in an order of their own and
    /// after what was marked for `half`.
    fn aside(&mut self, _half: usize) -> Result<(), TargetError> {
        Ok(())
    }

    /// From now on functions run in the common order again, not yet after those aside.
    fn abreast(&mut self, _half: usize) -> Result<(), TargetError> {
        Ok(())
    }

    /// What follows runs after what ran aside for `half`.
    fn join(&mut self, _half: usize) -> Result<(), TargetError> {
        Ok(())
    }

    /// `out = silu(x gate^T) * (x up^T)`; `work` has room for twice the width of `out`.
    fn gated(
        &mut self,
        out_work: (&mut Self::Buffer, &mut Self::Buffer),
        x: Rows<'_, Self::Buffer>,
        weights: &Self::GateUp,
    ) -> Result<(), TargetError>;

    /// Rotates, in every head of width `head_dim`, the last values that the angles cover.
    fn rope(
        &mut self,
        x: &mut Self::Buffer,
        angles: &Self::Rope,
        head_dim: usize,
    ) -> Result<(), TargetError>;

    /// Splits `down` [rows, latent + rope] into the normed latent, as wide as the norm's weight,
    /// and `k_pe`, which has its first row where the norm has it.
    fn split_latent(
        &mut self,
        latent: Norm<'_, Self::Buffer>,
        k_pe: &mut Self::Buffer,
        down: &Self::Buffer,
        rope: usize,
    ) -> Result<(), TargetError>;

    /// Splits `kv` [rows, heads, nope + v] into keys [rows, heads, nope + rope], of which the last
    /// part is `k_pe` [rows, rope] in every head, and values [rows, heads, v].
    fn expand_latent(
        &mut self,
        keys_values: (&mut Self::Buffer, &mut Self::Buffer),
        kv: &Self::Buffer,
        k_pe: &Self::Buffer,
        dims: &LatentDims,
    ) -> Result<(), TargetError>;

    /// Cuts `cache` to `kept` values and appends `fresh`.
    fn append(
        &mut self,
        cache: &mut Self::Buffer,
        kept: usize,
        fresh: &Self::Buffer,
    ) -> Result<(), TargetError>;

    /// Causal attention of packed sequences; where a sequence has more keys than queries, the
    /// queries are its last positions. Never holds a [queries, keys] matrix.
    fn attention(
        &mut self,
        out: &mut Self::Buffer,
        qkv: [&Self::Buffer; 3],
        dims: &AttentionDims<'_>,
    ) -> Result<(), TargetError>;

    /// Chooses experts from router `logits` [rows, experts].
    fn route(
        &mut self,
        logits: &Self::Buffer,
        bias: &Self::Buffer,
        rule: &RouteRule,
    ) -> Result<Self::Routing, TargetError>;

    /// The choice of [`Ops::route`], on the host.
    fn routing_to_host(&mut self, routing: &Self::Routing) -> Result<RouterChoice, TargetError>;

    /// A choice made on the host, for the same router.
    fn routing_from_host(&mut self, choice: RouterChoice) -> Result<Self::Routing, TargetError>;

    /// Computes the chosen experts held here of every row of `x`, for [`Ops::combine`].
    fn experts(
        &mut self,
        x: &Self::Buffer,
        routing: &Self::Routing,
        held: &Self::Experts,
    ) -> Result<(), TargetError>;

    /// `out += sum over chosen experts of weight * expert(x)` for `rows` of what
    /// [`Ops::experts`] has computed.
    fn combine(
        &mut self,
        out: &mut Self::Buffer,
        routing: &Self::Routing,
        rows: Range<usize>,
    ) -> Result<(), TargetError>;
}

/// Rows of a buffer; all of them where there is no range.
#[derive(Debug)]
pub(super) struct Rows<'a, B> {
    /// The buffer.
    pub of: &'a B,
    /// Which rows.
    pub range: Option<Range<usize>>,
}

impl<'a, B> Rows<'a, B> {
    /// All rows of a buffer.
    pub(super) fn all(of: &'a B) -> Self {
        Self { of, range: None }
    }
}

/// The parts of a sum across ranks for the rows that one rank sums.
#[derive(Debug)]
pub(super) struct Parts<'a, B> {
    /// This rank's part for all rows, [rows, width].
    pub own: &'a B,
    /// The other ranks' parts for this rank's rows, [ranks, its rows, width], with a gap where
    /// this rank's would be.
    pub received: &'a B,
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub ranks: usize,
    /// Rows that this rank sums.
    pub rows: Range<usize>,
    /// Values a row.
    pub width: usize,
}

/// Where to write a norm, and by what.
#[derive(Debug)]
pub(super) struct Norm<'a, B> {
    /// Written: rows from `first` on. It ends with the last of them.
    pub out: &'a mut B,
    /// The first row written.
    pub first: usize,
    /// One factor a column.
    pub weight: &'a B,
    /// Added to the mean square.
    pub eps: f32,
}

/// What a buffer of a forward holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Its part in a forward, for the plan of memory.
    pub name: &'static str,
    /// Values a token of the batch; 0 where the buffer grows as it is used.
    pub width: usize,
    /// Ranks that the tokens are spread over.
    pub ranks: usize,
    /// Number format of the values.
    pub precision: Precision,
}

/// Number format of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// What the device multiplies in.
    Compute,
    /// f32 in any case.
    Single,
}

/// Which part of a layer's routed experts a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpertShare {
    /// Experts by index.
    pub experts: Range<usize>,
    /// Columns of each one's intermediate.
    pub columns: Range<usize>,
    /// Width of the whole intermediate.
    pub width: usize,
    /// Width of the residual stream.
    pub hidden: usize,
}

impl ExpertShare {
    /// Shape of a whole gate or up projection, and its slice.
    pub(super) fn input(&self) -> ([usize; 2], Slice) {
        let slice = Slice { rows: self.columns.clone(), cols: 0..self.hidden };
        ([self.width, self.hidden], slice)
    }

    /// Shape of a whole down projection, and its slice.
    pub(super) fn output(&self) -> ([usize; 2], Slice) {
        let slice = Slice { rows: 0..self.hidden, cols: self.columns.clone() };
        ([self.hidden, self.width], slice)
    }
}

/// What a product does with its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    /// Overwrites it.
    Set,
    /// Adds to it.
    Add,
}

/// Widths of multi-head latent attention on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LatentDims {
    /// Heads of this rank.
    pub heads: usize,
    /// Unrotated width of a key.
    pub nope: usize,
    /// Rotated width of a key.
    pub rope: usize,
    /// Width of a value.
    pub v: usize,
}

/// Shape of one attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AttentionDims<'a> {
    /// Start of each sequence in the query rows, and the total.
    pub cu_seqlens: &'a [usize],
    /// Keys of each sequence that precede those of its queries; empty where none has any.
    pub cached: &'a [usize],
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a query or key head.
    pub qk_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Multiplier of the scores.
    pub scale: f32,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RouteRule {
    /// Routed experts of the whole model.
    pub num_experts: usize,
    /// Scores of the experts.
    pub scoring: Scoring,
    /// Experts a row.
    pub top_k: usize,
    /// Groups of experts.
    pub num_groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// Weights are divided by their sum.
    pub normalise: bool,
    /// Multiplier of the weights.
    pub scale: f32,
}

impl RouteRule {
    /// The rule on the host, with the `bias` of the choice.
    pub(super) fn with_bias<'a>(&self, bias: &'a [f32]) -> RouterRule<'a> {
        RouterRule {
            scoring: self.scoring,
            top_k: self.top_k,
            groups: self.num_groups,
            kept_groups: self.topk_group,
            bias,
            normalise: self.normalise,
            scale: self.scale,
        }
    }
}

/// Experts chosen by one router, on the host.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct RouterChoice {
    /// [rows, top_k] expert indices, best selection score first.
    pub indices: Vec<u32>,
    /// [rows, top_k] weights.
    pub weights: Vec<f32>,
    /// [rows] selection score of the last chosen minus that of the best not chosen.
    pub margins: Vec<f32>,
}

/// Routed experts of one layer on one rank.
#[derive(Clone, Debug)]
pub(super) struct HeldExperts<L> {
    /// Index of the first.
    pub first: usize,
    /// The experts, by index.
    pub experts: Vec<Expert<L>>,
}

/// The three projections of an expert or dense MLP.
#[derive(Clone, Debug)]
pub(super) struct Expert<L> {
    /// [intermediate, hidden].
    pub gate: L,
    /// [intermediate, hidden].
    pub up: L,
    /// [hidden, intermediate].
    pub down: L,
}
