//! The MLP of the draft as one operation, made of a device's simpler ones, so that its backward
//! pass decides what is kept and adds in place. Knows no graph and no device.

use burn::tensor::Tensor;

use super::{DraftGradients, DraftOps, MlpWeights, NormSums};

/// Output, gate and up.
pub(super) fn forward<B: DraftOps>(
    x: Tensor<B, 2>,
    weights: &MlpWeights<B>,
) -> (Tensor<B, 2>, [Tensor<B, 2>; 2]) {
    let normed = B::rms_norm(x.clone(), weights.norm.clone(), weights.eps);
    let [gate, up] = gate_and_up(normed, weights);
    let act = B::swiglu(gate.clone(), up.clone());
    (B::project_part(act, weights.down.clone(), 0, Some(x)), [gate, up])
}

fn gate_and_up<B: DraftOps>(normed: Tensor<B, 2>, weights: &MlpWeights<B>) -> [Tensor<B, 2>; 2] {
    let gate = B::project(normed.clone(), weights.gate.clone());
    [gate, B::project(normed, weights.up.clone())]
}

/// Sums of gradients to add to, `None` where there are none yet.
pub(super) struct MlpSums<B: DraftOps> {
    pub(super) norm: Option<Tensor<B, 1>>,
    pub(super) gate: Option<Tensor<B, 2>>,
    pub(super) up: Option<Tensor<B, 2>>,
    pub(super) down: Option<Tensor<B, 2>>,
}

/// Gradients of an MLP's weights.
pub(super) struct MlpGradients<B: DraftOps> {
    pub(super) norm: Tensor<B, 1>,
    /// Gate, up, down.
    pub(super) matrices: [Tensor<B, 2>; 3],
}

/// Gradients of `x` and of the weights; gate and up are made again where they were not kept.
pub(super) fn backward<B: DraftGradients>(
    gradient: Tensor<B, 2>,
    x: Tensor<B, 2>,
    weights: &MlpWeights<B>,
    kept: Option<[Tensor<B, 2>; 2]>,
    sums: MlpSums<B>,
) -> (Tensor<B, 2>, MlpGradients<B>) {
    let width = x.dims()[1];
    let inner = weights.gate.dims()[0];
    let normed = B::rms_norm(x.clone(), weights.norm.clone(), weights.eps);
    let [gate, up] = kept.unwrap_or_else(|| gate_and_up(normed.clone(), weights));
    let input = |gradient: &Tensor<B, 2>, weight: &Tensor<B, 2>, columns, sum| {
        B::project_input_gradient(gradient.clone(), weight.clone(), 0..columns, sum)
    };
    let d_act = input(&gradient, &weights.down, inner, None);
    let [d_gate, d_up, act] = B::swiglu_gradients(d_act, gate, up);
    let down = B::project_weight_gradient(gradient.clone(), act, (0, inner), sums.down);
    let d_normed = input(&d_gate, &weights.gate, width, None);
    let d_normed = input(&d_up, &weights.up, width, Some(d_normed));
    let gate = B::project_weight_gradient(d_gate, normed.clone(), (0, width), sums.gate);
    let up = B::project_weight_gradient(d_up, normed, (0, width), sums.up);
    // What goes past the MLP is there already.
    let sums = NormSums { input: Some(gradient), weight: sums.norm };
    let norm = (weights.norm.clone(), weights.eps);
    let (d_x, norm) = B::rms_norm_gradients(d_normed, x, norm, sums);
    (d_x, MlpGradients { norm, matrices: [gate, up, down] })
}
