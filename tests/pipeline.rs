//! The whole way on the real binaries: conversations -> states and manifest -> draft head ->
//! acceptance -> export, small enough for every test run.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::path::Path;

use aerie_tests::{extractor, root, trainer};
use serde_json::Value;

/// Writes the first `lines` bundled conversations to `dir/prompts.jsonl`.
fn prompts(dir: &Path, lines: usize) -> String {
    let bundled = fs::read_to_string(root().join("data/prompts.jsonl")).unwrap();
    let chosen: Vec<&str> = bundled.lines().take(lines).collect();
    let path = dir.join("prompts.jsonl");
    fs::write(&path, chosen.join("\n") + "\n").unwrap();
    path.to_str().unwrap().to_owned()
}

fn model() -> String {
    root().join("models/nano-kimi").to_str().unwrap().to_owned()
}

fn extract(dir: &Path, prompts: &str, more: &[&str]) -> Value {
    let model = model();
    let mut args =
        vec!["run", "--model", &model, "--prompts", prompts, "--dataset", "ds", "--json"];
    args.extend(["--max-tokens", "256", "--batch-tokens", "1024", "--shard-bytes", "2000000"]);
    args.extend(more);
    serde_json::from_str(&extractor(dir, &args).expect_code(0).stdout).unwrap()
}

#[test]
fn conversations_become_a_draft_that_both_engines_load() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompts = prompts(dir, 40);
    let report = extract(dir, &prompts, &["--tp", "2"]);
    assert_eq!(report["written"]["samples"], 40);
    assert_eq!(report["conservation"]["committed"], 40);
    assert!(report["written"]["shards"].as_u64().unwrap() > 1, "{report}");

    extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(0);

    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--held-out", "0.2", "--json"];
    let short = [
        "--epochs",
        "3",
        "--max-steps",
        "12",
        "--lr",
        "0.003",
        "--ttt-steps",
        "3",
        "--max-tokens",
        "512",
    ];
    let report: Value =
        serde_json::from_str(&trainer(dir, &[&fit[..], &short].concat()).expect_code(0).stdout)
            .unwrap();
    assert_eq!(report["steps"], 12);
    let metrics = fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap();
    let losses: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter_map(|record| record["train/loss"].as_f64())
        .collect();
    assert!(losses.last() < losses.first(), "the loss does not fall: {losses:?}");

    let evaluate = ["evaluate", "--draft", "run", "--dataset", "ds", "--json"];
    let forced: Value =
        serde_json::from_str(&trainer(dir, &evaluate).expect_code(0).stdout).unwrap();
    assert!(forced["samples"].as_u64().unwrap() > 0, "{forced}");

    let held_out = root().join("data/held_out.jsonl");
    let model = model();
    let live = ["--live", "--model", &model, "--prompts", held_out.to_str().unwrap()];
    let small = ["--limit", "2", "--max-new-tokens", "12", "--json"];
    let live = [&["evaluate", "--draft", "run"][..], &live, &small].concat();
    let live: Value = serde_json::from_str(&trainer(dir, &live).expect_code(0).stdout).unwrap();
    assert_eq!(live["lossless"], true, "{live}");

    for layout in ["llama", "speculators"] {
        let export = ["export", "run", layout, "--layout", layout, "--target-name", &model];
        trainer(dir, &export).expect_code(0);
        let config: Value =
            serde_json::from_slice(&fs::read(dir.join(layout).join("config.json")).unwrap())
                .unwrap();
        assert_eq!(config["eagle_aux_hidden_state_layer_ids"], serde_json::json!([3, 5, 6]));
        assert!(dir.join(layout).join("model.safetensors").is_file());
    }
}

#[test]
fn a_batch_larger_than_a_shard_goes_into_several() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (prompts, model, limit) = (prompts(dir, 12), model(), 400_000);
    let args = ["run", "--model", &model, "--prompts", &prompts, "--dataset", "ds"];
    let sizes = ["--max-tokens", "256", "--batch-tokens", "100000", "--shard-bytes"];
    extractor(dir, &[&args[..], &sizes, &[&limit.to_string()]].concat()).expect_code(0);
    let shards = extractor(dir, &["query", "ds", "shards", "--json"]).expect_code(0).stdout;
    // A shard is sealed a quarter above the wanted size; then it holds part of one more sample:
    // 256 tokens of four layers of 128 values in bf16, its ids and mask, and its header.
    let most = limit + limit / 4 + 256 * (4 * 128 * 2 + 5) + 10_000;
    let bytes: Vec<u64> = shards
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["bytes"].as_u64().unwrap())
        .collect();
    assert!(bytes.len() > 2 && bytes.iter().all(|&bytes| bytes < most), "{bytes:?}");
    extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(0);
}

#[test]
fn a_second_run_does_only_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompts = prompts(dir, 12);
    let first = extract(dir, &prompts, &["--limit", "7"]);
    assert_eq!(first["conservation"]["committed"], 7);
    assert_eq!(first["conservation"]["pending"], 5);
    let second = extract(dir, &prompts, &[]);
    assert_eq!(second["written"]["samples"], 5);
    assert_eq!(second["conservation"]["pending"], 0);
    let third = extract(dir, &prompts, &[]);
    assert_eq!(third["written"]["samples"], 0);
    extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(0);
}

#[test]
fn other_settings_are_refused_with_both_values() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompts = prompts(dir, 3);
    extract(dir, &prompts, &[]);
    let model = model();
    let args = ["run", "--model", &model, "--prompts", &prompts, "--dataset", "ds"];
    let refused =
        extractor(dir, &[&args[..], &["--layers", "1,7", "--max-tokens", "256"]].concat());
    let refused = refused.expect_code(78);
    assert!(refused.stderr.contains("2,4,5,7") && refused.stderr.contains("1,7"), "{refused:?}");
    extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(0);
}

#[test]
fn every_rank_and_every_stage_is_in_one_shape_log() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompts = prompts(dir, 2);
    let model = model();
    let args = ["run", "--model", &model, "--prompts", &prompts, "--dataset", "ds", "--tp", "4"];
    let log = extractor(dir, &[&args[..], &["--trace", "shapes"]].concat()).expect_code(0).stderr;
    for stage in ["captured", "gathered", "sliced", "written"] {
        assert!(log.contains(&format!("stage=\"{stage}\"")), "no line of stage {stage} in:\n{log}");
    }
    for rank in 0..4 {
        assert!(log.contains(&format!("rank={rank}")), "no line of rank {rank} in:\n{log}");
    }
}

#[test]
fn states_in_fp8_say_what_they_have_cost_and_are_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompts = prompts(dir, 12);
    extract(dir, &prompts, &["--dtype", "fp8"]);
    let audit = extractor(dir, &["audit", "ds", "--verify", "all", "--json"]).expect_code(0);
    let report: Value = serde_json::from_str(&audit.stdout).unwrap();
    let errors = report["storage_errors"].as_array().unwrap();
    let layers: Vec<_> = errors.iter().map(|error| error["layer"].as_u64().unwrap()).collect();
    assert_eq!(layers, [2, 4, 5, 7]);
    for error in errors {
        // Three mantissa bits: half a step is 1/16 of a value at most, and a third of that on
        // average.
        let (mean, worst) = (error["error"].as_f64().unwrap(), error["worst"].as_f64().unwrap());
        assert!((0.01..0.04).contains(&mean) && worst >= mean && worst < 0.0625, "{error}");
        assert_eq!(error["samples"], 12);
    }
    let words = extractor(dir, &["audit", "ds"]).expect_code(0).stdout;
    assert!(words.contains("layer 7: stored within 0.0"), "{words}");
    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--held-out", "0.2", "--json"];
    let short = ["--max-steps", "3", "--ttt-steps", "2", "--lr", "0.003", "--max-tokens", "512"];
    let fit = trainer(dir, &[&fit[..], &short].concat()).expect_code(0);
    let report: Value = serde_json::from_str(&fit.stdout).unwrap();
    assert_eq!(report["steps"], 3);
    // In bf16 there is nothing to report.
    let places = ["run", "--prompts", &prompts, "--dataset", "plain", "--model", &model()];
    extractor(dir, &[&places[..], &["--limit", "3"]].concat()).expect_code(0);
    let words = extractor(dir, &["audit", "plain"]).expect_code(0).stdout;
    assert!(!words.contains("stored within"), "{words}");
}
