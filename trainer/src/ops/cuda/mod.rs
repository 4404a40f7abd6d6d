//! The operations of the training step on CUDA: kernels and cuBLASLt on burn's own memory, ordered
//! with burn's work by events, without waiting on the host. Knows no steps and no layers.

mod attention;
mod copies;
mod distill;
mod engine;
mod exchange;
mod gradients;
mod input;
mod optimizer;
mod panics;
mod views;

use burn::backend::Cuda;
use burn::tensor::{FloatDType, Tensor};
use kernels::cuda::{Product, Turn};

pub use self::engine::{Part, open, settle, start_timer, take_times, tensor_memory};
use self::engine::{run, take_fault};
pub use self::panics::end_on_device_panic;
use self::views::{T, empty, exclusive, heads, ids, in_place, in_rows, matrix, vector};
use super::{
    AdamWState, AdamWStep, AttentionOperands, AttentionPlan, DeviceFault, DistillRows, Distilled,
    DraftGradients, DraftOps, RotaryTable, RowIndex, TeacherHead,
};
use crate::draft::Param;

/// See [`DraftOps::project_part`]. In place of `sum` if nobody else holds it; of the type of `x`.
fn project_part(x: T<2>, weight: T<2>, first: usize, sum: Option<T<2>>) -> T<2> {
    let (x, weight) = (in_rows(x), in_rows(weight));
    let ([rows, width], device) = (x.dims(), x.device());
    let accumulate = sum.is_some();
    let sum = sum.map_or_else(|| empty([rows, weight.dims()[0]], (&device, x.dtype())), in_rows);
    let (sum, out) = in_place(sum);
    let product = Product { accumulate, ..Product::LINEAR };
    let (onto, x) = ((matrix(&out), matrix(&sum)), matrix(&x));
    let part = matrix(&weight).columns(first..first + width);
    run(&device, Part::Gemm, |work| work.product_onto((&onto.0, &onto.1), &x, &part, product));
    out
}

/// Norm weights are vectors of f32, whatever the type of the rows.
fn norm_weight(weight: T<1>) -> T<1> {
    weight.cast(FloatDType::F32)
}

fn rotate(x: T<3>, table: &RotaryTable<Cuda>, positions: &RowIndex<Cuda>, direction: f32) -> T<3> {
    let (x, out) = in_place(in_rows(x));
    let device = x.device();
    let (cos, sin) = (in_rows(table.cos.clone()), in_rows(table.sin.clone()));
    let call = Turn {
        out: heads(&out),
        x: heads(&x),
        heads: x.dims()[1],
        cos: matrix(&cos),
        sin: matrix(&sin),
        positions: ids(&positions.device),
        interleaved: table.interleaved,
        direction,
    };
    run(&device, Part::Rows, |work| work.launch.turn(&call));
    out
}

impl DraftOps for Cuda {
    // The vocabulary is streamed, so that a block of logits stays small, and products have rows.
    const TEACHER_ROWS: usize = 2048;
    const DEVICE: &'static str = "cuda";

    fn project_part(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        first: usize,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        project_part(x, weight, first, sum)
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, weight) = (in_rows(x), norm_weight(weight));
        let device = x.device();
        let out = empty(x.dims(), (&device, x.dtype()));
        let views = (matrix(&out), matrix(&x), vector(&weight));
        run(&device, Part::Rows, |work| {
            work.launch.rms_norm(&views.0, &views.1, views.2, eps as f32)
        });
        out
    }

    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (in_rows(gate), in_rows(up));
        let device = gate.device();
        let out = empty(gate.dims(), (&device, gate.dtype()));
        let views = (matrix(&out), matrix(&gate), matrix(&up));
        run(&device, Part::Rows, |work| work.launch.silu_mul(&views.0, &views.1, &views.2));
        out
    }

    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        rotate(x, table, positions, 1.0)
    }

    fn gather_rows(x: Tensor<Self, 2>, rows: &RowIndex<Self>) -> Tensor<Self, 2> {
        let x = in_rows(x);
        let device = x.device();
        let out = empty([rows.len(), x.dims()[1]], (&device, x.dtype()));
        let views = (matrix(&out), matrix(&x), ids(&rows.device));
        run(&device, Part::Rows, |work| work.launch.embed(&views.0, &views.1, views.2, 0));
        out
    }

    fn place_rows(
        into: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        places: &RowIndex<Self>,
    ) -> Tensor<Self, 2> {
        let (out, x) = (exclusive(into), in_rows(x));
        let device = x.device();
        let views = (matrix(&out), matrix(&x), ids(&places.device));
        run(&device, Part::Rows, |work| work.launch.scatter_rows(&views.0, &views.1, views.2));
        out
    }

    fn ttt_attention(
        queries: Tensor<Self, 3>,
        keys: &[Tensor<Self, 3>],
        values: &[Tensor<Self, 3>],
        plan: &AttentionPlan<Self>,
    ) -> Tensor<Self, 3> {
        let operands = AttentionOperands { queries, keys: keys.to_vec(), values: values.to_vec() };
        Self::attend(&operands, plan).0
    }

    fn distill(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> Distilled<Self> {
        distill::distill((hidden, lm_head), states, head, (rows, false)).0
    }

    fn teacher_top(
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        states_at_once: usize,
    ) -> Vec<u32> {
        distill::teacher_top(states, head, states_at_once)
    }

    fn adamw_step<const D: usize>(
        state: AdamWState<Self, D>,
        gradient: Tensor<Self, D>,
        step: &AdamWStep,
    ) -> AdamWState<Self, D> {
        optimizer::adamw_step(state, gradient, step)
    }

    fn square_sums(gradients: &[Param<Self>]) -> Vec<f64> {
        optimizer::square_sums(gradients)
    }

    fn on_device<R: Send + 'static>(device: &Self::Device, task: impl FnOnce() -> R + Send) -> R {
        engine::on_runtime(device, task)
    }

    fn memory(device: &Self::Device) -> Option<u64> {
        settle(device).ok().map(|[_, all]| all as u64)
    }

    fn fault(_device: &Self::Device) -> Option<DeviceFault> {
        take_fault()
    }
}
