//! Which target ids a run's draft predicts: chosen by counts, and bound to what was counted. Knows
//! nothing of text, of the draft's weights or of where the counts come from.

use thiserror::Error;

use crate::draft::{DraftVocabulary, VocabularyError};

/// How often each target id occurs among the trained tokens (loss mask 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenCounts(Vec<u64>);

impl TokenCounts {
    /// All zero, for a target vocabulary of `target_vocab_size` ids (padded size, as in its head).
    pub fn new(target_vocab_size: usize) -> Self {
        Self(vec![0; target_vocab_size])
    }

    /// Adds the trained tokens of one sample. An id outside the vocabulary is an error.
    pub fn add(&mut self, input_ids: &[u32], loss_mask: &[u8]) -> Result<(), VocabError> {
        let size = self.0.len();
        for (&id, _) in input_ids.iter().zip(loss_mask).filter(|&(_, &m)| m == 1) {
            let slot = self.0.get_mut(id as usize).ok_or(VocabError::IdOutside { id, size })?;
            *slot += 1;
        }
        Ok(())
    }

    /// Number of counted tokens.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// BLAKE3 over the counts (little-endian u64), in hex.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for count in &self.0 {
            hasher.update(&count.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// A mapping between draft ids and target ids, and where it comes from.
///
/// Draft id `j` means target id `draft_to_target()[j]`; the file form is the offset `d2t[j]` with
/// `target = j + d2t[j]`, which must never be used as an index by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct VocabMap {
    vocabulary: DraftVocabulary,
    coverage: f64,
    digest: String,
}

impl VocabMap {
    /// The `draft_vocab_size` most frequent ids (ties: smaller id first), always containing
    /// `forced`, filled with the smallest unused ids when fewer occur. `fingerprint` is the digest
    /// of the data set that was counted; it is bound into [`VocabMap::digest`].
    pub fn build(
        counts: &TokenCounts,
        draft_vocab_size: usize,
        forced: &[u32],
        fingerprint: &str,
    ) -> Result<Self, VocabError> {
        let target = counts.0.len();
        if draft_vocab_size == 0 || draft_vocab_size > target {
            return Err(VocabError::Size { draft: draft_vocab_size, target });
        }
        check_forced(forced, target)?;
        let mut chosen = vec![false; target];
        let mut left = draft_vocab_size;
        for &id in forced {
            if !std::mem::replace(&mut chosen[id as usize], true) {
                left = left.checked_sub(1).ok_or(VocabError::TooManyForced {
                    forced: forced.len(),
                    draft: draft_vocab_size,
                })?;
            }
        }
        // Ids that never occur sort last and by id, so they are the filling as well.
        let mut by_count: Vec<usize> = (0..target).collect();
        by_count.sort_by_key(|&id| (std::cmp::Reverse(counts.0[id]), id));
        for id in by_count {
            if left == 0 {
                break;
            }
            if !std::mem::replace(&mut chosen[id], true) {
                left -= 1;
            }
        }
        let used: Vec<u32> =
            chosen.iter().enumerate().filter(|(_, c)| **c).map(|(id, _)| id as u32).collect();
        let inside: u64 = used.iter().map(|&id| counts.0[id as usize]).sum();
        let coverage =
            if counts.total() == 0 { 1.0 } else { inside as f64 / counts.total() as f64 };
        let digest = bind(&used, target, &counts.digest(), fingerprint);
        Ok(Self { vocabulary: DraftVocabulary::from_targets(used, target)?, coverage, digest })
    }

    /// The identity, every target id being a draft id, where the target has all of `forced`.
    pub fn full_with(
        target_vocab_size: usize,
        forced: &[u32],
        fingerprint: &str,
    ) -> Result<Self, VocabError> {
        check_forced(forced, target_vocab_size)?;
        Ok(Self::full(target_vocab_size, fingerprint))
    }

    /// The identity: every target id is a draft id.
    pub fn full(target_vocab_size: usize, fingerprint: &str) -> Self {
        let used: Vec<u32> = (0..target_vocab_size as u32).collect();
        let digest = bind(&used, target_vocab_size, "full", fingerprint);
        let vocabulary = DraftVocabulary::first(target_vocab_size, target_vocab_size);
        Self { vocabulary, coverage: 1.0, digest }
    }

    /// Rebuilds a mapping from its file form and checks every invariant. `digest` and `coverage`
    /// are those recorded when it was built.
    pub fn from_tensors(
        d2t: &[i64],
        t2d: &[bool],
        digest: String,
        coverage: f64,
    ) -> Result<Self, VocabError> {
        Ok(Self { vocabulary: DraftVocabulary::from_mapping(d2t, t2d)?, coverage, digest })
    }

    /// The mapping itself.
    pub fn vocabulary(&self) -> &DraftVocabulary {
        &self.vocabulary
    }

    /// Target id of each draft id, [draft vocabulary], strictly increasing.
    pub fn draft_to_target(&self) -> &[u32] {
        self.vocabulary.draft_to_target()
    }

    /// Offsets of the file form, [draft vocabulary].
    pub fn d2t(&self) -> Vec<i64> {
        self.vocabulary.offsets()
    }

    /// Membership of the file form, [target vocabulary].
    pub fn t2d(&self) -> &[bool] {
        self.vocabulary.in_draft()
    }

    /// Number of draft ids.
    pub fn draft_vocab_size(&self) -> usize {
        self.draft_to_target().len()
    }

    /// Number of target ids, as in the target's head.
    pub fn target_vocab_size(&self) -> usize {
        self.t2d().len()
    }

    /// Whether the two vocabularies are the same, so that no mapping need be stored.
    pub fn is_full(&self) -> bool {
        self.draft_vocab_size() == self.target_vocab_size()
    }

    /// Share of the counted tokens that the draft can predict, 0 to 1.
    pub fn coverage(&self) -> f64 {
        self.coverage
    }

    /// BLAKE3 over the mapping, the counts and the data set's fingerprint, in hex.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// An id outside the target's vocabulary is somebody's mistake, whatever else is chosen.
fn check_forced(forced: &[u32], target: usize) -> Result<(), VocabError> {
    match forced.iter().find(|&&id| id as usize >= target) {
        None => Ok(()),
        Some(&id) => Err(VocabError::ForcedOutside { id, target }),
    }
}

fn bind(used: &[u32], target_vocab_size: usize, counts: &str, fingerprint: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in [counts, fingerprint] {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.update(&(target_vocab_size as u64).to_le_bytes());
    for id in used {
        hasher.update(&id.to_le_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// A vocabulary mapping that cannot be built, or one on disk that must not be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VocabError {
    /// The draft vocabulary does not fit the target's.
    #[error("draft_vocab_size is {draft}: it must be 1 to {target}, the target's vocabulary")]
    Size {
        /// Requested or found size.
        draft: usize,
        /// Size of the target's vocabulary.
        target: usize,
    },
    /// An id the target does not have.
    #[error(
        "token id {id} is outside the target's vocabulary of {size}: the data set and the \
            target do not belong together"
    )]
    IdOutside {
        /// The id.
        id: u32,
        /// Size of the target's vocabulary.
        size: usize,
    },
    /// A forced id the target does not have.
    #[error(
        "token id {id} must be in the draft vocabulary (draft.force_tokens, or an end marker of \
            the target), but the target's ids end at {}", target - 1
    )]
    ForcedOutside {
        /// The id.
        id: u32,
        /// Size of the target's vocabulary.
        target: usize,
    },
    /// More forced ids than places.
    #[error(
        "{forced} forced tokens do not fit a draft vocabulary of {draft}: raise draft_vocab_size"
    )]
    TooManyForced {
        /// Number of forced ids given.
        forced: usize,
        /// Draft vocabulary size.
        draft: usize,
    },
    /// Tensors that are no mapping.
    #[error(transparent)]
    Mapping(#[from] VocabularyError),
}

impl VocabError {
    /// Process exit code: 78 for sizes a user chose, 65 for data.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Size { .. } | Self::ForcedOutside { .. } | Self::TooManyForced { .. } => 78,
            Self::IdOutside { .. } => 65,
            Self::Mapping(error) => error.exit_code(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(values: &[u64]) -> TokenCounts {
        TokenCounts(values.to_vec())
    }

    #[test]
    fn ties_go_to_the_smaller_id_and_forced_ids_displace_the_rarest() {
        let counts = counts(&[0, 5, 5, 9, 0, 5, 1]);
        let free = VocabMap::build(&counts, 3, &[], "f").unwrap();
        assert_eq!(free.draft_to_target(), [1, 2, 3]);
        assert_eq!(free.d2t(), [1, 1, 1]);
        assert_eq!(free.coverage(), 19.0 / 25.0);
        let forced = VocabMap::build(&counts, 3, &[6, 6], "f").unwrap();
        assert_eq!(forced.draft_to_target(), [1, 3, 6]);
        let error = VocabMap::build(&counts, 3, &[7], "f").unwrap_err();
        assert_eq!(
            (error.exit_code(), error),
            (78, VocabError::ForcedOutside { id: 7, target: 7 })
        );
    }

    #[test]
    fn few_distinct_tokens_are_filled_with_the_smallest_unused_ids() {
        let map = VocabMap::build(&counts(&[0, 0, 0, 0, 7, 0]), 4, &[], "f").unwrap();
        assert_eq!(map.draft_to_target(), [0, 1, 2, 4]);
        assert_eq!(map.t2d(), [true, true, true, false, true, false]);
    }

    #[test]
    fn only_trained_tokens_count() {
        let mut counts = TokenCounts::new(4);
        counts.add(&[0, 1, 2, 2], &[0, 1, 1, 0]).unwrap();
        assert_eq!(counts.0, [0, 1, 1, 0]);
        assert_eq!(counts.add(&[4], &[1]), Err(VocabError::IdOutside { id: 4, size: 4 }));
    }

    #[test]
    fn the_digest_is_bound_to_counts_and_data_set() {
        let build = |values: &[u64], f: &str| VocabMap::build(&counts(values), 2, &[], f).unwrap();
        let first = build(&[3, 2, 1], "a");
        assert_ne!(first.digest(), build(&[3, 2, 1], "b").digest());
        assert_ne!(first.digest(), build(&[4, 2, 1], "a").digest());
        assert_eq!(first.digest(), build(&[3, 2, 1], "a").digest());
    }

    proptest! {
        #[test]
        fn invariants_hold_and_files_round_trip(
            values in prop::collection::vec(0u64..20, 1..120),
            share in 0.0f64..1.0,
            forced in prop::collection::vec(0usize..1000, 0..5),
        ) {
            let target = values.len();
            let size = ((share * target as f64) as usize).max(1);
            let forced: Vec<u32> = forced.iter().map(|f| (f % target) as u32).collect();
            let mut distinct = forced.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let built = VocabMap::build(&counts(&values), size, &forced, "f");
            prop_assume!(distinct.len() <= size);
            let map = built.unwrap();
            prop_assert_eq!(map.draft_vocab_size(), size);
            prop_assert!(forced.iter().all(|&id| map.t2d()[id as usize]));
            prop_assert!(map.d2t().windows(2).all(|p| p[0] <= p[1]));
            prop_assert_eq!(map.t2d().iter().filter(|k| **k).count(), size);
            // No id left out is more frequent than one taken without being forced.
            let taken = map.draft_to_target().iter().filter(|id| !forced.contains(id));
            let rarest = taken.map(|&id| values[id as usize]).min().unwrap_or(u64::MAX);
            let left = (0..target).filter(|&id| !map.t2d()[id]);
            let best_left = left.map(|id| values[id]).max();
            prop_assert!(best_left.is_none_or(|count| count <= rarest));
            let digest = map.digest().to_owned();
            let back = VocabMap::from_tensors(&map.d2t(), map.t2d(), digest, map.coverage());
            prop_assert_eq!(back.unwrap(), map);
        }
    }
}
