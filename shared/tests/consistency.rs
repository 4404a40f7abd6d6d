//! Rows that contradict one another, the settings beside them or what a manifest can hold: the
//! audit names them without reading a shard. Sound data sets of every version are clean.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::path::Path;

use shared::manifest::InputFile;
use shared::*;
use support::*;

/// Five samples in two shards from lines 1 to 5, a reject, a blank line, and line 1 again.
fn dataset(dir: &Path, dtype: StateDtype) -> Vec<CapturedSample> {
    let spec = spec(dtype);
    let errors = || spec.layers.iter().map(|&layer| (layer, 0.03)).collect();
    let noted = |sample: CapturedSample| match dtype {
        StateDtype::Fp8 => sample.with_storage_errors(errors()),
        StateDtype::Bf16 => sample,
    };
    let samples: Vec<CapturedSample> = samples(&spec, 5).into_iter().map(noted).collect();
    let manifest = Manifest::open_for_write(dir, &fingerprint(), &spec).unwrap();
    let input = InputFile { blank: 1, ..input(7) };
    manifest.register_input(&input).unwrap();
    for (id, range, line) in [(0, 0..3, 1), (1, 3..5, 4)] {
        let sealed = seal(dir, ShardId(id), &spec, &samples[range.clone()]);
        manifest.commit_shard(&sealed, &committed(&samples[range], line)).unwrap();
    }
    let again = SourceOutcome::Duplicate(samples[0].sample().id());
    let again = SourceRecord { digest: [1; 16], ..source(8, again) };
    let reject = source(6, SourceOutcome::Rejected("overlong: 9 tokens".into()));
    manifest.record_sources(&[reject, again]).unwrap();
    samples
}

fn findings(dir: &Path) -> Vec<Finding> {
    audit(dir, Verify::None).unwrap().findings
}

#[test]
fn edited_rows_are_noticed_without_reading_a_shard() {
    for sql in [
        "UPDATE sample SET source_line = 9 WHERE source_line = 1",
        "UPDATE sample SET source_line = 6 - source_line",
        "UPDATE sample SET source_file = 'other.jsonl'",
        "UPDATE sample SET truncated = 2",
        "UPDATE source SET outcome = 'duplicate' WHERE line = 2",
        "UPDATE source SET outcome = 'lost' WHERE line = 2",
        "UPDATE source SET reason = 'overlong' WHERE line = 2",
        "UPDATE source SET digest = zeroblob(3) WHERE line = 2",
        "UPDATE source SET line = 9 WHERE line = 8",
        "UPDATE source SET line = 99 WHERE line = 1; UPDATE source SET line = 1 WHERE line = 8; \
         UPDATE source SET line = 8 WHERE line = 99",
        "UPDATE source SET sample = (SELECT id FROM sample WHERE source_line = 2) WHERE line = 8",
        "UPDATE source SET file = 'other.jsonl' WHERE line = 6",
        "UPDATE input SET lines = lines + 20",
        "UPDATE input SET blank = 9",
        "UPDATE input SET digest = zeroblob(3)",
        // Another input's pending line hides the excess from a sum over all of them.
        "INSERT INTO input VALUES ('other.jsonl', 1, 9, zeroblob(32), 0); \
         INSERT INTO source SELECT file, 7, zeroblob(16), outcome, sample, reason FROM source \
         WHERE line = 6",
        "UPDATE source SET reason = '' WHERE line = 6",
        "DELETE FROM tensor WHERE name LIKE '%.loss_mask'",
        "UPDATE tensor SET name = 'ff' || substr(name, 3)",
        "UPDATE tensor SET shape = '[9,6]' WHERE shape = '[3,6]'",
        "UPDATE tensor SET shape = '[' WHERE shape = '[3,6]'",
        "UPDATE tensor SET rms = 2 * absmax",
        "UPDATE tensor SET rms = NULL",
        "UPDATE storage_error SET error = 0.3",
        "UPDATE storage_error SET error = 9e999",
        "UPDATE storage_error SET layer = 2 WHERE layer = 1",
        "DELETE FROM storage_error WHERE layer = 3",
        "UPDATE dataset SET format_version = 9",
        "PRAGMA user_version = 3",
        "PRAGMA user_version = 0",
        "DROP TABLE run",
        "DROP INDEX source_committed",
        "DROP VIEW v_rejects; CREATE VIEW v_rejects AS SELECT 'none' AS file",
        "CREATE TRIGGER quiet AFTER INSERT ON sample BEGIN DELETE FROM source; END",
    ] {
        let dir = tempdir();
        dataset(dir.path(), StateDtype::Fp8);
        assert_eq!(findings(dir.path()), [], "before {sql}");
        tamper(dir.path(), sql);
        assert!(!audit(dir.path(), Verify::None).unwrap().clean(), "{sql}");
    }
}

#[test]
fn what_fp8_has_cost_is_not_of_states_that_were_stored_exactly() {
    let dir = tempdir();
    dataset(dir.path(), StateDtype::Bf16);
    assert_eq!(findings(dir.path()), []);
    tamper(dir.path(), "INSERT INTO storage_error SELECT id, 1, 0.01 FROM sample");
    assert!(!audit(dir.path(), Verify::None).unwrap().clean());
}

/// The same ids were imported twice, from other files and with other masks: a line is a file there.
#[test]
fn lines_of_imports_need_not_have_given_one_sample() {
    let dir = tempdir();
    dataset(dir.path(), StateDtype::Bf16);
    tamper(dir.path(), "UPDATE source SET digest = zeroblob(16) WHERE line < 6");
    let words = "lines of equal text";
    let found = |dir: &Path| findings(dir).iter().any(|it| it.detail.contains(words));
    assert!(found(dir.path()));
    let mut states = fingerprint();
    states.fields.insert("states".into(), "imported".into());
    let fields = serde_json::to_string(&states).unwrap();
    let digest = states.digest().to_string();
    let sql =
        format!("UPDATE dataset SET fingerprint = '{fields}', fingerprint_digest = x'{digest}'");
    tamper(dir.path(), sql);
    assert!(!found(dir.path()));
}

#[test]
fn settings_beside_the_manifest_are_those_in_it() {
    let dir = tempdir();
    dataset(dir.path(), StateDtype::Bf16);
    let path = dir.path().join("settings.json");
    let right = fs::read_to_string(&path).unwrap();
    let wrong = [
        (right.replace("alpha", "beta"), "template: stored `alpha`, now `beta`"),
        (right.replace("\"hidden_size\": 6", "\"hidden_size\": 7"), "stored `6`, now `7`"),
        ("{}".to_owned(), "is damaged"),
        (" ".repeat((1 << 20) + 1) + &right, "is damaged"),
    ];
    for (text, words) in wrong {
        fs::write(&path, text).unwrap();
        let found = findings(dir.path());
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].kind, FindingKind::SettingsDiffer);
        assert!(found[0].detail.contains(words), "{}", found[0].detail);
    }
    fs::remove_file(&path).unwrap();
    assert!(findings(dir.path())[0].detail.contains("is missing"));
    // Opening a FIFO would wait for its writer.
    for fifo in [&path, &dir.path().join("COMMITTED")] {
        let _ = fs::remove_file(fifo);
        let made = std::process::Command::new("mkfifo").arg(fifo).status().unwrap();
        assert!(made.success());
    }
    assert!(findings(dir.path())[0].detail.contains("no regular file"));
    fs::remove_file(dir.path().join("COMMITTED")).unwrap();
    fs::remove_file(&path).unwrap();
    // The next writer makes the copy again.
    drop(Manifest::open_for_write(dir.path(), &fingerprint(), &spec(StateDtype::Bf16)).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), right);
    assert_eq!(findings(dir.path()), []);
}

/// All but the last did not count blank lines, which line numbers count.
#[test]
fn sound_data_sets_of_earlier_versions_with_blank_lines_are_clean() {
    for version in 1..=4 {
        let dir = tempdir();
        dataset(dir.path(), StateDtype::Bf16);
        BACK.iter().take(5 - version).for_each(|&sql| tamper(dir.path(), sql));
        if version == 1 {
            // It wrote no copy of the settings either.
            fs::remove_file(dir.path().join("settings.json")).unwrap();
        }
        let report = audit(dir.path(), Verify::All).unwrap();
        assert_eq!(report.findings, [], "version {version}");
        assert_eq!(report.conservation.pending, 0);
        // Brought up by a writer that registers no input.
        Manifest::seal(dir.path()).unwrap();
        let report = audit(dir.path(), Verify::None).unwrap();
        let kinds: Vec<_> = report.findings.iter().map(|found| found.kind).collect();
        assert_eq!(kinds, [], "version {version}");
        assert_eq!(report.conservation.pending, 0);
    }
}

#[test]
fn an_outcome_beyond_its_input_is_noticed_in_earlier_versions_too() {
    let dir = tempdir();
    dataset(dir.path(), StateDtype::Bf16);
    BACK[..2].iter().for_each(|&sql| tamper(dir.path(), sql));
    tamper(dir.path(), "UPDATE input SET lines = 6");
    assert!(!audit(dir.path(), Verify::None).unwrap().clean());
}

/// The file is cut and whole again while another file repeats its line: the line that came back is
/// a duplicate's, and its sample has it as its own again.
#[test]
fn histories_of_cut_and_repeated_lines_are_clean() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = dataset(dir.path(), StateDtype::Bf16);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.register_input(&InputFile { file: "more.jsonl".into(), ..input(1) }).unwrap();
    let last = SourceOutcome::Duplicate(samples[4].sample().id());
    let more =
        SourceRecord { file: "more.jsonl".into(), digest: [5; 16], ..source(1, last.clone()) };
    manifest.record_sources(std::slice::from_ref(&more)).unwrap();
    manifest.register_input(&input(4)).unwrap();
    assert_eq!(findings(dir.path()), []);
    // Recorded once more: the sample has no line now, so this one is its own.
    manifest.record_sources(&[more]).unwrap();
    assert_eq!(findings(dir.path()), []);
    assert_eq!(
        manifest.sample(samples[4].sample().id()).unwrap().unwrap().source_file,
        "more.jsonl"
    );
    manifest.register_input(&input(5)).unwrap();
    manifest.record_sources(&[source(5, last)]).unwrap();
    assert_eq!(findings(dir.path()), []);
    let counts = manifest.conservation().unwrap();
    assert_eq!((counts.committed, counts.duplicate, counts.pending), (5, 1, 0));
}
