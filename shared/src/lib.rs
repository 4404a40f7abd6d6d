//! The on-disk tensor contract between `extractor` and `trainer`: samples, shards, the manifest
//! and their audit. Knows no model, no device and no network.
//!
//! ```text
//! DATASET/manifest.sqlite            what exists: samples, shapes, digests, rejects, runs
//! DATASET/shards/shard-000000.safetensors    the tensors, immutable once sealed
//! DATASET/settings.json              a copy of what the data set was begun with
//! DATASET/target/                    what the trainer needs of the target model
//! ```

pub mod audit;
pub mod contract;
pub mod diagnosis;
pub mod digest;
pub mod durable;
pub mod error_chain;
pub mod files;
pub mod fingerprint;
pub mod finite;
pub mod foreign;
pub mod fp8;
pub mod header;
pub mod manifest;
pub mod provenance;
pub mod repair;
pub mod sample;
pub mod shard;
pub mod sums;
pub mod target_files;

pub use audit::{AuditReport, Finding, FindingKind, Verify, audit};
pub use contract::{
    CaptureSpec, CapturedSample, ContractError, LayerIndex, LayerState, LayerStats, StateDtype,
    StateRows,
};
pub use digest::Digest;
pub use durable::{DatasetDir, DurableError};
pub use fingerprint::{FieldChange, Fingerprint};
pub use foreign::{ForeignReport, ForeignTensor, audit_foreign};
pub use header::{HeaderLimits, ShardHeader};
pub use manifest::{
    Conservation, Manifest, ManifestError, Rebuilt, SourceOutcome, SourceRecord, SourceRow,
};
pub use sample::{SampleError, SampleId, TokenSample};
pub use shard::{
    SealedShard, ShardEntry, ShardError, ShardId, ShardReader, ShardWriter, TensorRecord,
};
