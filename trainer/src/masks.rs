//! Which rows of a packed batch are trained at which step, and which must be computed for that.
//! Integers only: knows no tensors.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::batch::BatchTokens;

/// Rule that decides which rows are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskMode {
    /// A row counts at step `k` when the tokens it has been given since its state, and the one it
    /// predicts, are all trained: the chains met in serving. Divided by the rows that count.
    #[default]
    Chain,
    /// The rule of SpecForge: the mask at row `i + k`, and only where the teacher's top token is in
    /// the draft vocabulary. Divided by all rows of the batch.
    Specforge {
        /// Clear the mask of each document's last row first, as its offline loader does.
        zero_last_mask: bool,
    },
}

/// For each step and row, `[K][T]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowMasks {
    /// Rows in the loss.
    pub in_loss: Vec<Vec<bool>>,
    /// Rows in the accuracies.
    pub counted: Vec<Vec<bool>>,
}

/// Rows of a packed batch with the document each belongs to.
pub struct Documents<'a> {
    offsets: &'a [usize],
    document: Vec<usize>,
}

impl<'a> Documents<'a> {
    /// Finds the document of every row.
    pub fn new(tokens: &'a BatchTokens) -> Self {
        let offsets = tokens.doc_offsets();
        let spans = offsets.windows(2).enumerate();
        let document = spans.flat_map(|(doc, span)| vec![doc; span[1] - span[0]]).collect();
        Self { offsets, document }
    }

    /// Rows of all documents.
    pub fn rows(&self) -> usize {
        self.document.len()
    }

    /// First row and end of the document of `row`.
    pub fn span(&self, row: usize) -> Range<usize> {
        let document = self.document[row];
        self.offsets[document]..self.offsets[document + 1]
    }

    /// The row `steps` further, or `None` past the end of the document.
    pub fn ahead(&self, row: usize, steps: usize) -> Option<usize> {
        let ahead = row + steps;
        (ahead < self.span(row).end).then_some(ahead)
    }
}

/// The masks of `mode` for `steps` steps. `known_top` tells for each row, and for the zero state
/// past the end in its last entry, whether the teacher's top token is in the draft vocabulary; it
/// is read in [`MaskMode::Specforge`] only.
pub fn row_masks(
    tokens: &BatchTokens,
    steps: usize,
    mode: MaskMode,
    known_top: &[bool],
) -> RowMasks {
    let documents = Documents::new(tokens);
    match mode {
        MaskMode::Chain => {
            let in_loss = chain_masks(tokens, &documents, steps);
            RowMasks { counted: in_loss.clone(), in_loss }
        }
        MaskMode::Specforge { zero_last_mask } => {
            let trained = |row: usize| {
                tokens.loss_mask()[row] && !(zero_last_mask && row + 1 == documents.span(row).end)
            };
            let counted = masks(&documents, steps, |row, step| {
                documents.ahead(row, step).is_some_and(trained)
            });
            let in_loss = masks(&documents, steps, |row, step| {
                // The row itself is inside whenever it counts; the state it is compared with may
                // be the zero state past the end.
                let state = documents.ahead(row, 1 + step).unwrap_or(documents.rows());
                counted[step][row] && known_top[state]
            });
            RowMasks { in_loss, counted }
        }
    }
}

fn masks(
    documents: &Documents<'_>,
    steps: usize,
    rule: impl Fn(usize, usize) -> bool,
) -> Vec<Vec<bool>> {
    let of_step = |step| (0..documents.rows()).map(|row| rule(row, step)).collect();
    (0..steps).map(of_step).collect()
}

/// A row counts at step `k` when at least `k + 2` trained tokens follow it without a gap.
fn chain_masks(tokens: &BatchTokens, documents: &Documents<'_>, steps: usize) -> Vec<Vec<bool>> {
    let mut run = vec![0; documents.rows()];
    for row in (0..documents.rows()).rev() {
        if let Some(next) = documents.ahead(row, 1)
            && tokens.loss_mask()[next]
        {
            run[row] = run[next] + 1;
        }
    }
    masks(documents, steps, |row, step| run[row] >= step + 2)
}

/// Rows to compute, each list ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPlan {
    /// Rows with step-0 keys and values.
    pub base: Vec<u32>,
    /// For each step the rows whose query, MLP and logits are computed.
    pub need: Vec<Vec<u32>>,
}

impl RowPlan {
    /// Every row at every step.
    pub fn dense(rows: usize, steps: usize) -> Self {
        let all: Vec<u32> = (0..rows as u32).collect();
        Self { need: vec![all.clone(); steps], base: all }
    }

    /// The rows the loss can see: at step `k` those trained at `k` or later, and for step-0 keys
    /// every row up to the last of these in its document.
    pub fn sparse(tokens: &BatchTokens, masks: &RowMasks) -> Self {
        let documents = Documents::new(tokens);
        let mut needed = vec![false; documents.rows()];
        let mut need = Vec::new();
        for in_loss in masks.in_loss.iter().rev() {
            needed.iter_mut().zip(in_loss).for_each(|(needed, &row)| *needed |= row);
            need.push(set_rows(&needed));
        }
        need.reverse();
        let mut base = needed;
        for row in (0..documents.rows()).rev() {
            if let Some(next) = documents.ahead(row, 1) {
                base[row] |= base[next];
            }
        }
        Self { base: set_rows(&base), need }
    }
}

fn set_rows(mask: &[bool]) -> Vec<u32> {
    (0..mask.len()).filter(|&row| mask[row]).map(|row| row as u32).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch() -> impl Strategy<Value = BatchTokens> {
        let document = proptest::collection::vec(prop::bool::weighted(0.7), 0..12);
        proptest::collection::vec(document, 1..5).prop_map(|documents| {
            let mut offsets = vec![0];
            for document in &documents {
                offsets.push(offsets[offsets.len() - 1] + document.len());
            }
            let mask: Vec<u8> = documents.concat().into_iter().map(u8::from).collect();
            BatchTokens::new(vec![0; mask.len()], &mask, offsets).unwrap()
        })
    }

    /// The definition word for word, document by document.
    fn slow_chain(tokens: &BatchTokens, step: usize) -> Vec<bool> {
        let mut rows = Vec::new();
        for span in tokens.doc_offsets().windows(2) {
            let mask = &tokens.loss_mask()[span[0]..span[1]];
            for row in 0..mask.len() {
                let inside = row + 2 + step < mask.len();
                rows.push(inside && mask[row + 1..=row + 2 + step].iter().all(|&set| set));
            }
        }
        rows
    }

    proptest! {
        #[test]
        fn chain_is_its_definition(tokens in batch(), steps in 1usize..6) {
            let masks = row_masks(&tokens, steps, MaskMode::Chain, &[]);
            for step in 0..steps {
                prop_assert_eq!(&masks.in_loss[step], &slow_chain(&tokens, step));
            }
            prop_assert_eq!(&masks.counted, &masks.in_loss);
        }

        #[test]
        fn sparse_rows_are_those_the_loss_can_see(
            tokens in batch(),
            known in proptest::collection::vec(any::<bool>(), 64),
            steps in 1usize..6,
            rule in 0usize..3,
        ) {
            let mode = [
                MaskMode::Chain,
                MaskMode::Specforge { zero_last_mask: true },
                MaskMode::Specforge { zero_last_mask: false },
            ][rule];
            let masks = row_masks(&tokens, steps, mode, &known[..tokens.rows() + 1]);
            let plan = RowPlan::sparse(&tokens, &masks);
            for step in 0..steps {
                let needed = |&row: &u32| masks.in_loss[step..].iter().any(|m| m[row as usize]);
                let expected: Vec<u32> = (0..tokens.rows() as u32).filter(needed).collect();
                prop_assert_eq!(&plan.need[step], &expected);
            }
            let documents = Documents::new(&tokens);
            let seen = |&row: &u32| {
                let document = row as usize..documents.span(row as usize).end;
                plan.need[0].iter().any(|&query| document.contains(&(query as usize)))
            };
            let expected: Vec<u32> = (0..tokens.rows() as u32).filter(seen).collect();
            prop_assert_eq!(plan.base, expected);
        }
    }

    #[test]
    fn specforge_reads_the_mask_at_the_row() {
        let tokens = BatchTokens::new(vec![0; 6], &[0, 1, 1, 1, 1, 1], vec![0, 4, 6]).unwrap();
        let known = [true, true, false, true, true, true, false];
        let rows = |zero_last_mask| {
            let mode = MaskMode::Specforge { zero_last_mask };
            row_masks(&tokens, 2, mode, &known)
        };
        let kept = rows(false);
        assert_eq!(kept.counted[0], [false, true, true, true, true, true]);
        assert_eq!(kept.counted[1], [true, true, true, false, true, false]);
        // Row 1 is compared with state 2, rows 3 and 5 with the zero state past the end.
        assert_eq!(kept.in_loss[0], [false, false, true, false, true, false]);
        let cleared = rows(true);
        assert_eq!(cleared.counted[0], [false, true, true, false, true, false]);
        assert_eq!(cleared.counted[1], [true, true, false, false, false, false]);
        assert_eq!(cleared.in_loss[1], [false, true, false, false, false, false]);
    }
}
