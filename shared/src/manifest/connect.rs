//! Opens the database: its settings, and the checks that it is ours, sound and of a known version.

use std::path::Path;
use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection, Row};

use super::{ManifestError, leftovers};
use crate::contract::CaptureSpec;
use crate::durable::DatasetDir;
use crate::fingerprint::{FieldChange, Fingerprint};
use crate::provenance;
use crate::shard::FORMAT_VERSION;

/// "AERI".
const APPLICATION_ID: u32 = 0x4145_5249;
const LATEST: i64 = 5;
pub(super) static MIGRATIONS: Migrator = sqlx::migrate!("../migrations");

pub(super) fn sql(doing: &'static str) -> impl FnOnce(sqlx::Error) -> ManifestError {
    move |error| ManifestError::sql(doing, error)
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .foreign_keys(true)
        .busy_timeout(Duration::from_secs(5))
        .pragma("trusted_schema", "OFF")
        .pragma("cell_size_check", "ON")
        .pragma("mmap_size", "0")
        .pragma("synchronous", "FULL")
        .disable_statement_logging()
}

/// Opens or creates the database of `dir` and brings its tables to the current version. An old one
/// is looked at first, for it must not be changed where it is refused.
pub(super) async fn for_write(dir: &DatasetDir) -> Result<SqliteConnection, ManifestError> {
    let path = &dir.manifest();
    let mut conn = options(path)
        .create_if_missing(true)
        .connect()
        .await
        .map_err(|source| opening(path, source))?;
    let before = check_identity(&mut conn, path, true).await?;
    if (1..LATEST).contains(&before) && !is_new(&mut conn).await? {
        leftovers::uncommitted(&mut conn, dir).await?;
    }
    // Only now: changing the journal mode writes to the file.
    sqlx::query("PRAGMA journal_mode = WAL")
        .execute(&mut conn)
        .await
        .map_err(sql("setting the journal mode"))?;
    MIGRATIONS
        .run(&mut conn)
        .await
        .map_err(|source| ManifestError::Migrate { path: path.to_path_buf(), source })?;
    Ok(conn)
}

/// Opens the database for reading. A sealed copy on a read-only medium works as well.
pub(super) async fn for_read(path: &Path) -> Result<SqliteConnection, ManifestError> {
    let options = options(path).read_only(true).pragma("query_only", "ON");
    let mut opened = match options.clone().connect().await {
        Ok(mut conn) => {
            sqlx::query("SELECT 1 FROM sqlite_schema").fetch_optional(&mut conn).await.map(|_| conn)
        }
        Err(error) => Err(error),
    };
    let log = std::fs::metadata(path.with_extension("sqlite-wal"));
    let pending = log.is_ok_and(|log| log.len() > 0);
    if opened.is_err() && !pending {
        // Without a log nothing is pending, so the file alone is the whole database.
        opened = options.immutable(true).connect().await;
    }
    let mut conn = opened.map_err(|source| match disk_refuses(&source) && pending {
        true => ManifestError::NoIndex { path: path.to_path_buf(), source: source.into() },
        false => opening(path, source),
    })?;
    check_identity(&mut conn, path, false).await?;
    Ok(conn)
}

fn opening(path: &Path, source: sqlx::Error) -> ManifestError {
    let code = source.as_database_error().and_then(|error| error.code());
    match code.as_deref() {
        Some("26" | "11") => damaged(path, source.to_string()),
        _ => ManifestError::sql("opening the manifest", source),
    }
}

/// Whether the error is one of the disk: FULL, IOERR, READONLY or CANTOPEN of any kind.
fn disk_refuses(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.and_then(|code| code.parse::<u32>().ok())
        .is_some_and(|code| matches!(code & 0xff, 13 | 10 | 8 | 14))
}

fn damaged(path: &Path, detail: impl Into<String>) -> ManifestError {
    ManifestError::Damaged { path: path.to_path_buf(), detail: detail.into() }
}

/// Gives the version; 0 for a database that is new.
async fn check_identity(
    conn: &mut SqliteConnection,
    path: &Path,
    may_be_new: bool,
) -> Result<i64, ManifestError> {
    let number = async |conn: &mut SqliteConnection, query: &'static str| {
        let row = sqlx::query_scalar::<_, i64>(query).fetch_one(conn).await;
        row.map_err(|source| opening(path, source))
    };
    let version: String = sqlx::query_scalar("SELECT sqlite_version()")
        .fetch_one(&mut *conn)
        .await
        .map_err(|source| opening(path, source))?;
    if !is_fixed_sqlite(&version) {
        return Err(ManifestError::OldSqlite(version));
    }
    let application = number(&mut *conn, "PRAGMA application_id").await?;
    let user_version = number(&mut *conn, "PRAGMA user_version").await?;
    let foreign_tables = "SELECT count(*) FROM sqlite_schema WHERE name NOT LIKE '\\_sqlx%' \
                          ESCAPE '\\' AND name NOT LIKE 'sqlite%'";
    let tables = number(&mut *conn, foreign_tables).await?;
    let ours = application == i64::from(APPLICATION_ID);
    if !ours && (tables > 0 || application != 0 || !may_be_new) {
        let found = application as u32;
        return Err(ManifestError::NotAManifest { path: path.to_path_buf(), found });
    }
    if user_version > LATEST {
        let path = path.to_path_buf();
        return Err(ManifestError::Newer { path, found: user_version, known: LATEST });
    }
    let report: Vec<String> = sqlx::query_scalar("PRAGMA quick_check(5)")
        .fetch_all(&mut *conn)
        .await
        .map_err(|source| opening(path, source))?;
    if report != ["ok"] {
        return Err(damaged(path, report.join("; ")));
    }
    Ok(user_version)
}

/// 3.51.3 carries the fix of the WAL-reset corruption.
fn is_fixed_sqlite(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    (next(), next(), next()) >= (3, 51, 3)
}

/// Whether the database has no settings yet: a new data set, or one whose manifest was lost.
pub(super) async fn is_new(conn: &mut SqliteConnection) -> Result<bool, ManifestError> {
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM dataset")
        .fetch_one(conn)
        .await
        .map_err(sql("reading the settings"))?;
    Ok(rows == 0)
}

/// Whether no sample is committed, so that nothing depends on the settings yet.
pub(super) async fn is_empty(conn: &mut SqliteConnection) -> Result<bool, ManifestError> {
    let samples: i64 = sqlx::query_scalar("SELECT count(*) FROM sample")
        .fetch_one(conn)
        .await
        .map_err(sql("counting samples"))?;
    Ok(samples == 0)
}

/// Writes the data set's settings when it is new; otherwise compares them.
pub(super) async fn settle(
    conn: &mut SqliteConnection,
    path: &Path,
    fingerprint: &Fingerprint,
    spec: &CaptureSpec,
) -> Result<(), ManifestError> {
    if is_new(conn).await? {
        return record(conn, path, fingerprint, spec).await;
    }
    let (stored, stored_spec) = settings(conn, path).await?;
    let mut changes = stored.diff(fingerprint);
    if changes.is_empty() {
        // The fingerprint names these too; here they show that it was made from something else.
        changes = spec_changes(&stored_spec, spec);
    }
    if changes.is_empty() { Ok(()) } else { Err(ManifestError::FingerprintChanged(changes)) }
}

/// Gives a data set without samples other settings. Rejects and failures were found under the old
/// ones, so their lines are pending again.
pub(super) async fn settle_anew(
    conn: &mut SqliteConnection,
    path: &Path,
    fingerprint: &Fingerprint,
    spec: &CaptureSpec,
) -> Result<(), ManifestError> {
    let doing = "replacing the settings";
    let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await.map_err(sql(doing))?;
    for statement in ["DELETE FROM source", "DELETE FROM failure", "DELETE FROM dataset"] {
        sqlx::query(statement).execute(&mut *transaction).await.map_err(sql(doing))?;
    }
    record(&mut transaction, path, fingerprint, spec).await?;
    transaction.commit().await.map_err(sql(doing))
}

async fn record(
    conn: &mut SqliteConnection,
    path: &Path,
    fingerprint: &Fingerprint,
    spec: &CaptureSpec,
) -> Result<(), ManifestError> {
    let (Some(fields), Some(spec)) =
        (serde_json::to_string(fingerprint).ok(), serde_json::to_string(spec).ok())
    else {
        return Err(damaged(path, "settings can't be written as JSON"));
    };
    sqlx::query(
        "INSERT INTO dataset (one, format_version, fingerprint, fingerprint_digest, spec, \
         created) VALUES (1, ?, ?, ?, ?, ?)",
    )
    .bind(i64::from(FORMAT_VERSION))
    .bind(fields)
    .bind(fingerprint.digest().0.to_vec())
    .bind(spec)
    .bind(provenance::unix_time() as i64)
    .execute(conn)
    .await
    .map_err(sql("recording the settings"))?;
    Ok(())
}

pub(super) fn spec_changes(stored: &CaptureSpec, current: &CaptureSpec) -> Vec<FieldChange> {
    let fields = |spec: &CaptureSpec| {
        let layers: Vec<String> = spec.layers.iter().map(ToString::to_string).collect();
        [
            ("captured layers", layers.join(", ")),
            ("hidden_size", spec.hidden_size.to_string()),
            ("state dtype", spec.dtype.to_string()),
        ]
    };
    fields(stored)
        .into_iter()
        .zip(fields(current))
        .filter(|(stored, current)| stored != current)
        .map(|((name, stored), (_, current))| FieldChange {
            name: name.to_owned(),
            stored: Some(stored),
            current: Some(current),
        })
        .collect()
}

/// The settings that the data set was begun with.
pub(super) async fn settings(
    conn: &mut SqliteConnection,
    path: &Path,
) -> Result<(Fingerprint, CaptureSpec), ManifestError> {
    let doing = "reading the settings";
    let row = sqlx::query("SELECT fingerprint, fingerprint_digest, spec FROM dataset")
        .fetch_optional(&mut *conn)
        .await
        .map_err(sql(doing))?
        .ok_or_else(|| damaged(path, "it has no settings (table dataset is empty)"))?;
    let fields: String = row.try_get(0).map_err(sql(doing))?;
    let digest: Vec<u8> = row.try_get(1).map_err(sql(doing))?;
    let spec: String = row.try_get(2).map_err(sql(doing))?;
    let fingerprint: Fingerprint =
        serde_json::from_str(&fields).map_err(|error| damaged(path, error.to_string()))?;
    if digest != fingerprint.digest().0 {
        return Err(damaged(path, "the fingerprint does not match its digest"));
    }
    let spec = serde_json::from_str(&spec).map_err(|error| damaged(path, error.to_string()))?;
    Ok((fingerprint, spec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_the_corruption_bug_are_known() {
        for (version, fixed) in [
            ("3.40.1", false),
            ("3.51.2", false),
            ("3.51.3", true),
            ("3.53.0", true),
            ("4.0", true),
        ] {
            assert_eq!(is_fixed_sqlite(version), fixed, "{version}");
        }
    }
}
