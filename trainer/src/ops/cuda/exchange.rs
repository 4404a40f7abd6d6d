//! Exchange between GPUs through NCCL, in the order of the device's other work. Knows no
//! parameters.

use std::sync::Arc;

use burn::backend::Cuda;
use burn::tensor::Tensor;
use kernels::cuda::{Communicator, CudaError, NCCL_ID_BYTES, NcclId, context};

use super::engine::{Part, run};
use super::views::{T, empty, exclusive, in_rows, matrix};
use crate::exchange::{ExchangeError, ExchangeOps};
use crate::ops::DeviceFault;
use crate::world::{World, WorldError};

fn fault(error: CudaError) -> ExchangeError {
    DeviceFault { exit_code: error.exit_code(), message: error.to_string() }.into()
}

/// The tensor itself if its rows lie end to end; else a copy.
fn packed(x: T<2>) -> T<2> {
    let x = in_rows(x);
    let view = matrix(&x);
    if view.rows <= 1 || view.row_stride == view.cols {
        return x;
    }
    let device = x.device();
    let copy = empty(x.dims(), (&device, x.dtype()));
    let into = matrix(&copy);
    run(&device, Part::Optimizer, |work| work.launch.copy(&into, &view));
    copy
}

impl ExchangeOps for Cuda {
    type Group = Arc<Communicator>;

    fn join(world: &World, device: &Self::Device) -> Result<Self::Group, ExchangeError> {
        let bound = context(device.index).and_then(|context| {
            context.bind_to_thread().map_err(|source| CudaError::Driver {
                operation: "make the context current".to_owned(),
                source,
            })
        });
        bound.map_err(fault)?;
        let own = match world.is_first() {
            true => NcclId::new().map_err(fault)?.to_bytes().to_vec(),
            false => Vec::new(),
        };
        let all = world.exchange(own)?;
        let first = all.into_iter().next().unwrap_or_default();
        let found = first.len();
        let id: [u8; NCCL_ID_BYTES] = first.try_into().map_err(|_| WorldError::OutOfStep {
            rank: 0,
            expected: NCCL_ID_BYTES,
            found,
        })?;
        let place = [world.rank(), world.size()];
        Communicator::connect(NcclId::from_bytes(id), place).map(Arc::new).map_err(fault)
    }

    fn sum(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let x = packed(exclusive(x));
        let view = matrix(&x);
        run(&x.device(), Part::Optimizer, |work| group.all_reduce(&view, work.launch.stream()));
        Ok(x)
    }

    fn sum_part(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let x = packed(x);
        let (device, [rows, width]) = (x.device(), x.dims());
        let own = empty([rows / group.ranks(), width], (&device, x.dtype()));
        let (to, from) = (matrix(&own), matrix(&x));
        run(&device, Part::Optimizer, |work| {
            group.reduce_scatter(&to, &from, work.launch.stream())
        });
        Ok(own)
    }

    fn gather(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let x = packed(x);
        let (device, [rows, width]) = (x.device(), x.dims());
        let all = empty([rows * group.ranks(), width], (&device, x.dtype()));
        let (from, to) = (matrix(&x), matrix(&all));
        run(&device, Part::Optimizer, |work| group.all_gather(&from, &to, work.launch.stream()));
        Ok(all)
    }
}
