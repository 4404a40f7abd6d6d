//! Where weights come from: a checkpoint, or chance for benches of shapes. Knows no device.

use std::borrow::Cow;
use std::ops::Range;

use half::bf16;

use super::weights::{Checkpoint, PackedFormat, PackedWeight, Slice, WeightsError};

/// Inputs that share a scale in random INT4 weights, as in Kimi's.
const GROUP: usize = 32;
/// Random bytes come again after so many: no power of two, so that rows differ.
const PERIOD: usize = 1_000_056;
/// Standard deviation of integers spread evenly over -8 to 7.
const INT4_DEVIATION: f32 = 4.6;

/// Where weights come from.
#[derive(Debug)]
pub(super) enum Source {
    Checkpoint(Checkpoint),
    /// Values of about the size that keeps states finite: routed experts in INT4, all else bf16.
    Random,
}

impl Source {
    /// Values of a slice of a weight matrix; see [`Checkpoint::linear`].
    pub(super) fn linear(
        &self,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<Vec<f32>, WeightsError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.linear(name, dims, slice),
            Self::Random => {
                let amplitude = amplitude(name, dims[1]);
                let mut random = Random::new(name);
                Ok((0..slice.elements()).map(|_| random.value() * amplitude).collect())
            }
        }
    }

    /// Values of `range` of a vector of `len` values.
    pub(super) fn vector(
        &self,
        name: &str,
        len: usize,
        range: Range<usize>,
    ) -> Result<Vec<f32>, WeightsError> {
        match self {
            Self::Checkpoint(checkpoint) => {
                let mut values = checkpoint.tensor(name, &[len])?;
                values.truncate(range.end);
                values.drain(..range.start);
                Ok(values)
            }
            Self::Random => {
                let value = if name.contains("norm") { 1.0 } else { 0.0 };
                Ok(vec![value; range.len()])
            }
        }
    }

    /// See [`Checkpoint::packed_format`].
    pub(super) fn packed_format(
        &self,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Option<PackedFormat> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.packed_format(name, dims, slice),
            Self::Random if name.contains(".experts.") => Some(PackedFormat::Int4 { group: GROUP }),
            Self::Random => None,
        }
    }

    /// See [`Checkpoint::packed`].
    pub(super) fn packed<'a>(
        &'a self,
        name: &'a str,
        dims: [usize; 2],
        slice: &Slice,
        format: PackedFormat,
    ) -> Result<PackedWeight<'a>, WeightsError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.packed(name, dims, slice, format),
            Self::Random => Ok(random_packed(name, dims, slice, format)),
        }
    }
}

fn random_packed<'a>(
    name: &str,
    dims: [usize; 2],
    slice: &Slice,
    format: PackedFormat,
) -> PackedWeight<'a> {
    let shape = [slice.rows.len(), slice.cols.len()];
    let (codes, scales) = (format.code_bytes(shape), format.scale_bytes(shape));
    let amplitude = amplitude(name, dims[1]);
    let mut random = Random::new(name);
    let (codes, scales): (Vec<u8>, Vec<u8>) = match format {
        PackedFormat::Int4 { .. } => {
            let words = (0..PERIOD / 8).flat_map(|_| random.next().to_le_bytes());
            let scale = bf16::from_f32(amplitude / INT4_DEVIATION).to_le_bytes();
            (repeat(&words.collect::<Vec<_>>(), codes), repeat(&scale.repeat(1024), scales))
        }
        PackedFormat::F32 => {
            let value = |_| (random.value() * amplitude).to_le_bytes();
            let values: Vec<u8> = (0..PERIOD / 4).flat_map(value).collect();
            (repeat(&values, codes), Vec::new())
        }
        _ => {
            let value = |_| bf16::from_f32(random.value() * amplitude).to_le_bytes();
            let values: Vec<u8> = (0..PERIOD / 2).flat_map(value).collect();
            (repeat(&values, codes), vec![0; scales])
        }
    };
    PackedWeight { format, codes: Cow::Owned(codes), scales: Cow::Owned(scales), factor: 1.0 }
}

fn repeat(block: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&block[..block.len().min(len - bytes.len())]);
    }
    bytes
}

/// Embeddings of size 1 and products that keep the size of their input.
fn amplitude(name: &str, inputs: usize) -> f32 {
    if name.contains("embed_tokens") { 1.0 } else { (inputs as f32).powf(-0.5) }
}

/// A small generator (xorshift64*), the same for the same name.
struct Random(u64);

impl Random {
    fn new(name: &str) -> Self {
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between -1.7 and 1.7 with variance 1.
    fn value(&mut self) -> f32 {
        ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * 1.732
    }
}
