//! Hashes that other programs can recompute, and outcomes of lines over several runs.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use shared::digest::HashingWriter;
use shared::manifest::InputFile;
use shared::*;
use support::*;

/// Takes at most three bytes at a time.
struct Slow(Vec<u8>);

impl Write for Slow {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let taken = buffer.len().min(3);
        self.0.extend(&buffer[..taken]);
        Ok(taken)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// The expected values come from the blake3 package for Python.
#[test]
fn hashes_are_those_of_another_implementation() {
    let id = SampleId::of(&[1, 2, 163_839], &[0, 1, 1]);
    assert_eq!(id.to_string(), "2b5f7fda4d7bd9ec298be3d1dddfa7f3");
    assert_eq!(id.to_string().parse::<SampleId>().unwrap(), id);
    let digest = fingerprint().digest().to_string();
    assert_eq!(digest, "b215e576dab68912a56a0ea086d287ae615261e19e476f374e3e578629cc008f");
    let mut writer = HashingWriter::new(Slow(Vec::new()));
    writer.write_all(b"aerie").unwrap();
    let (slow, digest, bytes) = writer.finish();
    assert_eq!((slow.0.as_slice(), bytes), (&b"aerie"[..], 5));
    let expected = "c78a4b305ac1989a55ad3f42daf78ec16799703d043a26cf9f8d1d6a3ed8292f";
    assert_eq!(digest, expected.parse().unwrap());
    assert_eq!(Digest::of_reader(&b"aerie"[..]).unwrap(), (digest, 5));
    assert!(expected[1..].parse::<Digest>().is_err());
}

#[test]
fn fields_of_a_fingerprint_do_not_run_into_each_other() {
    let one = Fingerprint::default().with("ab", "c");
    let other = Fingerprint::default().with("a", "bc");
    assert_ne!(one.digest(), other.digest());
    let changes = one.diff(&other);
    assert_eq!(changes[0].to_string(), "a: stored absent, now `bc`");
    assert_eq!(changes[1].to_string(), "ab: stored `c`, now absent");
    assert_eq!(one.diff(&one), []);
}

#[test]
fn of_a_field_with_several_values_only_those_that_changed_are_shown() {
    let stored =
        Fingerprint::default().with("encoding", r#"{"max_tokens":96,"overlong":"reject"}"#);
    let current =
        Fingerprint::default().with("encoding", r#"{"max_tokens":97,"overlong":"reject"}"#);
    let changes = stored.diff(&current);
    assert_eq!(changes.len(), 1);
    assert_eq!(changes[0].to_string(), "encoding.max_tokens: stored `96`, now `97`");
}

#[test]
fn settings_may_change_until_a_sample_is_committed_and_nothing_of_the_old_ones_stays() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let wrong = fingerprint().with("target", "mistyped");
    let manifest = Manifest::open_for_write(dir.path(), &wrong, &spec).unwrap();
    manifest.register_input(&input(2)).unwrap();
    manifest.record_sources(&[source(1, SourceOutcome::Rejected("overlong".into()))]).unwrap();
    let head = dir.path().join("target/head.safetensors");
    fs::write(&head, "of the mistyped target").unwrap();
    drop(manifest);
    build(dir.path(), &spec, &samples(&spec, 2));
    assert!(!head.exists());
    let manifest = Manifest::open_read(dir.path()).unwrap();
    assert_eq!(*manifest.fingerprint(), fingerprint());
    assert_eq!(manifest.conservation().unwrap().committed, 2);
    assert!(audit(dir.path(), Verify::All).unwrap().clean());
    drop(manifest);
    let error = Manifest::open_for_write(dir.path(), &wrong, &spec).unwrap_err();
    assert!(matches!(error, ManifestError::FingerprintChanged(_)), "{error}");
}

#[test]
fn a_changed_token_is_noticed_without_the_digest() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    build(dir.path(), &spec, &samples(&spec, 1));
    let path = dir.path().join("shards/shard-000000.safetensors");
    let reader = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap();
    let id = reader.sample_ids()[0];
    let start = reader.header().tensor(&format!("{id}.input_ids")).unwrap().start;
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, start).unwrap();
    file.write_all_at(&[byte[0] ^ 1], start).unwrap();
    assert!(matches!(reader.read(id), Err(ShardError::SampleChanged { .. })));
    assert!(matches!(reader.read_sample(id), Err(ShardError::SampleChanged { .. })));
}

#[test]
fn a_shard_of_another_fingerprint_is_not_committed() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 1);
    let other = fingerprint().with("template", "beta");
    let manifest = Manifest::open_for_write(dir.path(), &other, &spec).unwrap();
    let sealed = seal(dir.path(), ShardId(0), &spec, &samples);
    let error = manifest.commit_shard(&sealed, &committed(&samples, 1)).unwrap_err();
    assert!(matches!(error, ManifestError::ForeignShard(ShardId(0))), "{error}");
}

#[test]
fn the_outcome_of_a_line_stands_until_its_text_changes_or_it_was_a_reject() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 2);
    build(dir.path(), &spec, &samples);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let outcome = |line: u64| {
        let row = manifest.known_sources("prompts.jsonl").unwrap().remove(&line);
        row.map(|row| row.outcome)
    };
    let id = |index: usize| samples[index].sample().id();
    let rejected = SourceOutcome::Rejected("target_crash".into());
    manifest.record_sources(&[source(1, rejected.clone())]).unwrap();
    assert_eq!(outcome(1), Some(SourceOutcome::Committed(id(0))));
    let mut edited = source(1, rejected.clone());
    edited.digest = [77; 16];
    manifest.record_sources(&[edited]).unwrap();
    assert_eq!(outcome(1), Some(rejected));
    let mut repaired = source(1, SourceOutcome::Duplicate(id(1)));
    repaired.digest = [77; 16];
    manifest.record_sources(&[repaired]).unwrap();
    assert_eq!(outcome(1), Some(SourceOutcome::Duplicate(id(1))));
    assert!(manifest.conservation().unwrap().holds());
    assert_eq!(manifest.samples_without_line().unwrap(), [id(0)]);
}

#[test]
fn lines_cut_from_an_input_are_forgotten_and_new_ones_pending() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    build(dir.path(), &spec, &samples(&spec, 3));
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    for (lines, committed, pending) in [(2, 2, 0), (5, 2, 3)] {
        manifest.register_input(&input(lines)).unwrap();
        let counts = manifest.conservation().unwrap();
        assert!(counts.holds());
        assert_eq!((counts.lines, counts.committed, counts.pending), (lines, committed, pending));
    }
}

#[test]
fn lines_that_come_back_have_the_samples_that_they_gave() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let samples = samples(&spec, 3);
    build(dir.path(), &spec, &samples);
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    manifest.register_input(&input(1)).unwrap();
    manifest.register_input(&input(4)).unwrap();
    // What the intake makes of them: the samples are there, and the last line repeats one.
    let again = [1, 2, 1].map(|index: usize| samples[index].sample().id());
    let records = (2..).zip(again).map(|(line, id)| source(line, SourceOutcome::Duplicate(id)));
    manifest.record_sources(&records.collect::<Vec<_>>()).unwrap();
    let counts = manifest.conservation().unwrap();
    assert!(counts.holds());
    assert_eq!((counts.committed, counts.duplicate, counts.pending), (3, 1, 0));
    assert_eq!(manifest.samples_without_line().unwrap(), []);
    assert_eq!(manifest.sample(again[0]).unwrap().unwrap().source_line, 2);
}

/// Line numbers count blank lines, so the last line has a number above that of the lines to do.
#[test]
fn blank_lines_need_no_outcome_and_take_none_away() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let with_blank = InputFile { blank: 1, ..input(2) };
    let rejected = |line| source(line, SourceOutcome::Rejected("overlong".into()));
    manifest.register_input(&with_blank).unwrap();
    manifest.record_sources(&[rejected(1), rejected(3)]).unwrap();
    for _ in 0..2 {
        let counts = manifest.conservation().unwrap();
        assert!(counts.holds());
        assert_eq!((counts.lines, counts.rejected, counts.pending), (2, 2, 0));
        // The next run registers the same file again.
        manifest.register_input(&with_blank).unwrap();
    }
    manifest.record_sources(&[rejected(4)]).unwrap();
    assert!(!manifest.conservation().unwrap().holds());
}

#[test]
fn numbers_that_sqlite_cannot_hold_are_refused() {
    let (dir, spec) = (tempdir(), spec(StateDtype::Bf16));
    let manifest = Manifest::open_for_write(dir.path(), &fingerprint(), &spec).unwrap();
    let error = manifest.register_input(&input(u64::MAX)).unwrap_err();
    assert!(matches!(error, ManifestError::TooLarge(u64::MAX)));
}
