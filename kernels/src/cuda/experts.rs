//! Launches of the products of routed experts whose INT4 weights are decoded inside them. Knows
//! nothing of routers; rows come grouped by expert.

use super::views::MatArg;
use super::{CudaError, DeviceMatrix, DeviceVector, Dtype, Int4Weight, Launcher, Shape, ensure};

/// Rows of every expert start at a multiple of this.
pub const EXPERT_ALIGN: usize = 32;
/// Most experts of one launch.
const MAX_EXPERTS: usize = 512;
/// Inputs that share a scale.
const GROUP: usize = 32;
/// Outputs of a block, and inputs of two stages.
const SIDE: usize = 128;
/// Bytes of a stage: rows, codes and scales of 64 inputs, two barriers.
const STAGE_BYTES: usize = 256 * 128 + 2 * (2048 + 256) + 16;
/// Stages of the ring in shared memory.
const STAGES: usize = 6;

/// Rows in bf16, grouped by expert, in panels of 64 columns: value (r, c) at
/// [`crate::experts::panel_index`].
#[derive(Clone, Copy, Debug)]
pub struct DevicePanels {
    /// Device address of the first value.
    pub address: u64,
    /// Rows that there is room for.
    pub rows: usize,
    /// Columns; a multiple of 64.
    pub cols: usize,
}

/// Equal matrices [out, input] of experts, codes and scales in the order of
/// [`crate::experts::order_int4`].
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights {
    /// Eight codes a word.
    pub codes: DeviceVector<u32>,
    /// bf16 bits.
    pub scales: DeviceVector<u16>,
    /// Matrices.
    pub experts: usize,
    /// Rows of a matrix, outputs; gates and ups both count.
    pub out: usize,
    /// Columns of a matrix, inputs.
    pub input: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ExpertArgs {
    out: u64,
    x: u64,
    codes: u64,
    scales: u64,
    offsets: u64,
    out_stride: i64,
    x_rows: u32,
    experts: u32,
    m: u32,
    k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Int4OrderArgs {
    to_codes: u64,
    to_scales: u64,
    codes: u64,
    scales: u64,
    rows: u32,
    cols: u32,
    up: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatherPanelsArgs {
    out: u64,
    x: MatArg,
    sources: u64,
    end: u64,
    cols: u32,
    x_rows: u32,
    panel_rows: u32,
}

impl ExpertWeights {
    /// Whether the products of this module take so many matrices [out, input] in INT4 with such
    /// groups.
    pub fn fit(experts: usize, [out, input]: [usize; 2], group: usize) -> bool {
        let sides = out > 0 && input > 0 && out.is_multiple_of(SIDE) && input.is_multiple_of(SIDE);
        sides && group == GROUP && (1..=MAX_EXPERTS).contains(&experts)
    }

    fn check(&self) -> Result<(), CudaError> {
        let squares = self.experts * (self.out / 64) * (self.input / 64);
        let values = self.experts * self.out * self.input;
        let fits = Self::fit(self.experts, [self.out, self.input], GROUP)
            && u32::try_from(squares).is_ok()
            && self.codes.len == values / 8
            && self.scales.len == values / GROUP
            && self.codes.address.is_multiple_of(16)
            && self.scales.address.is_multiple_of(16);
        ensure(fits, || format!("experts of {self:?}"))
    }
}

impl Launcher<'_> {
    /// Whether the products of this module run on this device.
    pub fn has_expert_products(&self) -> bool {
        self.kernels.arch().name() == "sm_90a"
    }

    /// Puts codes and scales of a matrix [rows, cols] in the order of
    /// [`crate::experts::order_int4`]. If `gated`, its upper half are gates, its lower half ups.
    pub fn order_int4(
        &self,
        (codes, scales): (DeviceVector<u32>, DeviceVector<u16>),
        weight: &Int4Weight,
        [rows, cols]: [usize; 2],
        gated: bool,
    ) -> Result<(), CudaError> {
        let Int4Weight { packed, scale, group } = *weight;
        let fits = ExpertWeights::fit(1, [rows, cols], group)
            && codes.len == rows * cols / 8
            && packed.len == codes.len
            && scales.len == rows * cols / group
            && scale.len == scales.len;
        ensure(fits, || format!("order_int4 of {weight:?} in {codes:?}, {scales:?}"))?;
        let args = Int4OrderArgs {
            to_codes: codes.address,
            to_scales: scales.address,
            codes: packed.address,
            scales: scale.address,
            rows: rows as u32,
            cols: cols as u32,
            up: if gated { rows as u32 / 2 } else { 0 },
        };
        self.launch("order_int4", Shape::new(codes.len.div_ceil(256), 256)?, &args)
    }

    /// Rows `sources[r]` of `x` as row r of `out`, for all r below the last of `offsets`.
    pub fn gather_panels(
        &self,
        out: &DevicePanels,
        x: &DeviceMatrix,
        (sources, offsets): (DeviceVector<u32>, DeviceVector<u32>),
    ) -> Result<(), CudaError> {
        let fits = x.dtype == Dtype::Bf16
            && x.in_vectors()
            && x.rows > 0
            && out.cols == x.cols
            && out.cols.is_multiple_of(64)
            && sources.len >= out.rows
            && offsets.len > 0
            && u32::try_from(out.rows).is_ok();
        ensure(fits, || format!("gather_panels {sources:?}, {offsets:?} of {x:?} in {out:?}"))?;
        let args = GatherPanelsArgs {
            out: out.address,
            x: x.arg(),
            sources: sources.address,
            end: offsets.address + (offsets.len as u64 - 1) * 4,
            cols: out.cols as u32,
            x_rows: x.rows as u32,
            panel_rows: out.rows as u32,
        };
        let blocks = out.rows.div_ceil(8).clamp(1, self.kernels.multiprocessors() * 8);
        self.launch("gather_panels", Shape::new(blocks, 256)?, &args)
    }

    /// `out = silu(x gate^T) * (x up^T)` for the rows `offsets[e]..offsets[e + 1]` of every expert
    /// e. Padding between the experts is computed too, from whatever it holds.
    pub fn experts_gate_up(
        &self,
        out: &DevicePanels,
        x: &DevicePanels,
        (weights, offsets): (&ExpertWeights, DeviceVector<u32>),
    ) -> Result<(), CudaError> {
        let fits = out.cols * 2 == weights.out && out.rows == x.rows;
        ensure(fits, || format!("gate and up {weights:?} of {x:?} in {out:?}"))?;
        let to = (out.address, out.rows);
        self.experts("experts_gate_up", to, x, (weights, offsets))
    }

    /// `out = x weight^T` likewise, in bf16.
    pub fn experts_down(
        &self,
        out: &DeviceMatrix,
        x: &DevicePanels,
        (weights, offsets): (&ExpertWeights, DeviceVector<u32>),
    ) -> Result<(), CudaError> {
        let fits = out.cols == weights.out
            && out.rows >= x.rows
            && out.dtype == Dtype::Bf16
            && out.in_vectors();
        ensure(fits, || format!("down {weights:?} of {x:?} in {out:?}"))?;
        let to = (out.address, out.row_stride);
        self.experts("experts_down", to, x, (weights, offsets))
    }

    fn experts(
        &self,
        name: &str,
        (out, out_stride): (u64, usize),
        x: &DevicePanels,
        (weights, offsets): (&ExpertWeights, DeviceVector<u32>),
    ) -> Result<(), CudaError> {
        weights.check()?;
        let fits = self.has_expert_products()
            && x.cols == weights.input
            && offsets.len == weights.experts + 1
            && x.address.is_multiple_of(16)
            && u32::try_from(x.rows).is_ok();
        ensure(fits, || format!("{name} {weights:?} of {x:?}, {offsets:?}"))?;
        let args = ExpertArgs {
            out,
            x: x.address,
            codes: weights.codes.address,
            scales: weights.scales.address,
            offsets: offsets.address,
            out_stride: out_stride as i64,
            x_rows: x.rows as u32,
            experts: weights.experts as u32,
            m: weights.out as u32,
            k: weights.input as u32,
        };
        // The ring, the table of rows and tiles, and room to align.
        let shared = STAGES * STAGE_BYTES + 2 * (MAX_EXPERTS + 1) * 4 + 1024;
        let shape = Shape::new(self.kernels.multiprocessors(), 384)?;
        self.launch(name, Shape { shared: shared as u32, ..shape }, &args)
    }
}
