//! A lost manifest made again from the shards: rows from their headers and contents, digests taken
//! anew and marked so. What became of input lines is not in the shards; the next run finds out.

use std::collections::HashSet;

use serde::Serialize;
use sqlx::Connection;

use super::commit::{SourceOutcome, SourceRecord, insert_sample, insert_shard};
use super::settings::Settings;
use super::{
    Manifest, ManifestError, connect, leftovers, lock, quarantine, refuse_network, runtime,
};
use crate::digest::Digest;
use crate::durable::{DatasetDir, at};
use crate::error_chain::in_words;
use crate::fingerprint::FieldChange;
use crate::header::HeaderLimits;
use crate::sample::SampleId;
use crate::shard::{SealedShard, ShardError, ShardId, ShardReader};

/// Files and why each is no shard of the data set.
type Refused = Vec<(String, String)>;

/// What a rebuild found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Rebuilt {
    /// Shards with rows again.
    pub shards: usize,
    /// Their samples.
    pub samples: usize,
    /// Shards that are not what they should be, with the reason; moved to `quarantine/`.
    pub refused: Refused,
}

impl Manifest {
    /// Makes the lost manifest of the data set in `dir` again, in one transaction. Every sample is
    /// read and checked against the contract. A manifest with rows is an error: nothing is lost. So
    /// are settings that the shards were not written under, before anything is changed.
    pub fn rebuild(dir: &std::path::Path) -> Result<Rebuilt, ManifestError> {
        let dir = DatasetDir::new(dir);
        if !dir.shards().is_dir() {
            return Err(ManifestError::Missing(dir.root().to_path_buf()));
        }
        let runtime = runtime()?;
        refuse_network(dir.root())?;
        let _lock = lock::WriterLock::take(&dir)?;
        let settings = Settings::read(&dir)?;
        require_settings_of_shards(&dir, &settings)?;
        let path = dir.manifest();
        let mut conn = runtime.block_on(async {
            let mut conn = connect::for_write(&dir).await?;
            match connect::is_new(&mut conn).await? {
                true => Ok(conn),
                false => Err(ManifestError::NotLost(path.clone())),
            }
        })?;
        let (sealed, refused) = survey(&dir, &settings)?;
        // First: with rows there is no second rebuild, and a file that no row names would stop the
        // next writer.
        for (name, reason) in &refused {
            tracing::warn!(file = name, reason, "moved to quarantine");
            quarantine::set_aside(&dir, name)?;
        }
        let doing = "rebuilding the manifest";
        runtime.block_on(async {
            let mut transaction =
                conn.begin_with("BEGIN IMMEDIATE").await.map_err(connect::sql(doing))?;
            let Settings { fingerprint, spec } = &settings;
            connect::settle(&mut transaction, &path, fingerprint, spec).await?;
            for shard in &sealed {
                insert_shard(&mut transaction, shard, true).await.map_err(connect::sql(doing))?;
                for entry in &shard.entries {
                    insert_sample(&mut transaction, shard.id.0, entry, &nowhere(entry.sample_id))
                        .await
                        .map_err(connect::sql(doing))?;
                }
            }
            transaction.commit().await.map_err(connect::sql(doing))?;
            conn.close().await.map_err(connect::sql(doing))
        })?;
        dir.files().sync_dir(dir.root()).map_err(at("syncing directory", dir.root()))?;
        let samples = sealed.iter().map(|shard| shard.entries.len()).sum();
        Ok(Rebuilt { shards: sealed.len(), samples, refused })
    }
}

/// The line of a sample whose line is not known.
fn nowhere(id: SampleId) -> SourceRecord {
    SourceRecord {
        file: String::new(),
        line: 0,
        digest: [0; 16],
        outcome: SourceOutcome::Committed(id),
        truncated: false,
    }
}

/// Refuses settings under which a readable shard was not written: a wrong copy of the settings must
/// not condemn sound shards.
fn require_settings_of_shards(dir: &DatasetDir, settings: &Settings) -> Result<(), ManifestError> {
    let (digest, mut shards, mut differing) = (settings.fingerprint.digest(), 0, Vec::new());
    for id in leftovers::sealed(dir)? {
        let path = dir.shards().join(id.file_name());
        // One that can't be read says nothing about settings; the survey says why.
        let Ok(reader) = ShardReader::open_with(&**dir.files(), &path, &HeaderLimits::SHARD) else {
            continue;
        };
        shards += 1;
        let mut changes = connect::spec_changes(reader.spec(), &settings.spec);
        if *reader.fingerprint() != digest {
            changes.push(FieldChange {
                name: "fingerprint".to_owned(),
                stored: Some(reader.fingerprint().to_string()),
                current: Some(digest.to_string()),
            });
        }
        if !changes.is_empty() {
            differing.push((id, changes));
        }
    }
    let others = differing.len();
    match differing.into_iter().next() {
        None => Ok(()),
        Some((id, changes)) => {
            let (path, shard) = (dir.settings(), id.file_name());
            Err(ManifestError::OtherSettings { path, others, shards, shard, changes })
        }
    }
}

/// Every shard as it would have been sealed, and those that can't have been.
fn survey(
    dir: &DatasetDir,
    settings: &Settings,
) -> Result<(Vec<SealedShard>, Refused), ManifestError> {
    let (mut sealed, mut refused) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for id in leftovers::sealed(dir)? {
        match resealed(dir, id, settings) {
            Ok(shard) if shard.entries.iter().any(|entry| seen.contains(&entry.sample_id)) => {
                refused.push((id.file_name(), "holds samples of an earlier shard".to_owned()));
            }
            Ok(shard) => {
                seen.extend(shard.entries.iter().map(|entry| entry.sample_id));
                sealed.push(shard);
            }
            Err(ShardError::Io(error)) => return Err(error.into()),
            Err(error) => refused.push((id.file_name(), in_words(&error))),
        }
    }
    Ok((sealed, refused))
}

fn resealed(dir: &DatasetDir, id: ShardId, settings: &Settings) -> Result<SealedShard, ShardError> {
    let path = dir.shards().join(id.file_name());
    let reader = ShardReader::open_with(&**dir.files(), &path, &HeaderLimits::SHARD)?;
    let fingerprint = settings.fingerprint.digest();
    let ids = reader.sample_ids();
    let entries = ids.into_iter().map(|id| reader.describe(id)).collect::<Result<_, _>>()?;
    let file = dir.files().open_read(&path).map_err(at("opening", &path))?;
    let (digest, bytes) = Digest::of_reader(file).map_err(at("reading", &path))?;
    Ok(SealedShard { id, file: id.file_name(), bytes, digest, fingerprint, entries })
}
