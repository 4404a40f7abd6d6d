//! Acceptance counted as speculative decoding counts it, on recorded text that the target wrote
//! greedily: a target that decodes greedily would accept exactly these chains. Knows no engine.

use std::ops::Range;

use burn::tensor::{Int, Tensor};

use super::{EvaluateError, EvaluationPlan, check_device};
use crate::batch::{BatchTokens, FrozenTarget};
use crate::collate::{collate_plain, plan};
use crate::dataset::{DatasetError, ManifestDataset};
use crate::draft::Eagle3Draft;
use crate::live::LiveCounts;
use crate::masks::{MaskMode, RowPlan, row_masks};
use crate::ops::{Activations, DraftOps};
use crate::plan::{plan_batch, positions};

/// What decoding the recorded answers would count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChainCounts {
    /// For each length of chain.
    pub by_length: Vec<LiveCounts>,
    /// Tokens of the answers.
    pub answer_tokens: u64,
    /// Of these, the target's top token at their place: all, where it wrote them greedily.
    pub greedy_tokens: u64,
}

impl ChainCounts {
    /// Share of the answers' tokens that are the target's top token; 1 without answers.
    pub fn greedy_share(&self) -> f64 {
        match self.answer_tokens {
            0 => 1.0,
            all => self.greedy_tokens as f64 / all as f64,
        }
    }
}

/// Rounds that decoding the recorded answers would take, for each number of drafted tokens in
/// `lengths`. The first token of an answer comes from the prompt's forward; from then on a round
/// drafts as many tokens as the length and the answer's end allow, keeps those that are the text's,
/// and adds the text's next one. `what.options.steps` is not read: the longest length is unrolled.
/// Answers without a round are an error.
pub fn chain_acceptance<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    (dataset, lengths): (&ManifestDataset, &[usize]),
    what: &EvaluationPlan<'_>,
) -> Result<ChainCounts, EvaluateError> {
    let device = draft.device();
    let depth = lengths.iter().copied().max().unwrap_or(0);
    let sizes: Vec<usize> = what.indices.iter().map(|&at| dataset.samples()[at].tokens).collect();
    let reader = dataset.reader();
    let by_length = vec![LiveCounts::default(); lengths.len()];
    let mut counts = ChainCounts { by_length, ..ChainCounts::default() };
    for batch in plan(what.indices, &sizes, what.max_tokens) {
        let documents: Vec<_> =
            batch.iter().map(|&at| reader.read(at)).collect::<Result<_, _>>()?;
        let batch = collate_plain(&documents)
            .and_then(|host| host.to_device::<B>(&device, draft.dtype()))
            .map_err(DatasetError::from)?;
        let tokens = batch.tokens();
        let masks = row_masks(tokens, depth, MaskMode::Chain, &[]);
        let rows = RowPlan::sparse(tokens, &masks);
        let right = right_tokens(draft, frozen, &batch.aux, (tokens, &rows));
        let top =
            B::teacher_top(batch.last_hidden.clone(), &frozen.head, what.options.teacher_rows);
        check_device::<B>(&device)?;
        for answer in answers(tokens) {
            for (counts, &length) in counts.by_length.iter_mut().zip(lengths) {
                decode(&answer, length, &right, counts);
            }
            let text = tokens.input_ids().iter().take(answer.end).skip(answer.start);
            let greedy = top.iter().skip(answer.start - 1).zip(text).filter(|(a, b)| a == b);
            counts.greedy_tokens += greedy.count() as u64;
            counts.answer_tokens += answer.len() as u64;
        }
    }
    match counts.by_length.iter().any(|counts| counts.rounds > 0) {
        true => Ok(counts),
        false => Err(EvaluateError::NoRows { samples: what.indices.len() }),
    }
}

/// For each step and row whether the drafted token is the text's; false where nothing is drafted.
fn right_tokens<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    aux: &Tensor<B, 2>,
    (tokens, rows): (&BatchTokens, &RowPlan),
) -> Vec<Vec<bool>> {
    let mut right = vec![vec![false; tokens.rows()]; rows.need.len()];
    if rows.need.first().is_none_or(Vec::is_empty) {
        return right;
    }
    let config = draft.config();
    let table = frozen.rotary.table(config, positions(tokens, rows), &draft.device());
    let plan = plan_batch(tokens, rows, config.attention_scale(), table);
    let passed = draft.unroll(&frozen.embed_tokens, aux, &plan, Activations::Keep);
    let targets = frozen.vocabulary().draft_to_target();
    for (step, (need, normed)) in rows.need.iter().zip(passed.normed).enumerate() {
        let top: Tensor<B, 2, Int> = B::project(normed, draft.lm_head.clone()).argmax(1);
        for (&row, id) in need.iter().zip(top.into_data().iter::<i64>()) {
            // A needed row has the predicted token in its document.
            let text = tokens.input_ids().get(row as usize + 2 + step);
            right[step][row as usize] = targets.get(id as usize) == text;
        }
    }
    right
}

/// Runs of trained tokens behind at least one other token of their document.
fn answers(tokens: &BatchTokens) -> Vec<Range<usize>> {
    let mask = tokens.loss_mask();
    let mut answers = Vec::new();
    for span in tokens.doc_offsets().windows(2) {
        let mut at = span[0] + 1;
        while at < span[1] {
            let end = (at..span[1]).find(|&row| !mask[row]).unwrap_or(span[1]);
            if end > at {
                answers.push(at..end);
            }
            at = end + 1;
        }
    }
    answers
}

fn decode(answer: &Range<usize>, length: usize, right: &[Vec<bool>], counts: &mut LiveCounts) {
    // The last token that is known: at first the one that the prompt's forward gave.
    let mut known = answer.start;
    while known + 1 < answer.end {
        let left = answer.end - known - 1;
        let drafted = length.min(left);
        let accepted = right[..drafted].iter().take_while(|step| step[known - 1]).count();
        let added = (accepted + 1).min(left);
        counts.round(drafted, accepted, added);
        known += added;
    }
}
