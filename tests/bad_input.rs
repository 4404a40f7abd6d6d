//! Bad input on the real binaries: what was expected, what came, what to do; the right exit code;
//! nothing lost.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use aerie_tests::{Finished, extractor, root};

fn copy_model(into: &Path) -> PathBuf {
    let to = into.join("model");
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(root().join("models/nano-kimi")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

fn run(dir: &Path, model: &Path, prompts: &str, more: &[&str]) -> Finished {
    fs::write(dir.join("prompts.jsonl"), prompts).unwrap();
    let model = model.to_str().unwrap();
    let args = ["run", "--model", model, "--prompts", "prompts.jsonl", "--dataset", "ds"];
    extractor(dir, &[&args[..], more].concat())
}

fn bundled() -> PathBuf {
    root().join("models/nano-kimi")
}

const GOOD: &str =
    r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello."}]}"#;

#[test]
fn a_missing_weight_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_model(dir.path());
    fs::remove_file(model.join("model-00002-of-000002.safetensors")).unwrap();
    let failed = run(dir.path(), &model, GOOD, &[]);
    assert!(failed.stderr.contains("model-00002-of-000002.safetensors"), "{failed:?}");
    assert!(matches!(failed.code, 65 | 74), "{failed:?}");
}

#[test]
fn weights_of_another_shape_than_the_configuration_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_model(dir.path());
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    let wider = config.replace("\"intermediate_size\": 512", "\"intermediate_size\": 640");
    assert_ne!(config, wider);
    fs::write(&path, wider).unwrap();
    let failed = run(dir.path(), &model, GOOD, &[]).expect_code(65);
    assert!(failed.stderr.contains("640") && failed.stderr.contains("512"), "{failed:?}");
}

#[test]
fn a_truncated_weight_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_model(dir.path());
    let path = model.join("model-00001-of-000002.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    let failed = run(dir.path(), &model, GOOD, &[]).expect_code(65);
    assert!(failed.stderr.contains("model-00001-of-000002.safetensors"), "{failed:?}");
}

#[test]
fn an_unreadable_configuration_and_an_unknown_model_type_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_model(dir.path());
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, "{").unwrap();
    let failed = run(dir.path(), &model, GOOD, &[]);
    assert!(failed.code == 65 || failed.code == 78, "{failed:?}");
    assert!(failed.stderr.contains("config.json"), "{failed:?}");
    fs::write(&path, config.replace("\"kimi_k25\"", "\"gpt_neo\"")).unwrap();
    let failed = run(dir.path(), &model, GOOD, &[]);
    assert!(failed.stderr.contains("gpt_neo") && failed.stderr.contains("kimi_k25"), "{failed:?}");
}

#[test]
fn bad_lines_are_rejects_with_file_line_and_reason_and_the_rest_is_committed() {
    let dir = tempfile::tempdir().unwrap();
    let unknown_role = r#"{"messages":[{"role":"bot","content":"x"}]}"#;
    let out_of_vocab = r#"{"input_ids":[1,2,99999],"loss_mask":[0,1,1]}"#;
    let prompts = format!("{GOOD}\nnot json\n{unknown_role}\n{out_of_vocab}\n{GOOD}\n");
    let failed = run(dir.path(), &bundled(), &prompts, &[]).expect_code(65);
    assert!(failed.stderr.contains("3 of 5 lines were rejected"), "{failed:?}");
    let rejects = extractor(dir.path(), &["query", "ds", "rejects", "--csv"]).expect_code(0).stdout;
    for (line, reason) in [(2, "bad_json"), (3, "unknown_role"), (4, "id_out_of_vocab")] {
        let found = |row: &str| row.contains(&format!(",{line},")) && row.contains(reason);
        assert!(rejects.lines().any(found), "line {line} {reason} in:\n{rejects}");
    }
    let lax = run(dir.path(), &bundled(), &prompts, &["--reject-limit", "0.7"]).expect_code(0);
    assert!(lax.stdout.contains("5 lines = 1 committed + 1 duplicate + 3 rejected"), "{lax:?}");
    extractor(dir.path(), &["audit", "ds", "--verify", "all"]).expect_code(0);
    // The lines are to blame, so they are rejected again when they are asked for.
    for (flags, pending) in [(&[][..], 0), (&["--reason", "bad_json,unknown_role"][..], 2)] {
        let retry = extractor(dir.path(), &[&["retry", "ds"], flags].concat()).expect_code(0);
        assert!(retry.stdout.contains(&format!("{pending} rejects are pending")), "{retry:?}");
        assert!(retry.stdout.contains(&format!("+ {pending} pending")), "{retry:?}");
    }
    let again = run(dir.path(), &bundled(), &prompts, &["--reject-limit", "0.7"]).expect_code(0);
    assert!(again.stdout.contains("1 duplicate + 3 rejected"), "{again:?}");
    let unknown = extractor(dir.path(), &["retry", "ds", "--reason", "bad"]).expect_code(2);
    assert!(unknown.stderr.contains("out_of_memory"), "{unknown:?}");
}

#[test]
fn an_empty_and_a_missing_prompt_file_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let failed = run(dir.path(), &bundled(), "", &[]).expect_code(65);
    assert!(failed.stderr.contains("prompts.jsonl is empty"), "{failed:?}");
    let model = bundled();
    let args = ["run", "--prompts", "nowhere.jsonl", "--dataset", "ds", "--model"];
    let failed = extractor(dir.path(), &[&args[..], &[model.to_str().unwrap()]].concat());
    assert!(failed.expect_code(74).stderr.contains("nowhere.jsonl"));
}

#[test]
fn a_truncated_shard_is_named_by_the_audit() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &bundled(), GOOD, &[]).expect_code(0);
    let shard = dir.path().join("ds/shards/shard-000000.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    let failed = extractor(dir.path(), &["audit", "ds", "--verify", "all"]).expect_code(1);
    assert!(failed.stdout.contains("shard-000000.safetensors"), "{failed:?}");
}

#[test]
fn a_misspelt_key_and_a_head_count_that_does_not_divide_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("c.toml"), "[run]\nbatch_token = 3\n").unwrap();
    let failed = run(dir.path(), &bundled(), GOOD, &["--config", "c.toml"]).expect_code(78);
    assert!(failed.stderr.contains("batch_token"), "{failed:?}");
    let failed = run(dir.path(), &bundled(), GOOD, &["--tp", "3"]);
    assert_eq!(failed.code, 78);
    assert!(failed.stderr.contains("8 attention heads cannot be split over --tp 3"), "{failed:?}");
}

/// Values that have no place in a configuration are not left out of it.
#[test]
fn a_path_that_is_no_text_and_a_share_that_is_no_number_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let mut command = aerie_tests::command("extractor", dir.path(), &["config", "--prompts"]);
    let path = std::ffi::OsStr::from_bytes(b"p\xff.jsonl");
    let output = command.arg(path).args(["--dataset", "ds"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("must be UTF-8"), "{stderr}");
    let share = extractor(dir.path(), &["config", "--reject-limit", "nan"]).expect_code(2);
    assert!(share.stderr.contains("finite"), "{share:?}");
}

/// Nothing of a GPU is here, or may be used: said at once, with the exit code of a missing device.
#[test]
fn a_missing_gpu_is_said_and_not_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let model = bundled();
    let golden = root().join("tests/fixtures/golden/nano_kimi_int4.safetensors");
    let paths = [model.to_str().unwrap(), golden.to_str().unwrap()];
    for tp in ["1", "2"] {
        let args = ["check", "--model", paths[0], "--golden", paths[1], "--device", "cuda"];
        let args = [&args[..], &["--tp", tp]].concat();
        let mut command = aerie_tests::command("extractor", dir.path(), &args);
        // Hides the GPUs of a machine that has some.
        let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{stderr}");
        assert!(stderr.contains("libcuda") || stderr.contains("GPU"), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

#[test]
fn the_cpu_does_not_compute_in_bf16() {
    let dir = tempfile::tempdir().unwrap();
    let failed = run(dir.path(), &bundled(), GOOD, &["--compute", "bf16"]).expect_code(78);
    assert!(failed.stderr.contains("--compute"), "{failed:?}");
}
