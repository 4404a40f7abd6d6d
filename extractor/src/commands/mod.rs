//! One file a subcommand: arguments in, the library called, the answer written.

pub(crate) mod audit;
pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod query;
pub(crate) mod rebuild;
pub(crate) mod retry;
pub(crate) mod run;
pub(crate) mod seal;

/// Arguments that are each well formed but do not go together, or name nothing that is there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

impl Usage {
    /// 2, as of arguments that clap refuses.
    pub(crate) fn exit_code(&self) -> u8 {
        2
    }
}
