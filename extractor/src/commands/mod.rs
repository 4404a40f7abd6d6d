//! The subcommands of `extractor`, one a file.

pub(crate) mod bench;
pub(crate) mod check;
