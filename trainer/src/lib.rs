//! Trains EAGLE-3 drafts on captured hidden states: the draft model, the training-time test and
//! the operations a device supplies. Knows no target engine.

pub mod batch;
pub mod draft;
pub mod golden;
pub mod losses;
pub mod masks;
pub mod metrics;
pub mod ops;
mod plan;
pub mod ttt;
mod unroll;

pub use batch::{BatchTokens, FrozenTarget, TargetWeights, TrainBatch};
pub use draft::{DraftConfig, DraftVocabulary, Eagle3Draft, Param};
pub use metrics::TttMetrics;
pub use ops::DraftOps;
pub use ttt::{TttOptions, TttOutput, ttt_step};
