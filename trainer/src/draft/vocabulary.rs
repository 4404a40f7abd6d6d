//! Which target tokens the draft can predict. Knows no tensors and no files.

use thiserror::Error;

/// The draft vocabulary as target ids, ascending, and its inverse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocabulary {
    draft_to_target: Vec<u32>,
    in_draft: Vec<bool>,
}

/// Mapping tensors that do not describe a part of the target vocabulary.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VocabularyError {
    /// An offset leads outside the target vocabulary.
    #[error("d2t[{draft}] = {offset} points at target token {target}; there are {vocab_size}")]
    OutOfRange {
        /// Draft id.
        draft: usize,
        /// Offset stored for it.
        offset: i64,
        /// Draft id plus offset.
        target: i64,
        /// Size of the target vocabulary.
        vocab_size: usize,
    },
    /// Target ids must ascend, as servers and other trainers assume.
    #[error("draft tokens {draft} and the one before it map to target ids that do not ascend")]
    NotAscending {
        /// Draft id.
        draft: usize,
    },
    /// The two tensors contradict each other.
    #[error("t2d marks {marked} target tokens, d2t names {named}; or they name different ones")]
    Contradiction {
        /// Tokens marked in t2d.
        marked: usize,
        /// Entries of d2t.
        named: usize,
    },
}

impl VocabularyError {
    /// Exit code of a run that ends with this error.
    pub fn exit_code(&self) -> u8 {
        65
    }
}

impl DraftVocabulary {
    /// The first `size` of `vocab_size` target tokens; all of them when the two are equal.
    pub fn first(size: usize, vocab_size: usize) -> Self {
        Self {
            draft_to_target: (0..size as u32).collect(),
            in_draft: (0..vocab_size).map(|id| id < size).collect(),
        }
    }

    /// From ascending target ids.
    pub fn from_targets(targets: &[u32], vocab_size: usize) -> Result<Self, VocabularyError> {
        let offsets: Vec<i64> =
            targets.iter().enumerate().map(|(draft, &id)| i64::from(id) - draft as i64).collect();
        let mut in_draft = vec![false; vocab_size];
        for (draft, &id) in targets.iter().enumerate() {
            let out_of_range = VocabularyError::OutOfRange {
                draft,
                offset: offsets[draft],
                target: i64::from(id),
                vocab_size,
            };
            *in_draft.get_mut(id as usize).ok_or(out_of_range)? = true;
        }
        match targets.windows(2).position(|pair| pair[0] >= pair[1]) {
            Some(at) => Err(VocabularyError::NotAscending { draft: at + 1 }),
            None => Ok(Self { draft_to_target: targets.to_vec(), in_draft }),
        }
    }

    /// From the exported tensors: `d2t` `[draft]` of offsets, `t2d` `[vocab]` of marks.
    pub fn from_mapping(d2t: &[i64], t2d: &[bool]) -> Result<Self, VocabularyError> {
        let vocab_size = t2d.len();
        let target = |(draft, &offset): (usize, &i64)| {
            let target = (draft as i64).saturating_add(offset);
            u32::try_from(target).map_err(|_| VocabularyError::OutOfRange {
                draft,
                offset,
                target,
                vocab_size,
            })
        };
        let targets = d2t.iter().enumerate().map(target).collect::<Result<Vec<_>, _>>()?;
        let map = Self::from_targets(&targets, vocab_size)?;
        if map.in_draft != t2d {
            let marked = t2d.iter().filter(|&&mark| mark).count();
            return Err(VocabularyError::Contradiction { marked, named: d2t.len() });
        }
        Ok(map)
    }

    /// Target id of each draft id, ascending.
    pub fn draft_to_target(&self) -> &[u32] {
        &self.draft_to_target
    }

    /// For each target id whether the draft can predict it (`t2d`).
    pub fn in_draft(&self) -> &[bool] {
        &self.in_draft
    }

    /// `d2t` as exported: target id minus draft id.
    pub fn offsets(&self) -> Vec<i64> {
        let pairs = self.draft_to_target.iter().enumerate();
        pairs.map(|(draft, &target)| i64::from(target) - draft as i64).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_survives_the_exported_form() {
        let map = DraftVocabulary::from_targets(&[0, 3, 4, 9], 10).unwrap();
        assert_eq!(map.offsets(), [0, 2, 2, 6]);
        assert_eq!(DraftVocabulary::from_mapping(&map.offsets(), map.in_draft()).unwrap(), map);
        assert_eq!(DraftVocabulary::first(10, 10).offsets(), [0; 10]);
    }

    #[test]
    fn contradictions_are_named() {
        let marks = [true, false, true, false];
        let outside = DraftVocabulary::from_mapping(&[0, 9], &marks).unwrap_err();
        assert!(matches!(outside, VocabularyError::OutOfRange { draft: 1, target: 10, .. }));
        let before = DraftVocabulary::from_mapping(&[-1, 1], &marks).unwrap_err();
        assert!(matches!(before, VocabularyError::OutOfRange { draft: 0, target: -1, .. }));
        let twice = DraftVocabulary::from_mapping(&[0, -1], &marks).unwrap_err();
        assert_eq!(twice, VocabularyError::NotAscending { draft: 1 });
        let other = DraftVocabulary::from_mapping(&[0, 0], &marks).unwrap_err();
        assert_eq!(other, VocabularyError::Contradiction { marked: 2, named: 2 });
    }
}
