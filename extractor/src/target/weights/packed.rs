//! Slices of linear layers as they are stored, for devices that decode them themselves. Knows
//! which slices can be cut out of packed bytes without decoding; the others come as bf16.

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;
use kernels::dequant::NVFP4_BLOCK;

use super::format::{FP8_BLOCK, Stored, WeightFormat};
use super::header::Dtype;
use super::{Checkpoint, Slice, WeightsError, require_inside};

/// How a device holds a weight matrix [out, in].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PackedFormat {
    /// bf16 values.
    Bf16,
    /// f32 values.
    F32,
    /// Eight 4-bit integers a word, and a bf16 scale for `group` neighbouring inputs.
    Int4 {
        /// Inputs that share a scale.
        group: usize,
    },
    /// E4M3, and an f32 factor for each 128 x 128 block.
    Fp8,
    /// E2M1, two a byte, an E4M3 scale for 16 neighbouring inputs, and a factor on everything.
    Nvfp4,
}

impl PackedFormat {
    /// Bytes of the codes of a matrix [out, in].
    pub fn code_bytes(self, [out, input]: [usize; 2]) -> usize {
        match self {
            Self::Bf16 => out * input * 2,
            Self::F32 => out * input * 4,
            Self::Int4 { .. } => out * input.div_ceil(8) * 4,
            Self::Fp8 => out * input,
            Self::Nvfp4 => out * input.div_ceil(2),
        }
    }

    /// Bytes of the scales of a matrix [out, in]; the factor of NVFP4 is not among them.
    pub fn scale_bytes(self, [out, input]: [usize; 2]) -> usize {
        match self {
            Self::Bf16 | Self::F32 => 0,
            Self::Int4 { group } => out * input.div_ceil(group) * 2,
            Self::Fp8 => out.div_ceil(FP8_BLOCK) * input.div_ceil(FP8_BLOCK) * 4,
            Self::Nvfp4 => out * input.div_ceil(NVFP4_BLOCK),
        }
    }

    /// Whether `slice` of a matrix [out, in] starts and ends where codes and scales do.
    fn can_cut(self, [out, input]: [usize; 2], slice: &Slice) -> bool {
        let on = |range: &Range<usize>, size: usize, step: usize| {
            range.start.is_multiple_of(step)
                && (range.end.is_multiple_of(step) || range.end == size)
        };
        match self {
            Self::Bf16 | Self::F32 => true,
            Self::Int4 { group } => on(&slice.cols, input, group.max(8)) && group.is_multiple_of(8),
            Self::Fp8 => on(&slice.rows, out, FP8_BLOCK) && on(&slice.cols, input, FP8_BLOCK),
            Self::Nvfp4 => on(&slice.cols, input, NVFP4_BLOCK),
        }
    }
}

/// The bytes of a slice of a weight matrix.
#[derive(Clone, Debug)]
pub struct PackedWeight<'a> {
    /// How they are to be read.
    pub format: PackedFormat,
    /// Row-major little-endian codes.
    pub codes: Cow<'a, [u8]>,
    /// Row-major little-endian scales.
    pub scales: Cow<'a, [u8]>,
    /// Multiplier of everything; 1 but for NVFP4.
    pub factor: f32,
}

impl Checkpoint {
    /// The quantised format in which a device may hold `slice` of the linear layer `name` whose
    /// whole is `shape`; `None` where it is stored as plain values, or cannot be cut so.
    pub fn packed_format(
        &self,
        name: &str,
        shape: [usize; 2],
        slice: &Slice,
    ) -> Option<PackedFormat> {
        let stored = Stored { checkpoint: self, name, shape };
        let format = match self.format(name) {
            Some(WeightFormat::Int4PackQuantized) => {
                PackedFormat::Int4 { group: stored.int4_group() }
            }
            Some(WeightFormat::Fp8Block) => PackedFormat::Fp8,
            Some(WeightFormat::Nvfp4 | WeightFormat::Nvfp4PackQuantized) => PackedFormat::Nvfp4,
            _ => return None,
        };
        format.can_cut(shape, slice).then_some(format)
    }

    /// `slice` of the linear layer `name` in `format`: plain values, or what
    /// [`Checkpoint::packed_format`] said.
    pub fn packed<'a>(
        &'a self,
        name: &'a str,
        shape: [usize; 2],
        slice: &Slice,
        format: PackedFormat,
    ) -> Result<PackedWeight<'a>, WeightsError> {
        require_inside(name, shape, slice)?;
        let stored = Stored { checkpoint: self, name, shape };
        match format {
            PackedFormat::Bf16 => self.bf16(&stored, slice),
            PackedFormat::F32 => {
                let values = self.linear(name, shape, slice)?;
                Ok(plain(format, Cow::Owned(bytemuck::cast_slice(&values).to_vec())))
            }
            PackedFormat::Int4 { group } => stored.packed_int4(slice, group),
            PackedFormat::Fp8 => stored.packed_fp8(slice),
            PackedFormat::Nvfp4 => stored.packed_nvfp4(slice),
        }
    }

    fn bf16<'a>(
        &'a self,
        stored: &Stored<'_>,
        slice: &Slice,
    ) -> Result<PackedWeight<'a>, WeightsError> {
        let [_, cols] = stored.shape;
        let codes = if self.format(stored.name) == Some(WeightFormat::Bf16) {
            let name = format!("{}.weight", stored.name);
            let part = self.part(&name, &stored.shape)?;
            cut(part.of(Dtype::Bf16, "BF16")?, cols * 2, &slice.rows, &twice(&slice.cols))
        } else {
            let values = self.linear(stored.name, stored.shape, slice)?;
            let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
            Cow::Owned(bytes.collect())
        };
        Ok(plain(PackedFormat::Bf16, codes))
    }
}

fn plain(format: PackedFormat, codes: Cow<'_, [u8]>) -> PackedWeight<'_> {
    PackedWeight { format, codes, scales: Cow::default(), factor: 1.0 }
}

impl<'a> Stored<'a> {
    fn packed_int4(&self, slice: &Slice, group: usize) -> Result<PackedWeight<'a>, WeightsError> {
        self.refuse(&["weight_zero_point", "weight_g_idx"])?;
        self.check_weight_shape()?;
        let [rows, cols] = self.shape;
        let words = cols.div_ceil(8);
        let groups = cols.div_ceil(group);
        let packed = self.part("weight_packed", &[rows, words])?.of(Dtype::I32, "I32")?;
        let scale = self.part("weight_scale", &[rows, groups])?.of(Dtype::Bf16, "BF16")?;
        let bytes = slice.cols.start / 2..slice.cols.end.div_ceil(8) * 4;
        Ok(PackedWeight {
            format: PackedFormat::Int4 { group },
            codes: cut(packed, words * 4, &slice.rows, &bytes),
            scales: cut(scale, groups * 2, &slice.rows, &twice(&blocks(&slice.cols, group))),
            factor: 1.0,
        })
    }

    fn packed_fp8(&self, slice: &Slice) -> Result<PackedWeight<'a>, WeightsError> {
        let [rows, cols] = self.shape;
        let across = cols.div_ceil(FP8_BLOCK);
        let weight = self.part("weight", &self.shape)?.of(Dtype::F8E4m3, "F8_E4M3")?;
        let scales = self.part("weight_scale_inv", &[rows.div_ceil(FP8_BLOCK), across])?;
        let (down, right) = (blocks(&slice.rows, FP8_BLOCK), blocks(&slice.cols, FP8_BLOCK));
        let bytes = right.start * 4..right.end * 4;
        Ok(PackedWeight {
            format: PackedFormat::Fp8,
            codes: cut(weight, cols, &slice.rows, &slice.cols),
            scales: cut(scales.of(Dtype::F32, "F32")?, across * 4, &down, &bytes),
            factor: 1.0,
        })
    }

    fn packed_nvfp4(&self, slice: &Slice) -> Result<PackedWeight<'a>, WeightsError> {
        let [rows, cols] = self.shape;
        let modelopt = self.checkpoint.format(self.name) == Some(WeightFormat::Nvfp4);
        let (codes, factor) = match modelopt {
            true => ("weight", self.scalar("weight_scale_2")?),
            false => ("weight_packed", 1.0 / self.scalar("weight_global_scale")?),
        };
        let across = cols.div_ceil(NVFP4_BLOCK);
        let codes = self.part(codes, &[rows, cols.div_ceil(2)])?.of(Dtype::U8, "U8")?;
        let scales = self.part("weight_scale", &[rows, across])?.of(Dtype::F8E4m3, "F8_E4M3")?;
        let bytes = slice.cols.start / 2..slice.cols.end.div_ceil(2);
        Ok(PackedWeight {
            format: PackedFormat::Nvfp4,
            codes: cut(codes, cols.div_ceil(2), &slice.rows, &bytes),
            scales: cut(scales, across, &slice.rows, &blocks(&slice.cols, NVFP4_BLOCK)),
            factor,
        })
    }
}

/// Rows of `row_bytes`, of each the bytes `cols`; borrowed where they lie together.
fn cut<'a>(
    bytes: &'a [u8],
    row_bytes: usize,
    rows: &Range<usize>,
    cols: &Range<usize>,
) -> Cow<'a, [u8]> {
    // Parts and slices were checked against the shapes, so this is all of the rows.
    let rows = bytes.get(rows.start * row_bytes..rows.end * row_bytes).unwrap_or_default();
    if cols.len() == row_bytes || rows.is_empty() {
        return Cow::Borrowed(rows);
    }
    let mut part = Vec::with_capacity(rows.len() / row_bytes * cols.len());
    for row in rows.chunks_exact(row_bytes) {
        part.extend_from_slice(&row[cols.clone()]);
    }
    Cow::Owned(part)
}

fn twice(range: &Range<usize>) -> Range<usize> {
    range.start * 2..range.end * 2
}

fn blocks(range: &Range<usize>, block: usize) -> Range<usize> {
    range.start / block..range.end.div_ceil(block)
}
