//! Damage and what can be done about it, on the real binaries: repair, rebuild, seal, and data that
//! training must not touch.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::path::Path;

use aerie_tests::{extractor, small, trainer};

/// A data set of several shards with rejects, a duplicate and a twin that nobody touches.
fn two_data_sets(dir: &Path) {
    small::write_prompts(dir, 24);
    small::run(dir, "ds").expect_code(0);
    small::run(dir, "twin").expect_code(0);
}

fn flip_last_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

fn rows(dir: &Path, dataset: &str, sql: &str) -> String {
    extractor(dir, &["query", dataset, "--json", "--sql", sql]).expect_code(0).stdout
}

const SOURCES: &str = "SELECT * FROM source ORDER BY file, line";
const SAMPLES: &str = "SELECT * FROM sample ORDER BY id";

#[test]
fn a_damaged_shard_is_refused_by_training_then_repaired_and_extracted_again() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    flip_last_byte(&dir.join("ds/shards/shard-000001.safetensors"));

    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "1"];
    let refused = trainer(dir, &fit).expect_code(65);
    assert!(refused.stderr.contains("shard-000001.safetensors: digest"), "{refused:?}");
    assert!(!dir.join("run/checkpoints/step-00000001").exists());

    extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(1);
    extractor(dir, &["audit", "ds", "--verify", "all", "--repair"]).expect_code(2);
    let repaired = ["audit", "ds", "--verify", "all", "--repair", "--yes"];
    let repaired = extractor(dir, &repaired).expect_code(0);
    assert!(!repaired.stdout.contains(" + 0 pending"), "{repaired:?}");
    assert!(dir.join("ds/quarantine/shard-000001.safetensors").is_file());
    small::run(dir, "ds").expect_code(0);
    small::assert_clean(dir, "ds");
    let ids = |dataset: &str| small::contents(&dir.join(dataset)).into_keys().collect::<Vec<_>>();
    assert_eq!(ids("ds"), ids("twin"));
    trainer(dir, &fit).expect_code(0);
}

#[test]
fn training_without_verification_is_possible_when_asked_for() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    // The lowest bit of one state: nothing but the digest can tell.
    let shard = dir.join("ds/shards/shard-000001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let state = (8 + header + bytes.len()) / 2 / 2 * 2;
    bytes[state] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "1", "--verify"];
    trainer(dir, &[&fit[..], &["first"]].concat()).expect_code(65);
    trainer(dir, &[&fit[..], &["never"]].concat()).expect_code(0);
    trainer(dir, &[&fit[..], &["sometimes"]].concat()).expect_code(78);
}

#[test]
fn a_lost_manifest_stops_the_next_run_and_is_rebuilt() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    for suffix in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(dir.join(format!("ds/manifest.sqlite{suffix}")));
    }
    let refused = small::run(dir, "ds").expect_code(65);
    assert!(refused.stderr.contains("extractor rebuild"), "{refused:?}");
    extractor(dir, &["rebuild", "ds"]).expect_code(0);
    extractor(dir, &["rebuild", "ds"]).expect_code(78);
    // No sample is extracted again; the lines find theirs.
    let again = extractor(dir, &small::run_args_with("ds", &["--limit", "100"])).expect_code(0);
    assert!(again.stdout.starts_with("0 samples"), "{again:?}");
    for sql in [SOURCES, SAMPLES] {
        assert_eq!(rows(dir, "ds", sql), rows(dir, "twin", sql));
    }
    small::assert_clean(dir, "ds");
    assert!(small::contents(&dir.join("ds")) == small::contents(&dir.join("twin")));
}

/// An old copy of the manifest is put back: nothing is taken for a leftover of a killed run.
#[test]
fn an_old_copy_of_the_manifest_stops_the_next_run_and_a_rebuild_has_every_sample() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    extractor(dir, &small::run_args_with("old", &["--limit", "8"])).expect_code(0);
    let shards = || fs::read_dir(dir.join("ds/shards")).unwrap().count();
    let before = shards();
    let manifest = dir.join("ds/manifest.sqlite");
    fs::copy(dir.join("old/manifest.sqlite"), &manifest).unwrap();
    let refused = small::run(dir, "ds").expect_code(65);
    assert!(refused.stderr.contains("older than the shards"), "{refused:?}");
    assert!(refused.stderr.contains("extractor rebuild"), "{refused:?}");
    let audit = extractor(dir, &["audit", "ds"]).expect_code(1);
    assert!(audit.stdout.contains("put the newest back"), "{audit:?}");
    assert_eq!(shards(), before);
    fs::rename(&manifest, dir.join("stale")).unwrap();
    extractor(dir, &["rebuild", "ds"]).expect_code(0);
    let again = extractor(dir, &small::run_args_with("ds", &["--limit", "100"])).expect_code(0);
    assert!(again.stdout.starts_with("0 samples"), "{again:?}");
    small::assert_clean(dir, "ds");
    assert!(small::contents(&dir.join("ds")) == small::contents(&dir.join("twin")));
}

#[test]
fn a_sealed_data_set_is_read_and_trained_on_but_not_written() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    extractor(dir, &["seal", "ds"]).expect_code(0);
    assert!(!dir.join("ds/manifest.sqlite-wal").exists());
    let refused = small::run(dir, "ds").expect_code(78);
    assert!(refused.stderr.contains("was sealed"), "{refused:?}");
    small::assert_clean(dir, "ds");
    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "1"];
    trainer(dir, &fit).expect_code(0);
}

#[test]
fn a_target_head_that_is_not_finite_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    let head = dir.join("ds/target/head.safetensors");
    fill(&head, |_| [0xc0, 0x7f]);
    // As a data set that was begun before its files had digests.
    fs::remove_file(dir.join("ds/target/BLAKE3SUMS")).unwrap();
    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "3"];
    let refused = trainer(dir, &fit).expect_code(65);
    assert!(refused.stderr.contains("not finite"), "{refused:?}");
}

/// A head with one other bit is a sound head of another teacher.
#[test]
fn a_changed_target_is_found_by_audit_training_and_the_next_run() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    flip_last_byte(&dir.join("ds/target/head.safetensors"));
    let audit = extractor(dir, &["audit", "ds", "--verify", "all"]).expect_code(1);
    assert!(audit.stdout.contains("head.safetensors is not as it was written"), "{audit:?}");
    let fit = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "1"];
    let refused = trainer(dir, &fit).expect_code(65);
    assert!(refused.stderr.contains("head.safetensors"), "{refused:?}");
    let refused = extractor(dir, &small::run_args("ds")).expect_code(65);
    assert!(refused.stderr.contains("remove that directory"), "{refused:?}");
    fs::remove_dir_all(dir.join("ds/target")).unwrap();
    extractor(dir, &small::run_args("ds")).expect_code(0);
    trainer(dir, &fit).expect_code(0);
    small::assert_clean(dir, "ds");
}

/// Replaces every 2-byte value behind the header.
fn fill(path: &Path, value: impl Fn([u8; 2]) -> [u8; 2]) {
    let mut bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for pair in bytes[8 + header..].chunks_exact_mut(2) {
        pair.copy_from_slice(&value([pair[0], pair[1]]));
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_loss_that_is_no_number_stops_training_and_leaves_the_good_checkpoint() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    let settings = "[data]\ndataset = \"ds\"\nheld_out = 0\nmax_tokens = 128\n\
        [draft]\nintermediate_size = 32\n[train]\nepochs = 9\nmax_steps = 9\nttt_steps = 2\n\
        lr = 1e30\nclip = 0\nwarmup_steps = 0\n\
        [checkpoint]\nrun_dir = \"run\"\ncheckpoint_every = 1\n";
    fs::write(dir.join("fit.toml"), settings).unwrap();
    let stopped = trainer(dir, &["fit", "--config", "fit.toml"]).expect_code(65);
    assert!(stopped.stderr.contains("finite") || stopped.stderr.contains("NaN"), "{stopped:?}");
    let mut steps: Vec<_> = fs::read_dir(dir.join("run/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    steps.sort();
    assert!(!steps.is_empty() && steps.iter().all(|name| name.starts_with("step-")), "{steps:?}");
    // The step that blew up is not among them, and the newest still has its digests.
    let metrics = fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap();
    assert_eq!(*steps.last().unwrap(), format!("step-{:08}", metrics.lines().count()));
}

/// What each kind of damage to the newest checkpoint comes to, with and without `--allow-older`.
#[test]
fn training_goes_on_from_an_older_checkpoint_only_when_allowed_to() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    let settings = "[data]\ndataset = \"ds\"\nheld_out = 0\nmax_tokens = 128\n\
        [draft]\nintermediate_size = 32\n[train]\nepochs = 9\nmax_steps = 4\nttt_steps = 2\n\
        [checkpoint]\nrun_dir = \"run\"\ncheckpoint_every = 1\nkeep_last = 9\n";
    fs::write(dir.join("fit.toml"), settings).unwrap();
    trainer(dir, &["fit", "--config", "fit.toml"]).expect_code(0);
    let step = |n: u32| dir.join(format!("run/checkpoints/step-{n:08}"));
    let read = |name: &str| fs::read(step(4).join(name)).unwrap();
    let good = [read("weights.safetensors"), read("optimizer.safetensors"), read("state.json")];
    let resume = |more: &[&str]| trainer(dir, &[&["fit", "--resume", "run"], more].concat());

    let damages: [(&str, &dyn Fn()); 5] = [
        ("flipped bit", &|| flip_last_byte(&step(4).join("weights.safetensors"))),
        ("missing file", &|| fs::remove_file(step(4).join("optimizer.safetensors")).unwrap()),
        ("missing digests", &|| fs::remove_file(step(4).join("BLAKE3SUMS")).unwrap()),
        ("cut", &|| fs::write(step(4).join("state.json"), "{").unwrap()),
        ("mixed steps", &|| {
            let name = "weights.safetensors";
            fs::copy(step(3).join(name), step(4).join(name)).unwrap();
        }),
    ];
    for (what, damage) in damages {
        damage();
        let refused = resume(&[]);
        // A file that is not there is the disk's word, the others are the digests'.
        assert!([65, 74].contains(&refused.code), "{what}: {refused:?}");
        assert!(refused.stderr.contains("step-00000004"), "{what}: {refused:?}");
        let resumed = resume(&["--allow-older"]).expect_code(0);
        assert!(resumed.stderr.contains("set aside"), "{what}: {resumed:?}");
        assert!(resumed.stdout.contains("4 (1 now"), "{what}: {resumed:?}");
        let again =
            [read("weights.safetensors"), read("optimizer.safetensors"), read("state.json")];
        assert!(again == good, "{what}: other bits");
        fs::remove_dir_all(dir.join("run/checkpoints/damaged-step-00000004")).unwrap();
    }
    // Without damage it changes nothing; with nothing but damage there is no run.
    let finished = resume(&["--allow-older"]).expect_code(0);
    assert!(finished.stdout.contains("4 (0 now"), "{finished:?}");
    for n in 1..=4 {
        fs::remove_file(step(n).join("BLAKE3SUMS")).unwrap();
    }
    let nothing = resume(&["--allow-older"]).expect_code(65);
    assert!(nothing.stderr.contains("no complete checkpoint"), "{nothing:?}");
}

/// A data set whose digests are all right and whose states are not.
#[test]
fn states_that_are_no_numbers_stop_training_before_the_first_update() {
    use shared::manifest::{SourceOutcome, SourceRecord};
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    two_data_sets(dir);
    let good = shared::Manifest::open_read(&dir.join("ds")).unwrap();
    let (fingerprint, spec) = (good.fingerprint().clone(), good.spec().clone());
    let bad = shared::Manifest::open_for_write(&dir.join("bad"), &fingerprint, &spec).unwrap();
    let place = shared::DatasetDir::new(dir.join("bad"));
    let id = shared::ShardId(0);
    let mut writer = shared::ShardWriter::create(&place, id, &spec, &fingerprint.digest()).unwrap();
    let mut sources = Vec::new();
    for (line, sample) in small::contents(&dir.join("ds")).into_values().enumerate() {
        sources.push(SourceRecord {
            file: "prompts.jsonl".into(),
            line: line as u64 + 1,
            digest: [0; 16],
            outcome: SourceOutcome::Committed(sample.sample().id()),
            truncated: false,
        });
        writer.push(&sample).unwrap();
    }
    let mut sealed = writer.seal().unwrap();
    let path = dir.join("bad/shards").join(&sealed.file);
    let mut bytes = fs::read(&path).unwrap();
    // bf16 values lie between the ids, which come first, and the masks, which come last.
    let middle = bytes.len() / 4 * 2;
    bytes[middle..middle + 2].copy_from_slice(&[0xc0, 0x7f]);
    fs::write(&path, &bytes).unwrap();
    sealed.digest = shared::Digest::of(&bytes);
    bad.commit_shard(&sealed, &sources).unwrap();
    drop(bad);
    fs::create_dir_all(dir.join("bad/target")).unwrap();
    for entry in fs::read_dir(dir.join("ds/target")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.join("bad/target").join(entry.file_name())).unwrap();
    }

    // One epoch in one step: the sample is in it, whichever it is.
    let fit = ["fit", "--dataset", "bad", "--run-dir", "run", "--held-out", "0", "--accumulate"];
    let refused = trainer(dir, &[&fit[..], &["1000", "--max-steps", "3"]].concat());
    let refused = refused.expect_code(65);
    assert!(refused.stderr.contains("1 NaN and 0 infinite"), "{refused:?}");
    let metrics = fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap_or_default();
    assert_eq!(metrics, "", "a step was made");
    assert_eq!(fs::read_dir(dir.join("run/checkpoints")).unwrap().count(), 0);
    let audit = extractor(dir, &["audit", "bad", "--verify", "all"]).expect_code(1);
    assert!(audit.stdout.contains("1 NaN and 0 infinite"), "{audit:?}");
}
