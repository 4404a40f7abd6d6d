//! What a training step asks of a device: floating-point operations of its products, one by one.
//! Knows shapes and rows, no tensors.

use crate::batch::BatchTokens;
use crate::draft::{AttentionConfig, DraftConfig};
use crate::masks::{Documents, RowPlan};
use crate::ops::Activations;
use crate::plan::{distinct, given_tokens};
use crate::shards::own_rows;

/// One product of the step, over all steps of the draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductCost {
    /// What it makes.
    pub name: &'static str,
    /// Multiplications and additions of the forward pass.
    pub forward: f64,
    /// Those of the backward pass.
    pub backward: f64,
}

/// Sizes that products have.
struct Sizes {
    /// Rows of first projections: those of queries, those of keys and values.
    first: [usize; 2],
    /// Entries of what further projections of latent attention have for each query and key row.
    second: [usize; 2],
    /// Columns of the attention's output.
    mixed: usize,
}

impl Sizes {
    fn of(config: &DraftConfig) -> Self {
        let heads = config.num_attention_heads;
        match config.attention {
            AttentionConfig::Gqa { num_key_value_heads, head_dim } => Self {
                first: [heads * head_dim, 2 * num_key_value_heads * head_dim],
                second: [0; 2],
                mixed: heads * head_dim,
            },
            AttentionConfig::Mla {
                q_lora_rank: q,
                kv_lora_rank: kv,
                qk_nope_head_dim: nope,
                qk_rope_head_dim: rope,
                v_head_dim: v,
            } => Self {
                first: [q, kv + rope],
                second: [heads * (nope + rope) * q, heads * (nope + v) * kv],
                mixed: heads * v,
            },
        }
    }
}

/// The products of a step on `rows` of a batch.
pub fn products(
    config: &DraftConfig,
    tokens: &BatchTokens,
    rows: &RowPlan,
    activations: Activations,
) -> Vec<ProductCost> {
    let width = config.hidden_size;
    let [key_tokens, query_tokens] = given_tokens(tokens, rows).map(|list| list.len());
    let queries: usize = rows.need.iter().map(Vec::len).sum();
    let keys = rows.base.len() + rows.need.iter().skip(1).map(Vec::len).sum::<usize>();
    let Sizes { first, second, mixed } = Sizes::of(config);
    // Rows times entries of the weight, and how many products as large the backward pass makes.
    let cost = |name, entries: usize, backward: f64| {
        let forward = 2.0 * entries as f64;
        ProductCost { name, forward, backward: forward * backward }
    };
    let fc = if config.fc_norm { 2.0 } else { 1.0 };
    let mlp = match activations {
        Activations::Keep => 2.0,
        Activations::Recompute => 2.0 + 2.0 / 3.0,
    };
    let inner = config.intermediate_size;
    let mut list = vec![
        cost("fc", rows.base.len() * config.num_aux * width * width, fc),
        cost("tokens' half", (query_tokens * first[0] + key_tokens * first[1]) * width, 2.0),
        cost("states' half", (queries * first[0] + keys * first[1]) * width, 2.0),
        cost("latent heads", queries * second[0] + keys * second[1], 2.0),
        cost("attention output", queries * mixed * width, 2.0),
        cost("mlp", queries * 3 * width * inner, mlp),
        cost("draft head", queries * config.draft_vocab_size * width, 2.0),
        cost("teacher", states(tokens, rows) * config.vocab_size * width, 0.0),
    ];
    list.retain(|product| product.forward > 0.0);
    list
}

/// Teacher states that rows are compared with.
fn states(tokens: &BatchTokens, rows: &RowPlan) -> usize {
    let documents = Documents::new(tokens);
    let of_step = |(step, need): (usize, &Vec<u32>)| {
        let slot = |&row: &u32| documents.ahead(row as usize, 1 + step).unwrap_or(documents.rows());
        need.iter().map(|row| slot(row) as u32).collect::<Vec<_>>()
    };
    distinct(rows.need.iter().enumerate().flat_map(of_step)).len()
}

/// What a run keeps of each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Bytes of a value that is computed with: 4 or 2.
    pub value_bytes: u64,
    /// Whether a moving average is kept too.
    pub average: bool,
    /// Processes that share the state of the optimizer.
    pub processes: usize,
    /// Parameter that is not trained and has no moments.
    pub frozen: Option<&'static str>,
}

/// Bytes on the device of one process that a run needs at its peak, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPlan {
    /// Parameters as computed with, their gradients, and of several processes room for what the
    /// others send of these.
    pub parameters: u64,
    /// f32 parameters and moments of the optimizer, and the average: of this process's rows.
    pub optimizer: u64,
    /// Embedding and head of the target.
    pub target: u64,
    /// What the forward pass leaves for the backward pass, with everything kept.
    pub activations: u64,
    /// How much of that [`Activations::Recompute`] saves.
    pub recomputed: u64,
    /// States of a batch, logits of blocks, gradients on their way.
    pub other: u64,
}

/// Bytes of the loss's buffers, as `ops::cuda::distill` makes them: f32 logits of teacher and
/// draft, and the rounded gradient of the latter, of 1024 rows at least.
fn loss_bytes(draft_vocab: usize) -> u64 {
    4 * (1 << 25) + 6 * (1024 * draft_vocab as u64).max(1 << 26)
}

impl MemoryPlan {
    /// For batches of up to `tokens` tokens, all of them trained, and `steps` steps.
    pub fn new(config: &DraftConfig, [tokens, steps]: [usize; 2], keeping: Keeping) -> Self {
        let size = keeping.value_bytes;
        let shapes = config.parameter_shapes();
        let values = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let parameters: u64 = shapes.iter().map(|(_, shape)| values(shape)).sum();
        let optimizer = shapes.iter().map(|(name, shape)| {
            let own = match own_rows(shape, keeping.processes) {
                Some(_) => values(shape) / keeping.processes as u64,
                None => values(shape),
            };
            // Two moments, f32 parameters beside rounded ones, an average.
            let moments = if keeping.frozen == Some(name.as_str()) { 0 } else { 2 };
            4 * own * (moments + u64::from(size < 4) + u64::from(keeping.average))
        });
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let Sizes { first, mixed, .. } = Sizes::of(config);
        let heads = match config.attention {
            AttentionConfig::Gqa { .. } => first[0] + first[1],
            // Queries and keys with their rotated parts, values, and what they were made of.
            AttentionConfig::Mla { qk_nope_head_dim, qk_rope_head_dim, .. } => {
                let query = config.num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim);
                2 * (first[0] + first[1]) + 2 * query + mixed
            }
        };
        // Hidden state and its norm, the MLP's input, and the gradient of the head's input.
        let row = 4 * width + heads + mixed + 2 * inner;
        let rows = (tokens * steps) as u64;
        let half = 2 * (first[0] + first[1]) + 2 * width;
        let batch = tokens * ((config.num_aux + 1) * width + half + 3 * inner + 4 * width);
        Self {
            parameters: (2 + u64::from(keeping.processes > 1)) * parameters * size,
            optimizer: optimizer.sum(),
            target: 2 * (config.vocab_size * width) as u64 * size,
            activations: rows * row as u64 * size,
            recomputed: rows * 2 * inner as u64 * size,
            other: batch as u64 * size + loss_bytes(config.draft_vocab_size),
        }
    }

    /// All of it.
    pub fn total(&self, activations: Activations) -> u64 {
        let saved = if activations == Activations::Keep { 0 } else { self.recomputed };
        self.parameters + self.optimizer + self.target + self.activations + self.other - saved
    }

    /// Keeps activations where nine tenths of `device` bytes are enough for that.
    pub fn choose(&self, device: u64) -> Activations {
        match self.total(Activations::Keep) <= device / 10 * 9 {
            true => Activations::Keep,
            false => Activations::Recompute,
        }
    }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(
            out,
            "{:.1} GB parameters and gradients, {:.1} optimizer, {:.1} target, {:.1} activations \
             ({:.1} of them can be made again), {:.1} other",
            gb(self.parameters),
            gb(self.optimizer),
            gb(self.target),
            gb(self.activations),
            gb(self.recomputed),
            gb(self.other),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::masks::{MaskMode, row_masks};

    fn config() -> DraftConfig {
        DraftConfig {
            hidden_size: 7168,
            intermediate_size: 18432,
            num_attention_heads: 64,
            attention: AttentionConfig::Gqa { num_key_value_heads: 64, head_dim: 128 },
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            yarn: None,
            vocab_size: 163_840,
            draft_vocab_size: 32_000,
            num_aux: 3,
            fc_norm: false,
            norm_output: false,
            norm_before_residual: false,
        }
    }

    /// Against sums made by hand for this size.
    #[test]
    fn products_of_a_large_draft() {
        let tokens = BatchTokens::new((0..4096).collect(), &[1; 4096], vec![0, 4096]).unwrap();
        let list = |rows: &RowPlan, activations| products(&config(), &tokens, rows, activations);
        let total = |list: &[ProductCost]| -> f64 {
            list.iter().map(|cost| cost.forward + cost.backward).sum::<f64>() / 1e12
        };
        let dense = list(&RowPlan::dense(4096, 7), Activations::Keep);
        // Rows: 7 * 4096; entries of weights: half of q, k and v, o, MLP, head.
        let weights = 7168.0 * (24576.0 + 8192.0 + 3.0 * 18432.0 + 32000.0);
        let by_hand = 7.0 * 4096.0 * weights * 6.0
            + 4096.0 * 7168.0 * (3.0 * 7168.0 * 4.0 + 24576.0 * 6.0)
            + 4096.0 * 7168.0 * 163_840.0 * 2.0;
        assert!((total(&dense) - by_hand / 1e12).abs() < 0.05, "{} {}", total(&dense), by_hand);
        let masks = row_masks(&tokens, 7, MaskMode::Chain, &[]);
        let sparse = RowPlan::sparse(&tokens, &masks);
        let kept = total(&list(&sparse, Activations::Keep));
        assert!(kept < total(&dense) && kept > 0.99 * total(&dense));
        let again = total(&list(&sparse, Activations::Recompute));
        let gate_and_up: usize = sparse.need.iter().map(Vec::len).sum();
        let extra = gate_and_up as f64 * 2.0 * 2.0 * 7168.0 * 18432.0 / 1e12;
        assert!((again - kept - extra).abs() < 1e-6 * kept);
    }

    #[test]
    fn activations_are_made_again_where_they_do_not_fit() {
        let keeping = Keeping { value_bytes: 2, average: false, processes: 1, frozen: None };
        let plan = MemoryPlan::new(&config(), [32_768, 7], keeping);
        let [kept, again] =
            [Activations::Keep, Activations::Recompute].map(|choice| plan.total(choice));
        assert_eq!(kept - again, plan.recomputed);
        let matrices = 7168 * (3 * 7168 + 3 * 2 * 8192 + 8192 + 3 * 18432 + 32_000);
        let parameters = matrices + 4 * 7168;
        // Gradients in bf16 too; f32 parameters and two moments.
        assert_eq!([plan.parameters, plan.optimizer], [2 * 2 * parameters, 12 * parameters]);
        // A frozen head keeps its f32 values and no moments.
        let frozen = Keeping { frozen: Some("lm_head.weight"), ..keeping };
        let moments = plan.optimizer - MemoryPlan::new(&config(), [32_768, 7], frozen).optimizer;
        assert_eq!(moments, 8 * 32_000 * 7168);
        assert_eq!(plan.choose(141_000_000_000), Activations::Keep, "{plan}");
        assert_eq!(plan.choose(80_000_000_000), Activations::Recompute, "{plan}");
    }

    #[test]
    fn processes_share_the_optimizers_state_where_rows_divide() {
        let plan = |processes, average| {
            let keeping = Keeping { value_bytes: 2, average, processes, frozen: None };
            MemoryPlan::new(&config(), [4096, 7], keeping)
        };
        let alone = plan(1, false);
        let eight = plan(8, false);
        // Every size of this draft is a multiple of eight; the rest is each process's own.
        let (optimizer, parameters) = (8 * eight.optimizer, eight.parameters / 3 * 2);
        assert_eq!(MemoryPlan { optimizer, parameters, ..eight }, alone);
        // Three do not divide the 7168 of the hidden size nor the 32,000 of the vocabulary.
        let shared = 7168 * 18432 * 2;
        assert_eq!(alone.optimizer - plan(3, false).optimizer, 12 * shared / 3 * 2);
        assert_eq!(plan(8, true).optimizer - eight.optimizer, eight.optimizer / 3);
    }
}
