//! Layouts of the products of routed experts on Hopper, and what those products compute, in plain
//! Rust. Knows nothing of devices.

/// Place of value (row, col) among rows in panels: [cols / 64][rows][64], in which the eight values
/// of a sixteen-byte piece stay together and pieces are exchanged by the row's number modulo eight,
/// as the 128-byte swizzle of the tensor cores wants it.
pub fn panel_index(row: usize, col: usize, rows: usize) -> usize {
    let piece = (col % 64 / 8) ^ (row % 8);
    (col / 64 * rows + row) * 64 + piece * 8 + col % 8
}

/// Codes and scales of an INT4 matrix [rows, cols] with groups of 32, both multiples of 64, in the
/// order in which threads of a warpgroup hold a left operand, by squares of 64 x 64. In a square
/// each of 128 threads has four words, one for sixteen columns; pair i of a word, bits 4 i and
/// 4 i + 16, is register i of m64k16. Sixteen rows are put so that a thread holds outputs 2 j and
/// 2 j + 1; if `gated`, gate j and up j, ups being the lower half of the matrix.
pub fn order_int4(
    (codes, scales): (&[u32], &[u16]),
    [rows, cols]: [usize; 2],
    gated: bool,
) -> (Vec<u32>, Vec<u16>) {
    let row_of = |place: usize| {
        let (block, j, second) = (place / 16, place % 8, place / 8 % 2);
        if gated { block * 8 + j + second * rows / 2 } else { block * 16 + 2 * j + second }
    };
    let code = |row: usize, col: usize| codes[row * cols / 8 + col / 8] >> (4 * (col % 8)) & 15;
    let mut ordered = (Vec::with_capacity(codes.len()), Vec::with_capacity(scales.len()));
    let squares = (0..rows / 64).flat_map(|r| (0..cols / 64).map(move |c| (r * 64, c * 64)));
    for (top, left) in squares {
        for thread in 0..128 {
            let place = top + thread / 32 * 16 + thread % 32 / 4;
            for step in 0..4 {
                let col = left + step * 16 + thread % 4 * 2;
                ordered.0.push((0..4).fold(0, |word, i| {
                    let (row, col) = (row_of(place + i % 2 * 8), col + i / 2 * 8);
                    word | code(row, col) << (4 * i) | code(row, col + 1) << (4 * i + 16)
                }));
            }
            if thread % 4 == 0 {
                let group = |row: usize, i: usize| scales[row * cols / 32 + left / 32 + i];
                for row in [row_of(place), row_of(place + 8)] {
                    ordered.1.extend([group(row, 0), group(row, 1)]);
                }
            }
        }
    }
    ordered
}

/// `out = x weight^T` for one row, summed in f64: `weight` is row-major [out, x.len()].
pub fn product_row(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| {
        row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>() as f32
    };
    weight.chunks_exact(x.len()).map(dot).collect()
}

/// `silu(gate) * up` of a row of which the first half are gates.
pub fn gated(both: &[f32]) -> Vec<f32> {
    let (gate, up) = both.split_at(both.len() / 2);
    gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_hold_every_value_once() {
        let (rows, cols) = (24, 192);
        let mut seen = vec![false; rows * cols];
        for (row, col) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
            let index = panel_index(row, col, rows);
            assert_eq!(index / 64 % rows, row);
            assert!(!std::mem::replace(&mut seen[index], true));
        }
    }

    /// Every code and scale of the matrix is in the order exactly once.
    #[test]
    fn order_loses_nothing() {
        let [rows, cols] = [128, 192];
        for gated in [false, true] {
            let mut counts = vec![0; rows * cols];
            // Four bits of the number of each value at a time.
            for shift in (0..16).step_by(4) {
                let code = |i: usize| (i >> shift) as u32 & 15;
                let word = |w: usize| (0..8).fold(0, |word, i| word | code(w * 8 + i) << (4 * i));
                let codes: Vec<u32> = (0..rows * cols / 8).map(word).collect();
                let scales: Vec<u16> = (0..rows * cols / 32).map(|i| i as u16).collect();
                let (codes, scales) = order_int4((&codes, &scales), [rows, cols], gated);
                for (i, count) in counts.iter_mut().enumerate() {
                    *count |= (codes[i / 8] >> (4 * (i % 8)) & 15) << shift;
                }
                let mut sorted = scales.clone();
                sorted.sort_unstable();
                assert!(sorted.iter().enumerate().all(|(i, &scale)| scale as usize == i));
                assert_eq!(scales.len(), rows * cols / 32);
            }
            counts.sort_unstable();
            assert!(counts.iter().enumerate().all(|(i, &number)| number as usize == i));
        }
    }
}
