//! AdamW and the size of gradients. Knows no schedule.

use burn::tensor::DType;
use kernels::cuda::{AdamWNumbers, AdamWViews, DeviceMatrix, DeviceVector, SQUARE_PARTS};

use super::engine::{Part, fetch, run};
use super::views::{T, empty, exclusive, in_place, in_rows, matrix, vector};
use crate::draft::Param;
use crate::ops::{AdamWState, AdamWStep};
use burn::backend::Cuda;

/// See [`crate::DraftOps::adamw_step`]. In place, but for what somebody else still holds.
pub(super) fn adamw_step<const D: usize>(
    state: AdamWState<Cuda, D>,
    gradient: T<D>,
    step: &AdamWStep,
) -> AdamWState<Cuda, D> {
    let correction = |beta: f64| (1.0 - beta.powf(step.number as f64)) as f32;
    let numbers = AdamWNumbers {
        rate: step.learning_rate as f32,
        beta1: step.beta1 as f32,
        beta2: step.beta2 as f32,
        epsilon: step.epsilon as f32,
        kept: (1.0 - step.learning_rate * step.weight_decay) as f32,
        first_part: correction(step.beta1),
        second_part: correction(step.beta2),
        gradient_scale: step.gradient_scale as f32,
    };
    let device = state.param.device();
    let master = state.master.map(exclusive);
    // The rounded copy is written only.
    let param = match &master {
        Some(_) => in_place(in_rows(state.param)).1,
        None => exclusive(state.param),
    };
    let (first, second) = (exclusive(state.first), exclusive(state.second));
    let gradient = in_rows(gradient);
    let views = AdamWViews {
        param: matrix(&param),
        master: master.as_ref().map_or_else(|| matrix(&param), matrix),
        first: matrix(&first),
        second: matrix(&second),
        gradient: matrix(&gradient),
    };
    run(&device, Part::Optimizer, |work| work.launch.adamw(&views, &numbers));
    AdamWState { param, master, first, second }
}

/// See [`crate::DraftOps::square_sums`].
pub(super) fn square_sums(gradients: &[Param<Cuda>]) -> Vec<f64> {
    let device = match gradients.first() {
        Some(Param::Vector(x)) => x.device(),
        Some(Param::Matrix(x)) => x.device(),
        None => return Vec::new(),
    };
    let mut kept = Vec::new();
    let mut view = |gradient: &Param<Cuda>| -> DeviceMatrix {
        let gradient = match gradient {
            Param::Vector(x) => Param::Vector(in_rows(x.clone())),
            Param::Matrix(x) => Param::Matrix(in_rows(x.clone())),
        };
        let view = match &gradient {
            Param::Vector(x) => matrix(x),
            Param::Matrix(x) => matrix(x),
        };
        kept.push(gradient);
        view
    };
    let views: Vec<DeviceMatrix> = gradients.iter().map(&mut view).collect();
    // Room for f64.
    let room = empty([2 * SQUARE_PARTS * views.len()], (&device, DType::F32));
    let parts = DeviceVector::<f64>::new(vector(&room).address, SQUARE_PARTS * views.len());
    run(&device, Part::Optimizer, |work| {
        for (at, view) in views.iter().enumerate() {
            let out = parts.range(at * SQUARE_PARTS..(at + 1) * SQUARE_PARTS);
            work.launch.squares(out, view)?;
        }
        Ok(())
    });
    let parts = fetch(&device, parts);
    let mut sums: Vec<f64> =
        parts.chunks_exact(SQUARE_PARTS).map(|parts| parts.iter().sum()).collect();
    // After a fault; the caller asks for that next.
    sums.resize(gradients.len(), 0.0);
    sums
}
