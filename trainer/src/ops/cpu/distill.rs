//! Draft head, teacher and soft cross-entropy with their gradients in one pass over blocks of
//! rows. The teacher's logits exist for a block of the vocabulary at a time, the draft's for a
//! block of rows.

use kernels::activation::exp_in_place;
use kernels::gemm::{GemmDims, matmul_nn, matmul_nt, matmul_tn};
use rayon::prelude::*;

use super::{dot, peak, rows::rms_norm, sum, threads, top};
use crate::losses::LossKind;
use crate::ops::DistillRows;

/// Columns of the teacher's head in one product.
const COLUMNS: usize = 2048;
/// Entries of the draft's logits held at a time.
const LOGITS: usize = 1 << 22;

/// The target's head on the host.
#[derive(Clone, Copy)]
pub(crate) struct HostHead<'a> {
    /// `[H]`.
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
    /// `[V, H]`.
    pub(crate) lm_head: &'a [f32],
    pub(crate) draft_to_target: &'a [u32],
}

/// The teacher for a few states.
struct Teacher {
    /// Over the draft vocabulary, renormalised, `[s, Vd]`.
    probabilities: Vec<f32>,
    /// Share of the whole vocabulary's probability that lies in the draft's, `[s]`.
    mass: Vec<f32>,
    /// Top token of the whole vocabulary, `[s]`.
    top: Vec<u32>,
}

/// Running softmax over blocks of the vocabulary.
#[derive(Clone)]
struct Running {
    peak: f32,
    total: f64,
    top: usize,
}

impl Running {
    /// Takes in the logits from token `first`; leaves their exponentials.
    fn add(&mut self, logits: &mut [f32], first: usize) {
        let (place, peak) = top(logits);
        if peak > self.peak {
            self.total *= f64::from(self.peak - peak).exp();
            (self.peak, self.top) = (peak, first + place);
        }
        let peak = self.peak;
        logits.iter_mut().for_each(|logit| *logit -= peak);
        exp_in_place(logits);
        self.total += f64::from(sum(|at| logits[at], logits.len()));
    }
}

/// Streams the head over blocks of the vocabulary; `each` sees a state's logits of a block before
/// they are exponentiated: its own value, logits, first token.
fn stream<T: Send>(
    states: &[f32],
    head: HostHead<'_>,
    own: &mut [T],
    each: impl Fn(&mut T, &[f32], usize) + Sync,
) -> Vec<Running> {
    let width = head.norm.len();
    let normed = rms_norm(states, head.norm, head.eps);
    let count = normed.len() / width;
    let start = Running { peak: f32::NEG_INFINITY, total: 0.0, top: 0 };
    let mut running = vec![start; count];
    let mut buffer = vec![0.0; count * COLUMNS];
    for (block, weight) in head.lm_head.chunks(COLUMNS * width).enumerate() {
        let (first, columns) = (block * COLUMNS, weight.len() / width);
        let logits = &mut buffer[..count * columns];
        let dims = GemmDims { m: count, n: columns, k: width };
        matmul_nt(logits, &normed, weight, dims, false, threads());
        let rows = logits.par_chunks_exact_mut(columns).zip(&mut running).zip(&mut *own);
        rows.for_each(|((logits, running), own)| {
            each(own, logits, first);
            running.add(logits, first);
        });
    }
    running
}

fn teacher(states: &[f32], head: HostHead<'_>) -> Teacher {
    let ids = head.draft_to_target;
    let count = states.len() / head.norm.len();
    let mut probabilities = vec![0.0; count * ids.len()];
    let mut own: Vec<&mut [f32]> = probabilities.chunks_exact_mut(ids.len()).collect();
    let running = stream(states, head, &mut own, |own, logits, first| {
        let last = ids.partition_point(|&id| (id as usize) < first + logits.len());
        let from = ids[..last].partition_point(|&id| (id as usize) < first);
        for (into, &id) in own[from..last].iter_mut().zip(&ids[from..last]) {
            *into = logits[id as usize - first];
        }
    });
    let rows = probabilities.par_chunks_exact_mut(ids.len()).zip(&running);
    let mass = rows.map(|(row, running)| {
        let peak = peak(row);
        row.iter_mut().for_each(|logit| *logit -= peak);
        exp_in_place(row);
        let total = sum(|at| row[at], row.len());
        row.iter_mut().for_each(|x| *x /= total);
        let share = f64::from(peak - running.peak).exp() * f64::from(total) / running.total;
        share as f32
    });
    let mass = mass.collect();
    Teacher { mass, top: running.iter().map(|r| r.top as u32).collect(), probabilities }
}

/// The teacher's top token for each state.
pub(crate) fn teacher_top(states: &[f32], head: HostHead<'_>) -> Vec<u32> {
    let mut none = vec![(); states.len() / head.norm.len()];
    stream(states, head, &mut none, |_, _, _| ()).iter().map(|r| r.top as u32).collect()
}

/// Loss, outcomes and gradients for a weighted sum of 1.
pub(crate) struct HostDistilled {
    pub(crate) loss: f32,
    /// `[n, 3]`.
    pub(crate) outcomes: Vec<f32>,
    /// Of the hidden rows and of the draft's head, when asked for.
    pub(crate) gradients: Option<(Vec<f32>, Vec<f32>)>,
}

/// See [`crate::DraftOps::distill`]: `hidden [n, H]`, `lm_head [Vd, H]`, `states [s, H]`.
pub(crate) fn distill(
    (hidden, lm_head): (&[f32], &[f32]),
    states: &[f32],
    head: HostHead<'_>,
    rows: &DistillRows,
    with_gradients: bool,
) -> HostDistilled {
    let width = head.norm.len();
    let vocabulary = head.draft_to_target.len();
    let mut outcomes = vec![0.0; 3 * rows.states.len()];
    let mut gradients = with_gradients.then(|| (vec![0.0; hidden.len()], vec![0.0; lm_head.len()]));
    let block_rows = (LOGITS / vocabulary).max(64).min(rows.states.len());
    let mut buffer = vec![0.0; block_rows * vocabulary];
    let mut first = 0;
    for (chunk, states) in states.chunks(rows.states_at_once * width).enumerate() {
        let start = (chunk * rows.states_at_once) as u32;
        let end = start + (states.len() / width) as u32;
        let last = rows.states.partition_point(|&state| state < end);
        let teacher = teacher(states, head);
        for from in (first..last).step_by(block_rows) {
            let to = (from + block_rows).min(last);
            let (dims, input) = (
                GemmDims { m: to - from, n: vocabulary, k: width },
                &hidden[from * width..to * width],
            );
            let logits = &mut buffer[..(to - from) * vocabulary];
            matmul_nt(logits, input, lm_head, dims, false, threads());
            let each = logits.par_chunks_exact_mut(vocabulary);
            each.zip(outcomes[3 * from..3 * to].par_chunks_exact_mut(3)).enumerate().for_each(
                |(at, (logits, outcome))| {
                    let state = (rows.states[from + at] - start) as usize;
                    let weight = rows.weights[from + at];
                    let ids = head.draft_to_target;
                    let row = (&teacher, state, ids);
                    outcome.copy_from_slice(&compare(logits, row, weight, rows.loss));
                },
            );
            if let Some((dhidden, dhead)) = &mut gradients {
                let dims = GemmDims { m: to - from, n: width, k: vocabulary };
                let into = &mut dhidden[from * width..to * width];
                matmul_nn(into, logits, lm_head, dims, false, threads());
                let dims = GemmDims { m: vocabulary, n: width, k: to - from };
                matmul_tn(dhead, logits, input, dims, true, threads());
            }
        }
        first = last;
    }
    let weighted = outcomes.chunks_exact(3).zip(&rows.weights);
    let loss = weighted.map(|(row, &weight)| f64::from(row[0]) * f64::from(weight)).sum::<f64>();
    HostDistilled { loss: loss as f32, outcomes, gradients }
}

/// Loss, overlap and rightness of one row; leaves the gradient of its weighted loss in `logits`.
fn compare(
    logits: &mut [f32],
    (teacher, state, draft_to_target): (&Teacher, usize, &[u32]),
    weight: f32,
    kind: LossKind,
) -> [f32; 3] {
    let p = &teacher.probabilities[state * logits.len()..(state + 1) * logits.len()];
    let mass = teacher.mass[state];
    let (guess, peak) = top(logits);
    logits.iter_mut().for_each(|logit| *logit -= peak);
    let expected = dot(p, logits);
    exp_in_place(logits);
    let total = sum(|at| logits[at], logits.len());
    let scale = total.recip();
    let q = &*logits;
    let overlap = sum(|at| (p[at] * mass).min(q[at] * scale), p.len());
    let cross = total.ln() - expected;
    let divergence =
        || cross + sum(|at| if p[at] > 0.0 { p[at] * p[at].ln() } else { 0.0 }, p.len());
    let right = f32::from(u8::from(draft_to_target[guess] == teacher.top[state]));
    let LossKind::Acceptance { eta } = kind else {
        for (q, p) in logits.iter_mut().zip(p) {
            *q = weight * (*q * scale - p);
        }
        let loss = if kind == LossKind::KullbackLeibler { divergence() } else { cross };
        return [loss, overlap, right];
    };
    // Only tokens that the draft gives too little count in the derivative of the overlap.
    let below = |q: f32, p: f32| q < p * mass;
    let share = sum(|at| if below(q[at] * scale, p[at]) { q[at] * scale } else { 0.0 }, p.len());
    let along = (-eta as f32 * overlap).exp();
    let loss = along * divergence() + (1.0 - along) * (1.0 - overlap);
    for (q, &p) in logits.iter_mut().zip(p) {
        let chance = *q * scale;
        let missed = chance * (share - f32::from(u8::from(below(chance, p))));
        *q = weight * (along * (chance - p) + (1.0 - along) * missed);
    }
    [loss, overlap, right]
}
