//! Gradients of the CPU operations as steps of burn's graph.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::BackendTypes;
use burn::tensor::{Tensor, TensorPrimitive};
use kernels::gemm::{GemmDims, matmul_nn, matmul_tn};

use super::super::cpu::attention::{self, HostPlan};
use super::super::cpu::{rows, threads};
use super::{
    AttentionPlan, DistillRows, Distilled, DraftOps, Host, HostRotation, RotaryTable, RowIndex,
    TeacherHead, attend, compact, distilled, flex, head_tensors, outcome_tensor, project, tensor,
};
use crate::ops::plain;

type Node = <Autodiff<Flex> as BackendTypes>::FloatTensorPrimitive;
type Graph<C> = Autodiff<Flex, C>;

fn node<const D: usize, C: CheckpointStrategy>(x: Tensor<Graph<C>, D>) -> Node {
    x.into_primitive().tensor()
}

fn wrap<const D: usize, C: CheckpointStrategy>(x: Node) -> Tensor<Graph<C>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The tensor without its place in the graph.
fn bare<const D: usize, C: CheckpointStrategy>(x: Tensor<Graph<C>, D>) -> Tensor<Flex, D> {
    tensor(node(x).primitive)
}

fn bare_rows<C: CheckpointStrategy>(rows: &RowIndex<Graph<C>>) -> RowIndex<Flex> {
    let device = Tensor::from_primitive(rows.device.clone().into_primitive());
    RowIndex { host: rows.host.clone(), device }
}

fn bare_head<C: CheckpointStrategy>(head: &TeacherHead<Graph<C>>) -> TeacherHead<Flex> {
    TeacherHead {
        norm: bare(head.norm.clone()),
        norm_eps: head.norm_eps,
        lm_head: bare(head.lm_head.clone()),
        draft_to_target: bare_rows(&head.draft_to_target),
    }
}

/// Puts an operation with hand-written gradients into the graph: its kind, parents, what the
/// gradient needs, and the output.
macro_rules! attach {
    ($backward:expr, $strategy:ty, $parents:expr, $state:expr, $output:expr) => {
        match $backward.prepare::<$strategy>($parents).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish($state, $output),
            OpsKind::UnTracked(prep) => prep.finish($output),
        }
    };
}

#[derive(Debug)]
struct Projection;

impl Backward<Flex, 2> for Projection {
    type State = (Host, Host);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        let (x, weight) = &ops.state;
        let ([rows, output], [_, input]) = (gradient.dims(), x.dims());
        let [parent_x, parent_weight] = ops.parents;
        if let Some(parent) = parent_x {
            let mut dx = vec![0.0; rows * input];
            let dims = GemmDims { m: rows, n: input, k: output };
            matmul_nn(&mut dx, gradient.values(), weight.values(), dims, false, threads());
            gradients.register::<Flex>(parent.id, flex(dx, [rows, input]));
        }
        if let Some(parent) = parent_weight {
            let dims = GemmDims { m: output, n: input, k: rows };
            // The same weight is used at every step: add to what is there already.
            let holder =
                Node { primitive: weight.0.clone(), rc: Arc::new(parent.id), node: parent.clone() };
            let sum = gradients.remove::<Flex>(&holder).map(|sum| compact(Host::new(sum)));
            let accumulate = sum.is_some();
            let mut sum = sum.unwrap_or_else(|| flex(vec![0.0; output * input], [output, input]));
            let into = sum.storage_mut::<f32>();
            matmul_tn(into, gradient.values(), x.values(), dims, accumulate, threads());
            gradients.register::<Flex>(parent.id, sum);
        }
    }
}

#[derive(Debug)]
struct Norm;

impl Backward<Flex, 2> for Norm {
    type State = (Host, Host, f32);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        let (x, weight, eps) = &ops.state;
        let (dx, dw) =
            rows::rms_norm_backward(gradient.values(), x.values(), weight.values(), *eps);
        let [parent_x, parent_weight] = ops.parents;
        if let Some(parent) = parent_x {
            gradients.register::<Flex>(parent.id, flex(dx, x.dims::<2>()));
        }
        if let Some(parent) = parent_weight {
            gradients.register::<Flex>(parent.id, flex(dw, weight.dims::<1>()));
        }
    }
}

#[derive(Debug)]
struct Gate;

impl Backward<Flex, 2> for Gate {
    type State = (Host, Host);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        let (gate, up) = &ops.state;
        let parts = rows::swiglu_backward(gradient.values(), gate.values(), up.values());
        for (parent, part) in ops.parents.into_iter().zip([parts.0, parts.1]) {
            if let Some(parent) = parent {
                gradients.register::<Flex>(parent.id, flex(part, gate.dims::<2>()));
            }
        }
    }
}

#[derive(Debug)]
struct Turn;

impl Backward<Flex, 1> for Turn {
    type State = HostRotation;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        if let [Some(parent)] = ops.parents {
            gradients.register::<Flex>(parent.id, ops.state.turn(&gradient, -1.0));
        }
    }
}

/// Queries, then keys by step, then values by step.
#[derive(Debug)]
struct Attention<const N: usize>;

#[derive(Clone, Debug)]
struct AttentionState {
    queries: Host,
    keys: Vec<Host>,
    values: Vec<Host>,
    plan: HostPlan,
}

impl<const N: usize> Backward<Flex, N> for Attention<N> {
    type State = AttentionState;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        let AttentionState { queries, keys, values, plan } = &ops.state;
        let parts = super::with_operands(queries, keys, values, |operands| {
            attention::backward(gradient.values(), operands, plan)
        });
        let shapes = std::iter::once(queries).chain(keys).chain(values).map(Host::dims::<3>);
        let parts = std::iter::once(parts.queries).chain(parts.keys).chain(parts.values);
        for (parent, (part, shape)) in ops.parents.into_iter().zip(parts.zip(shapes)) {
            if let Some(parent) = parent {
                gradients.register::<Flex>(parent.id, flex(part, shape));
            }
        }
    }
}

/// Attention with `N = 1 + 2 * steps` operands in the graph; `None` for another number.
fn attach_attention<const N: usize, C: CheckpointStrategy>(
    operands: &[Node],
    plan: &HostPlan,
) -> Option<Node> {
    let parents = operands.iter().map(|x| x.node.clone()).collect::<Vec<_>>().try_into().ok()?;
    let mut hosts = operands.iter().map(|x| Host::new(x.primitive.clone()));
    let queries = hosts.next()?;
    let keys: Vec<Host> = hosts.by_ref().take(N / 2).collect();
    let values: Vec<Host> = hosts.collect();
    let output = attend(&queries, &keys, &values, plan);
    let state = AttentionState { queries, keys, values, plan: plan.clone() };
    Some(attach!(Attention::<N>, C, parents, state, output))
}

/// The gradients were made with the loss; only the factor of the loss is missing.
#[derive(Debug)]
struct Distillation;

impl Backward<Flex, 2> for Distillation {
    type State = (Host, Host);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = Host::new(gradients.consume::<Flex>(&ops.node));
        let factor = gradient.values().first().copied().unwrap_or(0.0);
        let (hidden, lm_head) = ops.state;
        for (parent, part) in ops.parents.into_iter().zip([hidden, lm_head]) {
            let Some(parent) = parent else { continue };
            let part = match factor == 1.0 {
                true => part.0,
                false => {
                    let scaled = part.values().iter().map(|x| x * factor).collect();
                    flex(scaled, part.dims::<2>())
                }
            };
            gradients.register::<Flex>(parent.id, part);
        }
    }
}

impl<C: CheckpointStrategy> DraftOps for Graph<C> {
    fn project(x: Tensor<Self, 2>, weight: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, weight) = (node(x), node(weight));
        let state = (Host::new(x.primitive), Host::new(weight.primitive));
        let output = project(&state.0, &state.1);
        wrap(attach!(Projection, C, [x.node, weight.node], state, output))
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, weight) = (node(x), node(weight));
        let state = (Host::new(x.primitive), Host::new(weight.primitive), eps as f32);
        let output = rows::rms_norm(state.0.values(), state.1.values(), state.2);
        let output = flex(output, state.0.dims::<2>());
        wrap(attach!(Norm, C, [x.node, weight.node], state, output))
    }

    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (node(gate), node(up));
        let state = (Host::new(gate.primitive), Host::new(up.primitive));
        let output = rows::swiglu(state.0.values(), state.1.values());
        let output = flex(output, state.0.dims::<2>());
        wrap(attach!(Gate, C, [gate.node, up.node], state, output))
    }

    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        let table = RotaryTable {
            cos: bare(table.cos.clone()),
            sin: bare(table.sin.clone()),
            interleaved: table.interleaved,
        };
        let rotation = HostRotation::new(&table, &bare_rows(positions));
        let x = node(x);
        let output = rotation.turn(&Host::new(x.primitive), 1.0);
        wrap(attach!(Turn, C, [x.node], rotation, output))
    }

    fn ttt_attention(
        queries: Tensor<Self, 3>,
        keys: &[Tensor<Self, 3>],
        values: &[Tensor<Self, 3>],
        plan: &AttentionPlan<Self>,
    ) -> Tensor<Self, 3> {
        let host_plan = HostPlan::new(plan);
        let all = std::iter::once(&queries).chain(keys).chain(values);
        let operands: Vec<Node> = all.cloned().map(node).collect();
        macro_rules! with_steps {
            ($($steps:literal)*) => {
                match keys.len() {
                    $($steps => {
                        attach_attention::<{ 1 + 2 * $steps }, C>(&operands, &host_plan)
                    })*
                    _ => None,
                }
            };
        }
        match with_steps!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16) {
            Some(output) => wrap(output),
            None => plain::ttt_attention(queries, keys, values, plan),
        }
    }

    fn distill(
        hidden: Tensor<Self, 2>,
        lm_head: Tensor<Self, 2>,
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        rows: &DistillRows,
    ) -> Distilled<Self> {
        let (hidden, lm_head) = (node(hidden), node(lm_head));
        let with_gradients = hidden.is_tracked() || lm_head.is_tracked();
        let (hidden_host, lm_head_host) =
            (Host::new(hidden.primitive), Host::new(lm_head.primitive));
        let head = bare_head(head);
        let result = distilled(
            &hidden_host,
            &lm_head_host,
            &Host::of(bare(states)),
            &head_tensors(&head),
            (rows, with_gradients),
        );
        let (dhidden, dhead) = result.gradients.unwrap_or_default();
        let state = match with_gradients {
            true => (
                Host::new(flex(dhidden, hidden_host.dims::<2>())),
                Host::new(flex(dhead, lm_head_host.dims::<2>())),
            ),
            false => (hidden_host, lm_head_host),
        };
        let loss = flex(vec![result.loss], [1]);
        let parents = [hidden.node, lm_head.node];
        Distilled {
            loss: wrap(attach!(Distillation, C, parents, state, loss)),
            rows: Tensor::from_inner(tensor(outcome_tensor(result.outcomes))),
        }
    }

    fn teacher_top(
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        states_at_once: usize,
    ) -> Vec<u32> {
        Flex::teacher_top(bare(states), &bare_head(head), states_at_once)
    }
}
