//! Typed reads of the manifest.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row};

use super::{Manifest, ManifestError, SourceOutcome, SourceRow};
use crate::digest::Digest;
use crate::sample::SampleId;
use crate::shard::{ShardId, TensorRecord};

/// What became of all input lines: `lines = committed + duplicate + rejected + pending`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Conservation {
    /// Lines of all registered inputs.
    pub lines: u64,
    /// Lines that gave a sample.
    pub committed: u64,
    /// Lines that gave a sample another line had given.
    pub duplicate: u64,
    /// Unusable lines.
    pub rejected: u64,
    /// Lines of registered inputs without an outcome.
    pub pending: u64,
}

impl Conservation {
    /// Whether the law holds. It does not when outcomes exist for lines that no input has.
    pub fn holds(&self) -> bool {
        self.lines == self.committed + self.duplicate + self.rejected + self.pending
    }

    /// The law with its numbers; `unit` is what was counted, lines or files.
    pub fn in_words(&self, unit: &str) -> String {
        let Self { lines, committed, duplicate, rejected, pending } = self;
        format!(
            "{lines} {unit} = {committed} committed + {duplicate} duplicate + {rejected} rejected \
             + {pending} pending"
        )
    }
}

/// A committed sample.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SampleRow {
    /// Its id.
    pub id: SampleId,
    /// Its shard.
    pub shard: ShardId,
    /// Bare file name of the shard.
    pub shard_file: String,
    /// Its tokens.
    pub tokens: usize,
    /// Tokens with loss mask 1.
    pub trainable_tokens: usize,
    /// Input file it came from.
    pub source_file: String,
    /// Line in that file.
    pub source_line: u64,
    /// Whether it was cut to the length limit.
    pub truncated: bool,
}

/// A committed shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardRow {
    /// Its number.
    pub id: ShardId,
    /// Its bare file name.
    pub file: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// BLAKE3 of the file.
    pub digest: Digest,
}

impl Manifest {
    /// Number for the next shard: one more than the largest committed.
    pub fn next_shard_id(&self) -> Result<ShardId, ManifestError> {
        self.with("reading shards", async |conn| {
            let next: i64 = sqlx::query_scalar("SELECT coalesce(max(id) + 1, 0) FROM shard")
                .fetch_one(conn)
                .await?;
            Ok(ShardId(unsigned(next)?))
        })
    }

    /// Recorded outcomes of the lines of an input file, by line number.
    pub fn known_sources(&self, file: &str) -> Result<HashMap<u64, SourceRow>, ManifestError> {
        self.with("reading outcomes of lines", async |conn| {
            let rows = sqlx::query(
                "SELECT line, digest, outcome, sample, reason FROM source WHERE file = ?",
            )
            .bind(file)
            .fetch_all(conn)
            .await?;
            rows.iter().map(source_row).collect()
        })
    }

    /// Ids of all committed samples.
    pub fn committed_samples(&self) -> Result<HashSet<SampleId>, ManifestError> {
        self.with("reading samples", async |conn| {
            let rows = sqlx::query("SELECT id FROM sample").fetch_all(conn).await?;
            rows.iter().map(|row| Ok(SampleId(bytes(row, 0)?))).collect()
        })
    }

    /// All committed samples in order of their ids.
    pub fn samples(&self) -> Result<Vec<SampleRow>, ManifestError> {
        self.with("reading samples", async |conn| {
            let rows = sqlx::query(
                "SELECT sample.id, shard, file, tokens, trainable_tokens, source_file, \
                 source_line, truncated FROM sample JOIN shard ON shard.id = sample.shard \
                 ORDER BY sample.id",
            )
            .fetch_all(conn)
            .await?;
            rows.iter().map(sample_row).collect()
        })
    }

    /// One committed sample.
    pub fn sample(&self, id: SampleId) -> Result<Option<SampleRow>, ManifestError> {
        self.with("reading a sample", async |conn| {
            let row = sqlx::query(
                "SELECT sample.id, shard, file, tokens, trainable_tokens, source_file, \
                 source_line, truncated FROM sample JOIN shard ON shard.id = sample.shard \
                 WHERE sample.id = ?",
            )
            .bind(id.0.to_vec())
            .fetch_optional(conn)
            .await?;
            row.as_ref().map(sample_row).transpose()
        })
    }

    /// Samples that no recorded line has given: their line has changed since.
    pub fn samples_without_line(&self) -> Result<Vec<SampleId>, ManifestError> {
        self.with("reading samples", async |conn| {
            let rows = sqlx::query(
                "SELECT id FROM sample WHERE id NOT IN (SELECT sample FROM source \
                 WHERE sample IS NOT NULL) ORDER BY id",
            )
            .fetch_all(conn)
            .await?;
            rows.iter().map(|row| Ok(SampleId(bytes(row, 0)?))).collect()
        })
    }

    /// All committed shards in order of their numbers.
    pub fn shards(&self) -> Result<Vec<ShardRow>, ManifestError> {
        self.with("reading shards", async |conn| {
            let rows = sqlx::query("SELECT id, file, bytes, digest FROM shard ORDER BY id")
                .fetch_all(conn)
                .await?;
            rows.iter().map(shard_row).collect()
        })
    }

    /// The recorded tensors of a sample, by name.
    pub fn tensors(&self, sample: SampleId) -> Result<Vec<TensorRecord>, ManifestError> {
        self.with("reading tensors", async |conn| {
            let rows = sqlx::query(
                "SELECT name, dtype, shape, rms, absmax FROM tensor WHERE sample = ? ORDER BY name",
            )
            .bind(sample.0.to_vec())
            .fetch_all(conn)
            .await?;
            rows.iter().map(tensor_row).collect()
        })
    }

    /// What became of all input lines.
    pub fn conservation(&self) -> Result<Conservation, ManifestError> {
        self.with("counting lines", async |conn| {
            // One snapshot: a writer may commit between two counts.
            let mut snapshot = conn.begin().await?;
            let row = sqlx::query(
                "SELECT coalesce((SELECT sum(lines) FROM input), 0), \
                 count(*) FILTER (WHERE outcome = 'committed'), \
                 count(*) FILTER (WHERE outcome = 'duplicate'), \
                 count(*) FILTER (WHERE outcome = 'rejected') FROM source",
            )
            .fetch_one(&mut *snapshot)
            .await?;
            // A manifest of an earlier version that is only read does not know of blank lines.
            let column = "SELECT 1 FROM pragma_table_info('input') WHERE name = 'blank'";
            let knows_blank = sqlx::query(column).fetch_optional(&mut *snapshot).await?.is_some();
            // Without them the largest line number is not known.
            let pending: i64 = sqlx::query_scalar(if knows_blank {
                "SELECT coalesce(sum(max(lines - (SELECT count(*) FROM source WHERE source.file = \
                 input.file AND line BETWEEN 0 AND input.lines + input.blank), 0)), 0) FROM input"
            } else {
                "SELECT coalesce(sum(max(lines - (SELECT count(*) FROM source WHERE source.file = \
                 input.file), 0)), 0) FROM input"
            })
            .fetch_one(&mut *snapshot)
            .await?;
            snapshot.rollback().await?;
            Ok(Conservation {
                lines: number(&row, 0)?,
                committed: number(&row, 1)?,
                duplicate: number(&row, 2)?,
                rejected: number(&row, 3)?,
                pending: pending as u64,
            })
        })
    }

    /// SQLite's own full check of the file, and of the references between tables: empty when well.
    pub fn integrity(&self) -> Result<Vec<String>, ManifestError> {
        self.with("checking the manifest", async |conn| {
            let mut report: Vec<String> =
                sqlx::query_scalar("PRAGMA integrity_check(20)").fetch_all(&mut *conn).await?;
            report.retain(|line| line != "ok");
            let broken = sqlx::query("PRAGMA foreign_key_check").fetch_all(&mut *conn).await?;
            for row in broken.iter().take(20) {
                let (table, parent): (String, String) = (row.try_get(0)?, row.try_get(2)?);
                report.push(format!("a row of {table} names a row of {parent} that is not there"));
            }
            Ok(report)
        })
    }
}

fn invalid(text: impl Into<String>) -> sqlx::Error {
    sqlx::Error::Decode(text.into().into())
}

fn unsigned<T: TryFrom<i64>>(number: i64) -> Result<T, sqlx::Error> {
    T::try_from(number).map_err(|_| invalid(format!("{number} is out of range")))
}

pub(super) fn number<T: TryFrom<i64>>(row: &SqliteRow, column: usize) -> Result<T, sqlx::Error> {
    unsigned(row.try_get::<i64, _>(column)?)
}

pub(super) fn bytes<const N: usize>(
    row: &SqliteRow,
    column: usize,
) -> Result<[u8; N], sqlx::Error> {
    let bytes: Vec<u8> = row.try_get(column)?;
    bytes.try_into().map_err(|_| invalid(format!("a value that is not {N} bytes")))
}

fn source_row(row: &SqliteRow) -> Result<(u64, SourceRow), sqlx::Error> {
    let sample = || bytes(row, 3).map(SampleId);
    let outcome = match row.try_get::<String, _>(2)?.as_str() {
        "committed" => SourceOutcome::Committed(sample()?),
        "duplicate" => SourceOutcome::Duplicate(sample()?),
        "rejected" => SourceOutcome::Rejected(row.try_get(4)?),
        other => return Err(invalid(format!("outcome {other:?}"))),
    };
    Ok((number(row, 0)?, SourceRow { digest: bytes(row, 1)?, outcome }))
}

fn sample_row(row: &SqliteRow) -> Result<SampleRow, sqlx::Error> {
    let shard = ShardId(number(row, 1)?);
    Ok(SampleRow {
        id: SampleId(bytes(row, 0)?),
        shard,
        shard_file: shard_file(shard, row, 2)?,
        tokens: number(row, 3)?,
        trainable_tokens: number(row, 4)?,
        source_file: row.try_get(5)?,
        source_line: number(row, 6)?,
        truncated: row.try_get::<i64, _>(7)? != 0,
    })
}

fn shard_row(row: &SqliteRow) -> Result<ShardRow, sqlx::Error> {
    let id = ShardId(number(row, 0)?);
    let file = shard_file(id, row, 1)?;
    Ok(ShardRow { id, file, bytes: number(row, 2)?, digest: Digest(bytes(row, 3)?) })
}

/// A path must never come from the database: the name has to follow from the number.
fn shard_file(id: ShardId, row: &SqliteRow, column: usize) -> Result<String, sqlx::Error> {
    let file: String = row.try_get(column)?;
    if file == id.file_name() {
        Ok(file)
    } else {
        Err(invalid(format!("shard {id} is said to be in {file:?}, not in {}", id.file_name())))
    }
}

fn tensor_row(row: &SqliteRow) -> Result<TensorRecord, sqlx::Error> {
    let shape: String = row.try_get(2)?;
    Ok(TensorRecord {
        name: row.try_get(0)?,
        dtype: row.try_get(1)?,
        shape: serde_json::from_str(&shape).map_err(|error| invalid(error.to_string()))?,
        rms: row.try_get(3)?,
        absmax: row.try_get(4)?,
    })
}
