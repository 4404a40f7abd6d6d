//! A small extraction with rejects, duplicates and several shards, and what it must come to.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use shared::{CapturedSample, HeaderLimits, Manifest, SampleId, ShardReader};

use crate::{Finished, extractor, root};

/// The bundled target.
pub fn model() -> PathBuf {
    root().join("models/nano-kimi")
}

/// Writes `prompts.jsonl`: bundled conversations, one of them twice, one line that is no JSON, one
/// that is blank.
#[allow(clippy::disallowed_methods, reason = "an input of a test")]
pub fn write_prompts(dir: &Path, lines: usize) {
    let bundled = fs::read_to_string(root().join("data/prompts.jsonl")).unwrap_or_default();
    let mut chosen: Vec<&str> = bundled.lines().take(lines).collect();
    let again = chosen.first().copied().unwrap_or_default();
    chosen.insert(lines / 2, "not json");
    chosen.insert(lines / 2, "");
    chosen.push(again);
    let written = fs::write(dir.join("prompts.jsonl"), chosen.join("\n") + "\n");
    assert!(written.is_ok(), "prompts.jsonl can't be written");
}

/// Arguments of the run into `dataset`: several batches, several shards.
pub fn run_args(dataset: &str) -> Vec<String> {
    let model = model();
    let fixed = ["run", "--prompts", "prompts.jsonl", "--max-tokens", "96"];
    let sizes = ["--batch-tokens", "192", "--shard-bytes", "400000", "--reject-limit", "1"];
    let places = ["--dataset", dataset, "--model", model.to_str().unwrap_or_default()];
    fixed.iter().chain(&sizes).chain(&places).map(ToString::to_string).collect()
}

/// [`run_args`] with other values, given as pairs of flag and value.
pub fn run_args_with(dataset: &str, changes: &[&str]) -> Vec<String> {
    let mut args = run_args(dataset);
    for pair in changes.chunks(2) {
        match args.iter().position(|arg| arg == pair[0]) {
            Some(at) => args[at + 1] = pair[1].to_owned(),
            None => args.extend(pair.iter().map(ToString::to_string)),
        }
    }
    args
}

/// Runs it to its end.
pub fn run(dir: &Path, dataset: &str) -> Finished {
    extractor(dir, &run_args(dataset))
}

/// Every committed sample as it is read back.
#[allow(clippy::panic, reason = "a data set that can't be read fails the test")]
pub fn contents(dataset: &Path) -> BTreeMap<SampleId, CapturedSample> {
    let samples = Manifest::open_read(dataset).and_then(|manifest| manifest.samples());
    let mut found = BTreeMap::new();
    for row in samples.unwrap_or_else(|error| panic!("{}: {error}", dataset.display())) {
        let path = dataset.join("shards").join(&row.shard_file);
        let read = ShardReader::open(&path, &HeaderLimits::SHARD).and_then(|it| it.read(row.id));
        found.insert(row.id, read.unwrap_or_else(|error| panic!("{error}")));
    }
    found
}

/// Audits every byte with the binary.
#[track_caller]
pub fn assert_clean(dir: &Path, dataset: &str) -> Finished {
    extractor(dir, &["audit", dataset, "--verify", "all"]).expect_code(0)
}

/// Number of committed samples; none before the manifest is there.
pub fn committed(dataset: &Path) -> usize {
    let samples = Manifest::open_read(dataset).and_then(|manifest| manifest.committed_samples());
    samples.map_or(0, |samples| samples.len())
}
