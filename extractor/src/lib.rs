//! Prompts to hidden states: conversations are tokenised, batched, prefilled through a
//! tensor-parallel target, and the states of chosen layers are written with a manifest.

pub mod batch;
pub mod capture;

/// The target model: the frozen network whose hidden states are recorded.
pub mod target {
    pub mod weights;
}
