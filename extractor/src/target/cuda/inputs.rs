//! What a batch brings with it, on the GPU: token ids, positions, starts of sequences; and the
//! rotary angles of all positions. Knows no layers.

use kernels::cuda::{CudaError, DeviceBuffer, DeviceHeads, DeviceVector, Dtype, RopeView, upload};
use kernels::rope::RopeTable;

use super::buffer::CudaBuffer;
use super::device::Device;
use super::memory::{self, Load};
use crate::target::spec::RopeSpec;

/// Memory for the inputs of a batch.
pub(super) struct Inputs {
    pub(super) ids: DeviceBuffer,
    positions: DeviceBuffer,
    /// Angles of the rows of a batch.
    cos: DeviceBuffer,
    sin: DeviceBuffer,
    /// Starts of sequences in the halves of a batch.
    starts: [Starts; 2],
    /// Angles of all positions.
    cos_table: DeviceBuffer,
    sin_table: DeviceBuffer,
    /// Positions in the tables.
    limit: usize,
}

/// Angles of the rows of one forward; they lie in [`Inputs`].
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct CudaRope {
    /// First row of the batch.
    first: usize,
    rows: usize,
    pairs: usize,
    interleaved: bool,
}

impl CudaRope {
    /// Angles of `rows` rows from row `first` of the batch on.
    pub(super) fn new(spec: &RopeSpec, first: usize, rows: usize) -> Self {
        Self { first, rows, pairs: spec.dim / 2, interleaved: spec.interleaved }
    }

    /// Rows of the batch up to the last of these.
    pub(super) fn end(&self) -> usize {
        self.first + self.rows
    }
}

/// First query row and first key row of every sequence: the layers of a batch ask for the same.
struct Starts {
    cu_q: DeviceBuffer,
    cu_k: DeviceBuffer,
    sent: [Vec<u32>; 2],
}

impl Inputs {
    pub(super) fn new(device: &Device, load: &Load<'_>) -> Result<Self, CudaError> {
        let spec = &load.spec.rope;
        let limit = load.spec.max_position_embeddings;
        let mut sizes = memory::inputs(load.spec, load.tokens).into_iter();
        let mut take = || DeviceBuffer::new(&device.context, sizes.next().unwrap_or(0));
        let inputs = Self {
            ids: take()?,
            positions: take()?,
            cos: take()?,
            sin: take()?,
            starts: [
                Starts { cu_q: take()?, cu_k: take()?, sent: [Vec::new(), Vec::new()] },
                Starts { cu_q: take()?, cu_k: take()?, sent: [Vec::new(), Vec::new()] },
            ],
            cos_table: take()?,
            sin_table: take()?,
            limit,
        };
        let table = RopeTable::new(spec.dim, spec.theta, spec.yarn().as_ref());
        let frequencies: Vec<f32> = table.inv_freq().iter().map(|&f| f as f32).collect();
        let values = limit * frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(values), Vec::with_capacity(values));
        for position in 0..limit {
            for frequency in &frequencies {
                // The angle is rounded to f32, as everywhere.
                let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        upload(&device.compute, inputs.cos_table.address(), &cos)?;
        upload(&device.compute, inputs.sin_table.address(), &sin)?;
        Ok(inputs)
    }

    /// Brings `positions` to the GPU and looks up their angles.
    pub(super) fn look_up(
        &self,
        device: &Device,
        rope: &CudaRope,
        positions: &[u32],
    ) -> Result<(), CudaError> {
        let (own, pairs) = (rope.first..rope.end(), rope.pairs);
        let table = |table: &DeviceBuffer| table.matrix([self.limit, pairs], Dtype::F32);
        let angles =
            |out: &DeviceBuffer| out.matrix([own.end, pairs], Dtype::F32).row_range(own.clone());
        let sources = self.positions.vector(own.end).range(own.clone());
        let launch = device.launch();
        upload(&device.compute, sources.address, positions)?;
        launch.gather_rows(&angles(&self.cos), &table(&self.cos_table), sources)?;
        launch.gather_rows(&angles(&self.sin), &table(&self.sin_table), sources)
    }

    /// Rotates, in every head of width `head_dim`, the last values that the angles cover.
    pub(super) fn rotate(
        &self,
        device: &Device,
        x: &CudaBuffer,
        rope: &CudaRope,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let CudaRope { first, rows, pairs, interleaved } = *rope;
        if rows == 0 {
            return Ok(());
        }
        let width = x.len() / rows;
        let (end, own) = (rope.end() * pairs, first * pairs..rope.end() * pairs);
        let view = RopeView {
            cos: self.cos.vector(end).range(own.clone()),
            sin: self.sin.vector(end).range(own),
            pairs,
            heads: width / head_dim,
            interleaved,
        };
        let heads = DeviceHeads::of(x.rows(width), head_dim, head_dim - 2 * pairs);
        device.launch().rope(&heads, &view)
    }

    /// First query row and first key row of every sequence, and the totals.
    pub(super) fn send_starts(
        &mut self,
        device: &Device,
        cu_seqlens: &[usize],
        cached: &[usize],
    ) -> Result<[DeviceVector<u32>; 2], CudaError> {
        let starts = starts(cu_seqlens, cached);
        let sequences = cu_seqlens.len();
        // The one that is not sent again goes first when another is needed.
        if self.starts[0].sent == starts {
            self.starts.swap(0, 1);
        }
        if self.starts[1].sent != starts {
            self.starts.swap(0, 1);
            let Starts { cu_q, cu_k, sent } = &mut self.starts[1];
            if sequences * 4 > cu_q.bytes() {
                return Err(CudaError::Shape(format!("{sequences} starts of sequences")));
            }
            sent[0].clear();
            upload(&device.compute, cu_q.address(), &starts[0])?;
            upload(&device.compute, cu_k.address(), &starts[1])?;
            *sent = starts;
        }
        let Starts { cu_q, cu_k, .. } = &self.starts[1];
        Ok([cu_q.vector(sequences), cu_k.vector(sequences)])
    }
}

fn starts(cu_seqlens: &[usize], cached: &[usize]) -> [Vec<u32>; 2] {
    let mut before = 0;
    let queries: Vec<u32> = cu_seqlens.iter().map(|&start| start as u32).collect();
    let key = |(index, &start): (usize, &u32)| {
        let key = start + before;
        before += cached.get(index).map_or(0, |&keys| keys as u32);
        key
    };
    let keys = queries.iter().enumerate().map(key).collect();
    [queries, keys]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_keys_come_before_those_of_the_batch() {
        assert_eq!(starts(&[0, 2, 5], &[]), [vec![0, 2, 5], vec![0, 2, 5]]);
        assert_eq!(starts(&[0, 2, 5], &[7, 1]), [vec![0, 2, 5], vec![0, 9, 13]]);
    }
}
