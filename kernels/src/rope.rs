//! Rotary position embedding, plain and with YaRN's stretched frequencies. Knows nothing of
//! attention; the softmax factor that belongs to YaRN is computed here because it follows from
//! the same parameters.

/// The numbers of a `rope_scaling` block of type `yarn`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct YarnParams {
    /// How much longer the context became.
    pub factor: f64,
    /// Context length of the original training.
    pub original_max_positions: usize,
    /// Pairs that turn more often than this over the original context keep their frequency.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are slowed down by the whole factor.
    pub beta_slow: f64,
}

impl YarnParams {
    /// The factor `(0.1 * mscale_all_dim * ln(factor) + 1)^2` on the scale of the softmax; 1 when
    /// the context was not lengthened.
    pub fn softmax_factor(&self, mscale_all_dim: f64) -> f64 {
        if self.factor <= 1.0 {
            return 1.0;
        }
        (0.1 * mscale_all_dim * self.factor.ln() + 1.0).powi(2)
    }
}

/// Where the rotated part of each head lies in a row of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RopeLayout {
    /// Heads in a token's row.
    pub heads: usize,
    /// Elements between the rows of two tokens.
    pub token_stride: usize,
    /// Elements between two heads of a token.
    pub head_stride: usize,
    /// Elements from the start of a head to its rotated part.
    pub offset: usize,
}

impl RopeLayout {
    /// Rows of [heads, head_width] without gaps, the rotated part starting at `offset` in a head.
    pub fn packed(heads: usize, head_width: usize, offset: usize) -> Self {
        Self { heads, token_stride: heads * head_width, head_stride: head_width, offset }
    }
}

/// Angular frequency of each pair of rotated elements.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeTable {
    inv_freq: Vec<f64>,
}

/// Cosine and sine of every (token, pair), to be used for all heads and layers of a batch.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeAngles {
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Frequencies `theta^(-2j / dim)` for the `dim / 2` pairs, stretched by YaRN if given.
    pub fn new(dim: usize, theta: f64, yarn: Option<&YarnParams>) -> Self {
        assert!(dim.is_multiple_of(2), "rope: {dim} elements do not form pairs");
        let inv_freq = (0..dim / 2)
            .map(|j| {
                let plain = theta.powf(-(2.0 * j as f64) / dim as f64);
                yarn.map_or(plain, |yarn| stretched(plain, j, &ramp(dim, theta, yarn), yarn))
            })
            .collect();
        Self { inv_freq }
    }

    /// Radians a position, one entry a pair: [dim / 2].
    pub fn inv_freq(&self) -> &[f64] {
        &self.inv_freq
    }

    /// Cosines and sines for the given positions.
    ///
    /// Frequency and angle are rounded to f32, because the models were trained with angles rounded
    /// so: at position 100,000 that shifts them by thousandths of a radian.
    pub fn angles(&self, positions: &[u32]) -> RopeAngles {
        let pairs = self.inv_freq.len();
        let mut cos = Vec::with_capacity(positions.len() * pairs);
        let mut sin = Vec::with_capacity(positions.len() * pairs);
        for &position in positions {
            for &inv_freq in &self.inv_freq {
                let angle = position as f32 * inv_freq as f32;
                let (s, c) = f64::from(angle).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        RopeAngles { pairs, cos, sin }
    }

    /// Rotates the pairs (2j, 2j + 1) of every head in place; `x` holds a row for each position.
    pub fn rotate_interleaved(&self, x: &mut [f32], positions: &[u32], layout: RopeLayout) {
        self.angles(positions).rotate_interleaved(x, layout);
    }

    /// Rotates the pairs (j, j + dim / 2) of every head in place; `x` holds a row for each
    /// position.
    pub fn rotate_half(&self, x: &mut [f32], positions: &[u32], layout: RopeLayout) {
        self.angles(positions).rotate_half(x, layout);
    }
}

/// Pairs between which YaRN blends from the plain to the stretched frequency.
fn ramp(dim: usize, theta: f64, yarn: &YarnParams) -> [f64; 2] {
    let pair_that_turns = |turns: f64| {
        let wavelength = yarn.original_max_positions as f64 / (turns * std::f64::consts::TAU);
        dim as f64 * wavelength.ln() / (2.0 * theta.ln())
    };
    let low = pair_that_turns(yarn.beta_fast).floor().max(0.0);
    let high = pair_that_turns(yarn.beta_slow).ceil().min(dim as f64 - 1.0);
    [low, if low == high { high + 0.001 } else { high }]
}

fn stretched(plain: f64, pair: usize, [low, high]: &[f64; 2], yarn: &YarnParams) -> f64 {
    let blend = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
    plain / yarn.factor * blend + plain * (1.0 - blend)
}

impl RopeAngles {
    /// Tokens the angles were made for.
    pub fn tokens(&self) -> usize {
        self.cos.len() / self.pairs.max(1)
    }

    /// Rotates the pairs (2j, 2j + 1) of every head of every token in place.
    pub fn rotate_interleaved(&self, x: &mut [f32], layout: RopeLayout) {
        self.for_each_head(x, layout, |x, cos, sin| {
            for ((pair, &c), &s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * c - b * s;
                pair[1] = b * c + a * s;
            }
        });
    }

    /// Rotates the pairs (j, j + dim / 2) of every head of every token in place.
    pub fn rotate_half(&self, x: &mut [f32], layout: RopeLayout) {
        self.for_each_head(x, layout, |x, cos, sin| {
            let (first, second) = x.split_at_mut(cos.len());
            for (((x, y), &c), &s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                let (a, b) = (*x, *y);
                *x = a * c - b * s;
                *y = b * c + a * s;
            }
        });
    }

    fn for_each_head(
        &self,
        x: &mut [f32],
        layout: RopeLayout,
        rotate: impl Fn(&mut [f32], &[f32], &[f32]),
    ) {
        let RopeLayout { heads, token_stride, head_stride, offset } = layout;
        if self.pairs == 0 || heads == 0 {
            return;
        }
        let row = (heads - 1) * head_stride + offset + 2 * self.pairs;
        assert!(row <= token_stride, "rope: {row} elements of heads in rows of {token_stride}");
        assert!(offset + 2 * self.pairs <= head_stride || heads == 1, "rope: heads overlap");
        assert_eq!(x.len(), self.tokens() * token_stride, "rope: x is not [tokens, token_stride]");
        let angles = self.cos.chunks_exact(self.pairs).zip(self.sin.chunks_exact(self.pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(token_stride).zip(angles) {
            for head in 0..heads {
                rotate(&mut row[head * head_stride + offset..][..2 * self.pairs], cos, sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIMI_K2_5: YarnParams =
        YarnParams { factor: 64.0, original_max_positions: 4096, beta_fast: 32.0, beta_slow: 1.0 };

    /// Values of the Python engines, computed in f64 from Kimi-K2.5's configuration.
    #[rustfmt::skip]
    const KIMI_K2_5_INV_FREQ: [f64; 32] = [
        1.0, 0.713111085, 0.508527419, 0.36263654, 0.258600136, 0.184410624, 0.13150526,
        0.0937778586, 0.0668740305, 0.043776656, 0.0284279591, 0.0182829556, 0.0116191599,
        0.00727411927, 0.00446584875, 0.00267020339, 0.00153729673, 0.000834655045,
        0.000408645987, 0.000158374991, 1.80702339e-5, 1.28860841e-5, 9.1892094e-6,
        6.55292708e-6, 4.67296494e-6, 3.3323431e-6, 2.3763308e-6, 1.69458784e-6, 1.20842937e-6,
        8.6174438e-7, 6.14519469e-7, 4.38220646e-7,
    ];

    fn assert_near(got: f64, want: f64) {
        assert!((got - want).abs() <= want.abs() * 5e-9, "{got} is not {want}");
    }

    #[test]
    fn yarn_frequencies_of_kimi_k2_5() {
        let table = RopeTable::new(64, 50_000.0, Some(&KIMI_K2_5));
        for (&got, want) in table.inv_freq().iter().zip(KIMI_K2_5_INV_FREQ) {
            assert_near(got, want);
        }
    }

    #[test]
    fn yarn_frequencies_of_kimi_k2_thinking_and_instruct() {
        let thinking = YarnParams { beta_fast: 1.0, ..KIMI_K2_5 };
        let table = RopeTable::new(64, 50_000.0, Some(&thinking));
        assert_near(table.inv_freq()[9], 0.0476886124);
        assert_near(table.inv_freq()[19], 0.00162175991);
        assert_near(table.inv_freq()[20], KIMI_K2_5_INV_FREQ[20]);
        let instruct = RopeTable::new(64, 50_000.0, Some(&YarnParams { factor: 32.0, ..thinking }));
        assert_near(instruct.inv_freq()[19], 0.00162175991);
        assert_near(instruct.inv_freq()[20], 2.0 * KIMI_K2_5_INV_FREQ[20]);
    }

    #[test]
    fn softmax_factor_of_kimi() {
        let scale = 192f64.powf(-0.5);
        assert!((scale * KIMI_K2_5.softmax_factor(1.0) - 0.14467963).abs() < 5e-9);
        let instruct = YarnParams { factor: 32.0, ..KIMI_K2_5 };
        assert!((scale * instruct.softmax_factor(1.0) - 0.13086080).abs() < 5e-9);
    }

    /// Rotation written as multiplication by e^(i * angle), one pair at a time.
    fn rotated(x: &[f32], pairs: &[(usize, usize)], position: u32, inv_freq: &[f64]) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for (&(i, j), &f) in pairs.iter().zip(inv_freq) {
            let angle = f64::from(position) * f;
            let (re, im) = (f64::from(x[i]), f64::from(x[j]));
            out[i] = re * angle.cos() - im * angle.sin();
            out[j] = re * angle.sin() + im * angle.cos();
        }
        out
    }

    proptest! {
        #[test]
        fn both_pairings_match_complex_products(
            (half, heads, before, after) in (1usize..9, 1usize..4, 0usize..5, 0usize..5),
            positions in prop::collection::vec(0u32..3000, 0..5),
            x in prop::collection::vec(-1f32..1.0, 5 * 4 * (5 + 16 + 5)),
        ) {
            let table = RopeTable::new(2 * half, 10_000.0, None);
            let width = before + 2 * half + after;
            let x = &x[..positions.len() * heads * width];
            let layout = RopeLayout::packed(heads, width, before);
            let adjacent: Vec<_> =
                (0..half).map(|j| (before + 2 * j, before + 2 * j + 1)).collect();
            let halves: Vec<_> = (0..half).map(|j| (before + j, before + j + half)).collect();
            let (mut by_adjacent, mut by_halves) = (x.to_vec(), x.to_vec());
            table.rotate_interleaved(&mut by_adjacent, &positions, layout);
            table.rotate_half(&mut by_halves, &positions, layout);
            for (got, pairs) in [(by_adjacent, adjacent), (by_halves, halves)] {
                for (i, (x, got)) in x.chunks(width).zip(got.chunks(width)).enumerate() {
                    let want = rotated(x, &pairs, positions[i / heads], table.inv_freq());
                    for (got, want) in got.iter().zip(want) {
                        prop_assert!((f64::from(*got) - want).abs() < 5e-4);
                    }
                }
            }
        }
    }
}
