//! Samples at which the target died, so that one that always kills it is found out.

use std::collections::HashMap;

use sqlx::{Connection, Row};

use super::{Manifest, ManifestError};
use crate::sample::SampleId;

/// How often a sample was in a batch at which the target died, and what was said the last time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Number of deaths.
    pub count: u64,
    /// The last error.
    pub error: String,
}

impl Manifest {
    /// Records that the target died with these samples in its batch.
    pub fn record_failure(&self, samples: &[SampleId], error: &str) -> Result<(), ManifestError> {
        self.writable()?;
        let mut hasher = blake3::Hasher::new();
        for id in samples {
            hasher.update(&id.0);
        }
        let batch = hasher.finalize().as_bytes()[..16].to_vec();
        self.with("recording a failed batch", async |conn| {
            let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
            for id in samples {
                sqlx::query(
                    "INSERT INTO failure (sample, count, batch, error) VALUES (?, 1, ?, ?) \
                     ON CONFLICT (sample) DO UPDATE SET count = count + 1, \
                     batch = excluded.batch, error = excluded.error",
                )
                .bind(id.0.to_vec())
                .bind(&batch)
                .bind(error)
                .execute(&mut *transaction)
                .await?;
            }
            transaction.commit().await
        })
    }

    /// Makes lines pending again that were rejected for one of `reasons`, the word before the
    /// colon, and forgets all deaths of the target; gives the number of lines.
    pub fn forget_rejects(&self, reasons: &[&str]) -> Result<u64, ManifestError> {
        self.writable()?;
        self.with("forgetting rejects", async |conn| {
            let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await?;
            let mut lines = 0;
            for reason in reasons {
                let forgotten = sqlx::query(
                    "DELETE FROM source WHERE outcome = 'rejected' \
                     AND substr(reason, 1, instr(reason, ':') - 1) = ?",
                )
                .bind(*reason)
                .execute(&mut *transaction)
                .await?;
                lines += forgotten.rows_affected();
            }
            sqlx::query("DELETE FROM failure").execute(&mut *transaction).await?;
            transaction.commit().await?;
            Ok(lines)
        })
    }

    /// All samples at which the target has died.
    pub fn failures(&self) -> Result<HashMap<SampleId, Failure>, ManifestError> {
        self.with("reading failed batches", async |conn| {
            // A manifest of version 1 that is only read has no such table.
            let table = "SELECT 1 FROM sqlite_schema WHERE name = 'failure'";
            if sqlx::query(table).fetch_optional(&mut *conn).await?.is_none() {
                return Ok(HashMap::new());
            }
            let rows =
                sqlx::query("SELECT sample, count, error FROM failure").fetch_all(conn).await?;
            rows.iter()
                .map(|row| {
                    let id = SampleId(super::rows::bytes(row, 0)?);
                    let count = super::rows::number(row, 1)?;
                    Ok((id, Failure { count, error: row.try_get(2)? }))
                })
                .collect()
        })
    }
}
