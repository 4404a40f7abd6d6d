//! The hostile inputs of `attacks/` on the real binaries: each is refused with the words of its
//! row, and nothing panics.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use aerie_tests::{Finished, extractor, root, small};

/// File and expected words of every row of a folder; every file of the folder has a row.
fn rows(folder: &str) -> Vec<(PathBuf, String)> {
    let attacks = root().join("attacks");
    let table = fs::read_to_string(attacks.join("README.md")).unwrap();
    let cell = |text: &str| text.trim().trim_matches('`').to_owned();
    let rows: Vec<(PathBuf, String)> = table
        .lines()
        .filter(|line| line.starts_with(&format!("| {folder}/")))
        .map(|line| line.split('|').map(cell).collect::<Vec<_>>())
        .map(|cells| (attacks.join(&cells[1]), cells[3].clone()))
        .collect();
    assert_eq!(rows.len(), fs::read_dir(attacks.join(folder)).unwrap().count(), "{folder}");
    rows
}

/// The bundled model in `dir/model` with one file replaced.
fn model_with(dir: &Path, file: &str, content: &[u8]) -> String {
    let to = dir.join("model");
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(small::model()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != file {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    fs::write(to.join(file), content).unwrap();
    to.to_str().unwrap().to_owned()
}

const GOOD: &str =
    r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello."}]}"#;

fn run(dir: &Path, model: &str, prompts: &[u8]) -> Finished {
    fs::write(dir.join("prompts.jsonl"), prompts).unwrap();
    let args = ["run", "--prompts", "prompts.jsonl", "--dataset", "ds", "--model", model];
    let run = extractor(dir, &args);
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    run
}

/// What the manifest says of the rejected lines.
fn rejects(dir: &Path) -> String {
    extractor(dir, &["query", "ds", "rejects", "--csv"]).expect_code(0).stdout
}

#[test]
fn every_hostile_line_is_a_reject_and_the_lines_around_it_are_not() {
    let model = small::model().to_str().unwrap().to_owned();
    for (path, expected) in rows("prompts") {
        let home = tempfile::tempdir().unwrap();
        let other = GOOD.replace("Hi", "Good day");
        let around =
            [format!("{GOOD}\n").as_bytes(), &fs::read(&path).unwrap(), other.as_bytes()].concat();
        let run = run(home.path(), &model, &around).expect_code(65);
        assert!(run.stderr.contains("1 of 3 lines were rejected"), "{}: {run:?}", path.display());
        let rejects = rejects(home.path());
        let found = |row: &str| row.contains(",2,") && row.contains(&expected);
        assert!(rejects.lines().any(found), "{}: {rejects}", path.display());
        assert_eq!(small::committed(&home.path().join("ds")), 2);
    }
}

#[test]
fn every_hostile_file_of_states_is_a_reject() {
    let model = small::model();
    for (path, expected) in rows("states") {
        let home = tempfile::tempdir().unwrap();
        let args = ["import", "--dataset", "ds", "--layers", "2,4,5,7", "--from"];
        let places = [path.to_str().unwrap(), "--model", model.to_str().unwrap()];
        let import = extractor(home.path(), &[&args[..], &places].concat()).expect_code(65);
        assert!(!import.stderr.contains("panicked"), "{}: {import:?}", path.display());
        let rejects = rejects(home.path());
        assert!(rejects.contains(&expected), "{}: {rejects}", path.display());
        assert_eq!(small::committed(&home.path().join("ds")), 0);
        assert!(!home.path().join("attacked").exists(), "{} was run", path.display());
    }
}

#[test]
fn every_hostile_template_is_stopped() {
    for (path, expected) in rows("templates") {
        let home = tempfile::tempdir().unwrap();
        let content = fs::read(&path).unwrap();
        let model = model_with(home.path(), "chat_template.jinja", &content);
        let run = run(home.path(), &model, GOOD.as_bytes());
        assert!(matches!(run.code, 65 | 78), "{}: {run:?}", path.display());
        let said = match home.path().join("ds/manifest.sqlite").exists() {
            true => run.stderr + &rejects(home.path()),
            false => run.stderr,
        };
        assert!(said.contains(&expected), "{}: {said}", path.display());
        assert!(!said.contains("root:"), "{}: {said}", path.display());
    }
}

#[test]
fn every_hostile_part_of_a_model_is_refused_with_its_place() {
    for (folder, file) in [
        ("configs", "config.json"),
        ("tokenizers", "tiktoken.model"),
        ("weights", "model.safetensors.index.json"),
    ] {
        for (path, expected) in rows(folder) {
            let home = tempfile::tempdir().unwrap();
            let model = model_with(home.path(), file, &fs::read(&path).unwrap());
            let run = run(home.path(), &model, GOOD.as_bytes());
            assert!(matches!(run.code, 65 | 74 | 78), "{}: {run:?}", path.display());
            assert!(run.stderr.contains(&expected), "{}: {run:?}", path.display());
            // Nothing of the kind reaches a data set.
            assert_eq!(small::committed(&home.path().join("ds")), 0);
        }
    }
}
