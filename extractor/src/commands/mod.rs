//! One file a subcommand: arguments in, the library called, the answer written.

pub(crate) mod config;
pub(crate) mod plan;
