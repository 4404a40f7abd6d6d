//! Every CUDA kernel gives what its plain-Rust twin gives. Needs a CUDA device, its driver, NVRTC
//! and cuBLASLt, and says so where one is missing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod parity;

use std::io::Write;

use parity::{Gpu, cases};

#[test]
fn every_kernel_matches_its_twin() {
    let mut gpu = match Gpu::new(true) {
        Ok(gpu) => gpu,
        Err(error) if error.exit_code() == 69 => {
            let _ = writeln!(std::io::stderr(), "SKIPPED, no kernel was run: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    for case in cases() {
        (case.run)(&mut gpu).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    }
}
