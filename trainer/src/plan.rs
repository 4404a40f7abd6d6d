//! Index lists of one training step: which rows are gathered, rotated and attended at each step.
//! Made once per batch on the host; knows no weights.

use burn::tensor::backend::Backend;

use crate::batch::BatchTokens;
use crate::masks::{Layout, RowPlan};
use crate::ops::{AttentionPlan, RowIndex, Segment};

/// What one step works on.
pub(crate) struct StepPlan<B: Backend> {
    /// Rows of the previous hidden states that go on; `None` when all do.
    pub(crate) from_previous: Option<RowIndex<B>>,
    /// Token each key row is given.
    pub(crate) tokens: RowIndex<B>,
    /// Position of each key row.
    pub(crate) key_positions: RowIndex<B>,
    /// Key rows that are also query rows; `None` when all are.
    pub(crate) queries: Option<RowIndex<B>>,
    /// Position of each query row.
    pub(crate) query_positions: RowIndex<B>,
    /// Who sees what.
    pub(crate) attention: AttentionPlan<B>,
}

/// Plans of all steps.
pub(crate) struct BatchPlan<B: Backend> {
    /// Rows with step-0 keys; `None` when these are all rows.
    pub(crate) base: Option<RowIndex<B>>,
    pub(crate) steps: Vec<StepPlan<B>>,
    /// Positions that occur are below this.
    pub(crate) positions: usize,
}

/// Builds the plans of `rows` for a softmax scale. Row lists must not be empty.
pub(crate) fn plan_batch<B: Backend>(
    tokens: &BatchTokens,
    rows: &RowPlan,
    scale: f64,
    device: &B::Device,
) -> BatchPlan<B> {
    let layout = Layout::new(tokens);
    let index = |values: Vec<u32>| RowIndex::<B>::new(values, device);
    let position = |row: u32| row - layout.span(row as usize).start as u32;
    let positions = |rows: &[u32], step: usize| {
        index(rows.iter().map(|&row| position(row) + step as u32).collect())
    };
    let given = |rows: &[u32], step: usize| {
        let token = |&row: &u32| match layout.ahead(row as usize, 1 + step) {
            Some(ahead) => tokens.input_ids()[ahead],
            None => 0,
        };
        index(rows.iter().map(token).collect())
    };
    let subset =
        |have: &[u32], want: &[u32]| (have.len() != want.len()).then(|| index(places(have, want)));
    let mut steps = Vec::new();
    for (step, need) in rows.need.iter().enumerate() {
        if need.is_empty() {
            break;
        }
        let key_rows = if step == 0 { &rows.base } else { need };
        let own = rows.need[..=step].iter().skip(1).map(|have| index(places(have, need)));
        let (segments, visible) = visibility(&layout, &rows.base, need);
        let attention =
            AttentionPlan { segments, visible: index(visible), own: own.collect(), scale };
        steps.push(StepPlan {
            from_previous: match step {
                0 => None,
                _ => subset(&rows.need[step - 1], need),
            },
            tokens: given(key_rows, step),
            key_positions: positions(key_rows, step),
            queries: subset(key_rows, need),
            query_positions: positions(need, step),
            attention,
        });
    }
    let longest = tokens.doc_offsets().windows(2).map(|span| span[1] - span[0]).max();
    BatchPlan {
        base: (rows.base.len() != tokens.rows()).then(|| index(rows.base.clone())),
        positions: longest.unwrap_or(0) + rows.need.len(),
        steps,
    }
}

/// Place of each of `want` in `have`; both ascend and `have` holds all of `want`.
fn places(have: &[u32], want: &[u32]) -> Vec<u32> {
    let mut at = 0;
    let mut place = |&row: &u32| {
        while have[at] < row {
            at += 1;
        }
        at as u32
    };
    want.iter().map(&mut place).collect()
}

/// One segment a document with query rows, and for each query row the end of what it sees.
fn visibility(layout: &Layout<'_>, base: &[u32], need: &[u32]) -> (Vec<Segment>, Vec<u32>) {
    let mut segments = Vec::new();
    let mut visible = Vec::with_capacity(need.len());
    let mut first = 0;
    while first < need.len() {
        let span = layout.span(need[first] as usize);
        let last = need.partition_point(|&row| (row as usize) < span.end);
        let keys = base.partition_point(|&row| (row as usize) < span.start);
        for &row in &need[first..last] {
            visible.push(base.partition_point(|&key| key <= row) as u32);
        }
        // The step-0 keys of a document reach at least to its last query row.
        let end = visible.last().map_or(keys, |&end| end as usize);
        segments.push(Segment { queries: first..last, keys: keys..end });
        first = last;
    }
    (segments, visible)
}
