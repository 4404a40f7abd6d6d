//! Runs a draft over the planned rows of a batch, step after step. Knows nothing of losses or of
//! the teacher.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Tensor, TensorData, backend::Backend};

use crate::draft::{Attention, DraftConfig, Eagle3Draft, MlaWeights};
use crate::draft::{AttentionConfig, rotary_frequencies};
use crate::ops::{Activations, DraftOps, MlpWeights, RotaryTable, RowIndex};
use crate::plan::{BatchPlan, StepPlan};

/// States of all steps.
pub(crate) struct Unrolled<B: Backend> {
    /// Output of `fc`, `[base rows, H]`.
    pub(crate) h0: Tensor<B, 2>,
    /// Layer output before the norm, for each step `[rows, H]`.
    pub(crate) layer_output: Vec<Tensor<B, 2>>,
    /// The same after the norm.
    pub(crate) normed: Vec<Tensor<B, 2>>,
}

/// Keys and values of the steps so far, first those of step 0: `[rows, groups, d]`.
pub(crate) struct StepKeys<B: Backend> {
    pub(crate) keys: Vec<Tensor<B, 3>>,
    pub(crate) values: Vec<Tensor<B, 3>>,
}

impl<B: Backend> StepKeys<B> {
    pub(crate) fn new() -> Self {
        Self { keys: Vec::new(), values: Vec::new() }
    }

    /// Adds what a layer made; `place` tells whether as a step of its own or behind step 0.
    fn add(&mut self, key: Tensor<B, 3>, value: Tensor<B, 3>, place: KeyPlace) {
        match (place, self.keys.first_mut(), self.values.first_mut()) {
            (KeyPlace::BehindFirst, Some(keys), Some(values)) => {
                *keys = Tensor::cat(vec![keys.clone(), key], 0);
                *values = Tensor::cat(vec![values.clone(), value], 0);
            }
            _ => {
                self.keys.push(key);
                self.values.push(value);
            }
        }
    }
}

/// Where a step's keys go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyPlace {
    /// A step of its own, seen by the row that made them only.
    NewStep,
    /// More rows of step 0, as decoding with a cache adds them.
    BehindFirst,
}

/// What the layer's first projections make of normed token embeddings, one row a token: half of
/// what they make of embedding and hidden state, and the same at every step.
pub(crate) struct TokenHalf<B: Backend> {
    /// `[tokens, out]`.
    queries: Tensor<B, 2>,
    /// For each projection of keys and values `[tokens, out]`.
    keys: Vec<Tensor<B, 2>>,
}

fn gather<B: DraftOps>(x: Tensor<B, 2>, rows: Option<&RowIndex<B>>) -> Tensor<B, 2> {
    match rows {
        Some(rows) => B::gather_rows(x, rows),
        None => x,
    }
}

impl<B: DraftOps> Eagle3Draft<B> {
    /// Runs every planned step: `embed_tokens [V, H]`, `aux [T, num_aux * H]`.
    pub(crate) fn unroll(
        &self,
        embed_tokens: &Tensor<B, 2>,
        aux: &Tensor<B, 2>,
        plan: &BatchPlan<B>,
        activations: Activations,
    ) -> Unrolled<B> {
        let table = &plan.table;
        let h0 = self.fuse(gather(aux.clone(), plan.base.as_ref()));
        let tokens = B::gather_rows(embed_tokens.clone(), &plan.tokens);
        let half = self.token_half(tokens, plan.queried.as_ref());
        let mut made = StepKeys::new();
        let (mut layer_output, mut normed) = (Vec::new(), Vec::new());
        let mut hidden = h0.clone();
        for step in &plan.steps {
            let previous = gather(hidden, step.from_previous.as_ref());
            let y =
                self.attention_step((&half, previous), step, table, (&mut made, KeyPlace::NewStep));
            let z = self.mlp_step(y, activations);
            let output = B::rms_norm(z.clone(), self.norm.clone(), self.config.rms_norm_eps);
            hidden = if self.config.norm_output { output.clone() } else { z.clone() };
            layer_output.push(z);
            normed.push(output);
        }
        Unrolled { h0, layer_output, normed }
    }

    /// `fc` over the auxiliary states, each normed first with `fc_norm`.
    pub(crate) fn fuse(&self, aux: Tensor<B, 2>) -> Tensor<B, 2> {
        let width = self.config.hidden_size;
        let part = |(at, weight): (usize, &Tensor<B, 1>)| {
            let state = aux.clone().narrow(1, at * width, width);
            B::rms_norm(state, weight.clone(), self.config.rms_norm_eps)
        };
        let normed = self.fc_norm.iter().enumerate().map(part).collect::<Vec<_>>();
        let input = if normed.is_empty() { aux } else { Tensor::cat(normed, 1) };
        B::project(input, self.fc.clone())
    }

    /// The half of the first projections that depends on tokens only: embeddings `[tokens, H]`, and
    /// which of these rows queries will ask for.
    pub(crate) fn token_half(
        &self,
        tokens: Tensor<B, 2>,
        queried: Option<&RowIndex<B>>,
    ) -> TokenHalf<B> {
        let norm = self.layer.input_layernorm.clone();
        let normed = B::rms_norm(tokens, norm, self.config.rms_norm_eps);
        let (query, keys) = first_projections(&self.layer.attention);
        let half =
            |x: Tensor<B, 2>, weight: &Tensor<B, 2>| B::project_part(x, weight.clone(), 0, None);
        TokenHalf {
            keys: keys.into_iter().map(|weight| half(normed.clone(), weight)).collect(),
            queries: half(gather(normed, queried), query),
        }
    }

    /// The attention of one step, on top of what goes past it, given the tokens' half and hidden
    /// states; adds the step's keys and values to those made before.
    pub(crate) fn attention_step(
        &self,
        (half, hidden): (&TokenHalf<B>, Tensor<B, 2>),
        step: &StepPlan<B>,
        table: &RotaryTable<B>,
        (made, place): (&mut StepKeys<B>, KeyPlace),
    ) -> Tensor<B, 2> {
        let (layer, eps) = (&self.layer, self.config.rms_norm_eps);
        let normed = B::rms_norm(hidden.clone(), layer.hidden_norm.clone(), eps);
        let heads = HeadSplit { config: &self.config, table };
        let (query, keys) = first_projections(&layer.attention);
        let second = |x: &Tensor<B, 2>, weight: &Tensor<B, 2>, half: Tensor<B, 2>| {
            B::project_part(x.clone(), weight.clone(), self.config.hidden_size, Some(half))
        };
        let key = |(weight, half): (&Tensor<B, 2>, &Tensor<B, 2>)| {
            second(&normed, weight, B::gather_rows(half.clone(), &step.key_tokens))
        };
        let keys = keys.into_iter().zip(&half.keys).map(key).collect();
        let (key, value) = heads.keys_values(&layer.attention, keys, &step.key_positions);
        made.add(key, value, place);
        let asked = gather(normed.clone(), step.queries.as_ref());
        let query = second(&asked, query, B::gather_rows(half.queries.clone(), &step.query_tokens));
        let queries = heads.queries(&layer.attention, query, &step.query_positions);
        let mixed = B::ttt_attention(queries, &made.keys, &made.values, &step.attention);
        let [rows, count, size] = mixed.dims();
        let residual = if self.config.norm_before_residual { normed } else { hidden };
        let residual = gather(residual, step.queries.as_ref());
        let mixed = mixed.reshape([rows, count * size]);
        B::project_part(mixed, layer.o_proj.clone(), 0, Some(residual))
    }

    /// The MLP on top of what the attention made.
    pub(crate) fn mlp_step(&self, y: Tensor<B, 2>, activations: Activations) -> Tensor<B, 2> {
        let layer = &self.layer;
        let weights = MlpWeights {
            norm: layer.post_attention_layernorm.clone(),
            eps: self.config.rms_norm_eps,
            gate: layer.gate_proj.clone(),
            up: layer.up_proj.clone(),
            down: layer.down_proj.clone(),
        };
        B::mlp(y, weights, activations)
    }
}

/// Weights `[out, 2 * H]` that read embedding and hidden state: for queries, and for keys and
/// values.
fn first_projections<B: Backend>(attention: &Attention<B>) -> (&Tensor<B, 2>, Vec<&Tensor<B, 2>>) {
    match attention {
        Attention::Gqa(w) => (&w.q_proj, vec![&w.k_proj, &w.v_proj]),
        Attention::Mla(w) => (&w.q_a_proj, vec![&w.kv_a_proj_with_mqa]),
    }
}

/// Makes heads of projections.
struct HeadSplit<'a, B: Backend> {
    config: &'a DraftConfig,
    table: &'a RotaryTable<B>,
}

impl<B: DraftOps> HeadSplit<'_, B> {
    /// Queries `[n, heads, d]` of what the first projection made, `[n, out]`.
    fn queries(
        &self,
        attention: &Attention<B>,
        made: Tensor<B, 2>,
        positions: &RowIndex<B>,
    ) -> Tensor<B, 3> {
        let heads = self.config.num_attention_heads;
        match attention {
            Attention::Gqa(_) => B::rope(split(made, heads), self.table, positions),
            Attention::Mla(w) => {
                let eps = self.config.rms_norm_eps;
                let low = B::rms_norm(made, w.q_a_layernorm.clone(), eps);
                let q = split(B::project(low, w.q_b_proj.clone()), heads);
                let rotary = self.config.rotary_dim();
                let plain = q.dims()[2] - rotary;
                let turned = B::rope(q.clone().narrow(2, plain, rotary), self.table, positions);
                Tensor::cat(vec![q.narrow(2, 0, plain), turned], 2)
            }
        }
    }

    /// Keys `[n, groups, d]` and values `[n, groups, v]` of what the first projections made.
    fn keys_values(
        &self,
        attention: &Attention<B>,
        made: Vec<Tensor<B, 2>>,
        positions: &RowIndex<B>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        match (attention, <[_; 2]>::try_from(made)) {
            (Attention::Gqa(_), Ok([key, value])) => {
                let AttentionConfig::Gqa { num_key_value_heads: groups, .. } =
                    self.config.attention
                else {
                    unreachable!("grouped weights come from a grouped config");
                };
                (B::rope(split(key, groups), self.table, positions), split(value, groups))
            }
            (Attention::Mla(w), Err(made)) => {
                let both = made.into_iter().next();
                let Some(both) = both else { unreachable!("one projection makes both") };
                self.latent_keys_values(w, both, positions)
            }
            _ => unreachable!("as many products as projections"),
        }
    }

    fn latent_keys_values(
        &self,
        w: &MlaWeights<B>,
        both: Tensor<B, 2>,
        positions: &RowIndex<B>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (heads, rotary) = (self.config.num_attention_heads, self.config.rotary_dim());
        let rows = both.dims()[0];
        let rank = w.kv_a_layernorm.dims()[0];
        let low = both.clone().narrow(1, 0, rank);
        let low = B::rms_norm(low, w.kv_a_layernorm.clone(), self.config.rms_norm_eps);
        let turned = split(both.narrow(1, rank, rotary), 1);
        let turned = B::rope(turned, self.table, positions).expand([rows, heads, rotary]);
        let full = split(B::project(low, w.kv_b_proj.clone()), heads);
        let width = full.dims()[2];
        let AttentionConfig::Mla { qk_nope_head_dim: plain, .. } = self.config.attention else {
            unreachable!("latent weights come from a latent config");
        };
        let key = Tensor::cat(vec![full.clone().narrow(2, 0, plain), turned], 2);
        (key, full.narrow(2, plain, width - plain))
    }
}

/// `[n, heads * d]` to `[n, heads, d]`.
fn split<B: Backend>(x: Tensor<B, 2>, heads: usize) -> Tensor<B, 3> {
    let [rows, width] = x.dims();
    x.reshape([rows, heads, width / heads])
}

/// The table made last, for as long as it serves: it takes the host longer to make than a step's
/// plans.
#[derive(Clone, Debug)]
pub(crate) struct RotaryCache<B: Backend>(Arc<Mutex<Option<KnownTable<B>>>>);

#[derive(Debug)]
struct KnownTable<B: Backend> {
    frequencies: Vec<f64>,
    positions: usize,
    table: RotaryTable<B>,
}

impl<B: Backend> RotaryCache<B> {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    /// A table for at least the positions below `positions`.
    pub(crate) fn table(
        &self,
        config: &DraftConfig,
        positions: usize,
        device: &B::Device,
    ) -> RotaryTable<B> {
        let frequencies = rotary_frequencies(config);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(known) if known.frequencies == frequencies && known.positions >= positions => {
                known.table.clone()
            }
            _ => {
                let positions = positions.next_multiple_of(1024);
                let table = rotary_table(config, positions, device);
                *kept = Some(KnownTable { frequencies, positions, table: table.clone() });
                table
            }
        }
    }
}

/// Cosines and sines of the positions below `positions`.
pub(crate) fn rotary_table<B: Backend>(
    config: &DraftConfig,
    positions: usize,
    device: &B::Device,
) -> RotaryTable<B> {
    let frequencies = rotary_frequencies(config);
    let angle = |position: usize| frequencies.iter().map(move |f| position as f64 * f);
    let angles: Vec<f64> = (0..positions).flat_map(angle).collect();
    let table = |part: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|&angle| part(angle) as f32).collect();
        Tensor::from_data(TensorData::new(values, [positions, frequencies.len()]), device)
    };
    RotaryTable {
        cos: table(f64::cos),
        sin: table(f64::sin),
        interleaved: matches!(config.attention, AttentionConfig::Mla { .. }),
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::batch::BatchTokens;
    use crate::masks::{MaskMode, RowPlan, row_masks};
    use crate::plan::plan_batch;

    fn config(attention: AttentionConfig) -> DraftConfig {
        DraftConfig {
            hidden_size: 32,
            intermediate_size: 48,
            num_attention_heads: 4,
            attention,
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            yarn: None,
            vocab_size: 40,
            draft_vocab_size: 20,
            num_aux: 3,
            fc_norm: false,
            norm_output: true,
            norm_before_residual: false,
        }
    }

    /// Only distances between positions matter.
    #[test]
    fn shifted_positions_change_nothing() {
        let device = Default::default();
        let latent = AttentionConfig::Mla {
            q_lora_rank: 12,
            kv_lora_rank: 10,
            qk_nope_head_dim: 6,
            qk_rope_head_dim: 4,
            v_head_dim: 5,
        };
        for attention in [AttentionConfig::Gqa { num_key_value_heads: 2, head_dim: 8 }, latent] {
            let draft = Eagle3Draft::<Flex>::init(config(attention), 5, &device).unwrap();
            let draft = draft.map(|_, param| match param {
                crate::Param::Matrix(w) => crate::Param::Matrix(w * 20.0),
                other => other,
            });
            let tokens = BatchTokens::new((0..19).collect(), &[1; 19], vec![0, 8, 19]).unwrap();
            let rows = RowPlan::sparse(&tokens, &row_masks(&tokens, 3, MaskMode::Chain, &[]));
            // The same numbers in every run: now and then a sharp softmax loses more digits.
            let numbers = |rows: usize, width: usize| {
                let value = |i: usize| ((i * 7919 + width) % 1009) as f32 / 300.0 - 1.68;
                let values: Vec<f32> = (0..rows * width).map(value).collect();
                Tensor::<Flex, 1>::from_floats(values.as_slice(), &device).reshape([rows, width])
            };
            let (embed, aux) = (numbers(40, 32), numbers(19, 96));
            let table = rotary_table(&draft.config, 64, &device);
            let mut plan = plan_batch::<Flex>(&tokens, &rows, 0.4, table);
            let before = draft.unroll(&embed, &aux, &plan, Activations::Keep);
            for step in &mut plan.steps {
                for positions in [&mut step.key_positions, &mut step.query_positions] {
                    let shifted = positions.host().iter().map(|&at| at + 23).collect();
                    *positions = RowIndex::new(shifted, &device);
                }
            }
            let after = draft.unroll(&embed, &aux, &plan, Activations::Keep);
            for (before, after) in before.layer_output.into_iter().zip(after.layer_output) {
                let scale = before.clone().abs().max().into_scalar();
                let difference = (before - after).abs().max().into_scalar();
                assert!(difference <= 2e-5 * scale, "{difference} of {scale}");
            }
        }
    }
}
