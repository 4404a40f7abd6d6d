//! Norms, gates and rotations row by row.

use kernels::activation::sigmoid_in_place;
use rayon::prelude::*;

use super::sum;

/// Rows in one piece of parallel work.
const PIECE: usize = 64;

/// `x / rms(x) * weight` for each row.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(PIECE * width).zip(x.par_chunks(PIECE * width)).for_each(|(out, x)| {
        for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let scale = inverse_rms(x, eps);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * weight;
            }
        }
    });
    out
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    (sum(|at| x[at] * x[at], x.len()) / x.len() as f32 + eps).sqrt().recip()
}

/// Gradients of [`rms_norm`] for `x` and `weight`.
pub(crate) fn rms_norm_backward(
    gradient: &[f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
) -> (Vec<f32>, Vec<f32>) {
    let width = weight.len();
    let mut dx = vec![0.0; x.len()];
    let parts = dx
        .par_chunks_mut(PIECE * width)
        .zip(x.par_chunks(PIECE * width))
        .zip(gradient.par_chunks(PIECE * width));
    let sums: Vec<Vec<f32>> = parts
        .map(|((dx, x), gradient)| {
            let mut dw = vec![0.0; width];
            let rows = x.chunks_exact(width).zip(gradient.chunks_exact(width));
            for (dx, (x, g)) in dx.chunks_exact_mut(width).zip(rows) {
                let scale = inverse_rms(x, eps);
                let along = sum(|at| g[at] * weight[at] * x[at], width);
                let pull = along * scale * scale * scale / width as f32;
                for at in 0..width {
                    dx[at] = g[at] * weight[at] * scale - x[at] * pull;
                    dw[at] += g[at] * x[at] * scale;
                }
            }
            dw
        })
        .collect();
    let mut dw = vec![0.0; width];
    for part in sums {
        dw.iter_mut().zip(part).for_each(|(total, part)| *total += part);
    }
    (dx, dw)
}

/// `silu(gate) * up`.
pub(crate) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    const ENTRIES: usize = 1 << 14;
    let mut out = gate.to_vec();
    out.par_chunks_mut(ENTRIES)
        .zip(up.par_chunks(ENTRIES))
        .for_each(|(out, up)| kernels::activation::silu_mul(out, up));
    out
}

/// Gradients of [`swiglu`] for `gate` and `up`.
pub(crate) fn swiglu_backward(gradient: &[f32], gate: &[f32], up: &[f32]) -> (Vec<f32>, Vec<f32>) {
    const ENTRIES: usize = 1 << 12;
    let (mut dgate, mut dup) = (gate.to_vec(), vec![0.0; up.len()]);
    let out = dgate.par_chunks_mut(ENTRIES).zip(dup.par_chunks_mut(ENTRIES));
    let input = gradient.par_chunks(ENTRIES).zip(gate.par_chunks(ENTRIES));
    out.zip(input.zip(up.par_chunks(ENTRIES))).for_each(|((dgate, dup), ((g, gate), up))| {
        sigmoid_in_place(dgate);
        for at in 0..g.len() {
            let open = dgate[at];
            dup[at] = g[at] * gate[at] * open;
            dgate[at] = g[at] * up[at] * open * (1.0 + gate[at] * (1.0 - open));
        }
    });
    (dgate, dup)
}

/// Angles of a rotation: `[positions, pairs]` each, and which entries make a pair.
#[derive(Clone, Copy)]
pub(crate) struct Rotation<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) pairs: usize,
    pub(crate) interleaved: bool,
    /// 1 to rotate forward, -1 for the gradient.
    pub(crate) direction: f32,
}

/// Rotates every head of each row of `x` by the row's position, in place.
pub(crate) fn rotate(x: &mut [f32], heads: usize, positions: &[u32], rotation: Rotation<'_>) {
    let Rotation { cos, sin, pairs, interleaved, direction } = rotation;
    let width = heads * 2 * pairs;
    x.par_chunks_mut(PIECE * width).zip(positions.par_chunks(PIECE)).for_each(|(x, positions)| {
        for (row, &position) in x.chunks_exact_mut(width).zip(positions) {
            let angle = position as usize * pairs..(position as usize + 1) * pairs;
            let (cos, sin) = (&cos[angle.clone()], &sin[angle]);
            for head in row.chunks_exact_mut(2 * pairs) {
                for pair in 0..pairs {
                    let (a, b) =
                        if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
                    let (first, second) = (head[a], head[b]);
                    let turn = sin[pair] * direction;
                    head[a] = first * cos[pair] - second * turn;
                    head[b] = second * cos[pair] + first * turn;
                }
            }
        }
    });
}
