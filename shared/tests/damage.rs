//! Damage to a data set that is noticed, whatever its form.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::path::Path;

use shared::manifest::InputFile;
use shared::*;
use support::*;

/// Two shards of three and two samples.
fn two_shards(dir: &Path) -> CaptureSpec {
    let spec = spec(StateDtype::Bf16);
    let samples = samples(&spec, 5);
    let manifest = Manifest::open_for_write(dir, &fingerprint(), &spec).unwrap();
    manifest.register_input(&input(5)).unwrap();
    for (id, range, line) in [(0, 0..3, 1), (1, 3..5, 4)] {
        let sealed = seal(dir, ShardId(id), &spec, &samples[range.clone()]);
        manifest.commit_shard(&sealed, &committed(&samples[range], line)).unwrap();
    }
    spec
}

fn kinds(dir: &Path, verify: Verify) -> Vec<FindingKind> {
    audit(dir, verify).unwrap().findings.iter().map(|finding| finding.kind).collect()
}

#[test]
fn swapped_shards_are_noticed() {
    let dir = tempdir();
    two_shards(dir.path());
    let shard = |id: u32| dir.path().join("shards").join(ShardId(id).file_name());
    let (first, second) = (fs::read(shard(0)).unwrap(), fs::read(shard(1)).unwrap());
    fs::write(shard(0), second).unwrap();
    fs::write(shard(1), first).unwrap();
    let found = kinds(dir.path(), Verify::All);
    for kind in [FindingKind::ShardDigest, FindingKind::SampleMissing, FindingKind::SampleUnknown] {
        assert_eq!(found.iter().filter(|found| **found == kind).count(), 2, "{kind:?}");
    }
    // Sizes differ, so even without reading it shows.
    assert_eq!(kinds(dir.path(), Verify::None), [FindingKind::ShardSize; 2]);
}

#[test]
fn leftovers_are_noticed_and_strangers_are_not_removed() {
    let dir = tempdir();
    let spec = two_shards(dir.path());
    for name in [
        "shards/.shard-000009.safetensors.77.tmp",
        "shards/shard-000009.safetensors",
        "shards/notes.txt",
        "target/.head.safetensors.1.tmp",
        ".settings.json.1.tmp",
        ".COMMITTED.1.tmp",
    ] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    assert_eq!(kinds(dir.path(), Verify::None), [FindingKind::Orphan; 6]);
    drop(Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap());
    let report = audit(dir.path(), Verify::None).unwrap();
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].shard.as_deref(), Some("notes.txt"));
    // What has the name of a sealed shard is moved, never removed.
    let aside = dir.path().join("quarantine/shard-000009.safetensors");
    assert_eq!(fs::read_to_string(aside).unwrap(), "x");
}

#[test]
fn one_sample_in_two_shards_is_noticed() {
    let dir = tempdir();
    let spec = two_shards(dir.path());
    let extra = captured(&spec, 9, 999);
    let both = [samples(&spec, 1).remove(0), extra];
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.register_input(&input(6)).unwrap();
    let mut sealed = seal(dir.path(), ShardId(2), &spec, &both);
    // A writer that forgets what it wrote.
    sealed.entries.remove(0);
    manifest.commit_shard(&sealed, &committed(&both[1..], 6)).unwrap();
    let report = audit(dir.path(), Verify::Sample).unwrap();
    let found: Vec<FindingKind> = report.findings.iter().map(|finding| finding.kind).collect();
    assert_eq!(found, [FindingKind::SampleUnknown, FindingKind::SampleTwice]);
    assert!(report.findings[1].detail.contains("shard-000000"));
    assert_eq!(report.findings[1].samples, [both[0].sample().id()]);
}

#[test]
fn changed_rows_are_noticed() {
    for (sql, kind) in [
        ("UPDATE sample SET tokens = tokens + 1 WHERE shard = 0", FindingKind::RowsDiffer),
        ("UPDATE tensor SET rms = rms * 1.0001 WHERE rms IS NOT NULL", FindingKind::RowsDiffer),
        ("UPDATE tensor SET dtype = 'F16' WHERE dtype = 'BF16'", FindingKind::RowsDiffer),
        ("UPDATE sample SET shard = 1", FindingKind::SampleUnknown),
        ("DELETE FROM sample WHERE shard = 1", FindingKind::ManifestDamaged),
        ("DELETE FROM input", FindingKind::LinesDoNotAddUp),
        ("UPDATE shard SET digest = zeroblob(32) WHERE id = 0", FindingKind::ShardDigest),
        ("UPDATE shard SET bytes = bytes + 1 WHERE id = 0", FindingKind::ShardSize),
        (
            "UPDATE source SET sample = NULL, outcome = 'rejected', reason = 'x' WHERE line = 1",
            FindingKind::SourceChanged,
        ),
    ] {
        let dir = tempdir();
        two_shards(dir.path());
        tamper(dir.path(), sql);
        let found = kinds(dir.path(), Verify::All);
        assert!(found.contains(&kind), "{sql}: {found:?}");
    }
}

#[test]
fn paths_in_the_manifest_are_never_followed() {
    for sql in [
        "UPDATE shard SET file = '../../etc/passwd' WHERE id = 0",
        "UPDATE shard SET file = '/dev/zero' WHERE id = 0",
        "UPDATE shard SET id = -1 WHERE id = 0",
    ] {
        let dir = tempdir();
        two_shards(dir.path());
        tamper(dir.path(), sql);
        // An error of the manifest and not of a file: nothing was opened.
        let error = audit(dir.path(), Verify::All).unwrap_err();
        assert_eq!(error.exit_code(), 65, "{sql}: {error}");
    }
}

#[test]
fn a_manifest_with_lost_pages_never_gives_wrong_rows() {
    let dir = tempdir();
    two_shards(dir.path());
    let path = dir.path().join("manifest.sqlite");
    let good = fs::read(&path).unwrap();
    let rows = Manifest::open_read(dir.path()).unwrap().samples().unwrap();
    let remove_logs = || {
        for suffix in ["sqlite-wal", "sqlite-shm"] {
            let _ = fs::remove_file(path.with_extension(suffix));
        }
    };
    let judge = |what: &str| {
        remove_logs();
        match audit(dir.path(), Verify::All) {
            Err(error) => assert_eq!(error.exit_code(), 65, "{what}: {error}"),
            Ok(report) if report.clean() => {
                let manifest = Manifest::open_read(dir.path()).unwrap();
                assert_eq!(manifest.samples().unwrap(), rows, "{what}");
            }
            Ok(_) => {}
        }
    };
    for page in 0..good.len() / 4096 {
        let mut bytes = good.clone();
        bytes[page * 4096..(page + 1) * 4096].fill(0);
        fs::write(&path, &bytes).unwrap();
        judge(&format!("page {page} zeroed"));
        fs::write(&path, &good[..page * 4096]).unwrap();
        judge(&format!("cut to {page} pages"));
    }
}

#[test]
fn a_manifest_of_the_version_before_is_read_and_brought_up_by_a_writer() {
    let dir = tempdir();
    let spec = two_shards(dir.path());
    BACK.iter().for_each(|&sql| tamper(dir.path(), sql));
    let manifest = Manifest::open_read(dir.path()).unwrap();
    assert_eq!((manifest.samples().unwrap().len(), manifest.failures().unwrap().len()), (5, 0));
    assert_eq!(manifest.storage_errors().unwrap(), []);
    assert_eq!(kinds(dir.path(), Verify::All), []);
    drop(manifest);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.record_failure(&[SampleId([1; 16])], "x").unwrap();
    assert_eq!(manifest.failures().unwrap().len(), 1);
    assert_eq!(kinds(dir.path(), Verify::All), []);
}

#[test]
fn an_audit_beside_a_writer_takes_its_work_for_what_it_is() {
    let dir = tempdir();
    let spec = two_shards(dir.path());
    let writer = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let sample = captured(&spec, 9, 999);
    let sealed = seal(dir.path(), ShardId(2), &spec, std::slice::from_ref(&sample));
    // Sealed but not committed: not an orphan while its writer lives.
    assert_eq!(kinds(dir.path(), Verify::All), []);
    let mut source = source(6, SourceOutcome::Committed(sample.sample().id()));
    source.file = "more.jsonl".into();
    writer.register_input(&InputFile { file: "more.jsonl".into(), ..input(6) }).unwrap();
    writer.commit_shard(&sealed, &[source]).unwrap();
    let report = audit(dir.path(), Verify::All).unwrap();
    assert_eq!((report.samples, report.conservation.pending), (6, 5));
}

#[test]
fn fp8_codes_and_scales_that_no_state_gives_are_noticed() {
    let spec = spec(StateDtype::Fp8);
    for (tensor, bytes, words) in [
        ("hidden_states.3", [0x7f].as_slice(), "layer 3: 1 NaN and 0 infinite, first at token 1"),
        ("hidden_states.3", &[0xff], "layer 3: 1 NaN and 0 infinite, first at token 1"),
        ("hidden_states.1.scale", &f32::NAN.to_le_bytes(), "layer 1: 6 NaN and 0 infinite"),
        ("hidden_states.1.scale", &f32::INFINITY.to_le_bytes(), "infinite, first at token 1"),
        ("hidden_states.1.scale", &(-0.5f32).to_le_bytes(), "scale of token 1 is -0.5"),
    ] {
        let dir = tempdir();
        build(dir.path(), &spec, &[captured(&spec, 4, 7)]);
        let path = dir.path().join("shards/shard-000000.safetensors");
        let reader = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap();
        let id = reader.sample_ids()[0];
        let entry = reader.header().tensor(&format!("{id}.{tensor}")).unwrap();
        // Of [4, 6] codes or [4] scales the first of token 1.
        let at = (entry.start + entry.bytes / 4) as usize;
        let mut file = fs::read(&path).unwrap();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&path, file).unwrap();
        assert!(words_of(reader.read(id)).contains(words), "{}", words_of(reader.read(id)));
        let findings = audit(dir.path(), Verify::All).unwrap().findings;
        let broken = findings.iter().find(|found| found.kind == FindingKind::SampleBroken).unwrap();
        assert_eq!(broken.samples, [id]);
        assert!(broken.detail.contains(words), "{}", broken.detail);
    }
}

fn words_of(read: Result<CapturedSample, ShardError>) -> String {
    words(&read.unwrap_err())
}

/// A sample whose two layers hold these values.
fn layers(spec: &CaptureSpec, values: [f32; 2]) -> CapturedSample {
    let sample = tokens(2, values[0].to_bits().into());
    let state = |(&layer, value): (&LayerIndex, f32)| {
        let rows = vec![value; 2 * spec.hidden_size];
        let rows = StateRows::from_f32(&rows, spec.hidden_size, spec.dtype);
        LayerState { layer, shape: vec![2, spec.hidden_size], rows }
    };
    let states = spec.layers.iter().zip(values).map(state).collect();
    CapturedSample::new(sample, spec, states, &[2]).unwrap()
}

#[test]
fn layers_of_zeros_and_equal_layers_are_noted() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = [layers(&spec, [1.0, 2.0]), layers(&spec, [3.0, 3.0]), layers(&spec, [5.0, 0.0])];
    build(dir.path(), &spec, &samples);
    let report = audit(dir.path(), Verify::All).unwrap();
    assert!(report.clean(), "suspicions are notes: {:?}", report.findings);
    for (sample, words) in [(&samples[1], "have equal rms"), (&samples[2], "holds only zeros")] {
        let about = |found: &&Finding| found.samples == [sample.sample().id()];
        let found: Vec<&Finding> = report.findings.iter().filter(about).collect();
        assert_eq!(found.len(), 1, "{:?}", report.findings);
        assert_eq!(found[0].kind, FindingKind::Suspicious);
        assert!(found[0].detail.contains(words), "{}", found[0].detail);
    }
    assert_eq!(report.findings.len(), 2);
}
