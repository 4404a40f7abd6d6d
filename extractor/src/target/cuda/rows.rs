//! Norms, sums of parts and latents on a GPU: views of buffers for the kernels. Knows no layer.

use kernels::cuda::{CudaError, LatentHeads, RankParts, RowNorm};

use super::buffer::CudaBuffer;
use super::device::Device;
use crate::target::ops::{LatentDims, Norm, Parts, Write};

impl Device {
    pub(super) fn rms_norm(
        &self,
        x: &CudaBuffer,
        norm: Norm<'_, CudaBuffer>,
    ) -> Result<(), CudaError> {
        let x = x.rows(norm.weight.len());
        let RowNorm { out, weight, eps } = row_norm(norm, x.rows)?;
        self.launch().rms_norm(&out, &x, weight, eps)
    }

    pub(super) fn add_parts(
        &self,
        x: &mut CudaBuffer,
        parts: &Parts<'_, CudaBuffer>,
        write: Write,
        norm: Option<Norm<'_, CudaBuffer>>,
    ) -> Result<(), CudaError> {
        let Parts { own, received, rank, ranks, rows, width } = parts;
        let own = own.rows(*width).row_range(rows.clone());
        let views = RankParts { own, received: received.address(), rank: *rank, ranks: *ranks };
        x.set_len(rows.len() * width)?;
        let norm = norm.map(|norm| row_norm(norm, rows.len())).transpose()?;
        let fresh = write == Write::Set;
        self.launch().add_parts(&x.rows(*width), &views, norm.as_ref(), fresh)
    }

    pub(super) fn split_latent(
        &self,
        latent: Norm<'_, CudaBuffer>,
        k_pe: &mut CudaBuffer,
        down: &CudaBuffer,
        rope: usize,
    ) -> Result<(), CudaError> {
        let (width, first) = (latent.weight.len(), latent.first);
        let down = down.rows(width + rope);
        let end = first + down.rows;
        k_pe.set_len(end * rope)?;
        let RowNorm { out, weight, eps } = row_norm(latent, down.rows)?;
        let (plain, rotated) = (down.columns(0..width), down.columns(width..width + rope));
        self.launch().rms_norm(&out, &plain, weight, eps)?;
        self.launch().copy(&k_pe.rows(rope).row_range(first..end), &rotated)
    }

    pub(super) fn expand_latent(
        &self,
        (keys, values): (&mut CudaBuffer, &mut CudaBuffer),
        kv: &CudaBuffer,
        k_pe: &CudaBuffer,
        dims: &LatentDims,
    ) -> Result<(), CudaError> {
        let LatentDims { heads, nope, rope, v } = *dims;
        let (rows, qk) = (k_pe.len() / rope, nope + rope);
        keys.set_len(rows * heads * qk)?;
        values.set_len(rows * heads * v)?;
        let out = (&keys.rows(heads * qk), &values.rows(heads * v));
        let (kv, k_pe) = (kv.rows(heads * (nope + v)), k_pe.rows(rope));
        self.launch().expand_latent(out, &kv, &k_pe, &LatentHeads { heads, nope, rope, v })
    }
}

/// A norm of `rows` rows, where it is written.
fn row_norm(
    Norm { out, first, weight, eps }: Norm<'_, CudaBuffer>,
    rows: usize,
) -> Result<RowNorm, CudaError> {
    let width = weight.len();
    out.set_len((first + rows) * width)?;
    let out = out.rows(width).row_range(first..first + rows);
    Ok(RowNorm { out, weight: weight.floats(), eps })
}
