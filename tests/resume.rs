//! What may change between two runs on one data set, on the real binaries: nothing that decides its
//! bytes, and each refusal shows both values.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use aerie_tests::{Finished, extractor, small, trainer};
use shared::{
    CapturedSample, DatasetDir, Digest, Manifest, ShardId, ShardWriter, SourceOutcome, SourceRecord,
};

/// Another token by the name of the first.
const NAMED: [&str; 2] = ["\"bos_token\": \"[BOS]\"", "\"bos_token\": \"[EOS]\""];

fn copy_model(to: &Path) -> PathBuf {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(small::model()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to.to_owned()
}

/// A copy of the bundled model with another text in one of its files.
fn edited_model(to: &Path, file: &str, [from, by]: [&str; 2]) {
    let path = copy_model(to).join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    fs::write(&path, text.replace(from, by)).unwrap();
}

fn again(dir: &Path, changes: &[&str]) -> Finished {
    extractor(dir, &small::run_args_with("ds", changes))
}

/// The forecast of [`again`].
fn plan(dir: &Path, changes: &[&str]) -> Finished {
    let mut args = small::run_args_with("ds", changes);
    args[0] = "plan".to_owned();
    extractor(dir, &args)
}

fn runs(dir: &Path) -> usize {
    let runs = extractor(dir, &["query", "ds", "runs", "--json"]).expect_code(0);
    runs.stdout.lines().count()
}

/// Largest difference between states that the size of a batch may make, in units of the root mean
/// square of the layer (docs/reliability.md).
const TOLERANCE: f64 = 0.05;

/// Largest difference of two captures of the same tokens, layer by layer.
fn distance(one: &CapturedSample, other: &CapturedSample) -> f64 {
    assert_eq!(one.sample(), other.sample());
    let layers = one.states().iter().zip(other.states());
    let largest = layers.map(|(a, b)| {
        let (a, b) = (a.rows.to_f32(), b.rows.to_f32());
        let square: f64 = a.iter().map(|v| f64::from(*v).powi(2)).sum();
        let rms = (square / a.len() as f64).sqrt();
        let gap = a.iter().zip(&b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        gap / rms
    });
    largest.fold(0.0, f64::max)
}

#[test]
fn each_setting_that_decides_the_bytes_is_refused_with_both_values() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 10);
    small::run(dir, "ds").expect_code(0);
    let before = small::contents(&dir.join("ds"));

    let template = copy_model(&dir.join("template"));
    let path = template.join("chat_template.jinja");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "{# #}").unwrap();
    let weights = copy_model(&dir.join("weights"));
    let path = weights.join("model-00001-of-000002.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();

    for (name, file, texts) in [
        ("theta", "config.json", ["\"rope_theta\": 50000.0", "\"rope_theta\": 40000"]),
        ("yarn", "config.json", ["\"factor\": 4.0", "\"factor\": 8.0"]),
        ("eps", "config.json", ["\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06"]),
        ("experts", "config.json", ["\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 3"]),
        ("scale", "config.json", ["2.827", "2.5"]),
        ("named", "tokenizer_config.json", NAMED),
        ("stop", "generation_config.json", ["3842", "3843"]),
    ] {
        edited_model(&dir.join(name), file, texts);
    }

    for (flags, field, values) in [
        (&["--revision", "abc"][..], "target.revision", ["``", "`abc`"]),
        (&["--tp", "2"], "target.tp", ["`1`", "`2`"]),
        (&["--qa-norm-eps", "hf"], "target.qa_norm_eps", ["`config`", "`hf`"]),
        (&["--max-tokens", "97"], "encoding.max_tokens", ["`96`", "`97`"]),
        (&["--overlong", "reject"], "encoding.overlong", ["`truncate`", "`reject`"]),
        (&["--min-trainable-tokens", "3"], "encoding.min_trainable_tokens", ["`1`", "`3`"]),
        (&["--layers", "0,7"], "layers", ["2,4,5,7", "0,7"]),
        (&["--dtype", "fp8"], "dtype", ["bf16", "fp8"]),
        (&["--model", "template"], "tokenizer_and_template", ["stored", "now"]),
        (&["--model", "weights"], "target.weights", ["stored", "now"]),
        (&["--model", "theta"], "target.config.rope_theta", ["`50000.0`", "`40000.0`"]),
        (&["--model", "yarn"], "target.config.rope_scaling", ["\"factor\":4.0", "\"factor\":8.0"]),
        (&["--model", "eps"], "target.config.rms_norm_eps", ["`0.00001`", "`0.000001`"]),
        (&["--model", "experts"], "target.config.num_experts_per_tok", ["`2`", "`3`"]),
        (&["--model", "scale"], "target.config.routed_scaling_factor", ["`2.827`", "`2.5`"]),
        (&["--model", "named"], "tokenizer.named_tokens.bos_token", ["`[BOS]`", "`[EOS]`"]),
        (&["--model", "stop"], "tokenizer.stop_ids", ["`3841,3842`", "`3841,3842,3843`"]),
    ] {
        for refused in [again(dir, flags), plan(dir, flags)] {
            let refused = refused.expect_code(78);
            let words = &refused.stderr;
            assert!(words.contains(field), "{flags:?}: {refused:?}");
            for value in values {
                assert!(words.contains(value), "{flags:?}: no {value} in {refused:?}");
            }
        }
    }
    assert_eq!(runs(dir), 1, "a refused run left a row");
    small::assert_clean(dir, "ds");
    assert!(small::contents(&dir.join("ds")) == before);
    let leftover = fs::read_dir(dir.join("ds/shards")).unwrap().count();
    assert_eq!(
        leftover,
        extractor(dir, &["query", "ds", "shards", "--json"]).stdout.lines().count()
    );
}

#[test]
fn a_plan_refuses_what_the_run_would_and_writes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 6);
    // Settings without a sample bind nobody, and what they rejected is pending again.
    fs::write(dir.join("none.jsonl"), "not json\n").unwrap();
    again(dir, &["--prompts", "none.jsonl"]).expect_code(0);
    let fresh = plan(dir, &["--prompts", "none.jsonl", "--revision", "abc"]).expect_code(1);
    assert!(!fresh.stdout.contains("done already"), "{fresh:?}");
    small::run(dir, "ds").expect_code(0);
    let done = plan(dir, &[]).expect_code(0);
    assert!(done.stdout.contains("done already"), "{done:?}");

    let both = |code: i32, said: &str| {
        let before = files(&dir.join("ds"));
        let planned = plan(dir, &[]).expect_code(code);
        assert!(planned.stderr.contains(said), "{said}: {planned:?}");
        assert_eq!(files(&dir.join("ds")), before, "{said}");
        let refused = again(dir, &[]).expect_code(code);
        assert!(refused.stderr.contains(said), "{said}: {refused:?}");
    };
    let copy = dir.join("ds/target/config.json");
    let whole = fs::read(&copy).unwrap();
    fs::write(&copy, [&whole[..], b" "].concat()).unwrap();
    both(65, "config.json is not as it was written");
    fs::write(&copy, whole).unwrap();
    // A copy of the manifest from before the last shard.
    let (manifest, shards) = (dir.join("ds/manifest.sqlite"), dir.join("ds/shards"));
    let newest = fs::read(&manifest).unwrap();
    fs::copy(shards.join("shard-000000.safetensors"), shards.join("shard-000007.safetensors"))
        .unwrap();
    let account = fs::read(dir.join("ds/COMMITTED")).unwrap();
    fs::write(dir.join("ds/COMMITTED"), "8\n").unwrap();
    both(65, "is older than the shards");
    fs::remove_file(shards.join("shard-000007.safetensors")).unwrap();
    fs::write(dir.join("ds/COMMITTED"), account).unwrap();
    assert_eq!(fs::read(&manifest).unwrap(), newest);
    extractor(dir, &["seal", "ds"]).expect_code(0);
    both(78, "was sealed");
    fs::remove_file(dir.join("ds/manifest.sqlite")).unwrap();
    both(65, "but no manifest that knows them");
}

/// All files below a folder, with digests of their bytes; not what SQLite keeps beside a database
/// that somebody reads.
fn files(dir: &Path) -> Vec<(PathBuf, Digest)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false if name.ends_with("-wal") || name.ends_with("-shm") => {}
            false => found.push((path.clone(), Digest::of(&fs::read(path).unwrap()))),
        }
    }
    found.sort();
    found
}

/// The data set as the version before wrote it: without what the model's JSON files decide.
fn copy_as_begun_earlier(dir: &Path) {
    let new = Manifest::open_read(&dir.join("ds")).unwrap();
    let mut fingerprint = new.fingerprint().clone();
    for name in ["target.config", "tokenizer.named_tokens", "tokenizer.stop_ids"] {
        assert!(fingerprint.fields.remove(name).is_some(), "no {name}");
    }
    let place = DatasetDir::new(dir.join("old"));
    let spec = new.spec();
    let old = Manifest::open_for_write(place.root(), &fingerprint, spec).unwrap();
    let digest = fingerprint.digest();
    let mut writer = ShardWriter::create(&place, ShardId(0), spec, &digest).unwrap();
    let known = new.known_sources("prompts.jsonl").unwrap();
    let mut lines = Vec::new();
    for row in new.samples().unwrap() {
        let digest = known[&row.source_line].digest;
        let outcome = SourceOutcome::Committed(row.id);
        let (file, line, truncated) = (row.source_file, row.source_line, row.truncated);
        lines.push(SourceRecord { file, line, digest, outcome, truncated });
        writer.push(&small::contents(&dir.join("ds"))[&row.id]).unwrap();
    }
    old.commit_shard(&writer.seal().unwrap(), &lines).unwrap();
    for entry in fs::read_dir(dir.join("ds/target")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), place.target().join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_data_set_of_an_earlier_version_goes_on_with_the_model_that_it_has_copies_of() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 10);
    again(dir, &["--limit", "4"]).expect_code(0);
    copy_as_begun_earlier(dir);
    let run = |flags: &[&str]| extractor(dir, &small::run_args_with("old", flags));
    for (name, file, texts, field) in [
        ("theta", "config.json", ["50000.0", "40000.0"], "target.config.rope_theta"),
        ("named", "tokenizer_config.json", NAMED, "tokenizer.named_tokens.bos_token"),
        ("stop", "generation_config.json", ["3842", "3843"], "tokenizer.stop_ids"),
    ] {
        edited_model(&dir.join(name), file, texts);
        let refused = run(&["--model", name]).expect_code(78);
        assert!(refused.stderr.contains(field), "{name}: {refused:?}");
    }
    run(&[]).expect_code(0);
    small::assert_clean(dir, "old");
    again(dir, &[]).expect_code(0);
    assert!(small::contents(&dir.join("old")) == small::contents(&dir.join("ds")));
    // Without the copies there is nothing to compare with, and the samples are as good as before.
    fs::remove_dir_all(dir.join("old/target")).unwrap();
    let unknown = run(&[]).expect_code(0);
    assert!(unknown.stderr.contains("no config.json to compare"), "{unknown:?}");
    small::assert_clean(dir, "old");
}

#[test]
fn a_run_that_failed_before_its_first_sample_does_not_bind_the_next_one() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 6);
    let failed = again(dir, &["--tp", "3", "--max-tokens", "80"]);
    assert_ne!(failed.code, 0, "3 ranks can't share its heads: {failed:?}");
    again(dir, &["--tp", "2"]).expect_code(0);
    small::assert_clean(dir, "ds");
    again(dir, &["--tp", "4"]).expect_code(78);
}

#[test]
fn a_line_that_changed_since_its_run_is_named() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 6);
    small::run(dir, "ds").expect_code(0);
    let path = dir.join("prompts.jsonl");
    let changed =
        fs::read_to_string(&path).unwrap().replacen("\"content\": \"", "\"content\": \"x", 1);
    fs::write(&path, changed).unwrap();
    let refused = small::run(dir, "ds").expect_code(65);
    assert!(refused.stderr.contains("prompts.jsonl:1 changed since"), "{refused:?}");
    small::assert_clean(dir, "ds");
}

#[test]
fn a_rejected_line_may_be_mended_and_one_that_was_unfinished_completed() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 5);
    let path = dir.join("prompts.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    let whole: Vec<&str> = whole.lines().filter(|line| line.starts_with('{')).take(5).collect();
    let half = &whole[3][..whole[3].len() / 2];
    fs::write(&path, [&whole[..1], &["not json"], &whole[2..3], &[half]].concat().join("\n"))
        .unwrap();
    let first = again(dir, &["--max-tokens", "512"]).expect_code(0).stdout;
    assert!(
        first.contains("4 lines = 2 committed + 0 duplicate + 2 rejected + 0 pending"),
        "{first}"
    );
    // Mended to a line that is there already, and to one that is new.
    fs::write(&path, [&whole[..1], &whole[..1], &whole[2..]].concat().join("\n")).unwrap();
    let mended = again(dir, &["--max-tokens", "512"]).expect_code(0).stdout;
    assert!(
        mended.contains("5 lines = 4 committed + 1 duplicate + 0 rejected + 0 pending"),
        "{mended}"
    );
    small::assert_clean(dir, "ds");
}

#[test]
fn settings_that_decide_no_bytes_may_change_and_are_recorded() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    again(dir, &["--limit", "5"]).expect_code(0);
    let sql = ["query", "ds", "--json", "--sql", "SELECT config FROM run ORDER BY id DESC LIMIT 1"];
    for (flags, recorded) in [
        (["--limit", "7"], "limit = 7"),
        (["--batch-tokens", "97"], "batch_tokens = 97"),
        (["--shard-bytes", "70000"], "shard_bytes = 70000"),
        (["--reject-limit", "0.9"], "reject_limit = 0.9"),
    ] {
        again(dir, &flags).expect_code(0);
        let stored = extractor(dir, &sql).expect_code(0).stdout;
        assert!(stored.contains(recorded), "{flags:?}: {stored}");
    }
    assert_eq!(runs(dir), 5);
    small::assert_clean(dir, "ds");
    // Other shards, the same samples. Other batches round differently, and by no more than that.
    small::run(dir, "straight").expect_code(0);
    let (one, other) = (small::contents(&dir.join("ds")), small::contents(&dir.join("straight")));
    assert!(one.keys().eq(other.keys()));
    let worst = one.values().zip(other.values()).map(|(a, b)| distance(a, b)).fold(0.0, f64::max);
    println!("largest difference by other batches: {worst:.2e} of the layer's rms");
    assert!(worst < TOLERANCE, "{worst}");
}

#[test]
fn a_training_run_goes_on_under_its_own_settings_only() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 16);
    small::run(dir, "ds").expect_code(0);
    let begin = ["fit", "--dataset", "ds", "--run-dir", "run", "--max-steps", "1"];
    trainer(dir, &[&begin[..], &["--ttt-steps", "2", "--held-out", "0"]].concat()).expect_code(0);
    let resume = |more: &[&str]| trainer(dir, &[&["fit", "--resume", "run"], more].concat());
    for (flag, key, values) in [
        (["--lr", "0.5"], "train.lr", "0.5"),
        (["--seed", "9"], "train.seed", "9"),
        (["--ttt-steps", "3"], "train.ttt_steps", "3"),
        (["--max-tokens", "99"], "data.max_tokens", "99"),
    ] {
        let refused = resume(&flag).expect_code(78);
        assert!(refused.stderr.contains(key) && refused.stderr.contains(values), "{refused:?}");
    }
    resume(&["--prefetch", "5"]).expect_code(0);
}
