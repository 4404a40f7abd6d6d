//! Makes a damaged data set whole again by giving up what can't be trusted: damaged shards go to
//! `quarantine/`, and their lines are pending again, so that the next run extracts them anew.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::audit::{AuditReport, FindingKind};
use crate::manifest::{Manifest, ManifestError};
use crate::shard::ShardId;

/// What a repair did.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Repair {
    /// Shards set aside.
    pub shards: Vec<String>,
    /// Samples that are to be extracted again.
    pub samples: u64,
}

/// The shards of an audit's report that a repair would set aside.
pub fn damaged(report: &AuditReport) -> BTreeSet<ShardId> {
    let concerns_a_shard = |kind| {
        use FindingKind::{
            RowsDiffer, SampleBroken, SampleMissing, SampleTwice, SampleUnknown, ShardDigest,
            ShardMissing, ShardSize, ShardUnreadable,
        };
        match kind {
            ShardMissing | ShardSize | ShardDigest | ShardUnreadable | SampleMissing
            | SampleUnknown | SampleTwice | SampleBroken | RowsDiffer => true,
            FindingKind::ManifestDamaged
            | FindingKind::LinesDoNotAddUp
            | FindingKind::RowsDisagree
            | FindingKind::SettingsDiffer
            | FindingKind::Orphan
            | FindingKind::ManifestOlder
            | FindingKind::TargetDamaged
            | FindingKind::Suspicious
            | FindingKind::SourceChanged => false,
        }
    };
    let findings = report.findings.iter().filter(|finding| concerns_a_shard(finding.kind));
    findings.filter_map(|finding| finding.shard.as_deref()?.parse().ok()).collect()
}

/// Sets the shards aside, as the one writer.
pub fn repair(dir: &Path, shards: &BTreeSet<ShardId>) -> Result<Repair, ManifestError> {
    let mut done = Repair::default();
    if shards.is_empty() {
        return Ok(done);
    }
    let manifest = Manifest::open_existing(dir)?;
    for &shard in shards {
        done.samples += manifest.quarantine(shard)?;
        done.shards.push(shard.file_name());
    }
    Ok(done)
}
