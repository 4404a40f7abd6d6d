//! The fuzz targets without libFuzzer: every file of the corpus and random changes of it. Holds the
//! targets to compiling as well, which needs no nightly compiler then.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(unused_attributes, unused_imports, missing_docs)]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

extern crate self as libfuzzer_sys;

macro_rules! fuzz_target {
    (|$data:ident: &[u8]| $body:block) => {
        pub(crate) fn run(data: &[u8]) {
            let target = |$data: &[u8]| $body;
            target(data);
        }
    };
    (|$text:ident: &str| $body:block) => {
        pub(crate) fn run(data: &[u8]) {
            let target = |$text: &str| $body;
            if let Ok(text) = std::str::from_utf8(data) {
                target(text);
            }
        }
    };
}
pub(crate) use fuzz_target;

#[path = "../../fuzz/fuzz_targets/manifest_row.rs"]
mod manifest_row;
#[path = "../../fuzz/fuzz_targets/model_config.rs"]
mod model_config;
#[path = "../../fuzz/fuzz_targets/prompts_jsonl.rs"]
mod prompts_jsonl;
#[path = "../../fuzz/fuzz_targets/shard_header.rs"]
mod shard_header;
#[path = "../../fuzz/fuzz_targets/weights_index.rs"]
mod weights_index;

const CHANGES: usize = 1000;

/// splitmix64.
fn random(state: &mut u64, limit: usize) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
}

/// Flips, cuts, repeats, and puts in what parsers stumble over.
fn change(bytes: &mut Vec<u8>, state: &mut u64) {
    const WORDS: [&[u8]; 8] =
        [b"18446744073709551615", b"-1", b"null", b"[[[[", b"\"\"", b"\0", b"1e999", b"\xff\xfe"];
    let at = random(state, bytes.len());
    match random(state, 4) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random(state, 8),
        1 => bytes.truncate(at),
        2 => drop(bytes.splice(at..at, WORDS[random(state, WORDS.len())].iter().copied())),
        _ => {
            let end = (at + random(state, 40)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.extend(piece);
        }
    }
}

/// `AERIE_FUZZ_SECONDS` goes on for so long, with ever other changes (`just fuzz-stable`).
fn replay(target: &str, run: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    let originals: Vec<Vec<u8>> = files.iter().map(|path| fs::read(path).unwrap()).collect();
    originals.iter().for_each(|original| run(original));
    let seconds = std::env::var("AERIE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let (mut seed, mut executions) = (1, 0);
    loop {
        for original in &originals {
            for _ in 0..CHANGES {
                let mut bytes = original.clone();
                for _ in 0..=random(&mut seed, 4) {
                    change(&mut bytes, &mut seed);
                }
                run(&bytes);
            }
            executions += CHANGES;
        }
        if end.is_none_or(|end| Instant::now() >= end) {
            break;
        }
    }
    println!("{target}: {executions} executions");
}

#[test]
fn shard_headers() {
    replay("shard_header", shard_header::run);
}

#[test]
fn manifest_rows() {
    replay("manifest_row", manifest_row::run);
}

#[test]
fn prompts() {
    replay("prompts_jsonl", prompts_jsonl::run);
}

#[test]
fn model_configurations() {
    replay("model_config", model_config::run);
}

#[test]
fn weight_indices() {
    replay("weights_index", weights_index::run);
}
