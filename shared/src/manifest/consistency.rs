//! Whether the rows of a manifest agree with one another and can have been written by a run. Reads
//! no shard. Some columns nothing can contradict: what is a label (times, hosts, reasons), a line's
//! digest that no other line shares, and whether a sample was cut.

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Row};

use super::connect::MIGRATIONS;
use super::{Manifest, ManifestError};
use crate::contract::StateDtype;
use crate::shard::{FORMAT_VERSION, tensors_per_sample};

/// e4m3 has three bits of mantissa: no value moves by more than a sixteenth of itself. The rest is
/// for sums made in single precision.
const MOST_FP8_COSTS: f64 = 1.0 / 16.0 + 1e-3;

/// Rows that no run writes: since which version, what they are, and where. Also what the tables
/// forbid: to SQLite a database that is opened read-only has no CHECK constraints, not even when it
/// checks its integrity.
const CHECKS: [(i64, &str, &str); 8] = [
    (
        1,
        "lines with values that no run records",
        "SELECT file || ':' || line FROM source WHERE line < 0 OR length(digest) <> 16 OR \
         outcome NOT IN ('committed', 'duplicate', 'rejected') OR \
         (outcome = 'rejected') <> (sample IS NULL) OR \
         (outcome = 'rejected') <> (reason IS NOT NULL) OR reason = ''",
    ),
    (
        1,
        "samples with values that no run records",
        "SELECT lower(hex(id)) FROM sample WHERE tokens < 1 OR source_line < 0 OR \
         trainable_tokens NOT BETWEEN 0 AND tokens OR truncated NOT IN (0, 1)",
    ),
    (
        1,
        "samples whose own line and the line that is said to have given them are not the same",
        "SELECT source.file || ':' || source.line FROM source JOIN sample ON \
         sample.id = source.sample WHERE (outcome = 'committed') <> \
         (source.file = source_file AND source.line = source_line)",
    ),
    (
        1,
        "inputs with more lines than bytes",
        "SELECT file FROM input WHERE lines < 0 OR length(digest) <> 32 OR lines > max(bytes, 1)",
    ),
    (
        4,
        "inputs with more lines than bytes",
        "SELECT file FROM input WHERE blank < 0 OR lines + blank > max(bytes, 1)",
    ),
    (
        1,
        "runs that ended without an outcome, or the reverse",
        "SELECT 'run ' || id FROM run WHERE (stopped IS NULL) <> (outcome IS NULL) OR \
         tokens < 0 OR bytes < 0 OR seconds < 0",
    ),
    (
        2,
        "shards with values that no run records",
        "SELECT file FROM shard WHERE rebuilt NOT IN (0, 1)",
    ),
    (
        2,
        "deaths of the target that no run records",
        "SELECT lower(hex(sample)) FROM failure WHERE count < 1 OR length(batch) <> 16 OR \
         length(sample) <> 16",
    ),
];

/// Not where states were imported: a line is a file of states there, with a mask from elsewhere.
const EQUAL_TEXT: (&str, &str) = (
    "lines of equal text that are said to have given different samples",
    "SELECT min(file || ':' || line) FROM source WHERE sample IS NOT NULL \
     GROUP BY digest HAVING min(sample) <> max(sample)",
);

impl Manifest {
    /// What contradicts what, one sentence each: empty when well. Needs tables of this format.
    pub fn contradictions(&self) -> Result<Vec<String>, ManifestError> {
        let layers: Vec<String> = match self.spec().dtype {
            StateDtype::Bf16 => Vec::new(),
            StateDtype::Fp8 => self.spec().layers.iter().map(|it| it.0.to_string()).collect(),
        };
        let tensors = tensors_per_sample(self.spec());
        let imported = self.fingerprint().fields.get("states").is_some_and(|it| it == "imported");
        self.with("comparing rows", async |conn| {
            let version = version(conn).await?;
            let mut found = Vec::new();
            for (since, what, sql) in CHECKS {
                if version >= since {
                    let places = sqlx::query(sql).fetch_all(&mut *conn).await?;
                    found.extend(sentence(what, &places)?);
                }
            }
            if !imported {
                let (what, sql) = EQUAL_TEXT;
                found.extend(sentence(what, &sqlx::query(sql).fetch_all(&mut *conn).await?)?);
            }
            if version >= 3 {
                let sql = "SELECT lower(hex(sample)) FROM storage_error GROUP BY sample HAVING \
                           group_concat(layer ORDER BY layer) <> ? OR min(error) < 0 OR \
                           max(error) > ?";
                let query = sqlx::query(sql).bind(layers.join(",")).bind(MOST_FP8_COSTS);
                let what = "samples whose storage errors fp8 can't have caused";
                found.extend(sentence(what, &query.fetch_all(&mut *conn).await?)?);
            }
            let sql = "SELECT lower(hex(id)) FROM sample LEFT JOIN tensor ON sample = id \
                       GROUP BY id HAVING count(name) <> ? OR \
                       max(substr(name, 1, 32) <> lower(hex(id))) OR \
                       max(CASE WHEN json_valid(shape) THEN json_extract(shape, '$[0]') END \
                       IS NOT tokens) OR max((rms IS NULL) <> (absmax IS NULL)) OR \
                       max(rms NOT BETWEEN 0 AND absmax * (1 + 1e-6))";
            let query = sqlx::query(sql).bind(tensors as i64);
            let what = "samples whose tensors can't be theirs";
            found.extend(sentence(what, &query.fetch_all(&mut *conn).await?)?);
            let sql = "SELECT format_version FROM dataset WHERE format_version <> ?";
            let query = sqlx::query(sql).bind(i64::from(FORMAT_VERSION));
            let what = "format versions that the shards do not have";
            found.extend(sentence(what, &query.fetch_all(&mut *conn).await?)?);
            Ok(found)
        })
    }

    /// Tables, views and indices that are not as the migrations make them, and triggers: a
    /// constraint or view that was replaced lets through or shows something else.
    pub fn foreign_schema(&self) -> Result<Vec<String>, ManifestError> {
        self.with("comparing tables", async |conn| {
            let version = version(conn).await?;
            let mut fresh = SqliteConnectOptions::new().in_memory(true).connect().await?;
            for migration in MIGRATIONS.iter().filter(|it| it.version <= version) {
                sqlx::raw_sql(migration.sql.clone()).execute(&mut fresh).await?;
            }
            let (expected, found) = (objects(&mut fresh).await?, objects(conn).await?);
            let differ = expected.iter().filter(|object| !found.contains(object));
            let triggers = found.iter().filter(|object| object.kind == "trigger");
            let sentence =
                |object: &Object| format!("{} {} is not of this format", object.kind, object.name);
            Ok(differ.chain(triggers).map(sentence).collect())
        })
    }
}

/// The version that the tables are said to have.
async fn version(conn: &mut SqliteConnection) -> Result<i64, sqlx::Error> {
    let sql = "SELECT max(user_version, 1) FROM pragma_user_version";
    sqlx::query_scalar(sql).fetch_one(conn).await
}

#[derive(PartialEq)]
struct Object {
    kind: String,
    name: String,
    /// The statement, without the spaces between its words.
    words: Vec<String>,
}

async fn objects(conn: &mut SqliteConnection) -> Result<Vec<Object>, sqlx::Error> {
    let sql = "SELECT type, name, coalesce(sql, '') FROM sqlite_schema \
               WHERE name NOT LIKE '\\_sqlx%' ESCAPE '\\' ORDER BY type, name";
    let rows = sqlx::query(sql).fetch_all(conn).await?;
    let object = |row: &sqlx::sqlite::SqliteRow| {
        let sql: String = row.try_get(2)?;
        let words = sql.split_whitespace().map(str::to_owned).collect();
        Ok(Object { kind: row.try_get(0)?, name: row.try_get(1)?, words })
    };
    rows.iter().map(object).collect()
}

fn sentence(what: &str, places: &[sqlx::sqlite::SqliteRow]) -> Result<Option<String>, sqlx::Error> {
    let Some(first) = places.first() else { return Ok(None) };
    // A number, in some.
    let first: String = first.try_get_unchecked(0)?;
    Ok(Some(format!("{} {what}; the first: {first}", places.len())))
}
