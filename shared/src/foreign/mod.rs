//! Names what is wrong with hidden states that others wrote: safetensors files laid out like
//! speculators' (`hidden_states` [S, n, H] with `token_ids` [S]) or with one tensor a layer.
//! Knows no engine; judges shapes and values only.

mod scan;

use std::fs::File;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::Serialize;

pub use scan::{SlotStats, is_float};

use crate::diagnosis::{self, Expected};
use crate::durable::at;
use crate::files::RealFiles;
use crate::header::{HeaderLimits, ShardHeader, TensorEntry};
use crate::shard::{ShardError, open_header};

/// Names under which token ids are found.
pub const TOKEN_NAMES: [&str; 3] = ["token_ids", "input_ids", "prompt_token_ids"];

/// One tensor of the file.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ForeignTensor {
    /// Its name.
    pub name: String,
    /// Its type, as `BF16`.
    pub dtype: String,
    /// Its axes.
    pub shape: Vec<usize>,
    /// Sizes of its values, one entry a layer slot; empty for integers.
    pub slots: Vec<SlotStats>,
}

/// What a look at the file showed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ForeignReport {
    /// The file.
    pub file: PathBuf,
    /// Its tensors in file order.
    pub tensors: Vec<ForeignTensor>,
    /// Number of token ids, where there are some.
    pub tokens: Option<usize>,
    /// What makes the data unusable.
    pub faults: Vec<String>,
    /// What is unusual.
    pub notes: Vec<String>,
}

impl ForeignReport {
    /// Whether nothing but notes was found.
    pub fn clean(&self) -> bool {
        self.faults.is_empty()
    }
}

/// Looks at a safetensors file of any origin, reads all its values, and says what is wrong.
pub fn audit_foreign(path: &Path) -> Result<ForeignReport, ShardError> {
    // Model caches are full of links; the user named this one.
    let path = &path.canonicalize().map_err(at("opening", path))?;
    let (file, _, header) = open_header(&RealFiles, path, &HeaderLimits::FOREIGN)?;
    let mut report = ForeignReport {
        file: path.to_path_buf(),
        tensors: Vec::new(),
        tokens: None,
        faults: Vec::new(),
        notes: Vec::new(),
    };
    let tokens = token_count(&header, &mut report);
    report.tokens = tokens;
    let mut states: Vec<&TensorEntry> = header.tensors.iter().filter(|t| is_state(t)).collect();
    states.sort_by_key(|tensor| natural(&tensor.name));
    judge_shapes(&states, tokens, &mut report);
    scan_values(&header, (&file, path), &states, &mut report)?;
    judge_values(&mut report);
    Ok(report)
}

/// Floating-point tensors hold states, unless they are scales.
fn is_state(tensor: &TensorEntry) -> bool {
    scan::is_float(tensor.dtype) && !tensor.name.contains("scale")
}

/// Orders `layer_10` behind `layer_9`: text with its last number padded.
fn natural(name: &str) -> (String, u64) {
    let digits = name.trim_end_matches(|c: char| !c.is_ascii_digit());
    let stem = digits.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = digits.get(stem.len()..).and_then(|digits| digits.parse().ok());
    (stem.to_owned(), number.unwrap_or(0))
}

fn token_count(header: &ShardHeader, report: &mut ForeignReport) -> Option<usize> {
    let Some(ids) = TOKEN_NAMES.iter().find_map(|name| header.tensor(name)) else {
        report.faults.push(format!(
            "no token ids ({}): the rows can't be tied to tokens",
            TOKEN_NAMES.join(", ")
        ));
        return None;
    };
    if scan::is_float(ids.dtype) {
        report.faults.push(format!("{} is {}, integers are expected", ids.name, ids.dtype));
    }
    match ids.shape.as_slice() {
        [tokens] => Some(*tokens),
        [1, tokens] => {
            let note = "has a leading batch dimension of 1";
            report.notes.push(format!("{} {:?} {note}", ids.name, ids.shape));
            Some(*tokens)
        }
        shape => {
            report.faults.push(format!("{} has shape {shape:?}, [tokens] is expected", ids.name));
            None
        }
    }
}

fn judge_shapes(states: &[&TensorEntry], tokens: Option<usize>, report: &mut ForeignReport) {
    let fault = match states {
        [] => Some("no hidden states: the file has no floating-point tensor".to_owned()),
        [one] => stack_fault(one, tokens),
        many => judge_separate(many, tokens),
    };
    report.faults.extend(fault);
    if let [one] = states
        && let [s, n, _] = one.shape[..]
        && tokens == Some(n)
        && s < n
    {
        report.notes.push(format!("{}: layers come first, [n, S, H]", one.name));
    }
}

/// What is wrong with the shape of one tensor for all layers, [S, n, H] being expected; the order
/// [n, S, H] passes too.
pub fn stack_fault(tensor: &TensorEntry, tokens: Option<usize>) -> Option<String> {
    let shape = &tensor.shape;
    let got = format!("{} has shape {shape:?}, [tokens, layers, hidden] is expected", tensor.name);
    let tokens = tokens?;
    match *shape.as_slice() {
        [n, s, _] if s == tokens && n < tokens => None,
        [s, n, h] => {
            if n > h || n > 128 {
                return Some(format!("{got}: {n} is no number of layers: axes are swapped"));
            }
            let expected = Expected { layers: 1, tokens, hidden_size: h };
            let fault = diagnosis::check_shapes(&expected, &[&[s, h]], &[]).err()?;
            let cause = fault.cause.unwrap_or_else(|| "the rows are not this sample's".into());
            Some(format!("{got} with {tokens} tokens: {cause}"))
        }
        [1, s, _, _] if s == tokens => {
            Some(format!("{got}: a leading batch dimension of 1 was not removed"))
        }
        [t, s] if s == tokens && t > tokens => Some(format!(
            "{got}: {t} rows of {s} values: {t} is the number of tokens in the batch ({tokens} + \
             {} others), so one layer's rows were taken for layers",
            t - tokens
        )),
        [t, s] if s == tokens && t == tokens => {
            Some(format!("{got}: one layer's rows were taken for layers and cut to {s} values"))
        }
        [s, w] if s == tokens => {
            Some(format!("{got}: one layer only, or layers concatenated to {w} columns"))
        }
        _ => Some(got),
    }
}

/// One tensor a layer: all [S, H] is expected.
fn judge_separate(states: &[&TensorEntry], tokens: Option<usize>) -> Option<String> {
    let count = states.len();
    let shapes: Vec<&[usize]> = states.iter().map(|tensor| tensor.shape.as_slice()).collect();
    let tokens = tokens.or_else(|| shapes.first()?.first().copied())?;
    if shapes.iter().all(|shape| shape.len() == 1) {
        let cut = shapes.iter().all(|shape| *shape == [tokens]);
        let whose = match count.checked_sub(tokens) {
            Some(0) => format!("{count} is the number of tokens"),
            Some(others) if cut => format!(
                "{count} is no number of layers but of tokens in the batch ({tokens} + {others} \
                 of other samples)"
            ),
            _ => "each has one axis only".to_owned(),
        };
        let got = format!("{count} tensors {:?}", shapes.first().copied().unwrap_or_default());
        return Some(format!(
            "expected a few tensors [{tokens}, hidden]; got {got}: {whose}, so one layer's rows \
             were taken for layers"
        ));
    }
    // The width that most tensors have; concatenated ones are named against it.
    let widths = shapes.iter().filter_map(|shape| shape.last().copied());
    let hidden_size = widths.min()?;
    let is_pair = count == 2 && shapes.iter().all(|shape| shape.first() == Some(&tokens));
    if is_pair && shapes.iter().any(|shape| *shape == [tokens, 3 * hidden_size]) {
        return None; // [S, 3H] beside [S, H]: the layout of ModelOpt.
    }
    let expected = Expected { layers: count, tokens, hidden_size };
    diagnosis::check_shapes(&expected, &shapes, &[]).err().map(|fault| fault.to_string())
}

fn scan_values(
    header: &ShardHeader,
    (file, path): (&File, &Path),
    states: &[&TensorEntry],
    report: &mut ForeignReport,
) -> Result<(), ShardError> {
    let integers = header.tensors.iter().filter(|tensor| !is_state(tensor));
    for tensor in states.iter().copied().chain(integers) {
        let slots = match is_state(tensor) {
            true => scan::slots(file, tensor, report.tokens).map_err(at("reading", path))?,
            false => Vec::new(),
        };
        report.tensors.push(ForeignTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            slots,
        });
    }
    Ok(())
}

fn judge_values(report: &mut ForeignReport) {
    let mut named = Vec::new();
    for tensor in &report.tensors {
        let several = tensor.slots.len() > 1;
        for (slot, stats) in tensor.slots.iter().enumerate() {
            let place = if several { format!(", slot {slot}") } else { String::new() };
            let name = format!("{}{place}", tensor.name);
            named.push((name, tensor.dtype == Dtype::F16.to_string(), *stats));
        }
    }
    for (name, half, stats) in &named {
        let SlotStats { nan, infinite, first, .. } = stats;
        if let Some(first) = first {
            let overflow = if *half && *infinite > 0 { " (float16 ends at 65,504)" } else { "" };
            report.faults.push(format!(
                "{name}: {nan} NaN and {infinite} infinite values{overflow}, first in row {first}"
            ));
        } else if stats.absmax == 0.0 {
            report.faults.push(format!("{name}: only zeros: was the buffer ever filled?"));
        } else if stats.zero_rows > 0 {
            report.faults.push(format!(
                "{name}: {} of {} rows are zero: padding, or rows never captured",
                stats.zero_rows, stats.rows
            ));
        } else if stats.rows >= 4 && 2 * stats.repeated_rows >= stats.rows {
            report.faults.push(format!(
                "{name}: {} of {} rows equal the row before: unless their tokens are the same, one \
                 token's state was written for others",
                stats.repeated_rows, stats.rows
            ));
        } else if stats.rows >= 8 && stats.row_rms_spread < 0.02 {
            report.notes.push(format!(
                "{name}: all rows have the same rms: was it taken after the final norm?"
            ));
        }
    }
    for (index, (name, _, stats)) in named.iter().enumerate() {
        let twin = named.iter().take(index).find(|(_, _, other)| other.digest == stats.digest);
        if let Some((twin, ..)) = twin.filter(|_| stats.absmax != 0.0) {
            report.faults.push(format!("{name} equals {twin}: one buffer was captured twice"));
        }
    }
}
