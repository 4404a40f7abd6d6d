//! Writes: shards with their samples, outcomes of input lines, inputs, runs. Every call is one
//! transaction.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Connection, Row};

use super::{Manifest, ManifestError, held};
use crate::digest::Digest;
use crate::provenance::{self, Provenance};
use crate::sample::SampleId;
use crate::shard::{SealedShard, ShardEntry};

/// What became of an input line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SourceOutcome {
    /// It gave this sample.
    Committed(SampleId),
    /// It gave a sample that another line had given already.
    Duplicate(SampleId),
    /// It is unusable, and why.
    Rejected(String),
}

/// One input file, as the manifest registers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputFile {
    /// The name by which it was given.
    pub file: String,
    /// Lines that are not blank; each of them needs an outcome.
    pub lines: u64,
    /// Blank lines; line numbers count them too.
    pub blank: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// BLAKE3 of the whole file.
    pub digest: Digest,
}

/// The outcome of one input line, to be recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceRecord {
    /// Input file, named as in [`Manifest::register_input`].
    pub file: String,
    /// Line number in it.
    pub line: u64,
    /// First 16 bytes of BLAKE3 of the line, so that a changed line is noticed.
    pub digest: [u8; 16],
    /// What became of it.
    pub outcome: SourceOutcome,
    /// Whether the sample was cut to the length limit.
    pub truncated: bool,
}

/// The outcome of one input line, as recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceRow {
    /// Digest of the line at that time.
    pub digest: [u8; 16],
    /// What became of it.
    pub outcome: SourceOutcome,
}

/// How a run was started.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RunStart {
    /// The command line.
    pub argv: Vec<String>,
    /// The host.
    pub host: String,
    /// The resolved configuration, as text.
    pub config: String,
}

/// How a run ended.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunEnd {
    /// `completed`, `stopped`, or the error.
    pub outcome: String,
    /// Tokens committed by it.
    pub tokens: u64,
    /// Bytes of shards written by it.
    pub bytes: u64,
    /// Its duration.
    pub seconds: f64,
}

/// Number of a run in its data set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunId(pub i64);

impl Manifest {
    /// Commits a sealed shard: its row, all its samples and tensors, and the lines they came from.
    /// Each sample needs exactly one `Committed` line among `sources`.
    pub fn commit_shard(
        &self,
        shard: &SealedShard,
        sources: &[SourceRecord],
    ) -> Result<(), ManifestError> {
        self.commit_shards(std::slice::from_ref(shard), sources)
    }

    /// [`Self::commit_shard`] for several: all of them or none.
    pub fn commit_shards(
        &self,
        shards: &[SealedShard],
        sources: &[SourceRecord],
    ) -> Result<(), ManifestError> {
        self.writable()?;
        let digest = self.fingerprint().digest();
        if let Some(foreign) = shards.iter().find(|shard| shard.fingerprint != digest) {
            return Err(ManifestError::ForeignShard(foreign.id));
        }
        if let Some(large) = shards.iter().find(|shard| i64::try_from(shard.bytes).is_err()) {
            return Err(ManifestError::TooLarge(large.bytes));
        }
        let origins = origins(shards, sources)?;
        let committed: HashSet<SampleId> =
            shards.iter().flat_map(|shard| &shard.entries).map(|e| e.sample_id).collect();
        let waiting: Vec<SourceRecord> = held(&self.waiting)
            .iter()
            .filter(|record| match record.outcome {
                SourceOutcome::Duplicate(id) => committed.contains(&id),
                _ => false,
            })
            .cloned()
            .collect();
        self.with("committing a shard", async |conn| {
            let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
            let mut origins = origins.iter();
            for shard in shards {
                insert_shard(&mut transaction, shard, false).await?;
                for (entry, origin) in shard.entries.iter().zip(&mut origins) {
                    insert_sample(&mut transaction, shard.id.0, entry, origin).await?;
                }
            }
            for record in sources.iter().chain(&waiting) {
                insert_source(&mut transaction, record).await?;
            }
            transaction.commit().await
        })?;
        held(&self.waiting).retain(|record| !waiting.contains(record));
        self.account()
    }

    /// Records lines that come without a shard: rejects, and duplicates of samples that are
    /// committed. A duplicate of a sample that is not committed yet is kept in memory and recorded
    /// with its sample, so that after a crash it is pending, as its sample is.
    pub fn record_sources(&self, sources: &[SourceRecord]) -> Result<(), ManifestError> {
        self.writable()?;
        let waiting = self.with("recording lines", async |conn| {
            let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
            let mut waiting = Vec::new();
            for record in sources {
                let exists = match &record.outcome {
                    SourceOutcome::Rejected(_) => true,
                    SourceOutcome::Committed(id) | SourceOutcome::Duplicate(id) => {
                        sqlx::query("SELECT 1 FROM sample WHERE id = ?")
                            .bind(id.0.to_vec())
                            .fetch_optional(&mut *transaction)
                            .await?
                            .is_some()
                    }
                };
                if exists {
                    insert_source(&mut transaction, record).await?;
                } else {
                    waiting.push(record.clone());
                }
            }
            transaction.commit().await?;
            Ok(waiting)
        })?;
        held(&self.waiting).extend(waiting);
        Ok(())
    }

    /// Says how many lines of an input file must be accounted for. A second call for the same file
    /// replaces the first; lines beyond the new end are forgotten.
    pub fn register_input(&self, input: &InputFile) -> Result<(), ManifestError> {
        self.writable()?;
        let InputFile { file, lines, blank, bytes, digest } = input;
        let (lines, blank, bytes) = (signed(*lines)?, signed(*blank)?, signed(*bytes)?);
        let end = lines.checked_add(blank).ok_or(ManifestError::TooLarge(input.lines))?;
        self.with("registering an input", async |conn| {
            let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
            sqlx::query(
                "INSERT INTO input (file, lines, blank, bytes, digest) VALUES (?, ?, ?, ?, ?) \
                 ON CONFLICT (file) DO UPDATE SET lines = excluded.lines, \
                 blank = excluded.blank, bytes = excluded.bytes, digest = excluded.digest",
            )
            .bind(file)
            .bind(lines)
            .bind(blank)
            .bind(bytes)
            .bind(digest.0.to_vec())
            .execute(&mut *transaction)
            .await?;
            sqlx::query("DELETE FROM source WHERE file = ? AND line > ?")
                .bind(file)
                .bind(end)
                .execute(&mut *transaction)
                .await?;
            transaction.commit().await
        })
    }

    /// Records that a run begins.
    pub fn begin_run(&self, start: &RunStart) -> Result<RunId, ManifestError> {
        self.writable()?;
        let here = Provenance::here();
        let argv = serde_json::Value::from(start.argv.clone()).to_string();
        self.with("recording the run", async |conn| {
            let row = sqlx::query(
                "INSERT INTO run (started, host, pid, version, argv, config) \
                 VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
            )
            .bind(here.unix_time as i64)
            .bind(&start.host)
            .bind(i64::from(here.pid))
            .bind(&here.version)
            .bind(argv)
            .bind(&start.config)
            .fetch_one(conn)
            .await?;
            Ok(RunId(row.try_get(0)?))
        })
    }

    /// Records how a run ended.
    pub fn finish_run(&self, run: RunId, end: &RunEnd) -> Result<(), ManifestError> {
        self.writable()?;
        let (tokens, bytes) = (signed(end.tokens)?, signed(end.bytes)?);
        self.with("recording the run's end", async |conn| {
            sqlx::query(
                "UPDATE run SET stopped = ?, outcome = ?, tokens = ?, bytes = ?, seconds = ? \
                 WHERE id = ?",
            )
            .bind(provenance::unix_time() as i64)
            .bind(&end.outcome)
            .bind(tokens)
            .bind(bytes)
            .bind(end.seconds)
            .bind(run.0)
            .execute(conn)
            .await?;
            Ok(())
        })
    }
}

/// The committed line of every sample, in the order of the shards' entries.
fn origins<'a>(
    shards: &[SealedShard],
    sources: &'a [SourceRecord],
) -> Result<Vec<&'a SourceRecord>, ManifestError> {
    let mut by_sample = HashMap::new();
    for record in sources {
        if let SourceOutcome::Committed(id) = record.outcome {
            by_sample.insert(id, record);
        }
    }
    let origins = shards
        .iter()
        .flat_map(|shard| &shard.entries)
        .map(|entry| {
            by_sample.remove(&entry.sample_id).ok_or(ManifestError::NoSource(entry.sample_id))
        })
        .collect::<Result<Vec<_>, _>>()?;
    match by_sample.into_iter().next() {
        None => Ok(origins),
        Some((sample, record)) => {
            let (file, line) = (record.file.clone(), record.line);
            Err(ManifestError::NotInShard { file, line, sample })
        }
    }
}

fn signed(number: u64) -> Result<i64, ManifestError> {
    i64::try_from(number).map_err(|_| ManifestError::TooLarge(number))
}

/// `rebuilt`: the manifest was lost, and the digest is that of the file as it was found.
pub(super) async fn insert_shard(
    conn: &mut SqliteConnection,
    shard: &SealedShard,
    rebuilt: bool,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO shard (id, file, bytes, digest, sealed, rebuilt) VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(i64::from(shard.id.0))
    .bind(&shard.file)
    .bind(shard.bytes as i64)
    .bind(shard.digest.0.to_vec())
    .bind(provenance::unix_time() as i64)
    .bind(i64::from(rebuilt))
    .execute(conn)
    .await?;
    Ok(())
}

pub(super) async fn insert_sample(
    conn: &mut SqliteConnection,
    shard: u32,
    entry: &ShardEntry,
    origin: &SourceRecord,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO sample (id, shard, tokens, trainable_tokens, source_file, source_line, \
         truncated) VALUES (?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(entry.sample_id.0.to_vec())
    .bind(i64::from(shard))
    .bind(entry.tokens as i64)
    .bind(entry.trainable_tokens as i64)
    .bind(&origin.file)
    .bind(origin.line as i64)
    .bind(i64::from(origin.truncated))
    .execute(&mut *conn)
    .await?;
    for tensor in &entry.tensors {
        let shape = serde_json::Value::from(tensor.shape.clone()).to_string();
        sqlx::query(
            "INSERT INTO tensor (sample, name, dtype, shape, rms, absmax) \
             VALUES (?, ?, ?, ?, ?, ?)",
        )
        .bind(entry.sample_id.0.to_vec())
        .bind(&tensor.name)
        .bind(&tensor.dtype)
        .bind(shape)
        .bind(tensor.rms)
        .bind(tensor.absmax)
        .execute(&mut *conn)
        .await?;
    }
    super::storage_errors::insert(conn, entry.sample_id, &entry.storage_errors).await
}

/// Gives a sample whose line is not known the first line that comes to it: the manifest was
/// rebuilt, or the end of the file was cut off for a while.
async fn adopt(
    conn: &mut SqliteConnection,
    id: SampleId,
    record: &SourceRecord,
) -> Result<bool, sqlx::Error> {
    let adopted = sqlx::query(
        "UPDATE sample SET source_file = ?, source_line = ?, truncated = ? \
         WHERE id = ? AND NOT EXISTS \
         (SELECT 1 FROM source WHERE source.sample = sample.id AND outcome = 'committed')",
    )
    .bind(&record.file)
    .bind(record.line as i64)
    .bind(i64::from(record.truncated))
    .bind(id.0.to_vec())
    .execute(conn)
    .await?;
    Ok(adopted.rows_affected() == 1)
}

/// The first outcome of a line stands, until the line's text changes, it had been rejected, or it
/// repeated a sample that has no other line any more.
async fn insert_source(
    conn: &mut SqliteConnection,
    record: &SourceRecord,
) -> Result<(), sqlx::Error> {
    let adopted = match &record.outcome {
        SourceOutcome::Duplicate(id) => adopt(conn, *id, record).await?,
        _ => false,
    };
    let (outcome, sample, reason) = match &record.outcome {
        SourceOutcome::Duplicate(id) if adopted => ("committed", Some(id.0.to_vec()), None),
        SourceOutcome::Committed(id) => ("committed", Some(id.0.to_vec()), None),
        SourceOutcome::Duplicate(id) => ("duplicate", Some(id.0.to_vec()), None),
        SourceOutcome::Rejected(reason) => ("rejected", None, Some(reason.as_str())),
    };
    sqlx::query(
        "INSERT INTO source (file, line, digest, outcome, sample, reason) \
         VALUES (?, ?, ?, ?, ?, ?) \
         ON CONFLICT (file, line) DO UPDATE SET digest = excluded.digest, \
         outcome = excluded.outcome, sample = excluded.sample, reason = excluded.reason \
         WHERE source.digest <> excluded.digest OR source.outcome = 'rejected' \
         OR (excluded.outcome = 'committed' AND source.sample = excluded.sample)",
    )
    .bind(&record.file)
    .bind(record.line as i64)
    .bind(record.digest.to_vec())
    .bind(outcome)
    .bind(sample)
    .bind(reason)
    .execute(conn)
    .await?;
    Ok(())
}
