//! Results of any reading query as rows of cells, for people and for other programs.

use std::fmt;

use serde::{Serialize, Serializer};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Column, Executor, Row, SqlSafeStr, SqlStr, TypeInfo, ValueRef};

use super::{Manifest, ManifestError};

/// The listings that have a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Listing {
    /// Every sample.
    Samples,
    /// Every shard with its sums.
    Shards,
    /// Every rejected line with its reason.
    Rejects,
    /// Samples by length.
    Tokens,
    /// Every run.
    Runs,
}

impl Listing {
    fn sql(self) -> &'static str {
        match self {
            Self::Samples => "SELECT * FROM v_samples",
            Self::Shards => "SELECT * FROM v_shards",
            Self::Rejects => "SELECT * FROM v_rejects",
            Self::Tokens => "SELECT * FROM v_token_histogram",
            Self::Runs => {
                "SELECT id, datetime(started, 'unixepoch') AS started, \
                 datetime(stopped, 'unixepoch') AS stopped, host, pid, version, outcome, tokens, \
                 bytes, round(seconds, 3) AS seconds, \
                 round(tokens / nullif(seconds, 0), 1) AS tokens_per_second, argv \
                 FROM run ORDER BY id"
            }
        }
    }
}

/// One value.
#[derive(Clone, PartialEq, Debug)]
pub enum Cell {
    /// No value.
    Null,
    /// Whole number.
    Integer(i64),
    /// Real number.
    Real(f64),
    /// Text.
    Text(String),
    /// Bytes, shown as hex digits.
    Blob(Vec<u8>),
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => Ok(()),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Real(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
            Self::Blob(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_none(),
            Self::Integer(number) => serializer.serialize_i64(*number),
            Self::Real(number) => serializer.serialize_f64(*number),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Blob(_) => serializer.collect_str(self),
        }
    }
}

/// Rows with named columns.
#[derive(Clone, PartialEq, Debug)]
pub struct Table {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// One cell a column.
    pub rows: Vec<Vec<Cell>>,
}

impl Manifest {
    /// One of the listings that have a name.
    pub fn list(&self, listing: Listing) -> Result<Table, ManifestError> {
        self.table(listing.sql().into_sql_str())
    }

    /// The result of a query of the user's own. Works on a manifest opened for reading, where
    /// SQLite itself refuses to write; other statements than reading ones are refused before.
    pub fn query(&self, sql: &str) -> Result<Table, ManifestError> {
        let word: String = sql.trim_start().chars().take_while(|c| c.is_alphabetic()).collect();
        let reading = ["select", "with", "values", "explain"];
        if self.writable().is_ok() || !reading.contains(&word.to_lowercase().as_str()) {
            return Err(ManifestError::NotASelect(word));
        }
        self.table(AssertSqlSafe(sql.to_owned()).into_sql_str()).map_err(|error| match error {
            // A complaint about the query itself; not damage, disk or locks.
            ManifestError::Sql { exit_code: 70, source, .. } => ManifestError::Query(source),
            other => other,
        })
    }

    fn table(&self, sql: SqlStr) -> Result<Table, ManifestError> {
        self.with("running the query", async |conn| {
            let statement = conn.prepare(sql).await?;
            let columns = columns(sqlx::Statement::columns(&statement));
            let rows = sqlx::Statement::query(&statement).fetch_all(&mut *conn).await?;
            let rows = rows.iter().map(cells).collect::<Result<_, _>>()?;
            Ok(Table { columns, rows })
        })
    }
}

fn columns(columns: &[sqlx::sqlite::SqliteColumn]) -> Vec<String> {
    columns.iter().map(|column| column.name().to_owned()).collect()
}

fn cells(row: &SqliteRow) -> Result<Vec<Cell>, sqlx::Error> {
    (0..row.len())
        .map(|column| {
            let value = row.try_get_raw(column)?;
            if value.is_null() {
                return Ok(Cell::Null);
            }
            Ok(match value.type_info().name() {
                "INTEGER" => Cell::Integer(row.try_get_unchecked(column)?),
                "REAL" => Cell::Real(row.try_get_unchecked(column)?),
                "BLOB" => Cell::Blob(row.try_get_unchecked(column)?),
                _ => Cell::Text(row.try_get_unchecked(column)?),
            })
        })
        .collect()
}
