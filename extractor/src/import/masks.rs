//! Loss masks of files that have none: the prompts are encoded as for an extraction, and a file
//! takes the mask of the prompt with exactly its token ids. Knows no states.

use std::path::PathBuf;

use crate::encode::{Encoded, Encoder};
use crate::intake::IntakeError;
use crate::prompts::Prompts;
use crate::reject::Source;

/// All prompts in order of their token ids.
pub(super) struct Masks(Vec<(Encoded, Source)>);

impl Masks {
    /// Encodes every line; those that can't be encoded are counted in the log.
    pub(super) fn read(prompts: &[PathBuf], encoder: &Encoder) -> Result<Self, IntakeError> {
        let (mut lines, mut rejected) = (Vec::new(), 0_u64);
        for line in Prompts::open(prompts)? {
            let line = line?;
            match line.parsed.and_then(|conversation| encoder.encode(&conversation)) {
                Ok(encoded) => lines.push((encoded, line.source)),
                Err(reject) => {
                    tracing::debug!("{reject}");
                    rejected += 1;
                }
            }
        }
        if rejected > 0 {
            tracing::warn!("{rejected} prompts can't be encoded: `extractor plan` says why");
        }
        lines.sort_by(|(a, _), (b, _)| a.sample.input_ids().cmp(b.sample.input_ids()));
        lines.dedup_by(|(a, _), (b, _)| a.sample == b.sample);
        Ok(Self(lines))
    }

    /// The prompt with these token ids; otherwise in words why there is none, or which of two.
    pub(super) fn find(&self, ids: &[u32]) -> Result<&Encoded, String> {
        let at = self.0.partition_point(|(line, _)| line.sample.input_ids() < ids);
        let mut equal =
            self.0.iter().skip(at).take_while(|(line, _)| line.sample.input_ids() == ids);
        match (equal.next(), equal.next()) {
            (Some((encoded, _)), None) => Ok(encoded),
            (Some((_, one)), Some((_, other))) => {
                Err(format!("{one} and {other} have these token ids, but different loss masks"))
            }
            (None, _) => Err(self.nearest(at, ids)),
        }
    }

    /// In sorted order the longest common beginning is with a neighbour.
    fn nearest(&self, at: usize, ids: &[u32]) -> String {
        let common = |line: &Encoded| {
            line.sample.input_ids().iter().zip(ids).take_while(|(a, b)| a == b).count()
        };
        let neighbours = self.0.iter().skip(at.saturating_sub(1)).take(2);
        let nearest = neighbours.max_by_key(|(line, _)| common(line));
        let none = format!("no `loss_mask`, and no prompt has these {} token ids", ids.len());
        match nearest.map(|(line, source)| (line, source, common(line))) {
            None | Some((_, _, 0)) => none,
            Some((line, source, common)) => {
                let cut = if line.truncated { ", cut at max_tokens" } else { "" };
                let tokens = line.sample.tokens();
                format!("{none}; {source} ({tokens} tokens{cut}) has the first {common}")
            }
        }
    }
}
