//! Hand-written gradients as steps of burn's graph, for every device that has them. Knows the
//! graph and no arithmetic.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};

use super::mlp::{self, MlpSums};
use super::parents::{Node, Parents, Primitive, Slot, primitive, tensor};
use super::{
    Activations, AttentionOperands, AttentionPlan, DeviceFault, DistillRows, Distilled,
    DraftGradients, DraftOps, EarlierSums, MlpWeights, NormSums, RotaryTable, RowIndex,
    TeacherHead, hand_over, plain,
};

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

/// What an operation keeps, and the gradients it makes of that.
trait Operation<B: Backend>: Clone + Debug + Send + 'static {
    /// Gives parents, in the order in which they were attached, their gradients.
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>);
}

/// A step of the graph for any operation.
struct Step<K>(PhantomData<fn() -> K>);

impl<K> Step<K> {
    fn of(_: &K) -> Self {
        Self(PhantomData)
    }
}

impl<K> Debug for Step<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(std::any::type_name::<K>())
    }
}

impl<B: Backend, K: Operation<B>, const N: usize> Backward<B, N> for Step<K> {
    type State = K;

    fn backward(self, ops: Ops<K, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let device = B::float_device(&gradient);
        let slots = ops.parents.map(|parent| {
            let parent = parent?;
            let id = parent.id;
            let holder = move |primitive| Node::<B> {
                primitive,
                rc: Arc::new(parent.id),
                node: parent.clone(),
            };
            Some(Slot { id, holder: Box::new(holder) })
        });
        let mut parents = Parents { slots: slots.into(), gradients };
        ops.state.gradients(gradient, &mut parents);
        hand_over::has_added(&mut parents, &device);
    }
}

/// Puts an operation into the graph: backend and strategy, its parents, what it keeps, its output.
macro_rules! attach {
    ($backend:ty, $strategy:ty, $parents:expr, $kept:expr, $output:expr) => {{
        let (kept, parents) = ($kept, $parents);
        hand_over::will_add(parents.iter().map(|parent| parent.id));
        match Backward::<$backend, _>::prepare::<$strategy>(Step::of(&kept), parents)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(kept, primitive($output)),
            OpsKind::UnTracked(prep) => prep.finish(primitive($output)),
        }
    }};
}

/// Parents: input, weight, and what is added if anything.
#[derive(Clone, Debug)]
struct Projection<B: Backend> {
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    first: usize,
}

impl<B: DraftGradients> Operation<B> for Projection<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let gradient: Tensor<B, 2> = tensor(gradient);
        let Self { x, weight, first } = self;
        let ([_, width], [_, whole]) = (x.dims(), weight.dims());
        if parents.wants(1) {
            // The same weight is used at every step: add to what is there already.
            let sum = parents.take(1, &weight);
            let sum = B::project_weight_gradient(gradient.clone(), x, (first, whole), sum);
            parents.give(1, sum);
        }
        if parents.wants(0) {
            let (columns, sum) = (first..first + width, parents.take(0, &weight));
            let sum = B::project_input_gradient(gradient.clone(), weight, columns, sum);
            parents.give(0, sum);
        }
        parents.give(2, gradient);
    }
}

/// Parents: input, weight.
#[derive(Clone, Debug)]
struct Norm<B: Backend> {
    x: Tensor<B, 2>,
    weight: Tensor<B, 1>,
    eps: f64,
}

impl<B: DraftGradients> Operation<B> for Norm<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let Self { x, weight, eps } = self;
        let sums = NormSums { input: parents.take(0, &weight), weight: parents.take(1, &weight) };
        let (dx, dw) = B::rms_norm_gradients(tensor(gradient), x, (weight, eps), sums);
        parents.give(0, dx);
        parents.give(1, dw);
    }
}

/// Parents: input, norm, gate, up, down.
#[derive(Clone, Debug)]
struct Mlp<B: Backend> {
    x: Tensor<B, 2>,
    weights: MlpWeights<B>,
    gate_and_up: Option<[Tensor<B, 2>; 2]>,
}

impl<B: DraftGradients> Operation<B> for Mlp<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let Self { x, weights, gate_and_up } = self;
        let any = weights.norm.clone();
        let sums = MlpSums {
            norm: parents.take(1, &any),
            gate: parents.take(2, &any),
            up: parents.take(3, &any),
            down: parents.take(4, &any),
        };
        let (dx, made) = mlp::backward(tensor(gradient), x, &weights, gate_and_up, sums);
        parents.give(0, dx);
        parents.give(1, made.norm);
        for (at, matrix) in made.matrices.into_iter().enumerate() {
            parents.give(2 + at, matrix);
        }
    }
}

/// Parent: what is rotated.
#[derive(Clone, Debug)]
struct Turn<B: Backend>(RotaryTable<B>, RowIndex<B>);

impl<B: DraftGradients> Operation<B> for Turn<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        parents.give(0, B::rope_gradient(tensor(gradient), &self.0, &self.1));
    }
}

/// Parent: what rows are taken from, with so many rows.
#[derive(Clone, Debug)]
struct Gather<B: Backend>(RowIndex<B>, usize);

impl<B: DraftGradients> Operation<B> for Gather<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let gradient: Tensor<B, 2> = tensor(gradient);
        let sum = parents.take(0, &gradient);
        parents.give(0, B::gather_rows_gradient(gradient, &self.0, self.1, sum));
    }
}

/// Parents: what rows are placed in, and the rows.
#[derive(Clone, Debug)]
struct Place<B: Backend>(RowIndex<B>);

impl<B: DraftGradients> Operation<B> for Place<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let gradient: Tensor<B, 2> = tensor(gradient);
        parents.give(1, B::gather_rows(gradient.clone(), &self.0));
        parents.give(0, gradient);
    }
}

/// Parents: queries, then keys by step, then values by step.
#[derive(Clone, Debug)]
struct Attention<B: DraftGradients> {
    operands: AttentionOperands<B>,
    plan: AttentionPlan<B>,
    kept: B::Kept,
}

impl<B: DraftGradients> Operation<B> for Attention<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let gradient: Tensor<B, 3> = tensor(gradient);
        let Self { operands, plan, kept } = self;
        let steps = operands.keys.len();
        let mut sums = |first: usize| {
            (first..first + steps).map(|at| parents.take(at, &gradient)).collect::<Vec<_>>()
        };
        let earlier = EarlierSums { keys: sums(1), values: sums(1 + steps) };
        let made = B::attend_gradients(gradient, operands, (&plan, kept), earlier);
        parents.give(0, made.queries);
        for (at, part) in made.keys.into_iter().chain(made.values).enumerate() {
            parents.give(1 + at, part);
        }
    }
}

/// Attention with `N = 1 + 2 * steps` operands in the graph; `None` for another number.
fn attach_attention<B: DraftGradients, C: CheckpointStrategy, const N: usize>(
    nodes: Vec<Node<B>>,
    plan: &AttentionPlan<B>,
) -> Option<Node<B>> {
    let parents = nodes.iter().map(|x| x.node.clone()).collect::<Vec<_>>().try_into().ok()?;
    let parents: [_; N] = parents;
    let mut bare = nodes.into_iter().map(|x| tensor(x.primitive));
    let queries = bare.next()?;
    let keys = bare.by_ref().take(N / 2).collect();
    let operands = AttentionOperands { queries, keys, values: bare.collect() };
    let (output, kept) = B::attend(&operands, plan);
    let state = Attention { operands, plan: plan.clone(), kept };
    Some(attach!(B, C, parents, state, output))
}

/// Parents: hidden states and head. Their gradients were made with the loss; only the factor of the
/// loss is missing.
#[derive(Clone, Debug)]
struct Distillation<B: Backend>(Option<[Tensor<B, 2>; 2]>);

impl<B: DraftGradients> Operation<B> for Distillation<B> {
    fn gradients(self, gradient: Primitive<B>, parents: &mut Parents<'_, B>) {
        let factor: Tensor<B, 1> = tensor(gradient);
        for (at, part) in self.0.into_iter().flatten().enumerate() {
            parents.give(at, B::times(part, factor.clone()));
        }
    }
}

impl<B: DraftGradients, C: CheckpointStrategy> DraftOps for Autodiff<B, C> {
    const TEACHER_ROWS: usize = B::TEACHER_ROWS;
    const DEVICE: &'static str = B::DEVICE;

    fn project_part(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        first: usize,
        sum: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let (x, weight, sum) = (node(x), node(weight), sum.map(node));
        let kept =
            Projection::<B> { x: tensor(x.primitive), weight: tensor(weight.primitive), first };
        let product = |sum| B::project_part(kept.x.clone(), kept.weight.clone(), first, sum);
        match sum {
            Some(sum) => {
                let output = product(Some(tensor(sum.primitive)));
                wrap(attach!(B, C, [x.node, weight.node, sum.node], kept, output))
            }
            None => {
                let output = product(None);
                wrap(attach!(B, C, [x.node, weight.node], kept, output))
            }
        }
    }

    fn mlp(
        x: Tensor<Self, 2>,
        weights: MlpWeights<Self>,
        activations: Activations,
    ) -> Tensor<Self, 2> {
        let MlpWeights { norm, eps, gate, up, down } = weights;
        let (x, norm, gate) = (node(x), node(norm), node(gate));
        let (up, down) = (node(up), node(down));
        let parents = [x.node, norm.node, gate.node, up.node, down.node];
        let x: Tensor<B, 2> = tensor(x.primitive);
        let weights = MlpWeights::<B> {
            norm: tensor(norm.primitive),
            eps,
            gate: tensor(gate.primitive),
            up: tensor(up.primitive),
            down: tensor(down.primitive),
        };
        let (output, made) = mlp::forward(x.clone(), &weights);
        let gate_and_up = (activations == Activations::Keep).then_some(made);
        wrap(attach!(B, C, parents, Mlp { x, weights, gate_and_up }, output))
    }

    fn rms_norm(x: Tensor<Self, 2>, weight: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, weight) = (node(x), node(weight));
        let kept = Norm::<B> { x: tensor(x.primitive), weight: tensor(weight.primitive), eps };
        let output = B::rms_norm(kept.x.clone(), kept.weight.clone(), eps);
        wrap(attach!(B, C, [x.node, weight.node], kept, output))
    }

    fn rope(
        x: Tensor<Self, 3>,
        table: &RotaryTable<Self>,
        positions: &RowIndex<Self>,
    ) -> Tensor<Self, 3> {
        let kept = Turn::<B>(bare_table(table), bare_rows(positions));
        let x = node(x);
        let output: Tensor<B, 3> = B::rope(tensor(x.primitive), &kept.0, &kept.1);
        wrap(attach!(B, C, [x.node], kept, output))
    }

    fn gather_rows(x: Tensor<Self, 2>, rows: &RowIndex<Self>) -> Tensor<Self, 2> {
        let kept = Gather::<B>(bare_rows(rows), x.dims()[0]);
        let x = node(x);
        let output: Tensor<B, 2> = B::gather_rows(tensor(x.primitive), &kept.0);
        wrap(attach!(B, C, [x.node], kept, output))
    }

    fn place_rows(
        into: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        places: &RowIndex<Self>,
    ) -> Tensor<Self, 2> {
        let (into, x, kept) = (node(into), node(x), Place::<B>(bare_rows(places)));
        let output = B::place_rows(tensor(into.primitive), tensor(x.primitive), &kept.0);
        wrap(attach!(B, C, [into.node, x.node], kept, output))
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
        let (made, parts) = match tracked {
            true => {
                let (made, parts) = B::distill_with_gradients(hidden, lm_head, states, &head, rows);
                (made, Some(parts))
            }
            false => (B::distill(hidden, lm_head, states, &head, rows), None),
        };
        Distilled {
            loss: wrap(attach!(B, C, parents, Distillation(parts), made.loss)),
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

    fn on_device<R: Send + 'static>(device: &Self::Device, task: impl FnOnce() -> R + Send) -> R {
        B::on_device(device, task)
    }

    fn memory(device: &Self::Device) -> Option<u64> {
        B::memory(device)
    }

    fn fault(device: &Self::Device) -> Option<DeviceFault> {
        B::fault(device)
    }
}
