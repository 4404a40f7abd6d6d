//! Gradients of the operations on CUDA. Knows no graph.

use std::ops::Range;

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;
use burn::tensor::{DType, Tensor};
use kernels::cuda::{Form, NORM_PARTS, NormGradient, Product};

use super::engine::{Part, run};
use super::views::{T, empty, exclusive, ids, in_place, in_rows, matrix, upload, vector};
use super::{attention, distill, norm_weight, rotate};
use crate::ops::{
    AttentionOperands, AttentionPlan, DistillRows, Distilled, DraftGradients, EarlierSums,
    NormSums, RotaryTable, RowIndex, TeacherHead,
};

const INPUT: Product = Product { form: Form::Nn, accumulate: false, alpha: 1.0 };
const WEIGHT: Product = Product { form: Form::Tn, accumulate: false, alpha: 1.0 };

impl DraftGradients for Cuda {
    type Kept = attention::Kept;

    fn project_input_gradient(
        gradient: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        columns: Range<usize>,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (gradient, weight) = (in_rows(gradient), in_rows(weight));
        let device = gradient.device();
        let shape = [gradient.dims()[0], columns.len()];
        let (out, accumulate) = sum_or_empty(sum, shape, (&device, gradient.dtype()));
        let part = matrix(&weight).columns(columns);
        let views = (matrix(&out), matrix(&gradient));
        let product = Product { accumulate, ..INPUT };
        run(&device, Part::Gemm, |work| work.product(&views.0, &views.1, &part, product));
        out
    }

    fn project_weight_gradient(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        (first, width): (usize, usize),
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (gradient, x) = (in_rows(gradient), in_rows(x));
        let device = gradient.device();
        let shape = [gradient.dims()[1], width];
        let (out, accumulate) = sum_or_empty(sum, shape, (&device, gradient.dtype()));
        let whole = matrix(&out);
        let end = first + x.dims()[1];
        let (part, gradient, x) = (whole.columns(first..end), matrix(&gradient), matrix(&x));
        let others = [whole.columns(0..first), whole.columns(end..width)];
        if !accumulate && width > x.cols {
            run(&device, Part::Rows, |work| others.iter().try_for_each(|o| work.launch.zero(o)));
        }
        let product = Product { accumulate, ..WEIGHT };
        run(&device, Part::Gemm, |work| work.product(&part, &gradient, &x, product));
        out
    }

    fn rms_norm_gradients(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        (weight, eps): (Tensor<Self, 1>, f64),
        sums: NormSums<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        let (gradient, x, dtype) = (in_rows(gradient), in_rows(x), weight.dtype());
        let weight = norm_weight(weight);
        let (device, cols) = (x.device(), x.dims()[1]);
        let (d_x, add_x) = sum_or_empty(sums.input, x.dims(), (&device, x.dtype()));
        let (d_weight, add_weight) =
            sum_or_empty(sums.weight.map(norm_weight), [cols], (&device, DType::F32));
        let partial = empty([NORM_PARTS * cols], (&device, DType::F32));
        let call = NormGradient {
            d_x: Some(matrix(&d_x)),
            d_weight: vector(&d_weight),
            accumulate: [add_x, add_weight],
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
    ) -> [Tensor<Self, 2>; 3] {
        let [(gate, d_gate), (up, d_up), (gradient, act)] =
            [gate, up, gradient].map(|x| in_place(in_rows(x)));
        let device = gate.device();
        let out = [matrix(&d_gate), matrix(&d_up), matrix(&act)];
        let (upstream, inputs) = (matrix(&gradient), [matrix(&gate), matrix(&up)]);
        run(&device, Part::Rows, |work| {
            work.launch.gate_gradient(out.each_ref(), &upstream, inputs.each_ref())
        });
        [d_gate, d_up, act]
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
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let gradient = in_rows(gradient);
        let device = gradient.device();
        let (starts, sources) = sources_of(rows.host(), count);
        let (starts, sources) = (upload(starts, &device), upload(sources, &device));
        let shape = [count, gradient.dims()[1]];
        let (out, accumulate) = sum_or_empty(sum, shape, (&device, gradient.dtype()));
        let views = (matrix(&out), matrix(&gradient), ids(&starts), ids(&sources));
        run(&device, Part::Rows, |work| {
            work.launch.sum_rows((&views.0, accumulate), &views.1, views.2, views.3)
        });
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

/// A sum to add to, or new memory; and whether there was a sum.
fn sum_or_empty<const D: usize>(
    sum: Option<T<D>>,
    shape: [usize; D],
    place: (&CudaDevice, DType),
) -> (T<D>, bool) {
    match sum {
        Some(sum) => (exclusive(sum), true),
        None => (empty(shape, place), false),
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
