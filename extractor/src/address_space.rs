//! The limit on this process's address space (`ulimit -v`), looked at before the model is opened:
//! an allocation that fails later ends the process without a word on what to do. Knows no model.

use std::fs;
use std::path::Path;

use thiserror::Error;

use crate::template::ADDRESS_SPACE;

/// Code, stacks and buffers of a small batch.
const BASE: u64 = 320 << 20;
/// Stack and heap of a thread.
const PER_THREAD: u64 = 16 << 20;

/// The process may not take as much memory as it will.
#[derive(Debug, Error)]
#[error(
    "the address space of this process is limited to {limit} bytes, about {needed} are needed \
     ({weights} of weights, which are mapped, and {threads} threads): raise `ulimit -v`"
)]
pub struct AddressSpaceError {
    /// The limit.
    pub limit: u64,
    /// Estimate of what will be needed.
    pub needed: u64,
    /// Bytes of the weight files.
    pub weights: u64,
    /// Threads that compute.
    pub threads: u64,
}

impl AddressSpaceError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        69
    }
}

/// Refuses a limit below what the model in `dir` and `threads` threads take; anything goes where
/// there is no limit or none can be read.
pub fn require(dir: &Path, threads: usize) -> Result<(), AddressSpaceError> {
    let Some(limit) = fs::read_to_string("/proc/self/limits").ok().and_then(|it| limit(&it)) else {
        return Ok(());
    };
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let weights =
        files.filter(|file| file.path().extension().is_some_and(|it| it == "safetensors"));
    let weights = weights.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
    let threads = threads as u64;
    let needed = BASE + ADDRESS_SPACE as u64 + weights + threads * PER_THREAD;
    match limit < needed {
        true => Err(AddressSpaceError { limit, needed, weights, threads }),
        false => Ok(()),
    }
}

/// The soft limit in the text of `/proc/self/limits`; `None` if unlimited.
fn limit(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max address space         1048576              unlimited            bytes\n";
        assert_eq!(limit(text), Some(1 << 20));
        assert_eq!(limit(&text.replace("1048576", "unlimited")), None);
        assert_eq!(limit(""), None);
    }
}
