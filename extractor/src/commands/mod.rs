//! One file a subcommand: arguments in, the library called, the answer written.

pub(crate) mod audit;
pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod query;
pub(crate) mod rebuild;
pub(crate) mod run;
pub(crate) mod seal;
