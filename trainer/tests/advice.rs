//! The binary: what it says, and makes, of damage, of other targets and of data without rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use trainer::checkpoint::{Best, Checkpoint, Parts, RunDir};
use trainer::tensors::{HostTensor, TensorFile};

fn trainer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainer")).args(args).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What it says with this exit code.
#[track_caller]
fn says(args: &[&str], code: i32) -> String {
    let output = trainer(args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned() + &errors
}

/// A data set `data` and a run `run` of three steps, each with its checkpoint, in a folder.
fn trained(dir: &Path, more: &[&str]) -> (std::path::PathBuf, RunDir) {
    let (data, run) = (dir.join("data"), dir.join("run"));
    support::dataset(&data, 40);
    let settings = "fit --max-tokens 96 --ttt-steps 3 --max-steps 3 --checkpoint-every 1 \
                    --keep-last 9 --held-out 0.2 --warmup-steps 1";
    let places = ["--dataset", text(&data), "--run-dir", text(&run)];
    let args: Vec<&str> = settings.split_whitespace().chain(places).chain(more.to_vec()).collect();
    says(&args, 0);
    (data, RunDir::new(run))
}

#[test]
fn beside_a_damaged_best_checkpoint_a_sound_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run) = trained(dir.path(), &["--draft-vocab-size", "44"]);
    // The first one is the best.
    let newest = run.checkpoint(3);
    let mut kept = Checkpoint::load(&newest, Parts::Everything).unwrap();
    kept.state.best = Some(Best { step: 1, acceptance_length: 9.0 });
    std::fs::remove_dir_all(&newest).unwrap();
    kept.save(&run).unwrap();
    std::fs::write(run.checkpoint(1).join("weights.safetensors"), "damaged").unwrap();
    let (root, out) = (text(run.root()), dir.path().join("out"));
    let evaluate = |draft: &str, code| says(&["evaluate", draft, "--dataset", text(&data)], code);
    for said in [evaluate(root, 65), says(&["export", root, text(&out)], 65)] {
        assert!(said.contains("step-00000001/weights.safetensors was changed"), "{said}");
        let advice = format!("{} is sound: name it in place of the run", newest.display());
        assert!(said.contains(&advice) && !said.contains("--allow-older"), "{said}");
    }
    evaluate(text(&newest), 0);
    // Where the newest one is damaged, nobody knows which is the best.
    std::fs::write(newest.join("state.json"), "{").unwrap();
    let said = evaluate(root, 65);
    assert!(said.contains("step-00000002 is sound"), "{said}");
    std::fs::remove_dir_all(run.checkpoint(2)).unwrap();
    assert!(evaluate(root, 65).contains("no other one of it is sound"));
}

#[test]
fn damaged_settings_of_a_run_are_no_settings_of_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let (_, run) = trained(dir.path(), &["--draft-vocab-size", "44"]);
    let path = run.checkpoint(3).join("config.toml");
    let sound = std::fs::read_to_string(&path).unwrap();
    // No TOML, and TOML that says something else.
    for damaged in ["[[[".to_owned(), sound.replace("warmup_steps = 1", "warmup_steps = 3")] {
        assert_ne!(damaged, sound);
        std::fs::write(&path, damaged).unwrap();
        let said = says(&["fit", "--resume", text(run.root())], 65);
        assert!(said.contains("config.toml was changed or damaged"), "{said}");
        assert!(said.contains("--allow-older sets it aside"), "{said}");
    }
    let said = says(&["fit", "--resume", text(run.root()), "--allow-older"], 0);
    assert!(said.contains("set aside"), "{said}");
    // Weights are read later, and the advice is the same.
    std::fs::write(run.checkpoint(3).join("weights.safetensors"), "damaged").unwrap();
    let said = says(&["fit", "--resume", text(run.root())], 65);
    assert!(said.contains("--allow-older sets it aside"), "{said}");
}

#[test]
fn embeddings_of_another_target_are_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run) = trained(dir.path(), &["--draft-vocab-size", "44"]);
    let other = dir.path().join("other");
    support::dataset_of("another", &other, 20);
    let head = other.join("target/head.safetensors");
    let mut file = TensorFile::read(&head).unwrap();
    let values: Vec<f32> = support::embeddings().iter().map(|value| value + 0.5).collect();
    let shape = [support::VOCAB, support::HIDDEN];
    file.tensors.insert("embed_tokens.weight".into(), HostTensor::bf16(&values, &shape));
    std::fs::write(&head, file.encode().unwrap()).unwrap();
    let export = |dataset: &Path, name: &str, code| {
        let out = dir.path().join(name);
        let flags = ["--engine", "vllm", "--with-embeddings", "--dataset", text(dataset)];
        let said = says(&[&["export", text(run.root()), text(&out)], &flags[..]].concat(), code);
        (said, out.exists())
    };
    assert!(export(&data, "right", 0).1);
    let (said, written) = export(&other, "wrong", 65);
    assert!(said.contains(text(&other)) && said.contains(text(&data)) && !written, "{said}");
}

#[test]
fn what_has_no_rows_is_not_measured() {
    let dir = tempfile::tempdir().unwrap();
    let (_, run) = trained(dir.path(), &["--draft-vocab-size", "44"]);
    let none = dir.path().join("none");
    support::dataset_without_rows(&none, 20, true);
    let evaluate = ["evaluate", text(run.root()), "--dataset", text(&none), "--all"];
    for more in [&[][..], &["--chain", "2"]] {
        let said = says(&[&evaluate[..], more].concat(), 65);
        assert!(said.contains("no rows were measured") && said.contains("20 samples"), "{said}");
        assert!(!said.contains("1.000"), "{said}");
    }
    let places = ["--dataset", text(&none), "--run-dir", text(dir.path())];
    let said = says(&[&["fit"], &places[..]].concat(), 65);
    assert!(said.contains("has a row that can be trained"), "{said}");
}

#[test]
fn settings_that_nothing_would_come_of_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 20);
    let fit = ["fit", "--dataset", text(&data), "--run-dir", text(&run), "--max-steps", "1"];
    for (more, words) in [
        (["--schedule", "step", "--lr-floor", "0.1"], "`train.lr_floor` is `0.1`"),
        (["--schedule", "constant", "--lr-floor", "0.1"], "only cosine and linear"),
        // Of all ids and of some.
        (["--force-tokens", "48", "--draft-vocab-size", "48"], "token id 48"),
        (["--force-tokens", "48", "--draft-vocab-size", "44"], "token id 48"),
    ] {
        let said = says(&[&fit[..], &more].concat(), 78);
        assert!(said.contains(words), "{said}");
    }
    says(&[&fit[..], &["--force-tokens", "47", "--draft-vocab-size", "48"]].concat(), 0);
}

#[test]
fn of_several_processes_the_first_one_prints_a_bench() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let args = "bench --hidden 16 --intermediate 16 --heads 1 --kv-heads 1 --head-dim 16 \
                --vocab 32 --draft-vocab 16 --tokens 8 --document 8 --steps 1 --repeat 1";
    let processes = ["0", "1"].map(|rank| {
        Command::new(env!("CARGO_BIN_EXE_trainer"))
            .args(args.split_whitespace())
            .envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", port.as_str())])
            .env("MASTER_ADDR", "127.0.0.1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let printed = processes.map(|process| {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    });
    assert!(printed[0].contains("products") && printed[1].is_empty(), "{printed:?}");
}
