//! Prompts to hidden states: conversations are tokenised, batched, prefilled through a
//! tensor-parallel target, and the states of chosen layers are written with a manifest.
//!
//! Read [`pipeline::run`] first.

pub mod batch;
pub mod capture;
pub mod config;
pub mod conversation;
pub mod encode;
pub mod layout;
pub mod model_shape;
pub mod plan;
pub mod prompts;
pub mod reject;
pub mod shutdown;
pub mod template;
pub mod tokenizer;

/// The target model: the frozen network whose hidden states are recorded.
pub mod target {
    pub mod weights;
}
