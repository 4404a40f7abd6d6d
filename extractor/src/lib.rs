//! Prompts to hidden states: conversations are tokenised, batched, prefilled through a
//! tensor-parallel target, and the states of chosen layers are written with a manifest.

pub mod batch;
pub mod capture;
pub mod golden;
pub mod target;
