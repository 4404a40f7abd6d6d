//! Launches of row-wise functions: copies, sums, norms, activation, rotation, latent heads.

use super::views::{HeadsArg, MatArg};
use super::{CudaError, DeviceHeads, DeviceMatrix, DeviceVector, Launcher, Shape, ensure, grid};

/// Rotary angles on the device and where the rotated values lie.
#[derive(Clone, Copy, Debug)]
pub struct RopeView {
    /// Cosines, row-major [rows, pairs].
    pub cos: DeviceVector<f32>,
    /// Sines, row-major [rows, pairs].
    pub sin: DeviceVector<f32>,
    /// Rotated pairs of a head.
    pub pairs: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Whether a pair is (2j, 2j + 1); otherwise (j, j + pairs).
    pub interleaved: bool,
}

/// Widths of multi-head latent attention on this device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatentHeads {
    /// Heads.
    pub heads: usize,
    /// Unrotated width of a key.
    pub nope: usize,
    /// Rotated width of a key, shared by the heads.
    pub rope: usize,
    /// Width of a value.
    pub v: usize,
}

/// A sum over ranks, of the rows that one of them owns.
#[derive(Clone, Copy, Debug)]
pub struct RankParts {
    /// This rank's part, [rows, cols].
    pub own: DeviceMatrix,
    /// The parts of all ranks, [ranks, rows, cols] without gaps, of the type of `own`; this rank's
    /// place is not read.
    pub received: u64,
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub ranks: usize,
}

/// A norm to be taken of a sum.
#[derive(Clone, Copy, Debug)]
pub struct RowNorm {
    /// Written, of the shape of the sum.
    pub out: DeviceMatrix,
    /// One factor a column.
    pub weight: DeviceVector<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Up to three matrices of the same shape.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowsArgs {
    out: MatArg,
    x: MatArg,
    y: MatArg,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArgs {
    out: MatArg,
    table: MatArg,
    ids: u64,
    rows: u32,
    cols: u32,
    first: u32,
    table_rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgs {
    out: MatArg,
    x: MatArg,
    delta: MatArg,
    weight: u64,
    rows: u32,
    cols: u32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PartsArgs {
    out: MatArg,
    x: MatArg,
    own: MatArg,
    received: u64,
    weight: u64,
    rows: u32,
    cols: u32,
    ranks: u32,
    rank: u32,
    fresh: u32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    x: HeadsArg,
    cos: u64,
    sin: u64,
    rows: u32,
    heads: u32,
    pairs: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LatentArgs {
    keys: MatArg,
    values: MatArg,
    kv: MatArg,
    k_pe: MatArg,
    rows: u32,
    heads: u32,
    nope: u32,
    rope: u32,
    v: u32,
}

/// Eight values a step where all views allow it.
pub(super) fn vector_width(views: &[&DeviceMatrix]) -> usize {
    if views.iter().all(|view| view.in_vectors()) { 8 } else { 1 }
}

/// Threads side by side along the columns, blocks over rows and columns.
pub(super) fn tiled(rows: usize, cols: usize, width: usize) -> Result<Shape, CudaError> {
    let steps = cols.div_ceil(width).max(1);
    let x = steps.next_power_of_two().min(256);
    let y = 256 / x;
    let columns = u32::try_from(steps.div_ceil(x)).ok().filter(|&blocks| blocks <= 65_535);
    let Some(columns) = columns else {
        return Err(CudaError::shape(format!("{cols} columns in one launch")));
    };
    let blocks = (grid(rows.div_ceil(y))?, columns, 1);
    Ok(Shape { grid: blocks, block: (x as u32, y as u32, 1), shared: 0 })
}

/// A block for each row.
fn by_row(rows: usize, cols: usize, width: usize) -> Result<Shape, CudaError> {
    let threads = cols.div_ceil(width).next_multiple_of(32).clamp(32, 256);
    Shape::new(rows, threads as u32)
}

fn same_shape(name: &str, views: &[&DeviceMatrix]) -> Result<(), CudaError> {
    let same = views.windows(2).all(|pair| pair[0].shape() == pair[1].shape());
    ensure(same, || format!("{name} of {views:?}"))
}

impl Launcher<'_> {
    /// `out = x`, row by row, converted where the types differ.
    pub fn copy(&self, out: &DeviceMatrix, x: &DeviceMatrix) -> Result<(), CudaError> {
        same_shape("copy", &[out, x])?;
        self.rows_launch("copy", (out, x, x), [x.dtype.name(), out.dtype.name()])
    }

    /// `x += y`; the sum is taken in f32 and rounded once.
    pub fn add(&self, x: &DeviceMatrix, y: &DeviceMatrix) -> Result<(), CudaError> {
        same_shape("add", &[x, y])?;
        self.rows_launch("add", (x, x, y), [y.dtype.name(), x.dtype.name()])
    }

    /// `out = silu(gate) * up`; gate and up of one type; `out` may be either of them.
    pub fn silu_mul(
        &self,
        out: &DeviceMatrix,
        gate: &DeviceMatrix,
        up: &DeviceMatrix,
    ) -> Result<(), CudaError> {
        same_shape("silu_mul", &[out, gate, up])?;
        ensure(gate.dtype == up.dtype, || format!("silu_mul of {gate:?} and {up:?}"))?;
        self.rows_launch("silu_mul", (out, gate, up), [gate.dtype.name(), out.dtype.name()])
    }

    /// `out[r] = row` for every row; `row` has one row.
    pub fn repeat_row(&self, out: &DeviceMatrix, row: &DeviceMatrix) -> Result<(), CudaError> {
        let fits = row.rows == 1 && row.cols == out.cols;
        ensure(fits, || format!("repeat_row of {row:?} in {out:?}"))?;
        let row = DeviceMatrix { rows: out.rows, row_stride: 0, ..*row };
        self.rows_launch("copy", (out, &row, &row), [row.dtype.name(), out.dtype.name()])
    }

    /// `x = 0`.
    pub fn zero(&self, x: &DeviceMatrix) -> Result<(), CudaError> {
        self.rows_launch("zero", (x, x, x), [x.dtype.name(), x.dtype.name()])
    }

    fn rows_launch(
        &self,
        name: &str,
        (out, x, y): (&DeviceMatrix, &DeviceMatrix, &DeviceMatrix),
        [from, to]: [&str; 2],
    ) -> Result<(), CudaError> {
        if out.rows == 0 || out.cols == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, x, y]);
        let (rows, cols) = (out.rows as u32, out.cols as u32);
        let args = RowsArgs { out: out.arg(), x: x.arg(), y: y.arg(), rows, cols };
        let name = format!("{name}_{from}_{to}_v{width}");
        self.launch(&name, tiled(out.rows, out.cols, width)?, &args)
    }

    /// `out[r] = table[ids[r] - first]`, or zeros where the id is outside the table.
    pub fn embed(
        &self,
        out: &DeviceMatrix,
        table: &DeviceMatrix,
        ids: DeviceVector<u32>,
        first: usize,
    ) -> Result<(), CudaError> {
        let fits = out.rows == ids.len && out.cols == table.cols;
        ensure(fits, || format!("embed {ids:?} of {table:?} in {out:?}"))?;
        if out.rows == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, table]);
        let args = EmbedArgs {
            out: out.arg(),
            table: table.arg(),
            ids: ids.address,
            rows: out.rows as u32,
            cols: out.cols as u32,
            first: first as u32,
            table_rows: table.rows as u32,
        };
        let name = format!("embed_{}_{}_v{width}", table.dtype.name(), out.dtype.name());
        self.launch(&name, tiled(out.rows, out.cols, width)?, &args)
    }

    /// `out = weight * x / sqrt(mean(x^2) + eps)`, row by row.
    pub fn rms_norm(
        &self,
        out: &DeviceMatrix,
        x: &DeviceMatrix,
        weight: DeviceVector<f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        let fits = out.shape() == x.shape() && weight.len == x.cols;
        ensure(fits, || format!("rms_norm of {x:?} with {weight:?} in {out:?}"))?;
        let name = format!("rms_norm_{}_{}", x.dtype.name(), out.dtype.name());
        self.norm_launch(&name, (out, x, x), weight, eps)
    }

    /// `residual += delta`, then `out = weight * residual / rms(residual)` of the sum as stored.
    pub fn add_rms_norm(
        &self,
        out: &DeviceMatrix,
        (residual, delta): (&DeviceMatrix, &DeviceMatrix),
        weight: DeviceVector<f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        same_shape("add_rms_norm", &[out, residual, delta])?;
        ensure(weight.len == out.cols, || format!("add_rms_norm of {residual:?}, {weight:?}"))?;
        let types = [residual.dtype.name(), delta.dtype.name(), out.dtype.name()];
        let name = format!("add_rms_norm_{}", types.join("_"));
        self.norm_launch(&name, (out, residual, delta), weight, eps)
    }

    /// `x = sum of parts`, or `x +=` unless it is `fresh`; the sum is taken in f32, in the order of
    /// the ranks, and rounded once. Then the norm of `x` as stored, which is of the parts' type.
    pub fn add_parts(
        &self,
        x: &DeviceMatrix,
        parts: &RankParts,
        norm: Option<&RowNorm>,
        fresh: bool,
    ) -> Result<(), CudaError> {
        let RankParts { own, received, rank, ranks } = *parts;
        let norm_fits = |norm: &RowNorm| {
            let RowNorm { out, weight, .. } = norm;
            out.shape() == x.shape() && out.dtype == own.dtype && weight.len == x.cols
        };
        let fits = own.shape() == x.shape() && rank < ranks && norm.is_none_or(norm_fits);
        ensure(fits, || format!("add_parts {parts:?} to {x:?} with {norm:?}"))?;
        if x.rows == 0 || x.cols == 0 {
            return Ok(());
        }
        let parted = DeviceMatrix::packed(received, x.shape(), own.dtype);
        let out = norm.map_or(own, |norm| norm.out);
        let weight = norm.map_or(0, |norm| norm.weight.address);
        let width = match weight.is_multiple_of(16) {
            true => vector_width(&[x, &own, &parted, &out]),
            false => 1,
        };
        let args = PartsArgs {
            out: norm.map_or(MatArg { address: 0, stride: 0 }, |norm| norm.out.arg()),
            x: x.arg(),
            own: own.arg(),
            received,
            weight,
            rows: x.rows as u32,
            cols: x.cols as u32,
            ranks: ranks as u32,
            rank: rank as u32,
            fresh: u32::from(fresh),
            eps: norm.map_or(0.0, |norm| norm.eps),
        };
        let name = format!("add_parts_{}_{}_v{width}", own.dtype.name(), x.dtype.name());
        self.launch(&name, by_row(x.rows, x.cols, width)?, &args)
    }

    fn norm_launch(
        &self,
        name: &str,
        (out, x, delta): (&DeviceMatrix, &DeviceMatrix, &DeviceMatrix),
        weight: DeviceVector<f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        if out.rows == 0 || out.cols == 0 {
            return Ok(());
        }
        let aligned = weight.address.is_multiple_of(16);
        let width = if aligned { vector_width(&[out, x, delta]) } else { 1 };
        let args = NormArgs {
            out: out.arg(),
            x: x.arg(),
            delta: delta.arg(),
            weight: weight.address,
            rows: out.rows as u32,
            cols: out.cols as u32,
            eps,
        };
        self.launch(&format!("{name}_v{width}"), by_row(out.rows, out.cols, width)?, &args)
    }

    /// Rotates in place the first `2 * pairs` values of every head of `x`; a view that starts at
    /// the rotated part of the first head says where they are.
    pub fn rope(&self, x: &DeviceHeads, angles: &RopeView) -> Result<(), CudaError> {
        let RopeView { cos, sin, pairs, heads, interleaved } = *angles;
        let fits = cos.len == x.rows * pairs && sin.len == cos.len;
        ensure(fits, || format!("rope of {x:?} with {angles:?}"))?;
        if x.rows * pairs * heads == 0 {
            return Ok(());
        }
        let args = RopeArgs {
            x: x.arg(),
            cos: cos.address,
            sin: sin.address,
            rows: x.rows as u32,
            heads: heads as u32,
            pairs: pairs as u32,
        };
        let pairing = if interleaved { "interleaved" } else { "half" };
        let name = format!("rope_{pairing}_{}", x.dtype.name());
        self.launch(&name, tiled(x.rows, heads * pairs, 1)?, &args)
    }

    /// Splits `kv` [rows, heads, nope + v] into `keys` [rows, heads, nope + rope], whose last part
    /// is `k_pe` [rows, rope] in every head, and `values` [rows, heads, v]. All of one type, but
    /// for `k_pe`, which is rounded to it.
    pub fn expand_latent(
        &self,
        (keys, values): (&DeviceMatrix, &DeviceMatrix),
        kv: &DeviceMatrix,
        k_pe: &DeviceMatrix,
        dims: &LatentHeads,
    ) -> Result<(), CudaError> {
        let LatentHeads { heads, nope, rope, v } = *dims;
        let shapes = [keys, values, kv, k_pe].map(|matrix| matrix.cols);
        let fits = shapes == [heads * (nope + rope), heads * v, heads * (nope + v), rope]
            && [keys, values].iter().all(|m| m.rows == kv.rows && m.dtype == kv.dtype)
            && k_pe.rows == kv.rows;
        ensure(fits, || {
            format!("expand_latent {dims:?} of {kv:?}, {k_pe:?} in {keys:?}, {values:?}")
        })?;
        if kv.rows == 0 {
            return Ok(());
        }
        let whole = [nope, rope, v].iter().all(|part| part.is_multiple_of(8));
        let width = if whole { vector_width(&[keys, values, kv, k_pe]) } else { 1 };
        let args = LatentArgs {
            keys: keys.arg(),
            values: values.arg(),
            kv: kv.arg(),
            k_pe: k_pe.arg(),
            rows: kv.rows as u32,
            heads: heads as u32,
            nope: nope as u32,
            rope: rope as u32,
            v: v as u32,
        };
        let name = format!("expand_latent_{}_{}_v{width}", kv.dtype.name(), k_pe.dtype.name());
        self.launch(&name, tiled(kv.rows, heads * (nope + rope + v), width)?, &args)
    }
}
