//! Sums gradients over the processes of a run, matrix by matrix while the backward pass goes on.
//! Knows no transport and no update.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::draft::{Eagle3Draft, Param};
use crate::exchange::ExchangeOps;
use crate::ops::{Counting, HandOver};
use crate::optimizer::GradientError;
use crate::shards::{InFlight, Shards};

/// This process's part of each summed gradient, in the order of [`Eagle3Draft::parameters`]; `None`
/// for what is frozen.
pub type Summed<B> = Vec<(String, Option<Param<B>>)>;

/// Gradients of one optimizer step on their way to the processes that keep their moments.
///
/// A matrix crosses as soon as it is handed over. All processes wait for them in the same order,
/// the last parameter first, which is about that in which a backward pass completes them.
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
    /// On its way.
    Started(InFlight<B>),
    /// Something was added after it was complete.
    Late,
}

impl<B: Backend + ExchangeOps> Progress<B> {
    fn add(&mut self, more: Param<B>) {
        *self = match std::mem::replace(self, Self::Late) {
            Self::Frozen => Self::Frozen,
            Self::Open(None) => Self::Open(Some(more)),
            Self::Open(Some(sum)) => Self::Open(Some(sum.plus(more))),
            Self::Started(_) | Self::Late => Self::Late,
        };
    }

    /// Nothing more comes: sends what there is, or what `nothing` says.
    fn start(
        &mut self,
        nothing: impl FnOnce() -> Param<B>,
        send: impl FnOnce(Param<B>) -> InFlight<B>,
    ) {
        if let Self::Open(sum) = self {
            *self = Self::Started(send(sum.take().unwrap_or_else(nothing)));
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
            let Some(&at) = places.get(number) else { return };
            progress[at].add(Param::Matrix(gradient));
            let nothing = || unreachable!("a gradient was added");
            progress[at].start(nothing, |sum| reduction.shards.start_sum(at, sum));
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
        for (at, (_, param)) in draft.parameters().into_iter().enumerate() {
            progress[at].start(|| param.zeros_like(), |sum| self.shards.start_sum(at, sum));
        }
        let mut summed: Vec<Option<Param<B>>> = progress.iter().map(|_| None).collect();
        for at in (0..summed.len()).rev() {
            summed[at] = match std::mem::replace(&mut progress[at], Progress::Late) {
                Progress::Frozen => None,
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
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn vector(value: f32) -> Param<Flex> {
        Param::from_vec(vec![value], &[1], &Default::default())
    }

    /// What was sent.
    fn sent(mut progress: Progress<Flex>, nothing: f32) -> Option<Vec<f32>> {
        progress.start(|| vector(nothing), InFlight::Waiting);
        match progress {
            Progress::Started(InFlight::Waiting(sum)) => Some(sum.to_vec()),
            _ => None,
        }
    }

    #[test]
    fn gradients_add_up_until_they_are_sent() {
        let mut progress = Progress::Open(None);
        progress.add(vector(2.0));
        progress.add(vector(3.0));
        assert_eq!(sent(progress, 100.0), Some(vec![5.0]));
        assert_eq!(sent(Progress::Open(None), 0.0), Some(vec![0.0]));
        assert_eq!(sent(Progress::Frozen, 0.0), None);
    }

    #[test]
    fn what_comes_after_it_was_sent_is_found() {
        let mut progress = Progress::Open(None);
        progress.start(|| vector(1.0), InFlight::Waiting);
        progress.add(vector(2.0));
        assert!(matches!(progress, Progress::Late));
        let mut frozen = Progress::Frozen;
        frozen.add(vector(2.0));
        assert!(matches!(frozen, Progress::Frozen));
    }
}
