//! What the values of states give away: rows that were never written, one token's state in the rows
//! of others, a layer that is another one's. Knows no files.

use half::bf16;
use shared::CaptureSpec;

use crate::capture::LayerRows;

/// What is wrong with `layers`, each [tokens, hidden] of the tokens `ids`, if anything is.
pub(super) fn fault(layers: &[LayerRows], ids: &[u32], spec: &CaptureSpec) -> Option<String> {
    let named = |at: usize| spec.layers.get(at).map(ToString::to_string).unwrap_or_default();
    for (at, rows) in layers.iter().enumerate() {
        let fault = match rows {
            LayerRows::Bf16(values) => fault_of_rows(values, bf16::ZERO, ids, spec.hidden_size),
            LayerRows::F32(values) => fault_of_rows(values, 0.0, ids, spec.hidden_size),
            // No file gives these.
            LayerRows::Fp8 { .. } | LayerRows::Pieces(_) => None,
        };
        if let Some(fault) = fault {
            return Some(format!("layer {}: {fault}", named(at)));
        }
        if let Some(twin) = layers.iter().take(at).position(|other| other == rows) {
            let (layer, twin) = (named(at), named(twin));
            return Some(format!(
                "layer {layer} equals layer {twin}: one buffer was captured twice"
            ));
        }
    }
    None
}

/// Values are compared as numbers: -0.0 is a zero too.
fn fault_of_rows<T: PartialEq>(
    values: &[T],
    zero: T,
    ids: &[u32],
    hidden: usize,
) -> Option<String> {
    let rows = || values.chunks_exact(hidden.max(1));
    // No residual stream is zero: such a row was never written.
    if let Some(row) = rows().position(|row| row.iter().all(|value| *value == zero)) {
        return Some(format!("row {row} is all zeros: padding, or never captured"));
    }
    // A state contains its token's embedding, so the states of two tokens are equal to the last
    // bit only where the embeddings are (tokens that were never trained) and so is everything
    // before them: in a run of such tokens at the start. Equal tokens do give equal states in
    // such a run; they are not counted. No sample that is worth anything is mostly such a run.
    let neighbours = rows().zip(rows().skip(1)).zip(ids.iter().zip(ids.iter().skip(1)));
    let (mut different, mut repeated, mut first) = (0_usize, 0_usize, 0);
    for (at, ((before, row), _)) in neighbours.enumerate().filter(|(_, (_, (a, b)))| a != b) {
        different += 1;
        if before == row {
            repeated += 1;
            first = if repeated == 1 { at + 1 } else { first };
        }
    }
    (2 * repeated > different).then(|| {
        format!(
            "{repeated} of {different} tokens have the state of another token before them, the \
             first in row {first}: one token's state was written for others; extract again"
        )
    })
}

#[cfg(test)]
mod tests {
    use shared::{LayerIndex, StateDtype};

    use super::*;

    const HIDDEN: usize = 3;

    /// What is said of states whose row is given by number for each token.
    fn said(ids: &[u32], rows: &[u8]) -> Option<String> {
        let layers = [1, 4].map(LayerIndex).to_vec();
        let spec = CaptureSpec { layers, hidden_size: HIDDEN, dtype: StateDtype::Bf16 };
        let values = |scale: f32| rows.iter().flat_map(move |&row| [1.0, f32::from(row), scale]);
        let sound = (0..ids.len() * HIDDEN).map(|at| bf16::from_f32(1.0 + at as f32)).collect();
        let layers = [LayerRows::Bf16(sound), LayerRows::F32(values(2.0).collect())];
        fault(&layers, ids, &spec)
    }

    #[test]
    fn one_state_in_the_rows_of_other_tokens_is_named() {
        for (ids, rows, wanted) in [
            (&[5, 6, 7, 8, 9][..], &[1, 1, 1, 1, 1][..], Some("4 of 4 tokens")),
            (&[5, 6, 7, 8, 9], &[0, 1, 1, 1, 1], Some("3 of 4 tokens")),
            // Half of the sample, and equal tokens say nothing.
            (&[5, 6, 7, 8, 9], &[0, 1, 2, 2, 2], None),
            (&[5, 5, 5, 5, 5], &[1, 1, 1, 1, 1], None),
            (&[5, 6, 5, 5, 5], &[1, 2, 1, 1, 1], None),
            // Tokens that were never trained, at the start.
            (&[5, 6, 7, 8, 9], &[1, 1, 1, 2, 3], None),
            (&[5], &[1], None),
        ] {
            let said = said(ids, rows);
            let is_wanted = match (&said, wanted) {
                (Some(said), Some(wanted)) => said.contains(&format!("layer 4: {wanted}")),
                (said, wanted) => said.is_none() && wanted.is_none(),
            };
            assert!(is_wanted, "{ids:?} {rows:?}: {said:?}");
        }
    }
}
