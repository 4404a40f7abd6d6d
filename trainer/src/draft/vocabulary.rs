//! Which target tokens the draft can predict: the one place that checks a mapping. Knows no tensors
//! and no files.

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
    /// No draft id at all, or more than target ids.
    #[error("a draft vocabulary of {draft} ids: it must be 1 to {target}, the target's vocabulary")]
    Size {
        /// Draft ids.
        draft: usize,
        /// Target ids.
        target: usize,
    },
    /// `draft + d2t[draft]` is no target id.
    #[error(
        "d2t[{draft}] is {offset}: it is an offset, so {draft} + {offset} must be a target id \
            below {vocab_size}"
    )]
    OutOfRange {
        /// Draft id.
        draft: usize,
        /// Offset stored for it.
        offset: i64,
        /// Size of the target vocabulary.
        vocab_size: usize,
    },
    /// Target ids must ascend, as servers and other trainers assume.
    #[error(
        "draft id {draft} means target id {id}, the one before it {before}: they must ascend \
            (was d2t stored as ids in place of offsets?)"
    )]
    NotAscending {
        /// The later draft id.
        draft: usize,
        /// Target id of the draft id before it.
        before: u32,
        /// Its target id.
        id: u32,
    },
    /// The two tensors contradict each other.
    #[error("t2d[{id}] is {t2d}, but d2t says the opposite: the two were not written together")]
    Contradiction {
        /// First target id on which they differ.
        id: usize,
        /// What t2d holds for it.
        t2d: bool,
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
    pub fn from_targets(targets: Vec<u32>, vocab_size: usize) -> Result<Self, VocabularyError> {
        if targets.is_empty() || targets.len() > vocab_size {
            return Err(VocabularyError::Size { draft: targets.len(), target: vocab_size });
        }
        let mut in_draft = vec![false; vocab_size];
        for (draft, &id) in targets.iter().enumerate() {
            let offset = i64::from(id) - draft as i64;
            let out_of_range = VocabularyError::OutOfRange { draft, offset, vocab_size };
            *in_draft.get_mut(id as usize).ok_or(out_of_range)? = true;
        }
        match targets.windows(2).position(|pair| pair[0] >= pair[1]) {
            Some(at) => Err(VocabularyError::NotAscending {
                draft: at + 1,
                before: targets[at],
                id: targets[at + 1],
            }),
            None => Ok(Self { draft_to_target: targets, in_draft }),
        }
    }

    /// From the exported tensors: `d2t` `[draft]` of offsets, `t2d` `[vocab]` of marks.
    pub fn from_mapping(d2t: &[i64], t2d: &[bool]) -> Result<Self, VocabularyError> {
        let vocab_size = t2d.len();
        let target = |(draft, &offset): (usize, &i64)| {
            u32::try_from((draft as i64).saturating_add(offset))
                .map_err(|_| VocabularyError::OutOfRange { draft, offset, vocab_size })
        };
        let targets = d2t.iter().enumerate().map(target).collect::<Result<Vec<_>, _>>()?;
        let map = Self::from_targets(targets, vocab_size)?;
        match (0..vocab_size).find(|&id| map.in_draft[id] != t2d[id]) {
            Some(id) => Err(VocabularyError::Contradiction { id, t2d: t2d[id] }),
            None => Ok(map),
        }
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
        let map = DraftVocabulary::from_targets(vec![0, 3, 4, 9], 10).unwrap();
        assert_eq!(map.offsets(), [0, 2, 2, 6]);
        assert_eq!(DraftVocabulary::from_mapping(&map.offsets(), map.in_draft()).unwrap(), map);
        assert_eq!(DraftVocabulary::first(10, 10).offsets(), [0; 10]);
    }

    #[test]
    fn contradictions_are_named() {
        let marks = [true, false, true, false];
        let outside = DraftVocabulary::from_mapping(&[0, 9], &marks).unwrap_err();
        assert!(matches!(outside, VocabularyError::OutOfRange { draft: 1, offset: 9, .. }));
        let before = DraftVocabulary::from_mapping(&[-1, 1], &marks).unwrap_err();
        assert!(matches!(before, VocabularyError::OutOfRange { draft: 0, offset: -1, .. }));
        let twice = DraftVocabulary::from_mapping(&[0, -1], &marks).unwrap_err();
        assert_eq!(twice, VocabularyError::NotAscending { draft: 1, before: 0, id: 0 });
        let other = DraftVocabulary::from_mapping(&[0, 0], &marks).unwrap_err();
        assert_eq!(other, VocabularyError::Contradiction { id: 1, t2d: false });
        let ids = [false, true, true, false, true, false, false, false];
        let stored = DraftVocabulary::from_mapping(&[1, 2, 4], &ids).unwrap_err();
        assert_eq!(stored, VocabularyError::Contradiction { id: 2, t2d: true });
        for (d2t, draft) in [(&[][..], 0), (&[0; 5], 5)] {
            let size = DraftVocabulary::from_mapping(d2t, &marks).unwrap_err();
            assert_eq!(size, VocabularyError::Size { draft, target: 4 });
        }
    }
}
