//! How the weight of a linear layer is stored, and its decoding. The format is told by the parts
//! present and their number formats, never by a configuration.

use kernels::dequant::{
    Fp8Block, GlobalScale, Int4PackQuantized, NVFP4_BLOCK, Nvfp4, Region, fp8_block,
    int4_pack_quantized, nvfp4,
};

use super::header::Dtype;
use super::{Checkpoint, Part, WeightsError};

/// Inputs that share a scale in the INT4 checkpoints of Kimi.
const INT4_GROUP: usize = 32;
/// Side of the squares that share a scale in the FP8 checkpoints of DeepSeek.
pub(super) const FP8_BLOCK: usize = 128;

/// How the weight of a linear layer is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WeightFormat {
    /// Plain bfloat16.
    Bf16,
    /// Plain half precision.
    F16,
    /// Plain single precision.
    F32,
    /// compressed-tensors `pack-quantized`: eight 4-bit integers a word, bf16 scales.
    Int4PackQuantized,
    /// E4M3 with an f32 factor for each 128 x 128 block.
    Fp8Block,
    /// modelopt NVFP4: E2M1 with E4M3 block scales and a global factor.
    Nvfp4,
    /// compressed-tensors NVFP4: the same with a global divisor.
    Nvfp4PackQuantized,
}

pub(super) fn detect(checkpoint: &Checkpoint, name: &str) -> Option<WeightFormat> {
    let dtype = |suffix: &str| {
        let tensor = checkpoint.tensors.get(&format!("{name}.{suffix}"));
        tensor.map(|tensor| &tensor.entry.dtype)
    };
    match (dtype("weight"), dtype("weight_packed")) {
        (None, Some(Dtype::I32)) => Some(WeightFormat::Int4PackQuantized),
        (None, Some(Dtype::U8)) => Some(WeightFormat::Nvfp4PackQuantized),
        (Some(Dtype::Bf16), _) => Some(WeightFormat::Bf16),
        (Some(Dtype::F16), _) => Some(WeightFormat::F16),
        (Some(Dtype::F32), _) => Some(WeightFormat::F32),
        (Some(Dtype::F8E4m3), _) => Some(WeightFormat::Fp8Block),
        (Some(Dtype::U8), _) => Some(WeightFormat::Nvfp4),
        _ => None,
    }
}

/// Decodes a region that lies inside `shape`.
pub(super) fn decode(
    checkpoint: &Checkpoint,
    name: &str,
    shape: [usize; 2],
    region: &Region,
) -> Result<Vec<f32>, WeightsError> {
    let stored = Stored { checkpoint, name, shape };
    match detect(checkpoint, name) {
        Some(WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32) => stored.plain(region),
        Some(WeightFormat::Int4PackQuantized) => stored.int4(region),
        Some(WeightFormat::Fp8Block) => stored.fp8(region),
        Some(WeightFormat::Nvfp4) => stored.nvfp4(region),
        Some(WeightFormat::Nvfp4PackQuantized) => stored.nvfp4_packed(region),
        None => Err(stored.unknown()),
    }
}

/// The parts of one linear layer's weight.
pub(super) struct Stored<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) name: &'a str,
    pub(super) shape: [usize; 2],
}

impl<'a> Stored<'a> {
    pub(super) fn part(&self, suffix: &str, shape: &[usize]) -> Result<Part<'a>, WeightsError> {
        self.checkpoint.part(&format!("{}.{suffix}", self.name), shape)
    }

    /// Why there is no format: the weight is absent, or stored as something else.
    fn unknown(&self) -> WeightsError {
        for suffix in ["weight", "weight_packed"] {
            let name = format!("{}.{suffix}", self.name);
            if let Some(tensor) = self.checkpoint.tensors.get(&name) {
                let expected = match suffix {
                    "weight" => "BF16, F16, F32, F8_E4M3 or U8",
                    _ => "I32 or U8",
                };
                let found = tensor.entry.dtype.to_string();
                return WeightsError::WrongDtype { name, expected, found };
            }
        }
        self.checkpoint.missing(&format!("{}.weight", self.name))
    }

    /// Parts that would change the decoding must not be overlooked.
    pub(super) fn refuse(&self, suffixes: &[&str]) -> Result<(), WeightsError> {
        let names = suffixes.iter().map(|suffix| format!("{}.{suffix}", self.name));
        match names.into_iter().find(|name| self.checkpoint.tensors.contains_key(name)) {
            Some(name) => Err(WeightsError::Unsupported { name }),
            None => Ok(()),
        }
    }

    fn plain(&self, region: &Region) -> Result<Vec<f32>, WeightsError> {
        let [_, cols] = self.shape;
        let part = self.part("weight", &self.shape)?;
        let mut out = vec![0.0; region.elements()];
        if region.cols.len() == cols {
            part.widen(&mut out, region.rows.start * cols)?;
        } else if !region.cols.is_empty() {
            let rows = out.chunks_exact_mut(region.cols.len()).zip(region.rows.clone());
            for (out, row) in rows {
                part.widen(out, row * cols + region.cols.start)?;
            }
        }
        Ok(out)
    }

    fn int4(&self, region: &Region) -> Result<Vec<f32>, WeightsError> {
        self.refuse(&["weight_zero_point", "weight_g_idx"])?;
        self.check_weight_shape()?;
        let [rows, cols] = self.shape;
        let packed = self.part("weight_packed", &[rows, cols.div_ceil(8)])?;
        let group = self.int4_group();
        let scale = self.part("weight_scale", &[rows, cols.div_ceil(group)])?;
        let weight = Int4PackQuantized {
            packed: packed.of(Dtype::I32, "I32")?,
            scale: scale.of(Dtype::Bf16, "BF16")?,
            shape: self.shape,
            group,
        };
        let mut out = vec![0.0; region.elements()];
        int4_pack_quantized(&mut out, &weight, region);
        Ok(out)
    }

    /// Group size told by the scales; 32 if they do not divide the inputs evenly.
    pub(super) fn int4_group(&self) -> usize {
        let [_, cols] = self.shape;
        let scale = self.checkpoint.tensors.get(&format!("{}.weight_scale", self.name));
        match scale.and_then(|scale| scale.entry.shape.get(1).copied()) {
            Some(groups)
                if groups > 0
                    && groups != cols.div_ceil(INT4_GROUP)
                    && cols.is_multiple_of(groups)
                    && cols > 0 =>
            {
                cols / groups
            }
            _ => INT4_GROUP,
        }
    }

    /// compressed-tensors repeats the shape as a tensor, because packing hides it.
    pub(super) fn check_weight_shape(&self) -> Result<(), WeightsError> {
        let part = self.part("weight_shape", &[2])?;
        // A negative size becomes one that equals none expected.
        let found: Vec<usize> = match part.dtype {
            Dtype::I32 => {
                let (numbers, _) = part.bytes.as_chunks::<4>();
                numbers.iter().map(|&n| i32::from_le_bytes(n) as usize).collect()
            }
            Dtype::I64 => {
                let (numbers, _) = part.bytes.as_chunks::<8>();
                numbers.iter().map(|&n| i64::from_le_bytes(n) as usize).collect()
            }
            _ => return Err(part.wrong_dtype("I32 or I64")),
        };
        if found != self.shape {
            let (name, expected) = (part.name, self.shape.to_vec());
            return Err(WeightsError::WrongShape { name, expected, found });
        }
        Ok(())
    }

    fn fp8(&self, region: &Region) -> Result<Vec<f32>, WeightsError> {
        let [rows, cols] = self.shape;
        let weight = self.part("weight", &self.shape)?;
        let scales = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
        let scale_inv = self.part("weight_scale_inv", &scales)?;
        let weight = Fp8Block {
            weight: weight.of(Dtype::F8E4m3, "F8_E4M3")?,
            scale_inv: scale_inv.of(Dtype::F32, "F32")?,
            shape: self.shape,
            block: FP8_BLOCK,
        };
        let mut out = vec![0.0; region.elements()];
        fp8_block(&mut out, &weight, region);
        Ok(out)
    }

    fn nvfp4(&self, region: &Region) -> Result<Vec<f32>, WeightsError> {
        let factor = self.scalar("weight_scale_2")?;
        self.e2m1("weight", GlobalScale::Multiplier(factor), region)
    }

    fn nvfp4_packed(&self, region: &Region) -> Result<Vec<f32>, WeightsError> {
        let divisor = self.scalar("weight_global_scale")?;
        self.e2m1("weight_packed", GlobalScale::Divisor(divisor), region)
    }

    /// An f32 stored with no dimension, or with one of size 1.
    pub(super) fn scalar(&self, suffix: &str) -> Result<f32, WeightsError> {
        let part = self.part(suffix, &[]).or_else(|_| self.part(suffix, &[1]))?;
        let (numbers, _) = part.of(Dtype::F32, "F32")?.as_chunks::<4>();
        Ok(numbers.first().map_or(f32::NAN, |&number| f32::from_le_bytes(number)))
    }

    fn e2m1(
        &self,
        suffix: &str,
        global: GlobalScale,
        region: &Region,
    ) -> Result<Vec<f32>, WeightsError> {
        let [rows, cols] = self.shape;
        let packed = self.part(suffix, &[rows, cols.div_ceil(2)])?;
        let scale = self.part("weight_scale", &[rows, cols.div_ceil(NVFP4_BLOCK)])?;
        let weight = Nvfp4 {
            packed: packed.of(Dtype::U8, "U8")?,
            scale: scale.of(Dtype::F8E4m3, "F8_E4M3")?,
            global,
            shape: self.shape,
        };
        let mut out = vec![0.0; region.elements()];
        nvfp4(&mut out, &weight, region);
        Ok(out)
    }
}
