//! Audit of one shard against its rows.

use std::collections::{BTreeMap, BTreeSet};

use super::{AuditReport, FindingKind, Verify};
use crate::durable::DatasetDir;
use crate::error_chain::in_words;
use crate::header::HeaderLimits;
use crate::manifest::{Manifest, ManifestError, SampleRow, ShardRow};
use crate::sample::SampleId;
use crate::shard::{ShardEntry, ShardError, ShardReader, TensorRecord};

/// What stays the same from shard to shard.
pub(super) struct Context<'a> {
    pub(super) manifest: &'a Manifest,
    pub(super) dir: &'a DatasetDir,
    pub(super) verify: Verify,
}

/// Every 16th sample is read again under [`Verify::Sample`].
const STRIDE: usize = 16;

/// Checks a shard; `seen` collects which shard holds which sample.
pub(super) fn check(
    context: &Context<'_>,
    (shard, newest): (&ShardRow, bool),
    rows: &[&SampleRow],
    seen: &mut BTreeMap<SampleId, String>,
    report: &mut AuditReport,
) -> Result<(), ManifestError> {
    let file = shard.file.as_str();
    let all = || rows.iter().map(|row| row.id).collect::<Vec<_>>();
    let path = context.dir.shards().join(file);
    let Ok(metadata) = std::fs::symlink_metadata(&path) else {
        let detail = format!("the file is missing, and {} samples with it", rows.len());
        report.add_samples(FindingKind::ShardMissing, Some(file), all(), detail);
        return Ok(());
    };
    if metadata.len() != shard.bytes {
        let detail = format!("{} bytes, committed as {}", metadata.len(), shard.bytes);
        report.add_samples(FindingKind::ShardSize, Some(file), all(), detail);
    }
    if context.verify == Verify::None {
        return Ok(());
    }
    let reader = match ShardReader::open(&path, &HeaderLimits::SHARD) {
        Ok(reader) => reader,
        Err(error) => {
            report.add_samples(FindingKind::ShardUnreadable, Some(file), all(), in_words(&error));
            return Ok(());
        }
    };
    if context.verify == Verify::All || newest {
        check_digest(&reader, shard, rows, report);
    }
    if reader.spec() != context.manifest.spec()
        || *reader.fingerprint() != context.manifest.fingerprint().digest()
    {
        let detail = "written under other settings than the manifest's";
        report.add_samples(FindingKind::ShardUnreadable, Some(file), all(), detail);
    }
    check_set(&reader, shard, rows, seen, report);
    let stride = if context.verify == Verify::All { 1 } else { STRIDE };
    for row in rows.iter().step_by(stride).filter(|row| reader.tokens(row.id).is_some()) {
        check_sample(context.manifest, &reader, row, report)?;
    }
    Ok(())
}

fn check_digest(
    reader: &ShardReader,
    shard: &ShardRow,
    rows: &[&SampleRow],
    report: &mut AuditReport,
) {
    report.bytes_hashed += reader.bytes();
    if let Err(error) = reader.verify(&shard.digest) {
        let samples = rows.iter().map(|row| row.id).collect();
        let kind = FindingKind::ShardDigest;
        report.add_samples(kind, Some(&shard.file), samples, in_words(&error));
    }
}

/// The samples of the header are exactly those of the manifest, and in no other shard.
fn check_set(
    reader: &ShardReader,
    shard: &ShardRow,
    rows: &[&SampleRow],
    seen: &mut BTreeMap<SampleId, String>,
    report: &mut AuditReport,
) {
    let file = Some(shard.file.as_str());
    let here: BTreeSet<SampleId> = reader.sample_ids().into_iter().collect();
    let wanted: BTreeSet<SampleId> = rows.iter().map(|row| row.id).collect();
    let missing: Vec<SampleId> = wanted.difference(&here).copied().collect();
    if !missing.is_empty() {
        let detail = format!("{} samples of the manifest are not in it", missing.len());
        report.add_samples(FindingKind::SampleMissing, file, missing, detail);
    }
    let unknown: Vec<SampleId> = here.difference(&wanted).copied().collect();
    if !unknown.is_empty() {
        let detail = format!("{} samples are not of this shard by the manifest", unknown.len());
        report.add_samples(FindingKind::SampleUnknown, file, unknown, detail);
    }
    for id in here {
        if let Some(other) = seen.insert(id, shard.file.clone()) {
            let detail = format!("the sample is in {other} as well");
            report.add_samples(FindingKind::SampleTwice, file, vec![id], detail);
        }
    }
}

fn check_sample(
    manifest: &Manifest,
    reader: &ShardReader,
    row: &SampleRow,
    report: &mut AuditReport,
) -> Result<(), ManifestError> {
    let file = Some(row.shard_file.as_str());
    report.samples_read += 1;
    let found = match reader.describe(row.id) {
        Ok(found) => found,
        Err(error) => {
            let kind = match error {
                ShardError::Io(_) => FindingKind::ShardUnreadable,
                _ => FindingKind::SampleBroken,
            };
            report.add_samples(kind, file, vec![row.id], in_words(&error));
            return Ok(());
        }
    };
    let recorded = manifest.tensors(row.id)?;
    for difference in differences(row, &recorded, &found) {
        report.add_samples(FindingKind::RowsDiffer, file, vec![row.id], difference);
    }
    for suspicion in suspicions(&found.tensors) {
        report.add_samples(FindingKind::Suspicious, file, vec![row.id], suspicion);
    }
    Ok(())
}

fn differences(row: &SampleRow, recorded: &[TensorRecord], found: &ShardEntry) -> Vec<String> {
    let mut texts = Vec::new();
    let counts = (row.tokens, row.trainable_tokens);
    if counts != (found.tokens, found.trainable_tokens) {
        texts.push(format!(
            "recorded with {} tokens, {} trainable; it has {} and {}",
            counts.0, counts.1, found.tokens, found.trainable_tokens
        ));
    }
    let mut tensors: Vec<&TensorRecord> = found.tensors.iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    if recorded.len() != tensors.len() {
        texts.push(format!("{} tensors recorded, {} found", recorded.len(), tensors.len()));
    }
    for (recorded, found) in recorded.iter().zip(tensors) {
        // The sums are made in a fixed order, so equal bytes give equal bits.
        if recorded != found {
            texts.push(format!("recorded as {}, found {}", line(recorded), line(found)));
        }
    }
    texts
}

fn line(tensor: &TensorRecord) -> String {
    let TensorRecord { name, dtype, shape, rms, absmax } = tensor;
    match (rms, absmax) {
        (Some(rms), Some(absmax)) => {
            format!("{name} {dtype} {shape:?} rms {rms} absmax {absmax}")
        }
        _ => format!("{name} {dtype} {shape:?}"),
    }
}

fn suspicions(tensors: &[TensorRecord]) -> Vec<String> {
    let states: Vec<&TensorRecord> = tensors.iter().filter(|t| t.rms.is_some()).collect();
    let zero = states
        .iter()
        .filter(|tensor| tensor.absmax == Some(0.0))
        .map(|tensor| format!("{} holds only zeros: was its buffer ever filled?", tensor.name));
    let equal = states.windows(2).filter_map(|pair| match pair {
        [a, b] if a.rms == b.rms && a.absmax == b.absmax && a.absmax != Some(0.0) => Some(format!(
            "{} and {} have equal rms and absmax: was one buffer captured twice?",
            a.name, b.name
        )),
        _ => None,
    });
    zero.chain(equal).collect()
}
