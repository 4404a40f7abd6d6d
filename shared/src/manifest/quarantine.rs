//! Shards that can't be trusted any more: out of `shards/`, their rows gone, their lines pending.

use super::{Manifest, ManifestError};
use crate::durable::{DatasetDir, at};
use crate::shard::ShardId;

/// Moves `shards/NAME` to `quarantine/NAME` (`NAME.1`, `NAME.2` ... when there is one already). A
/// file that is gone is fine.
pub(super) fn set_aside(dir: &DatasetDir, name: &str) -> Result<(), ManifestError> {
    let (files, from, to) = (dir.files(), dir.shards().join(name), dir.quarantine());
    if std::fs::symlink_metadata(&from).is_err() {
        return Ok(());
    }
    files.create_dir(&to).map_err(at("creating directory", &to))?;
    let mut place = to.join(name);
    for number in 1.. {
        if std::fs::symlink_metadata(&place).is_err() {
            break;
        }
        place = to.join(format!("{name}.{number}"));
    }
    files.publish(&from, &place).map_err(at("moving to quarantine", &from))?;
    for changed in [&to, &dir.shards(), &dir.root().to_path_buf()] {
        files.sync_dir(changed).map_err(at("syncing directory", changed))?;
    }
    Ok(())
}

impl Manifest {
    /// Sets a damaged shard aside: its file goes to `quarantine/`, then the rows of the shard, of
    /// its samples and of their lines are removed in one transaction, so that the lines are pending
    /// again. Returns the number of samples.
    pub fn quarantine(&self, shard: ShardId) -> Result<u64, ManifestError> {
        self.writable()?;
        // The file first: a crash in between leaves a missing shard, which the next repair finds.
        set_aside(self.dir(), &shard.file_name())?;
        self.with("removing a damaged shard", async |conn| {
            let mut transaction = sqlx::Connection::begin_with(conn, "BEGIN IMMEDIATE").await?;
            let id = i64::from(shard.0);
            for statement in [
                "DELETE FROM source WHERE sample IN (SELECT id FROM sample WHERE shard = ?)",
                "DELETE FROM tensor WHERE sample IN (SELECT id FROM sample WHERE shard = ?)",
            ] {
                sqlx::query(statement).bind(id).execute(&mut *transaction).await?;
            }
            let samples = sqlx::query("DELETE FROM sample WHERE shard = ?")
                .bind(id)
                .execute(&mut *transaction)
                .await?
                .rows_affected();
            sqlx::query("DELETE FROM shard WHERE id = ?")
                .bind(id)
                .execute(&mut *transaction)
                .await?;
            transaction.commit().await?;
            Ok(samples)
        })
    }
}
