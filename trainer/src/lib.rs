//! Trains an EAGLE-3 draft head from recorded hidden states, measures its acceptance and exports
//! it. Knows the data set only through the `shared` crate.

pub mod config;
pub mod draft;
pub mod optimizer;
pub mod schedule;
pub mod target;
pub mod tensors;
pub mod vocab;
