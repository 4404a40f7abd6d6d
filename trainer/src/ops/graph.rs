//! Hand-written gradients as steps of burn's graph, for every device that has them. Knows the
//! graph and no arithmetic.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{Tensor, TensorPrimitive};

use super::{
    AttentionOperands, AttentionPlan, DeviceFault, DistillRows, Distilled, DraftGradients,
    DraftOps, EarlierSums, RotaryTable, RowIndex, TeacherHead, plain,
};

type Node<B> = <Autodiff<B> as BackendTypes>::FloatTensorPrimitive;

fn node<B: Backend, C: CheckpointStrategy, const D: usize>(
    x: Tensor<Autodiff<B, C>, D>,
) -> Node<B> {
    x.into_primitive().tensor()
}

fn wrap<B: Backend, C: CheckpointStrategy, const D: usize>(
    x: Node<B>,
) -> Tensor<Autodiff<B, C>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

fn tensor<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

/// The tensor without its place in the graph.
fn bare<B: Backend, C: CheckpointStrategy, const D: usize>(
    x: &Tensor<Autodiff<B, C>, D>,
) -> Tensor<B, D> {
    tensor(node(x.clone()).primitive)
}

fn bare_rows<B: Backend, C: CheckpointStrategy>(rows: &RowIndex<Autodiff<B, C>>) -> RowIndex<B> {
    let device = Tensor::from_primitive(rows.device.clone().into_primitive());
    RowIndex { host: rows.host.clone(), device }
}

fn bare_table<B: Backend, C: CheckpointStrategy>(
    table: &RotaryTable<Autodiff<B, C>>,
) -> RotaryTable<B> {
    let (cos, sin) = (bare(&table.cos), bare(&table.sin));
    RotaryTable { cos, sin, interleaved: table.interleaved }
}

fn bare_head<B: Backend, C: CheckpointStrategy>(
    head: &TeacherHead<Autodiff<B, C>>,
) -> TeacherHead<B> {
    TeacherHead {
        norm: bare(&head.norm),
        norm_eps: head.norm_eps,
        lm_head: bare(&head.lm_head),
        draft_to_target: bare_rows(&head.draft_to_target),
    }
}

fn bare_plan<B: Backend, C: CheckpointStrategy>(
    plan: &AttentionPlan<Autodiff<B, C>>,
) -> AttentionPlan<B> {
    AttentionPlan {
        segments: plan.segments.clone(),
        visible: bare_rows(&plan.visible),
        own: plan.own.iter().map(bare_rows).collect(),
        scale: plan.scale,
    }
}

// burn does not export the type of a node's reference, so functions can't name it.

/// The gradient that arrived at the operation's output.
macro_rules! consume {
    ($backend:ty, $gradients:expr, $node:expr) => {
        tensor($gradients.consume::<$backend>(&$node))
    };
}

/// Gives a gradient to a parent that wants one.
macro_rules! register {
    ($backend:ty, $gradients:expr, $parent:expr, $value:expr) => {
        if let Some(parent) = $parent {
            $gradients.register::<$backend>(parent.id, primitive($value));
        }
    };
}

/// Takes out what a node was given so far; `any` is a tensor of any value.
macro_rules! take_sum {
    ($backend:ty, $gradients:expr, $parent:expr, $any:expr) => {{
        let holder = Node::<$backend> {
            primitive: primitive($any.clone()),
            rc: Arc::new($parent.id),
            node: $parent.clone(),
        };
        $gradients.remove::<$backend>(&holder).map(tensor)
    }};
}

/// Puts an operation with hand-written gradients into the graph: its kind, parents, what the
/// gradient needs, and the output.
macro_rules! attach {
    ($backward:expr, $backend:ty, $strategy:ty, $parents:expr, $state:expr, $output:expr) => {
        match Backward::<$backend, _>::prepare::<$strategy>($backward, $parents)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish($state, primitive($output)),
            OpsKind::UnTracked(prep) => prep.finish(primitive($output)),
        }
    };
}

#[derive(Debug)]
struct Projection;

impl<B: DraftGradients> Backward<B, 2> for Projection {
    type State = [Tensor<B, 2>; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 2> = consume!(B, gradients, ops.node);
        let [x, weight] = ops.state;
        let [parent_x, parent_weight] = ops.parents;
        if let Some(parent) = parent_weight {
            // The same weight is used at every step: add to what is there already.
            let sum = take_sum!(B, gradients, parent, weight);
            let sum = B::project_weight_gradient(gradient.clone(), x, sum);
            register!(B, gradients, Some(parent), sum);
        }
        if parent_x.is_some() {
            register!(B, gradients, parent_x, B::project_input_gradient(gradient, weight));
        }
    }
}

#[derive(Debug)]
struct Norm;

impl<B: DraftGradients> Backward<B, 2> for Norm {
    type State = (Tensor<B, 2>, Tensor<B, 1>, f64);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 2> = consume!(B, gradients, ops.node);
        let (x, weight, eps) = ops.state;
        let (dx, dw) = B::rms_norm_gradients(gradient, x, weight, eps);
        let [parent_x, parent_weight] = ops.parents;
        register!(B, gradients, parent_x, dx);
        register!(B, gradients, parent_weight, dw);
    }
}

#[derive(Debug)]
struct Gate;

impl<B: DraftGradients> Backward<B, 2> for Gate {
    type State = [Tensor<B, 2>; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 2> = consume!(B, gradients, ops.node);
        let [gate, up] = ops.state;
        for (parent, part) in ops.parents.into_iter().zip(B::swiglu_gradients(gradient, gate, up)) {
            register!(B, gradients, parent, part);
        }
    }
}

#[derive(Debug)]
struct Turn;

impl<B: DraftGradients> Backward<B, 1> for Turn {
    type State = (RotaryTable<B>, RowIndex<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 3> = consume!(B, gradients, ops.node);
        let [parent] = ops.parents;
        let (table, positions) = ops.state;
        register!(B, gradients, parent, B::rope_gradient(gradient, &table, &positions));
    }
}

#[derive(Debug)]
struct Gather;

impl<B: DraftGradients> Backward<B, 1> for Gather {
    type State = (RowIndex<B>, usize);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 2> = consume!(B, gradients, ops.node);
        let [parent] = ops.parents;
        let (rows, count) = ops.state;
        register!(B, gradients, parent, B::gather_rows_gradient(gradient, &rows, count));
    }
}

/// Queries, then keys by step, then values by step.
#[derive(Debug)]
struct Attention<const N: usize>;

#[derive(Clone, Debug)]
struct AttentionState<B: DraftGradients> {
    operands: AttentionOperands<B>,
    plan: AttentionPlan<B>,
    kept: B::Kept,
}

impl<B: DraftGradients, const N: usize> Backward<B, N> for Attention<N> {
    type State = AttentionState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient: Tensor<B, 3> = consume!(B, gradients, ops.node);
        let AttentionState { operands, plan, kept } = ops.state;
        let mut parents = ops.parents.into_iter();
        let parent_queries = parents.next().flatten();
        let parents_keys: Vec<_> = parents.by_ref().take(N / 2).collect();
        let parents_values: Vec<_> = parents.collect();
        let mut earlier = EarlierSums { keys: Vec::new(), values: Vec::new() };
        for (parent, key) in parents_keys.iter().zip(&operands.keys) {
            let sum = parent.as_ref().and_then(|parent| take_sum!(B, gradients, parent, key));
            earlier.keys.push(sum);
        }
        for (parent, value) in parents_values.iter().zip(&operands.values) {
            let sum = parent.as_ref().and_then(|parent| take_sum!(B, gradients, parent, value));
            earlier.values.push(sum);
        }
        let made = B::attend_gradients(gradient, operands, (&plan, kept), earlier);
        register!(B, gradients, parent_queries, made.queries);
        let both = parents_keys.into_iter().chain(parents_values);
        for (parent, part) in both.zip(made.keys.into_iter().chain(made.values)) {
            register!(B, gradients, parent, part);
        }
    }
}

/// Attention with `N = 1 + 2 * steps` operands in the graph; `None` for another number.
fn attach_attention<B: DraftGradients, C: CheckpointStrategy, const N: usize>(
    nodes: Vec<Node<B>>,
    plan: &AttentionPlan<B>,
) -> Option<Node<B>> {
    let parents = nodes.iter().map(|x| x.node.clone()).collect::<Vec<_>>().try_into().ok()?;
    let mut bare = nodes.into_iter().map(|x| tensor(x.primitive));
    let queries = bare.next()?;
    let keys = bare.by_ref().take(N / 2).collect();
    let operands = AttentionOperands { queries, keys, values: bare.collect() };
    let (output, kept) = B::attend(&operands, plan);
    let state = AttentionState { operands, plan: plan.clone(), kept };
    Some(attach!(Attention::<N>, B, C, parents, state, output))
}

/// The gradients were made with the loss; only the factor of the loss is missing.
#[derive(Debug)]
struct Distillation;

impl<B: DraftGradients> Backward<B, 2> for Distillation {
    type State = Option<[Tensor<B, 2>; 2]>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let factor: Tensor<B, 1> = consume!(B, gradients, ops.node);
        for (parent, part) in ops.parents.into_iter().zip(ops.state.into_iter().flatten()) {
            register!(B, gradients, parent, B::times(part, factor.clone()));
        }
    }
}

impl<B: DraftGradients, C: CheckpointStrategy> DraftOps for Autodiff<B, C> {
    fn project(x: Tensor<Self, 2>, weight: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, weight) = (node(x), node(weight));
        let state = [tensor::<B, 2>(x.primitive), tensor(weight.primitive)];
        let output = B::project(state[0].clone(), state[1].clone());
        wrap(attach!(Projection, B, C, [x.node, weight.node], state, output))
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, weight) = (node(x), node(weight));
        let state = (tensor::<B, 2>(x.primitive), tensor::<B, 1>(weight.primitive), eps);
        let output = B::rms_norm(state.0.clone(), state.1.clone(), eps);
        wrap(attach!(Norm, B, C, [x.node, weight.node], state, output))
    }

    fn swiglu(gate: Tensor<Self, 2>, up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (node(gate), node(up));
        let state = [tensor::<B, 2>(gate.primitive), tensor(up.primitive)];
        let output = B::swiglu(state[0].clone(), state[1].clone());
        wrap(attach!(Gate, B, C, [gate.node, up.node], state, output))
    }

    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        let state = (bare_table(table), bare_rows(positions));
        let x = node(x);
        let output = B::rope(tensor(x.primitive), &state.0, &state.1);
        wrap(attach!(Turn, B, C, [x.node], state, output))
    }

    fn gather_rows(x: Tensor<Self, 2>, rows: &RowIndex<Self>) -> Tensor<Self, 2> {
        let state = (bare_rows(rows), x.dims()[0]);
        let x = node(x);
        let output = B::gather_rows(tensor(x.primitive), &state.0);
        wrap(attach!(Gather, B, C, [x.node], state, output))
    }

    fn ttt_attention(
        queries: Tensor<Self, 3>,
        keys: &[Tensor<Self, 3>],
        values: &[Tensor<Self, 3>],
        plan: &AttentionPlan<Self>,
    ) -> Tensor<Self, 3> {
        let bare = bare_plan(plan);
        let all = std::iter::once(&queries).chain(keys).chain(values);
        let nodes: Vec<Node<B>> = all.cloned().map(node).collect();
        macro_rules! with_steps {
            ($($steps:literal)*) => {
                match keys.len() {
                    $($steps => attach_attention::<B, C, { 1 + 2 * $steps }>(nodes, &bare),)*
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
        let tracked = hidden.is_tracked() || lm_head.is_tracked();
        let parents = [hidden.node, lm_head.node];
        let (hidden, lm_head) = (tensor(hidden.primitive), tensor(lm_head.primitive));
        let (states, head) = (bare(&states), bare_head(head));
        let (made, state) = match tracked {
            true => {
                let (made, parts) = B::distill_with_gradients(hidden, lm_head, states, &head, rows);
                (made, Some(parts))
            }
            false => (B::distill(hidden, lm_head, states, &head, rows), None),
        };
        Distilled {
            loss: wrap(attach!(Distillation, B, C, parents, state, made.loss)),
            rows: Tensor::from_inner(made.rows),
        }
    }

    fn teacher_top(
        states: Tensor<Self, 2>,
        head: &TeacherHead<Self>,
        states_at_once: usize,
    ) -> Vec<u32> {
        B::teacher_top(bare(&states), &bare_head(head), states_at_once)
    }

    fn fault(device: &Self::Device) -> Option<DeviceFault> {
        B::fault(device)
    }
}
