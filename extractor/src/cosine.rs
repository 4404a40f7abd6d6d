//! How far states computed in bf16 point away from expected ones. A router near a tie may choose
//! other experts in bf16, so rows whose choices are clear are looked at apart; a few of these still
//! see, through attention, an earlier row that was sent to another expert.

/// Router margins above this do not flip in bf16.
pub const CLEAR_MARGIN: f32 = 0.01;
/// Smallest median cosine that passes.
pub const MEDIAN: f64 = 0.9998;
/// Cosine that rows whose choices are clear must reach, but for [`BELOW`] of them.
pub const CLEAR: f64 = 0.999;
/// Share of the clear rows of all tensors that may stay below [`CLEAR`]: torch's own bf16 has up
/// to 1.8 %, see docs/performance.md.
pub const BELOW: f64 = 0.02;
/// Smallest cosine of any clear row that passes: what one flipped expert does to a later row.
const FLOOR: f64 = 0.95;

/// Cosines between the rows of one tensor and the expected rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Cosines {
    /// Prompt and tensor.
    pub tensor: String,
    /// Rows compared.
    pub rows: usize,
    /// Median over all rows.
    pub median: f64,
    /// Rows whose choices are clear.
    pub clear: usize,
    /// Smallest of these.
    pub worst_clear: f64,
    /// How many of them are below [`CLEAR`].
    pub below: usize,
}

impl Cosines {
    /// Compares rows of `width`; `margins` has the smallest router margin of each row.
    pub fn of(
        tensor: String,
        (found, expected): (&[f32], &[f32]),
        width: usize,
        margins: &[f32],
    ) -> Self {
        let rows = expected.len() / width.max(1);
        let mut all: Vec<f64> = Vec::with_capacity(rows);
        let (mut clear, mut below, mut worst_clear) = (0, 0, 1.0_f64);
        for (row, expected) in expected.chunks_exact(width.max(1)).enumerate() {
            let found = found.get(row * width..(row + 1) * width).unwrap_or(&[]);
            let cosine = cosine(found, expected);
            all.push(cosine);
            if margins.get(row).is_none_or(|&margin| margin > CLEAR_MARGIN) {
                clear += 1;
                below += usize::from(cosine < CLEAR);
                worst_clear = worst_clear.min(cosine);
            }
        }
        all.sort_by(f64::total_cmp);
        let median = all.get(all.len() / 2).copied().unwrap_or(-1.0);
        Self { tensor, rows, median, clear, worst_clear, below }
    }

    /// Whether the tensor passes, for all that it can say alone.
    pub fn agrees(&self) -> bool {
        self.median >= MEDIAN && self.worst_clear >= FLOOR
    }

    /// Whether all tensors pass, and few enough clear rows are off.
    pub fn agree(all: &[Self]) -> bool {
        let (clear, below) = Self::clear(all);
        !all.is_empty() && all.iter().all(Self::agrees) && below as f64 <= clear as f64 * BELOW
    }

    /// Clear rows of all tensors, and how many of them are below [`CLEAR`].
    pub fn clear(all: &[Self]) -> (usize, usize) {
        all.iter().fold((0, 0), |(clear, below), it| (clear + it.clear, below + it.below))
    }
}

/// -1 where a value is missing or not finite, which no tolerance accepts.
fn cosine(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() || found.is_empty() {
        return -1.0;
    }
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let cosine = dot(found, expected) / (dot(found, found) * dot(expected, expected)).sqrt();
    if cosine.is_finite() { cosine } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unclear_rows_count_for_the_median_alone() {
        let expected = [1.0, 0.0, 1.0, 0.0, 0.0, 2.0];
        // The second row points elsewhere.
        let found = [2.0, 0.0, 0.0, 1.0, 0.0, 1.0];
        let compare = |margins: &[f32]| Cosines::of("h".into(), (&found, &expected), 2, margins);
        let unclear = compare(&[1.0, 0.001, 1.0]);
        assert_eq!((unclear.median, unclear.clear, unclear.worst_clear), (1.0, 2, 1.0));
        assert!(unclear.agrees());
        assert!(!compare(&[1.0, 0.02, 1.0]).agrees());
        assert!(!compare(&[]).agrees());
    }

    /// One row in fifty may be off a little; two may not, and none may be off by much.
    #[test]
    fn few_clear_rows_may_be_off_and_none_by_much() {
        let compare = |off: &[(usize, f32)]| {
            let expected = [1.0, 0.0].repeat(50);
            let mut found = expected.clone();
            off.iter().for_each(|&(row, apart)| found[2 * row + 1] = apart);
            Cosines::agree(&[Cosines::of("h".into(), (&found, &expected), 2, &[])])
        };
        assert!(compare(&[]));
        assert!(compare(&[(7, 0.1)]));
        assert!(!compare(&[(7, 0.1), (30, 0.1)]));
        assert!(!compare(&[(7, 1.0)]));
        assert!(!Cosines::agree(&[]));
    }

    #[test]
    fn missing_and_non_finite_values_never_pass() {
        let compare = |found: &[f32]| Cosines::of("h".into(), (found, &[1.0, 1.0]), 2, &[]);
        assert!(!compare(&[]).agrees());
        assert!(!compare(&[1.0]).agrees());
        assert!(!compare(&[f32::NAN, 1.0]).agrees());
        assert!(!compare(&[0.0, 0.0]).agrees());
        assert!(compare(&[0.5, 0.5]).agrees());
    }
}
