//! Grouped-query attention of Llama-like models. Knows nothing of caches but that keys and values
//! may be appended to one.

use std::ops::Range;

use super::load::{Loader, heads};
use super::step::{Input, Stage, Step};
use super::work::Work;
use crate::target::error::TargetError;
use crate::target::kv::LayerCache;
use crate::target::ops::{AttentionDims, Norm, Ops, Rows, Write};
use crate::target::spec::GqaSpec;

pub(super) struct Gqa<O: Ops> {
    q: Projection<O>,
    k: Projection<O>,
    v: Projection<O>,
    out: O::Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    eps: f32,
}

struct Projection<O: Ops> {
    weight: O::Linear,
    bias: Option<O::Buffer>,
    norm: Option<O::Buffer>,
}

impl<O: Ops> Gqa<O> {
    pub(super) fn load(
        loader: &mut Loader<'_, O>,
        gqa: &GqaSpec,
        prefix: &str,
    ) -> Result<Self, TargetError> {
        let (own, own_kv) = (loader.plan.heads.clone(), loader.plan.kv_heads.clone());
        let width = gqa.head_dim;
        let mut projection = |name: &str, total: usize, own: &Range<usize>| {
            let out = total * width;
            let rows = heads(own, width);
            let weight = format!("{prefix}.{name}_proj");
            let bias = format!("{prefix}.{name}_proj.bias");
            let norm = format!("{prefix}.{name}_norm.weight");
            Ok::<_, TargetError>(Projection {
                weight: loader.rows(&weight, [out, loader.spec.hidden_size], rows.clone())?,
                bias: if gqa.qkv_bias {
                    Some(loader.ops.load_vector(loader.source, &bias, out, rows)?)
                } else {
                    None
                },
                norm: if gqa.qk_norm && name != "v" {
                    Some(loader.vector(&norm, width)?)
                } else {
                    None
                },
            })
        };
        let q = projection("q", gqa.num_heads, &own)?;
        let k = projection("k", gqa.num_kv_heads, &own_kv)?;
        let v = projection("v", gqa.num_kv_heads, &own_kv)?;
        let out_dims = [loader.spec.hidden_size, gqa.num_heads * width];
        Ok(Self {
            q,
            k,
            v,
            out: loader.cols(&format!("{prefix}.o_proj"), out_dims, heads(&own, width))?,
            heads: own.len(),
            kv_heads: own_kv.len(),
            head_dim: width,
            // The whole head is rotated, so the multiplier of cos and sin may act on the scores.
            scale: ((width as f64).powf(-0.5) * loader.spec.rope.amplitude().powi(2)) as f32,
            eps: loader.spec.rms_norm_eps,
        })
    }

    /// Adds the attention of this half's rows of `work.normed` to the residual stream.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_, O>,
        cache: Option<&mut LayerCache<O::Buffer>>,
    ) -> Result<(), TargetError> {
        let range = step.half.range();
        let Work { normed, q, k, v, spare, .. } = &mut *step.work;
        for (out, projection) in [(&mut *q, &self.q), (&mut *k, &self.k), (v, &self.v)] {
            projection.apply(step.ops, out, normed, range.clone())?;
            if let Some(norm) = &projection.norm {
                let norm = Norm { out: spare, first: 0, weight: norm, eps: self.eps };
                step.ops.rms_norm(out, norm)?;
                std::mem::swap(out, spare);
            }
        }
        step.ops.rope(q, &step.half.angles, self.head_dim)?;
        step.ops.rope(k, &step.half.angles, self.head_dim)?;
        step.ops.lap(Stage::Projections)?;
        let dims = AttentionDims {
            cu_seqlens: step.half.cu_seqlens,
            cached: step.cached,
            heads: self.heads,
            kv_heads: self.kv_heads,
            qk_dim: self.head_dim,
            v_dim: self.head_dim,
            scale: self.scale,
        };
        super::attend(step, cache, &dims)?;
        step.project(Input::Attended, &self.out)?;
        step.ops.lap(Stage::Projections)
    }
}

impl<O: Ops> Projection<O> {
    fn apply(
        &self,
        ops: &mut O,
        out: &mut O::Buffer,
        x: &O::Buffer,
        range: Range<usize>,
    ) -> Result<(), TargetError> {
        let rows = range.len();
        let x = Rows { of: x, range: Some(range) };
        match &self.bias {
            None => ops.matmul(out, x, &self.weight, Write::Set),
            Some(bias) => {
                ops.repeat_row(out, bias, rows)?;
                ops.matmul(out, x, &self.weight, Write::Add)
            }
        }
    }
}
