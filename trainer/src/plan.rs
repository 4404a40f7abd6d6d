//! Index lists of one training step: which rows are gathered, rotated and attended at each step.
//! Made once per batch on the host; knows no weights.

use burn::tensor::backend::Backend;

use crate::batch::BatchTokens;
use crate::masks::{Documents, RowPlan};
use crate::ops::{AttentionPlan, RotaryTable, RowIndex, Segment};

/// What one step works on.
pub(crate) struct StepPlan<B: Backend> {
    /// Rows of the previous hidden states that go on; `None` when all do.
    pub(crate) from_previous: Option<RowIndex<B>>,
    /// Token each key row is given, as a row of [`crate::unroll::TokenHalf`]'s keys.
    pub(crate) key_tokens: RowIndex<B>,
    /// Token each query row is given, as a row of its queries.
    pub(crate) query_tokens: RowIndex<B>,
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
    /// Every token that a row is given at some step, once.
    pub(crate) tokens: RowIndex<B>,
    /// Those that query rows are given, as places in `tokens`; `None` when these are all.
    pub(crate) queried: Option<RowIndex<B>>,
    /// Rows with step-0 keys; `None` when these are all rows.
    pub(crate) base: Option<RowIndex<B>>,
    pub(crate) steps: Vec<StepPlan<B>>,
    /// For all positions that occur.
    pub(crate) table: RotaryTable<B>,
}

/// Positions that occur in a batch are below this.
pub(crate) fn positions(tokens: &BatchTokens, rows: &RowPlan) -> usize {
    let longest = tokens.doc_offsets().windows(2).map(|span| span[1] - span[0]).max();
    longest.unwrap_or(0) + rows.need.len()
}

/// Builds the plans of `rows` for a softmax scale and a table of all [`positions`]. Row lists must
/// not be empty.
pub(crate) fn plan_batch<B: Backend>(
    tokens: &BatchTokens,
    rows: &RowPlan,
    scale: f64,
    table: RotaryTable<B>,
) -> BatchPlan<B> {
    let device = &table.cos.device();
    let documents = Documents::new(tokens);
    let index = |values: Vec<u32>| RowIndex::<B>::new(values, device);
    let position = |row: u32| row - documents.span(row as usize).start as u32;
    let positions = |rows: &[u32], step: usize| {
        index(rows.iter().map(|&row| position(row) + step as u32).collect())
    };
    let [all, queried] = given_tokens(tokens, rows);
    let [place_of_key, place_of_query] = [ranks(&all), ranks(&queried)];
    let found = |ranks: &[u32], tokens: Vec<u32>| {
        index(tokens.iter().map(|&id| ranks[id as usize]).collect())
    };
    let subset =
        |have: &[u32], want: &[u32]| (have.len() != want.len()).then(|| index(places(have, want)));
    let mut steps = Vec::new();
    for (step, need) in rows.need.iter().take_while(|need| !need.is_empty()).enumerate() {
        let key_rows = key_rows(rows, step);
        let given = |rows: &[u32]| given(tokens, &documents, rows, step);
        let own = rows.need[..=step].iter().skip(1).map(|have| index(places(have, need)));
        let (segments, visible) = visibility(&documents, &rows.base, need);
        let attention =
            AttentionPlan { segments, visible: index(visible), own: own.collect(), scale };
        steps.push(StepPlan {
            from_previous: match step {
                0 => None,
                _ => subset(&rows.need[step - 1], need),
            },
            key_tokens: found(&place_of_key, given(key_rows)),
            query_tokens: found(&place_of_query, given(need)),
            key_positions: positions(key_rows, step),
            queries: subset(key_rows, need),
            query_positions: positions(need, step),
            attention,
        });
    }
    BatchPlan {
        queried: subset(&all, &queried),
        tokens: index(all),
        base: (rows.base.len() != tokens.rows()).then(|| index(rows.base.clone())),
        table,
        steps,
    }
}

/// Rows whose keys a step makes.
fn key_rows(rows: &RowPlan, step: usize) -> &[u32] {
    if step == 0 { &rows.base } else { &rows.need[step] }
}

/// The token each row is given at a step; 0 past the end of a document.
fn given(tokens: &BatchTokens, documents: &Documents<'_>, rows: &[u32], step: usize) -> Vec<u32> {
    let token = |&row: &u32| match documents.ahead(row as usize, 1 + step) {
        Some(ahead) => tokens.input_ids()[ahead],
        None => 0,
    };
    rows.iter().map(token).collect()
}

/// Every token that key rows are given at some step, and every one that query rows are given.
pub(crate) fn given_tokens(tokens: &BatchTokens, rows: &RowPlan) -> [Vec<u32>; 2] {
    let documents = Documents::new(tokens);
    let steps = rows.need.iter().take_while(|need| !need.is_empty()).count();
    let of_keys = |step| given(tokens, &documents, key_rows(rows, step), step);
    let of_queries = |step: usize| given(tokens, &documents, &rows.need[step], step);
    [distinct((0..steps).flat_map(of_keys)), distinct((0..steps).flat_map(of_queries))]
}

/// Every id once, ascending.
pub(crate) fn distinct(ids: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut seen = Vec::new();
    for id in ids {
        let id = id as usize;
        if id >= seen.len() {
            seen.resize(id + 1, false);
        }
        seen[id] = true;
    }
    (0..seen.len() as u32).filter(|&id| seen[id as usize]).collect()
}

/// For each id up to the last of `list`, how many of `list` are below it.
fn ranks(list: &[u32]) -> Vec<u32> {
    let mut ranks = Vec::new();
    for (rank, &id) in list.iter().enumerate() {
        ranks.resize(id as usize + 1, rank as u32);
    }
    ranks
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
fn visibility(documents: &Documents<'_>, base: &[u32], need: &[u32]) -> (Vec<Segment>, Vec<u32>) {
    let mut segments = Vec::new();
    let mut visible = Vec::with_capacity(need.len());
    let mut first = 0;
    while first < need.len() {
        let span = documents.span(need[first] as usize);
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
