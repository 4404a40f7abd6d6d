//! `extractor inspect`: what a shard, one sample, or another tool's safetensors file holds.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use shared::manifest::{Cell, Table};
use shared::shard::read_header;
use shared::{
    ForeignReport, HeaderLimits, Manifest, SampleId, ShardEntry, ShardReader, TensorRecord,
    audit_foreign,
};

use super::Usage;
use super::query::print_aligned;

/// Arguments of `extractor inspect`.
#[derive(clap::Args)]
pub(crate) struct InspectArgs {
    /// A shard, another tool's safetensors file, or (with --sample) a data set.
    path: PathBuf,
    /// Only this sample (32 hex digits).
    #[arg(long)]
    sample: Option<SampleId>,
    /// One JSON object a tensor and line.
    #[arg(long)]
    json: bool,
}

/// Prints names, types, shapes and sizes; false when another tool's file has faults.
pub(crate) fn run(args: &InspectArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    if args.path.is_dir() {
        let Some(id) = args.sample else {
            let path = args.path.display();
            bail!(Usage(format!(
                "{path} is a directory: name one of its samples with --sample ID (`extractor query \
                 {path} samples` lists them), or one of its shards"
            )));
        };
        return sample(&args.path, id, args.json, out);
    }
    let doing = || format!("opening {}", args.path.display());
    let path = args.path.canonicalize().with_context(doing)?;
    let header = read_header(&path, &HeaderLimits::FOREIGN)?;
    if header.metadata.get("format").is_none_or(|format| format != "aerie") {
        return foreign(&path, args.json, out);
    }
    let reader = ShardReader::open(&path, &HeaderLimits::SHARD)?;
    if !args.json {
        for (name, value) in &header.metadata {
            writeln!(out, "{name} = {value}")?;
        }
    }
    let ids = args.sample.map_or_else(|| reader.sample_ids(), |id| vec![id]);
    let entries: Vec<ShardEntry> =
        ids.into_iter().map(|id| reader.describe(id)).collect::<Result<_, _>>()?;
    tensors(entries.iter().flat_map(|entry| &entry.tensors), args.json, out)
}

fn sample(dir: &Path, id: SampleId, json: bool, out: &mut dyn Write) -> anyhow::Result<bool> {
    let manifest = Manifest::open_read(dir)?;
    let Some(row) = manifest.sample(id)? else {
        let path = dir.display();
        bail!(Usage(format!(
            "sample {id} is not in {path}; `extractor query {path} samples` lists those that are"
        )));
    };
    let path = manifest.dir().shards().join(&row.shard_file);
    let entry = ShardReader::open(&path, &HeaderLimits::SHARD)?.describe(id)?;
    if !json {
        writeln!(out, "sample {id}")?;
        writeln!(out, "from   {}:{}", row.source_file, row.source_line)?;
        writeln!(out, "shard  {}", row.shard_file)?;
        let cut = if row.truncated { ", truncated" } else { "" };
        writeln!(out, "tokens {} ({} trainable{cut})", row.tokens, row.trainable_tokens)?;
    }
    tensors(entry.tensors.iter(), json, out)
}

fn tensors<'a>(
    records: impl Iterator<Item = &'a TensorRecord>,
    json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let mut table = table(&["name", "dtype", "shape", "rms", "absmax"]);
    for record in records {
        if json {
            writeln!(out, "{}", serde_json::to_string(record)?)?;
            continue;
        }
        table.rows.push(vec![
            Cell::Text(record.name.clone()),
            Cell::Text(record.dtype.clone()),
            Cell::Text(format!("{:?}", record.shape)),
            size(record.rms),
            size(record.absmax),
        ]);
    }
    if !json {
        print_aligned(&table, out)?;
    }
    Ok(true)
}

fn foreign(path: &Path, json: bool, out: &mut dyn Write) -> anyhow::Result<bool> {
    let report = audit_foreign(path)?;
    if json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        return Ok(report.clean());
    }
    let tokens = report.tokens.map_or_else(|| "unknown".to_owned(), |tokens| tokens.to_string());
    writeln!(out, "not an Aerie shard; tokens: {tokens}")?;
    print_aligned(&foreign_table(&report), out)?;
    for fault in &report.faults {
        writeln!(out, "FAULT: {fault}")?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    if report.clean() {
        writeln!(out, "no faults found")?;
    }
    Ok(report.clean())
}

/// One line a layer slot; long lists of tensors are cut, the faults name what matters.
fn foreign_table(report: &ForeignReport) -> Table {
    const SHOWN: usize = 32;
    let mut table = table(&["name", "slot", "dtype", "shape", "rms", "absmax"]);
    for tensor in report.tensors.iter().take(SHOWN) {
        let common = |slot: Cell, rms: Cell, absmax: Cell| {
            let shape = Cell::Text(format!("{:?}", tensor.shape));
            let (name, dtype) = (tensor.name.clone(), tensor.dtype.clone());
            vec![Cell::Text(name), slot, Cell::Text(dtype), shape, rms, absmax]
        };
        if tensor.slots.is_empty() {
            table.rows.push(common(Cell::Null, Cell::Null, Cell::Null));
        }
        for (slot, stats) in tensor.slots.iter().enumerate().take(SHOWN) {
            let absmax = size(Some(f64::from(stats.absmax)));
            table.rows.push(common(Cell::Integer(slot as i64), size(Some(stats.rms)), absmax));
        }
    }
    if report.tensors.len() > SHOWN {
        let more = format!("and {} more tensors", report.tensors.len() - SHOWN);
        let blank = std::iter::repeat_n(Cell::Null, table.columns.len() - 1);
        table.rows.push(std::iter::once(Cell::Text(more)).chain(blank).collect());
    }
    table
}

fn table(columns: &[&str]) -> Table {
    Table { columns: columns.iter().map(|name| (*name).to_owned()).collect(), rows: Vec::new() }
}

/// Six digits are enough to compare by eye.
fn size(value: Option<f64>) -> Cell {
    value.map_or(Cell::Null, |value| Cell::Text(format!("{value:.6}")))
}

#[cfg(test)]
mod tests {
    use shared::manifest::{InputFile, SourceOutcome, SourceRecord};
    use shared::{
        CaptureSpec, CapturedSample, Digest, Fingerprint, LayerIndex, LayerState, ShardWriter,
        StateDtype, StateRows, TokenSample, durable,
    };

    use super::*;

    fn shown(path: &Path, sample: Option<SampleId>, json: bool) -> (bool, String) {
        let mut out = Vec::new();
        let args = InspectArgs { path: path.to_path_buf(), sample, json };
        let passed = run(&args, &mut out).unwrap();
        (passed, String::from_utf8(out).unwrap())
    }

    fn dataset(dir: &Path) -> SampleId {
        let layers = vec![LayerIndex(2), LayerIndex(5)];
        let spec = CaptureSpec { layers, hidden_size: 2, dtype: StateDtype::Bf16 };
        let fingerprint = Fingerprint::default();
        let manifest = Manifest::open_for_write(dir, &fingerprint, &spec).unwrap();
        let states = spec.layers.iter().map(|&layer| LayerState {
            layer,
            shape: vec![2, 2],
            rows: StateRows::from_f32(&[3.0, -4.0, 3.0, 4.0], 2, StateDtype::Bf16),
        });
        let sample = TokenSample::new(vec![5, 6], vec![0, 1]).unwrap();
        let id = sample.id();
        let captured = CapturedSample::new(sample, &spec, states.collect(), &[2]).unwrap();
        let shard = manifest.next_shard_id().unwrap();
        let mut writer =
            ShardWriter::create(manifest.dir(), shard, &spec, &fingerprint.digest()).unwrap();
        writer.push(&captured).unwrap();
        let source = SourceRecord {
            file: "chats.jsonl".into(),
            line: 7,
            digest: [0; 16],
            outcome: SourceOutcome::Committed(id),
            truncated: true,
        };
        let (file, digest) = ("chats.jsonl".into(), Digest::of(b""));
        let input = InputFile { file, lines: 7, blank: 0, bytes: 1, digest };
        manifest.register_input(&input).unwrap();
        manifest.commit_shard(&writer.seal().unwrap(), &[source]).unwrap();
        id
    }

    #[test]
    fn a_sample_shows_where_it_came_from_and_how_large_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let id = dataset(dir.path());
        let (passed, text) = shown(dir.path(), Some(id), false);
        assert!(passed);
        assert!(text.contains("from   chats.jsonl:7"), "{text}");
        assert!(text.contains("tokens 2 (1 trainable, truncated)"), "{text}");
        // sqrt((9 + 16 + 9 + 16) / 4)
        let line = text.lines().find(|line| line.contains("hidden_states.5")).unwrap();
        assert!(line.ends_with("BF16   [2, 2]  3.535534  4.000000"), "{line}");
        let shard = dir.path().join("shards/shard-000000.safetensors");
        let (_, text) = shown(&shard, None, true);
        let record: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(record["shape"], serde_json::json!([2, 2]));
        assert_eq!(record["absmax"], 4.0);
    }

    #[test]
    fn the_founding_failure_in_another_tools_file_fails_the_inspection() {
        let row = vec![0x3f; 2 * 4];
        let names: Vec<String> = (0..9).map(|i| format!("hidden_states.{i}")).collect();
        let ids = vec![0; 8 * 4];
        let view = |dtype, shape: &[usize], data| {
            safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap()
        };
        use safetensors::Dtype::{BF16, I64};
        let tensors = names
            .iter()
            .map(|name| (name.as_str(), view(BF16, &[4], &row)))
            .chain([("token_ids", view(I64, &[4], &ids))]);
        let bytes = safetensors::serialize(tensors, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hs_0.safetensors");
        durable::write_file(&path, &bytes).unwrap();
        let (passed, text) = shown(&path, None, false);
        assert!(!passed);
        let fault = text.lines().find(|line| line.starts_with("FAULT: expected")).unwrap();
        assert!(fault.contains(
            "got 9 tensors [4]: 9 is no number of layers but of tokens in the \
             batch (4 + 5 of other samples), so one layer's rows were taken for layers"
        ));
    }
}
