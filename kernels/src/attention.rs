//! Causal attention over packed sequences in tiles, with a running softmax, so that no matrix of
//! scores is ever larger than one tile. Knows nothing of projections, positions or caches.

use rayon::prelude::*;

use crate::Threads;
use crate::activation::exp;
use crate::gemm::{GemmView, GemmViewMut, matmul};
use crate::simd::multiversion;

/// Query rows of a tile.
const TILE_ROWS: usize = 128;
/// Keys of a tile: with 128 rows of f32 scores that is 256 KiB, half of a second-level cache.
const TILE_KEYS: usize = 512;
const LANES: usize = 16;

/// Elements from one token, and from one head, to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strides {
    /// From a token to the next.
    pub token: usize,
    /// From a head to the next within a token.
    pub head: usize,
}

/// Sizes of the heads. Query head `h` reads key and value head `h * kv_heads / q_heads`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadShape {
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of a query and of a key.
    pub qk_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Factor on every score.
    pub scale: f32,
}

/// How the rows of a call belong together, and where their heads lie.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape<'a> {
    /// First query row of each sequence, and the total last: [sequences + 1].
    pub cu_seqlens: &'a [usize],
    /// Keys of each sequence that precede its queries ([sequences]); empty means none anywhere.
    /// Keys and values of a sequence lie together, the earlier ones first.
    pub cached: &'a [usize],
    /// Sizes of the heads.
    pub heads: HeadShape,
    /// Where queries lie.
    pub q: Strides,
    /// Where keys lie.
    pub k: Strides,
    /// Where values lie.
    pub v: Strides,
    /// Threads to use.
    pub threads: Threads,
}

impl<'a> AttentionShape<'a> {
    /// Whole sequences, with q [tokens, q_heads, qk_dim], k [tokens, kv_heads, qk_dim] and
    /// v [tokens, kv_heads, v_dim] without gaps.
    pub fn packed(cu_seqlens: &'a [usize], heads: HeadShape, threads: Threads) -> Self {
        let rows = |heads: usize, dim: usize| Strides { token: heads * dim, head: dim };
        Self {
            cu_seqlens,
            cached: &[],
            heads,
            q: rows(heads.q_heads, heads.qk_dim),
            k: rows(heads.kv_heads, heads.qk_dim),
            v: rows(heads.kv_heads, heads.v_dim),
            threads,
        }
    }

    /// Rows of queries, and of keys.
    fn tokens(&self) -> (usize, usize) {
        let queries = self.cu_seqlens.last().copied().unwrap_or(0);
        (queries, queries + self.cached.iter().sum::<usize>())
    }
}

/// `out = softmax(scale * q k^T + causal) v` for every sequence and head by itself; `out` is
/// [query tokens, q_heads, v_dim] without gaps. Every query sees the cached keys of its sequence
/// and the keys up to its own.
pub fn causal(out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], shape: AttentionShape<'_>) {
    let HeadShape { q_heads, kv_heads, qk_dim, v_dim, .. } = shape.heads;
    assert_shape(out.len(), [q.len(), k.len(), v.len()], &shape);
    let row = q_heads * v_dim;
    if row == 0 || out.is_empty() {
        return;
    }
    let (q_tokens, kv_tokens) = shape.tokens();
    // Heads far apart miss the cache in every tile, which costs more than one copy; but not where
    // a few queries read many keys once.
    if kv_heads > 1 && 2 * q_tokens >= kv_tokens {
        let (k, k_strides) = gather_heads(k, kv_tokens, [kv_heads, qk_dim], shape.k);
        let (v, v_strides) = gather_heads(v, kv_tokens, [kv_heads, v_dim], shape.v);
        attend(out, [q, &k, &v], &AttentionShape { k: k_strides, v: v_strides, ..shape });
    } else {
        attend(out, [q, k, v], &shape);
    }
}

/// Copies the rows of each head together: [heads, tokens, dim].
fn gather_heads(
    x: &[f32],
    tokens: usize,
    [heads, dim]: [usize; 2],
    strides: Strides,
) -> (Vec<f32>, Strides) {
    let mut gathered = Vec::with_capacity(tokens * heads * dim);
    for head in 0..heads {
        for token in 0..tokens {
            gathered.extend_from_slice(&x[token * strides.token + head * strides.head..][..dim]);
        }
    }
    (gathered, Strides { token: dim, head: tokens * dim })
}

fn attend(out: &mut [f32], [q, k, v]: [&[f32]; 3], shape: &AttentionShape<'_>) {
    let row = shape.heads.q_heads * shape.heads.v_dim;
    let mut work = Vec::new();
    let mut rest = out;
    for tile in tiles(shape) {
        let (tile_out, after) = rest.split_at_mut(tile.rows * row);
        rest = after;
        work.push((tile, tile_out));
    }
    let run = |(tile, out): (Tile, &mut [f32])| attend_tile(out, [q, k, v], shape, &tile);
    if shape.threads.0 > 1 {
        // The last tiles of a sequence see the most keys: started first, none straggles.
        work.into_par_iter().rev().with_max_len(1).for_each(run);
    } else {
        work.into_iter().for_each(run);
    }
}

fn assert_shape(out: usize, [q, k, v]: [usize; 3], shape: &AttentionShape<'_>) {
    let HeadShape { q_heads, kv_heads, qk_dim, v_dim, .. } = shape.heads;
    let AttentionShape { cu_seqlens, cached, .. } = *shape;
    assert!(cu_seqlens.first() == Some(&0), "attention: cu_seqlens does not start at 0");
    assert!(cu_seqlens.is_sorted(), "attention: cu_seqlens goes back");
    assert!(
        cached.is_empty() || cached.len() + 1 == cu_seqlens.len(),
        "attention: cached is not one number a sequence"
    );
    assert!(
        kv_heads > 0 && q_heads.is_multiple_of(kv_heads),
        "attention: {q_heads} query heads over {kv_heads} key heads"
    );
    let (q_tokens, kv_tokens) = shape.tokens();
    assert_eq!(out, q_tokens * q_heads * v_dim, "attention: length of out");
    let needed = |tokens: usize, heads: usize, dim: usize, strides: Strides| match tokens {
        0 => 0,
        tokens => (tokens - 1) * strides.token + (heads - 1) * strides.head + dim,
    };
    if q_heads > 0 {
        assert!(q >= needed(q_tokens, q_heads, qk_dim, shape.q), "attention: q is too short");
    }
    assert!(k >= needed(kv_tokens, kv_heads, qk_dim, shape.k), "attention: k is too short");
    assert!(v >= needed(kv_tokens, kv_heads, v_dim, shape.v), "attention: v is too short");
}

/// Neighbouring queries of one sequence.
struct Tile {
    /// First query row in the packed queries.
    first_row: usize,
    rows: usize,
    /// First key of the sequence in the packed keys.
    first_key: usize,
    /// Keys that the first query of the tile sees; each further query sees one more.
    visible: usize,
}

fn tiles(shape: &AttentionShape<'_>) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first_key = 0;
    for (sequence, ends) in shape.cu_seqlens.windows(2).enumerate() {
        let cached = shape.cached.get(sequence).copied().unwrap_or(0);
        for first_row in (ends[0]..ends[1]).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(ends[1] - first_row);
            let visible = cached + first_row - ends[0] + 1;
            tiles.push(Tile { first_row, rows, first_key, visible });
        }
        first_key += cached + ends[1] - ends[0];
    }
    tiles
}

/// Running softmax of the rows of a tile for one head.
struct Running {
    scores: Vec<f32>,
    values: Vec<f32>,
    max: [f32; TILE_ROWS],
    sum: [f32; TILE_ROWS],
}

fn attend_tile(out: &mut [f32], [q, k, v]: [&[f32]; 3], shape: &AttentionShape<'_>, tile: &Tile) {
    let HeadShape { q_heads, kv_heads, qk_dim, v_dim, scale } = shape.heads;
    let keys = tile.visible + tile.rows - 1;
    let mut running = Running {
        scores: vec![0.0; tile.rows * TILE_KEYS.min(keys)],
        values: vec![0.0; tile.rows * v_dim],
        max: [f32::NEG_INFINITY; TILE_ROWS],
        sum: [0.0; TILE_ROWS],
    };
    for head in 0..q_heads {
        let kv_head = head * kv_heads / q_heads;
        let queries = &q[tile.first_row * shape.q.token + head * shape.q.head..];
        let queries = GemmView::new(queries, [tile.rows, qk_dim], shape.q.token);
        running.restart();
        for first in (0..keys).step_by(TILE_KEYS) {
            let width = TILE_KEYS.min(keys - first);
            let key = tile.first_key + first;
            let keys = &k[key * shape.k.token + kv_head * shape.k.head..];
            let keys = GemmView::new(keys, [width, qk_dim], shape.k.token);
            let values = &v[key * shape.v.token + kv_head * shape.v.head..];
            let values = GemmView::new(values, [width, v_dim], shape.v.token);
            let scores = &mut running.scores[..tile.rows * width];
            let scores = GemmViewMut::new(scores, [tile.rows, width], width);
            matmul(scores, queries, keys.transposed(), false, Threads::ONE);
            running.soften(Block { first, width, visible: tile.visible, scale }, v_dim);
            let probabilities = &running.scores[..tile.rows * width];
            let probabilities = GemmView::new(probabilities, [tile.rows, width], width);
            let sums = GemmViewMut::new(&mut running.values, [tile.rows, v_dim], v_dim);
            matmul(sums, probabilities, values, true, Threads::ONE);
        }
        for (row, values) in running.values.chunks_exact(v_dim).enumerate() {
            let out = &mut out[(row * q_heads + head) * v_dim..][..v_dim];
            let factor = 1.0 / running.sum[row];
            for (out, value) in out.iter_mut().zip(values) {
                *out = value * factor;
            }
        }
    }
}

/// A block of keys as the rows of a tile see it.
#[derive(Clone, Copy)]
struct Block {
    /// First key, counted from the start of the sequence.
    first: usize,
    width: usize,
    /// Keys of the sequence that the first row sees; each further row sees one more.
    visible: usize,
    scale: f32,
}

impl Running {
    fn restart(&mut self) {
        self.values.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    /// Turns the scores of a block into unnormalised probabilities, and rescales what was summed
    /// before to the new maximum.
    fn soften(&mut self, block: Block, v_dim: usize) {
        let rows = self.scores.chunks_exact_mut(block.width);
        let values = self.values.chunks_exact_mut(v_dim);
        let state = self.max.iter_mut().zip(&mut self.sum);
        for (row, ((scores, values), (max, sum))) in rows.zip(values).zip(state).enumerate() {
            let seen = (block.visible + row).saturating_sub(block.first).min(block.width);
            let (seen, hidden) = scores.split_at_mut(seen);
            hidden.fill(0.0);
            soften_row(seen, values, (max, sum), block.scale);
        }
    }
}

multiversion! {
    fn soften_row(
        scores: &mut [f32],
        values: &mut [f32],
        state: (&mut f32, &mut f32),
        scale: f32
    ) = soften_row_body
}

#[inline(always)]
fn soften_row_body<const FUSED: bool>(
    scores: &mut [f32],
    values: &mut [f32],
    (max, sum): (&mut f32, &mut f32),
    scale: f32,
) {
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    let mut highest = [*max; LANES];
    for chunk in chunks.iter_mut() {
        for lane in 0..LANES {
            chunk[lane] *= scale;
            highest[lane] = if chunk[lane] > highest[lane] { chunk[lane] } else { highest[lane] };
        }
    }
    let mut new_max = *max;
    for score in rest.iter_mut() {
        *score *= scale;
        new_max = new_max.max(*score);
    }
    for lane in highest {
        new_max = new_max.max(lane);
    }
    let mut sums = [0.0f32; LANES];
    for chunk in chunks.iter_mut() {
        for lane in 0..LANES {
            chunk[lane] = exp::<FUSED>(chunk[lane] - new_max);
            sums[lane] += chunk[lane];
        }
    }
    let mut block_sum = 0.0;
    for score in rest.iter_mut() {
        *score = exp::<FUSED>(*score - new_max);
        block_sum += *score;
    }
    for lane in sums {
        block_sum += lane;
    }
    // A row that sees nothing of this block keeps its maximum, and the correction is 1.
    if new_max > *max {
        let correction = exp::<FUSED>(*max - new_max);
        *sum *= correction;
        for value in values {
            *value *= correction;
        }
        *max = new_max;
    }
    *sum += block_sum;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 40) as f32) / (1u32 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// One query and head at a time over all its keys, in f64.
    fn causal_slow(q: &[f32], k: &[f32], v: &[f32], shape: &AttentionShape<'_>) -> Vec<f64> {
        let HeadShape { q_heads, kv_heads, qk_dim, v_dim, scale } = shape.heads;
        let mut out = Vec::new();
        let mut first_key = 0;
        for (s, ends) in shape.cu_seqlens.windows(2).enumerate() {
            let cached = shape.cached.get(s).copied().unwrap_or(0);
            for token in ends[0]..ends[1] {
                let keys = first_key..first_key + cached + token - ends[0] + 1;
                for head in 0..q_heads {
                    let of = head / (q_heads / kv_heads);
                    let q = &q[token * shape.q.token + head * shape.q.head..];
                    let score = |key: usize| {
                        let k = &k[key * shape.k.token + of * shape.k.head..][..qk_dim];
                        let dot: f64 =
                            k.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
                        dot * f64::from(scale)
                    };
                    let max = keys.clone().map(score).fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> =
                        keys.clone().map(|key| (score(key) - max).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    out.extend((0..v_dim).map(|d| {
                        let value =
                            |key: usize| f64::from(v[key * shape.v.token + of * shape.v.head + d]);
                        keys.clone().zip(&weights).map(|(key, w)| w / sum * value(key)).sum::<f64>()
                    }));
                }
            }
            first_key += cached + ends[1] - ends[0];
        }
        out
    }

    fn check(lengths: &[(usize, usize)], heads: HeadShape, gap: usize) {
        let mut cu_seqlens = vec![0];
        for (_, queries) in lengths {
            cu_seqlens.push(cu_seqlens.last().unwrap() + queries);
        }
        let cached: Vec<usize> = lengths.iter().map(|l| l.0).collect();
        let q_tokens = *cu_seqlens.last().unwrap();
        let kv_tokens = q_tokens + cached.iter().sum::<usize>();
        let strides = |heads: usize, dim: usize| Strides {
            token: heads * (dim + gap) + gap,
            head: dim + gap,
        };
        let shape = AttentionShape {
            cached: &cached,
            q: strides(heads.q_heads, heads.qk_dim),
            k: strides(heads.kv_heads, heads.qk_dim),
            v: strides(heads.kv_heads, heads.v_dim),
            ..AttentionShape::packed(&cu_seqlens, heads, Threads::ONE)
        };
        let q = numbers(q_tokens * shape.q.token, 1);
        let k = numbers(kv_tokens * shape.k.token, 2);
        let v = numbers(kv_tokens * shape.v.token, 3);
        let mut out = vec![f32::NAN; q_tokens * heads.q_heads * heads.v_dim];
        causal(&mut out, &q, &k, &v, shape);
        for (got, want) in out.iter().zip(causal_slow(&q, &k, &v, &shape)) {
            assert!((f64::from(*got) - want).abs() < 4e-6, "{got} is not {want}");
        }
        let mut threaded = vec![0.0; out.len()];
        causal(&mut threaded, &q, &k, &v, AttentionShape { threads: Threads(2), ..shape });
        assert!(threaded == out, "threads changed the result");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn matches_one_query_at_a_time(
            lengths in prop::collection::vec((0usize..40, 0usize..100), 0..4),
            (kv_heads, group) in (1usize..4, 1usize..4),
            (qk_dim, v_dim) in (1usize..40, 1usize..30),
            scale in 0.05f32..1.5,
            gap in 0usize..6,
        ) {
            let q_heads = kv_heads * group;
            check(&lengths, HeadShape { q_heads, kv_heads, qk_dim, v_dim, scale }, gap);
        }
    }

    /// Several tiles of keys and of queries, and the decoding of single tokens.
    #[test]
    fn long_sequences_cross_tiles() {
        let heads = HeadShape { q_heads: 2, kv_heads: 1, qk_dim: 24, v_dim: 16, scale: 0.6 };
        check(&[(0, 700), (513, 1), (255, 3), (0, 64), (1, 257)], heads, 0);
    }

    /// Large scores would overflow without the running maximum.
    #[test]
    fn large_scores_do_not_overflow() {
        let heads = HeadShape { q_heads: 1, kv_heads: 1, qk_dim: 1, v_dim: 1, scale: 1.0 };
        let shape = AttentionShape::packed(&[0, 3], heads, Threads::ONE);
        let mut out = [0.0; 3];
        causal(&mut out, &[1.0; 3], &[-500.0, 500.0, 490.0], &[1.0, 2.0, 3.0], shape);
        assert_eq!(out[..2], [1.0, 2.0]);
        assert!((out[2] - 2.0000454).abs() < 1e-6);
    }

    #[test]
    fn a_nan_reaches_the_result() {
        let heads = HeadShape { q_heads: 1, kv_heads: 1, qk_dim: 1, v_dim: 1, scale: 1.0 };
        let shape = AttentionShape::packed(&[0, 2], heads, Threads::ONE);
        let mut out = [0.0; 2];
        causal(&mut out, &[1.0; 2], &[1.0, f32::NAN], &[1.0; 2], shape);
        assert!(out[0] == 1.0 && out[1].is_nan());
    }
}
