//! Exchange between GPUs: by copy engines where they reach, beside the device's other work, else
//! through NCCL, in its order. Knows no parameters.

use std::sync::Arc;

use burn::backend::Cuda;
use kernels::cuda::{
    Communicator, CudaError, DeviceMatrix, NCCL_ID_BYTES, NcclId, RankParts, context,
};

use super::copies::{Copies, Turn};
use super::engine::{Part, Work, fault, run};
use super::views::{T, empty, exclusive, in_rows, matrix};
use crate::exchange::{ExchangeError, ExchangeOps, Later, TransferPlan, Transport};
use crate::world::{World, WorldError};

/// Connections with the GPUs of the other processes.
#[derive(Clone, Debug)]
pub enum Group {
    /// By copy engines.
    Copies(Arc<Copies>),
    /// By kernels.
    Nccl(Arc<Communicator>),
}

/// An exchange that was started.
#[derive(Debug)]
pub enum Started {
    /// Left to NCCL: beside products its kernels cost more than they save (docs/adr/0009).
    Nccl(Later<Cuda>),
    /// Parts of the first tensor are on their way, and the others' come.
    Copies(Later<Cuda>, Turn),
}

pub(super) fn refused(error: CudaError) -> ExchangeError {
    fault(&error).into()
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

impl Group {
    fn ranks(&self) -> usize {
        match self {
            Self::Copies(copies) => copies.ranks(),
            Self::Nccl(nccl) => nccl.ranks(),
        }
    }

    /// Room for this process's rows of `x`.
    fn own_rows(&self, x: &T<2>) -> T<2> {
        let [rows, width] = x.dims();
        empty([rows / self.ranks(), width], (&x.device(), x.dtype()))
    }

    /// Room for the rows of all processes, of which `x` has one's.
    fn all_rows(&self, x: &T<2>) -> T<2> {
        let [rows, width] = x.dims();
        empty([rows * self.ranks(), width], (&x.device(), x.dtype()))
    }
}

fn connect_nccl(world: &World) -> Result<Communicator, ExchangeError> {
    let own = match world.is_first() {
        true => NcclId::new().map_err(refused)?.to_bytes().to_vec(),
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
    Communicator::connect(NcclId::from_bytes(id), place).map_err(refused)
}

impl ExchangeOps for Cuda {
    type Group = Group;
    type Started = Started;

    fn join(
        world: &World,
        device: &Self::Device,
        plan: &TransferPlan,
    ) -> Result<Group, ExchangeError> {
        let context = context(device.index).map_err(refused)?;
        let bound = context.bind_to_thread().map_err(|source| CudaError::Driver {
            operation: "make the context current".to_owned(),
            source,
        });
        bound.map_err(refused)?;
        let copies = match plan.transport {
            Transport::Nccl => None,
            Transport::Auto | Transport::Copies => Copies::connect(world, &context, plan)?,
        };
        let group = match copies {
            Some(copies) => Group::Copies(Arc::new(copies)),
            None => Group::Nccl(Arc::new(connect_nccl(world)?)),
        };
        tracing::info!(
            "gradients cross by {}",
            match &group {
                Group::Copies(_) => "copy engines",
                Group::Nccl(_) => "NCCL",
            }
        );
        Ok(group)
    }

    fn sum(group: &Group, x: T<2>) -> Result<T<2>, ExchangeError> {
        let device = x.device();
        match group {
            Group::Nccl(nccl) => {
                let x = packed(exclusive(x));
                let view = matrix(&x);
                let sum = |work: &mut Work<'_>| nccl.all_reduce(&view, work.launch.stream());
                run(&device, Part::Exchange, sum);
                Ok(x)
            }
            Group::Copies(copies) => {
                let all = Self::gather(group, x)?;
                let [rows, width] = all.dims();
                let sum = empty([rows / copies.ranks(), width], (&device, all.dtype()));
                let (to, from) = (matrix(&sum), matrix(&all));
                let parts = RankParts {
                    own: from.row_range(copies.rank() * to.rows..(copies.rank() + 1) * to.rows),
                    received: from.address,
                    rank: copies.rank(),
                    ranks: copies.ranks(),
                };
                run(&device, Part::Exchange, |work| work.launch.add_parts(&to, &parts, None, true));
                Ok(sum)
            }
        }
    }

    fn gather(group: &Group, x: T<2>) -> Result<T<2>, ExchangeError> {
        let x = packed(x);
        let all = group.all_rows(&x);
        let (device, from, to) = (x.device(), matrix(&x), matrix(&all));
        match group {
            Group::Nccl(nccl) => run(&device, Part::Exchange, |work| {
                nccl.all_gather(&from, &to, work.launch.stream())
            }),
            Group::Copies(copies) => copies.gather(&device, &from, &to),
        }
        Ok(all)
    }

    fn start_sum(group: &Group, at: usize, x: T<2>) -> Started {
        let from = packed(x);
        match group {
            Group::Nccl(_) => Started::Nccl(Later::Sum(from)),
            Group::Copies(copies) => {
                let view = matrix(&from);
                let rows = view.rows / copies.ranks();
                let part = |rank: usize| view.row_range(rank * rows..(rank + 1) * rows);
                let turn = copies.start(&from.device(), at, part);
                Started::Copies(Later::Sum(from), turn)
            }
        }
    }

    fn start_gather(group: &Group, at: usize, x: T<2>) -> Started {
        let from = packed(x);
        match group {
            Group::Nccl(_) => Started::Nccl(Later::Gather(from)),
            Group::Copies(copies) => {
                let view = matrix(&from);
                let turn = copies.start(&from.device(), at, |_| view);
                Started::Copies(Later::Gather(from), turn)
            }
        }
    }

    fn finish(group: &Group, started: Started) -> Result<T<2>, ExchangeError> {
        match (group, started) {
            (Group::Nccl(_), Started::Nccl(Later::Gather(x))) => Self::gather(group, x),
            (Group::Nccl(nccl), Started::Nccl(Later::Sum(x))) => {
                let own = group.own_rows(&x);
                let (to, from) = (matrix(&own), matrix(&x));
                run(&x.device(), Part::Exchange, |work| {
                    nccl.reduce_scatter(&to, &from, work.launch.stream())
                });
                Ok(own)
            }
            (Group::Copies(copies), Started::Copies(Later::Sum(from), turn)) => {
                let own = group.own_rows(&from);
                let (sum, view) = (matrix(&own), matrix(&from));
                let first = copies.rank() * sum.rows;
                let parts = RankParts {
                    own: view.row_range(first..first + sum.rows),
                    received: copies.received(turn),
                    rank: copies.rank(),
                    ranks: copies.ranks(),
                };
                copies.finish(&from.device(), turn, |work| {
                    work.launch.add_parts(&sum, &parts, None, true)
                });
                Ok(own)
            }
            (Group::Copies(copies), Started::Copies(Later::Gather(from), turn)) => {
                let all = group.all_rows(&from);
                let (whole, view) = (matrix(&all), matrix(&from));
                let received = DeviceMatrix { address: copies.received(turn), ..whole };
                let first = copies.rank() * view.rows;
                let last = first + view.rows;
                copies.finish(&from.device(), turn, |work| {
                    work.launch.copy(&whole.row_range(first..last), &view)?;
                    for others in [0..first, last..whole.rows] {
                        let rows = received.row_range(others.clone());
                        work.launch.copy(&whole.row_range(others), &rows)?;
                    }
                    Ok(())
                });
                Ok(all)
            }
            _ => unreachable!("finished by the group that started it"),
        }
    }
}
