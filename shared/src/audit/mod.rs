//! Answers whether a data set is what its manifest says: every line accounted for, every digest
//! right, every row re-read, nothing left over. Changes nothing.

mod shards;

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use crate::durable::{DatasetDir, at, is_temporary};
use crate::manifest::{
    self, Conservation, Manifest, ManifestError, SampleRow, ShardRow, StorageError,
};
use crate::sample::SampleId;
use crate::shard::ShardId;
use crate::target_files;

/// How much is read again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Every byte: digests of all shards, and every sample against the contract and its rows.
    All,
    /// Every header, one sample in 16 of each shard (at least one), the newest shard's digest.
    Sample,
    /// File sizes and the manifest only.
    None,
}

impl FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "sample" => Ok(Self::Sample),
            "none" => Ok(Self::None),
            _ => Err(format!("`{text}` is not all, sample or none")),
        }
    }
}

/// What a finding is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// SQLite's own check, or references between tables.
    ManifestDamaged,
    /// lines = committed + duplicate + rejected + pending does not hold.
    LinesDoNotAddUp,
    /// A committed shard without its file.
    ShardMissing,
    /// A shard of another size than committed.
    ShardSize,
    /// A shard whose bytes changed.
    ShardDigest,
    /// A shard that can't be read as one, or was written under other settings.
    ShardUnreadable,
    /// Samples in the manifest that the shard does not hold.
    SampleMissing,
    /// Samples in a shard that the manifest does not know there.
    SampleUnknown,
    /// One sample in two shards.
    SampleTwice,
    /// A sample that does not fulfil the contract.
    SampleBroken,
    /// A sample that differs from its rows in the manifest.
    RowsDiffer,
    /// Rows that contradict one another, or that no run writes.
    RowsDisagree,
    /// Settings beside the manifest that are not those in it.
    SettingsDiffer,
    /// A file that no row names.
    Orphan,
    /// A shard that was committed and has no rows: the manifest is an old one.
    ManifestOlder,
    /// A file of `target/` that is not as it was written.
    TargetDamaged,
    /// A suspicion: a layer of zeros, or two layers of equal size.
    Suspicious,
    /// A sample whose input line has changed since.
    SourceChanged,
}

impl FindingKind {
    /// Whether the finding only informs. All others make the audit fail.
    pub fn is_note(self) -> bool {
        matches!(self, Self::Suspicious | Self::SourceChanged)
    }
}

/// Something that is not as it should be.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// What it is about.
    pub kind: FindingKind,
    /// The file concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// The samples concerned.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<SampleId>,
    /// In words.
    pub detail: String,
}

/// The outcome of an audit.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct AuditReport {
    /// How much was read.
    pub verify: Verify,
    /// What became of all input lines.
    pub conservation: Conservation,
    /// Committed shards.
    pub shards: usize,
    /// Committed samples.
    pub samples: usize,
    /// Tokens of committed samples.
    pub tokens: u64,
    /// Samples that were read again and checked.
    pub samples_read: usize,
    /// Bytes that were hashed.
    pub bytes_hashed: u64,
    /// What storing the states in fewer bits has cost, by layer.
    pub storage_errors: Vec<StorageError>,
    /// What is not as it should be.
    pub findings: Vec<Finding>,
}

impl AuditReport {
    /// Whether nothing but notes was found.
    pub fn clean(&self) -> bool {
        self.findings.iter().all(|finding| finding.kind.is_note())
    }

    fn add(&mut self, kind: FindingKind, shard: Option<&str>, detail: impl Into<String>) {
        self.add_samples(kind, shard, Vec::new(), detail);
    }

    fn add_samples(
        &mut self,
        kind: FindingKind,
        shard: Option<&str>,
        samples: Vec<SampleId>,
        detail: impl Into<String>,
    ) {
        let (shard, detail) = (shard.map(str::to_owned), detail.into());
        self.findings.push(Finding { kind, shard, samples, detail });
    }
}

/// Audits the data set in `dir`. An error means that the audit could not be made, for one because
/// the manifest is damaged beyond opening.
pub fn audit(dir: &Path, verify: Verify) -> Result<AuditReport, ManifestError> {
    let dir = DatasetDir::new(dir);
    let manifest = Manifest::open_read(dir.root())?;
    // Listed before the rows are read: a shard committed in between is then no orphan.
    let mut present = list(&dir, &dir.shards())?;
    let below = manifest::committed_below(&dir);
    let unfinished = unfinished(&dir)?;
    let writing = manifest::is_held(&dir);
    let (shards, samples) = (manifest.shards()?, manifest.samples()?);
    let mut report = AuditReport {
        verify,
        conservation: manifest.conservation()?,
        shards: shards.len(),
        samples: samples.len(),
        tokens: samples.iter().map(|sample| sample.tokens as u64).sum(),
        samples_read: 0,
        bytes_hashed: 0,
        storage_errors: manifest.storage_errors()?,
        findings: Vec::new(),
    };
    for line in manifest.integrity()? {
        report.add(FindingKind::ManifestDamaged, None, line);
    }
    check_lines(&manifest, &mut report)?;
    check_rows(&manifest, &mut report)?;
    let by_shard = group(&samples);
    let context = shards::Context { manifest: &manifest, dir: &dir, verify };
    let mut seen = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let rows = by_shard.get(&shard.id).map(Vec::as_slice).unwrap_or_default();
        let newest = index + 1 == shards.len();
        shards::check(&context, (shard, newest), rows, &mut seen, &mut report)?;
    }
    check_target(&dir, (verify, writing), &mut report)?;
    // One that was unfinished and is gone was a writer's that has come to its end meanwhile.
    present.retain(|name| !is_temporary(name) || dir.shards().join(name).exists());
    check_orphans((&present, below, writing), &shards, &mut report);
    if !writing {
        check_unfinished(&dir, &unfinished, &mut report);
    }
    Ok(report)
}

fn list(dir: &DatasetDir, place: &Path) -> Result<Vec<String>, ManifestError> {
    let names = dir.files().list(place).map_err(at("listing", place))?;
    Ok(names.into_iter().map(|name| name.to_string_lossy().into_owned()).collect())
}

fn group(samples: &[SampleRow]) -> BTreeMap<ShardId, Vec<&SampleRow>> {
    let mut by_shard: BTreeMap<ShardId, Vec<&SampleRow>> = BTreeMap::new();
    for sample in samples {
        by_shard.entry(sample.shard).or_default().push(sample);
    }
    by_shard
}

fn check_lines(manifest: &Manifest, report: &mut AuditReport) -> Result<(), ManifestError> {
    let Conservation { lines, committed, duplicate, rejected, pending } = report.conservation;
    if !report.conservation.holds() {
        let detail = format!(
            "{lines} lines, but {committed} committed + {duplicate} duplicate + {rejected} \
             rejected + {pending} pending"
        );
        report.add(FindingKind::LinesDoNotAddUp, None, detail);
    }
    let without = manifest.samples_without_line()?;
    if !without.is_empty() {
        let detail = format!(
            "{} samples came from lines that have changed since, or that are not known",
            without.len()
        );
        report.add_samples(FindingKind::SourceChanged, None, without, detail);
    }
    Ok(())
}

fn check_rows(manifest: &Manifest, report: &mut AuditReport) -> Result<(), ManifestError> {
    let foreign = manifest.foreign_schema()?;
    if foreign.is_empty() {
        for detail in manifest.contradictions()? {
            report.add(FindingKind::RowsDisagree, None, detail);
        }
    }
    for detail in foreign {
        report.add(FindingKind::ManifestDamaged, None, detail);
    }
    if let Some(words) = manifest.copy_differs()? {
        let detail =
            format!("settings.json is not the manifest's ({words}); the next writer mends it");
        report.add(FindingKind::SettingsDiffer, None, detail);
    }
    Ok(())
}

/// `below`: unknown shards of lower numbers were committed once.
fn check_orphans(
    (present, below, writing): (&[String], Option<u32>, bool),
    shards: &[ShardRow],
    report: &mut AuditReport,
) {
    for name in present {
        let id = name.parse::<ShardId>().ok();
        // What a running writer has in the works is not left over.
        let in_work = writing && (id.is_some() || is_temporary(name));
        if shards.iter().any(|shard| shard.file == *name) {
            continue;
        }
        if id.zip(below).is_some_and(|(id, below)| id.0 < below) {
            let detail = "it was committed, but the manifest has no rows of it: manifest.sqlite is \
                          older than the shards; put the newest back, or move it away and make it \
                          again with `extractor rebuild`";
            report.add(FindingKind::ManifestOlder, Some(name), detail);
        } else if !in_work {
            let detail = "no row of the manifest names this file";
            report.add(FindingKind::Orphan, Some(name), detail);
        }
    }
}

/// Files outside `shards/` under the names they have while they are written, from the root.
fn unfinished(dir: &DatasetDir) -> Result<Vec<String>, ManifestError> {
    let mut found = list(dir, dir.root())?;
    found.retain(|name| manifest::is_unfinished(name));
    let target = dir.target();
    if target.is_dir() {
        let names = list(dir, &target)?.into_iter().filter(|name| is_temporary(name));
        found.extend(names.map(|name| format!("target/{name}")));
    }
    Ok(found)
}

fn check_target(
    dir: &DatasetDir,
    (verify, writing): (Verify, bool),
    report: &mut AuditReport,
) -> Result<(), ManifestError> {
    if verify != Verify::All {
        return Ok(());
    }
    let target = dir.target();
    for fault in target_files::faults(&target).map_err(at("reading", &target))? {
        let detail = format!("target/{fault}: remove {}, and run again", target.display());
        report.add(FindingKind::TargetDamaged, None, detail);
    }
    if writing {
        // A running writer lists its files last.
        return Ok(());
    }
    for name in target_files::unlisted(&target).map_err(at("reading", &target))? {
        let detail = "its digest is not listed; the next run lists the file as it is then";
        report.add(FindingKind::Orphan, Some(&format!("target/{name}")), detail);
    }
    Ok(())
}

fn check_unfinished(dir: &DatasetDir, unfinished: &[String], report: &mut AuditReport) {
    // One that is gone was a writer's that has come to its end meanwhile.
    for name in unfinished.iter().filter(|name| dir.root().join(name).exists()) {
        let detail = "an interrupted run left it unfinished; the next run removes it";
        report.add(FindingKind::Orphan, Some(name), detail);
    }
}
