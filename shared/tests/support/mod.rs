//! Small data sets for the tests of this crate.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod stepped;
pub mod volatile;

use std::path::Path;

use shared::manifest::InputFile;
use shared::*;

pub fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

pub fn spec(dtype: StateDtype) -> CaptureSpec {
    CaptureSpec { layers: vec![LayerIndex(1), LayerIndex(3)], hidden_size: 6, dtype }
}

pub fn fingerprint() -> Fingerprint {
    Fingerprint::default().with("target", "nano").with("template", "alpha")
}

/// splitmix64: any repeatable sequence will do.
pub fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub fn tokens(tokens: usize, seed: u64) -> TokenSample {
    let mut state = seed;
    let ids = (0..tokens).map(|_| random(&mut state) as u32).collect();
    let mask = (0..tokens).map(|_| (random(&mut state) & 1) as u8).collect();
    TokenSample::new(ids, mask).unwrap()
}

pub fn captured(spec: &CaptureSpec, length: usize, seed: u64) -> CapturedSample {
    let mut state = seed ^ 0x5555;
    let states = spec
        .layers
        .iter()
        .map(|&layer| {
            let values: Vec<f32> = (0..length * spec.hidden_size)
                .map(|_| (random(&mut state) as i32) as f32 / 1e7)
                .collect();
            let rows = StateRows::from_f32(&values, spec.hidden_size, spec.dtype);
            LayerState { layer, shape: vec![length, spec.hidden_size], rows }
        })
        .collect();
    CapturedSample::new(tokens(length, seed), spec, states, &[length]).unwrap()
}

pub fn samples(spec: &CaptureSpec, count: u64) -> Vec<CapturedSample> {
    (0..count).map(|index| captured(spec, 3 + index as usize, 100 + index)).collect()
}

pub fn seal(
    dir: &Path,
    id: ShardId,
    spec: &CaptureSpec,
    samples: &[CapturedSample],
) -> SealedShard {
    let dir = DatasetDir::new(dir);
    let mut writer = ShardWriter::create(&dir, id, spec, &fingerprint().digest()).unwrap();
    for sample in samples {
        writer.push(sample).unwrap();
    }
    writer.seal().unwrap()
}

/// An input of so many lines, none of them blank.
pub fn input(lines: u64) -> InputFile {
    let digest = Digest::of(&lines.to_le_bytes());
    InputFile { file: "prompts.jsonl".into(), lines, blank: 0, bytes: 10, digest }
}

pub fn source(line: u64, outcome: SourceOutcome) -> SourceRecord {
    SourceRecord {
        file: "prompts.jsonl".into(),
        line,
        digest: [line as u8; 16],
        outcome,
        truncated: false,
    }
}

pub fn committed(samples: &[CapturedSample], first_line: u64) -> Vec<SourceRecord> {
    samples
        .iter()
        .zip(first_line..)
        .map(|(sample, line)| source(line, SourceOutcome::Committed(sample.sample().id())))
        .collect()
}

/// A data set of one shard, all lines accounted for.
pub fn build(dir: &Path, spec: &CaptureSpec, samples: &[CapturedSample]) {
    let manifest = Manifest::open_for_write(dir, &fingerprint(), spec).unwrap();
    let lines = samples.len() as u64;
    manifest.register_input(&input(lines)).unwrap();
    let id = manifest.next_shard_id().unwrap();
    let sealed = seal(dir, id, spec, samples);
    manifest.commit_shard(&sealed, &committed(samples, 1)).unwrap();
}

/// What a run does: commits the samples that are missing, two to a shard.
pub fn run(dir: &DatasetDir, samples: &[CapturedSample]) -> Result<(), Box<dyn std::error::Error>> {
    let spec = spec(StateDtype::Bf16);
    let manifest = Manifest::open_for_write_in(dir, &fingerprint(), &spec)?;
    manifest.register_input(&input(samples.len() as u64))?;
    let done = manifest.committed_samples()?;
    let sources = committed(samples, 1);
    let missing: Vec<usize> =
        (0..samples.len()).filter(|&i| !done.contains(&samples[i].sample().id())).collect();
    for pair in missing.chunks(2) {
        let digest = manifest.fingerprint().digest();
        let mut writer = ShardWriter::create(dir, manifest.next_shard_id()?, &spec, &digest)?;
        for &index in pair {
            writer.push(&samples[index])?;
        }
        let records: Vec<SourceRecord> = pair.iter().map(|&i| sources[i].clone()).collect();
        manifest.commit_shard(&writer.seal()?, &records)?;
    }
    Ok(())
}

/// Runs statements with the `sqlite3` inside sqlx, as another program would.
pub fn tamper(dir: &Path, sql: impl Into<String>) {
    use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(dir.join("manifest.sqlite"))
        .foreign_keys(false)
        .pragma("ignore_check_constraints", "ON");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut conn = options.connect().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql.into())).execute(&mut conn).await.unwrap();
        conn.close().await.unwrap();
    });
}

/// Takes a manifest back to versions 4, 3, 2 and 1.
pub const BACK: [&str; 4] = [
    "DROP INDEX source_sample; PRAGMA user_version = 4; \
     DELETE FROM _sqlx_migrations WHERE version > 4",
    "ALTER TABLE input DROP COLUMN blank; PRAGMA user_version = 3; \
     DELETE FROM _sqlx_migrations WHERE version > 3",
    "DROP TABLE storage_error; PRAGMA user_version = 2; \
     DELETE FROM _sqlx_migrations WHERE version > 2",
    "DROP TABLE failure; ALTER TABLE shard DROP COLUMN rebuilt; PRAGMA user_version = 1; \
     DELETE FROM _sqlx_migrations WHERE version > 1",
];

/// An error with all its causes, as the commands print it.
pub fn words(error: &(dyn std::error::Error + 'static)) -> String {
    error_chain::in_words(error)
}
