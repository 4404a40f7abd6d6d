//! Too little memory, on the real binaries: refused with the numbers where it can be known before,
//! and otherwise no worse than `kill -9`.

#![allow(clippy::unwrap_used, reason = "a failed test may panic")]

use std::path::Path;

use aerie_tests::{Finished, extractor_within, small};

fn with_address_space(dir: &Path, mib: u64) -> Finished {
    extractor_within(&format!("ulimit -v {}", mib << 10), dir, &small::run_args("ds"))
}

#[test]
fn an_address_space_that_is_too_small_is_refused_with_the_numbers() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    let (mut refused, mut died) = (0, 0);
    for mib in (60..=240).step_by(20) {
        let run = with_address_space(dir, mib);
        match run.code {
            69 => {
                refused += 1;
                let words = &run.stderr;
                assert!(words.contains("ulimit -v") && words.contains("are needed"), "{run:?}");
            }
            // Before the check can be made: the allocator's word, and SIGABRT.
            _ => {
                died += 1;
                assert_ne!(run.code, 0, "{mib} MiB: {run:?}");
                assert!(run.stderr.contains("memory"), "{mib} MiB: {run:?}");
            }
        }
        assert_eq!(small::committed(&dir.join("ds")), 0, "{mib} MiB");
    }
    println!("{refused} limits refused, {died} died before");
    assert!(refused > died, "{refused} refused, {died} died");
    small::run(dir, "ds").expect_code(0);
    small::assert_clean(dir, "ds");
    small::run(dir, "straight").expect_code(0);
    assert!(small::contents(&dir.join("ds")) == small::contents(&dir.join("straight")));
}
