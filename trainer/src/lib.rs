//! Trains EAGLE-3 drafts on captured hidden states, measures their acceptance and exports them:
//! data set -> loader -> training-time test -> checkpoint -> acceptance, export. The data set is
//! known through the `shared` crate only.

pub mod acceptance;
pub mod batch;
pub mod checkpoint;
pub mod collate;
pub mod config;
pub mod cosines;
pub mod cost;
pub mod dataset;
pub mod decode;
pub mod draft;
pub mod exchange;
pub mod export;
pub mod fit;
pub mod golden;
pub mod gradcheck;
pub mod input;
pub mod live;
pub mod loader;
pub mod losses;
pub mod masks;
pub mod metrics;
pub mod ops;
pub mod optimizer;
mod plan;
pub mod reduction;
pub mod run_log;
pub mod schedule;
pub mod shards;
pub mod target;
pub mod tensors;
pub mod trained;
pub mod ttt;
mod unroll;
pub mod vocab;
pub mod watch;
pub mod world;

pub use batch::{BatchTokens, FrozenTarget, TargetWeights, TrainBatch};
pub use draft::{DraftConfig, DraftVocabulary, Eagle3Draft, Param};
pub use metrics::TttMetrics;
pub use ops::{DraftOps, cuda};
pub use ttt::{TttOptions, TttOutput, ttt_step};
