//! The draft as a server runs it: one layer with a key/value cache, drafting a chain of tokens and
//! taking back what the target refuses. Knows no target engine and no token texts.

use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor, TensorData};

use crate::draft::{DraftVocabulary, Eagle3Draft};
use crate::ops::{Activations, AttentionPlan, DraftOps, RotaryTable, RowIndex, Segment};
use crate::plan::StepPlan;
use crate::unroll::{KeyPlace, StepKeys, rotary_table};

/// A draft, the embeddings it reads and its cache. Row `i` of the cache joins the target's states
/// of token `i` with the embedding of token `i + 1`; rows that stay come from true target states.
pub struct DraftDecoder<B: Backend> {
    draft: Eagle3Draft<B>,
    embed_tokens: Tensor<B, 2>,
    vocabulary: DraftVocabulary,
    table: RotaryTable<B>,
    positions: usize,
    cache: Option<StepKeys<B>>,
    rows: usize,
    /// Hidden state that the next drafted token starts from, `[1, H]`, and its logits.
    last: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
}

/// Target states and token ids of rows to add to the cache.
#[derive(Clone, Copy, Debug)]
pub struct NewRows<'a> {
    /// Aux states side by side, row-major `[rows, aux * H]`.
    pub aux: &'a [f32],
    /// For each row the token after it, `[rows]`.
    pub next_tokens: &'a [u32],
}

impl<B: DraftOps> DraftDecoder<B> {
    /// An empty cache. `embed_tokens [V, H]` are the target's; `max_positions` bounds prompt and
    /// answer together.
    pub fn new(
        draft: Eagle3Draft<B>,
        embed_tokens: Tensor<B, 2>,
        vocabulary: DraftVocabulary,
        max_positions: usize,
    ) -> Self {
        let table = rotary_table(draft.config(), max_positions, &draft.device());
        Self {
            draft,
            embed_tokens,
            vocabulary,
            table,
            positions: max_positions,
            cache: None,
            rows: 0,
            last: None,
        }
    }

    /// Rows in the cache.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Positions it has room for.
    pub fn max_positions(&self) -> usize {
        self.positions
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.cache, self.rows, self.last) = (None, 0, None);
    }

    /// Adds rows behind those in the cache. The next chain starts from the last of them.
    pub fn extend(&mut self, new: NewRows<'_>) {
        self.add(new, false);
    }

    /// [`Self::extend`] that also returns the draft logits of every new row, row-major
    /// `[rows, draft vocabulary]`.
    pub fn extend_with_logits(&mut self, new: NewRows<'_>) -> Vec<f32> {
        self.add(new, true).map_or(Vec::new(), |logits| logits.to_data().iter::<f32>().collect())
    }

    fn add(&mut self, new: NewRows<'_>, all: bool) -> Option<Tensor<B, 2>> {
        let count = new.next_tokens.len();
        if count == 0 {
            return None;
        }
        let device = self.draft.device();
        let aux = TensorData::new(new.aux.to_vec(), [count, new.aux.len() / count]);
        let hidden = self.draft.fuse(Tensor::from_data(aux, &device));
        let first = if all { 0 } else { count - 1 };
        let plan = self.plan(StepRows {
            positions: (self.rows..self.rows + count).collect(),
            first_query: first,
            keys: self.rows + count,
            visible: (self.rows + first + 1..=self.rows + count).collect(),
            own: 0,
        });
        let mut cache = self.cache.take().unwrap_or_else(StepKeys::new);
        let made = (&mut cache, KeyPlace::BehindFirst);
        let z = self.layer(new.next_tokens, hidden, &plan, made);
        self.cache = Some(cache);
        self.rows += count;
        let (hidden, logits) = self.output(z);
        let last = count - 1 - first;
        self.last = Some((hidden.narrow(0, last, 1), logits.clone().narrow(0, last, 1)));
        Some(logits)
    }

    /// Drafts `count` tokens greedily, as target ids, each from the one before. The cache stays as
    /// it is. Empty before the first row.
    pub fn draft(&self, count: usize) -> Vec<u32> {
        let chain = self.chain(count, |_, logits| self.top(logits));
        chain.into_iter().map(|(token, _)| token).collect()
    }

    /// Draft logits of a chain that is fed `tokens` in place of its own, of the steps that read
    /// them, row-major `[tokens, draft vocabulary]`. Empty before the first row.
    pub fn logits_behind(&self, tokens: &[u32]) -> Vec<f32> {
        let given = |step: usize, _| tokens.get(step).copied().unwrap_or_default();
        let chain = self.chain(tokens.len() + 1, given);
        let logits = chain.into_iter().skip(1).map(|(_, logits)| logits.to_data());
        logits.flat_map(|data| data.iter::<f32>().collect::<Vec<_>>()).collect()
    }

    /// Tokens as `choose` takes them for each step, and the logits `[1, draft vocabulary]` each was
    /// chosen from.
    fn chain(
        &self,
        count: usize,
        choose: impl Fn(usize, Tensor<B, 2>) -> u32,
    ) -> Vec<(u32, Tensor<B, 2>)> {
        let (Some((hidden, logits)), Some(cache)) = (&self.last, &self.cache) else {
            return Vec::new();
        };
        let (mut hidden, mut logits) = (hidden.clone(), logits.clone());
        let mut made = StepKeys { keys: cache.keys.clone(), values: cache.values.clone() };
        let mut chain = Vec::with_capacity(count);
        for step in 1..=count {
            let token = choose(step - 1, logits.clone());
            chain.push((token, logits.clone()));
            if step == count {
                break;
            }
            let plan = self.plan(StepRows {
                positions: vec![self.rows + step - 1],
                first_query: 0,
                keys: self.rows,
                visible: vec![self.rows],
                own: step,
            });
            let place = (&mut made, KeyPlace::NewStep);
            let z = self.layer(&[token], hidden, &plan, place);
            (hidden, logits) = self.output(z);
        }
        chain
    }

    /// The decoder layer on rows that join `tokens` with `hidden [rows, H]`.
    fn layer(
        &self,
        tokens: &[u32],
        hidden: Tensor<B, 2>,
        plan: &StepPlan<B>,
        made: (&mut StepKeys<B>, KeyPlace),
    ) -> Tensor<B, 2> {
        let fed = RowIndex::new(tokens.to_vec(), &self.draft.device());
        let embeds = B::gather_rows(self.embed_tokens.clone(), &fed);
        let half = self.draft.token_half(embeds, plan.queries.as_ref());
        let y = self.draft.attention_step((&half, hidden), plan, &self.table, made);
        self.draft.mlp_step(y, Activations::Keep)
    }

    /// Hidden state fed to the next step, and logits, of the layer's output.
    fn output(&self, z: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let config = self.draft.config();
        let normed = B::rms_norm(z.clone(), self.draft.norm.clone(), config.rms_norm_eps);
        let logits = B::project(normed.clone(), self.draft.lm_head.clone());
        (if config.norm_output { normed } else { z }, logits)
    }

    fn top(&self, logits: Tensor<B, 2>) -> u32 {
        let draft_id: i64 = logits.argmax(1).into_scalar().elem();
        // The head has one row for each entry of the vocabulary.
        self.vocabulary.draft_to_target().get(draft_id as usize).copied().unwrap_or(0)
    }

    fn plan(&self, rows: StepRows) -> StepPlan<B> {
        let device = self.draft.device();
        let index = |rows: Vec<usize>| {
            RowIndex::<B>::new(rows.into_iter().map(|row| row as u32).collect(), &device)
        };
        let count = rows.positions.len();
        let queries = count - rows.first_query;
        let query_positions = rows.positions.iter().skip(rows.first_query).copied().collect();
        StepPlan {
            from_previous: None,
            key_tokens: index((0..count).collect()),
            query_tokens: index((0..queries).collect()),
            key_positions: index(rows.positions),
            queries: (queries < count).then(|| index((rows.first_query..count).collect())),
            query_positions: index(query_positions),
            attention: AttentionPlan {
                segments: vec![Segment { queries: 0..queries, keys: 0..rows.keys }],
                visible: index(rows.visible),
                own: (0..rows.own).map(|_| index(vec![0])).collect(),
                scale: self.draft.config().attention_scale(),
            },
        }
    }
}

/// Rows of one step of decoding.
struct StepRows {
    /// Position of each row.
    positions: Vec<usize>,
    /// Rows before this one add keys only.
    first_query: usize,
    /// Cached rows, including those being added.
    keys: usize,
    /// How many of them each query row sees.
    visible: Vec<usize>,
    /// Steps of its own that the (single) row sees.
    own: usize,
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::batch::{BatchTokens, FrozenTarget, TargetWeights, TrainBatch};
    use crate::draft::{AttentionConfig, DraftConfig, Yarn};
    use crate::ttt::{TttOptions, ttt_step};

    const H: usize = 8;
    const V: usize = 20;

    fn config(attention: AttentionConfig, flags: bool) -> DraftConfig {
        DraftConfig {
            hidden_size: H,
            intermediate_size: 12,
            num_attention_heads: 2,
            attention,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            yarn: Some(Yarn {
                factor: 4.0,
                original_max_position_embeddings: 16,
                beta_fast: 32.0,
                beta_slow: 1.0,
                mscale: 1.0,
                mscale_all_dim: 1.0,
            }),
            vocab_size: V,
            draft_vocab_size: 14,
            num_aux: 3,
            fc_norm: flags,
            norm_output: flags,
            norm_before_residual: flags,
        }
    }

    fn numbers(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|at| ((at as f32 + seed) * 12.9898).sin() * 1.7).collect()
    }

    fn matrix(rows: usize, width: usize, seed: f32) -> Tensor<Flex, 2> {
        let data = TensorData::new(numbers(rows * width, seed), [rows, width]);
        Tensor::from_data(data, &Default::default())
    }

    /// A chain drafted with the cache, against the unrolled forward of training over a text that
    /// continues with the drafted tokens.
    fn agrees_with_training(config: DraftConfig) {
        let draft = Eagle3Draft::<Flex>::init(config, 3, &Default::default()).unwrap();
        // Wider than the fresh weights, so that attention and the chain matter.
        let draft = draft.map(|_, param| match param {
            crate::draft::Param::Matrix(t) => crate::draft::Param::Matrix(t * 20.0),
            vector => vector,
        });
        let targets: Vec<u32> = (0..14).map(|id| id + id / 3).collect();
        let vocabulary = DraftVocabulary::from_targets(targets, V).unwrap();
        let (prompt, steps) = (9, 4);
        let aux = numbers(prompt * 3 * H, 0.5);
        let mut text: Vec<u32> = (0..=prompt as u32).map(|at| at * 7 % V as u32).collect();
        let embed = matrix(V, H, 2.5);

        let mut decoder = DraftDecoder::new(draft.clone(), embed.clone(), vocabulary.clone(), 32);
        // In two parts, as after an accepted chain.
        let (first, second) = aux.split_at(5 * 3 * H);
        decoder.extend(NewRows { aux: first, next_tokens: &text[1..6] });
        decoder.extend(NewRows { aux: second, next_tokens: &text[6..=prompt] });
        let chain = decoder.chain(steps, |_, logits| decoder.top(logits));
        text.extend(chain.iter().map(|(token, _)| token));

        let rows = text.len();
        let mut padded = aux.clone();
        padded.resize(rows * 3 * H, 0.0);
        let padded = Tensor::from_data(TensorData::new(padded, [rows, 3 * H]), &Default::default());
        let tokens = BatchTokens::new(text.clone(), &vec![1; rows], vec![0, rows]).unwrap();
        let batch = TrainBatch::new(tokens, padded, matrix(rows, H, 4.0)).unwrap();
        let weights = TargetWeights {
            embed_tokens: embed,
            norm: Tensor::ones([H], &Default::default()),
            norm_eps: 1e-5,
            lm_head: matrix(V, H, 6.0),
        };
        let frozen = FrozenTarget::new(weights, vocabulary).unwrap();
        let options = TttOptions { steps, row_sparse: false, trace: true, ..TttOptions::default() };
        let trace = ttt_step(&draft, &frozen, &batch, &options).unwrap().trace.unwrap();
        for (step, (token, logits)) in chain.iter().enumerate() {
            let normed = trace.normed[step].clone().narrow(0, prompt - 1, 1);
            let dense = Flex::project(normed, draft.lm_head.clone());
            let (a, b) = (logits.to_data(), dense.to_data());
            let largest = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| (a - b).abs());
            let largest = largest.fold(0.0, f32::max);
            assert!(largest < 2e-4, "step {step}, token {token}: {largest}");
        }
    }

    #[test]
    fn a_chain_equals_the_unrolled_forward_llama() {
        let gqa = AttentionConfig::Gqa { num_key_value_heads: 1, head_dim: 6 };
        agrees_with_training(config(gqa, false));
        agrees_with_training(config(gqa, true));
    }

    #[test]
    fn a_chain_equals_the_unrolled_forward_mla() {
        let mla = AttentionConfig::Mla {
            q_lora_rank: 7,
            kv_lora_rank: 5,
            qk_nope_head_dim: 4,
            qk_rope_head_dim: 2,
            v_head_dim: 3,
        };
        agrees_with_training(config(mla, false));
        agrees_with_training(config(mla, true));
    }

    #[test]
    fn drafting_leaves_the_cache_as_it_was() {
        let gqa = AttentionConfig::Gqa { num_key_value_heads: 2, head_dim: 4 };
        let draft = Eagle3Draft::<Flex>::init(config(gqa, false), 1, &Default::default()).unwrap();
        let vocabulary = DraftVocabulary::first(14, V);
        let mut decoder = DraftDecoder::new(draft, matrix(V, H, 1.0), vocabulary, 16);
        assert_eq!(decoder.draft(3), Vec::<u32>::new());
        decoder.extend(NewRows { aux: &numbers(2 * 3 * H, 0.0), next_tokens: &[4, 9] });
        let chain = decoder.draft(5);
        assert_eq!(decoder.draft(2), chain[..2]);
        assert_eq!((decoder.draft(5), decoder.rows()), (chain, 2));
    }
}
