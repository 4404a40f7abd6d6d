//! What storing states in fewer bits has cost, by layer.

use serde::Serialize;
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::rows::number;
use super::{Manifest, ManifestError};
use crate::contract::LayerIndex;
use crate::sample::SampleId;

/// Error of the stored states of one layer, as a share of their root mean square.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct StorageError {
    /// Which layer's output.
    pub layer: LayerIndex,
    /// Samples with a recorded error.
    pub samples: u64,
    /// Root mean square over the tokens of all samples.
    pub error: f64,
    /// Of the sample with the largest.
    pub worst: f64,
}

impl Manifest {
    /// Recorded errors by layer, ascending; none for states stored in bf16.
    pub fn storage_errors(&self) -> Result<Vec<StorageError>, ManifestError> {
        self.with("reading storage errors", async |conn| {
            // A manifest of an earlier version that is only read has no such table.
            let table = "SELECT 1 FROM sqlite_schema WHERE name = 'storage_error'";
            if sqlx::query(table).fetch_optional(&mut *conn).await?.is_none() {
                return Ok(Vec::new());
            }
            let rows = sqlx::query(
                "SELECT layer, count(*), sum(tokens * error * error) / sum(tokens), max(error) \
                 FROM storage_error JOIN sample ON sample.id = sample \
                 GROUP BY layer ORDER BY layer",
            )
            .fetch_all(conn)
            .await?;
            rows.iter().map(storage_error).collect()
        })
    }
}

fn storage_error(row: &SqliteRow) -> Result<StorageError, sqlx::Error> {
    Ok(StorageError {
        layer: LayerIndex(number(row, 0)?),
        samples: number(row, 1)?,
        error: row.try_get::<f64, _>(2)?.sqrt(),
        worst: row.try_get(3)?,
    })
}

pub(super) async fn insert(
    conn: &mut SqliteConnection,
    sample: SampleId,
    errors: &[(LayerIndex, f64)],
) -> Result<(), sqlx::Error> {
    for (layer, error) in errors {
        sqlx::query("INSERT INTO storage_error (sample, layer, error) VALUES (?, ?, ?)")
            .bind(sample.0.to_vec())
            .bind(i64::from(layer.0))
            .bind(error)
            .execute(&mut *conn)
            .await?;
    }
    Ok(())
}
