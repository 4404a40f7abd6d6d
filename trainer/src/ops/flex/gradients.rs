//! Gradients of the operations on burn's CPU backend. Connects tensors with the slices of `cpu`;
//! knows no arithmetic.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use burn::tensor::TensorPrimitive;
use kernels::gemm::{GemmView, GemmViewMut, matmul};

use super::super::cpu::attention::{self, HostPlan};
use super::super::cpu::{rows, threads};
use super::super::{AttentionOperands, DraftGradients, DraftOps, EarlierSums, NormSums};
use super::{
    AttentionPlan, DistillRows, Distilled, Host, HostRotation, RotaryTable, RowIndex, TeacherHead,
    attend, compact, distilled, flex, head_tensors, outcome_tensor, tensor, with_operands,
};

/// A sum with storage of its own, or zeros; and whether there was a sum.
fn sum_or_zeros(sum: Option<Tensor<Flex, 2>>, shape: [usize; 2]) -> (FlexTensor, bool) {
    match sum {
        Some(sum) => (compact(Host::of(sum)), true),
        None => (flex(vec![0.0; shape.iter().product()], shape), false),
    }
}

impl DraftGradients for Flex {
    type Kept = ();

    fn project_input_gradient(
        gradient: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        columns: Range<usize>,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (gradient, weight) = (Host::of(gradient), Host::of(weight));
        let ([m, k], [_, whole], n) = (gradient.dims(), weight.dims(), columns.len());
        let (mut dx, accumulate) = sum_or_zeros(sum, [m, n]);
        let part = GemmView::new(&weight.values()[columns.start..], [k, n], whole);
        let into = GemmViewMut::new(dx.storage_mut::<f32>(), [m, n], n);
        matmul(into, GemmView::new(gradient.values(), [m, k], k), part, accumulate, threads());
        tensor(dx)
    }

    fn project_weight_gradient(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        (first, width): (usize, usize),
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (gradient, x) = (Host::of(gradient), Host::of(x));
        let ([k, m], [_, n]) = (gradient.dims(), x.dims());
        let (mut sum, accumulate) = sum_or_zeros(sum, [m, width]);
        let into = GemmViewMut::new(&mut sum.storage_mut::<f32>()[first..], [m, n], width);
        let upstream = GemmView::new(gradient.values(), [k, m], m).transposed();
        matmul(into, upstream, GemmView::new(x.values(), [k, n], n), accumulate, threads());
        tensor(sum)
    }

    fn rms_norm_gradients(
        gradient: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        (weight, eps): (Tensor<Self, 1>, f64),
        sums: NormSums<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        let (gradient, x, weight) = (Host::of(gradient), Host::of(x), Host::of(weight));
        let values = (gradient.values(), x.values(), weight.values());
        let (dx, dw) = rows::rms_norm_backward(values.0, values.1, values.2, eps as f32);
        let dx: Tensor<Self, 2> = tensor(flex(dx, x.dims::<2>()));
        let dw: Tensor<Self, 1> = tensor(flex(dw, weight.dims::<1>()));
        (
            sums.input.map_or(dx.clone(), |sum| sum + dx),
            sums.weight.map_or(dw.clone(), |sum| sum + dw),
        )
    }

    fn swiglu_gradients(
        gradient: Tensor<Self, 2>,
        gate: Tensor<Self, 2>,
        up: Tensor<Self, 2>,
    ) -> [Tensor<Self, 2>; 3] {
        let act = Self::swiglu(gate.clone(), up.clone());
        let (gradient, gate, up) = (Host::of(gradient), Host::of(gate), Host::of(up));
        let parts = rows::swiglu_backward(gradient.values(), gate.values(), up.values());
        let [d_gate, d_up] = [parts.0, parts.1].map(|part| tensor(flex(part, gate.dims::<2>())));
        [d_gate, d_up, act]
    }

    fn rope_gradient(
        gradient: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        tensor(HostRotation::new(table, positions).turn(&Host::of(gradient), -1.0))
    }

    fn attend(
        operands: &AttentionOperands<Self>,
        plan: &AttentionPlan<Self>,
    ) -> (Tensor<Self, 3>, ()) {
        let host = |of: &[Tensor<Self, 3>]| of.iter().cloned().map(Host::of).collect::<Vec<_>>();
        let (keys, values) = (host(&operands.keys), host(&operands.values));
        let queries = Host::of(operands.queries.clone());
        (tensor(attend(&queries, &keys, &values, &HostPlan::new(plan))), ())
    }

    fn attend_gradients(
        gradient: Tensor<Self, 3>,
        operands: AttentionOperands<Self>,
        (plan, ()): (&AttentionPlan<Self>, ()),
        earlier: EarlierSums<Self>,
    ) -> AttentionOperands<Self> {
        let host = |of: Vec<Tensor<Self, 3>>| of.into_iter().map(Host::of).collect::<Vec<_>>();
        let (keys, values) = (host(operands.keys), host(operands.values));
        let (queries, gradient) = (Host::of(operands.queries), Host::of(gradient));
        let plan = HostPlan::new(plan);
        let parts = with_operands(&queries, &keys, &values, |operands| {
            attention::backward(gradient.values(), operands, &plan)
        });
        let sums = |parts: Vec<Vec<f32>>, like: &[Host], earlier: Vec<Option<Tensor<Self, 3>>>| {
            let sum = |((part, like), earlier): ((Vec<f32>, &Host), Option<Tensor<Self, 3>>)| {
                let part =
                    Tensor::from_primitive(TensorPrimitive::Float(flex(part, like.dims::<3>())));
                earlier.map_or(part.clone(), |earlier| part + earlier)
            };
            parts.into_iter().zip(like).zip(earlier).map(sum).collect()
        };
        AttentionOperands {
            keys: sums(parts.keys, &keys, earlier.keys),
            values: sums(parts.values, &values, earlier.values),
            queries: tensor(flex(parts.queries, queries.dims::<3>())),
        }
    }

    fn distill_with_gradients(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> (Distilled<Self>, [Tensor<Self, 2>; 2]) {
        let (hidden, lm_head) = (Host::of(hidden), Host::of(lm_head));
        let head = head_tensors(head);
        let result = distilled(&hidden, &lm_head, &Host::of(states), &head, (rows, true));
        let (dhidden, dhead) = result.gradients.unwrap_or_default();
        let made = Distilled {
            loss: tensor(flex(vec![result.loss], [1])),
            rows: tensor(outcome_tensor(result.outcomes)),
        };
        let parts =
            [tensor(flex(dhidden, hidden.dims::<2>())), tensor(flex(dhead, lm_head.dims::<2>()))];
        (made, parts)
    }

    fn times(x: Tensor<Self, 2>, factor: Tensor<Self, 1>) -> Tensor<Self, 2> {
        match Host::of(factor.clone()).values() {
            [1.0] => x,
            _ => x * factor.unsqueeze(),
        }
    }
}
