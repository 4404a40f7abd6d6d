//! A data set on disk: round trips, the laws of the manifest, and what damage looks like.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use shared::manifest::{Cell, Listing, RunEnd, RunStart};
use shared::*;
use support::*;

#[test]
fn what_is_written_is_read_and_the_audit_is_clean() {
    for dtype in [StateDtype::Bf16, StateDtype::Fp8] {
        let (dir, spec) = (tempdir(), spec(dtype));
        let samples = samples(&spec, 5);
        build(dir.path(), &spec, &samples);
        let manifest = Manifest::open_read(dir.path()).unwrap();
        assert_eq!(manifest.spec(), &spec);
        assert_eq!(manifest.committed_samples().unwrap().len(), 5);
        let shard = dir.path().join("shards/shard-000000.safetensors");
        let reader = ShardReader::open(&shard, &HeaderLimits::SHARD).unwrap();
        for sample in &samples {
            assert_eq!(&reader.read(sample.sample().id()).unwrap(), sample);
        }
        let report = audit(dir.path(), Verify::All).unwrap();
        assert_eq!(report.findings, []);
        assert_eq!((report.samples_read, report.shards), (5, 1));
    }
}

#[test]
fn the_safetensors_crate_reads_a_shard_and_every_tensor_is_aligned() {
    for dtype in [StateDtype::Bf16, StateDtype::Fp8] {
        let (dir, spec) = (tempdir(), spec(dtype));
        let samples = samples(&spec, 3);
        build(dir.path(), &spec, &samples);
        let bytes = fs::read(dir.path().join("shards/shard-000000.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, tensor) in tensors.iter() {
            let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
            assert_eq!(start % (tensor.dtype().bitsize() / 8), 0, "{name}");
        }
        let id = samples[0].sample().id();
        let ids = tensors.tensor(&format!("{id}.input_ids")).unwrap();
        let expected: Vec<u8> =
            samples[0].sample().input_ids().iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(ids.data(), expected);
    }
}

#[test]
fn the_same_samples_give_the_same_file() {
    let spec = spec(StateDtype::Bf16);
    let samples = samples(&spec, 4);
    let digests: Vec<Digest> = (0..2)
        .map(|_| {
            let dir = tempdir();
            build(dir.path(), &spec, &samples);
            Manifest::open_read(dir.path()).unwrap().shards().unwrap()[0].digest
        })
        .collect();
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn a_second_writer_is_told_who_writes() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let first = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let error = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap_err();
    assert_eq!(error.exit_code(), 73);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    drop(first);
    Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
}

#[test]
fn a_changed_fingerprint_is_refused_with_both_values() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    build(dir.path(), &spec, &samples(&spec, 1));
    let changed = fingerprint().with("template", "beta");
    let error = Manifest::open_for_write(dir.path(), &changed, &spec).unwrap_err();
    assert_eq!(error.exit_code(), 78);
    assert!(error.to_string().contains("template: stored `alpha`, now `beta`"), "{error}");
    let other = CaptureSpec { layers: vec![LayerIndex(1), LayerIndex(4)], ..spec.clone() };
    let error = Manifest::open_for_write(dir.path(), &fingerprint(), &other).unwrap_err();
    assert!(error.to_string().contains("stored `1, 3`, now `1, 4`"), "{error}");
}

#[test]
fn a_sample_cannot_be_committed_twice() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 2);
    build(dir.path(), &spec, &samples);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    assert_eq!(manifest.next_shard_id().unwrap(), ShardId(1));
    let sealed = seal(dir.path(), ShardId(1), &spec, &samples[..1]);
    let error = manifest.commit_shard(&sealed, &committed(&samples[..1], 10)).unwrap_err();
    assert!(words(&error).contains("UNIQUE"), "{error}");
    assert_eq!(manifest.shards().unwrap().len(), 1, "the transaction left something behind");
    drop(manifest);
    // The sealed file has no rows: the next writer removes it.
    assert_eq!(kinds(dir.path()), [FindingKind::Orphan]);
    drop(Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap());
    assert_eq!(kinds(dir.path()), []);
}

#[test]
fn lines_are_conserved() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 2);
    let id = samples[0].sample().id();
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.register_input(&input(6)).unwrap();
    // A duplicate may be known before its sample is committed.
    let duplicate = source(4, SourceOutcome::Duplicate(id));
    let reject = source(5, SourceOutcome::Rejected("no messages".into()));
    manifest.record_sources(&[duplicate, reject]).unwrap();
    let before = manifest.conservation().unwrap();
    assert_eq!((before.rejected, before.duplicate, before.pending), (1, 0, 5));
    let sealed = seal(dir.path(), ShardId(0), &spec, &samples);
    manifest.commit_shard(&sealed, &committed(&samples, 1)).unwrap();
    let after = manifest.conservation().unwrap();
    assert!(after.holds());
    assert_eq!((after.committed, after.duplicate, after.pending), (2, 1, 2));
    let known = manifest.known_sources("prompts.jsonl").unwrap();
    assert_eq!(known[&4].outcome, SourceOutcome::Duplicate(id));
    // An outcome for a line that the input does not have breaks the law.
    manifest.record_sources(&[source(7, SourceOutcome::Rejected("late".into()))]).unwrap();
    assert!(!manifest.conservation().unwrap().holds());
    drop(manifest);
    assert_eq!(kinds(dir.path()), [FindingKind::LinesDoNotAddUp]);
}

#[test]
fn a_shard_needs_a_line_for_every_sample_and_a_sample_for_every_line() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 2);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let sealed = seal(dir.path(), ShardId(0), &spec, &samples[..1]);
    assert!(matches!(manifest.commit_shard(&sealed, &[]), Err(ManifestError::NoSource(_))));
    let error = manifest.commit_shard(&sealed, &committed(&samples, 1)).unwrap_err();
    assert!(matches!(error, ManifestError::NotInShard { line: 2, .. }), "{error}");
}

#[test]
fn damage_is_named() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    build(dir.path(), &spec, &samples(&spec, 3));
    let shard = dir.path().join("shards/shard-000000.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    let report = audit(dir.path(), Verify::Sample).unwrap();
    assert_eq!(report.findings[0].kind, FindingKind::ShardSize);
    assert_eq!(report.findings[1].kind, FindingKind::ShardUnreadable);
    assert!(report.findings[1].detail.contains("truncated"));
    assert_eq!(report.findings[1].samples.len(), 3);
    fs::remove_file(&shard).unwrap();
    assert_eq!(kinds(dir.path()), [FindingKind::ShardMissing]);
    std::os::unix::fs::symlink("/etc/hostname", &shard).unwrap();
    assert!(kinds(dir.path()).contains(&FindingKind::ShardUnreadable));
}

#[test]
fn every_flipped_header_bit_and_any_data_bit_is_detected() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    build(dir.path(), &spec, &[captured(&spec, 60, 1)]);
    let shard = dir.path().join("shards/shard-000000.safetensors");
    let digest = Manifest::open_read(dir.path()).unwrap().shards().unwrap()[0].digest;
    let whole = fs::read(&shard).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&shard).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    assert!((whole.len() - 8 - header) * 8 > 10_000, "too few bits of data");
    for bit in 0..whole.len() * 8 {
        let (at, byte) = (bit as u64 / 8, whole[bit / 8]);
        file.write_all_at(&[byte ^ (1 << (bit % 8))], at).unwrap();
        let detected = ShardReader::open(&shard, &HeaderLimits::SHARD)
            .and_then(|reader| reader.verify(&digest))
            .is_err();
        assert!(detected, "bit {bit}");
        file.write_all_at(&[byte], at).unwrap();
    }
}

#[test]
fn what_storing_cost_is_recorded_by_layer_and_goes_with_its_shard() {
    let dir = tempdir();
    let spec = spec(StateDtype::Fp8);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let layers = (spec.layers[0], spec.layers[1]);
    let noted = |sample: CapturedSample, error: f64| {
        sample.with_storage_errors(vec![(layers.0, error), (layers.1, 2.0 * error)])
    };
    let mut both = samples(&spec, 2).into_iter();
    let both = [noted(both.next().unwrap(), 0.02), noted(both.next().unwrap(), 0.03)];
    let sealed = seal(dir.path(), ShardId(0), &spec, &both);
    manifest.commit_shard(&sealed, &committed(&both, 1)).unwrap();
    let errors = audit(dir.path(), Verify::All).unwrap().storage_errors;
    let tokens = both.each_ref().map(|sample| sample.sample().tokens() as f64);
    let square = tokens[0] * 0.02f64.powi(2) + tokens[1] * 0.03f64.powi(2);
    let expected = (square / (tokens[0] + tokens[1])).sqrt();
    assert_eq!(errors.len(), 2);
    for (error, (layer, factor)) in errors.iter().zip([(layers.0, 1.0), (layers.1, 2.0)]) {
        assert_eq!((error.layer, error.samples, error.worst), (layer, 2, 0.03 * factor));
        assert!((error.error - factor * expected).abs() < 1e-12, "{error:?}");
    }
    manifest.quarantine(ShardId(0)).unwrap();
    assert_eq!(manifest.storage_errors().unwrap(), []);
}

#[test]
fn runs_and_queries_are_recorded() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let start = RunStart { argv: vec!["run".into()], host: "here".into(), config: "{}".into() };
    let run = manifest.begin_run(&start).unwrap();
    let end = RunEnd { outcome: "completed".into(), tokens: 40, bytes: 7, seconds: 2.0 };
    manifest.finish_run(run, &end).unwrap();
    drop(manifest);
    let manifest = Manifest::open_read(dir.path()).unwrap();
    let runs = manifest.list(Listing::Runs).unwrap();
    let rate = runs.columns.iter().position(|name| name == "tokens_per_second").unwrap();
    assert_eq!(runs.rows[0][rate], Cell::Real(20.0));
    assert!(manifest.query("DELETE FROM run").is_err());
    assert!(manifest.query("WITH x AS (SELECT 1) DELETE FROM run").is_err());
    let error = manifest.query("SELECT x FROM nowhere").unwrap_err();
    assert_eq!((error.exit_code(), words(&error).matches("nowhere").count()), (78, 1));
    let count = manifest.query("SELECT count(*) AS n FROM run").unwrap();
    assert_eq!((count.columns[0].as_str(), &count.rows[0][0]), ("n", &Cell::Integer(1)));
    assert!(matches!(manifest.begin_run(&start), Err(ManifestError::ReadOnly)));
}

#[test]
fn threads_share_a_manifest_and_a_shard() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 4);
    build(dir.path(), &spec, &samples);
    let manifest = Manifest::open_read(dir.path()).unwrap();
    let row = &manifest.shards().unwrap()[0];
    let path = dir.path().join("shards").join(&row.file);
    let reader = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap();
    std::thread::scope(|scope| {
        let (manifest, reader) = (&manifest, &reader);
        for sample in &samples {
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(&reader.read(sample.sample().id()).unwrap(), sample);
                    reader.verify(&row.digest).unwrap();
                    assert_eq!(manifest.samples().unwrap().len(), 4);
                }
            });
        }
    });
}

#[test]
fn a_spec_without_layers_is_refused_before_anything_is_made() {
    let dir = tempdir();
    let root = dir.path().join("data");
    for layers in [vec![], vec![LayerIndex(3), LayerIndex(1)]] {
        let spec = CaptureSpec { layers, ..spec(StateDtype::Bf16) };
        let error = Manifest::open_for_write(&root, &fingerprint(), &spec).unwrap_err();
        assert_eq!(error.exit_code(), 78);
        assert!(!root.exists());
    }
}

#[test]
fn a_shard_takes_only_what_its_header_can_hold_and_its_spec_says() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let dir = DatasetDir::new(dir.path());
    let mut writer = ShardWriter::create(&dir, ShardId(0), &spec, &Digest([0; 32])).unwrap();
    for seed in 0..4096 / 4 {
        assert!(writer.has_room());
        writer.push(&captured(&spec, 1, seed)).unwrap();
    }
    assert!(!writer.has_room());
    let error = writer.push(&captured(&spec, 2, 1)).unwrap_err();
    assert!(matches!(error, ShardError::Full { samples: 1024 }));
    let mut writer = ShardWriter::create(&dir, ShardId(1), &spec, &Digest([0; 32])).unwrap();
    writer.push(&captured(&spec, 2, 1)).unwrap();
    let again = writer.push(&captured(&spec, 2, 1)).unwrap_err();
    assert!(matches!(again, ShardError::Duplicate(_)));
    let other = CaptureSpec { layers: vec![LayerIndex(1), LayerIndex(2)], ..spec };
    let error = writer.push(&captured(&other, 2, 2)).unwrap_err();
    assert!(matches!(error, ShardError::OtherSpec { .. }), "{error}");
    assert!(ShardWriter::create(&dir, ShardId(1_000_000), &other, &Digest([0; 32])).is_err());
}

#[test]
fn async_callers_get_an_error_and_no_panic() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let opened = runtime
        .block_on(async { Manifest::open_for_write(dir.path(), &fingerprint(), &spec).map(drop) });
    assert!(matches!(opened, Err(ManifestError::InsideAsync)));
}

#[test]
fn other_databases_and_later_versions_are_left_alone() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    drop(Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap());
    let path = dir.path().join("manifest.sqlite");
    let good = fs::read(&path).unwrap();
    let patched = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), bytes, "{error}");
        error
    };
    // Positions of user_version and application_id in SQLite's file header.
    assert!(matches!(patched(60, 6), ManifestError::Newer { found: 6, .. }));
    assert!(matches!(patched(68, 7), ManifestError::NotAManifest { found: 7, .. }));
    fs::write(&path, b"this is no database, but long enough to be looked at by SQLite").unwrap();
    let error = Manifest::open_read(dir.path()).unwrap_err();
    assert_eq!(error.exit_code(), 65, "{error}");
}

fn kinds(dir: &Path) -> Vec<FindingKind> {
    audit(dir, Verify::All).unwrap().findings.iter().map(|finding| finding.kind).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_samples_survive_the_disk(
        fp8 in any::<bool>(),
        hidden in 1usize..40,
        layers in 1u16..5,
        lengths in prop::collection::vec(1usize..60, 1..6),
        seed in any::<u64>(),
    ) {
        let dir = tempdir();
        let spec = CaptureSpec {
            layers: (0..layers).map(|layer| LayerIndex(layer * 2)).collect(),
            hidden_size: hidden,
            dtype: if fp8 { StateDtype::Fp8 } else { StateDtype::Bf16 },
        };
        let samples: Vec<CapturedSample> = lengths
            .iter()
            .enumerate()
            .map(|(index, tokens)| captured(&spec, *tokens, seed.wrapping_add(index as u64)))
            .collect();
        fs::create_dir_all(dir.path().join("shards")).unwrap();
        let sealed = seal(dir.path(), ShardId(3), &spec, &samples);
        let path = dir.path().join("shards").join(&sealed.file);
        let reader = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap();
        prop_assert_eq!(reader.spec(), &spec);
        reader.verify(&sealed.digest).unwrap();
        for (sample, entry) in samples.iter().zip(&sealed.entries) {
            prop_assert_eq!(&reader.read(sample.sample().id()).unwrap(), sample);
            prop_assert_eq!(&reader.describe(sample.sample().id()).unwrap(), entry);
        }
    }
}
