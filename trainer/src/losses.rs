//! What is minimised on a trained row. `p` is the teacher's softmax over the target vocabulary,
//! taken at the draft's ids; `p'` is `p` renormalised; `q` is the draft's softmax. Temperature 1.

/// Distance between the teacher's distribution over the draft vocabulary and the draft's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LossKind {
    /// Soft cross-entropy: `-sum p' log q`.
    #[default]
    SoftCrossEntropy,
    /// Kullback-Leibler divergence: `sum p' log(p' / q)`. The gradient is that of the soft
    /// cross-entropy; the value is 0 where draft and teacher agree.
    KullbackLeibler,
    /// Acceptance: with `alpha = sum min(p, q)`, the chance that a drafted token is accepted,
    /// `w KL + (1 - w) (1 - alpha)` where `w = exp(-eta alpha)` of the row counts as a constant: a
    /// row far from the teacher follows the divergence, one near to it the acceptance itself (LK
    /// losses, arXiv 2602.23881).
    Acceptance {
        /// How fast the weight of the divergence falls.
        eta: f64,
    },
}
