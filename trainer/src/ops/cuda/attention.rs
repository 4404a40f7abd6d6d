//! Attention of a TTT step: step-0 keys by one kernel, own keys by another, gradients likewise.
//! Knows no graph.

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;
use burn::tensor::DType;
use kernels::cuda::{DeviceHeads, OwnGradient, OwnStep, TrainOperands, TrainPlan};

use super::engine::{Part, run};
use super::views::{Ids, T, empty, exclusive, flat, heads, ids, in_rows, upload, vector};
use crate::ops::{AttentionOperands, AttentionPlan, EarlierSums};

/// What the gradient needs beside operands and plan.
#[derive(Clone, Debug)]
pub struct Kept {
    output: T<3>,
    /// Logarithm of each softmax's denominator, `[n * heads]`.
    lse: T<1>,
    /// First query, end of queries, first key, end of keys of each document.
    segments: Ids,
}

fn upload_segments(plan: &AttentionPlan<Cuda>, device: &CudaDevice) -> Ids {
    let bounds = plan.segments.iter().flat_map(|segment| {
        let (queries, keys) = (&segment.queries, &segment.keys);
        [queries.start, queries.end, keys.start, keys.end].map(|bound| bound as u32)
    });
    upload(bounds.collect(), device)
}

/// Operands whose heads lie side by side.
fn straight(operands: &AttentionOperands<Cuda>) -> AttentionOperands<Cuda> {
    let all = |of: &[T<3>]| of.iter().cloned().map(in_rows).collect();
    AttentionOperands {
        queries: in_rows(operands.queries.clone()),
        keys: all(&operands.keys),
        values: all(&operands.values),
    }
}

fn train_plan(
    operands: &AttentionOperands<Cuda>,
    plan: &AttentionPlan<Cuda>,
    segments: &Ids,
) -> TrainPlan {
    let [_, heads, qk_dim] = operands.queries.dims();
    let [_, kv_heads, v_dim] = operands.values[0].dims();
    let longest = |length: fn(&crate::ops::Segment) -> usize| {
        plan.segments.iter().map(length).max().unwrap_or(0)
    };
    TrainPlan {
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        scale: plan.scale as f32,
        visible: ids(&plan.visible.device),
        segments: ids(segments),
        longest: [longest(|s| s.queries.len()), longest(|s| s.keys.len())],
        variant: None,
    }
}

/// The own steps; `gradients` has the views of their keys' and values' gradients, step 0 first.
fn own_steps(
    operands: &AttentionOperands<Cuda>,
    plan: &AttentionPlan<Cuda>,
    gradients: Option<&[[DeviceHeads; 2]]>,
) -> Vec<OwnStep> {
    let pairs = operands.keys.iter().zip(&operands.values).enumerate().skip(1).zip(&plan.own);
    let step = |((at, (keys, values)), rows): ((usize, (&T<3>, &T<3>)), _)| {
        let rows: &crate::ops::RowIndex<Cuda> = rows;
        OwnStep {
            keys: heads(keys),
            values: heads(values),
            rows: ids(&rows.device),
            gradients: gradients.and_then(|all| all.get(at).copied()),
        }
    };
    pairs.map(step).collect()
}

/// Attention, and what its gradient needs.
pub(super) fn attend(
    operands: &AttentionOperands<Cuda>,
    plan: &AttentionPlan<Cuda>,
) -> (T<3>, Kept) {
    let operands = straight(operands);
    let queries = &operands.queries;
    let (device, dtype) = (queries.device(), queries.dtype());
    let segments = upload_segments(plan, &device);
    let sizes = train_plan(&operands, plan, &segments);
    let output = empty([queries.dims()[0], sizes.heads, sizes.v_dim], (&device, dtype));
    let lse = empty([queries.dims()[0] * sizes.heads], (&device, DType::F32));
    let views = TrainOperands {
        q: heads(queries),
        k: heads(&operands.keys[0]),
        v: heads(&operands.values[0]),
        out: heads(&output),
        lse: vector(&lse),
    };
    let own = own_steps(&operands, plan, None);
    run(&device, Part::Attention, |work| {
        work.launch.train_attention(&sizes, &views)?;
        work.launch.merge_own(&sizes, &views, &own)
    });
    (output.clone(), Kept { output, lse, segments })
}

/// Sums to add to: those of later steps, or fresh ones, which still have to be cleared.
fn sums(like: &[T<3>], earlier: Vec<Option<T<3>>>) -> (Vec<T<3>>, Vec<usize>) {
    let (mut sums, mut fresh) = (Vec::new(), Vec::new());
    for (at, (like, earlier)) in like.iter().zip(earlier).enumerate() {
        sums.push(match earlier {
            Some(sum) => exclusive(sum),
            None => {
                fresh.push(at);
                empty(like.dims(), (&like.device(), like.dtype()))
            }
        });
    }
    (sums, fresh)
}

/// Gradients of all operands, those of keys and values with what later steps made.
pub(super) fn attend_gradients(
    gradient: T<3>,
    operands: &AttentionOperands<Cuda>,
    (plan, kept): (&AttentionPlan<Cuda>, &Kept),
    earlier: EarlierSums<Cuda>,
) -> AttentionOperands<Cuda> {
    let (operands, gradient) = (straight(operands), in_rows(gradient));
    let queries = &operands.queries;
    let device = queries.device();
    let sizes = train_plan(&operands, plan, &kept.segments);
    let d_queries = empty(queries.dims(), (&device, queries.dtype()));
    let delta = empty(kept.lse.dims(), (&device, DType::F32));
    let (d_keys, fresh_keys) = sums(&operands.keys, earlier.keys);
    let (d_values, fresh_values) = sums(&operands.values, earlier.values);
    let clear: Vec<_> = fresh_keys
        .iter()
        .filter_map(|&at| flat(&d_keys[at]))
        .chain(fresh_values.iter().filter_map(|&at| flat(&d_values[at])))
        .collect();
    let pairs: Vec<[DeviceHeads; 2]> =
        d_keys.iter().zip(&d_values).map(|(keys, values)| [heads(keys), heads(values)]).collect();
    let own = own_steps(&operands, plan, Some(&pairs));
    let made = TrainOperands {
        q: heads(queries),
        k: heads(&operands.keys[0]),
        v: heads(&operands.values[0]),
        out: heads(&kept.output),
        lse: vector(&kept.lse),
    };
    let upstream = TrainOperands { out: heads(&gradient), ..made };
    let own_gradient =
        OwnGradient { d_out: upstream.out, d_q: heads(&d_queries), delta: vector(&delta) };
    run(&device, Part::Attention, |work| {
        for view in &clear {
            work.launch.zero(view)?;
        }
        work.launch.own_gradient(&sizes, &made, &own, &own_gradient)?;
        work.launch.train_attention_keys(&sizes, &upstream, own_gradient.delta, pairs[0])?;
        let d_q = (own_gradient.d_q, !own.is_empty());
        work.launch.train_attention_queries(&sizes, &upstream, own_gradient.delta, d_q)
    });
    AttentionOperands { queries: d_queries, keys: d_keys, values: d_values }
}
