//! Byte-level pair merging by rank: the lowest-ranked adjacent pair first, leftmost among equals.
//! Knows nothing of text, patterns or special tokens.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Ranks of a byte-level vocabulary; a token's id is its rank.
#[derive(Clone, Debug)]
pub(super) struct Bpe {
    ranks: HashMap<Vec<u8>, u32>,
    tokens: Vec<Vec<u8>>,
}

impl Bpe {
    /// Takes the tokens in order of rank. `None` when a token is twice there, or one of the 256
    /// bytes is missing, which would leave some text without ids.
    pub(super) fn new(tokens: Vec<Vec<u8>>) -> Option<Self> {
        let mut ranks = HashMap::with_capacity(tokens.len());
        for (rank, token) in tokens.iter().enumerate() {
            if ranks.insert(token.clone(), u32::try_from(rank).ok()?).is_some() {
                return None;
            }
        }
        let complete = (0..=u8::MAX).all(|byte| ranks.contains_key([byte].as_slice()));
        complete.then_some(Self { ranks, tokens })
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The bytes of a token.
    pub(super) fn token(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(usize::try_from(id).ok()?).map(Vec::as_slice)
    }

    /// Calls `emit(id, start, end)` for the tokens of one piece, in order.
    pub(super) fn encode(&self, piece: &[u8], mut emit: impl FnMut(u32, usize, usize)) {
        if piece.is_empty() {
            return;
        }
        if let Some(&id) = self.ranks.get(piece) {
            return emit(id, 0, piece.len());
        }
        let end = self.merge(piece);
        let mut start = 0;
        while let Some(&stop) = end.get(start).filter(|&&stop| stop > start) {
            let id = piece.get(start..stop).and_then(|bytes| self.ranks.get(bytes));
            // Every single byte is a token and merges only make tokens, so `id` is there.
            if let Some(&id) = id {
                emit(id, start, stop);
            }
            start = stop;
        }
    }

    /// For each byte that starts a part after all merges, where that part ends; 0 elsewhere.
    #[allow(clippy::indexing_slicing)] // all indices are starts of parts, below piece.len()
    fn merge(&self, piece: &[u8]) -> Vec<usize> {
        let length = piece.len();
        let mut end: Vec<usize> = (1..=length).collect();
        let mut previous: Vec<usize> = (0..length).map(|start| start.saturating_sub(1)).collect();
        // (rank, start, end) of the token a merge would make. Stale entries are skipped when met.
        let mut candidates = BinaryHeap::new();
        let offer = |candidates: &mut BinaryHeap<_>, start: usize, stop: usize| {
            if let Some(&rank) = self.ranks.get(&piece[start..stop]) {
                candidates.push(Reverse((rank, start, stop)));
            }
        };
        for start in 0..length.saturating_sub(1) {
            offer(&mut candidates, start, start + 2);
        }
        while let Some(Reverse((_, start, stop))) = candidates.pop() {
            let middle = end[start];
            if middle == 0 || middle >= length || end[middle] != stop {
                continue;
            }
            end[middle] = 0;
            end[start] = stop;
            if stop < length {
                previous[stop] = start;
                offer(&mut candidates, start, end[stop]);
            }
            if start > 0 {
                offer(&mut candidates, previous[start], stop);
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    use super::*;

    /// The definition, spelt out: scan all pairs, merge the first of lowest rank, repeat.
    fn by_definition(bpe: &Bpe, piece: &[u8]) -> Vec<u32> {
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|&byte| vec![byte]).collect();
        loop {
            let best = (0..parts.len().saturating_sub(1))
                .filter_map(|i| {
                    let pair = [parts[i].clone(), parts[i + 1].clone()].concat();
                    bpe.ranks.get(&pair).map(|&rank| (rank, i))
                })
                .min();
            let Some((_, i)) = best else { break };
            let right = parts.remove(i + 1);
            parts[i].extend(right);
        }
        parts.iter().map(|part| bpe.ranks[part]).collect()
    }

    proptest! {
        #[test]
        fn merges_as_defined(
            extra in btree_set(vec(b'a'..=b'c', 2..6), 0..40),
            order in any::<u8>(),
            piece in vec(b'a'..=b'c', 0..60),
        ) {
            let mut tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
            let mut extra: Vec<Vec<u8>> = extra.into_iter().collect();
            extra.sort_by_key(|token| {
                *blake3::Hasher::new_keyed(&[order; 32]).update(token).finalize().as_bytes()
            });
            tokens.extend(extra);
            let bpe = Bpe::new(tokens).unwrap();
            let mut ids = Vec::new();
            let mut covered = 0;
            bpe.encode(&piece, |id, start, end| {
                assert_eq!(start, covered);
                covered = end;
                ids.push(id);
            });
            prop_assert_eq!(covered, piece.len());
            let whole = bpe.ranks.get(&piece).map(|&id| vec![id]);
            prop_assert_eq!(ids, whole.unwrap_or_else(|| by_definition(&bpe, &piece)));
        }
    }
}
