//! Which process keeps which part of the parameters, and how whole gradients become parts and parts
//! become whole parameters. Knows no transport and no update.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};

use crate::draft::Param;
use crate::exchange::{ExchangeError, ExchangeOps, TransferPlan, Transport};
use crate::world::World;

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

    /// Parts for the processes of `world` of parameters of these shapes, whose matrices are of type
    /// `dtype`.
    pub fn join(
        world: &World,
        device: &B::Device,
        (shapes, dtype, transport): (&[(String, Vec<usize>)], FloatDType, Transport),
    ) -> Result<Self, ExchangeError> {
        if world.size() == 1 {
            return Ok(Self::alone());
        }
        let bytes = |(_, shape): &(String, Vec<usize>)| match own_rows(shape, world.size()) {
            Some(_) => shape.iter().product::<usize>() * value_bytes(shape, dtype),
            None => 0,
        };
        let plan = TransferPlan { transport, bytes: shapes.iter().map(bytes).collect() };
        let group = B::join(world, device, &plan)?;
        Ok(Self { world: world.clone(), group: Some(group) })
    }

    /// The processes.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Rows of this process's part of a parameter; `None` where it has all of them.
    fn rows(&self, shape: &[usize]) -> Option<usize> {
        own_rows(shape, self.world.size())
    }

    /// Shape of this process's part of a parameter.
    pub fn part(&self, shape: &[usize]) -> Vec<usize> {
        let mut part = shape.to_vec();
        if let (Some(rows), Some(first)) = (self.rows(shape), part.first_mut()) {
            *first = rows;
        }
        part
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

    /// Whether gradients of this shape cross in parts.
    pub fn crosses(&self, shape: &[usize]) -> bool {
        self.group.is_some() && self.rows(shape).is_some()
    }

    /// Starts to sum the gradient of the parameter number `at` over all processes.
    pub fn start_sum(&self, at: usize, gradient: Param<B>) -> InFlight<B> {
        match &self.group {
            Some(group) if self.crosses(&gradient.shape()) => {
                let (x, as_vector) = in_rows(gradient, self.world.size());
                InFlight::Started { started: B::start_sum(group, at, x), as_vector }
            }
            _ => InFlight::Waiting(gradient),
        }
    }

    /// This process's part of the sum.
    pub fn finish_sum(&self, crossing: InFlight<B>) -> Result<Param<B>, ExchangeError> {
        match (crossing, &self.group) {
            (InFlight::Waiting(gradient), Some(group)) => through(gradient, |x| B::sum(group, x)),
            (crossing, _) => self.finish_whole(crossing),
        }
    }

    /// Starts to make the whole parameter number `at`, of this shape, from everybody's parts.
    pub fn start_whole(&self, at: usize, part: Param<B>, shape: &[usize]) -> InFlight<B> {
        match &self.group {
            Some(group) if self.crosses(shape) => {
                let (x, as_vector) = in_rows(part, 1);
                InFlight::Started { started: B::start_gather(group, at, x), as_vector }
            }
            _ => InFlight::Waiting(part),
        }
    }

    /// The whole parameter; one that was not divided is whole already.
    pub fn finish_whole(&self, crossing: InFlight<B>) -> Result<Param<B>, ExchangeError> {
        match (crossing, &self.group) {
            (InFlight::Started { started, as_vector }, Some(group)) => {
                let x = B::finish(group, started)?;
                let count: usize = x.dims().iter().product();
                Ok(if as_vector { Param::Vector(x.reshape([count])) } else { Param::Matrix(x) })
            }
            (InFlight::Waiting(param), _) => Ok(param),
            (InFlight::Started { .. }, None) => unreachable!("only a group starts exchanges"),
        }
    }

    /// The whole parameter of a shape from everybody's parts, at once.
    pub fn whole(&self, part: Param<B>, shape: &[usize]) -> Result<Param<B>, ExchangeError> {
        match (&self.group, self.rows(shape)) {
            (Some(group), Some(_)) => through(part, |x| B::gather(group, x)),
            _ => Ok(part),
        }
    }
}

/// A parameter or gradient on its way between processes.
#[derive(Debug)]
pub enum InFlight<B: ExchangeOps> {
    /// Not divided.
    Waiting(Param<B>),
    /// Crosses in parts.
    Started {
        /// What the device knows of it.
        started: B::Started,
        /// Whether it is a vector.
        as_vector: bool,
    },
}

/// A matrix whose rows can be divided; a vector in `rows` of them. Whether it was one.
fn in_rows<B: Backend>(param: Param<B>, rows: usize) -> (Tensor<B, 2>, bool) {
    match param {
        Param::Matrix(x) => (x, false),
        Param::Vector(x) => {
            let width = x.dims()[0] / rows;
            (x.reshape([rows, width]), true)
        }
    }
}

/// Bytes of a value: vectors, the weights of norms, are f32 whatever the type of the matrices.
fn value_bytes(shape: &[usize], dtype: FloatDType) -> usize {
    match shape.len() {
        1 => DType::F32.size(),
        _ => DType::from(dtype).size(),
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
