//! Sums and parts of tensors across the processes of a run. The default carries them over TCP, as
//! small values; a device overrides it. Knows no model.

use std::cell::Cell;
use std::fmt::Debug;

use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::golden::Difference;
use crate::ops::DeviceFault;
use crate::world::{World, WorldError};

/// An exchange that did not take place.
#[derive(Debug, Error)]
pub enum ExchangeError {
    /// Another process.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A device of this process.
    #[error(transparent)]
    Device(#[from] DeviceFault),
}

impl ExchangeError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::World(error) => error.exit_code(),
            Self::Device(fault) => fault.exit_code,
        }
    }
}

/// How gradients and parameters cross between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// [`Transport::Copies`] where every GPU can reach every other one, else [`Transport::Nccl`].
    #[default]
    Auto,
    /// By NCCL's kernels, over any network.
    Nccl,
    /// By copy engines, within a host.
    Copies,
}

/// What will cross again and again.
#[derive(Clone, Debug, Default)]
pub struct TransferPlan {
    /// How.
    pub transport: Transport,
    /// Bytes of each parameter that crosses in parts; 0 for others.
    pub bytes: Vec<usize>,
}

/// Exchange of matrices without gaps, all processes in the same order.
pub trait ExchangeOps: Backend {
    /// Connection of this process's device with those of the others.
    type Group: Clone + Debug + Send + Sync;

    /// An exchange that was started.
    type Started: Debug + Send;

    /// Connects; returns when all processes are there.
    fn join(
        world: &World,
        device: &Self::Device,
        plan: &TransferPlan,
    ) -> Result<Self::Group, ExchangeError>;

    /// The sum of `x [n, w]` over all processes.
    fn sum(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError>;

    /// The rows `[n, w]` of all processes, by rank.
    fn gather(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError>;

    /// Starts to make this process's rows of the sum of `x [processes * n, w]`, a gradient of the
    /// parameter number `at`. Waits for nobody; may go on beside what the device is given later.
    fn start_sum(group: &Self::Group, at: usize, x: Tensor<Self, 2>) -> Self::Started;

    /// Starts [`Self::gather`] of the parameter number `at` in the same way.
    fn start_gather(group: &Self::Group, at: usize, x: Tensor<Self, 2>) -> Self::Started;

    /// What was started, `[n, w]` or `[processes * n, w]`. All processes finish in the same order.
    fn finish(
        group: &Self::Group,
        started: Self::Started,
    ) -> Result<Tensor<Self, 2>, ExchangeError>;
}

/// Row-major f32 values of every process's matrix.
fn everybodys<B: Backend>(world: &World, x: &Tensor<B, 2>) -> Result<Vec<Vec<f32>>, WorldError> {
    let values: Vec<f32> = x.to_data().iter::<f32>().collect();
    let all = world.exchange(bytemuck::cast_slice(&values).to_vec())?;
    let expected = 4 * values.len();
    let mut lists = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        if bytes.len() != expected {
            return Err(WorldError::OutOfStep { rank, expected, found: bytes.len() });
        }
        lists.push(bytemuck::pod_collect_to_vec(bytes));
    }
    Ok(lists)
}

/// What was asked for, and with which rows.
#[derive(Debug)]
pub enum Later<B: Backend> {
    /// This process's rows of a sum.
    Sum(Tensor<B, 2>),
    /// Everybody's rows.
    Gather(Tensor<B, 2>),
}

impl ExchangeOps for Flex {
    type Group = World;
    type Started = Later<Self>;

    fn join(world: &World, _: &Self::Device, _: &TransferPlan) -> Result<World, ExchangeError> {
        Ok(world.clone())
    }

    fn sum(world: &World, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let mut sum = vec![0.0; x.dims().iter().product()];
        for values in everybodys(world, &x)? {
            sum.iter_mut().zip(values).for_each(|(sum, value): (&mut f32, f32)| *sum += value);
        }
        Ok(Tensor::from_data(TensorData::new(sum, x.dims()), &x.device()))
    }

    fn gather(world: &World, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let all = everybodys(world, &x)?.concat();
        let [rows, width] = x.dims();
        Ok(Tensor::from_data(TensorData::new(all, [world.size() * rows, width]), &x.device()))
    }

    fn start_sum(_: &World, _: usize, x: Tensor<Self, 2>) -> Later<Self> {
        Later::Sum(x)
    }

    fn start_gather(_: &World, _: usize, x: Tensor<Self, 2>) -> Later<Self> {
        Later::Gather(x)
    }

    fn finish(world: &World, started: Later<Self>) -> Result<Tensor<Self, 2>, ExchangeError> {
        match started {
            Later::Sum(x) => {
                let rows = x.dims()[0] / world.size();
                Ok(Self::sum(world, x)?.narrow(0, world.rank() * rows, rows))
            }
            Later::Gather(x) => Self::gather(world, x),
        }
    }
}

/// Exchanges matrices whose sums are known and small enough to be exact in bf16; gives the largest
/// difference of each exchange. All processes call it.
pub fn compare<B: ExchangeOps>(
    world: &World,
    sizes: &[[usize; 2]],
    (device, dtype, transport): (&B::Device, FloatDType, Transport),
) -> Result<Vec<Difference>, ExchangeError> {
    let (own, ranks) = (world.rank(), world.size());
    let bytes = |&[rows, width]: &[usize; 2]| ranks * rows * width * DType::from(dtype).size();
    let plan = TransferPlan { transport, bytes: sizes.iter().map(bytes).collect() };
    let group = B::join(world, device, &plan)?;
    let round = Cell::new(0);
    let value = |rank: usize, at: usize| ((at * 7 + rank * 5 + round.get() * 3) % 16) as f32;
    let matrix = |shape: [usize; 2]| -> Tensor<B, 2> {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|at| value(own, at)).collect();
        let data = TensorData::new(values, shape);
        let exact: Tensor<B, 2> = Tensor::from_data(data, (device, DType::F32));
        exact.cast(dtype)
    };
    let sum = |at: usize| (0..ranks).map(|rank| value(rank, at)).sum::<f32>();
    let mut list = Vec::new();
    let mut note = |name: String, got: Tensor<B, 2>, want: &dyn Fn(usize) -> f32| {
        let values = got.into_data();
        let differences = values.iter::<f32>().enumerate().map(|(at, x)| (x - want(at)).abs());
        list.push(Difference { name, value: f64::from(differences.fold(0.0, f32::max)) });
    };
    // Other values in each round: memory set aside for a parameter is used again.
    for number in 0..3 * sizes.len() {
        round.set(number);
        let at = number % sizes.len();
        let [rows, width] = sizes[at];
        let name = |what: &str| format!("{what} [{rows}, {width}] of {ranks}");
        note(name("sum"), B::sum(&group, matrix([rows, width]))?, &sum);
        let all = B::gather(&group, matrix([rows, width]))?;
        note(name("gather"), all, &|at| value(at / (rows * width), at % (rows * width)));
        let part = B::start_sum(&group, at, matrix([ranks * rows, width]));
        let part = B::finish(&group, part)?;
        note(name("started sum"), part, &|at| sum(own * rows * width + at));
        let all = B::start_gather(&group, at, matrix([rows, width]));
        let all = B::finish(&group, all)?;
        note(name("started gather"), all, &|at| value(at / (rows * width), at % (rows * width)));
    }
    Ok(list)
}
