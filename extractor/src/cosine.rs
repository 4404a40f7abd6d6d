//! How far states computed in bf16 point away from expected ones. A router near a tie may choose
//! other experts in bf16, and later rows see that through attention, so single rows can be judged
//! only where the experts are given; see docs/adr/0008.

/// Choices with larger router margins are clear: bf16 seldom makes them otherwise.
const CLEAR_MARGIN: f32 = 0.01;
/// Smallest median cosine that passes.
pub const MEDIAN: f64 = 0.9998;
/// Smallest cosine of a row that passes where the experts are given; seen: 0.9967.
pub const ROW: f64 = 0.995;
/// Largest margin that an expected choice may have where a router that sees the expected states,
/// but for rounding, would choose otherwise; seen: 0.012.
pub const DOUBT: f32 = 0.02;
/// Smallest cosine of a row that passes where it may see others that went to other experts, and
/// its own choices are clear.
pub const FLOOR: f64 = 0.95;

/// Cosines between the rows of one tensor and the expected rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Cosines {
    /// Prompt and tensor.
    pub tensor: String,
    /// Rows compared.
    pub rows: usize,
    /// Median over all rows.
    pub median: f64,
    /// Smallest of all rows.
    pub worst: f64,
    /// Rows whose choices are clear.
    pub clear: usize,
    /// Smallest of these.
    pub worst_clear: f64,
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
        let (mut clear, mut worst_clear) = (0, 1.0_f64);
        for (row, expected) in expected.chunks_exact(width.max(1)).enumerate() {
            let found = found.get(row * width..(row + 1) * width).unwrap_or(&[]);
            let cosine = cosine(found, expected);
            all.push(cosine);
            if margins.get(row).is_none_or(|&margin| margin > CLEAR_MARGIN) {
                clear += 1;
                worst_clear = worst_clear.min(cosine);
            }
        }
        all.sort_by(f64::total_cmp);
        let median = all.get(all.len() / 2).copied().unwrap_or(-1.0);
        let worst = all.first().copied().unwrap_or(-1.0);
        Self { tensor, rows, median, worst, clear, worst_clear }
    }

    /// Whether the tensor passes where routers chose for themselves.
    pub fn agrees(&self) -> bool {
        self.median >= MEDIAN && self.worst_clear >= FLOOR
    }

    /// Whether all tensors pass where routers chose for themselves.
    pub fn agree(all: &[Self]) -> bool {
        !all.is_empty() && all.iter().all(Self::agrees)
    }

    /// Whether every row of all tensors passes; for experts that were given, or none.
    pub fn rows_agree(all: &[Self]) -> bool {
        !all.is_empty() && all.iter().all(|it| it.median >= MEDIAN && it.worst >= ROW)
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

    /// A row may be off a little where routers chose, whatever its margin where experts are given
    /// it may not, and in no case by much.
    #[test]
    fn single_rows_are_judged_by_who_chose_their_experts() {
        let compare = |apart: f32, margin: f32| {
            let expected = [1.0, 0.0].repeat(50);
            let mut found = expected.clone();
            found[15] = apart;
            let all = [Cosines::of("h".into(), (&found, &expected), 2, &[margin; 50])];
            (Cosines::agree(&all), Cosines::rows_agree(&all))
        };
        assert_eq!(compare(0.03, 1.0), (true, true));
        assert_eq!(compare(0.2, 1.0), (true, false));
        assert_eq!(compare(1.0, 1.0), (false, false));
        assert_eq!(compare(1.0, 0.001), (true, false));
        assert!(!Cosines::agree(&[]) && !Cosines::rows_agree(&[]));
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
