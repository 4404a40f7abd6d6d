//! Names the likely cause of tensors that are not `layers x [tokens, hidden]`. Works on shapes
//! only; knows nothing of values, files or engines' code.

use std::fmt;

use crate::contract::LayerIndex;

/// What was wanted: `layers` tensors of [tokens, hidden_size].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    /// Number of tensors.
    pub layers: usize,
    /// Rows of each.
    pub tokens: usize,
    /// Columns of each.
    pub hidden_size: usize,
}

/// Wrong number or shape of tensors, with the likely cause where one is recognised.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShapeFault {
    /// What was wanted.
    pub expected: Expected,
    /// The shapes that came, runs of equal ones counted.
    pub got: Vec<(usize, Vec<usize>)>,
    /// The likely cause.
    pub cause: Option<String>,
}

impl fmt::Display for ShapeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Expected { layers, tokens, hidden_size } = self.expected;
        write!(f, "expected {}; got ", counted(layers, &[tokens, hidden_size]))?;
        match self.got.as_slice() {
            [] => f.write_str("no tensors")?,
            [(count, shape)] => f.write_str(&counted(*count, shape))?,
            many => {
                let shown = many.iter().take(4).map(|(count, shape)| counted(*count, shape));
                f.write_str(&shown.collect::<Vec<_>>().join(" and "))?;
                if many.len() > 4 {
                    write!(f, " and {} more shapes", many.len() - 4)?;
                }
            }
        }
        self.cause.as_ref().map_or(Ok(()), |cause| write!(f, ": {cause}"))
    }
}

fn counted(count: usize, shape: &[usize]) -> String {
    format!("{count} tensor{} {shape:?}", if count == 1 { "" } else { "s" })
}

/// Accepts exactly `layers` shapes [tokens, hidden_size]. `batch_tokens` are the token counts of
/// the samples of the batch (may be empty); they only sharpen the diagnosis.
pub fn check_shapes(
    expected: &Expected,
    shapes: &[&[usize]],
    batch_tokens: &[usize],
) -> Result<(), ShapeFault> {
    let want = [expected.tokens, expected.hidden_size];
    if shapes.len() == expected.layers && shapes.iter().all(|shape| *shape == want) {
        return Ok(());
    }
    let mut got: Vec<(usize, Vec<usize>)> = Vec::new();
    for shape in shapes {
        match got.last_mut() {
            Some((count, same)) if same.as_slice() == *shape => *count += 1,
            _ => got.push((1, shape.to_vec())),
        }
    }
    let cause = if shapes.len() == expected.layers {
        shapes
            .iter()
            .find(|shape| ***shape != want)
            .and_then(|shape| one_shape(expected, shape, batch_tokens))
    } else {
        tensor_count(expected, shapes, batch_tokens)
    };
    Err(ShapeFault { expected: *expected, got, cause })
}

/// Causes that show in the number of tensors.
fn tensor_count(expected: &Expected, shapes: &[&[usize]], batch: &[usize]) -> Option<String> {
    let Expected { layers, tokens, hidden_size } = *expected;
    let count = shapes.len();
    let total: usize = batch.iter().sum();
    if count == 0 {
        return Some("the capture hooks never fired, or their result was dropped".into());
    }
    let rank_one = shapes.iter().all(|shape| shape.len() == 1);
    if rank_one && batch.contains(&count) && batch.len() == 1 || rank_one && count == tokens {
        return Some(format!("{count} is the number of tokens, so {ROWS}"));
    }
    if rank_one && count == total && batch.len() > 1 {
        let sum = batch.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ");
        return Some(format!("{count} is the number of tokens in the batch ({sum}), so {ROWS}"));
    }
    if rank_one && count > layers {
        return Some(format!("each has one axis only, so probably {ROWS}"));
    }
    if let [shape] = shapes {
        return stacked(expected, shape);
    }
    if !shapes.iter().all(|shape| **shape == [tokens, hidden_size]) {
        return whole_batch(layers, count, batch);
    }
    if count == layers + 1 {
        return Some(
            "one too many: the embedding output was counted as a layer (a list of \
             L + 1 states starts with it)"
                .into(),
        );
    }
    if count > layers && count > 8 {
        return Some(format!(
            "the list holds every layer's output (or {} layers and the \
             embeddings, entry k being the input of layer k): pick the captured layers",
            count - 1
        ));
    }
    if count.is_multiple_of(layers) {
        let times = count / layers;
        return Some(format!("{times} times too many: the replies of {times} ranks were joined"));
    }
    (count < layers).then(|| format!("{} of {layers} layers were not captured", layers - count))
}

const ROWS: &str = "one layer's rows were taken for layers";

fn whole_batch(layers: usize, count: usize, batch: &[usize]) -> Option<String> {
    let samples = batch.len();
    (samples > 1 && count == layers * samples).then(|| {
        format!(
            "{count} is {layers} layers x {samples} samples: the whole batch was taken for one \
             sample"
        )
    })
}

/// One tensor that holds all layers.
fn stacked(expected: &Expected, shape: &[usize]) -> Option<String> {
    let Expected { layers, tokens, hidden_size } = *expected;
    let first = |axis: &str| format!("all layers are stacked along the {axis} axis: split it");
    match *shape {
        [n, s, h] if (n, s, h) == (layers, tokens, hidden_size) => Some(first("first")),
        [s, n, h] if (n, s, h) == (layers, tokens, hidden_size) => Some(first("second")),
        [s, w] if (s, w) == (tokens, layers * hidden_size) => {
            Some(format!("{w} = {layers} x {hidden_size}: the layers are concatenated: split them"))
        }
        [s, h] if (s, h) == (tokens, hidden_size) => {
            Some("only one layer came: the list of layers was indexed".into())
        }
        _ => one_shape(expected, shape, &[]),
    }
}

/// Causes that show in the shape of one tensor.
fn one_shape(expected: &Expected, shape: &[usize], batch: &[usize]) -> Option<String> {
    let Expected { tokens, hidden_size, .. } = *expected;
    match *shape {
        [h, s] if (h, s) == (hidden_size, tokens) => {
            Some("the axes are swapped: it is [hidden, tokens], transpose it".into())
        }
        [1, s, h] if (s, h) == (tokens, hidden_size) => {
            Some("a leading batch dimension of 1 was not removed".into())
        }
        [b, s, h] if h == hidden_size && b == batch.len() && s >= tokens => Some(format!(
            "the {b} samples of the batch are padded to {s} rows: slice this sample out"
        )),
        [b, s, h] if h == hidden_size && s >= tokens => {
            Some(format!("the batch dimension of {b} was not removed"))
        }
        [n] if n == tokens * hidden_size => Some("the values are flattened: keep the shape".into()),
        [n] if n == tokens => {
            Some("one channel of every token, or token ids, in place of states".into())
        }
        [n] if n == hidden_size => Some("one token's state in place of all tokens' states".into()),
        [rows, width] if width == hidden_size => row_count(tokens, rows, batch),
        [rows, width] => columns(expected, rows, width),
        _ => None,
    }
}

fn row_count(tokens: usize, rows: usize, batch: &[usize]) -> Option<String> {
    let total: usize = batch.iter().sum();
    let longest = batch.iter().copied().max().unwrap_or(0);
    if batch.len() > 1 && rows == total {
        return Some(format!("{rows} is the whole batch: it was not sliced per sample"));
    }
    if rows == 1 {
        return Some("only one token's state came, as an engine keeps for sampling".into());
    }
    if let Some(other) = batch.iter().position(|&count| count == rows) {
        return Some(format!(
            "{rows} rows are those of sample {other} of the batch: offsets mixed up"
        ));
    }
    if rows == tokens + 1 {
        return Some("one row too many: the generated token was captured as well".into());
    }
    if rows + 1 == tokens {
        return Some(
            "one row too few: the states were shifted by one for next-token labels, or \
             the last token was left to the decode step"
                .into(),
        );
    }
    if rows < tokens {
        let missing = tokens - rows;
        let block = [64, 16].into_iter().find(|block| missing.is_multiple_of(*block));
        return Some(match block {
            Some(block) => format!(
                "{missing} rows are missing, a multiple of {block}: the prefix cache answered for \
                 them; turn prefix caching off"
            ),
            None => format!(
                "{missing} rows are missing: a chunk of the prefill was not captured, \
                 or the prompt was truncated"
            ),
        });
    }
    if rows == longest
        || rows == tokens.next_power_of_two()
        || rows.is_multiple_of(8) && rows < tokens + 256
    {
        return Some(format!("{} rows of padding were kept", rows - tokens));
    }
    None
}

fn columns(expected: &Expected, rows: usize, width: usize) -> Option<String> {
    let Expected { layers, tokens, hidden_size } = *expected;
    if rows != tokens || hidden_size == 0 {
        return None;
    }
    let times = width / hidden_size;
    if width.is_multiple_of(hidden_size)
        && (times == layers || times == layers.saturating_sub(1) || times == 3)
    {
        return Some(format!("{width} = {times} x {hidden_size}: {times} layers are concatenated"));
    }
    // Vocabularies have 32,000 entries and more; no model's residual stream is that wide.
    if width >= 30_000 || times >= 8 {
        return Some(format!(
            "{width} columns are the size of a vocabulary: these are logits, not states"
        ));
    }
    if width > 0 && hidden_size.is_multiple_of(width) {
        let ranks = hidden_size / width;
        return Some(format!(
            "{width} = {hidden_size} / {ranks}: one of {ranks} ranks' columns, not gathered"
        ));
    }
    None
}

/// Why the layers that came are not the layers asked for, both ascending lists.
pub fn layer_names(expected: &[LayerIndex], got: &[LayerIndex]) -> Option<String> {
    let shifted = |by: i32| {
        expected.len() == got.len()
            && expected.iter().zip(got).all(|(e, g)| i32::from(g.0) == i32::from(e.0) + by)
    };
    if shifted(1) {
        return Some(
            "every id is one too large: these are ids of engines that count the \
             embeddings as 0; layer N here is the output of 0-based layer N"
                .into(),
        );
    }
    if shifted(-1) {
        return Some(
            "every id is one too small: layer N here is the *output* of 0-based layer N, \
             not its input's producer"
                .into(),
        );
    }
    let mut sorted = got.to_vec();
    sorted.sort();
    if sorted == expected {
        return Some("the right layers in another order: the spec is ascending".into());
    }
    sorted.dedup();
    (sorted.len() < got.len()).then(|| "a layer occurs twice".into())
}
