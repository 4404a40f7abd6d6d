//! What a batch brings with it, on the GPU: token ids, positions, starts of sequences; and the
//! rotary angles of all positions. Knows no layers.

use kernels::cuda::{CudaError, DeviceBuffer, DeviceVector, upload};
use kernels::rope::RopeTable;

use super::device::Device;
use super::memory::{self, Load};

/// Memory for the inputs of a batch.
pub(super) struct Inputs {
    pub(super) ids: DeviceBuffer,
    pub(super) positions: DeviceBuffer,
    /// Angles of the rows of a batch.
    pub(super) cos: DeviceBuffer,
    pub(super) sin: DeviceBuffer,
    /// Starts of sequences in the halves of a batch.
    starts: [Starts; 2],
    /// Angles of all positions.
    pub(super) cos_table: DeviceBuffer,
    pub(super) sin_table: DeviceBuffer,
    /// Positions in the tables.
    pub(super) limit: usize,
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
