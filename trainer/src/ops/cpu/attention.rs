//! Attention of one step of the training-time test: causal against the step-0 keys of the
//! document, plus the keys each row made itself at later steps, in one softmax. One piece of work
//! is a document and a group of heads that share keys.

use std::sync::Arc;

use kernels::activation::exp_in_place;
use kernels::gemm::{GemmView, GemmViewMut, Threads, matmul};
use rayon::prelude::*;

use super::{dot, peak, sum};
use crate::ops::Segment;

/// Who sees what, on the host; see [`crate::ops::AttentionPlan`].
#[derive(Clone, Debug)]
pub(crate) struct HostPlan {
    pub(crate) segments: Vec<Segment>,
    pub(crate) visible: Arc<Vec<u32>>,
    pub(crate) own: Vec<Arc<Vec<u32>>>,
    pub(crate) scale: f32,
}

/// Heads and their sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSizes {
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) groups: usize,
    pub(crate) key: usize,
    pub(crate) value: usize,
}

/// Queries `[n, heads, key]` and, by step, keys `[.., groups, key]` and values
/// `[.., groups, value]`.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) queries: &'a [f32],
    pub(crate) keys: &'a [&'a [f32]],
    pub(crate) values: &'a [&'a [f32]],
    pub(crate) sizes: HeadSizes,
}

/// Gradients, shaped as the operands.
pub(crate) struct AttentionGradients {
    pub(crate) queries: Vec<f32>,
    pub(crate) keys: Vec<Vec<f32>>,
    pub(crate) values: Vec<Vec<f32>>,
}

/// A document and a group of heads.
#[derive(Clone, Copy)]
struct Task<'a> {
    plan: &'a HostPlan,
    operands: Operands<'a>,
    segment: &'a Segment,
    group: usize,
}

/// A matrix `[rows, size]` of one head inside `[.., heads, size]`.
fn head_of<'a>(
    data: &'a [f32],
    rows: &std::ops::Range<usize>,
    [heads, head, size]: [usize; 3],
) -> GemmView<'a> {
    let stride = heads * size;
    GemmView::new(&data[rows.start * stride + head * size..], [rows.len(), size], stride)
}

impl<'a> Task<'a> {
    fn heads(&self) -> std::ops::Range<usize> {
        let each = self.operands.sizes.heads / self.operands.sizes.groups;
        self.group * each..(self.group + 1) * each
    }

    fn query(&self, head: usize) -> GemmView<'a> {
        let HeadSizes { heads, key, .. } = self.operands.sizes;
        head_of(self.operands.queries, &self.segment.queries, [heads, head, key])
    }

    fn key(&self) -> GemmView<'a> {
        let HeadSizes { groups, key, .. } = self.operands.sizes;
        head_of(self.operands.keys[0], &self.segment.keys, [groups, self.group, key])
    }

    fn value(&self) -> GemmView<'a> {
        let HeadSizes { groups, value, .. } = self.operands.sizes;
        head_of(self.operands.values[0], &self.segment.keys, [groups, self.group, value])
    }

    /// The part of query row `row` (of the segment) that belongs to `head`.
    fn query_row(&self, row: usize, head: usize) -> &'a [f32] {
        let HeadSizes { heads, key, .. } = self.operands.sizes;
        let at = ((self.segment.queries.start + row) * heads + head) * key;
        &self.operands.queries[at..at + key]
    }

    /// What query row `row` made itself at step `step + 1`.
    fn own_row(&self, of: &'a [&'a [f32]], step: usize, row: usize, size: usize) -> &'a [f32] {
        let place = self.plan.own[step][self.segment.queries.start + row] as usize;
        let at = (place * self.operands.sizes.groups + self.group) * size;
        &of[step + 1][at..at + size]
    }

    /// Attention weights of one head, `[n, keys + own]`: shared keys first.
    fn weights(&self, head: usize) -> Vec<f32> {
        let (n, shared) = (self.segment.queries.len(), self.segment.keys.len());
        let width = shared + self.plan.own.len();
        let mut weights = vec![0.0; n * width];
        let out = GemmViewMut::new(&mut weights, [n, shared], width);
        matmul(out, self.query(head), self.key().transposed(), false, Threads::ONE);
        for (row, weights) in weights.chunks_exact_mut(width).enumerate() {
            let end = self.plan.visible[self.segment.queries.start + row] as usize;
            weights[end - self.segment.keys.start..shared].fill(f32::NEG_INFINITY);
            for step in 0..self.plan.own.len() {
                let own = self.own_row(self.operands.keys, step, row, self.operands.sizes.key);
                weights[shared + step] = dot(self.query_row(row, head), own);
            }
            let (scale, peak) = (self.plan.scale, peak(weights));
            weights.iter_mut().for_each(|score| *score = (*score - peak) * scale);
            exp_in_place(weights);
            let total = sum(|at| weights[at], width);
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
        weights
    }

    /// Output of the group's heads, `[heads of the group][n, value]`.
    fn forward(&self) -> Vec<Vec<f32>> {
        let (n, shared) = (self.segment.queries.len(), self.segment.keys.len());
        let (width, size) = (shared + self.plan.own.len(), self.operands.sizes.value);
        let of_head = |head| {
            let weights = self.weights(head);
            let mut mixed = vec![0.0; n * size];
            let seen = GemmView::new(&weights, [n, shared], width);
            let out = GemmViewMut::new(&mut mixed, [n, size], size);
            matmul(out, seen, self.value(), false, Threads::ONE);
            for (row, mixed) in mixed.chunks_exact_mut(size).enumerate() {
                for step in 0..self.plan.own.len() {
                    let own = self.own_row(self.operands.values, step, row, size);
                    add_scaled(mixed, own, weights[row * width + shared + step]);
                }
            }
            mixed
        };
        self.heads().map(of_head).collect()
    }

    fn backward(&self, gradient: &[f32]) -> TaskGradients {
        let (n, shared) = (self.segment.queries.len(), self.segment.keys.len());
        let (steps, sizes) = (self.plan.own.len(), self.operands.sizes);
        let width = shared + steps;
        let mut out = TaskGradients {
            queries: Vec::new(),
            key: vec![0.0; shared * sizes.key],
            value: vec![0.0; shared * sizes.value],
            own_keys: vec![vec![0.0; n * sizes.key]; steps],
            own_values: vec![vec![0.0; n * sizes.value]; steps],
        };
        for head in self.heads() {
            let weights = self.weights(head);
            let seen = GemmView::new(&weights, [n, shared], width);
            let upstream =
                head_of(gradient, &self.segment.queries, [sizes.heads, head, sizes.value]);
            let into = GemmViewMut::new(&mut out.value, [shared, sizes.value], sizes.value);
            matmul(into, seen.transposed(), upstream, true, Threads::ONE);
            let mut scores = vec![0.0; n * width];
            let into = GemmViewMut::new(&mut scores, [n, shared], width);
            matmul(into, upstream, self.value().transposed(), false, Threads::ONE);
            let mut query = vec![0.0; n * sizes.key];
            for row in 0..n {
                let at = ((self.segment.queries.start + row) * sizes.heads + head) * sizes.value;
                let upstream = &gradient[at..at + sizes.value];
                let weights = &weights[row * width..(row + 1) * width];
                let scores = &mut scores[row * width..(row + 1) * width];
                for step in 0..steps {
                    let own = self.own_row(self.operands.values, step, row, sizes.value);
                    scores[shared + step] = dot(upstream, own);
                    let into = &mut out.own_values[step][row * sizes.value..][..sizes.value];
                    add_scaled(into, upstream, weights[shared + step]);
                }
                let mean = dot(weights, scores);
                for (score, weight) in scores.iter_mut().zip(weights) {
                    *score = (*score - mean) * weight * self.plan.scale;
                }
                let query = &mut query[row * sizes.key..(row + 1) * sizes.key];
                for step in 0..steps {
                    let own = self.own_row(self.operands.keys, step, row, sizes.key);
                    add_scaled(query, own, scores[shared + step]);
                    let into = &mut out.own_keys[step][row * sizes.key..][..sizes.key];
                    add_scaled(into, self.query_row(row, head), scores[shared + step]);
                }
            }
            let scores = GemmView::new(&scores, [n, shared], width);
            let into = GemmViewMut::new(&mut query, [n, sizes.key], sizes.key);
            matmul(into, scores, self.key(), true, Threads::ONE);
            let into = GemmViewMut::new(&mut out.key, [shared, sizes.key], sizes.key);
            matmul(into, scores.transposed(), self.query(head), true, Threads::ONE);
            out.queries.push(query);
        }
        out
    }
}

/// Gradients of one task, each row after row.
struct TaskGradients {
    /// By head of the group.
    queries: Vec<Vec<f32>>,
    key: Vec<f32>,
    value: Vec<f32>,
    own_keys: Vec<Vec<f32>>,
    own_values: Vec<Vec<f32>>,
}

fn add_scaled(into: &mut [f32], values: &[f32], factor: f32) {
    into.iter_mut().zip(values).for_each(|(into, value)| *into += value * factor);
}

fn tasks<'a>(operands: Operands<'a>, plan: &'a HostPlan) -> Vec<Task<'a>> {
    let of_segment = |segment| {
        (0..operands.sizes.groups).map(move |group| Task { plan, operands, segment, group })
    };
    plan.segments.iter().flat_map(of_segment).collect()
}

/// Adds rows `[n, size]` of one head to `[.., heads, size]` at the rows `places`.
fn add_rows(
    into: &mut [f32],
    rows: &[f32],
    [heads, head, size]: [usize; 3],
    places: impl Iterator<Item = usize>,
) {
    for (row, place) in rows.chunks_exact(size).zip(places) {
        let at = (place * heads + head) * size;
        into[at..at + size].iter_mut().zip(row).for_each(|(into, x)| *into += x);
    }
}

/// Mixed values, `[n, heads, value]`.
pub(crate) fn forward(operands: Operands<'_>, plan: &HostPlan) -> Vec<f32> {
    let HeadSizes { heads, key, value, .. } = operands.sizes;
    let tasks = tasks(operands, plan);
    let parts: Vec<Vec<Vec<f32>>> = tasks.par_iter().map(Task::forward).collect();
    let mut out = vec![0.0; operands.queries.len() / key * value];
    for (task, part) in tasks.iter().zip(parts) {
        for (head, rows) in task.heads().zip(part) {
            add_rows(&mut out, &rows, [heads, head, value], task.segment.queries.clone());
        }
    }
    out
}

/// Gradients for the gradient of the output.
pub(crate) fn backward(
    gradient: &[f32],
    operands: Operands<'_>,
    plan: &HostPlan,
) -> AttentionGradients {
    let HeadSizes { heads, groups, key, value } = operands.sizes;
    let tasks = tasks(operands, plan);
    let parts: Vec<_> = tasks.par_iter().map(|task| task.backward(gradient)).collect();
    let zeros = |of: &[&[f32]]| of.iter().map(|x| vec![0.0; x.len()]).collect::<Vec<_>>();
    let mut out = AttentionGradients {
        queries: vec![0.0; operands.queries.len()],
        keys: zeros(operands.keys),
        values: zeros(operands.values),
    };
    for (task, part) in tasks.iter().zip(parts) {
        let Segment { queries, keys } = task.segment;
        for (head, rows) in task.heads().zip(&part.queries) {
            add_rows(&mut out.queries, rows, [heads, head, key], queries.clone());
        }
        add_rows(&mut out.keys[0], &part.key, [groups, task.group, key], keys.clone());
        add_rows(&mut out.values[0], &part.value, [groups, task.group, value], keys.clone());
        for (step, own) in plan.own.iter().enumerate() {
            let places = || own[queries.clone()].iter().map(|&place| place as usize);
            let (own_keys, own_values) = (&part.own_keys[step], &part.own_values[step]);
            add_rows(&mut out.keys[step + 1], own_keys, [groups, task.group, key], places());
            add_rows(&mut out.values[step + 1], own_values, [groups, task.group, value], places());
        }
    }
    out
}
