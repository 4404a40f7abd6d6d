//! The latents of multi-head latent attention on the CPU: split after the product that makes them,
//! and expanded to the heads. Knows no layer.

use kernels::{Threads, norm};

use super::for_rows;
use crate::target::ops::{LatentDims, Norm};

/// See [`crate::target::ops::Ops::split_latent`]; `down` and the width of what is rotated.
pub(super) fn split(
    threads: Threads,
    Norm { out: latent, first, weight, eps }: Norm<'_, Vec<f32>>,
    k_pe: &mut Vec<f32>,
    (down, rope): (&[f32], usize),
) {
    let (width, whole) = (weight.len(), weight.len() + rope);
    let rows = down.len() / whole;
    latent.resize((first + rows) * width, 0.0);
    k_pe.resize((first + rows) * rope, 0.0);
    for_rows(threads, &mut latent[first * width..], width, |row, latent| {
        for (out, down) in latent.chunks_exact_mut(width).zip(down[row * whole..].chunks(whole)) {
            norm::rms_norm(out, &down[..width], weight, eps);
        }
    });
    for_rows(threads, &mut k_pe[first * rope..], rope, |row, k_pe| {
        for (out, down) in k_pe.chunks_exact_mut(rope).zip(down[row * whole..].chunks(whole)) {
            out.copy_from_slice(&down[width..]);
        }
    });
}

/// See [`crate::target::ops::Ops::expand_latent`].
pub(super) fn expand(
    threads: Threads,
    (keys, values): (&mut Vec<f32>, &mut Vec<f32>),
    (kv, k_pe): (&[f32], &[f32]),
    dims: &LatentDims,
) {
    let LatentDims { heads, nope, rope, v } = *dims;
    let rows = k_pe.len() / rope;
    keys.resize(rows * heads * (nope + rope), 0.0);
    values.resize(rows * heads * v, 0.0);
    let source = heads * (nope + v);
    for_rows(threads, keys, heads * (nope + rope), |row, keys| {
        for (head, key) in keys.chunks_exact_mut(nope + rope).enumerate() {
            let row = row + head / heads;
            let (plain, rotated) = key.split_at_mut(nope);
            plain.copy_from_slice(&kv[row * source + head % heads * (nope + v)..][..nope]);
            rotated.copy_from_slice(&k_pe[row * rope..][..rope]);
        }
    });
    for_rows(threads, values, heads * v, |row, values| {
        for (head, value) in values.chunks_exact_mut(v).enumerate() {
            let start = (row + head / heads) * source + head % heads * (nope + v) + nope;
            value.copy_from_slice(&kv[start..][..v]);
        }
    });
}
