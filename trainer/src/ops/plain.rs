//! The operations of the training step in plain burn operations: what every device's own form is
//! compared with.

use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{
    Bool, ElementConversion, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData,
};

use super::{
    AdamWState, AdamWStep, AttentionPlan, DistillRows, Distilled, DraftOps, MlpWeights,
    RotaryTable, RowIndex, Segment, TeacherHead,
};
use crate::draft::Param;
use crate::losses::LossKind;

/// See [`DraftOps::project_part`].
pub fn project_part<B: Backend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    first: usize,
    sum: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let [_, width] = x.dims();
    let product = x.matmul(weight.narrow(1, first, width).transpose());
    match sum {
        Some(sum) => sum + product,
        None => product,
    }
}

/// See [`DraftOps::rms_norm`].
pub fn rms_norm<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 1>, eps: f64) -> Tensor<B, 2> {
    let mean_square = (x.clone() * x.clone()).mean_dim(1);
    x / (mean_square + eps).sqrt() * weight.unsqueeze()
}

/// See [`DraftOps::mlp`].
pub fn mlp<B: Backend>(x: Tensor<B, 2>, weights: MlpWeights<B>) -> Tensor<B, 2> {
    let MlpWeights { norm, eps, gate, up, down } = weights;
    let normed = rms_norm(x.clone(), norm, eps);
    let (gate, up) =
        (project_part(normed.clone(), gate, 0, None), project_part(normed, up, 0, None));
    project_part(swiglu(gate, up), down, 0, Some(x))
}

/// See [`DraftOps::swiglu`].
pub fn swiglu<B: Backend>(gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Tensor<B, 2> {
    sigmoid(gate.clone()) * gate * up
}

/// See [`DraftOps::rope`].
pub fn rope<B: Backend>(
    x: Tensor<B, 3>,
    table: &RotaryTable<B>,
    positions: &RowIndex<B>,
) -> Tensor<B, 3> {
    let [n, heads, size] = x.dims();
    let cos = table.cos.clone().select(0, positions.tensor()).reshape([n, 1, size / 2]);
    let sin = table.sin.clone().select(0, positions.tensor()).reshape([n, 1, size / 2]);
    let (first, second) = if table.interleaved {
        let pairs = x.reshape([n, heads, size / 2, 2]);
        let part = |at: usize| pairs.clone().narrow(3, at, 1).reshape([n, heads, size / 2]);
        (part(0), part(1))
    } else {
        (x.clone().narrow(2, 0, size / 2), x.narrow(2, size / 2, size / 2))
    };
    let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let turned_second = second * cos + first * sin;
    if table.interleaved {
        Tensor::stack::<4>(vec![turned_first, turned_second], 3).reshape([n, heads, size])
    } else {
        Tensor::cat(vec![turned_first, turned_second], 2)
    }
}

/// See [`DraftOps::gather_rows`].
pub fn gather_rows<B: Backend>(x: Tensor<B, 2>, rows: &RowIndex<B>) -> Tensor<B, 2> {
    x.select(0, rows.tensor())
}

/// See [`DraftOps::place_rows`].
pub fn place_rows<B: Backend>(
    into: Tensor<B, 2>,
    x: Tensor<B, 2>,
    places: &RowIndex<B>,
) -> Tensor<B, 2> {
    into.select_assign(0, places.tensor(), x, IndexingUpdateOp::Add)
}

/// See [`DraftOps::ttt_attention`].
pub fn ttt_attention<B: Backend>(
    queries: Tensor<B, 3>,
    keys: &[Tensor<B, 3>],
    values: &[Tensor<B, 3>],
    plan: &AttentionPlan<B>,
) -> Tensor<B, 3> {
    let heads = queries.dims()[1];
    let own = |tensors: &[Tensor<B, 3>]| -> Vec<Tensor<B, 3>> {
        let pairs = tensors[1..].iter().zip(&plan.own);
        pairs.map(|(t, rows)| t.clone().select(0, rows.tensor())).collect()
    };
    let (own_keys, own_values) = (own(keys), own(values));
    let part = |segment: &Segment| {
        let rows = |tensor: &Tensor<B, 3>, range: &std::ops::Range<usize>| {
            spread(tensor.clone().narrow(0, range.start, range.len()), heads).swap_dims(0, 1)
        };
        let q = rows(&queries, &segment.queries);
        let mut scores = vec![
            q.clone()
                .matmul(rows(&keys[0], &segment.keys).swap_dims(1, 2))
                .mask_fill(hidden_keys(plan, segment, &queries.device()), f32::NEG_INFINITY),
        ];
        for key in &own_keys {
            scores.push((q.clone() * rows(key, &segment.queries)).sum_dim(2));
        }
        let weights = softmax(Tensor::cat(scores, 2) * plan.scale, 2);
        let shared = segment.keys.len();
        let mut mixed =
            weights.clone().narrow(2, 0, shared).matmul(rows(&values[0], &segment.keys));
        for (at, value) in own_values.iter().enumerate() {
            let weight = weights.clone().narrow(2, shared + at, 1);
            mixed = mixed + weight * rows(value, &segment.queries);
        }
        mixed.swap_dims(0, 1)
    };
    Tensor::cat(plan.segments.iter().map(part).collect(), 0)
}

/// One entry for each query head: `[n, groups, d]` to `[n, heads, d]`.
fn spread<B: Backend>(x: Tensor<B, 3>, heads: usize) -> Tensor<B, 3> {
    let [n, groups, size] = x.dims();
    if groups == heads {
        return x;
    }
    x.reshape([n, groups, 1, size])
        .expand([n, groups, heads / groups, size])
        .reshape([n, heads, size])
}

/// True where a query may not look, `[1, queries, keys]`.
fn hidden_keys<B: Backend>(
    plan: &AttentionPlan<B>,
    segment: &Segment,
    device: &B::Device,
) -> Tensor<B, 3, Bool> {
    let ends = &plan.visible.host()[segment.queries.clone()];
    let hidden: Vec<bool> = ends
        .iter()
        .flat_map(|&end| segment.keys.clone().map(move |key| key >= end as usize))
        .collect();
    let shape = [1, segment.queries.len(), segment.keys.len()];
    Tensor::from_data(TensorData::new(hidden, shape), device)
}

/// The teacher for a few states.
struct Teacher<B: Backend> {
    /// Distribution over the draft vocabulary, renormalised, `[s, Vd]`.
    draft: Tensor<B, 2>,
    /// The same without renormalising.
    plain: Tensor<B, 2>,
    /// Top token of the whole vocabulary, `[s, 1]`.
    top: Tensor<B, 2, Int>,
}

fn teacher_logits<B: DraftOps>(states: Tensor<B, 2>, head: &TeacherHead<B>) -> Tensor<B, 2> {
    let normed = B::rms_norm(states, head.norm.clone(), head.norm_eps);
    B::project(normed, head.lm_head.clone())
}

fn teacher<B: DraftOps>(states: Tensor<B, 2>, head: &TeacherHead<B>) -> Teacher<B> {
    let logits = teacher_logits(states, head);
    let columns = logits.clone().select(1, head.draft_to_target.tensor());
    let peak = logits.clone().max_dim(1);
    let total = (logits.clone() - peak.clone()).exp().sum_dim(1).log() + peak;
    Teacher {
        draft: softmax(columns.clone(), 1),
        plain: (columns - total).exp(),
        top: logits.argmax(1),
    }
}

/// See [`DraftOps::teacher_top`].
pub fn teacher_top<B: DraftOps>(
    states: Tensor<B, 2>,
    head: &TeacherHead<B>,
    states_at_once: usize,
) -> Vec<u32> {
    let [count, _] = states.dims();
    let mut top = Vec::with_capacity(count);
    for start in (0..count).step_by(states_at_once.max(1)) {
        let rows = states.clone().narrow(0, start, states_at_once.min(count - start));
        let data = teacher_logits(rows, head).argmax(1).into_data();
        top.extend(data.iter::<i64>().map(|id| id as u32));
    }
    top
}

/// See [`DraftOps::distill`].
pub fn distill<B: DraftOps>(
    hidden: Tensor<B, 2>,
    lm_head: Tensor<B, 2>,
    states: Tensor<B, 2>,
    head: &TeacherHead<B>,
    rows: &DistillRows,
) -> Distilled<B> {
    let LossKind::SoftCrossEntropy = rows.loss;
    let device = hidden.device();
    let weights = Tensor::<B, 1>::from_floats(rows.weights.as_slice(), &device);
    let (mut losses, mut outcomes) = (Vec::new(), Vec::new());
    let mut first = 0;
    for start in (0..states.dims()[0]).step_by(rows.states_at_once.max(1)) {
        let count = rows.states_at_once.min(states.dims()[0] - start);
        let teacher = teacher(states.clone().narrow(0, start, count), head);
        let last = rows.states.partition_point(|&state| (state as usize) < start + count);
        if first == last {
            continue;
        }
        let of_row = rows.states[first..last].iter().map(|&state| state - start as u32).collect();
        let of_row = RowIndex::<B>::new(of_row, &device).tensor();
        let logits = B::project(hidden.clone().narrow(0, first, last - first), lm_head.clone());
        let log_q = log_softmax(logits, 1);
        let loss = -(teacher.draft.select(0, of_row.clone()) * log_q.clone()).sum_dim(1);
        let weight = weights.clone().narrow(0, first, last - first);
        losses.push((loss.clone() * weight.unsqueeze_dim(1)).sum());
        let overlap = log_q.clone().exp().min_pair(teacher.plain.select(0, of_row.clone()));
        let guess = head.draft_to_target.tensor().select(0, log_q.argmax(1).flatten(0, 1));
        let top: Tensor<B, 1, Int> = teacher.top.select(0, of_row).flatten(0, 1);
        let right = guess.equal(top).float().unsqueeze_dim(1);
        outcomes.push(Tensor::cat(vec![loss.detach(), overlap.sum_dim(1).detach(), right], 1));
        first = last;
    }
    Distilled { loss: Tensor::cat(losses, 0).sum(), rows: Tensor::cat(outcomes, 0) }
}

/// See [`DraftOps::adamw_step`].
pub fn adamw_step<B: Backend, const D: usize>(
    state: AdamWState<B, D>,
    gradient: Tensor<B, D>,
    step: &AdamWStep,
) -> AdamWState<B, D> {
    let gradient = gradient.cast(FloatDType::F32) * step.gradient_scale;
    let first = state.first * step.beta1 + gradient.clone() * (1.0 - step.beta1);
    let second = state.second * step.beta2 + gradient.clone() * gradient * (1.0 - step.beta2);
    let correction = |beta: f64| 1.0 - beta.powf(step.number as f64);
    let root = (second.clone() / correction(step.beta2)).sqrt() + step.epsilon;
    let change = first.clone() / correction(step.beta1) / root;
    let dtype = state.param.dtype();
    let mixed = state.master.is_some();
    let kept = state.master.unwrap_or(state.param) * (1.0 - step.learning_rate * step.weight_decay);
    let exact = kept - change * step.learning_rate;
    match mixed {
        true => {
            let param = exact.clone().cast(FloatDType::from(dtype));
            AdamWState { param, master: Some(exact), first, second }
        }
        false => AdamWState { param: exact, master: None, first, second },
    }
}

/// See [`DraftOps::square_sums`].
pub fn square_sums<B: Backend>(gradients: &[Param<B>]) -> Vec<f64> {
    fn sum<B: Backend, const D: usize>(x: &Tensor<B, D>) -> f64 {
        x.clone().cast(FloatDType::F32).powi_scalar(2).sum().into_scalar().elem()
    }
    let squares = |gradient: &Param<B>| match gradient {
        Param::Vector(x) => sum(x),
        Param::Matrix(x) => sum(x),
    };
    gradients.iter().map(squares).collect()
}
