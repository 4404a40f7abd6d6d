//! Who wrote something: command line, host, process, versions, time. Knows nothing of the data.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Where and how a run was started.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Provenance {
    /// The command line.
    pub argv: Vec<String>,
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Version of this program.
    pub version: String,
    /// Seconds since 1970. A label only: nothing is ordered by it.
    pub unix_time: u64,
}

impl Provenance {
    /// Of this process, now.
    pub fn here() -> Self {
        Self {
            argv: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
            host: host(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            unix_time: unix_time(),
        }
    }
}

/// Name of this machine.
pub fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// Seconds since 1970, 0 for a clock before that.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
