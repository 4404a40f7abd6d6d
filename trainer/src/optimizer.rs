//! AdamW over named parameters, with global-norm clipping. Knows no model and no schedule.

use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Tensor};
use thiserror::Error;

use crate::draft::{Eagle3Draft, Param};
use crate::exchange::{ExchangeError, ExchangeOps};
use crate::ops::{AdamWState, AdamWStep, DraftOps};
use crate::reduction::Summed;
use crate::shards::{InFlight, Shards};

/// A gradient or a moment for every parameter, in the order of [`Eagle3Draft::parameters`].
pub type Named<B> = Vec<(String, Param<B>)>;

/// What is the same in every update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled decay of matrices; vectors (norms) are not decayed.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 means no limit.
    pub clip: f64,
    /// Parameter that stays as it is and has no moments.
    pub frozen: Option<&'static str>,
}

/// Moments of every parameter and the number of steps taken. Where several processes train
/// together, each keeps its own part of everything here (see [`Shards`]).
#[derive(Clone, Debug)]
pub struct AdamW<B: Backend> {
    config: AdamWConfig,
    step: u64,
    first: Named<B>,
    second: Named<B>,
    /// f32 parameters that the draft's are rounded from; `None` when those are f32 themselves.
    masters: Option<Named<B>>,
    average: Option<Average<B>>,
}

/// What a value of the optimizer is of its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The parameter itself, in f32.
    Weight,
    /// Its moving average.
    Average,
    /// Running mean of its gradients.
    First,
    /// Running mean of their squares.
    Second,
}

/// A moving average of the parameters, in f32.
#[derive(Clone, Debug)]
struct Average<B: Backend> {
    /// Share of the old average that stays at each step, once there have been many.
    decay: f64,
    values: Named<B>,
}

/// A gradient that must not be applied. Neither parameters nor moments have been changed.
#[derive(Debug, Error)]
pub enum GradientError {
    /// NaN or infinity.
    #[error(
        "the gradient of {name} is not finite at step {step}: no update was made; \
         lower train.lr, or audit the data set"
    )]
    NotFinite {
        /// First such parameter.
        name: String,
        /// Steps taken before.
        step: u64,
    },
    /// Other processes, or the way to them.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// An operation that nobody had counted added to a gradient whose sum was on its way already.
    #[error("the gradient of {name} grew after it had been exchanged: no update was made (a bug)")]
    Late {
        /// The parameter.
        name: String,
    },
    /// Gradients that are not those of the parameters.
    #[error("gradients and moments differ: {expected} expected, {found} found")]
    Mismatch {
        /// Name and shape of the moment.
        expected: String,
        /// Name and shape of the gradient.
        found: String,
    },
}

impl GradientError {
    /// The same in step `step` of the run, of which the optimizer counts those with an update.
    pub(crate) fn in_step(self, step: u64) -> Self {
        match self {
            Self::NotFinite { name, .. } => Self::NotFinite { name, step },
            other => other,
        }
    }

    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFinite { .. } => 65,
            Self::Exchange(error) => error.exit_code(),
            Self::Late { .. } | Self::Mismatch { .. } => 70,
        }
    }
}

impl<B: DraftOps + ExchangeOps> AdamW<B> {
    /// Zero moments for this process's parts of the parameters of a draft.
    pub fn new(config: AdamWConfig, draft: &Eagle3Draft<B>, shards: &Shards<B>) -> Self {
        let zeros = |(name, param): (String, Param<B>)| {
            let moment = match config.frozen == Some(name.as_str()) {
                true => nothing(&draft.device()),
                false => shards.own(param).zeros_like(),
            };
            (name, moment)
        };
        let moments = |draft: &Eagle3Draft<B>| -> Named<B> {
            draft.parameters().into_iter().map(zeros).collect()
        };
        let [first, second] =
            [(); 2].map(|()| B::memory_persistent_allocations(&draft.device(), draft, moments));
        Self::from_moments(config, 0, first, second)
    }

    /// Continues from stored moments of this process's parts, in the order of the parameters; in
    /// the place of what is frozen stands [`nothing`].
    pub fn from_moments(config: AdamWConfig, step: u64, first: Named<B>, second: Named<B>) -> Self {
        Self { config, step, first, second, masters: None, average: None }
    }

    /// Keeps a moving average of this process's parts of the parameters, which are `start` now:
    /// whole f32 parameters.
    pub fn with_average(self, decay: f64, start: Named<B>, shards: &Shards<B>) -> Self {
        Self { average: Some(Average { decay, values: kept(start, shards) }), ..self }
    }

    /// Keeps this process's parts of the f32 parameters of `draft` here and gives a draft whose
    /// matrices are of type `dtype` to compute with. Does nothing when that is f32 too.
    pub fn with_working_copy(
        self,
        draft: Eagle3Draft<B>,
        (dtype, shards): (FloatDType, &Shards<B>),
    ) -> (Self, Eagle3Draft<B>) {
        if dtype == FloatDType::F32 {
            return (self, draft);
        }
        let copy =
            |draft: &Eagle3Draft<B>| (kept(draft.parameters(), shards), draft.with_dtype(dtype));
        let (masters, copy) = B::memory_persistent_allocations(&draft.device(), &draft, copy);
        (Self { masters: Some(masters), ..self }, copy)
    }

    /// Calls `take` with everything that a checkpoint holds, in the order of the parameters, whole
    /// and one by one: never is more than one parameter's value gathered. All processes take part.
    pub fn each(
        &self,
        draft: &Eagle3Draft<B>,
        shards: &Shards<B>,
        take: &mut dyn FnMut(Kept, &str, Param<B>),
    ) -> Result<(), ExchangeError> {
        let average = self.average.as_ref().map(|kept| &kept.values);
        let lists = [
            (Kept::Weight, self.masters.as_ref()),
            (Kept::Average, average),
            (Kept::First, Some(&self.first)),
            (Kept::Second, Some(&self.second)),
        ];
        if self.masters.is_none() {
            draft.parameters().into_iter().for_each(|(name, p)| take(Kept::Weight, &name, p));
        }
        let shapes = draft.config().parameter_shapes();
        for (what, list) in lists {
            let moments = matches!(what, Kept::First | Kept::Second);
            for ((name, part), (_, shape)) in list.into_iter().flatten().zip(&shapes) {
                if moments && self.frozen() == Some(name.as_str()) {
                    continue;
                }
                take(what, name, shards.whole(part.clone(), shape)?);
            }
        }
        Ok(())
    }

    /// Whether a moving average is kept.
    pub fn averages(&self) -> bool {
        self.average.is_some()
    }

    /// The average of the parameters, whole; `None` where none is kept.
    pub fn average(
        &self,
        draft: &Eagle3Draft<B>,
        shards: &Shards<B>,
    ) -> Result<Option<Named<B>>, ExchangeError> {
        self.average.as_ref().map(|kept| whole(&kept.values, draft, shards)).transpose()
    }

    /// The parameter that stays as it is.
    pub fn frozen(&self) -> Option<&'static str> {
        self.config.frozen
    }

    /// Updates taken so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Clips the summed gradients to the global norm, updates moments and draft and returns the
    /// norm before clipping. In place where nobody else holds the memory. Refuses gradients that
    /// are not finite, changing nothing.
    pub fn update(
        &mut self,
        draft: &mut Eagle3Draft<B>,
        mut gradients: Summed<B>,
        (rate, shards): (f64, &Shards<B>),
    ) -> Result<f64, GradientError> {
        check_order(draft, &gradients, shards)?;
        let frozen = gradients.iter_mut().filter(|(name, _)| self.frozen() == Some(name.as_str()));
        frozen.for_each(|(_, gradient)| *gradient = None);
        B::on_device(&draft.device(), || self.checked_update(draft, gradients, (rate, shards)))
    }

    fn checked_update(
        &mut self,
        draft: &mut Eagle3Draft<B>,
        gradients: Summed<B>,
        (rate, shards): (f64, &Shards<B>),
    ) -> Result<f64, GradientError> {
        let shapes = draft.config().parameter_shapes();
        let norm = self.global_norm(&gradients, (&shapes, shards))?;
        let clip = self.config.clip;
        let scale = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
        self.step += 1;
        let step = Step { config: self.config, rate, scale, count: self.step };
        let parts = self.update_parts(draft, gradients, (&step, shards));
        // All parts are on their way before the first is waited for.
        let mut parts = parts.into_iter();
        let (mut failed, device) = (None, draft.device());
        draft.replace_each(|_, _| {
            let Some(part) = parts.next() else { unreachable!("every parameter was updated") };
            shards.finish_whole(part).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                nothing(&device)
            })
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        self.follow(draft, shards);
        Ok(norm)
    }

    /// Updates this process's parts and sends each to the others; leaves nothing in `draft`.
    fn update_parts(
        &mut self,
        draft: &mut Eagle3Draft<B>,
        gradients: Summed<B>,
        (step, shards): (&Step, &Shards<B>),
    ) -> Vec<InFlight<B>> {
        let (first, second) = (std::mem::take(&mut self.first), std::mem::take(&mut self.second));
        let mut masters = self.masters.take().map(Vec::into_iter);
        let mut kept = masters.is_some().then(Vec::new);
        let mut state = gradients.into_iter().zip(first.into_iter().zip(second)).enumerate();
        let (mut sent, nothing) = (Vec::new(), nothing(&draft.device()));
        draft.replace_each(|name, param| {
            let Some((at, ((_, gradient), ((_, first), (_, second))))) = state.next() else {
                unreachable!("check_order compared the parameters one by one");
            };
            let (shape, trained) = (param.shape(), gradient.is_some());
            let master = masters.as_mut().and_then(Iterator::next).map(|(_, master)| master);
            let done = match gradient {
                Some(gradient) => {
                    let parts = Parts { param: shards.own(param), master, first, second };
                    step.apply(parts, gradient)
                }
                None => Parts { param, master, first, second },
            };
            self.first.push((name.to_owned(), done.first));
            self.second.push((name.to_owned(), done.second));
            if let (Some(kept), Some(master)) = (&mut kept, done.master) {
                kept.push((name.to_owned(), master));
            }
            sent.push(match trained {
                true => shards.start_whole(at, done.param, &shape),
                false => InFlight::Waiting(done.param),
            });
            nothing.clone()
        });
        self.masters = kept;
        sent
    }

    fn global_norm(
        &self,
        gradients: &Summed<B>,
        (shapes, shards): (&[(String, Vec<usize>)], &Shards<B>),
    ) -> Result<f64, GradientError> {
        let trained: Vec<(&String, &Param<B>, &Vec<usize>)> = gradients
            .iter()
            .zip(shapes)
            .filter_map(|((name, gradient), (_, shape))| Some((name, gradient.as_ref()?, shape)))
            .collect();
        let values: Vec<Param<B>> = trained.iter().map(|(_, g, _)| (*g).clone()).collect();
        let mut squares = B::square_sums(&values);
        for (square, (_, _, shape)) in squares.iter_mut().zip(&trained) {
            if !shards.counts(shape) {
                *square = 0.0;
            }
        }
        shards.world().sum(&mut squares).map_err(ExchangeError::from)?;
        let bad = trained.iter().zip(&squares).find(|(_, sum)| !sum.is_finite());
        match bad {
            Some(((name, ..), _)) => {
                Err(GradientError::NotFinite { name: (*name).clone(), step: self.step })
            }
            None => Ok(squares.iter().sum::<f64>().sqrt()),
        }
    }

    /// Share of the old average that stays at this step. Young averages forget faster: with a fixed
    /// share the random start would stay in them for thousands of steps.
    fn kept_share(&self, decay: f64) -> f64 {
        let taken = self.step as f64;
        decay.min((1.0 + taken) / (10.0 + taken))
    }

    /// Moves the average towards the parameters.
    fn follow(&mut self, draft: &Eagle3Draft<B>, shards: &Shards<B>) {
        let Some(Average { decay, values }) = self.average.take() else { return };
        let share = self.kept_share(decay);
        let present = match &self.masters {
            Some(masters) => masters.clone(),
            None => {
                let own = |(name, param): (String, Param<B>)| (name, shards.own(param));
                draft.parameters().into_iter().map(own).collect()
            }
        };
        let follow = |((name, old), (_, new)): ((String, Param<B>), (String, Param<B>))| {
            // An average of the same value would move by roundings.
            let average = match self.frozen() == Some(name.as_str()) {
                true => old,
                false => scaled(old, share).plus(scaled(new, 1.0 - share)),
            };
            (name, average)
        };
        let values = values.into_iter().zip(present).map(follow).collect();
        self.average = Some(Average { decay, values });
    }
}

/// Stands where a parameter or moment is not.
pub fn nothing<B: Backend>(device: &B::Device) -> Param<B> {
    Param::Vector(Tensor::empty([1], device))
}

/// This process's parts of whole parameters.
fn kept<B: ExchangeOps>(list: Named<B>, shards: &Shards<B>) -> Named<B> {
    list.into_iter().map(|(name, param)| (name, shards.keep(param))).collect()
}

/// Whole parameters from everybody's parts.
fn whole<B: DraftOps + ExchangeOps>(
    parts: &Named<B>,
    draft: &Eagle3Draft<B>,
    shards: &Shards<B>,
) -> Result<Named<B>, ExchangeError> {
    let shapes = draft.config().parameter_shapes();
    let pairs = parts.iter().zip(shapes);
    pairs
        .map(|((name, part), (_, shape))| Ok((name.clone(), shards.whole(part.clone(), &shape)?)))
        .collect()
}

/// Compares names, and the shapes of this process's parts.
fn check_order<B: ExchangeOps>(
    draft: &Eagle3Draft<B>,
    gradients: &Summed<B>,
    shards: &Shards<B>,
) -> Result<(), GradientError> {
    let shapes = draft.config().parameter_shapes();
    let nothing = || "nothing".to_owned();
    for at in 0..shapes.len().max(gradients.len()) {
        let part = |(name, shape): &(String, Vec<usize>)| (name.clone(), shards.part(shape));
        let expected = shapes.get(at).map(part);
        let found = match gradients.get(at) {
            Some((name, Some(gradient))) => Some((name.clone(), gradient.shape())),
            Some((name, None)) => expected.clone().map(|(_, shape)| (name.clone(), shape)),
            None => None,
        };
        if expected != found {
            let text = |pair: Option<(String, Vec<usize>)>| {
                pair.map_or_else(nothing, |(name, shape)| format!("{name} {shape:?}"))
            };
            return Err(GradientError::Mismatch { expected: text(expected), found: text(found) });
        }
    }
    Ok(())
}

/// A parameter times a number.
fn scaled<B: Backend>(param: Param<B>, factor: f64) -> Param<B> {
    match param {
        Param::Vector(x) => Param::Vector(x.mul_scalar(factor)),
        Param::Matrix(x) => Param::Matrix(x.mul_scalar(factor)),
    }
}

/// One update, the same for every parameter.
struct Step {
    config: AdamWConfig,
    rate: f64,
    scale: f64,
    count: u64,
}

/// A parameter with what the optimizer keeps for it.
struct Parts<B: Backend> {
    param: Param<B>,
    master: Option<Param<B>>,
    first: Param<B>,
    second: Param<B>,
}

impl Step {
    fn apply<B: DraftOps>(&self, parts: Parts<B>, gradient: Param<B>) -> Parts<B> {
        match (parts.param, parts.first, parts.second, gradient) {
            (
                Param::Vector(param),
                Param::Vector(first),
                Param::Vector(second),
                Param::Vector(g),
            ) => {
                let master = match parts.master {
                    Some(Param::Vector(master)) => Some(master),
                    _ => None,
                };
                let state = AdamWState { param, master, first, second };
                let done = B::adamw_step(state, g, &self.numbers(0.0));
                Parts {
                    param: Param::Vector(done.param),
                    master: done.master.map(Param::Vector),
                    first: Param::Vector(done.first),
                    second: Param::Vector(done.second),
                }
            }
            (
                Param::Matrix(param),
                Param::Matrix(first),
                Param::Matrix(second),
                Param::Matrix(g),
            ) => {
                let master = match parts.master {
                    Some(Param::Matrix(master)) => Some(master),
                    _ => None,
                };
                let state = AdamWState { param, master, first, second };
                let done = B::adamw_step(state, g, &self.numbers(self.config.weight_decay));
                Parts {
                    param: Param::Matrix(done.param),
                    master: done.master.map(Param::Matrix),
                    first: Param::Matrix(done.first),
                    second: Param::Matrix(done.second),
                }
            }
            (param, first, second, _) => Parts { param, master: parts.master, first, second },
        }
    }

    fn numbers(&self, weight_decay: f64) -> AdamWStep {
        AdamWStep {
            learning_rate: self.rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.eps,
            weight_decay,
            number: self.count,
            gradient_scale: self.scale,
        }
    }
}

#[cfg(test)]
mod tests;
