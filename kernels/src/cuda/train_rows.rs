//! Launches of the row-wise functions of training and of the optimizer. Knows nothing of layers.

use super::rows::{tiled, vector_width};
use super::views::{HeadsArg, MatArg};
use super::{CudaError, DeviceHeads, DeviceMatrix, DeviceVector, Dtype, Launcher, Shape, ensure};

/// Blocks of [`Launcher::norm_gradient`], each with a part of the weight's gradient.
pub const NORM_PARTS: usize = 264;
/// Parts of each sum of [`Launcher::squares`].
pub const SQUARE_PARTS: usize = 1024;

/// Operands of the gradient of an RMS norm.
#[derive(Clone, Copy, Debug)]
pub struct NormGradient {
    /// Written, or added to: [rows, cols]; not wanted if `None`.
    pub d_x: Option<DeviceMatrix>,
    /// Written, or added to: [cols].
    pub d_weight: DeviceVector<f32>,
    /// Whether `d_x` and `d_weight` are added to.
    pub accumulate: [bool; 2],
    /// [rows, cols].
    pub x: DeviceMatrix,
    /// [rows, cols], of the type of `x`.
    pub gradient: DeviceMatrix,
    /// [cols].
    pub weight: DeviceVector<f32>,
    /// Scratch: row-major [[`NORM_PARTS`], cols].
    pub partial: DeviceVector<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// A rotation by positions of a table.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Written: [rows, heads, 2 * pairs].
    pub out: DeviceHeads,
    /// Of the type of `out`.
    pub x: DeviceHeads,
    /// Heads of a row.
    pub heads: usize,
    /// Cosines by position, [positions, pairs], f32.
    pub cos: DeviceMatrix,
    /// Sines by position, [positions, pairs], f32.
    pub sin: DeviceMatrix,
    /// Position of each row.
    pub positions: DeviceVector<u32>,
    /// Whether a pair is (2j, 2j + 1); otherwise (j, j + pairs).
    pub interleaved: bool,
    /// 1 forward, -1 for the gradient.
    pub direction: f32,
}

/// A parameter and its moments, updated in place.
#[derive(Clone, Copy, Debug)]
pub struct AdamWViews {
    /// The rounded copy of `master`, or the same memory.
    pub param: DeviceMatrix,
    /// f32.
    pub master: DeviceMatrix,
    /// f32.
    pub first: DeviceMatrix,
    /// f32.
    pub second: DeviceMatrix,
    /// Either type.
    pub gradient: DeviceMatrix,
}

/// Numbers of one AdamW update.
#[derive(Clone, Copy, Debug)]
pub struct AdamWNumbers {
    /// Step size.
    pub rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root.
    pub epsilon: f32,
    /// Factor of the parameter: one less rate times weight decay.
    pub kept: f32,
    /// What the first moment is divided by against its start at zero.
    pub first_part: f32,
    /// The same of the second.
    pub second_part: f32,
    /// Factor of the gradient.
    pub gradient_scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormGradArgs {
    d_x: MatArg,
    x: MatArg,
    gradient: MatArg,
    weight: u64,
    partial: u64,
    rows: u32,
    cols: u32,
    accumulate: u32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnSumArgs {
    out: u64,
    partial: u64,
    parts: u32,
    cols: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GateArgs {
    d_gate: MatArg,
    d_up: MatArg,
    act: MatArg,
    gradient: MatArg,
    gate: MatArg,
    up: MatArg,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct TurnArgs {
    out: HeadsArg,
    x: HeadsArg,
    cos: MatArg,
    sin: MatArg,
    positions: u64,
    rows: u32,
    heads: u32,
    pairs: u32,
    interleaved: u32,
    direction: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumRowsArgs {
    out: MatArg,
    x: MatArg,
    starts: u64,
    sources: u64,
    rows: u32,
    cols: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScatterArgs {
    out: MatArg,
    x: MatArg,
    places: u64,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FactorArgs {
    x: MatArg,
    factor: u64,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SquaresArgs {
    x: MatArg,
    out: u64,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamWArgs {
    param: MatArg,
    master: MatArg,
    first: MatArg,
    second: MatArg,
    gradient: MatArg,
    rows: u32,
    cols: u32,
    numbers: [f32; 8],
}

const NO_MATRIX: MatArg = MatArg { address: 0, stride: 0 };

fn same(views: &[&DeviceMatrix]) -> bool {
    views.windows(2).all(|pair| pair[0].shape() == pair[1].shape())
}

fn one_type(views: &[&DeviceMatrix]) -> bool {
    views.windows(2).all(|pair| pair[0].dtype == pair[1].dtype)
}

impl Launcher<'_> {
    /// Gradients of `x / rms(x) * weight`.
    pub fn norm_gradient(&self, call: &NormGradient) -> Result<(), CudaError> {
        let NormGradient { d_x, d_weight, accumulate, x, gradient, weight, partial, eps } = call;
        let out = d_x.as_ref().unwrap_or(x);
        let fits = same(&[out, x, gradient])
            && one_type(&[out, x, gradient])
            && weight.len == x.cols
            && d_weight.len == x.cols
            && partial.len == NORM_PARTS * x.cols;
        ensure(fits, || format!("{call:?}"))?;
        let width = match weight.address.is_multiple_of(16) {
            true => vector_width(&[out, x, gradient]),
            false => 1,
        };
        let args = NormGradArgs {
            d_x: d_x.map_or(NO_MATRIX, |d_x| d_x.arg()),
            x: x.arg(),
            gradient: gradient.arg(),
            weight: weight.address,
            partial: partial.address,
            rows: x.rows as u32,
            cols: x.cols as u32,
            accumulate: u32::from(accumulate[0]),
            eps: *eps,
        };
        let mut shape = Shape::new(NORM_PARTS, 256)?;
        shape.shared = (x.cols * 4) as u32;
        self.launch(&format!("train_norm_grad_{}_v{width}", x.dtype.name()), shape, &args)?;
        let args = ColumnSumArgs {
            out: d_weight.address,
            partial: partial.address,
            parts: NORM_PARTS as u32,
            cols: x.cols as u32,
            accumulate: u32::from(accumulate[1]),
        };
        self.launch("train_column_sum", Shape::new(x.cols.div_ceil(64), 64)?, &args)
    }

    /// Gradients of `silu(gate) * up`, and that product itself; `out` is the gradients of gate and
    /// up and the product, `inputs` are gate and up. All may be done in place.
    pub fn gate_gradient(
        &self,
        out: [&DeviceMatrix; 3],
        gradient: &DeviceMatrix,
        inputs: [&DeviceMatrix; 2],
    ) -> Result<(), CudaError> {
        let views = [out[0], out[1], out[2], gradient, inputs[0], inputs[1]];
        ensure(same(&views) && one_type(&views), || format!("gate gradient of {views:?}"))?;
        if gradient.rows == 0 {
            return Ok(());
        }
        let (width, rows, cols) = (vector_width(&views), gradient.rows, gradient.cols);
        let [d_gate, d_up, act, gradient, gate, up] = views.map(DeviceMatrix::arg);
        let (row_count, col_count) = (rows as u32, cols as u32);
        let args =
            GateArgs { d_gate, d_up, act, gradient, gate, up, rows: row_count, cols: col_count };
        let name = format!("train_gate_grad_{}_v{width}", out[0].dtype.name());
        self.launch(&name, tiled(rows, cols, width)?, &args)
    }

    /// Rotates every head of each row by the row's position.
    pub fn turn(&self, call: &Turn) -> Result<(), CudaError> {
        let Turn { out, x, heads, cos, sin, positions, interleaved, direction } = call;
        let pairs = cos.cols;
        let fits = out.rows == x.rows
            && positions.len == x.rows
            && out.dtype == x.dtype
            && same(&[cos, sin])
            && cos.dtype == Dtype::F32
            && sin.dtype == Dtype::F32;
        ensure(fits, || format!("{call:?}"))?;
        if x.rows == 0 {
            return Ok(());
        }
        let whole = out.in_vectors() && x.in_vectors() && cos.in_vectors() && sin.in_vectors();
        let width = if whole { 8 } else { 1 };
        let args = TurnArgs {
            out: out.arg(),
            x: x.arg(),
            cos: cos.arg(),
            sin: sin.arg(),
            positions: positions.address,
            rows: x.rows as u32,
            heads: *heads as u32,
            pairs: pairs as u32,
            interleaved: u32::from(*interleaved),
            direction: *direction,
        };
        let name = format!("train_turn_{}_v{width}", x.dtype.name());
        self.launch(&name, tiled(x.rows, heads * pairs, width)?, &args)
    }

    /// Row `r` of `out` becomes the sum of the rows `sources[starts[r]..starts[r + 1]]` of `x`, or
    /// these are added to it.
    pub fn sum_rows(
        &self,
        (out, accumulate): (&DeviceMatrix, bool),
        x: &DeviceMatrix,
        starts: DeviceVector<u32>,
        sources: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let fits = out.cols == x.cols && out.dtype == x.dtype && starts.len == out.rows + 1;
        ensure(fits, || format!("sums of rows of {x:?} in {out:?}"))?;
        if out.rows == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, x]);
        let args = SumRowsArgs {
            out: out.arg(),
            x: x.arg(),
            starts: starts.address,
            sources: sources.address,
            rows: out.rows as u32,
            cols: out.cols as u32,
            accumulate: u32::from(accumulate),
        };
        let name = format!("train_sum_rows_{}_v{width}", x.dtype.name());
        self.launch(&name, tiled(out.rows, out.cols, width)?, &args)
    }

    /// Row `places[r]` of `out` becomes row `r` of `x`. Places differ and are rows of `out`.
    pub fn scatter_rows(
        &self,
        out: &DeviceMatrix,
        x: &DeviceMatrix,
        places: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let fits = out.cols == x.cols && out.dtype == x.dtype && places.len == x.rows;
        ensure(fits, || format!("rows of {x:?} at {places:?} of {out:?}"))?;
        if x.rows == 0 {
            return Ok(());
        }
        let width = vector_width(&[out, x]);
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        let args = ScatterArgs { out: out.arg(), x: x.arg(), places: places.address, rows, cols };
        let name = format!("train_scatter_rows_{}_v{width}", x.dtype.name());
        self.launch(&name, tiled(x.rows, x.cols, width)?, &args)
    }

    /// `x *= factor`, a number on the device.
    pub fn multiply(&self, x: &DeviceMatrix, factor: DeviceVector<f32>) -> Result<(), CudaError> {
        ensure(factor.len == 1, || format!("{x:?} times {} factors", factor.len))?;
        if x.rows == 0 {
            return Ok(());
        }
        let width = vector_width(&[x]);
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        let args = FactorArgs { x: x.arg(), factor: factor.address, rows, cols };
        let name = format!("train_multiply_{}_v{width}", x.dtype.name());
        self.launch(&name, tiled(x.rows, x.cols, width)?, &args)
    }

    /// Sums of squares of `x` in [`SQUARE_PARTS`] parts.
    pub fn squares(&self, out: DeviceVector<f64>, x: &DeviceMatrix) -> Result<(), CudaError> {
        ensure(out.len == SQUARE_PARTS, || format!("squares of {x:?} in {} parts", out.len))?;
        let width = vector_width(&[x]);
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        let args = SquaresArgs { x: x.arg(), out: out.address, rows, cols };
        let name = format!("train_squares_{}_v{width}", x.dtype.name());
        self.launch(&name, Shape::new(SQUARE_PARTS, 256)?, &args)
    }

    /// One AdamW update in place.
    pub fn adamw(&self, views: &AdamWViews, numbers: &AdamWNumbers) -> Result<(), CudaError> {
        let AdamWViews { param, master, first, second, gradient } = views;
        let all = [param, master, first, second, gradient];
        let f32s = [master, first, second].iter().all(|view| view.dtype == Dtype::F32);
        ensure(same(&all) && f32s, || format!("{views:?}"))?;
        let (width, n) = (vector_width(&all), numbers);
        let args = AdamWArgs {
            param: param.arg(),
            master: master.arg(),
            first: first.arg(),
            second: second.arg(),
            gradient: gradient.arg(),
            rows: param.rows as u32,
            cols: param.cols as u32,
            numbers: [
                n.rate,
                n.beta1,
                n.beta2,
                n.epsilon,
                n.kept,
                n.first_part,
                n.second_part,
                n.gradient_scale,
            ],
        };
        let (p, g) = (param.dtype.name(), gradient.dtype.name());
        let name = format!("train_adamw_{p}_{g}_v{width}");
        self.launch(&name, tiled(param.rows, param.cols, width)?, &args)
    }
}
