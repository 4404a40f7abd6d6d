//! A copy of the data set's settings beside the manifest: shards carry only the digest of the
//! fingerprint, so without this file a lost manifest could not be rebuilt.

use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, connect};
use crate::contract::CaptureSpec;
use crate::durable::{DatasetDir, at, read_small, write_file_with};
use crate::error_chain::in_words;
use crate::fingerprint::Fingerprint;

/// Settings are never as long.
const MOST_BYTES: u64 = 1 << 20;

/// What a data set was begun with.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settings {
    pub(super) fingerprint: Fingerprint,
    pub(super) spec: CaptureSpec,
}

impl Settings {
    /// Writes the file unless it says the same already.
    pub(super) fn write(&self, dir: &DatasetDir) -> Result<(), ManifestError> {
        if Self::read(dir).is_ok_and(|stored| stored == *self) {
            return Ok(());
        }
        let path = dir.settings();
        let text = serde_json::to_string_pretty(self).map_err(|error| ManifestError::Damaged {
            path: path.clone(),
            detail: error.to_string(),
        })?;
        Ok(write_file_with(&**dir.files(), &path, text.as_bytes())?)
    }

    /// Reads the file; its absence is an error that says what can be done.
    pub(super) fn read(dir: &DatasetDir) -> Result<Self, ManifestError> {
        let path = dir.settings();
        let text = read_small(&path, MOST_BYTES).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ManifestError::NoSettings(path.clone()),
            _ => at("reading", &path)(source).into(),
        })?;
        serde_json::from_str(&text)
            .map_err(|error| ManifestError::Damaged { path, detail: error.to_string() })
    }
}

impl Manifest {
    /// How the copy of the settings differs from those in the manifest, in words. A data set
    /// without samples has yet to come to its settings, and version 1 made no copy.
    pub(crate) fn copy_differs(&self) -> Result<Option<String>, ManifestError> {
        let matters: i64 = self.with("counting samples", async |conn| {
            let sql = "SELECT EXISTS (SELECT 1 FROM sample) AND (user_version > 1 OR ?) \
                       FROM pragma_user_version";
            sqlx::query_scalar(sql).bind(self.dir().settings().exists()).fetch_one(conn).await
        })?;
        if matters == 0 {
            return Ok(None);
        }
        let copy = match Settings::read(self.dir()) {
            Ok(copy) => copy,
            Err(error) => return Ok(Some(in_words(&error))),
        };
        let mut changes = self.fingerprint().diff(&copy.fingerprint);
        changes.extend(connect::spec_changes(self.spec(), &copy.spec));
        let words: Vec<String> = changes.iter().map(ToString::to_string).collect();
        Ok((!words.is_empty()).then(|| words.join("; ")))
    }
}
