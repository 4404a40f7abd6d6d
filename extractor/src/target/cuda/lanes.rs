//! Routed experts one after the other: each is decoded when its turn comes, while others multiply.
//! For any format and size. Only the counts of rows come to the host.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::cuda::cudarc::driver::{CudaEvent, CudaStream};
use kernels::cuda::{
    Blas, CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, PinnedBuffer, Product,
};

use super::device::{Device, driver};
use super::experts::{CudaExperts, ExpertSizes, ROW_ALIGN};
use super::gemm::WORKSPACE_BYTES;
use super::routing::Routing;
use crate::target::error::TargetError;

/// Experts under way at the same time.
pub(super) const LANES: usize = 3;

/// Buffers of the experts' work, taken once.
pub(super) struct Lanes {
    sizes: ExpertSizes,
    lanes: Vec<Lane>,
    outputs: DeviceBuffer,
    /// Rows a held expert, on the host.
    counts: Mutex<PinnedBuffer>,
    /// The rows are grouped, and their counts are on the host.
    grouped: CudaEvent,
}

/// One expert at a time, from gathered rows to outputs, on a stream of its own: what one expert
/// leaves idle of the GPU, another uses.
struct Lane {
    stream: Arc<CudaStream>,
    blas: Blas,
    gate_up: DeviceBuffer,
    down: DeviceBuffer,
    input: DeviceBuffer,
    both: DeviceBuffer,
    activation: DeviceBuffer,
    decoded: CudaEvent,
    done: CudaEvent,
}

impl Lane {
    fn new(device: &Device, sizes: [usize; 5]) -> Result<Self, CudaError> {
        let take = |bytes| DeviceBuffer::new(&device.context, bytes);
        let stream = device.context.new_stream().map_err(driver("make a stream"))?;
        let [gate_up, down, input, both, activation] = sizes;
        Ok(Self {
            blas: Blas::new(&stream, WORKSPACE_BYTES)?,
            stream,
            gate_up: take(gate_up)?,
            down: take(down)?,
            input: take(input)?,
            both: take(both)?,
            activation: take(activation)?,
            decoded: device.event()?,
            done: device.event()?,
        })
    }

    /// Brings one expert on the way: gathers its rows of `x`, decodes its weights, multiplies.
    fn expert(
        &mut self,
        device: &Device,
        (out, x): (&DeviceMatrix, &DeviceMatrix),
        sources: DeviceVector<u32>,
        (experts, index): (&CudaExperts, usize),
    ) -> Result<(), CudaError> {
        let (dtype, rows, hidden) = (device.dtype, out.rows, out.cols);
        let launch = device.kernels.on(&device.decode);
        device.decode.wait(&self.done).map_err(driver("order streams"))?;
        let gate_up = experts.gate_up.decoded(&launch, (2 * index, 2), &self.gate_up, dtype)?;
        let down = experts.down.decoded(&launch, (index, 1), &self.down, dtype)?;
        self.decoded.record(&device.decode).map_err(driver("record an event"))?;
        let launch = device.kernels.on(&self.stream);
        launch.gather_rows(&self.input.matrix([sources.len, hidden], dtype), x, sources)?;
        self.stream.wait(&self.decoded).map_err(driver("order streams"))?;
        let columns = gate_up.rows / 2;
        let both = self.both.matrix([rows, 2 * columns], dtype);
        let input = self.input.matrix([rows, hidden], dtype);
        self.blas.matmul(&both, &input, &gate_up, Product::LINEAR)?;
        let activation = self.activation.matrix([rows, columns], dtype);
        let (gate, up) = (both.columns(0..columns), both.columns(columns..2 * columns));
        launch.silu_mul(&activation, &gate, &up)?;
        self.blas.matmul(out, &activation, &down, Product::LINEAR)?;
        self.done.record(&self.stream).map_err(driver("record an event"))
    }
}

impl Lanes {
    /// Values of the buffers of a lane for batches of `rows`, decoded gate and up, decoded down,
    /// inputs, gates and ups, activations; and of the outputs.
    fn sizes(sizes: &ExpertSizes, rows: usize) -> ([usize; 5], usize) {
        let (rows, all) = (rows.next_multiple_of(ROW_ALIGN), sizes.grouped_rows(rows));
        let ExpertSizes { columns, hidden, .. } = *sizes;
        let decoded = [2 * columns * hidden, hidden * columns];
        let lane = [rows * hidden, rows * 2 * columns, rows * columns];
        ([decoded[0], decoded[1], lane[0], lane[1], lane[2]], all * hidden)
    }

    /// Values of all buffers for batches of `rows`.
    pub(super) fn values(sizes: &ExpertSizes, rows: usize) -> usize {
        let (lane, outputs) = Self::sizes(sizes, rows);
        LANES * lane.iter().sum::<usize>() + outputs
    }

    pub(super) fn new(device: &Device, sizes: ExpertSizes, rows: usize) -> Result<Self, CudaError> {
        let (lane, outputs) = Self::sizes(&sizes, rows);
        let size = device.dtype.size();
        let lane = lane.map(|values| values * size);
        let lanes = (0..LANES).map(|_| Lane::new(device, lane));
        Ok(Self {
            sizes,
            lanes: lanes.collect::<Result<_, CudaError>>()?,
            outputs: DeviceBuffer::new(&device.context, outputs * size)?,
            counts: Mutex::new(PinnedBuffer::new(&device.context, sizes.held * 4)?),
            grouped: device.event()?,
        })
    }

    /// Starts to bring the counts of `routing` to the host. What the compute stream is given
    /// after this runs beside the experts.
    pub(super) fn start_counts(
        &self,
        device: &Device,
        counts: DeviceVector<u32>,
    ) -> Result<(), CudaError> {
        let mut pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.start_download(&device.compute, 0, (counts.address, counts.len * 4))?;
        self.grouped.record(&device.compute).map_err(driver("record an event"))
    }

    fn counts(&self, device: &Device) -> Result<Vec<usize>, TargetError> {
        device.wait("wait for the counts of the experts", &self.grouped)?;
        let pinned = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (counts, _) = pinned.as_slice().as_chunks::<4>();
        Ok(counts.iter().map(|&count| u32::from_le_bytes(count) as usize).collect())
    }

    /// Outputs of the held experts for the grouped rows of `x`, which is what it was when the
    /// counts were asked for.
    pub(super) fn run(
        &mut self,
        device: &Device,
        x: &DeviceMatrix,
        routing: &Routing,
        experts: &CudaExperts,
    ) -> Result<DeviceMatrix, TargetError> {
        let counts = self.counts(device)?;
        let total: usize = counts.iter().sum();
        let most = x.rows * self.sizes.top_k.min(self.sizes.held);
        if total > most || counts.iter().any(|&count| count > x.rows) {
            return Err(TargetError::Reply {
                rank: device.rank,
                found: format!("{total} rows for the experts"),
                expected: format!("at most {most} of {} rows", x.rows),
            });
        }
        let enqueued = self.enqueue(device, x, routing, (experts, &counts));
        device.doing("multiply with the experts", enqueued)?;
        Ok(self.outputs(device, 0..self.sizes.grouped_rows(x.rows)))
    }

    fn enqueue(
        &mut self,
        device: &Device,
        x: &DeviceMatrix,
        routing: &Routing,
        (experts, counts): (&CudaExperts, &[usize]),
    ) -> Result<(), CudaError> {
        for lane in &self.lanes {
            lane.stream.wait(&self.grouped).map_err(driver("order streams"))?;
        }
        let (mut start, mut turn) = (0, 0);
        for (expert, &count) in counts.iter().enumerate() {
            if count == 0 {
                continue;
            }
            let sources = routing.permutation.sources.range(start..start + count);
            let end = start + count.next_multiple_of(ROW_ALIGN);
            let out = self.outputs(device, start..end);
            self.lanes[turn % LANES].expert(device, (&out, x), sources, (experts, expert))?;
            (start, turn) = (end, turn + 1);
        }
        for lane in &self.lanes {
            device.compute.wait(&lane.done).map_err(driver("order streams"))?;
        }
        Ok(())
    }

    fn outputs(&self, device: &Device, rows: std::ops::Range<usize>) -> DeviceMatrix {
        let hidden = self.sizes.hidden;
        self.outputs.matrix([rows.end, hidden], device.dtype).row_range(rows)
    }
}
