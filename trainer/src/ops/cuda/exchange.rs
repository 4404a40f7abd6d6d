//! Exchange between GPUs: through NCCL, or by copy engines where they reach. What is started runs
//! beside the device's other work. Knows no parameters.

use std::sync::Arc;

use burn::backend::Cuda;
use kernels::cuda::{
    Communicator, CudaError, DeviceMatrix, NCCL_ID_BYTES, NcclId, RankParts, context,
};

use super::copies::{Copies, Turn};
use super::engine::{Part, Transfer, run, run_behind_transfers, transfer};
use super::views::{T, empty, exclusive, in_rows, matrix};
use crate::exchange::{Crossings, ExchangeError, ExchangeOps, Way};
use crate::ops::DeviceFault;
use crate::world::{World, WorldError};

/// Connections with the GPUs of the other processes.
#[derive(Clone, Debug)]
pub struct Group {
    nccl: Arc<Communicator>,
    copies: Option<Arc<Copies>>,
}

/// An exchange that was started.
#[derive(Debug)]
pub struct Started {
    /// Read until the end.
    from: T<2>,
    to: To,
}

#[derive(Debug)]
enum To {
    /// Written by NCCL.
    Nccl(T<2>),
    /// The others' copies add up with this process's rows.
    Sum(Turn),
    /// The others' copies lie beside this process's rows.
    Gather(Turn),
}

pub(super) fn fault(error: CudaError) -> ExchangeError {
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
    run(&device, Part::Exchange, |work| work.launch.copy(&into, &view));
    copy
}

impl ExchangeOps for Cuda {
    type Group = Group;
    type Started = Started;

    fn join(
        world: &World,
        device: &Self::Device,
        crossings: &Crossings,
    ) -> Result<Group, ExchangeError> {
        let context = context(device.index).map_err(fault)?;
        let bound = context.bind_to_thread().map_err(|source| CudaError::Driver {
            operation: "make the context current".to_owned(),
            source,
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
        let nccl = Communicator::connect(NcclId::from_bytes(id), place).map_err(fault)?;
        let copies = match crossings.way {
            Way::Nccl => None,
            Way::Auto | Way::Copies => Copies::connect(world, &context, crossings)?,
        };
        Ok(Group { nccl: Arc::new(nccl), copies: copies.map(Arc::new) })
    }

    fn sum(group: &Group, x: T<2>) -> Result<T<2>, ExchangeError> {
        let x = packed(exclusive(x));
        let view = matrix(&x);
        run_behind_transfers(&x.device(), |work| {
            group.nccl.all_reduce(&view, work.launch.stream())
        });
        Ok(x)
    }

    fn gather(group: &Group, x: T<2>) -> Result<T<2>, ExchangeError> {
        let x = packed(x);
        let all = everybodys(group, &x);
        let (from, to) = (matrix(&x), matrix(&all));
        run_behind_transfers(&x.device(), |work| {
            group.nccl.all_gather(&from, &to, work.launch.stream())
        });
        Ok(all)
    }

    fn start_sum(group: &Group, at: usize, x: T<2>) -> Started {
        let from = packed(x);
        let device = from.device();
        let view = matrix(&from);
        if let Some(copies) = &group.copies {
            let turn = copies.start(&device, at, |rank| {
                let rows = view.rows / group.nccl.ranks();
                view.row_range(rank * rows..(rank + 1) * rows)
            });
            return Started { from, to: To::Sum(turn) };
        }
        let own = own_rows(group, &from);
        let (to, nccl) = (matrix(&own), group.nccl.clone());
        let enqueue = Box::new(move |stream: &_| nccl.reduce_scatter(&to, &view, stream));
        transfer(&device, [Transfer { bytes: view.bytes(), enqueue }]);
        Started { from, to: To::Nccl(own) }
    }

    fn start_gather(group: &Group, at: usize, x: T<2>) -> Started {
        let from = packed(x);
        let device = from.device();
        let view = matrix(&from);
        if let Some(copies) = &group.copies {
            let turn = copies.start(&device, at, |_| view);
            return Started { from, to: To::Gather(turn) };
        }
        let all = everybodys(group, &from);
        let (to, nccl) = (matrix(&all), group.nccl.clone());
        let enqueue = Box::new(move |stream: &_| nccl.all_gather(&view, &to, stream));
        transfer(&device, [Transfer { bytes: view.bytes(), enqueue }]);
        Started { from, to: To::Nccl(all) }
    }

    fn finish(group: &Group, Started { from, to }: Started) -> Result<T<2>, ExchangeError> {
        let device = from.device();
        let Some(copies) = &group.copies else {
            run_behind_transfers(&device, |_| Ok(()));
            let To::Nccl(made) = to else { unreachable!("started without copies") };
            return Ok(made);
        };
        let view = matrix(&from);
        match to {
            To::Nccl(_) => unreachable!("started with copies"),
            To::Sum(turn) => {
                let own = own_rows(group, &from);
                let sum = matrix(&own);
                let first = copies.rank() * sum.rows;
                let parts = RankParts {
                    own: view.row_range(first..first + sum.rows),
                    received: copies.received(turn.at),
                    rank: copies.rank(),
                    ranks: group.nccl.ranks(),
                };
                copies
                    .finish(&device, turn, |work| work.launch.add_parts(&sum, &parts, None, true));
                Ok(own)
            }
            To::Gather(turn) => {
                let all = everybodys(group, &from);
                let whole = matrix(&all);
                let received = DeviceMatrix { address: copies.received(turn.at), ..whole };
                let first = copies.rank() * view.rows;
                let last = first + view.rows;
                copies.finish(&device, turn, |work| {
                    work.launch.copy(&whole.row_range(first..last), &view)?;
                    for others in [0..first, last..whole.rows] {
                        let rows = received.row_range(others.clone());
                        work.launch.copy(&whole.row_range(others), &rows)?;
                    }
                    Ok(())
                });
                Ok(all)
            }
        }
    }
}

/// Room for this process's rows of `x`.
fn own_rows(group: &Group, x: &T<2>) -> T<2> {
    let [rows, width] = x.dims();
    empty([rows / group.nccl.ranks(), width], (&x.device(), x.dtype()))
}

/// Room for the rows of all processes, of which `x` has one's.
fn everybodys(group: &Group, x: &T<2>) -> T<2> {
    let [rows, width] = x.dims();
    empty([rows * group.nccl.ranks(), width], (&x.device(), x.dtype()))
}
