//! The seam between the training step and a device: the few operations worth a kernel of their
//! own, on packed rows. The default bodies compose plain burn operations, so that any backend
//! works; a device overrides what it does better. Knows nothing of steps or documents beyond the
//! index lists it is given.

mod cpu;
pub mod cuda;
mod flex;
mod gradients;
mod graph;
mod hand_over;
mod mlp;
mod parents;
pub mod plain;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

pub use self::gradients::{AttentionOperands, DraftGradients, EarlierSums, NormSums};
pub use self::hand_over::{Counting, HandOver, Receiver};
use crate::draft::Param;
use crate::losses::LossKind;

/// Row numbers on the host and on the device.
#[derive(Clone, Debug)]
pub struct RowIndex<B: Backend> {
    host: Arc<Vec<u32>>,
    device: Tensor<B, 1, Int>,
}

impl<B: Backend> RowIndex<B> {
    /// Uploads row numbers.
    pub fn new(rows: Vec<u32>, device: &B::Device) -> Self {
        let ids: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let count = ids.len();
        let ids = Tensor::from_data(TensorData::new(ids, [count]), device);
        Self { host: Arc::new(rows), device: ids }
    }

    /// The numbers.
    pub fn host(&self) -> &[u32] {
        &self.host
    }

    /// The numbers as an integer tensor, `[n]`.
    pub fn tensor(&self) -> Tensor<B, 1, Int> {
        self.device.clone()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.host.is_empty()
    }
}

/// Cosine and sine by position, each `[positions, rotary_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RotaryTable<B: Backend> {
    /// Cosines.
    pub cos: Tensor<B, 2>,
    /// Sines.
    pub sin: Tensor<B, 2>,
    /// Pairs are `(2j, 2j + 1)` instead of `(j, j + rotary_dim / 2)`.
    pub interleaved: bool,
}

/// The query rows of one document and the step-0 keys they may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the query tensor.
    pub queries: Range<usize>,
    /// Rows of the step-0 key tensor.
    pub keys: Range<usize>,
}

/// Who sees what in the attention of one step.
#[derive(Clone, Debug)]
pub struct AttentionPlan<B: Backend> {
    /// One entry for each document with query rows, in order, covering all query rows.
    pub segments: Vec<Segment>,
    /// For each query row the end of the step-0 keys it sees; they start with its segment's.
    pub visible: RowIndex<B>,
    /// For steps `1..=k` the row of that step's keys that each query row made itself.
    pub own: Vec<RowIndex<B>>,
    /// Factor of the scores before the softmax.
    pub scale: f64,
}

/// Frozen head that turns target states into teacher distributions.
#[derive(Clone, Debug)]
pub struct TeacherHead<B: Backend> {
    /// Final norm, `[H]`.
    pub norm: Tensor<B, 1>,
    /// Its epsilon.
    pub norm_eps: f64,
    /// `[V, H]`.
    pub lm_head: Tensor<B, 2>,
    /// Target id of each draft id, ascending.
    pub draft_to_target: RowIndex<B>,
}

/// Rows of the draft's output to compare with the teacher.
#[derive(Clone, Debug)]
pub struct DistillRows {
    /// Teacher state of each row, ascending.
    pub states: Vec<u32>,
    /// Factor of each row's loss in the total; 0 for rows that count in metrics only.
    pub weights: Vec<f32>,
    /// What is minimised.
    pub loss: LossKind,
    /// States whose full-vocabulary logits exist at the same time; at least 1.
    pub states_at_once: usize,
}

/// Result of comparing draft and teacher.
#[derive(Clone, Debug)]
pub struct Distilled<B: Backend> {
    /// Weighted sum of the rows' losses, `[1]`.
    pub loss: Tensor<B, 1>,
    /// Per row, without gradient: loss, `sum_v min(p, q)` with the teacher not renormalised, and
    /// 1 where the draft's top token is the teacher's top token of the whole vocabulary; `[n, 3]`.
    pub rows: Tensor<B, 2>,
}

/// Numbers of one AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub number: u64,
    /// Factor of the gradient, for clipping.
    pub gradient_scale: f64,
}

/// A device that stopped working in the middle of a step.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct DeviceFault {
    /// What was tried, and the device's answer.
    pub message: String,
    /// Exit code of a run that ends with it.
    pub exit_code: u8,
}

/// A parameter with its two moments.
#[derive(Clone, Debug)]
pub struct AdamWState<B: Backend, const D: usize> {
    /// The parameter.
    pub param: Tensor<B, D>,
    /// The f32 parameter that `param` is rounded from; `None` when that is f32 itself.
    pub master: Option<Tensor<B, D>>,
    /// Running mean of gradients.
    pub first: Tensor<B, D>,
    /// Running mean of squared gradients.
    pub second: Tensor<B, D>,
}

/// Weights of an MLP and of the norm before it.
#[derive(Clone, Debug)]
pub struct MlpWeights<B: Backend> {
    /// `[H]`.
    pub norm: Tensor<B, 1>,
    /// Added to the mean square in the norm.
    pub eps: f64,
    /// `[I, H]`.
    pub gate: Tensor<B, 2>,
    /// `[I, H]`.
    pub up: Tensor<B, 2>,
    /// `[H, I]`.
    pub down: Tensor<B, 2>,
}

/// What the backward pass finds of the forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Everything that takes a product to make.
    #[default]
    Keep,
    /// Without gate and up of the MLP, which are made again.
    Recompute,
}

/// Operations of the training step that a device may replace.
pub trait DraftOps: Backend {
    /// A good number for [`DistillRows::states_at_once`].
    const TEACHER_ROWS: usize = 512;
    /// Kind of its device, as `--device` names it.
    const DEVICE: &'static str = "cpu";

    /// `x [n, in]` times the transpose of `weight [out, in]`.
    fn project(x: Tensor<Self, 2>, weight: Tensor<Self, 2>) -> Tensor<Self, 2> {
        Self::project_part(x, weight, 0, None)
    }

    /// `x [n, w]` times the transpose of the columns `first..first + w` of `weight [out, in]`, on
    /// top of `sum [n, out]`.
    fn project_part(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        first: usize,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        plain::project_part(x, weight, first, sum)
    }

    /// `x [n, H]` and on top of it what an MLP makes of its norm.
    fn mlp(x: Tensor<Self, 2>, weights: MlpWeights<Self>, _: Activations) -> Tensor<Self, 2> {
        mlp::forward(x, &weights).0
    }

    /// Rows of `x [n, w]` over their root mean square, times `weight [w]`.
    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        plain::rms_norm(x, weight, eps)
    }

    /// `silu(gate) * up`, all `[n, w]`.
    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        plain::swiglu(gate, up)
    }

    /// Rotates `x [n, heads, rotary_dim]` by the position of each row.
    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        plain::rope(x, table, positions)
    }

    /// Rows of `x [m, w]` by number; numbers may repeat.
    fn gather_rows(x: Tensor<Self, 2>, rows: &RowIndex<Self>) -> Tensor<Self, 2> {
        plain::gather_rows(x, rows)
    }

    /// `into [m, w]` with the rows `places` replaced by those of `x [n, w]`. Places differ, and the
    /// rows were zero.
    fn place_rows(
        into: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        places: &RowIndex<Self>,
    ) -> Tensor<Self, 2> {
        plain::place_rows(into, x, places)
    }

    /// Attention of one TTT step in one softmax per row and head: `queries [n, heads, d]` against
    /// the step-0 keys `keys[0] [m, groups, d]` that the plan shows, and against the row's own
    /// keys of later steps, `keys[1..]`. Values are `[.., groups, v]`. Gives `[n, heads, v]`.
    fn ttt_attention(
        queries: Tensor<Self, 3>,
        keys: &[Tensor<Self, 3>],
        values: &[Tensor<Self, 3>],
        plan: &AttentionPlan<Self>,
    ) -> Tensor<Self, 3> {
        plain::ttt_attention(queries, keys, values, plan)
    }

    /// Draft head, teacher and loss without keeping logits of either: `hidden [n, H]` after the
    /// draft's norm, `lm_head [draft vocabulary, H]`, `states [s, H]` before the target's norm.
    fn distill(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> Distilled<Self> {
        plain::distill(hidden, lm_head, states, head, rows)
    }

    /// The teacher's top token for each of `states [s, H]`.
    fn teacher_top(
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        states_at_once: usize,
    ) -> Vec<u32> {
        plain::teacher_top(states, head, states_at_once)
    }

    /// One AdamW update of a parameter. Called on the backend without gradients.
    fn adamw_step<const D: usize>(
        state: AdamWState<Self, D>,
        gradient: Tensor<Self, D>,
        step: &AdamWStep,
    ) -> AdamWState<Self, D> {
        plain::adamw_step(state, gradient, step)
    }

    /// Sum of squares of each gradient. Waits for the device once.
    fn square_sums(gradients: &[Param<Self>]) -> Vec<f64> {
        plain::square_sums(gradients)
    }

    /// Runs `task` where calls of the device's runtime cost least. It must not wait for another
    /// thread that uses the device.
    fn on_device<R: Send + 'static>(_: &Self::Device, task: impl FnOnce() -> R + Send) -> R {
        task()
    }

    /// Bytes of the device's own memory, if it has any.
    fn memory(_device: &Self::Device) -> Option<u64> {
        None
    }

    /// The first thing that went wrong on the device since the last call. Operations can't return
    /// errors: results made after a fault mean nothing.
    fn fault(_device: &Self::Device) -> Option<DeviceFault> {
        None
    }
}
