//! The operations of the training step on f32 slices of the host, forward and backward, shared
//! out over rayon's current pool. Knows no tensors and no automatic differentiation.

pub(super) mod adamw;
pub(super) mod attention;
pub(super) mod distill;
pub(super) mod rows;

use kernels::gemm::Threads;

/// All threads of the current pool.
pub(super) fn threads() -> Threads {
    Threads(rayon::current_num_threads())
}

/// Sum in sixteen lanes, which is faster and more exact than one after another.
pub(super) fn sum(values: impl Fn(usize) -> f32, count: usize) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let whole = count / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += values(start + lane);
        }
    }
    let rest: f32 = (whole..count).map(values).sum();
    lanes.iter().sum::<f32>() + rest
}

/// `a . b` over the shorter of the two.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let count = a.len().min(b.len());
    let (a, b) = (&a[..count], &b[..count]);
    sum(|at| a[at] * b[at], count)
}

/// The largest value; minus infinity without any.
pub(super) fn peak(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, *value);
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |max, &x| larger(max, x))
}

/// The first place of the largest value, and that value.
pub(super) fn top(values: &[f32]) -> (usize, f32) {
    let peak = peak(values);
    (values.iter().position(|&value| value == peak).unwrap_or(0), peak)
}
