//! The manifest of a data set: which samples exist, where, and what became of every input line.
//! The only place with SQL. Metadata only: never a tensor's bytes. Blocking calls; a current-thread
//! runtime inside serves sqlx.

mod commit;
mod connect;
mod consistency;
mod error;
mod failures;
mod leftovers;
mod lock;
mod quarantine;
mod rebuild;
mod rows;
mod seal;
mod settings;
mod storage_errors;
mod table;

use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sqlx::Connection;
use sqlx::sqlite::SqliteConnection;
use tokio::runtime::{Builder, Handle, Runtime};

pub use commit::{InputFile, RunEnd, RunId, RunStart, SourceOutcome, SourceRecord, SourceRow};
pub use error::ManifestError;
pub use failures::Failure;
pub(crate) use leftovers::{committed_below, is_unfinished};
pub(crate) use lock::is_held;
pub use rebuild::Rebuilt;
pub use rows::{Conservation, SampleRow, ShardRow};
pub use storage_errors::StorageError;
pub use table::{Cell, Listing, Table};

use self::settings::Settings;
use crate::contract::CaptureSpec;
use crate::durable::{DatasetDir, at};
use crate::fingerprint::Fingerprint;

/// An open manifest. One writer a data set; any number of readers.
pub struct Manifest {
    dir: DatasetDir,
    fingerprint: Fingerprint,
    spec: CaptureSpec,
    /// Duplicates of samples that are not committed yet; written together with their sample.
    waiting: Mutex<Vec<SourceRecord>>,
    conn: Mutex<Option<SqliteConnection>>,
    runtime: Runtime,
    /// `None` for readers. Last field: released after the database is closed.
    lock: Option<lock::WriterLock>,
}

impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manifest").field("dir", &self.dir.root()).finish_non_exhaustive()
    }
}

impl Manifest {
    /// Opens a data set for its one writer, and creates it when it is not there.
    ///
    /// Refuses a second writer (73), other settings than those its samples were made with (78) and
    /// damage (65), for one a manifest that is older than the shards. Clears up after a killed run:
    /// a shard that was not committed has no recorded digest, so taking it over would be faith.
    pub fn open_for_write(
        dir: &Path,
        fingerprint: &Fingerprint,
        spec: &CaptureSpec,
    ) -> Result<Self, ManifestError> {
        Self::open_for_write_in(&DatasetDir::new(dir), fingerprint, spec)
    }

    /// [`Self::open_for_write`] through given disk operations.
    pub fn open_for_write_in(
        dir: &DatasetDir,
        fingerprint: &Fingerprint,
        spec: &CaptureSpec,
    ) -> Result<Self, ManifestError> {
        if spec.layers.is_empty()
            || spec.hidden_size == 0
            || !spec.layers.is_sorted_by(|a, b| a < b)
        {
            let (layers, hidden_size) = (spec.layers.clone(), spec.hidden_size);
            return Err(ManifestError::Spec { layers, hidden_size });
        }
        let runtime = runtime()?;
        dir.create()?;
        refuse_network(dir.root())?;
        let lock = lock::WriterLock::take(dir)?;
        let path = dir.manifest();
        refuse_sealed(&path)?;
        let (conn, uncommitted) = runtime.block_on(async {
            let mut conn = connect::for_write(dir).await?;
            if connect::is_new(&mut conn).await? {
                refuse_lost(dir)?;
                remove_target(dir)?;
            }
            // Before settings are replaced: those of a manifest that is too old are no one's.
            let uncommitted = leftovers::uncommitted(&mut conn, dir).await?;
            match connect::settle(&mut conn, &path, fingerprint, spec).await {
                Err(ManifestError::FingerprintChanged(changes))
                    if connect::is_empty(&mut conn).await? =>
                {
                    for change in changes {
                        tracing::info!(
                            "no sample is committed yet, new settings are taken: {change}"
                        );
                    }
                    remove_target(dir)?;
                    connect::settle_anew(&mut conn, &path, fingerprint, spec).await?;
                }
                settled => settled?,
            }
            Ok::<_, ManifestError>((conn, uncommitted))
        })?;
        dir.files().sync_dir(dir.root()).map_err(at("syncing directory", dir.root()))?;
        let manifest = Self {
            dir: dir.clone(),
            fingerprint: fingerprint.clone(),
            spec: spec.clone(),
            waiting: Mutex::default(),
            conn: Mutex::new(Some(conn)),
            runtime,
            lock: Some(lock),
        };
        manifest.clear(&uncommitted)?;
        manifest.account()?;
        Settings { fingerprint: fingerprint.clone(), spec: spec.clone() }.write(dir)?;
        Ok(manifest)
    }

    /// Opens a data set that exists for its one writer, under the settings it was begun with, for
    /// work on what is there: repair and sealing. Refuses a manifest that is older than the shards.
    pub fn open_existing(dir: &Path) -> Result<Self, ManifestError> {
        let dir = DatasetDir::new(dir);
        let path = dir.manifest();
        if !path.is_file() {
            return Err(ManifestError::Missing(dir.root().to_path_buf()));
        }
        let runtime = runtime()?;
        let lock = lock::WriterLock::take(&dir)?;
        refuse_sealed(&path)?;
        let (conn, (fingerprint, spec)) = runtime.block_on(async {
            let mut conn = connect::for_write(&dir).await?;
            // What an old manifest says must not replace the copy of the settings either.
            leftovers::uncommitted(&mut conn, &dir).await?;
            let settings = connect::settings(&mut conn, &path).await?;
            Ok::<_, ManifestError>((conn, settings))
        })?;
        Settings { fingerprint: fingerprint.clone(), spec: spec.clone() }.write(&dir)?;
        let (waiting, conn) = (Mutex::default(), Mutex::new(Some(conn)));
        Ok(Self { dir, fingerprint, spec, waiting, conn, runtime, lock: Some(lock) })
    }

    /// Opens a data set for reading, also while it is being written.
    pub fn open_read(dir: &Path) -> Result<Self, ManifestError> {
        let dir = DatasetDir::new(dir);
        let path = dir.manifest();
        if !path.is_file() {
            return Err(ManifestError::Missing(dir.root().to_path_buf()));
        }
        let runtime = runtime()?;
        let (conn, (fingerprint, spec)) = runtime.block_on(async {
            let mut conn = connect::for_read(&path).await?;
            let settings = connect::settings(&mut conn, &path).await?;
            Ok::<_, ManifestError>((conn, settings))
        })?;
        Ok(Self {
            dir,
            fingerprint,
            spec,
            waiting: Mutex::default(),
            conn: Mutex::new(Some(conn)),
            runtime,
            lock: None,
        })
    }

    /// The settings that the data set was begun with.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// What every sample contains.
    pub fn spec(&self) -> &CaptureSpec {
        &self.spec
    }

    /// The directory.
    pub fn dir(&self) -> &DatasetDir {
        &self.dir
    }

    fn writable(&self) -> Result<(), ManifestError> {
        self.lock.as_ref().map(|_| ()).ok_or(ManifestError::ReadOnly)
    }

    /// Runs one piece of SQL work to its end on the connection.
    fn with<T>(
        &self,
        doing: &'static str,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, ManifestError> {
        self.blocking(async |conn| work(conn).await.map_err(connect::sql(doing)))
    }

    fn blocking<T>(
        &self,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, ManifestError>,
    ) -> Result<T, ManifestError> {
        refuse_async()?;
        let mut conn = held(&self.conn);
        let Some(conn) = conn.as_mut() else { return Err(ManifestError::ReadOnly) };
        self.runtime.block_on(work(conn))
    }
}

impl Drop for Manifest {
    fn drop(&mut self) {
        let conn = held(&self.conn).take();
        if let (Some(conn), Ok(())) = (conn, refuse_async()) {
            // Closing checkpoints the log. An error leaves the log, which the next open replays.
            let _ = self.runtime.block_on(conn.close());
        }
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one transaction, so a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refuse_async() -> Result<(), ManifestError> {
    match Handle::try_current() {
        Ok(_) => Err(ManifestError::InsideAsync),
        Err(_) => Ok(()),
    }
}

fn runtime() -> Result<Runtime, ManifestError> {
    refuse_async()?;
    Builder::new_current_thread().enable_all().build().map_err(ManifestError::Runtime)
}

/// Without a manifest every shard would look like a leftover.
fn refuse_lost(dir: &DatasetDir) -> Result<(), ManifestError> {
    match leftovers::sealed(dir)?.len() {
        0 => Ok(()),
        shards => Err(ManifestError::Lost { dir: dir.root().to_path_buf(), shards }),
    }
}

/// Empties `target/`: its files belong to another data set, or to settings this one had before.
fn remove_target(dir: &DatasetDir) -> Result<(), ManifestError> {
    let target = dir.target();
    dir.files().remove_dir(&target).map_err(at("removing", &target))?;
    Ok(dir.create()?)
}

fn refuse_sealed(path: &Path) -> Result<(), ManifestError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.permissions().readonly() => {
            Err(ManifestError::Sealed(path.to_path_buf()))
        }
        _ => Ok(()),
    }
}

fn refuse_network(root: &Path) -> Result<(), ManifestError> {
    let stat = rustix::fs::statfs(root)
        .map_err(|errno| at("looking at the file system of", root)(errno.into()))?;
    let kind = match stat.f_type as u64 & 0xffff_ffff {
        0x6969 => "NFS",
        0x0bd0_0bd0 => "Lustre",
        0x6573_5546 => "FUSE",
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => "SMB",
        _ => return Ok(()),
    };
    Err(ManifestError::NetworkFileSystem { path: root.to_path_buf(), kind })
}
