//! What can go wrong between the processes of a run, and what to do about it.

use std::io;

use thiserror::Error;

/// Processes that do not find each other, do not belong together, or are gone.
#[derive(Debug, Error)]
pub enum WorldError {
    /// Some of a launcher's variables are set.
    #[error(
        "a run of several processes needs {}, which are not set, beside {}: start it with \
         torchrun or the like, or unset these", missing.join(", "), set.join(", ")
    )]
    HalfSet {
        /// Variables that are set.
        set: Vec<&'static str>,
        /// Variables that are not.
        missing: Vec<&'static str>,
    },
    /// A variable without a usable number.
    #[error("{name}={value:?}: a whole number from 0 and below {below} was expected")]
    Value {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        value: String,
        /// First number too large.
        below: usize,
    },
    /// The first process cannot be reached by others.
    #[error(
        "port {port} for the other processes: free it, or set another MASTER_PORT; if another \
         process of this run has it, both were started with RANK=0"
    )]
    Listen {
        /// The port.
        port: u16,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The first process does not answer.
    #[error(
        "no process with RANK 0 at {master} after {seconds} s: is it started, and is the port open?"
    )]
    Connect {
        /// Where it should be.
        master: String,
        /// How long this process tried.
        seconds: u64,
        /// The system's last answer.
        #[source]
        source: io::Error,
    },
    /// Fewer processes came than expected.
    #[error("{found} of {expected} processes came within {seconds} s; missing ranks: {missing:?}")]
    Missing {
        /// Processes there.
        found: usize,
        /// Processes of the run.
        expected: usize,
        /// Those that did not come.
        missing: Vec<usize>,
        /// How long the first one waited.
        seconds: u64,
    },
    /// Processes of different runs.
    #[error("{what} of rank {rank} is {theirs}, here {ours}: start all processes alike")]
    Different {
        /// What differs.
        what: &'static str,
        /// The other process.
        rank: usize,
        /// Its value.
        theirs: String,
        /// Value of this process.
        ours: String,
    },
    /// Two processes say that they are the same one.
    #[error(
        "two processes were started with RANK={rank}: give every process a number of \
         its own, 0 to WORLD_SIZE - 1"
    )]
    Twice {
        /// The number of both.
        rank: usize,
    },
    /// A process is gone, or was never one of these.
    #[error("rank {rank} is gone: its own log says why")]
    Lost {
        /// The other process.
        rank: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Processes are not at the same place.
    #[error("rank {rank} sent {found} bytes where {expected} were expected: this is a bug")]
    OutOfStep {
        /// The other process.
        rank: usize,
        /// Bytes expected.
        expected: usize,
        /// Bytes that came.
        found: usize,
    },
}

impl WorldError {
    /// Process exit code: 78 for settings, 75 where another try may do, 70 for a bug.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::HalfSet { .. }
            | Self::Value { .. }
            | Self::Different { .. }
            | Self::Twice { .. } => 78,
            Self::Listen { .. }
            | Self::Connect { .. }
            | Self::Missing { .. }
            | Self::Lost { .. } => 75,
            Self::OutOfStep { .. } => 70,
        }
    }

    pub(super) fn lost(rank: usize) -> impl Fn(io::Error) -> Self {
        move |source| Self::Lost { rank, source }
    }
}
