//! Gradients of the operations on CUDA. Knows no graph.

use burn::backend::Cuda;
use burn::tensor::{DType, Tensor};
use kernels::cuda::{Form, NORM_PARTS, NormGradient, Product};

use super::engine::{Part, run};
use super::views::{empty, exclusive, ids, in_rows, matrix, upload, vector};
use super::{attention, distill, norm_weight, rotate};
use crate::ops::{
    AttentionOperands, AttentionPlan, DistillRows, Distilled, DraftGradients, EarlierSums,
    RotaryTable, RowIndex, TeacherHead,
};

const INPUT: Product = Product { form: Form::Nn, accumulate: false, alpha: 1.0 };
const WEIGHT: Product = Product { form: Form::Tn, accumulate: false, alpha: 1.0 };

impl DraftGradients for Cuda {
    type Kept = attention::Kept;

    fn project_input_gradient(
        gradient: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        let (gradient, weight) = (in_rows(gradient), in_rows(weight));
        let device = gradient.device();
        let out = empty([gradient.dims()[0], weight.dims()[1]], (&device, gradient.dtype()));
        let views = (matrix(&out), matrix(&gradient), matrix(&weight));
        run(&device, Part::Gemm, |work| work.product(&views.0, &views.1, &views.2, INPUT));
        out
    }

    fn project_weight_gradient(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (gradient, x) = (in_rows(gradient), in_rows(x));
        let device = gradient.device();
        let accumulate = sum.is_some();
        let out = match sum {
            Some(sum) => exclusive(sum),
            None => empty([gradient.dims()[1], x.dims()[1]], (&device, gradient.dtype())),
        };
        let views = (matrix(&out), matrix(&gradient), matrix(&x));
        let product = Product { accumulate, ..WEIGHT };
        run(&device, Part::Gemm, |work| work.product(&views.0, &views.1, &views.2, product));
        out
    }

    fn rms_norm_gradients(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 1>,
        eps: f64,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        let (gradient, x, dtype) = (in_rows(gradient), in_rows(x), weight.dtype());
        let weight = norm_weight(weight);
        let (device, cols) = (x.device(), x.dims()[1]);
        let d_x = empty(x.dims(), (&device, x.dtype()));
        let d_weight = empty([cols], (&device, DType::F32));
        let partial = empty([NORM_PARTS * cols], (&device, DType::F32));
        let call = NormGradient {
            d_x: Some(matrix(&d_x)),
            d_weight: vector(&d_weight),
            x: matrix(&x),
            gradient: matrix(&gradient),
            weight: vector(&weight),
            partial: vector(&partial),
            eps: eps as f32,
        };
        run(&device, Part::Rows, |work| work.launch.norm_gradient(&call));
        (d_x, d_weight.cast(burn::tensor::FloatDType::from(dtype)))
    }

    fn swiglu_gradients(
        gradient: Tensor<Self, 2>,
        gate: Tensor<Self, 2>,
        up: Tensor<Self, 2>,
    ) -> [Tensor<Self, 2>; 2] {
        let (gradient, gate, up) = (in_rows(gradient), in_rows(gate), in_rows(up));
        let device = gate.device();
        let out = [(); 2].map(|()| empty(gate.dims(), (&device, gate.dtype())));
        let parts = [matrix(&out[0]), matrix(&out[1])];
        let (upstream, inputs) = (matrix(&gradient), [matrix(&gate), matrix(&up)]);
        run(&device, Part::Rows, |work| {
            let [d_gate, d_up] = &parts;
            work.launch.gate_gradient([d_gate, d_up], &upstream, [&inputs[0], &inputs[1]])
        });
        out
    }

    fn rope_gradient(
        gradient: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        rotate(gradient, table, positions, -1.0)
    }

    fn gather_rows_gradient(
        gradient: Tensor<Self, 2>,
        rows: &RowIndex<Self>,
        count: usize,
    ) -> Tensor<Self, 2> {
        let gradient = in_rows(gradient);
        let device = gradient.device();
        let (starts, sources) = sources_of(rows.host(), count);
        let (starts, sources) = (upload(starts, &device), upload(sources, &device));
        let out = empty([count, gradient.dims()[1]], (&device, gradient.dtype()));
        let views = (matrix(&out), matrix(&gradient), ids(&starts), ids(&sources));
        run(&device, Part::Rows, |work| work.launch.sum_rows(&views.0, &views.1, views.2, views.3));
        out
    }

    fn attend(
        operands: &AttentionOperands<Self>,
        plan: &AttentionPlan<Self>,
    ) -> (Tensor<Self, 3>, Self::Kept) {
        attention::attend(operands, plan)
    }

    fn attend_gradients(
        gradient: Tensor<Self, 3>,
        operands: AttentionOperands<Self>,
        (plan, kept): (&AttentionPlan<Self>, Self::Kept),
        earlier: EarlierSums<Self>,
    ) -> AttentionOperands<Self> {
        attention::attend_gradients(gradient, &operands, (plan, &kept), earlier)
    }

    fn distill_with_gradients(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> (Distilled<Self>, [Tensor<Self, 2>; 2]) {
        distill::distill((hidden, lm_head), states, head, (rows, true))
    }

    fn times(x: Tensor<Self, 2>, factor: Tensor<Self, 1>) -> Tensor<Self, 2> {
        let (x, factor) = (exclusive(x), norm_weight(factor));
        let device = x.device();
        let views = (matrix(&x), vector(&factor));
        run(&device, Part::Rows, |work| work.launch.multiply(&views.0, views.1));
        x
    }
}

/// For each of `count` rows the places in `rows` that name it, in order: where each row's places
/// start, and the places.
fn sources_of(rows: &[u32], count: usize) -> (Vec<u32>, Vec<u32>) {
    let mut starts = vec![0u32; count + 1];
    for &row in rows {
        starts[row as usize + 1] += 1;
    }
    for at in 0..count {
        starts[at + 1] += starts[at];
    }
    let mut next = starts.clone();
    let mut sources = vec![0; rows.len()];
    for (place, &row) in rows.iter().enumerate() {
        sources[next[row as usize] as usize] = place as u32;
        next[row as usize] += 1;
    }
    (starts, sources)
}
