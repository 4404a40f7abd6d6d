//! Holds the budgets of CONTRIBUTING.md. Function length and parameter counts are clippy's
//! (clippy.toml); what clippy cannot see is here.

#![allow(clippy::expect_used, reason = "a failed test may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use aerie_tests::root;

const MAX_FILE_LINES: usize = 500;
const MAX_COLUMNS: usize = 100;
const MAX_CFG_FEATURE_LINES: usize = 5;
const MAX_REPOSITORY_BYTES: u64 = 30 << 20;

/// Files git knows or would add.
fn repository_files() -> Vec<PathBuf> {
    let listing = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git is needed to list the files");
    assert!(listing.status.success(), "git ls-files did not pass");
    let names = String::from_utf8(listing.stdout).expect("file names are UTF-8");
    names.lines().map(|name| root().join(name)).filter(|path| path.is_file()).collect()
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e))
}

fn sources() -> Vec<(PathBuf, String)> {
    let files = repository_files().into_iter().filter(|p| has_extension(p, &["rs", "cu", "cuh"]));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("sources are UTF-8");
        (path, text)
    };
    let sources: Vec<_> = files.map(read).collect();
    assert!(sources.len() > 20, "found only {} sources: the listing is wrong", sources.len());
    sources
}

fn report(offences: &[String]) {
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
}

#[test]
fn files_stay_within_the_line_and_column_budgets() {
    let mut offences = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().count();
        if lines > MAX_FILE_LINES {
            offences.push(format!("{}: {lines} lines, at most {MAX_FILE_LINES}", path.display()));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > MAX_COLUMNS {
                offences.push(format!("{}:{}: over {MAX_COLUMNS}", path.display(), number + 1));
            }
        }
    }
    report(&offences);
}

#[test]
fn every_source_says_what_it_is() {
    let starts = |text: &str| text.starts_with("//!") || text.starts_with("// ");
    let offences: Vec<String> = sources()
        .into_iter()
        .filter(|(_, text)| !starts(text))
        .map(|(path, _)| format!("{}: no comment at the head of the file", path.display()))
        .collect();
    report(&offences);
}

#[test]
fn no_file_has_a_name_that_says_nothing() {
    let empty_names = ["util", "utils", "helper", "helpers", "common", "misc"];
    let offences: Vec<String> = sources()
        .into_iter()
        .filter(|(path, _)| {
            let mut parts = path.iter().filter_map(|part| Path::new(part).file_stem()?.to_str());
            parts.any(|part| empty_names.contains(&part))
        })
        .map(|(path, _)| format!("{}: name it after its subject", path.display()))
        .collect();
    report(&offences);
}

#[test]
fn features_do_not_fork_the_code() {
    // Assembled at run time so that this file does not count itself.
    let needle = format!("{}(feature", "cfg");
    let count: usize = sources()
        .iter()
        .map(|(_, text)| text.lines().filter(|l| l.contains(&needle)).count())
        .sum();
    assert!(count <= MAX_CFG_FEATURE_LINES, "{count} lines with {needle}");
}

#[test]
fn unsafe_code_stays_where_it_is_allowed() {
    let allowed =
        ["kernels/", "extractor/src/target/weights/mapped.rs", "extractor/src/target/cuda/"];
    let keywords = ["{", "impl", "fn", "extern"].map(|after| format!("{} {after}", "unsafe"));
    let offences: Vec<String> = sources()
        .into_iter()
        .filter(|(path, text)| {
            let path = path.strip_prefix(root()).unwrap();
            let name = path.to_string_lossy().replace('\\', "/");
            keywords.iter().any(|it| text.contains(it))
                && !allowed.iter().any(|place| name.starts_with(place))
        })
        .map(|(path, _)| format!("{}: unsafe code outside kernels and mapping", path.display()))
        .collect();
    report(&offences);
}

/// Deadlines and order that followed the clock on the wall would follow its jumps.
#[test]
fn only_labels_are_taken_from_the_clock_on_the_wall() {
    let clock = ["System", "Time"].concat();
    let offences: Vec<String> = sources()
        .into_iter()
        .filter(|(path, text)| text.contains(&clock) && !path.ends_with("shared/src/provenance.rs"))
        .map(|(path, _)| format!("{}: take the monotonic clock, Instant", path.display()))
        .collect();
    report(&offences);
}

#[test]
fn nothing_unfinished_is_left_in_the_code() {
    let marks = ["todo", "unimplemented", "dbg"].map(|name| format!("{name}!("));
    let ignore = format!("#[{}]", "ignore");
    let mut offences = Vec::new();
    for (path, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) || line.contains(&ignore) {
                offences.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    report(&offences);
}

#[test]
fn the_repository_stays_small() {
    let bytes: u64 =
        repository_files().iter().filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum();
    assert!(bytes < MAX_REPOSITORY_BYTES, "{bytes} bytes, at most {MAX_REPOSITORY_BYTES}");
}
