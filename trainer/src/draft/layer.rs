//! The one decoder layer of a draft and how its parameters are ordered. Knows nothing of steps,
//! documents or losses.

use burn::tensor::{Tensor, backend::Backend};

use super::{AttentionConfig, DraftConfig, Eagle3Draft, Param};

/// Parameters of the decoder layer.
#[derive(Clone, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Norm of the token embedding, `[H]`.
    pub input_layernorm: Tensor<B, 1>,
    /// Norm of the hidden state, `[H]`.
    pub hidden_norm: Tensor<B, 1>,
    /// Attention over `[embedding, hidden]`.
    pub attention: Attention<B>,
    /// Attention output to the residual stream, `[H, heads * value size]`.
    pub o_proj: Tensor<B, 2>,
    /// Norm before the MLP, `[H]`.
    pub post_attention_layernorm: Tensor<B, 1>,
    /// `[I, H]`.
    pub gate_proj: Tensor<B, 2>,
    /// `[I, H]`.
    pub up_proj: Tensor<B, 2>,
    /// `[H, I]`.
    pub down_proj: Tensor<B, 2>,
}

/// Projections of one kind of attention.
#[derive(Clone, Debug)]
pub enum Attention<B: Backend> {
    /// Grouped heads.
    Gqa(GqaWeights<B>),
    /// Latent attention.
    Mla(MlaWeights<B>),
}

/// Projections of grouped attention, input width `2 * H`.
#[derive(Clone, Debug)]
pub struct GqaWeights<B: Backend> {
    /// `[heads * head_dim, 2 * H]`.
    pub q_proj: Tensor<B, 2>,
    /// `[groups * head_dim, 2 * H]`.
    pub k_proj: Tensor<B, 2>,
    /// `[groups * head_dim, 2 * H]`.
    pub v_proj: Tensor<B, 2>,
}

/// Projections of latent attention, input width `2 * H`.
#[derive(Clone, Debug)]
pub struct MlaWeights<B: Backend> {
    /// `[q_lora, 2 * H]`.
    pub q_a_proj: Tensor<B, 2>,
    /// `[q_lora]`.
    pub q_a_layernorm: Tensor<B, 1>,
    /// `[heads * (nope + rope), q_lora]`.
    pub q_b_proj: Tensor<B, 2>,
    /// `[kv_lora + rope, 2 * H]`.
    pub kv_a_proj_with_mqa: Tensor<B, 2>,
    /// `[kv_lora]`.
    pub kv_a_layernorm: Tensor<B, 1>,
    /// `[heads * (nope + v), kv_lora]`.
    pub kv_b_proj: Tensor<B, 2>,
}

/// Takes parameters one after another, in the order of [`DraftConfig::parameter_shapes`].
struct Cursor<B: Backend>(std::vec::IntoIter<Param<B>>);

impl<B: Backend> Cursor<B> {
    fn vector(&mut self) -> Tensor<B, 1> {
        match self.0.next() {
            Some(Param::Vector(tensor)) => tensor,
            other => unreachable!("expected a vector, got {:?}", other.map(|p| p.shape())),
        }
    }

    fn matrix(&mut self) -> Tensor<B, 2> {
        match self.0.next() {
            Some(Param::Matrix(tensor)) => tensor,
            other => unreachable!("expected a matrix, got {:?}", other.map(|p| p.shape())),
        }
    }
}

/// Puts parameters, ordered and shaped as [`DraftConfig::parameter_shapes`] says, in their places.
pub(super) fn assemble<B: Backend>(config: DraftConfig, params: Vec<Param<B>>) -> Eagle3Draft<B> {
    let mut next = Cursor(params.into_iter());
    let fc = next.matrix();
    let fc_norms = if config.fc_norm { config.num_aux } else { 0 };
    let fc_norm = (0..fc_norms).map(|_| next.vector()).collect();
    let input_layernorm = next.vector();
    let hidden_norm = next.vector();
    let attention = match config.attention {
        AttentionConfig::Gqa { .. } => Attention::Gqa(GqaWeights {
            q_proj: next.matrix(),
            k_proj: next.matrix(),
            v_proj: next.matrix(),
        }),
        AttentionConfig::Mla { .. } => Attention::Mla(MlaWeights {
            q_a_proj: next.matrix(),
            q_a_layernorm: next.vector(),
            q_b_proj: next.matrix(),
            kv_a_proj_with_mqa: next.matrix(),
            kv_a_layernorm: next.vector(),
            kv_b_proj: next.matrix(),
        }),
    };
    let layer = DecoderLayer {
        input_layernorm,
        hidden_norm,
        attention,
        o_proj: next.matrix(),
        post_attention_layernorm: next.vector(),
        gate_proj: next.matrix(),
        up_proj: next.matrix(),
        down_proj: next.matrix(),
    };
    Eagle3Draft { fc, fc_norm, layer, norm: next.vector(), lm_head: next.matrix(), config }
}

/// Where a parameter is kept.
pub(super) enum Slot<'a, B: Backend> {
    Vector(&'a mut Tensor<B, 1>),
    Matrix(&'a mut Tensor<B, 2>),
}

/// The places of [`disassemble`]'s parameters, in the same order.
pub(super) fn slots<B: Backend>(draft: &mut Eagle3Draft<B>) -> Vec<Slot<'_, B>> {
    use Slot::{Matrix, Vector};
    let layer = &mut draft.layer;
    let mut slots = vec![Matrix(&mut draft.fc)];
    slots.extend(draft.fc_norm.iter_mut().map(Vector));
    slots.extend([Vector(&mut layer.input_layernorm), Vector(&mut layer.hidden_norm)]);
    match &mut layer.attention {
        Attention::Gqa(w) => {
            slots.extend([&mut w.q_proj, &mut w.k_proj, &mut w.v_proj].map(Matrix));
        }
        Attention::Mla(w) => slots.extend([
            Matrix(&mut w.q_a_proj),
            Vector(&mut w.q_a_layernorm),
            Matrix(&mut w.q_b_proj),
            Matrix(&mut w.kv_a_proj_with_mqa),
            Vector(&mut w.kv_a_layernorm),
            Matrix(&mut w.kv_b_proj),
        ]),
    }
    slots.extend([Matrix(&mut layer.o_proj), Vector(&mut layer.post_attention_layernorm)]);
    slots.extend([&mut layer.gate_proj, &mut layer.up_proj, &mut layer.down_proj].map(Matrix));
    slots.extend([Vector(&mut draft.norm), Matrix(&mut draft.lm_head)]);
    slots
}

/// The parameters in the order of [`DraftConfig::parameter_shapes`].
pub(super) fn disassemble<B: Backend>(draft: &Eagle3Draft<B>) -> Vec<Param<B>> {
    let vector = |tensor: &Tensor<B, 1>| Param::Vector(tensor.clone());
    let matrix = |tensor: &Tensor<B, 2>| Param::Matrix(tensor.clone());
    let layer = &draft.layer;
    let mut params = vec![matrix(&draft.fc)];
    params.extend(draft.fc_norm.iter().map(vector));
    params.extend([vector(&layer.input_layernorm), vector(&layer.hidden_norm)]);
    match &layer.attention {
        Attention::Gqa(w) => {
            params.extend([matrix(&w.q_proj), matrix(&w.k_proj), matrix(&w.v_proj)]);
        }
        Attention::Mla(w) => params.extend([
            matrix(&w.q_a_proj),
            vector(&w.q_a_layernorm),
            matrix(&w.q_b_proj),
            matrix(&w.kv_a_proj_with_mqa),
            vector(&w.kv_a_layernorm),
            matrix(&w.kv_b_proj),
        ]),
    }
    params.extend([
        matrix(&layer.o_proj),
        vector(&layer.post_attention_layernorm),
        matrix(&layer.gate_proj),
        matrix(&layer.up_proj),
        matrix(&layer.down_proj),
        vector(&draft.norm),
        matrix(&draft.lm_head),
    ]);
    params
}
