//! What is minimised on a trained row.

use serde::{Deserialize, Serialize};

/// Distance between the teacher's distribution over the draft vocabulary and the draft's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Soft cross-entropy against the teacher renormalised over the draft vocabulary.
    #[default]
    SoftCrossEntropy,
}
