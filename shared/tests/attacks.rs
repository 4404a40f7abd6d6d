//! The hostile shards and manifests of `attacks/`: each is refused with the words of its row.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use shared::*;
use support::*;

fn attacks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../attacks")
}

/// File and expected words of every row of a folder; every file of the folder has a row.
fn rows(folder: &str) -> Vec<(PathBuf, String)> {
    let table = fs::read_to_string(attacks().join("README.md")).unwrap();
    let cell = |text: &str| text.trim().trim_matches('`').to_owned();
    let rows: Vec<(PathBuf, String)> = table
        .lines()
        .filter(|line| line.starts_with(&format!("| {folder}/")))
        .map(|line| line.split('|').map(cell).collect::<Vec<_>>())
        .map(|cells| (attacks().join(&cells[1]), cells[3].clone()))
        .collect();
    assert_eq!(rows.len(), fs::read_dir(attacks().join(folder)).unwrap().count(), "{folder}");
    rows
}

#[test]
fn every_hostile_shard_is_refused() {
    for (path, expected) in rows("shards") {
        let error = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap_err();
        let said = words(&error);
        assert!(said.contains(&expected), "{}: {said}", path.display());
        assert_eq!(error.exit_code(), 65, "{said}");
    }
}

#[test]
fn every_hostile_manifest_is_refused() {
    for (path, expected) in rows("manifests") {
        let dir = tempdir();
        run(&DatasetDir::new(dir.path()), &samples(&spec(StateDtype::Bf16), 5)).unwrap();
        tamper(dir.path(), fs::read_to_string(&path).unwrap());
        let said = match audit(dir.path(), Verify::All) {
            Err(error) => {
                assert_eq!(error.exit_code(), 65, "{}: {error}", path.display());
                words(&error)
            }
            Ok(report) => {
                assert!(!report.clean(), "{}", path.display());
                format!("{:?}", report.findings)
            }
        };
        assert!(said.contains(&expected), "{}: {said}", path.display());
    }
}
