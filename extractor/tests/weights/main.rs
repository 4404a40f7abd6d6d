//! Reading of real and of made-up checkpoints, and every way in which one can be wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod faults;
mod formats;
mod packed;

use std::fs;
use std::path::{Path, PathBuf};

use extractor::target::weights::Checkpoint;
use safetensors::tensor::{Dtype, TensorView};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A tensor to be written: name, number format, shape, bytes.
type Stored<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn write(dir: &Path, file: &str, tensors: &[Stored<'_>]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.to_string(), TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    fs::write(dir.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn one_file(tensors: &[Stored<'_>]) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()
}

/// Reproducible numbers between -1 and 1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as f32) / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}
