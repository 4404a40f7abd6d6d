//! Sums gradients over the processes of a run, matrix by matrix while the backward pass goes on.
//! Knows no transport and no update.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::draft::{Eagle3Draft, Param};
use crate::exchange::ExchangeOps;
use crate::ops::{Counting, HandOver};
use crate::optimizer::GradientError;
use crate::shards::{Crossing, Shards};

/// This process's part of each summed gradient, in the order of [`Eagle3Draft::parameters`]; `None`
/// for what is frozen.
pub type Summed<B> = Vec<(String, Option<Param<B>>)>;

/// Gradients of one optimizer step on their way to the processes that keep their moments.
///
/// All processes exchange matrices in the same order, the last parameter first, which is about the
/// order in which a backward pass completes them; then what is small.
#[derive(Debug)]
pub struct Reduction<B: ExchangeOps> {
    shards: Shards<B>,
    parameters: Vec<(String, Vec<usize>)>,
    progress: Mutex<Vec<Progress<B>>>,
}

/// How far a gradient is.
#[derive(Debug)]
enum Progress<B: ExchangeOps> {
    /// Not wanted.
    Frozen,
    /// More may be added.
    Open(Option<Param<B>>),
    /// Waits for those before it.
    Complete(Param<B>),
    /// On its way.
    Started(Crossing<B>),
    /// Something was added after it was complete.
    Late,
}

impl<B: Backend + ExchangeOps> Progress<B> {
    fn add(&mut self, more: Param<B>) {
        *self = match std::mem::replace(self, Self::Late) {
            Self::Frozen => Self::Frozen,
            Self::Open(None) => Self::Open(Some(more)),
            Self::Open(Some(sum)) => Self::Open(Some(sum.plus(more))),
            Self::Complete(_) | Self::Started(_) | Self::Late => Self::Late,
        };
    }

    /// Nothing more comes; without anything it is what `nothing` says.
    fn complete(&mut self, nothing: impl FnOnce() -> Param<B>) {
        if let Self::Open(sum) = self {
            *self = Self::Complete(sum.take().unwrap_or_else(nothing));
        }
    }
}

impl<B: ExchangeOps> Reduction<B> {
    /// No gradients yet of the parameters of `draft`, of which one may be frozen.
    pub fn new(draft: &Eagle3Draft<B>, shards: &Shards<B>, frozen: Option<&str>) -> Self {
        let parameters = draft.config().parameter_shapes();
        let open = |(name, _): &(String, Vec<usize>)| match frozen == Some(name.as_str()) {
            true => Progress::Frozen,
            false => Progress::Open(None),
        };
        let progress = Mutex::new(parameters.iter().map(open).collect());
        Self { shards: shards.clone(), parameters, progress }
    }

    /// Takes the matrices' gradients of the batch that follows, the last one, in the middle of its
    /// backward pass. What is left then is to be added. Nothing to do in a run of one process.
    pub fn follow<A>(self: &Arc<Self>, tracked: &Eagle3Draft<A>) -> Option<Counting>
    where
        A: HandOver<InnerBackend = B>,
    {
        let matrix = |(at, (_, param)): (usize, (String, Param<A>))| match param {
            Param::Matrix(x) if self.shards.crosses(&x.dims()) => Some((at, x)),
            _ => None,
        };
        let all = tracked.parameters().into_iter().enumerate().filter_map(matrix);
        let (places, leaves): (Vec<usize>, Vec<Tensor<A, 2>>) = all.unzip();
        let reduction = self.clone();
        let receiver = move |number: usize, gradient| {
            let mut progress = reduction.progress();
            let Some(place) = places.get(number).and_then(|&at| progress.get_mut(at)) else {
                return;
            };
            place.add(Param::Matrix(gradient));
            place.complete(|| unreachable!("a gradient was added"));
            reduction.start_complete(&mut progress);
        };
        (!leaves.is_empty()).then(|| A::hand_over(&leaves, Arc::new(receiver)))
    }

    /// Adds gradients of a batch, in the order of the parameters.
    pub fn add(&self, gradients: impl IntoIterator<Item = Option<Param<B>>>) {
        for (place, more) in self.progress().iter_mut().zip(gradients) {
            if let Some(more) = more {
                place.add(more);
            }
        }
    }

    /// This process's parts of the sums, `draft`'s gradients. What nothing was added to is zero.
    pub fn finish(&self, draft: &Eagle3Draft<B>) -> Result<Summed<B>, GradientError> {
        let mut progress = self.progress();
        for (place, (_, param)) in progress.iter_mut().zip(draft.parameters()) {
            place.complete(|| param.zeros_like());
        }
        self.start_complete(&mut progress);
        let undivided = (0..self.parameters.len()).filter(|&at| !self.crosses(at));
        let order: Vec<usize> = self.crossing().chain(undivided).collect();
        let mut summed: Vec<Option<Param<B>>> = progress.iter().map(|_| None).collect();
        for at in order {
            summed[at] = match std::mem::replace(&mut progress[at], Progress::Late) {
                Progress::Frozen => None,
                Progress::Complete(gradient) => {
                    Some(self.shards.finish_sum(self.shards.start_sum(at, gradient))?)
                }
                Progress::Started(crossing) => Some(self.shards.finish_sum(crossing)?),
                Progress::Open(_) | Progress::Late => {
                    return Err(GradientError::Late { name: self.parameters[at].0.clone() });
                }
            };
        }
        let names = self.parameters.iter().map(|(name, _)| name.clone());
        Ok(names.zip(summed).collect())
    }

    fn progress(&self) -> MutexGuard<'_, Vec<Progress<B>>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn crosses(&self, at: usize) -> bool {
        self.shards.crosses(&self.parameters[at].1)
    }

    /// What crosses in parts, in the order of the starts: matrices, then the small vectors, whose
    /// gradients nobody hands over early.
    fn crossing(&self) -> impl Iterator<Item = usize> {
        let of_dimensions = |count: usize| {
            let places = (0..self.parameters.len()).rev();
            places.filter(move |&at| self.parameters[at].1.len() == count && self.crosses(at))
        };
        of_dimensions(2).chain(of_dimensions(1))
    }

    /// Starts what is complete, as long as all before it are.
    fn start_complete(&self, progress: &mut [Progress<B>]) {
        for at in self.crossing() {
            match std::mem::replace(&mut progress[at], Progress::Late) {
                Progress::Complete(gradient) => {
                    progress[at] = Progress::Started(self.shards.start_sum(at, gradient));
                }
                open @ Progress::Open(_) => {
                    progress[at] = open;
                    return;
                }
                other => progress[at] = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn vector(value: f32) -> Param<Flex> {
        Param::from_vec(vec![value], &[1], &Default::default())
    }

    fn sum(progress: Progress<Flex>) -> Option<Vec<f32>> {
        match progress {
            Progress::Complete(sum) => Some(sum.to_vec()),
            _ => None,
        }
    }

    #[test]
    fn gradients_add_up_until_they_are_complete() {
        let mut progress = Progress::Open(None);
        progress.add(vector(2.0));
        progress.add(vector(3.0));
        progress.complete(|| vector(100.0));
        assert_eq!(sum(progress), Some(vec![5.0]));
        let mut progress = Progress::Open(None);
        progress.complete(|| vector(0.0));
        assert_eq!(sum(progress), Some(vec![0.0]));
    }

    #[test]
    fn what_comes_after_the_end_is_found() {
        let mut progress = Progress::Open(None);
        progress.complete(|| vector(1.0));
        progress.add(vector(2.0));
        assert!(matches!(progress, Progress::Late));
        let mut frozen = Progress::Frozen;
        frozen.add(vector(2.0));
        frozen.complete(|| vector(1.0));
        assert!(matches!(frozen, Progress::Frozen));
    }
}
