//! What a device needs beside [`DraftOps`] to train: gradients of its operations. Knows no graph.

use std::fmt::Debug;
use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{IndexingUpdateOp, Tensor};

use super::{AttentionPlan, DistillRows, Distilled, DraftOps, RotaryTable, RowIndex, TeacherHead};

/// Queries, and keys and values by step, of an attention.
#[derive(Clone, Debug)]
pub struct AttentionOperands<B: Backend> {
    /// `[n, heads, d]`.
    pub queries: Tensor<B, 3>,
    /// `[.., groups, d]`, those of step 0 first.
    pub keys: Vec<Tensor<B, 3>>,
    /// `[.., groups, v]`.
    pub values: Vec<Tensor<B, 3>>,
}

/// Gradients of keys and values by step that later steps made already.
#[derive(Debug)]
pub struct EarlierSums<B: Backend> {
    /// Of the keys.
    pub keys: Vec<Option<Tensor<B, 3>>>,
    /// Of the values.
    pub values: Vec<Option<Tensor<B, 3>>>,
}

/// Gradients of a norm's input and weight that were made already.
#[derive(Debug)]
pub struct NormSums<B: Backend> {
    /// Of the input.
    pub input: Option<Tensor<B, 2>>,
    /// Of the weight.
    pub weight: Option<Tensor<B, 1>>,
}

/// Operations of a device with gradients of its own. Shapes are those of [`DraftOps`]. What is
/// called a sum is added to, in place where nobody else holds it.
pub trait DraftGradients: DraftOps {
    /// What attention keeps for its gradient beside operands and plan.
    type Kept: Clone + Debug + Send + 'static;

    /// Gradient of the input of a projection by these columns of `weight`.
    fn project_input_gradient(
        gradient: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        columns: Range<usize>,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2>;

    /// Gradient of the whole weight of a projection, whose columns are `width`, from those that
    /// start at `first`; others are zero without a sum.
    fn project_weight_gradient(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        first_and_width: (usize, usize),
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2>;

    /// Gradients of a norm's input and weight; `norm` is weight and epsilon.
    fn rms_norm_gradients(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        norm: (Tensor<Self, 1>, f64),
        sums: NormSums<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>);

    /// Gradients of gate and up, and what the forward pass made of them.
    fn swiglu_gradients(
        gradient: Tensor<Self, 2>,
        gate: Tensor<Self, 2>,
        up: Tensor<Self, 2>,
    ) -> [Tensor<Self, 2>; 3];

    /// Gradient of a rotation: the rotation back.
    fn rope_gradient(
        gradient: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3>;

    /// Gradient of gathered rows: each row's sum, `[count, w]`.
    fn gather_rows_gradient(
        gradient: Tensor<Self, 2>,
        rows: &RowIndex<Self>,
        count: usize,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let shape = [count, gradient.dims()[1]];
        let sum = sum.unwrap_or_else(|| Tensor::zeros(shape, &gradient.device()));
        sum.select_assign(0, rows.tensor(), gradient, IndexingUpdateOp::Add)
    }

    /// Attention, and what its gradient needs.
    fn attend(
        operands: &AttentionOperands<Self>,
        plan: &AttentionPlan<Self>,
    ) -> (Tensor<Self, 3>, Self::Kept);

    /// Gradients of queries, keys and values, the latter two with what came before.
    fn attend_gradients(
        gradient: Tensor<Self, 3>,
        operands: AttentionOperands<Self>,
        plan_and_kept: (&AttentionPlan<Self>, Self::Kept),
        earlier: EarlierSums<Self>,
    ) -> AttentionOperands<Self>;

    /// Draft, teacher and loss with the gradients of `hidden` and `lm_head` for a factor of 1.
    fn distill_with_gradients(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> (Distilled<Self>, [Tensor<Self, 2>; 2]);

    /// `x` times a factor, `[1]`, which is nearly always 1.
    fn times(x: Tensor<Self, 2>, factor: Tensor<Self, 1>) -> Tensor<Self, 2>;
}
