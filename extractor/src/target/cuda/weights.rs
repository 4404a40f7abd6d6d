//! Weights from a checkpoint to a GPU: plain matrices in the format of products, routed experts as
//! they are stored. Knows no layers.

use std::time::Instant;

use kernels::cuda::{DeviceBuffer, Dtype, upload};

use super::buffer::{CudaBuffer, CudaLinear};
use super::device::Device;
use super::experts::{CudaExperts, Stack};
use crate::target::error::TargetError;
use crate::target::ops::ExpertShare;
use crate::target::source::Source;
use crate::target::weights::{PackedFormat, Slice, WeightsError};

/// Seconds between two reports.
const REPORT_EVERY: f64 = 5.0;

/// How far loading has come.
#[derive(Debug)]
pub(super) struct Progress {
    start: Instant,
    reported: Instant,
    done: u64,
    total: u64,
}

impl Progress {
    /// Nothing of `total` bytes is loaded.
    pub(super) fn new(total: u64) -> Self {
        let now = Instant::now();
        Self { start: now, reported: now, done: 0, total }
    }

    fn add(&mut self, rank: usize, bytes: usize) {
        self.done += bytes as u64;
        if self.reported.elapsed().as_secs_f64() >= REPORT_EVERY {
            self.reported = Instant::now();
            self.report(rank);
        }
    }

    /// Says how far loading has come, and how fast.
    pub(super) fn report(&self, rank: usize) {
        let (done, total) = (self.done as f64 / 1e9, self.total as f64 / 1e9);
        let rate = done / self.start.elapsed().as_secs_f64().max(1e-9);
        tracing::info!(rank, "weights: {done:.1} of {total:.1} GB, {rate:.2} GB/s");
    }
}

/// Format in which values that are not quantised are held.
fn plain(dtype: Dtype) -> PackedFormat {
    match dtype {
        Dtype::Bf16 => PackedFormat::Bf16,
        Dtype::F32 => PackedFormat::F32,
    }
}

/// Formats of gate and up, and of down, for the experts of a layer: quantised where all of them
/// are, in the same way.
pub(super) fn expert_formats(
    source: &Source,
    prefix: &str,
    share: &ExpertShare,
    dtype: Dtype,
) -> [PackedFormat; 2] {
    let common = |parts: &[&str], dims, slice: &Slice| {
        let mut formats = share.experts.clone().flat_map(|index| {
            parts.iter().map(move |part| {
                source.packed_format(&format!("{prefix}.{index}.{part}"), dims, slice)
            })
        });
        let first = formats.next().flatten();
        first.filter(|_| formats.all(|format| format == first)).unwrap_or(plain(dtype))
    };
    let ((dims, slice), (down_dims, down)) = (share.input(), share.output());
    [common(&["gate_proj", "up_proj"], dims, &slice), common(&["down_proj"], down_dims, &down)]
}

/// A vector in f32 on the device.
pub(super) fn floats(device: &Device, values: &[f32]) -> Result<CudaBuffer, TargetError> {
    let buffer = CudaBuffer::new(&device.context, Dtype::F32, Some(values.len()));
    let mut buffer = device.doing("take memory for weights", buffer)?;
    let sent = buffer
        .set_len(values.len())
        .and_then(|()| upload(&device.compute, buffer.address(), values));
    device.doing("load weights", sent)?;
    Ok(buffer)
}

/// Reads weights to a GPU.
pub(super) struct Loader<'a> {
    pub(super) device: &'a Device,
    pub(super) source: &'a Source,
    /// Whether experts are put in the order of [`Stack::order`].
    pub(super) grouped: bool,
    pub(super) progress: &'a mut Progress,
}

impl Loader<'_> {
    /// A slice of a matrix in the format of products.
    pub(super) fn linear(
        &mut self,
        name: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<CudaLinear, TargetError> {
        let dtype = self.device.dtype;
        let weight = self.source.packed(name, dims, slice, plain(dtype))?;
        let memory = self.send(&weight.codes)?;
        Ok(CudaLinear { memory, out: slice.rows.len(), input: slice.cols.len(), dtype })
    }

    /// A slice of gate and the same of up, one above the other, in the format of products.
    pub(super) fn gate_up(
        &mut self,
        prefix: &str,
        dims: [usize; 2],
        slice: &Slice,
    ) -> Result<CudaLinear, TargetError> {
        let dtype = self.device.dtype;
        let names = [format!("{prefix}.gate_proj"), format!("{prefix}.up_proj")];
        let shape = [slice.rows.len(), slice.cols.len()];
        let stack = self.stack(&names, (plain(dtype), shape), &(dims, slice.clone()))?;
        Ok(CudaLinear { memory: stack.codes, out: 2 * shape[0], input: shape[1], dtype })
    }

    /// A vector in f32.
    pub(super) fn vector(
        &mut self,
        name: &str,
        len: usize,
        range: std::ops::Range<usize>,
    ) -> Result<CudaBuffer, TargetError> {
        let values = self.source.vector(name, len, range)?;
        self.progress.add(self.device.rank, values.len() * 4);
        floats(self.device, &values)
    }

    /// The routed experts of a layer.
    pub(super) fn experts(
        &mut self,
        prefix: &str,
        share: &ExpertShare,
    ) -> Result<CudaExperts, TargetError> {
        let [gate_up, down] = expert_formats(self.source, prefix, share, self.device.dtype);
        let (input, output) = (share.input(), share.output());
        let names = |parts: &[&str]| -> Vec<String> {
            let name = |index, part: &&str| format!("{prefix}.{index}.{part}");
            share.experts.clone().flat_map(|i| parts.iter().map(move |p| name(i, p))).collect()
        };
        let (columns, hidden) = (share.columns.len(), share.hidden);
        let parts = ["gate_proj", "up_proj"];
        let gate_up = self.stack(&names(&parts), (gate_up, [columns, hidden]), &input)?;
        let down = self.stack(&names(&["down_proj"]), (down, [hidden, columns]), &output)?;
        if self.grouped {
            let device = self.device;
            let ordered = gate_up.order(device, parts.len()).and_then(|()| down.order(device, 1));
            device.doing("order the experts", ordered)?;
        }
        Ok(CudaExperts { gate_up, down })
    }

    fn stack(
        &mut self,
        names: &[String],
        (format, dims): (PackedFormat, [usize; 2]),
        (whole, slice): &([usize; 2], Slice),
    ) -> Result<Stack, TargetError> {
        let device = self.device;
        let (codes, scales) = (format.code_bytes(dims), format.scale_bytes(dims));
        let take = |bytes| DeviceBuffer::new(&device.context, bytes * names.len());
        let mut stack = Stack {
            format,
            dims,
            codes: device.doing("take memory for weights", take(codes))?,
            scales: device.doing("take memory for weights", take(scales))?,
            factors: Vec::with_capacity(names.len()),
        };
        for (index, name) in names.iter().enumerate() {
            let weight = self.source.packed(name, *whole, slice, format)?;
            if weight.codes.len() != codes || weight.scales.len() != scales {
                let (expected, found) =
                    (vec![codes, scales], vec![weight.codes.len(), weight.scales.len()]);
                let name = name.clone();
                return Err(WeightsError::WrongShape { name, expected, found }.into());
            }
            let code = stack.codes.address() + (index * codes) as u64;
            let scale = stack.scales.address() + (index * scales) as u64;
            let sent = upload(&device.compute, code, &weight.codes)
                .and_then(|()| upload(&device.compute, scale, &weight.scales));
            device.doing("load weights", sent)?;
            stack.factors.push(weight.factor);
            self.progress.add(device.rank, codes + scales);
        }
        Ok(stack)
    }

    /// Memory that holds `bytes`.
    fn send(&mut self, bytes: &[u8]) -> Result<DeviceBuffer, TargetError> {
        let device = self.device;
        let memory = DeviceBuffer::from_slice(&device.compute, bytes);
        let memory = device.doing("load weights", memory)?;
        self.progress.add(device.rank, bytes.len());
        Ok(memory)
    }
}
