//! Prompts to hidden states: conversations are tokenised, batched, prefilled through a
//! tensor-parallel target, and the states of chosen layers are written with a manifest.
//!
//! Read [`pipeline::run`] first.

pub mod address_space;
pub mod batch;
pub mod capture;
pub mod config;
pub mod conversation;
pub mod cosine;
pub mod encode;
pub mod fingerprint;
pub mod golden;
pub mod import;
pub mod input_file;
pub mod intake;
mod integers;
pub mod layout;
pub mod output;
pub mod pipeline;
pub mod plan;
pub mod progress;
pub mod prompts;
pub mod reject;
pub mod shutdown;
pub mod sink;
pub mod target;
pub mod target_dir;
pub mod template;
pub mod tokenizer;
