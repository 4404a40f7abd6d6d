//! Data without rows to train or to measure: refused, or without effect.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use trainer::checkpoint::{Checkpoint, RunDir};
use trainer::config::{FitConfig, MaskMode};
use trainer::dataset::{DatasetError, ManifestDataset};
use trainer::fit::{self, FitError, FitReport, Session, Start};
use trainer::watch::Watch;
use trainer::world::World;

fn run(config: &FitConfig, start: Start) -> Result<FitReport, FitError> {
    let place = (&Default::default(), FloatDType::F32);
    let guards = (&Shutdown::default(), &Watch::default());
    fit::run::<Autodiff<Flex>>(config, (start, &World::alone()), place, guards)
}

#[test]
fn a_data_set_without_rows_is_refused_with_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset_without_rows(&data, 20, true);
    let mut config = support::config(&data, &dir.path().join("run"));
    // Where the draft has the whole vocabulary no tokens are counted; rows are looked at anyway.
    for draft_vocab_size in [Some(44), Some(48)] {
        config.draft.draft_vocab_size = draft_vocab_size;
        let error = run(&config, Start::Fresh).unwrap_err();
        let FitError::Dataset(DatasetError::NoRows { samples, tokens, .. }) = error else {
            panic!("{error}")
        };
        assert!(samples > 10 && tokens > 2 * samples, "{error}");
        assert_eq!(error.exit_code(), 65);
        let words = error.to_string();
        assert!(words.contains(&format!("{samples} samples")), "{words}");
        assert!(words.contains(&format!("{tokens} trained tokens")), "{words}");
    }
    // SpecForge's rule needs no neighbours.
    (config.train.mask_mode, config.train.max_steps) = (MaskMode::SpecForge, 1);
    assert_eq!(run(&config, Start::Fresh).unwrap().steps, 1);
}

/// Trained rows of each step.
fn rows_by_step(run_dir: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(RunDir::new(run_dir).metrics()).unwrap();
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    text.lines().map(|line| value(line)["train/rows"].as_u64().unwrap()).collect()
}

/// Both kinds of sample come first in the order of some share.
#[test]
fn held_out_samples_without_rows_are_not_measured() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset_without_rows(&data, 40, false);
    let dataset = ManifestDataset::open(&data).unwrap();
    let mut config = support::config(&data, &dir.path().join("run"));
    config.checkpoint.eval_samples = 1;
    let mut seen = [false; 2];
    for share in [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6] {
        config.data.held_out = share;
        let Some(&measured) = dataset.split(share).held_out.first() else { continue };
        let tokens = dataset.reader().read_tokens(measured).unwrap();
        let rows = tokens.loss_mask().windows(2).any(|pair| pair == [1, 1]);
        let place = (&Default::default(), FloatDType::F32);
        let session = Session::<Autodiff<Flex>>::open(&config, place).unwrap();
        assert_eq!(session.split.held_out.is_empty(), !rows, "{share}");
        seen[usize::from(rows)] = true;
    }
    assert_eq!(seen, [true; 2]);
}

/// Neither decay nor moments nor the average move anything, and a run that continues after such a
/// step ends with the same bits.
#[test]
fn a_step_without_rows_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    support::dataset_without_rows(&data, 24, false);
    let mut config = support::config(&data, &dir.path().join("straight"));
    // A sample is a step.
    (config.data.held_out, config.data.max_tokens) = (0.0, 1);
    (config.train.weight_decay, config.train.ema) = (0.1, 0.9);
    (config.checkpoint.checkpoint_every, config.checkpoint.keep_last) = (1, 100);
    let report = run(&config, Start::Fresh).unwrap();
    assert_eq!(report.steps, 24);
    let straight = RunDir::new(&config.checkpoint.run_dir);
    let rows = rows_by_step(straight.root());
    assert_eq!(rows.iter().filter(|&&rows| rows == 0).count(), 12);
    let bytes = |step: u64| {
        ["weights.safetensors", "optimizer.safetensors"]
            .map(|name| std::fs::read(straight.checkpoint(step).join(name)).unwrap())
    };
    for step in 2..=24 {
        let same = bytes(step) == bytes(step - 1);
        assert_eq!(same, rows[step as usize - 1] == 0, "step {step}");
    }
    let state = |step| Checkpoint::load_state(&straight.checkpoint(step)).unwrap();
    assert_eq!(state(24).updates, Some(12));

    let empty = 1 + rows.iter().position(|&rows| rows == 0).unwrap() as u64;
    config.checkpoint.run_dir = dir.path().join("continued");
    let kept = RunDir::new(&config.checkpoint.run_dir).checkpoint(empty);
    std::fs::create_dir_all(&kept).unwrap();
    for entry in std::fs::read_dir(straight.checkpoint(empty)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), kept.join(entry.file_name())).unwrap();
    }
    let continued = run(&config, Start::Resume).unwrap();
    assert_eq!(continued.new_steps, 24 - empty);
    for name in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
        let read = |dir: &Path| std::fs::read(dir.join(name)).unwrap();
        assert!(read(&continued.checkpoint) == read(&report.checkpoint), "{name}");
    }
}
