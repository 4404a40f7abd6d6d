//! Routed experts on the CPU: rows are gathered by expert, multiplied, and summed back in the order
//! of the choice, so that results do not depend on threads.

use std::ops::Range;

use kernels::{Threads, activation};
use rayon::prelude::*;

use super::cpu::{CpuLinear, CpuRouting, for_rows};
use super::ops::{Expert, HeldExperts, Write};

/// Buffers of the expert computation, reused between layers.
#[derive(Debug, Default)]
pub(super) struct ExpertScratch {
    /// Row of `outputs` of every (row, choice), or none where another rank holds the expert.
    places: Vec<Option<usize>>,
    /// Rows of `x` by expert.
    rows: Vec<usize>,
    inputs: Vec<f32>,
    gates: Vec<f32>,
    ups: Vec<f32>,
    outputs: Vec<f32>,
    /// Width of an output.
    hidden: usize,
}

/// One expert and its rows.
struct Job<'a> {
    expert: &'a Expert<CpuLinear>,
    rows: &'a [usize],
    input: &'a mut [f32],
    gate: &'a mut [f32],
    up: &'a mut [f32],
    output: &'a mut [f32],
}

impl ExpertScratch {
    /// Computes the held experts of the rows of `x` that chose them.
    pub(super) fn run(
        &mut self,
        x: &[f32],
        routing: &CpuRouting,
        held: &HeldExperts<CpuLinear>,
        threads: Threads,
    ) {
        let counts = self.group(routing, held);
        let Some(sample) = held.experts.first() else { return };
        let (hidden, width) = (sample.gate.input, sample.gate.out);
        self.hidden = hidden;
        self.inputs.resize(self.rows.len() * hidden, 0.0);
        self.outputs.resize(self.rows.len() * hidden, 0.0);
        self.gates.resize(self.rows.len() * width, 0.0);
        self.ups.resize(self.rows.len() * width, 0.0);
        let jobs = self.jobs(&counts, held);
        // Experts side by side where they are many, else one after the other on all threads.
        if threads.0 > 1 && jobs.len() >= 2 * threads.0 {
            jobs.into_par_iter().with_max_len(1).for_each(|job| job.run(x, Threads::ONE));
        } else {
            jobs.into_iter().for_each(|job| job.run(x, threads));
        }
    }

    /// Sorts the chosen (row, expert) pairs by expert; returns the rows of each held expert.
    fn group(&mut self, routing: &CpuRouting, held: &HeldExperts<CpuLinear>) -> Vec<usize> {
        let indices = &routing.choice.indices;
        let local = |&index: &u32| {
            (index as usize).checked_sub(held.first).filter(|&i| i < held.experts.len())
        };
        let mut counts = vec![0; held.experts.len()];
        indices.iter().filter_map(local).for_each(|expert| counts[expert] += 1);
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |end, count| {
                let start = *end;
                *end += count;
                Some(start)
            })
            .collect();
        self.rows.resize(counts.iter().sum(), 0);
        self.places.clear();
        for (choice, index) in indices.iter().enumerate() {
            let place = local(index).map(|expert| {
                next[expert] += 1;
                next[expert] - 1
            });
            if let Some(place) = place {
                self.rows[place] = choice / routing.top_k;
            }
            self.places.push(place);
        }
        counts
    }

    fn jobs<'a>(&'a mut self, counts: &[usize], held: &'a HeldExperts<CpuLinear>) -> Vec<Job<'a>> {
        let mut rows = self.rows.as_slice();
        let mut input = self.inputs.as_mut_slice();
        let mut gate = self.gates.as_mut_slice();
        let mut up = self.ups.as_mut_slice();
        let mut output = self.outputs.as_mut_slice();
        let mut jobs = Vec::with_capacity(counts.len());
        for (expert, &count) in held.experts.iter().zip(counts) {
            let (hidden, width) = (expert.gate.input, expert.gate.out);
            let own;
            (own, rows) = rows.split_at(count);
            let job = Job {
                expert,
                rows: own,
                input: take(&mut input, count * hidden),
                gate: take(&mut gate, count * width),
                up: take(&mut up, count * width),
                output: take(&mut output, count * hidden),
            };
            if count > 0 {
                jobs.push(job);
            }
        }
        // The longest first, so that the last to finish is a short one.
        jobs.sort_by_key(|job| std::cmp::Reverse(job.rows.len()));
        jobs
    }

    /// `out += sum of weight * expert(x)` over the held experts, for `rows` of the last run.
    pub(super) fn combine(
        &self,
        out: &mut [f32],
        routing: &CpuRouting,
        rows: Range<usize>,
        threads: Threads,
    ) {
        let (top_k, hidden) = (routing.top_k, self.hidden);
        for_rows(threads, out, hidden, |first, out| {
            for (row, out) in out.chunks_exact_mut(hidden).enumerate() {
                let row = rows.start + first + row;
                let choices = row * top_k..(row + 1) * top_k;
                let weights = &routing.choice.weights[choices.clone()];
                for (place, &weight) in self.places[choices].iter().zip(weights) {
                    let Some(place) = place else { continue };
                    let from = &self.outputs[place * hidden..][..hidden];
                    out.iter_mut().zip(from).for_each(|(out, from)| *out += weight * from);
                }
            }
        });
    }
}

fn take<'a>(slice: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(slice).split_at_mut(len);
    *slice = tail;
    head
}

impl Job<'_> {
    fn run(self, x: &[f32], threads: Threads) {
        let Job { expert, rows, input, gate, up, output } = self;
        let hidden = expert.gate.input;
        for (to, &row) in input.chunks_exact_mut(hidden).zip(rows) {
            to.copy_from_slice(&x[row * hidden..][..hidden]);
        }
        expert.gate.apply(gate, input, Write::Set, threads);
        expert.up.apply(up, input, Write::Set, threads);
        activation::silu_mul(gate, up);
        expert.down.apply(output, gate, Write::Set, threads);
    }
}
