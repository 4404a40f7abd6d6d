//! Learning rate as a function of the step. Knows nothing of parameters.

use serde::{Deserialize, Serialize};

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine from the peak to the floor.
    Cosine,
    /// A straight line from the peak to the floor.
    Linear,
    /// The peak throughout.
    Constant,
    /// The peak times a factor for each milestone passed.
    Step,
}

/// Warm-up and decay of the learning rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Optimizer steps of linear warm-up.
    pub warmup_steps: u64,
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// Shape after warm-up.
    pub decay: Decay,
    /// [`Decay::Cosine`] and [`Decay::Linear`]: learning rate at the end as a fraction of the peak.
    pub floor: f64,
    /// [`Decay::Step`]: shares of all steps at which the rate falls, and the factor by which.
    pub milestones: (Vec<f64>, f64),
}

impl Schedule {
    /// Learning rate of 0-based optimizer step `step`. The first step of a warm-up is already
    /// above 0, the step after the last one is at the floor.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let done = ((step - self.warmup_steps) as f64 / span).min(1.0);
        let share = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Decay::Linear => 1.0 - done,
            Decay::Constant => 1.0,
            Decay::Step => {
                let (milestones, factor) = &self.milestones;
                let done = step as f64 / self.total_steps.max(1) as f64;
                let passed = milestones.iter().filter(|&&milestone| milestone <= done).count();
                factor.powi(passed as i32)
            }
        };
        // New runs have a floor with the first two only; older ones go on as they began.
        self.peak * (self.floor + (1.0 - self.floor) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay) -> Schedule {
        let milestones = (vec![0.5, 0.75], 0.25);
        Schedule { peak: 2.0, warmup_steps: 4, total_steps: 14, decay, floor: 0.1, milestones }
    }

    #[test]
    fn warms_up_from_above_zero_to_the_peak() {
        let rates: Vec<f64> = (0..5).map(|s| schedule(Decay::Linear).rate(s)).collect();
        assert_eq!(rates, [0.5, 1.0, 1.5, 2.0, 2.0]);
    }

    #[test]
    fn ends_at_the_floor_and_stays_there() {
        for decay in [Decay::Cosine, Decay::Linear] {
            assert!((schedule(decay).rate(14) - 0.2).abs() < 1e-12);
            assert!((schedule(decay).rate(1000) - 0.2).abs() < 1e-12);
        }
        assert_eq!(schedule(Decay::Constant).rate(1000), 2.0);
    }

    #[test]
    fn half_way_is_the_middle_of_peak_and_floor() {
        for decay in [Decay::Cosine, Decay::Linear] {
            assert!((schedule(decay).rate(9) - 1.1).abs() < 1e-12);
        }
    }

    #[test]
    fn falls_at_each_milestone_and_not_before() {
        let falling = Schedule { floor: 0.0, ..schedule(Decay::Step) };
        let rates = [6, 7, 10, 11, 13].map(|step| falling.rate(step));
        assert_eq!(rates, [2.0, 0.5, 0.5, 0.125, 0.125]);
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_is_defined() {
        let short = Schedule { total_steps: 2, ..schedule(Decay::Cosine) };
        assert!((0..10).all(|s| short.rate(s).is_finite() && short.rate(s) > 0.0));
    }
}
