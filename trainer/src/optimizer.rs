//! AdamW over named parameters, with global-norm clipping. Knows no model and no schedule.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::draft::{Eagle3Draft, Param};
use crate::ops::{AdamWState, AdamWStep, DraftOps};

/// A gradient or a moment for every parameter, in the order of [`Eagle3Draft::parameters`].
pub type Named<B> = Vec<(String, Param<B>)>;

/// Constants of the update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
}

/// Moments of every parameter and the number of steps taken.
#[derive(Clone, Debug)]
pub struct AdamW<B: Backend> {
    config: AdamWConfig,
    step: u64,
    first: Named<B>,
    second: Named<B>,
    /// f32 parameters that the draft's are rounded from; `None` when those are f32 themselves.
    masters: Option<Named<B>>,
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
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFinite { .. } => 65,
            Self::Mismatch { .. } => 70,
        }
    }
}

impl<B: DraftOps> AdamW<B> {
    /// Zero moments for the parameters of a draft.
    pub fn new(config: AdamWConfig, draft: &Eagle3Draft<B>) -> Self {
        let zeros = |(name, param): (String, Param<B>)| (name, param.zeros_like());
        let moments = |draft: &Eagle3Draft<B>| -> Named<B> {
            draft.parameters().into_iter().map(zeros).collect()
        };
        let [first, second] =
            [(); 2].map(|()| B::memory_persistent_allocations(&draft.device(), draft, moments));
        Self { config, step: 0, first, second, masters: None }
    }

    /// Continues from stored moments, in the order of the parameters.
    pub fn from_moments(config: AdamWConfig, step: u64, first: Named<B>, second: Named<B>) -> Self {
        Self { config, step, first, second, masters: None }
    }

    /// Keeps the f32 parameters of `draft` here and gives a draft whose matrices are of type
    /// `dtype` to compute with. Does nothing when that is f32 too.
    pub fn with_working_copy(
        self,
        draft: Eagle3Draft<B>,
        dtype: FloatDType,
    ) -> (Self, Eagle3Draft<B>) {
        if dtype == FloatDType::F32 {
            return (self, draft);
        }
        let copy = |draft: &Eagle3Draft<B>| draft.with_dtype(dtype);
        let copy = B::memory_persistent_allocations(&draft.device(), &draft, copy);
        (Self { masters: Some(draft.parameters()), ..self }, copy)
    }

    /// The parameters in full precision, in the order of [`Eagle3Draft::parameters`].
    pub fn weights(&self, draft: &Eagle3Draft<B>) -> Named<B> {
        self.masters.clone().unwrap_or_else(|| draft.parameters())
    }

    /// Updates taken so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// First and second moments, in the order of the parameters.
    pub fn moments(&self) -> (&Named<B>, &Named<B>) {
        (&self.first, &self.second)
    }

    /// Clips the gradients to the global norm, updates moments and draft and returns the norm before
    /// clipping. In place where nobody else holds the memory. Refuses gradients that are not finite,
    /// changing nothing.
    pub fn update(
        &mut self,
        draft: &mut Eagle3Draft<B>,
        gradients: Named<B>,
        rate: f64,
    ) -> Result<f64, GradientError> {
        self.check_order(&gradients)?;
        B::on_device(&draft.device(), || self.checked_update(draft, gradients, rate))
    }

    fn checked_update(
        &mut self,
        draft: &mut Eagle3Draft<B>,
        gradients: Named<B>,
        rate: f64,
    ) -> Result<f64, GradientError> {
        let norm = self.global_norm(&gradients)?;
        let clip = self.config.clip;
        let scale = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
        self.step += 1;
        let step = Step { config: self.config, rate, scale, count: self.step };
        let (first, second) = (std::mem::take(&mut self.first), std::mem::take(&mut self.second));
        let mut masters = self.masters.take().map(Vec::into_iter);
        let mut kept = masters.is_some().then(Vec::new);
        let mut state = gradients.into_iter().zip(first.into_iter().zip(second));
        draft.replace_each(|name, param| {
            let Some(((_, gradient), ((_, first), (_, second)))) = state.next() else {
                unreachable!("check_order compared the parameters one by one");
            };
            let master = masters.as_mut().and_then(Iterator::next).map(|(_, master)| master);
            let done = step.apply(Parts { param, master, first, second }, gradient);
            self.first.push((name.to_owned(), done.first));
            self.second.push((name.to_owned(), done.second));
            if let (Some(kept), Some(master)) = (&mut kept, done.master) {
                kept.push((name.to_owned(), master));
            }
            done.param
        });
        self.masters = kept;
        Ok(norm)
    }

    fn check_order(&self, gradients: &Named<B>) -> Result<(), GradientError> {
        let describe = |entry: Option<&(String, Param<B>)>| {
            entry.map_or("nothing".to_owned(), |(n, p)| format!("{n} {:?}", p.shape()))
        };
        for at in 0..self.first.len().max(gradients.len()) {
            let expected = describe(self.first.get(at));
            let found = describe(gradients.get(at));
            if expected != found {
                return Err(GradientError::Mismatch { expected, found });
            }
        }
        Ok(())
    }

    fn global_norm(&self, gradients: &Named<B>) -> Result<f64, GradientError> {
        let values: Vec<Param<B>> =
            gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
        let squares = B::square_sums(&values);
        let bad = gradients.iter().zip(&squares).find(|(_, sum)| !sum.is_finite());
        match bad {
            Some(((name, _), _)) => {
                Err(GradientError::NotFinite { name: name.clone(), step: self.step })
            }
            None => Ok(squares.iter().sum::<f64>().sqrt()),
        }
    }
}

/// Sums two lists of gradients of the same draft, the second times `weight`.
pub fn add_scaled<B: Backend>(total: Option<Named<B>>, more: Named<B>, weight: f64) -> Named<B> {
    let scaled = |param: Param<B>| match param {
        Param::Vector(g) => Param::Vector(g.mul_scalar(weight)),
        Param::Matrix(g) => Param::Matrix(g.mul_scalar(weight)),
    };
    let Some(total) = total else {
        return more.into_iter().map(|(name, g)| (name, scaled(g))).collect();
    };
    let sum = |a: Param<B>, b: Param<B>| match (a, scaled(b)) {
        (Param::Vector(a), Param::Vector(b)) => Param::Vector(a + b),
        (Param::Matrix(a), Param::Matrix(b)) => Param::Matrix(a + b),
        (a, _) => a,
    };
    total.into_iter().zip(more).map(|((name, a), (_, b))| (name, sum(a, b))).collect()
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
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::draft::{AttentionConfig, DraftConfig};

    fn draft() -> Eagle3Draft<Flex> {
        let config = DraftConfig {
            hidden_size: 4,
            intermediate_size: 4,
            num_attention_heads: 1,
            attention: AttentionConfig::Gqa { num_key_value_heads: 1, head_dim: 4 },
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            yarn: None,
            vocab_size: 6,
            draft_vocab_size: 5,
            num_aux: 3,
            fc_norm: false,
            norm_output: false,
            norm_before_residual: false,
        };
        Eagle3Draft::init(config, 1, &Default::default()).unwrap()
    }

    fn settings(clip: f64, weight_decay: f64) -> AdamWConfig {
        AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, clip }
    }

    fn gradients(draft: &Eagle3Draft<Flex>, value: impl Fn(usize) -> f32) -> Named<Flex> {
        let fill = |(name, param): (String, Param<Flex>)| {
            let shape = param.shape();
            let values = (0..shape.iter().product()).map(&value).collect();
            (name, Param::from_vec(values, &shape, &Default::default()))
        };
        draft.parameters().into_iter().map(fill).collect()
    }

    fn values(draft: &Eagle3Draft<Flex>) -> Vec<f32> {
        draft.parameters().iter().flat_map(|(_, p)| p.to_vec()).collect()
    }

    /// AdamW written from its definition in f64, one value at a time.
    fn reference(start: f64, gradient: f64, steps: i32, decay: f64) -> f64 {
        let (mut p, mut m, mut v) = (start, 0.0, 0.0);
        for t in 1..=steps {
            m = 0.9 * m + 0.1 * gradient;
            v = 0.95 * v + 0.05 * gradient * gradient;
            let (mh, vh) = (m / (1.0 - 0.9f64.powi(t)), v / (1.0 - 0.95f64.powi(t)));
            p = p * (1.0 - 0.01 * decay) - 0.01 * mh / (vh.sqrt() + 1e-8);
        }
        p
    }

    #[test]
    fn follows_the_definition_and_decays_matrices_only() {
        let start = draft();
        let mut adamw = AdamW::new(settings(0.0, 0.1), &start);
        let mut now = start.clone();
        let gradient = |at: usize| (at as f32 - 3.0) * 0.25;
        for _ in 0..5 {
            adamw.update(&mut now, gradients(&start, gradient), 0.01).unwrap();
        }
        for ((name, before), (_, after)) in start.parameters().iter().zip(now.parameters()) {
            let decay = if before.shape().len() == 1 { 0.0 } else { 0.1 };
            for (at, (p0, p)) in before.to_vec().iter().zip(after.to_vec()).enumerate() {
                let expected = reference(f64::from(*p0), f64::from(gradient(at)), 5, decay);
                assert!((expected - f64::from(p)).abs() < 2e-6, "{name}[{at}]: {expected} {p}");
            }
        }
    }

    #[test]
    fn clipping_is_by_the_norm_over_all_parameters() {
        let start = draft();
        let count = values(&start).len() as f64;
        let mut clipped = AdamW::new(settings(0.5, 0.0), &start);
        let norm = clipped.update(&mut start.clone(), gradients(&start, |_| 2.0), 0.01).unwrap();
        assert!((norm - 2.0 * count.sqrt()).abs() < 1e-3 * norm);
        let (first, _) = clipped.moments();
        let squares: f64 =
            first.iter().flat_map(|(_, m)| m.to_vec()).map(|m| f64::from(m).powi(2)).sum();
        assert!((squares.sqrt() - 0.1 * 0.5).abs() < 1e-5, "{}", squares.sqrt());
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let start = draft();
        let mut adamw = AdamW::new(settings(0.5, 0.0), &start);
        for bad in [f32::NAN, f32::INFINITY] {
            let gradients = gradients(&start, |at| if at == 1 { bad } else { 1.0 });
            let mut now = start.clone();
            let error = adamw.update(&mut now, gradients, 0.01).unwrap_err();
            assert_eq!(values(&now), values(&start));
            assert!(
                matches!(&error, GradientError::NotFinite { name, step: 0 } if name == "fc.weight")
            );
            assert_eq!(error.exit_code(), 65);
        }
        let moments = adamw.moments();
        assert!(
            moments.0.iter().chain(moments.1).all(|(_, m)| m.to_vec().iter().all(|x| *x == 0.0))
        );
        assert_eq!(adamw.steps(), 0);
    }
}
