//! Multi-head latent attention, with keys and values expanded from the latent. Knows nothing of
//! caches but that keys and values may be appended to one.

use super::load::{Loader, heads};
use super::step::{Input, Stage, Step};
use super::work::Work;
use crate::target::collective::Table;
use crate::target::error::TargetError;
use crate::target::kv::LayerCache;
use crate::target::ops::{AttentionDims, LatentDims, Norm, Ops, Rows, Write};
use crate::target::spec::MlaSpec;

pub(super) struct Mla<O: Ops> {
    query: Query<O>,
    /// To the latent, and below it the rotated part of the keys.
    down: O::Linear,
    latent_norm: O::Buffer,
    expand: O::Linear,
    out: O::Linear,
    dims: LatentDims,
    /// Width of the query latent, 0 where there is none, and of the key-value latent.
    q_rank: usize,
    kv_rank: usize,
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
            q_rank: mla.q_lora_rank.unwrap_or(0),
            kv_rank,
            latent_eps: loader.qa_norm_eps.epsilon(loader.spec.rms_norm_eps),
            scale: ((qk as f64).powf(-0.5) * loader.spec.rope.softmax_factor()) as f32,
        })
    }

    /// Makes what queries, keys and values are expanded from. Where queries have a latent, each
    /// rank makes that of its own rows, which are narrow and so quick to exchange.
    pub(super) fn prepare(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let alone = step.is_alone();
        let Query::Latent { down, norm: q_norm, .. } = &self.query else {
            return if alone { Ok(()) } else { step.gather_normed() };
        };
        let own = step.own();
        let first = own.start - step.half.first;
        let Work { half, normed, q_latent, latent, .. } = &mut *step.work;
        let latents = &mut half.latents;
        let input = |range| Rows { of: &*normed, range: Some(range) };
        let norm = |out, weight| Norm { out, first, weight, eps: self.latent_eps };
        step.ops.matmul(q_latent, input(own.clone()), down, Write::Set)?;
        step.ops.rms_norm(q_latent, norm(&mut latents.q, q_norm))?;
        step.ops.matmul(latent, input(own), &self.down, Write::Set)?;
        let kv = norm(&mut latents.kv, &self.latent_norm);
        step.ops.split_latent(kv, &mut latents.k_pe, latent, self.dims.rope)?;
        if alone {
            return Ok(());
        }
        let table = |all, width| Table { own: None, all, first: 0, width };
        let tables = &mut [
            table(&mut latents.q, self.q_rank),
            table(&mut latents.kv, self.kv_rank),
            table(&mut latents.k_pe, self.dims.rope),
        ];
        step.collective.gather(tables, step.half.rows)
    }

    /// Adds the attention of what was prepared to the residual stream.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_, O>,
        cache: Option<&mut LayerCache<O::Buffer>>,
    ) -> Result<(), TargetError> {
        self.expand(step)?;
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
        step.ops.lap(Stage::Projections)
    }

    fn expand(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        let range = Some(step.half.range());
        let Work { half, normed, q, latent, kv, k, v, .. } = &mut *step.work;
        let latents = &mut half.latents;
        match &self.query {
            Query::Direct(weight) => {
                let input = |range| Rows { of: &*normed, range };
                step.ops.matmul(q, input(range.clone()), weight, Write::Set)?;
                step.ops.matmul(latent, input(range), &self.down, Write::Set)?;
                let (weight, eps) = (&self.latent_norm, self.latent_eps);
                let norm = Norm { out: &mut latents.kv, first: 0, weight, eps };
                step.ops.split_latent(norm, &mut latents.k_pe, latent, self.dims.rope)?;
            }
            Query::Latent { up, .. } => {
                step.ops.matmul(q, Rows::all(&latents.q), up, Write::Set)?;
            }
        }
        step.ops.rope(q, &step.half.angles, self.dims.nope + self.dims.rope)?;
        step.ops.matmul(kv, Rows::all(&latents.kv), &self.expand, Write::Set)?;
        step.ops.rope(&mut latents.k_pe, &step.half.angles, self.dims.rope)?;
        step.ops.expand_latent((k, v), kv, &latents.k_pe, &self.dims)
    }
}
