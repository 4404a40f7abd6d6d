//! What a killed run left behind, told from what was committed. `COMMITTED` beside the manifest
//! holds the number after the last committed shard: unknown shards below it were committed once, so
//! the manifest is older than they are. Nothing that was ever sealed is removed.

use std::collections::HashSet;
use std::path::Path;

use sqlx::sqlite::SqliteConnection;

use super::{Manifest, ManifestError, connect, quarantine};
use crate::durable::{DatasetDir, at, is_temporary, read_small, write_file_with};
use crate::shard::ShardId;

/// The number after the last committed shard; `None` where nothing says so, as in data sets of
/// earlier versions.
pub(crate) fn committed_below(dir: &DatasetDir) -> Option<u32> {
    read_small(&dir.committed(), 32).ok()?.trim_end().parse().ok()
}

/// Whether a name in the root is that of a file of ours that was never finished.
pub(crate) fn is_unfinished(name: &str) -> bool {
    is_temporary(name) && (name.starts_with(".settings.json.") || name.starts_with(".COMMITTED."))
}

/// Numbers of the sealed shards in `shards/`, ascending.
pub(super) fn sealed(dir: &DatasetDir) -> Result<Vec<ShardId>, ManifestError> {
    let shards = dir.shards();
    let names = dir.files().list(&shards).map_err(at("listing", &shards))?;
    Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
}

/// Shards that were sealed and never committed. Refused where one of the shards without rows was
/// committed, or where nothing says that it was not.
pub(super) async fn uncommitted(
    conn: &mut SqliteConnection,
    dir: &DatasetDir,
) -> Result<Vec<ShardId>, ManifestError> {
    let known: HashSet<i64> = sqlx::query_scalar("SELECT id FROM shard")
        .fetch_all(conn)
        .await
        .map_err(connect::sql("reading shards"))?
        .into_iter()
        .collect();
    let unknown: Vec<ShardId> =
        sealed(dir)?.into_iter().filter(|id| !known.contains(&i64::from(id.0))).collect();
    let below = committed_below(dir).unwrap_or(u32::MAX);
    let committed: Vec<&ShardId> = unknown.iter().filter(|id| id.0 < below).collect();
    match committed.first() {
        None => Ok(unknown),
        Some(first) => Err(ManifestError::Older {
            dir: dir.root().to_path_buf(),
            shards: committed.len(),
            first: first.file_name(),
        }),
    }
}

impl Manifest {
    /// Refuses a manifest that is older than its shards, as opening it for writing does.
    pub fn require_newest(&self) -> Result<(), ManifestError> {
        self.blocking(async |conn| uncommitted(conn, &self.dir).await).map(|_| ())
    }

    /// Clears up after a killed run: sealed shards go to `quarantine/`, unfinished files go.
    pub(super) fn clear(&self, uncommitted: &[ShardId]) -> Result<(), ManifestError> {
        for shard in uncommitted {
            tracing::warn!(
                file = shard.file_name(),
                "an interrupted run sealed this shard and did not commit it: it is moved to \
                 quarantine/, where it may be deleted, and its lines are extracted again"
            );
            quarantine::set_aside(&self.dir, &shard.file_name())?;
        }
        let of_shard = |name: &str| is_temporary(name) && name.starts_with(".shard-");
        self.remove_from(&self.dir.shards(), of_shard)?;
        self.remove_from(&self.dir.target(), is_temporary)?;
        self.remove_from(self.dir.root(), is_unfinished)
    }

    fn remove_from(
        &self,
        place: &Path,
        is_left_over: impl Fn(&str) -> bool,
    ) -> Result<(), ManifestError> {
        let files = self.dir.files();
        for name in files.list(place).map_err(at("listing", place))? {
            let Some(name) = name.to_str().filter(|name| is_left_over(name)) else { continue };
            tracing::warn!(file = name, "removing what an interrupted run left behind");
            let path = place.join(name);
            files.remove_file(&path).map_err(at("removing", &path))?;
        }
        Ok(())
    }

    /// Brings `COMMITTED` up to the rows. After the rows, so that it never claims too much: what a
    /// crash in between leaves is known to the manifest.
    pub(super) fn account(&self) -> Result<(), ManifestError> {
        let next = self.next_shard_id()?.0;
        if committed_below(&self.dir) == Some(next) {
            return Ok(());
        }
        let text = format!("{next}\n");
        Ok(write_file_with(&**self.dir.files(), &self.dir.committed(), text.as_bytes())?)
    }
}
