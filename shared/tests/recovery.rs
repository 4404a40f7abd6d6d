//! A lost manifest is made again, damaged shards are set aside, finished data sets are sealed.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use shared::manifest::{Cell, Table};
use shared::repair::{damaged, repair};
use shared::*;
use support::*;

/// Seven samples in four shards, and a reject.
fn dataset(dir: &Path) -> Vec<CapturedSample> {
    let samples = samples(&spec(StateDtype::Bf16), 7);
    run(&DatasetDir::new(dir), &samples).unwrap();
    samples
}

fn rows(dir: &Path, sql: &str) -> Table {
    Manifest::open_read(dir).unwrap().query(sql).unwrap()
}

const SAMPLES: &str = "SELECT * FROM sample ORDER BY id";
const TENSORS: &str = "SELECT * FROM tensor ORDER BY sample, name";
const SHARDS: &str = "SELECT id, file, bytes, digest FROM shard ORDER BY id";
const SOURCES: &str = "SELECT * FROM source ORDER BY file, line";

fn lose_manifest(dir: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(dir.join(format!("manifest.sqlite{suffix}")));
    }
}

#[test]
fn a_lost_manifest_is_rebuilt_with_the_same_rows_and_the_next_run_finds_the_lines() {
    let dir = tempdir();
    let samples = dataset(dir.path());
    let all = [SAMPLES, TENSORS, SHARDS, SOURCES];
    let before = all.map(|sql| rows(dir.path(), sql));
    lose_manifest(dir.path());

    // A new manifest would take all shards for leftovers.
    let error = Manifest::open_for_write(dir.path(), &fingerprint(), &spec(StateDtype::Bf16));
    let error = error.unwrap_err();
    assert!(matches!(error, ManifestError::Lost { shards: 4, .. }), "{error}");
    assert!(error.to_string().contains("extractor rebuild"), "{error}");
    assert_eq!(fs::read_dir(dir.path().join("shards")).unwrap().count(), 4);

    let found = Manifest::rebuild(dir.path()).unwrap();
    assert_eq!((found.shards, found.samples, found.refused.len()), (4, 7, 0));
    assert_eq!([TENSORS, SHARDS].map(|sql| rows(dir.path(), sql)), before[1..3]);
    let marks = rows(dir.path(), "SELECT DISTINCT rebuilt FROM shard").rows;
    assert_eq!(marks, [[Cell::Integer(1)]]);
    assert!(audit(dir.path(), Verify::All).unwrap().clean());

    // Every line gives a sample that is there already; the first to do so is its line again.
    let manifest =
        Manifest::open_for_write(dir.path(), &fingerprint(), &spec(StateDtype::Bf16)).unwrap();
    manifest.register_input(&input(7)).unwrap();
    let again = |record: SourceRecord| match record.outcome {
        SourceOutcome::Committed(id) => {
            SourceRecord { outcome: SourceOutcome::Duplicate(id), ..record }
        }
        _ => record,
    };
    let lines: Vec<_> = committed(&samples, 1).into_iter().map(again).collect();
    manifest.record_sources(&lines).unwrap();
    drop(manifest);
    assert_eq!(all.map(|sql| rows(dir.path(), sql)), before);
    assert_eq!(audit(dir.path(), Verify::All).unwrap().findings, []);

    let error = Manifest::rebuild(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::NotLost(_)), "{error}");
}

/// A copy of the manifest put back that is older than the last two shards.
#[test]
fn a_manifest_older_than_its_shards_stops_the_next_run_and_nothing_is_lost() {
    let dir = tempdir();
    let samples = samples(&spec(StateDtype::Bf16), 7);
    let data_set = DatasetDir::new(dir.path());
    run(&data_set, &samples[..4]).unwrap();
    let old = fs::read(dir.path().join("manifest.sqlite")).unwrap();
    run(&data_set, &samples).unwrap();
    let before = rows(dir.path(), SHARDS);
    fs::write(dir.path().join("manifest.sqlite"), &old).unwrap();

    let found = audit(dir.path(), Verify::All).unwrap().findings;
    let older = |finding: &Finding| finding.kind == FindingKind::ManifestOlder;
    assert_eq!((found.len(), found.iter().all(older)), (2, true), "{found:?}");
    // Other settings change nothing about it: a manifest without samples would take them.
    for settings in [fingerprint(), fingerprint().with("target", "mistyped")] {
        let error = Manifest::open_for_write(dir.path(), &settings, &spec(StateDtype::Bf16));
        let error = error.unwrap_err();
        assert!(matches!(error, ManifestError::Older { shards: 2, .. }), "{error}");
        assert!(error.to_string().contains("extractor rebuild"), "{error}");
        assert_eq!(error.exit_code(), 65);
    }
    // Nor is anything mended or closed by what it says.
    let (settings, text) = (dir.path().join("settings.json"), "of the newest manifest");
    let right = fs::read(&settings).unwrap();
    fs::write(&settings, text).unwrap();
    let error = Manifest::open_existing(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::Older { shards: 2, .. }), "{error}");
    assert_eq!(fs::read_to_string(&settings).unwrap(), text);
    fs::write(&settings, right).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("shards")).unwrap().count(), 4);

    lose_manifest(dir.path());
    let found = Manifest::rebuild(dir.path()).unwrap();
    assert_eq!((found.shards, found.samples, found.refused.len()), (4, 7, 0));
    run(&data_set, &samples).unwrap();
    assert_eq!(rows(dir.path(), SHARDS), before);
    assert!(audit(dir.path(), Verify::All).unwrap().clean());
}

/// Written by a version that kept no account beside the manifest.
#[test]
fn without_an_account_of_what_was_committed_no_unknown_shard_is_taken_for_a_leftover() {
    let dir = tempdir();
    let samples = dataset(dir.path());
    let (data_set, account) = (DatasetDir::new(dir.path()), dir.path().join("COMMITTED"));
    fs::remove_file(&account).unwrap();
    run(&data_set, &samples).unwrap();
    assert_eq!(fs::read_to_string(&account).unwrap(), "4\n");
    for damage in [None, Some("four"), Some("")] {
        match damage {
            None => fs::remove_file(&account).unwrap(),
            Some(text) => fs::write(&account, text).unwrap(),
        }
        seal(dir.path(), ShardId(4), &spec(StateDtype::Bf16), &samples[..1]);
        let error = run(&data_set, &samples).unwrap_err();
        assert!(error.to_string().contains("shard-000004.safetensors"), "{error}");
        fs::remove_file(dir.path().join("shards/shard-000004.safetensors")).unwrap();
    }
}

/// What a crash between sealing and commit leaves, also under the number of a shard that a repair
/// has set aside.
#[test]
fn an_uncommitted_shard_is_set_aside_and_its_lines_are_extracted_again() {
    let dir = tempdir();
    let samples = dataset(dir.path());
    let data_set = DatasetDir::new(dir.path());
    repair(dir.path(), &BTreeSet::from([ShardId(3)])).unwrap();
    drop(Manifest::open_for_write(dir.path(), &fingerprint(), &spec(StateDtype::Bf16)).unwrap());
    seal(dir.path(), ShardId(3), &spec(StateDtype::Bf16), &samples[6..]);
    let kinds: Vec<_> =
        audit(dir.path(), Verify::All).unwrap().findings.iter().map(|it| it.kind).collect();
    assert_eq!(kinds, [FindingKind::Orphan]);
    run(&data_set, &samples).unwrap();
    let report = audit(dir.path(), Verify::All).unwrap();
    assert_eq!((report.findings, report.samples), (vec![], 7));
    assert_eq!(fs::read_dir(dir.path().join("quarantine")).unwrap().count(), 2);
}

#[test]
fn a_rebuild_under_settings_that_the_shards_do_not_have_changes_nothing() {
    let dir = tempdir();
    dataset(dir.path());
    lose_manifest(dir.path());
    let path = dir.path().join("settings.json");
    let right = fs::read_to_string(&path).unwrap();
    for (from, to, words) in [
        ("alpha", "beta", "fingerprint: expected b215e576"),
        ("\"hidden_size\": 6", "\"hidden_size\": 7", "hidden_size: expected 6, came 7"),
        ("bf16", "fp8", "state dtype: expected bf16, came fp8"),
    ] {
        assert!(right.contains(from), "{right}");
        fs::write(&path, right.replace(from, to)).unwrap();
        let error = Manifest::rebuild(dir.path()).unwrap_err();
        assert!(matches!(error, ManifestError::OtherSettings { others: 4, shards: 4, .. }));
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.exit_code(), 65);
    }
    assert!(!dir.path().join("quarantine").exists());
    fs::write(&path, right).unwrap();
    let found = Manifest::rebuild(dir.path()).unwrap();
    assert_eq!((found.shards, found.samples, found.refused.len()), (4, 7, 0));
}

/// Damage is a reason to set a shard aside; once it is mended the shard can be taken in again.
#[test]
fn what_a_rebuild_has_set_aside_is_taken_in_by_the_next_once_it_is_moved_back() {
    let dir = tempdir();
    dataset(dir.path());
    lose_manifest(dir.path());
    let name = ShardId(1).file_name();
    let (place, aside) =
        (dir.path().join("shards").join(&name), dir.path().join("quarantine").join(&name));
    let bytes = fs::read(&place).unwrap();
    fs::write(&place, &bytes[..bytes.len() - 3]).unwrap();
    assert_eq!(Manifest::rebuild(dir.path()).unwrap().refused.len(), 1);
    assert!(aside.is_file());
    fs::remove_file(aside).unwrap();
    fs::write(&place, bytes).unwrap();
    lose_manifest(dir.path());
    let found = Manifest::rebuild(dir.path()).unwrap();
    assert_eq!((found.shards, found.samples, found.refused.len()), (4, 7, 0));
}

#[test]
fn a_rebuild_sets_aside_what_is_no_shard_of_the_data_set() {
    let dir = tempdir();
    dataset(dir.path());
    lose_manifest(dir.path());
    let shard = |id: u32| dir.path().join("shards").join(ShardId(id).file_name());
    // One damaged, one that holds the samples of another.
    let mut bytes = fs::read(shard(1)).unwrap();
    let middle = bytes.len() - 9;
    bytes[middle] = 0xff;
    bytes[middle + 1] = 0xff;
    bytes.truncate(bytes.len() - 3);
    fs::write(shard(1), bytes).unwrap();
    fs::copy(shard(0), shard(9)).unwrap();
    let found = Manifest::rebuild(dir.path()).unwrap();
    let names: Vec<&str> = found.refused.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["shard-000001.safetensors", "shard-000009.safetensors"]);
    assert_eq!((found.shards, found.samples), (3, 5));
    assert_eq!(fs::read_dir(dir.path().join("quarantine")).unwrap().count(), 2);
    assert!(audit(dir.path(), Verify::All).unwrap().clean());
}

#[test]
fn without_the_copy_of_the_settings_a_rebuild_is_refused() {
    let dir = tempdir();
    dataset(dir.path());
    lose_manifest(dir.path());
    fs::remove_file(dir.path().join("settings.json")).unwrap();
    let error = Manifest::rebuild(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::NoSettings(_)), "{error}");
    assert_eq!(error.exit_code(), 65);
    fs::write(dir.path().join("settings.json"), "{}").unwrap();
    assert_eq!(Manifest::rebuild(dir.path()).unwrap_err().exit_code(), 65);
}

#[test]
fn damaged_shards_are_set_aside_and_their_lines_extracted_again() {
    for fault in ["flipped", "cut", "missing", "swapped"] {
        let dir = tempdir();
        let samples = dataset(dir.path());
        let before = rows(dir.path(), SHARDS);
        let shard = |id: u32| dir.path().join("shards").join(ShardId(id).file_name());
        let mut bytes = fs::read(shard(1)).unwrap();
        let end = bytes.len() - 1;
        bytes[end] ^= 1;
        match fault {
            "flipped" => fs::write(shard(1), &bytes).unwrap(),
            "cut" => fs::write(shard(1), &bytes[..end]).unwrap(),
            "missing" => fs::remove_file(shard(1)).unwrap(),
            _ => drop(fs::copy(shard(0), shard(1)).unwrap()),
        }
        let report = audit(dir.path(), Verify::All).unwrap();
        // Of two shards with the same samples, the one whose digest is right stays.
        let shards = damaged(&report);
        assert_eq!(shards, BTreeSet::from([ShardId(1)]), "{fault}: {:?}", report.findings);
        let done = repair(dir.path(), &shards).unwrap();
        assert_eq!(done.samples, 2);
        let report = audit(dir.path(), Verify::All).unwrap();
        assert_eq!(report.findings, [], "{fault}");
        assert_eq!((report.samples, report.conservation.pending), (5, 2));
        let kept = dir.path().join("quarantine").join(ShardId(1).file_name());
        assert_eq!(kept.exists(), fault != "missing");

        run(&DatasetDir::new(dir.path()), &samples).unwrap();
        let report = audit(dir.path(), Verify::All).unwrap();
        assert_eq!(report.findings, [], "{fault}");
        assert_eq!((report.samples, report.conservation.pending), (7, 0));
        assert_eq!(rows(dir.path(), SHARDS).rows.len(), before.rows.len());
    }
}

#[test]
fn a_second_quarantine_of_the_same_name_replaces_nothing() {
    let dir = tempdir();
    let samples = dataset(dir.path());
    for round in 1..=3 {
        repair(dir.path(), &BTreeSet::from([ShardId(3)])).unwrap();
        run(&DatasetDir::new(dir.path()), &samples).unwrap();
        assert_eq!(fs::read_dir(dir.path().join("quarantine")).unwrap().count(), round);
    }
    assert_eq!(audit(dir.path(), Verify::All).unwrap().findings, []);
}

#[test]
fn a_sealed_data_set_is_one_file_without_a_log_that_nobody_writes() {
    let dir = tempdir();
    let samples = dataset(dir.path());
    let before = rows(dir.path(), SAMPLES);
    Manifest::seal(dir.path()).unwrap();
    Manifest::seal(dir.path()).unwrap();
    let manifest = fs::read(dir.path().join("manifest.sqlite")).unwrap();
    // Bytes 18 and 19 of SQLite's header: 1 is a rollback journal, 2 the write-ahead log.
    assert_eq!(manifest[18..20], [1, 1]);
    assert!(!dir.path().join("manifest.sqlite-wal").exists());
    let error = run(&DatasetDir::new(dir.path()), &samples).unwrap_err();
    let error = error.downcast_ref::<ManifestError>().unwrap();
    assert!(matches!(error, ManifestError::Sealed(_)), "{error}");
    assert_eq!(fs::read(dir.path().join("manifest.sqlite")).unwrap(), manifest);
    assert_eq!(rows(dir.path(), SAMPLES), before);
    assert_eq!(audit(dir.path(), Verify::All).unwrap().findings, []);
}

#[test]
fn deaths_of_the_target_are_counted_by_sample() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let ids: Vec<SampleId> = samples(&spec, 3).iter().map(|it| it.sample().id()).collect();
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.record_failure(&ids[..2], "first").unwrap();
    manifest.record_failure(&ids[1..], "second").unwrap();
    let failures = manifest.failures().unwrap();
    let count = |at: usize| (failures[&ids[at]].count, failures[&ids[at]].error.as_str());
    assert_eq!([count(0), count(1), count(2)], [(1, "first"), (2, "second"), (1, "second")]);
}
