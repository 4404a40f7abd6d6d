//! The choice of experts on a GPU, and the grouping of rows by expert. Knows no weights.

use kernels::cuda::{
    CudaError, DeviceBuffer, DeviceVector, Permutation, RoutingViews, download, upload,
};

use super::device::Device;
use super::experts::{ExpertSizes, ROW_ALIGN};
use crate::target::ops::RouterChoice;

/// Memory of one choice; the next router writes over it.
pub(super) struct RoutingMemory {
    sizes: ExpertSizes,
    indices: DeviceBuffer,
    weights: DeviceBuffer,
    margins: DeviceBuffer,
    counts: DeviceBuffer,
    offsets: DeviceBuffer,
    sources: DeviceBuffer,
    places: DeviceBuffer,
    scratch: DeviceBuffer,
}

/// Where the choice for `rows` rows lies.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct Routing {
    pub(super) views: RoutingViews,
    pub(super) permutation: Permutation,
}

impl RoutingMemory {
    /// Values, of four bytes, of each buffer for batches of `rows`, in the order of the fields.
    pub(super) fn values(sizes: &ExpertSizes, rows: usize) -> [usize; 8] {
        let choices = rows * sizes.top_k;
        let scratch = Permutation::scratch_len(choices, sizes.held);
        let sources = choices + sizes.held * (ROW_ALIGN - 1);
        [choices, choices, rows, sizes.held, sizes.held + 1, sources, choices, scratch]
    }

    pub(super) fn new(device: &Device, sizes: ExpertSizes, rows: usize) -> Result<Self, CudaError> {
        let mut values = Self::values(&sizes, rows).into_iter();
        let mut take = || DeviceBuffer::new(&device.context, values.next().unwrap_or(0) * 4);
        Ok(Self {
            sizes,
            indices: take()?,
            weights: take()?,
            margins: take()?,
            counts: take()?,
            offsets: take()?,
            sources: take()?,
            places: take()?,
            scratch: take()?,
        })
    }

    /// Views for `rows` rows.
    pub(super) fn of(&self, rows: usize) -> Routing {
        let ExpertSizes { first, held, top_k, .. } = self.sizes;
        let choices = rows * top_k;
        Routing {
            views: RoutingViews {
                indices: self.indices.vector(choices),
                weights: self.weights.vector(choices),
                margins: self.margins.vector(rows),
            },
            permutation: Permutation {
                first,
                align: ROW_ALIGN,
                counts: self.counts.vector(held),
                offsets: self.offsets.vector(held + 1),
                sources: self.sources.vector(choices + held * (ROW_ALIGN - 1)),
                places: self.places.vector(choices),
                scratch: self.scratch.vector(Permutation::scratch_len(choices, held)),
            },
        }
    }
}

impl Routing {
    /// Groups rows by the experts chosen.
    pub(super) fn group_rows(self, device: &Device, top_k: usize) -> Result<(), CudaError> {
        device.launch().permute(self.views.indices, top_k, &self.permutation)
    }

    /// Writes a choice of the host's.
    pub(super) fn set(self, device: &Device, choice: &RouterChoice) -> Result<(), CudaError> {
        upload(&device.compute, self.views.indices.address, &choice.indices)?;
        upload(&device.compute, self.views.weights.address, &choice.weights)?;
        upload(&device.compute, self.views.margins.address, &choice.margins)
    }

    /// Copies the choice to the host; the GPU has made it.
    pub(super) fn to_host(self, device: &Device) -> Result<RouterChoice, CudaError> {
        fn values<T: bytemuck::Pod>(
            device: &Device,
            vector: DeviceVector<T>,
        ) -> Result<Vec<T>, CudaError> {
            download(&device.compute, vector)
        }
        Ok(RouterChoice {
            indices: values(device, self.views.indices)?,
            weights: values(device, self.views.weights)?,
            margins: values(device, self.views.margins)?,
        })
    }
}
