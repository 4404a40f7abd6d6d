//! Multi-head latent attention, with keys and values expanded from the latent. Knows nothing of
//! caches but that keys and values may be appended to one.

use super::load::{Loader, heads};
use super::step::{Input, Stage, Step};
use super::work::Work;
use crate::target::error::TargetError;
use crate::target::kv::LayerCache;
use crate::target::ops::{AttentionDims, LatentDims, Ops, Write};
use crate::target::spec::MlaSpec;

pub(super) struct Mla<O: Ops> {
    query: Query<O>,
    /// To the latent, and below it the rotated part of the keys.
    down: O::Linear,
    latent_norm: O::Buffer,
    expand: O::Linear,
    out: O::Linear,
    dims: LatentDims,
    latent_eps: f32,
    scale: f32,
}

enum Query<O: Ops> {
    Direct(O::Linear),
    Latent { down: O::Linear, norm: O::Buffer, up: O::Linear },
}

impl<O: Ops> Mla<O> {
    pub(super) fn load(
        loader: &mut Loader<'_, O>,
        mla: &MlaSpec,
        prefix: &str,
    ) -> Result<Self, TargetError> {
        let hidden = loader.spec.hidden_size;
        let own = loader.plan.heads.clone();
        let (nope, rope, v) = (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
        let (qk, kv_rank) = (nope + rope, mla.kv_lora_rank);
        let q_rows = heads(&own, qk);
        let query = match mla.q_lora_rank {
            None => {
                let dims = [mla.num_heads * qk, hidden];
                Query::Direct(loader.rows(&format!("{prefix}.q_proj"), dims, q_rows)?)
            }
            Some(rank) => Query::Latent {
                down: loader.whole(&format!("{prefix}.q_a_proj"), [rank, hidden])?,
                norm: loader.vector(&format!("{prefix}.q_a_layernorm.weight"), rank)?,
                up: {
                    let dims = [mla.num_heads * qk, rank];
                    loader.rows(&format!("{prefix}.q_b_proj"), dims, q_rows)?
                },
            },
        };
        let down = format!("{prefix}.kv_a_proj_with_mqa");
        let expand_dims = [mla.num_heads * (nope + v), kv_rank];
        let expand_rows = heads(&own, nope + v);
        let out_dims = [hidden, mla.num_heads * v];
        Ok(Self {
            query,
            down: loader.whole(&down, [kv_rank + rope, hidden])?,
            latent_norm: loader.vector(&format!("{prefix}.kv_a_layernorm.weight"), kv_rank)?,
            expand: loader.rows(&format!("{prefix}.kv_b_proj"), expand_dims, expand_rows)?,
            out: loader.cols(&format!("{prefix}.o_proj"), out_dims, heads(&own, v))?,
            dims: LatentDims { heads: own.len(), nope, rope, v },
            latent_eps: loader.qa_norm_eps.epsilon(loader.spec.rms_norm_eps),
            scale: ((qk as f64).powf(-0.5) * loader.spec.rope.softmax_factor()) as f32,
        })
    }

    /// Adds the attention of `work.normed` to the residual stream.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_, O>,
        cache: Option<&mut LayerCache<O::Buffer>>,
    ) -> Result<(), TargetError> {
        self.queries(step)?;
        self.keys_values(step)?;
        step.ops.lap(Stage::Projections)?;
        let LatentDims { heads, nope, rope, v } = self.dims;
        let dims = AttentionDims {
            cu_seqlens: step.half.cu_seqlens,
            cached: step.cached,
            heads,
            kv_heads: heads,
            qk_dim: nope + rope,
            v_dim: v,
            scale: self.scale,
        };
        super::attend(step, cache, &dims)?;
        step.project(Input::Attended, &self.out)?;
        step.ops.lap(Stage::Projections)?;
        step.send()
    }

    fn queries(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let Work { normed, q, q_latent, spare, .. } = &mut *step.work;
        match &self.query {
            Query::Direct(weight) => step.ops.matmul(q, normed, weight, Write::Set)?,
            Query::Latent { down, norm, up } => {
                step.ops.matmul(q_latent, normed, down, Write::Set)?;
                step.ops.rms_norm(spare, q_latent, norm, self.latent_eps)?;
                step.ops.matmul(q, spare, up, Write::Set)?;
            }
        }
        step.ops.rope(q, &step.half.angles, self.dims.nope + self.dims.rope)
    }

    fn keys_values(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let Work { normed, latent, spare, kv, k_pe, k, v, .. } = &mut *step.work;
        step.ops.matmul(latent, normed, &self.down, Write::Set)?;
        let norm = (&self.latent_norm, self.latent_eps);
        step.ops.split_latent((spare, k_pe), latent, norm, self.dims.rope)?;
        step.ops.matmul(kv, spare, &self.expand, Write::Set)?;
        step.ops.rope(k_pe, &step.half.angles, self.dims.rope)?;
        step.ops.expand_latent((k, v), kv, k_pe, &self.dims)
    }
}
