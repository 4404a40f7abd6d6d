//! The on-disk tensor contract between `extractor` and `trainer`: samples, shards, the manifest
//! and their audit. Knows no model, no device and no network.
//!
//! ```text
//! DATASET/manifest.sqlite            what exists: samples, shapes, digests, rejects, runs
//! DATASET/shards/shard-000000.safetensors    the tensors, immutable once sealed
//! DATASET/target/                    what the trainer needs of the target model
//! ```

pub mod contract;
pub mod sample;

pub use contract::{CaptureSpec, CapturedSample, LayerIndex, LayerState, StateDtype, StateRows};
pub use sample::{SampleError, SampleId, TokenSample};
