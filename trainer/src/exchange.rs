//! Sums and parts of tensors across the processes of a run. The default carries them over TCP, as
//! small values; a device overrides it. Knows no model.

use std::fmt::Debug;

use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use thiserror::Error;

use crate::draft::Param;
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

/// Exchange of matrices without gaps, all processes in the same order.
pub trait ExchangeOps: Backend {
    /// Connection of this process's device with those of the others.
    type Group: Clone + Debug + Send + Sync;

    /// Connects; returns when all processes are there.
    fn join(world: &World, device: &Self::Device) -> Result<Self::Group, ExchangeError>;

    /// The sum of `x [n, w]` over all processes.
    fn sum(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError>;

    /// This process's rows of the sum of `x [processes * n, w]`.
    fn sum_part(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError>;

    /// The rows `[n, w]` of all processes, by rank.
    fn gather(group: &Self::Group, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError>;
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

impl ExchangeOps for Flex {
    type Group = World;

    fn join(world: &World, _device: &Self::Device) -> Result<World, ExchangeError> {
        Ok(world.clone())
    }

    fn sum(world: &World, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let mut sum = vec![0.0; x.dims().iter().product()];
        for values in everybodys(world, &x)? {
            sum.iter_mut().zip(values).for_each(|(sum, value): (&mut f32, f32)| *sum += value);
        }
        Ok(Tensor::from_data(TensorData::new(sum, x.dims()), &x.device()))
    }

    fn sum_part(world: &World, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let rows = x.dims()[0] / world.size();
        Ok(Self::sum(world, x)?.narrow(0, world.rank() * rows, rows))
    }

    fn gather(world: &World, x: Tensor<Self, 2>) -> Result<Tensor<Self, 2>, ExchangeError> {
        let all = everybodys(world, &x)?.concat();
        let [rows, width] = x.dims();
        Ok(Tensor::from_data(TensorData::new(all, [world.size() * rows, width]), &x.device()))
    }
}

/// Rows of a parameter's state that each of `processes` keeps; `None` where each keeps all.
pub(crate) fn own_rows(shape: &[usize], processes: usize) -> Option<usize> {
    let rows = shape.first().copied().unwrap_or(0);
    (processes > 1 && rows.is_multiple_of(processes)).then(|| rows / processes)
}

/// Who keeps which part of each parameter's optimizer state: the rows are divided evenly, a
/// parameter whose rows do not divide is kept whole by everybody.
#[derive(Clone, Debug)]
pub struct Shards<B: ExchangeOps> {
    world: World,
    group: Option<B::Group>,
}

impl<B: ExchangeOps> Shards<B> {
    /// Everything in this process.
    pub fn alone() -> Self {
        Self { world: World::alone(), group: None }
    }

    /// Parts for the processes of `world`.
    pub fn join(world: &World, device: &B::Device) -> Result<Self, ExchangeError> {
        let group = if world.size() > 1 { Some(B::join(world, device)?) } else { None };
        Ok(Self { world: world.clone(), group })
    }

    /// The processes.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Rows of this process's part of a parameter; `None` where it has all of them.
    fn rows(&self, shape: &[usize]) -> Option<usize> {
        own_rows(shape, self.world.size())
    }

    /// Whether sums over parts count this process's one.
    pub fn counts(&self, shape: &[usize]) -> bool {
        self.world.is_first() || self.rows(shape).is_some()
    }

    /// This process's part of a whole parameter.
    pub fn own(&self, param: Param<B>) -> Param<B> {
        let Some(rows) = self.rows(&param.shape()) else { return param };
        let first = self.world.rank() * rows;
        match param {
            Param::Vector(x) => Param::Vector(x.narrow(0, first, rows)),
            Param::Matrix(x) => Param::Matrix(x.narrow(0, first, rows)),
        }
    }

    /// The same in memory of its own: a part of a whole parameter would keep the whole one's.
    pub fn keep(&self, param: Param<B>) -> Param<B> {
        if self.rows(&param.shape()).is_none() {
            return param;
        }
        // Held twice, so that the product can't be made in place.
        match self.own(param) {
            Param::Vector(part) => Param::Vector(part.clone().mul_scalar(1.0)),
            Param::Matrix(part) => Param::Matrix(part.clone().mul_scalar(1.0)),
        }
    }

    /// This process's part of the sum of a gradient over all processes.
    pub fn sum(&self, gradient: Param<B>) -> Result<Param<B>, ExchangeError> {
        let Some(group) = &self.group else { return Ok(gradient) };
        match self.rows(&gradient.shape()) {
            Some(_) => through(gradient, |x| B::sum_part(group, x)),
            None => through(gradient, |x| B::sum(group, x)),
        }
    }

    /// The whole parameter of a shape from everybody's parts.
    pub fn whole(&self, part: Param<B>, shape: &[usize]) -> Result<Param<B>, ExchangeError> {
        match (&self.group, self.rows(shape)) {
            (Some(group), Some(_)) => through(part, |x| B::gather(group, x)),
            _ => Ok(part),
        }
    }
}

/// Treats a vector as a matrix of one column.
fn through<B: Backend>(
    param: Param<B>,
    exchange: impl FnOnce(Tensor<B, 2>) -> Result<Tensor<B, 2>, ExchangeError>,
) -> Result<Param<B>, ExchangeError> {
    Ok(match param {
        Param::Matrix(x) => Param::Matrix(exchange(x)?),
        Param::Vector(x) => {
            let rows = x.dims()[0];
            let x = exchange(x.reshape([rows, 1]))?;
            let rows = x.dims()[0];
            Param::Vector(x.reshape([rows]))
        }
    })
}

/// Exchanges matrices whose sums are known and small enough to be exact in bf16; gives the largest
/// difference of each exchange. All processes call it.
pub fn compare<B: ExchangeOps>(
    world: &World,
    (device, dtype): (&B::Device, FloatDType),
) -> Result<Vec<Difference>, ExchangeError> {
    let group = B::join(world, device)?;
    let (own, ranks) = (world.rank(), world.size());
    let value = |rank: usize, at: usize| ((at * 7 + rank * 5) % 16) as f32;
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
    for [rows, width] in [[1, 1], [3, 5], [7, 33], [64, 100], [2048, 512]] {
        let name = |what: &str| format!("{what} [{rows}, {width}] of {ranks}");
        note(name("sum"), B::sum(&group, matrix([rows, width]))?, &sum);
        let part = B::sum_part(&group, matrix([ranks * rows, width]))?;
        note(name("sum_part"), part, &|at| sum(own * rows * width + at));
        let all = B::gather(&group, matrix([rows, width]))?;
        note(name("gather"), all, &|at| value(at / (rows * width), at % (rows * width)));
    }
    Ok(list)
}
