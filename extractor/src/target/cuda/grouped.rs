//! Routed experts of a layer in two launches, INT4 weights decoded inside. How many rows an expert
//! has stays on the GPU.

use kernels::cuda::{CudaError, DeviceBuffer, DeviceMatrix, DevicePanels, Dtype, ExpertWeights};

use super::device::Device;
use super::experts::{CudaExperts, ExpertSizes};
use super::routing::Routing;
use crate::target::weights::PackedFormat;

/// Buffers of the work, taken once.
pub(super) struct Grouped {
    sizes: ExpertSizes,
    /// The rows of each expert in panels, and over them, when they are not needed any more, the
    /// outputs.
    rows: DeviceBuffer,
    activations: DeviceBuffer,
}

impl Grouped {
    /// Whether the experts held are decoded inside their products: `formats` of gate and up, and
    /// of down; `held` experts of [columns, hidden].
    pub(super) fn fits(
        formats: [PackedFormat; 2],
        held: usize,
        [columns, hidden]: [usize; 2],
    ) -> bool {
        let shapes = [[2 * columns, hidden], [hidden, columns]];
        formats.into_iter().zip(shapes).all(|(format, shape)| match format {
            PackedFormat::Int4 { group } => ExpertWeights::fit(held, shape, group),
            _ => false,
        })
    }

    /// Values of rows and of activations for batches of `rows`.
    pub(super) fn values(sizes: &ExpertSizes, rows: usize) -> [usize; 2] {
        let all = sizes.grouped_rows(rows);
        [all * sizes.hidden, all * sizes.columns]
    }

    pub(super) fn new(device: &Device, sizes: ExpertSizes, rows: usize) -> Result<Self, CudaError> {
        let [rows, activations] = Self::values(&sizes, rows).map(|values| values * 2);
        let take = |bytes| DeviceBuffer::new(&device.context, bytes);
        Ok(Self { sizes, rows: take(rows)?, activations: take(activations)? })
    }

    /// Outputs of the held experts for the grouped rows of `x`.
    pub(super) fn run(
        &mut self,
        device: &Device,
        x: &DeviceMatrix,
        routing: &Routing,
        experts: &CudaExperts,
    ) -> Result<DeviceMatrix, CudaError> {
        let ExpertSizes { columns, hidden, .. } = self.sizes;
        let rows = self.sizes.grouped_rows(x.rows);
        let panels =
            |buffer: &DeviceBuffer, cols| DevicePanels { address: buffer.address(), rows, cols };
        let (input, activation) = (panels(&self.rows, hidden), panels(&self.activations, columns));
        let out = self.rows.matrix([rows, hidden], Dtype::Bf16);
        let (gate_up, down) = (experts.gate_up.ordered(2), experts.down.ordered(1));
        let (launch, offsets) = (device.launch(), routing.permutation.offsets);
        launch.gather_panels(&input, x, (routing.permutation.sources, offsets))?;
        launch.experts_gate_up(&activation, &input, (&gate_up, offsets))?;
        launch.experts_down(&out, &activation, (&down, offsets))?;
        Ok(out)
    }
}
