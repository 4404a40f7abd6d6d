//! Attention on a GPU: views of queries, keys and values for the kernel. Knows no projections.

use kernels::cuda::{Attention, CudaError, DeviceHeads};

use super::CudaOps;
use super::buffer::CudaBuffer;
use crate::target::ops::AttentionDims;

impl CudaOps {
    pub(super) fn attend(
        &mut self,
        out: &mut CudaBuffer,
        [q, k, v]: [&CudaBuffer; 3],
        dims: &AttentionDims<'_>,
    ) -> Result<(), CudaError> {
        let AttentionDims { cu_seqlens, cached, heads, kv_heads, qk_dim, v_dim, scale } = *dims;
        let queries = cu_seqlens.last().copied().unwrap_or(0);
        out.set_len(queries * heads * v_dim)?;
        let Self { device, inputs, .. } = self;
        let [cu_q, cu_k] = inputs.send_starts(device, cu_seqlens, cached)?;
        let view = |buffer: &CudaBuffer, heads: usize, width: usize| {
            DeviceHeads::of(buffer.rows(heads * width), width, 0)
        };
        let longest = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
        device.launch().attention(&Attention {
            out: view(out, heads, v_dim),
            q: view(q, heads, qk_dim),
            k: view(k, kv_heads, qk_dim),
            k_shared: None,
            v: view(v, kv_heads, v_dim),
            lse: None,
            cu_q,
            cu_k,
            longest,
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            scale,
        })
    }
}
