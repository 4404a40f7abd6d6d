//! What can go wrong with a manifest, and which exit code that is.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use sqlx::migrate::MigrateError as Migration;
use thiserror::Error;

use crate::contract::LayerIndex;
use crate::durable::DurableError;
use crate::fingerprint::FieldChange;
use crate::sample::SampleId;
use crate::shard::ShardId;

/// Why a manifest can't be opened, read or written.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// No data set there.
    #[error(
        "{} is no data set: it has no manifest.sqlite; name the directory that `extractor run` \
         wrote (its --dataset)", .0.display()
    )]
    Missing(PathBuf),
    /// Another writer holds the data set.
    #[error(
        "{} is being written by process {pid} on host {host}: wait for it or stop it",
        dir.display()
    )]
    Locked {
        /// The data set.
        dir: PathBuf,
        /// Process of the holder.
        pid: String,
        /// Host of the holder.
        host: String,
    },
    /// The lock file can't be opened or locked at all.
    #[error("locking {}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The write-ahead log needs shared memory, which such file systems do not give.
    #[error(
        "{} is on {kind}, where SQLite's write-ahead log is not safe: \
         put the data set on a local disk and copy it when done", path.display()
    )]
    NetworkFileSystem {
        /// The data set.
        path: PathBuf,
        /// Its file system.
        kind: &'static str,
    },
    /// A database of something else.
    #[error(
        "{} is a database, but not a manifest of Aerie (application id {found:#x})",
        path.display()
    )]
    NotAManifest {
        /// The database.
        path: PathBuf,
        /// The id it carries.
        found: u32,
    },
    /// Written by a later version.
    #[error(
        "{} has format {found}, this program knows up to {known}: use a newer Aerie",
        path.display()
    )]
    Newer {
        /// The database.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The latest version known here.
        known: i64,
    },
    /// The SQLite that was linked has a known corruption bug.
    #[error("SQLite {0} is linked; 3.51.3 or later is needed (write-ahead log corruption fix)")]
    OldSqlite(String),
    /// The database is damaged.
    #[error("{} is damaged: {detail}", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What SQLite or our own check found.
        detail: String,
    },
    /// The data set was begun under other settings.
    #[error(
        "the data set was begun with other settings; use a new directory or the old settings.{}",
        lines(.0)
    )]
    FingerprintChanged(Vec<FieldChange>),
    /// Shards without a manifest: to a new manifest they would all be leftovers.
    #[error(
        "{} holds {shards} shards but no manifest that knows them: put the manifest back, or \
         make it again with `extractor rebuild`", dir.display()
    )]
    Lost {
        /// The data set.
        dir: PathBuf,
        /// Shards in it.
        shards: usize,
    },
    /// Shards without rows that were committed once, as after an old copy was put back.
    #[error(
        "manifest.sqlite in {} is older than the shards: {shards} of them, from {first} on, have \
         no rows and, by COMMITTED, are no leftovers of a killed run. Put the newest \
         manifest.sqlite with its -wal back, or move it away and make it again with `extractor \
         rebuild`. (Without COMMITTED, if a run of an earlier version was killed last: move them \
         to quarantine/.) Nothing was changed",
        dir.display()
    )]
    Older {
        /// The data set.
        dir: PathBuf,
        /// How many there are.
        shards: usize,
        /// The first of them.
        first: String,
    },
    /// A rebuild of a manifest that is there.
    #[error(
        "{} has rows: only a lost manifest is rebuilt; move it away if it is damaged or older than \
         the shards", .0.display()
    )]
    NotLost(PathBuf),
    /// A rebuild from settings that are not those of the shards.
    #[error(
        "{} is not what {others} of {shards} shards were written under; {shard} says:{}\n\
         Put the right settings.json back, or move shards of another data set out of shards/; \
         nothing was changed",
        path.display(), expected(.changes)
    )]
    OtherSettings {
        /// The copy of the settings.
        path: PathBuf,
        /// Shards that differ.
        others: usize,
        /// Shards that can be read.
        shards: usize,
        /// The first that differs.
        shard: String,
        /// Its values as the stored ones, and those of the file.
        changes: Vec<FieldChange>,
    },
    /// A rebuild without the copy of the settings.
    #[error("{} is missing: a manifest can only be rebuilt from it and the shards", .0.display())]
    NoSettings(PathBuf),
    /// Writing to what `extractor seal` closed.
    #[error("{} was sealed; `chmod u+w` on it makes the data set writable again", .0.display())]
    Sealed(PathBuf),
    /// No layers, or not ascending, or no width.
    #[error(
        "layers {layers:?} of width {hidden_size} can't be captured: at least one layer, \
         ascending, and a width are needed"
    )]
    Spec {
        /// Layers asked for.
        layers: Vec<LayerIndex>,
        /// Width asked for.
        hidden_size: usize,
    },
    /// A shard written under another fingerprint than the data set's.
    #[error("shard {0} was written under another fingerprint than the data set's")]
    ForeignShard(ShardId),
    /// A sample of a shard without the line it came from: the lines would not add up.
    #[error("sample {0} is committed without a source line")]
    NoSource(SampleId),
    /// A line said to be committed, whose sample is not in the shard.
    #[error("{file}:{line} is recorded as committed, but its sample {sample} is not in the shard")]
    NotInShard {
        /// Input file.
        file: String,
        /// Its line.
        line: u64,
        /// The sample named.
        sample: SampleId,
    },
    /// Writing through a manifest that was opened for reading.
    #[error("the manifest was opened for reading only")]
    ReadOnly,
    /// Called from inside an asynchronous runtime.
    #[error("the manifest blocks: call it from a plain thread, not from async code")]
    InsideAsync,
    /// A query that is not one reading statement.
    #[error("only SELECT, WITH, VALUES and EXPLAIN are run here, got `{0}`")]
    NotASelect(String),
    /// A number that does not fit SQLite's signed 64 bits.
    #[error("{0} does not fit the manifest")]
    TooLarge(u64),
    /// The disk said no.
    #[error(transparent)]
    Io(#[from] DurableError),
    /// The runtime can't be started.
    #[error("starting the manifest's runtime")]
    Runtime(#[source] io::Error),
    /// The log of a killed run can't be read where nothing can be written.
    #[error(
        "{} has a log that a run did not merge; reading it takes some room for manifest.sqlite-shm \
         beside it, which the disk does not give: make room, read as a user who may write there, \
         or copy both files to another disk",
        path.display()
    )]
    NoIndex {
        /// The database.
        path: PathBuf,
        /// What SQLite said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// SQLite said no.
    #[error("{doing}")]
    Sql {
        /// What was being done.
        doing: &'static str,
        /// The exit code that goes with it.
        exit_code: u8,
        /// What SQLite said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// SQLite refused the user's own query.
    #[error("the query is refused")]
    Query(#[source] Box<dyn Error + Send + Sync>),
    /// The tables can't be brought to the current version.
    #[error("migrating {}", path.display())]
    Migrate {
        /// The database.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: Migration,
    },
}

fn lines(changes: &[FieldChange]) -> String {
    changes.iter().map(|change| format!("\n  {change}")).collect()
}

fn expected(changes: &[FieldChange]) -> String {
    let show = |value: &Option<String>| value.clone().unwrap_or_default();
    let line = |FieldChange { name, stored, current }: &FieldChange| {
        format!("\n  {name}: expected {}, came {}", show(stored), show(current))
    };
    changes.iter().map(line).collect()
}

impl ManifestError {
    /// sqlx's error without its own wrapping, which repeats the database's words.
    pub(super) fn sql(doing: &'static str, error: sqlx::Error) -> Self {
        let exit_code = sql_exit_code(&error);
        let source = match error {
            sqlx::Error::Database(error) => error.into_error(),
            other => other.into(),
        };
        Self::Sql { doing, exit_code, source }
    }

    /// 65 bad data, 70 misuse, 73 locked, 74 disk, 75 busy, 78 settings.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Locked { .. } => 73,
            Self::FingerprintChanged(_)
            | Self::Spec { .. }
            | Self::NetworkFileSystem { .. }
            | Self::NotASelect(_)
            | Self::NotLost(_)
            | Self::Sealed(_)
            | Self::Query(_) => 78,
            Self::Io(error) => error.exit_code(),
            Self::Lock { .. } | Self::NoIndex { .. } | Self::Runtime(_) => 74,
            Self::Sql { exit_code, .. } => *exit_code,
            Self::OldSqlite(_)
            | Self::ForeignShard(_)
            | Self::NoSource(_)
            | Self::NotInShard { .. }
            | Self::ReadOnly
            | Self::InsideAsync
            | Self::TooLarge(_) => 70,
            Self::Migrate { source: Migration::Execute(error), .. }
            | Self::Migrate { source: Migration::ExecuteMigration(error, _), .. } => {
                sql_exit_code(error)
            }
            Self::Missing(_)
            | Self::Lost { .. }
            | Self::Older { .. }
            | Self::OtherSettings { .. }
            | Self::NoSettings(_)
            | Self::NotAManifest { .. }
            | Self::Newer { .. }
            | Self::Damaged { .. }
            | Self::Migrate { .. } => 65,
        }
    }
}

/// By SQLite's primary result codes (the low byte of the extended code).
fn sql_exit_code(error: &sqlx::Error) -> u8 {
    let code = error.as_database_error().and_then(|error| error.code());
    match code.and_then(|code| code.parse::<u32>().ok()).map(|code| code & 0xff) {
        // FULL, IOERR, READONLY, CANTOPEN
        Some(13 | 10 | 8 | 14) => 74,
        // BUSY, LOCKED
        Some(5 | 6) => 75,
        // CORRUPT, NOTADB
        Some(11 | 26) => 65,
        Some(_) => 70,
        None if matches!(error, sqlx::Error::Io(_)) => 74,
        // A value that no version of ours has written.
        None if matches!(error, sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. }) => 65,
        None => 70,
    }
}
