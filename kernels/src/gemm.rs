//! Matrix products through the `gemm` crate, with a path of its own for a few rows (decoding).
//! Knows nothing of layers.
//!
//! No result depends on the number of threads. With more than 64 columns and more than 8 rows, a
//! row of the result does not depend on the other rows either.

use std::time::Instant;

use gemm::Parallelism;
use rayon::prelude::*;

pub use crate::Threads;
use crate::simd::{multiply_add, multiversion};

/// Sizes of a product: out is [m, n], the summed index runs over k.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmDims {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
}

/// A matrix inside a larger buffer; element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct GemmView<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> GemmView<'a> {
    /// A row-major [rows, cols] matrix whose rows start `row_stride` elements apart.
    pub fn new(data: &'a [f32], [rows, cols]: [usize; 2], row_stride: usize) -> Self {
        assert_fits(data.len(), [rows, cols], row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The same data with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A row-major matrix inside a larger buffer, to be written.
#[derive(Debug)]
pub struct GemmViewMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> GemmViewMut<'a> {
    /// A row-major [rows, cols] matrix whose rows start `row_stride >= cols` elements apart.
    pub fn new(data: &'a mut [f32], [rows, cols]: [usize; 2], row_stride: usize) -> Self {
        assert_fits(data.len(), [rows, cols], row_stride);
        assert!(row_stride >= cols || rows <= 1, "gemm: rows of the result overlap");
        Self { data, rows, cols, row_stride }
    }
}

fn assert_fits(len: usize, [rows, cols]: [usize; 2], row_stride: usize) {
    let needed = if rows == 0 || cols == 0 {
        Some(0)
    } else {
        (rows - 1).checked_mul(row_stride).and_then(|last| last.checked_add(cols))
    };
    assert!(
        needed.is_some_and(|needed| needed <= len && needed <= isize::MAX as usize),
        "gemm: [{rows}, {cols}] with row stride {row_stride} does not fit {len} elements"
    );
}

/// `out = a x b`, or `out += a x b`.
pub fn matmul(
    out: GemmViewMut<'_>,
    a: GemmView<'_>,
    b: GemmView<'_>,
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "gemm: a has {} columns, b has {} rows", a.cols, b.rows);
    assert_eq!([out.rows, out.cols], [a.rows, b.cols], "gemm: shape of the result");
    let parallelism = match threads.0 {
        0 | 1 => Parallelism::None,
        n => Parallelism::Rayon(n),
    };
    let alpha = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: the constructors of the views checked that every (row, column) they describe lies
    // in their slice and fits isize; the result is borrowed mutably, so it overlaps no operand,
    // and its rows do not overlap each other.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            alpha,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// `out[m, n] = a[m, k] x b[n, k]^T` (or `+=`): a linear layer whose weight is [out, in].
#[expect(clippy::too_many_arguments, reason = "the operands of a product and how to run it")]
pub fn matmul_nt(
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    dims: GemmDims,
    accumulate: bool,
    threads: Threads,
) {
    let GemmDims { m, n, k } = dims;
    assert_lengths("matmul_nt", [out.len(), a.len(), b.len()], dims);
    if m <= FEW_ROWS && m > 0 && n > 0 && k > 0 {
        return few_rows_nt(out, a, b, k, (accumulate, threads));
    }
    let b = GemmView::new(b, [n, k], k).transposed();
    let out = GemmViewMut::new(out, [m, n], n);
    matmul(out, GemmView::new(a, [m, k], k), b, accumulate, threads);
}

/// `out[m, n] = a[m, k] x b[k, n]` (or `+=`).
#[expect(clippy::too_many_arguments, reason = "the operands of a product and how to run it")]
pub fn matmul_nn(
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    dims: GemmDims,
    accumulate: bool,
    threads: Threads,
) {
    let GemmDims { m, n, k } = dims;
    assert_lengths("matmul_nn", [out.len(), a.len(), b.len()], dims);
    let (a, b) = (GemmView::new(a, [m, k], k), GemmView::new(b, [k, n], n));
    matmul(GemmViewMut::new(out, [m, n], n), a, b, accumulate, threads);
}

/// `out[m, n] = a[k, m]^T x b[k, n]` (or `+=`): the gradient of a linear layer's weight.
#[expect(clippy::too_many_arguments, reason = "the operands of a product and how to run it")]
pub fn matmul_tn(
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    dims: GemmDims,
    accumulate: bool,
    threads: Threads,
) {
    let GemmDims { m, n, k } = dims;
    assert_lengths("matmul_tn", [out.len(), a.len(), b.len()], dims);
    let (a, b) = (GemmView::new(a, [k, m], m).transposed(), GemmView::new(b, [k, n], n));
    matmul(GemmViewMut::new(out, [m, n], n), a, b, accumulate, threads);
}

fn assert_lengths(name: &str, [out, a, b]: [usize; 3], GemmDims { m, n, k }: GemmDims) {
    assert_eq!(Some(out), m.checked_mul(n), "{name}: out is not m x n = {m} x {n}");
    assert_eq!(Some(a), m.checked_mul(k), "{name}: a is not of m x k = {m} x {k} elements");
    assert_eq!(Some(b), n.checked_mul(k), "{name}: b is not of n x k = {n} x {k} elements");
}

/// Up to this many rows the `gemm` crate would spend most of its time on packing the weight.
const FEW_ROWS: usize = 8;
/// Rows of the weight in one piece of parallel work.
const PANEL: usize = 64;
const LANES: usize = 16;

fn few_rows_nt(
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    k: usize,
    (accumulate, threads): (bool, Threads),
) {
    let (m, n) = (a.len() / k, b.len() / k);
    let panel = |b: &[f32]| {
        let mut dots = vec![0.0; m * (b.len() / k)];
        few_rows_panel(&mut dots, a, b, k);
        dots
    };
    let panels: Vec<Vec<f32>> = if threads.0 > 1 && n > PANEL {
        b.par_chunks(PANEL * k).map(panel).collect()
    } else {
        b.chunks(PANEL * k).map(panel).collect()
    };
    for (first, dots) in (0..n).step_by(PANEL).zip(&panels) {
        let width = dots.len() / m;
        for (row, dots) in dots.chunks_exact(width).enumerate() {
            let out = &mut out[row * n + first..][..width];
            for (out, dot) in out.iter_mut().zip(dots) {
                *out = if accumulate { *out + dot } else { *dot };
            }
        }
    }
}

/// `dots[i, j] = a[i] . b[j]`, four rows of a at a time.
#[inline(always)]
fn few_rows_body<const FUSED: bool>(dots: &mut [f32], a: &[f32], b: &[f32], k: usize) {
    let width = b.len() / k;
    for (dots, a) in dots.chunks_mut(4 * width).zip(a.chunks(4 * k)) {
        match a.len() / k {
            1 => panel_of::<1, 2, FUSED>(dots, a, b, [k, width]),
            2 => panel_of::<2, 4, FUSED>(dots, a, b, [k, width]),
            3 => panel_of::<3, 4, FUSED>(dots, a, b, [k, width]),
            _ => panel_of::<4, 4, FUSED>(dots, a, b, [k, width]),
        }
    }
}

multiversion! {
    fn few_rows_panel(dots: &mut [f32], a: &[f32], b: &[f32], k: usize) = few_rows_body
}

/// As above, for exactly `M` rows of a, and `STEP` rows of b at once, so that each load of a serves
/// several products.
#[inline(always)]
fn panel_of<const M: usize, const STEP: usize, const FUSED: bool>(
    dots: &mut [f32],
    a: &[f32],
    b: &[f32],
    [k, width]: [usize; 2],
) {
    let a: [&[f32]; M] = std::array::from_fn(|row| &a[row * k..][..k]);
    let steps = b.chunks_exact(STEP * k);
    let rest = steps.remainder();
    let first_left = width - rest.len() / k;
    for (step, b) in steps.enumerate() {
        let b: [&[f32]; STEP] = std::array::from_fn(|j| &b[j * k..][..k]);
        let products = dot_products::<M, STEP, FUSED>(a, b);
        for (row, products) in products.iter().enumerate() {
            dots[row * width + step * STEP..][..STEP].copy_from_slice(products);
        }
    }
    for (j, b) in rest.chunks_exact(k).enumerate() {
        for (row, [product]) in dot_products::<M, 1, FUSED>(a, [b]).into_iter().enumerate() {
            dots[row * width + first_left + j] = product;
        }
    }
}

/// Products of every row of a with every row of b, all of the same length.
#[inline(always)]
fn dot_products<const M: usize, const J: usize, const FUSED: bool>(
    a: [&[f32]; M],
    b: [&[f32]; J],
) -> [[f32; J]; M] {
    let mut sums = [[[0.0f32; LANES]; J]; M];
    let whole = a[0].len() / LANES;
    let a_blocks = a.map(|row| &row.as_chunks::<LANES>().0[..whole]);
    let b_blocks = b.map(|row| &row.as_chunks::<LANES>().0[..whole]);
    for block in 0..whole {
        let a = a_blocks.map(|blocks| blocks[block]);
        let b = b_blocks.map(|blocks| blocks[block]);
        add_products::<M, J, FUSED>(&mut sums, &a, &b);
    }
    // The rest, filled up with zeros: a loop of its own would keep the sums out of registers.
    let last = |row: &[f32]| {
        let mut block = [0.0; LANES];
        let rest = &row[whole * LANES..];
        block[..rest.len()].copy_from_slice(rest);
        block
    };
    add_products::<M, J, FUSED>(&mut sums, &a.map(last), &b.map(last));
    sums.map(|sums| sums.map(|lanes| sum_of_lanes(&lanes)))
}

#[inline(always)]
fn add_products<const M: usize, const J: usize, const FUSED: bool>(
    sums: &mut [[[f32; LANES]; J]; M],
    a: &[[f32; LANES]; M],
    b: &[[f32; LANES]; J],
) {
    for (sums, a) in sums.iter_mut().zip(a) {
        for (sum, b) in sums.iter_mut().zip(b) {
            *sum = std::array::from_fn(|l| multiply_add::<FUSED>(a[l], b[l], sum[l]));
        }
    }
}

/// Adds halves to halves: a chain of sixteen dependent additions would take longer than the
/// products themselves.
#[inline(always)]
fn sum_of_lanes(lanes: &[f32; LANES]) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|l| lanes[l] + lanes[l + 8]);
    let four: [f32; 4] = std::array::from_fn(|l| eight[l] + eight[l + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// The [cols, rows] transpose of a row-major [rows, cols] matrix. A weight that is kept transposed
/// and multiplied by [`matmul_nn`] needs no packing: for 16 rows that doubles the speed.
pub fn transposed(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    const SIDE: usize = 16;
    assert_eq!(Some(x.len()), rows.checked_mul(cols), "transposed: x is not {rows} x {cols}");
    let mut out = vec![0.0; x.len()];
    for first_row in (0..rows).step_by(SIDE) {
        for first_col in (0..cols).step_by(SIDE) {
            for row in first_row..rows.min(first_row + SIDE) {
                for col in first_col..cols.min(first_col + SIDE) {
                    out[col * rows + row] = x[row * cols + col];
                }
            }
        }
    }
    out
}

/// GFLOP/s that the `gemm` crate reaches on a square of 1,536, the best of a few runs in rayon's
/// current pool: the limit that benches compare with.
pub fn peak(threads: Threads) -> f64 {
    const SIDE: usize = 1536;
    let a: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 13) as f32 - 6.0).collect();
    let mut out = vec![0.0; SIDE * SIDE];
    let dims = GemmDims { m: SIDE, n: SIDE, k: SIDE };
    let flop = 2.0 * (SIDE as f64).powi(3);
    let mut best = 0.0f64;
    for _ in 0..6 {
        let start = Instant::now();
        matmul_nt(&mut out, &a, &a, dims, false, threads);
        best = best.max(flop / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed | 1;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 40) as f32) / (1u32 << 24) as f32 - 0.5
            })
            .collect()
    }

    /// Three loops over f64; `a` and `b` give the element at (row, k) and (k, column).
    fn slow(
        GemmDims { m, n, k }: GemmDims,
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) -> Vec<f64> {
        let dot = |i, j| (0..k).map(|p| f64::from(a(i, p)) * f64::from(b(p, j))).sum();
        (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| dot(i, j)).collect()
    }

    fn assert_near(got: &[f32], start: &[f32], want: &[f64], k: usize) {
        let tolerance = 1e-6 + 3e-8 * k as f64;
        for ((&got, &start), want) in got.iter().zip(start).zip(want) {
            let want = want + f64::from(start);
            assert!((f64::from(got) - want).abs() <= tolerance, "{got} is not {want}");
        }
    }

    type Product = fn(&mut [f32], &[f32], &[f32], GemmDims, bool, Threads);

    proptest! {
        #[test]
        fn products_match_three_loops(
            (m, n, k) in (0usize..40, 0usize..150, 0usize..90),
            few in 1usize..6,
            (accumulate, threads, is_few) in (any::<bool>(), 1usize..3, any::<bool>()),
            seed in any::<u64>(),
        ) {
            let dims = GemmDims { m: if is_few { few } else { m }, n, k };
            let GemmDims { m, n, k } = dims;
            let (a, b) = (numbers(m * k, seed), numbers(n * k, seed ^ 7));
            let start = numbers(m * n, seed ^ 99);
            let zeros = vec![0.0; m * n];
            let cases: [(Product, Vec<f64>); 3] = [
                (matmul_nt, slow(dims, |i, p| a[i * k + p], |p, j| b[j * k + p])),
                (matmul_nn, slow(dims, |i, p| a[i * k + p], |p, j| b[p * n + j])),
                (matmul_tn, slow(dims, |i, p| a[p * m + i], |p, j| b[p * n + j])),
            ];
            for (product, want) in cases {
                let mut out = start.clone();
                product(&mut out, &a, &b, dims, accumulate, Threads(threads));
                assert_near(&out, if accumulate { &start } else { &zeros }, &want, k);
            }
        }
    }

    /// The row of a token must not depend on how many others are in its batch. The `gemm` crate
    /// has other orders of summation for results of at most 64 columns, so those are left out.
    #[test]
    fn more_rows_do_not_change_a_bit() {
        for (n, k) in [(576, 576), (130, 65), (65, 1500)] {
            let (a, b) = (numbers(700 * k, 1), numbers(n * k, 2));
            for product in [matmul_nt as Product, matmul_nn] {
                let run = |m: usize| {
                    let mut out = vec![0.0; m * n];
                    let dims = GemmDims { m, n, k };
                    product(&mut out, &a[..m * k], &b, dims, false, Threads::ONE);
                    out
                };
                let all = run(700);
                for m in [16, 17, 64, 129, 500] {
                    assert!(run(m) == all[..m * n], "{m} rows, n {n}, k {k}");
                }
            }
        }
    }

    /// What a run writes must not depend on the machine's number of cores.
    #[test]
    fn threads_do_not_change_a_bit() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for (m, n, k) in [(1, 700, 300), (4, 130, 65), (37, 515, 129), (300, 290, 777)] {
            let dims = GemmDims { m, n, k };
            let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
            for product in [matmul_nt as Product, matmul_nn, matmul_tn] {
                let mut one = vec![0.0; m * n];
                product(&mut one, &a, &b, dims, false, Threads::ONE);
                for threads in [2, 3] {
                    let mut many = vec![0.0; m * n];
                    pool.install(|| product(&mut many, &a, &b, dims, false, Threads(threads)));
                    assert!(one == many, "{dims:?} with {threads} threads");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn transposed_exchanges_rows_and_columns(rows in 0usize..40, cols in 0usize..40) {
            let x = numbers(rows * cols, 3);
            let out = transposed(&x, [rows, cols]);
            for row in 0..rows {
                for col in 0..cols {
                    prop_assert_eq!(out[col * rows + row], x[row * cols + col]);
                }
            }
        }
    }

    #[test]
    fn views_reach_only_their_columns() {
        let a = numbers(3 * 10, 5);
        let b = numbers(4 * 7, 6);
        let mut out = [9.0; 3 * 8];
        let left = GemmView::new(&a[2..], [3, 5], 10);
        let right = GemmView::new(&b[1..], [4, 5], 7).transposed();
        matmul(GemmViewMut::new(&mut out[3..], [3, 4], 8), left, right, false, Threads::ONE);
        let dims = GemmDims { m: 3, n: 4, k: 5 };
        let want = slow(dims, |i, p| a[2 + i * 10 + p], |p, j| b[1 + j * 7 + p]);
        for i in 0..3 {
            assert_near(&out[i * 8 + 3..][..4], &[0.0; 4], &want[i * 4..][..4], 5);
            assert_eq!(out[i * 8..][..3], [9.0; 3]);
        }
    }
}
