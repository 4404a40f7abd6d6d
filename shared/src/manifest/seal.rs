//! Ends the life of a data set as something that is written: one database file without a log,
//! everything read-only, fit for copying and for network file systems.

use std::fs;
use std::path::Path;

use super::{Manifest, ManifestError, connect, held};
use crate::durable::at;

impl Manifest {
    /// Checkpoints the log, switches the database to a rollback journal, and takes the right to
    /// write from manifest and shards. Refused while somebody reads (75) or writes (73). Sealing
    /// what is sealed changes nothing.
    pub fn seal(dir: &Path) -> Result<(), ManifestError> {
        let manifest = match Self::open_existing(dir) {
            Err(ManifestError::Sealed(_)) => return Ok(()),
            opened => opened?,
        };
        manifest.with("sealing the manifest", async |conn| {
            sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").fetch_all(&mut *conn).await?;
            sqlx::query("PRAGMA journal_mode = DELETE").fetch_all(&mut *conn).await?;
            Ok(())
        })?;
        if let Some(conn) = held(&manifest.conn).take() {
            let closed = manifest.runtime.block_on(sqlx::Connection::close(conn));
            closed.map_err(connect::sql("closing the manifest"))?;
        }
        let shards = manifest.dir.shards();
        let names = manifest.dir.files().list(&shards).map_err(at("listing", &shards))?;
        let files = names.iter().map(|name| shards.join(name));
        // The manifest last: it is what says that the data set is sealed.
        for path in files.chain([manifest.dir.manifest()]) {
            let read_only = || {
                let mut permissions = fs::symlink_metadata(&path)?.permissions();
                permissions.set_readonly(true);
                fs::set_permissions(&path, permissions)
            };
            read_only().map_err(at("taking the right to write from", &path))?;
        }
        Ok(())
    }
}
