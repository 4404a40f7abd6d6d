//! The operations of the training step on burn's CPU backend. Connects tensors with the slices of
//! `cpu`; knows no arithmetic. Gradients are in `gradients`.

mod gradients;

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use kernels::gemm::{GemmDims, GemmView, GemmViewMut, matmul, matmul_nt};

use super::cpu::adamw;
use super::cpu::attention::{self, HeadSizes, HostPlan, Operands};
use super::cpu::distill::{self, HostDistilled, HostHead};
use super::cpu::rows::{self, Rotation};
use super::cpu::threads;
use super::{
    AdamWState, AdamWStep, AttentionPlan, DistillRows, Distilled, DraftOps, RotaryTable, RowIndex,
    TeacherHead,
};

/// A tensor's f32 entries in row-major order.
#[derive(Clone, Debug)]
struct Host(FlexTensor);

impl Host {
    fn new(tensor: FlexTensor) -> Self {
        Self(tensor.to_contiguous())
    }

    fn of<const D: usize>(tensor: Tensor<Flex, D>) -> Self {
        Self::new(tensor.into_primitive().tensor())
    }

    fn values(&self) -> &[f32] {
        let storage = self.0.storage::<f32>();
        let (start, end) = self.0.layout().contiguous_offsets().unwrap_or((0, storage.len()));
        &storage[start..end]
    }

    fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.shape().dims()
    }
}

fn flex(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}

fn tensor<const D: usize>(primitive: FlexTensor) -> Tensor<Flex, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The tensor with storage of its own when it is part of a larger one.
fn compact(host: Host) -> FlexTensor {
    match host.values().len() == host.0.storage::<f32>().len() {
        true => host.0,
        false => flex(host.values().to_vec(), host.0.shape()),
    }
}

fn project_part(x: &Host, weight: &Host, first: usize, sum: Option<Host>) -> FlexTensor {
    let ([m, k], [n, whole]) = (x.dims(), weight.dims());
    let accumulate = sum.is_some();
    let mut out = sum.map_or_else(|| flex(vec![0.0; m * n], [m, n]), compact);
    let into = out.storage_mut::<f32>();
    if k == whole {
        let dims = GemmDims { m, n, k };
        matmul_nt(into, x.values(), weight.values(), dims, accumulate, threads());
    } else {
        let part = GemmView::new(&weight.values()[first..], [n, k], whole).transposed();
        let (into, x) = (GemmViewMut::new(into, [m, n], n), GemmView::new(x.values(), [m, k], k));
        matmul(into, x, part, accumulate, threads());
    }
    out
}

/// Angles of a rotation on the host.
#[derive(Clone, Debug)]
struct HostRotation {
    cos: Host,
    sin: Host,
    interleaved: bool,
    positions: Arc<Vec<u32>>,
}

impl HostRotation {
    fn new(table: &RotaryTable<Flex>, positions: &RowIndex<Flex>) -> Self {
        Self {
            cos: Host::of(table.cos.clone()),
            sin: Host::of(table.sin.clone()),
            interleaved: table.interleaved,
            positions: positions.host.clone(),
        }
    }

    /// Rotates `[n, heads, d]` forward (1) or back (-1).
    fn turn(&self, x: &Host, direction: f32) -> FlexTensor {
        let [_, pairs] = self.cos.dims();
        let [n, heads, size] = x.dims();
        let (cos, sin) = (self.cos.values(), self.sin.values());
        let rotation = Rotation { cos, sin, pairs, interleaved: self.interleaved, direction };
        let mut out = x.values().to_vec();
        rows::rotate(&mut out, heads, &self.positions, rotation);
        flex(out, [n, heads, size])
    }
}

impl HostPlan {
    fn new<B: Backend>(plan: &AttentionPlan<B>) -> Self {
        Self {
            segments: plan.segments.clone(),
            visible: plan.visible.host.clone(),
            own: plan.own.iter().map(|rows| rows.host.clone()).collect(),
            scale: plan.scale as f32,
        }
    }
}

/// Calls `use_operands` with the slices of an attention.
fn with_operands<T>(
    queries: &Host,
    keys: &[Host],
    values: &[Host],
    use_operands: impl FnOnce(Operands<'_>) -> T,
) -> T {
    let [_, heads, key] = queries.dims();
    let [_, groups, value] = values[0].dims();
    let keys: Vec<&[f32]> = keys.iter().map(Host::values).collect();
    let values: Vec<&[f32]> = values.iter().map(Host::values).collect();
    use_operands(Operands {
        queries: queries.values(),
        keys: &keys,
        values: &values,
        sizes: HeadSizes { heads, groups, key, value },
    })
}

fn attend(queries: &Host, keys: &[Host], values: &[Host], plan: &HostPlan) -> FlexTensor {
    let ([n, heads, _], [_, _, value]) = (queries.dims(), values[0].dims());
    let out = with_operands(queries, keys, values, |operands| attention::forward(operands, plan));
    flex(out, [n, heads, value])
}

/// The target's head on the host.
struct HeadTensors<'a> {
    norm: Host,
    eps: f64,
    lm_head: Host,
    draft_to_target: &'a [u32],
}

impl HeadTensors<'_> {
    fn slices(&self) -> HostHead<'_> {
        HostHead {
            norm: self.norm.values(),
            eps: self.eps as f32,
            lm_head: self.lm_head.values(),
            draft_to_target: self.draft_to_target,
        }
    }
}

fn head_tensors(head: &TeacherHead<Flex>) -> HeadTensors<'_> {
    HeadTensors {
        norm: Host::of(head.norm.clone()),
        eps: head.norm_eps,
        lm_head: Host::of(head.lm_head.clone()),
        draft_to_target: head.draft_to_target.host(),
    }
}

fn distilled(
    hidden: &Host,
    lm_head: &Host,
    states: &Host,
    head: &HeadTensors<'_>,
    (rows, with_gradients): (&DistillRows, bool),
) -> HostDistilled {
    let draft = (hidden.values(), lm_head.values());
    distill::distill(draft, states.values(), head.slices(), rows, with_gradients)
}

fn outcome_tensor(outcomes: Vec<f32>) -> FlexTensor {
    let count = outcomes.len() / 3;
    flex(outcomes, [count, 3])
}

impl DraftOps for Flex {
    fn project_part(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        first: usize,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        tensor(project_part(&Host::of(x), &Host::of(weight), first, sum.map(Host::of)))
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, weight) = (Host::of(x), Host::of(weight));
        let out = rows::rms_norm(x.values(), weight.values(), eps as f32);
        tensor(flex(out, x.dims::<2>()))
    }

    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (Host::of(gate), Host::of(up));
        tensor(flex(rows::swiglu(gate.values(), up.values()), gate.dims::<2>()))
    }

    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        tensor(HostRotation::new(table, positions).turn(&Host::of(x), 1.0))
    }

    fn ttt_attention(
        queries: Tensor<Self, 3>,
        keys: &[Tensor<Self, 3>],
        values: &[Tensor<Self, 3>],
        plan: &AttentionPlan<Self>,
    ) -> Tensor<Self, 3> {
        let host = |of: &[Tensor<Self, 3>]| of.iter().cloned().map(Host::of).collect::<Vec<_>>();
        let (keys, values) = (host(keys), host(values));
        tensor(attend(&Host::of(queries), &keys, &values, &HostPlan::new(plan)))
    }

    fn distill(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> Distilled<Self> {
        let (hidden, lm_head) = (Host::of(hidden), Host::of(lm_head));
        let head = head_tensors(head);
        let result = distilled(&hidden, &lm_head, &Host::of(states), &head, (rows, false));
        Distilled {
            loss: tensor(flex(vec![result.loss], [1])),
            rows: tensor(outcome_tensor(result.outcomes)),
        }
    }

    fn teacher_top(
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        states_at_once: usize,
    ) -> Vec<u32> {
        let states = Host::of(states);
        let head = head_tensors(head);
        let [_, width] = states.dims();
        let chunks = states.values().chunks(states_at_once.max(1) * width);
        chunks.flat_map(|chunk| distill::teacher_top(chunk, head.slices())).collect()
    }

    fn adamw_step<const D: usize>(
        state: AdamWState<Self, D>,
        gradient: Tensor<Self, D>,
        step: &AdamWStep,
    ) -> AdamWState<Self, D> {
        let owned = |x: Tensor<Self, D>| compact(Host::of(x));
        let (mut param, mut first, mut second) =
            (owned(state.param), owned(state.first), owned(state.second));
        let gradient = Host::of(gradient);
        // In place unless someone else still holds the storage.
        let parts = [param.storage_mut(), first.storage_mut(), second.storage_mut()];
        adamw::update(parts, gradient.values(), step);
        let (first, second) = (tensor(first), tensor(second));
        AdamWState { param: tensor(param), master: None, first, second }
    }
}
