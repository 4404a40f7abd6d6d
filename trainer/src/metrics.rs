//! Sums and counts of a training step, and the rates made of them. Knows nothing of how rows were
//! computed.

use burn::tensor::{Tensor, backend::Backend};

use crate::masks::RowMasks;

/// Sums and counts of each step, `[K]`; those of several batches add up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TttMetrics {
    /// Rows in the loss.
    pub step_rows: Vec<u64>,
    /// Sum of their losses.
    pub step_loss_sum: Vec<f64>,
    /// What the sum is divided by.
    pub step_divisor: Vec<f64>,
    /// Rows in the accuracies.
    pub counted: Vec<u64>,
    /// Of these, rows whose top token is the teacher's.
    pub right: Vec<u64>,
    /// Of these, rows right at this and every earlier step.
    pub all_right: Vec<u64>,
    /// Sum over loss rows of `sum_v min(p, q)`.
    pub alpha_sum: Vec<f64>,
}

impl TttMetrics {
    /// Adds another batch. An empty value takes the length of the other.
    pub fn add(&mut self, other: &Self) {
        fn sum<T: Copy + Default + std::ops::AddAssign>(into: &mut Vec<T>, from: &[T]) {
            into.resize(into.len().max(from.len()), T::default());
            into.iter_mut().zip(from).for_each(|(into, from)| *into += *from);
        }
        sum(&mut self.step_rows, &other.step_rows);
        sum(&mut self.step_loss_sum, &other.step_loss_sum);
        sum(&mut self.step_divisor, &other.step_divisor);
        sum(&mut self.counted, &other.counted);
        sum(&mut self.right, &other.right);
        sum(&mut self.all_right, &other.all_right);
        sum(&mut self.alpha_sum, &other.alpha_sum);
    }

    /// Everything that adds up, for [`Self::set_sums`]; the divisors are not among it.
    pub fn sums(&self) -> Vec<f64> {
        let counts = [&self.step_rows, &self.counted, &self.right, &self.all_right];
        let counts = counts.into_iter().flatten().map(|&count| count as f64);
        let reals = [&self.step_loss_sum, &self.alpha_sum].into_iter().flatten();
        counts.chain(reals.copied()).collect()
    }

    /// Takes sums over several processes, in the order of [`Self::sums`].
    pub fn set_sums(&mut self, sums: &[f64]) {
        let mut next = sums.iter().copied();
        let counts = [&mut self.step_rows, &mut self.counted, &mut self.right, &mut self.all_right];
        for (count, sum) in counts.into_iter().flatten().zip(next.by_ref()) {
            // Counts below 2^53 are exact.
            *count = sum as u64;
        }
        let reals = [&mut self.step_loss_sum, &mut self.alpha_sum].into_iter().flatten();
        reals.zip(next).for_each(|(real, sum)| *real = sum);
    }

    /// No rows at all in `steps` steps.
    pub fn zeros(steps: usize) -> Self {
        Self {
            step_rows: vec![0; steps],
            step_loss_sum: vec![0.0; steps],
            step_divisor: vec![0.0; steps],
            counted: vec![0; steps],
            right: vec![0; steps],
            all_right: vec![0; steps],
            alpha_sum: vec![0.0; steps],
        }
    }

    /// Whether any row was in the loss, at any step.
    pub fn has_trained_rows(&self) -> bool {
        self.step_rows.iter().any(|&rows| rows > 0)
    }

    /// Whether any row was in the accuracies, at any step.
    pub fn has_measured_rows(&self) -> bool {
        self.counted.iter().any(|&rows| rows > 0)
    }

    /// Loss of each step: sum over divisor; 0 without rows.
    pub fn step_loss(&self) -> Vec<f64> {
        let pairs = self.step_loss_sum.iter().zip(&self.step_divisor);
        pairs.map(|(sum, divisor)| sum / divisor.max(1.0)).collect()
    }

    /// `sum_k decay^k * step_loss[k]`.
    pub fn loss(&self, step_decay: f64) -> f64 {
        let losses = self.step_loss().into_iter().enumerate();
        losses.map(|(step, loss)| step_decay.powf(step as f64) * loss).sum()
    }

    /// Share of counted rows whose top token is the teacher's, by step; 0 without rows.
    pub fn acc(&self) -> Vec<f64> {
        ratios(&self.right, &self.counted)
    }

    /// Share of counted rows right at this and every earlier step; 0 without rows.
    pub fn full_acc(&self) -> Vec<f64> {
        ratios(&self.all_right, &self.counted)
    }

    /// Drafted tokens expected to be accepted, the bonus token not counted.
    pub fn accept_len(&self) -> f64 {
        self.full_acc().iter().sum()
    }

    /// Mean over loss rows of `sum_v min(p, q)`, by step; 0 without rows.
    pub fn alpha(&self) -> Vec<f64> {
        let pairs = self.alpha_sum.iter().zip(&self.step_rows);
        pairs.map(|(sum, &rows)| sum / rows.max(1) as f64).collect()
    }
}

fn ratios(parts: &[u64], wholes: &[u64]) -> Vec<f64> {
    parts.iter().zip(wholes).map(|(&part, &whole)| part as f64 / whole.max(1) as f64).collect()
}

/// Results by row, still on the device.
#[derive(Clone, Debug)]
pub(crate) struct RowOutcomes<B: Backend> {
    masks: RowMasks,
    divisors: Vec<f64>,
    /// Step and row of each entry of `rows`.
    order: Vec<(usize, u32)>,
    /// Loss, overlap and whether right, `[n, 3]`.
    rows: Option<Tensor<B, 2>>,
    /// The same on the host, once fetched.
    values: Option<Vec<f32>>,
}

impl<B: Backend> RowOutcomes<B> {
    pub(crate) fn new(masks: &RowMasks, divisors: Vec<f64>) -> Self {
        Self { masks: masks.clone(), divisors, order: Vec::new(), rows: None, values: None }
    }

    /// Factor of each row's loss in the total.
    pub(crate) fn weights(&self, order: &[(usize, u32)], step_decay: f64) -> Vec<f32> {
        let weight = |&(step, row): &(usize, u32)| match self.masks.in_loss[step][row as usize] {
            true => (step_decay.powf(step as f64) / self.divisors[step]) as f32,
            false => 0.0,
        };
        order.iter().map(weight).collect()
    }

    pub(crate) fn set(&mut self, order: Vec<(usize, u32)>, rows: Tensor<B, 2>) {
        self.order = order;
        self.rows = Some(rows);
    }

    /// Copies the results to the host, for a later `metrics` that must not wait.
    pub(crate) fn fetch(&mut self) {
        self.values = self.rows.as_ref().map(|rows| rows.to_data().iter::<f32>().collect());
    }

    pub(crate) fn metrics(&self) -> TttMetrics {
        let count = |masks: &[Vec<bool>]| -> Vec<u64> {
            masks.iter().map(|rows| rows.iter().filter(|&&row| row).count() as u64).collect()
        };
        let steps = self.masks.in_loss.len();
        let mut metrics = TttMetrics {
            step_rows: count(&self.masks.in_loss),
            step_loss_sum: vec![0.0; steps],
            step_divisor: self.divisors.clone(),
            counted: count(&self.masks.counted),
            right: vec![0; steps],
            all_right: vec![0; steps],
            alpha_sum: vec![0.0; steps],
        };
        let Some(rows) = &self.rows else { return metrics };
        let fetched = || rows.to_data().iter::<f32>().collect();
        let values = self.values.clone().unwrap_or_else(fetched);
        let mut entries: Vec<_> = self.order.iter().zip(values.chunks_exact(3)).collect();
        // By step, so that a row's earlier steps are known when a later one is counted.
        entries.sort_by_key(|&(place, _)| *place);
        let mut alive = vec![true; self.masks.in_loss.first().map_or(0, Vec::len)];
        for (&(step, row), outcome) in entries {
            let row = row as usize;
            if self.masks.in_loss[step][row] {
                metrics.step_loss_sum[step] += f64::from(outcome[0]);
                metrics.alpha_sum[step] += f64::from(outcome[1]);
            }
            let right = outcome[2] > 0.5;
            alive[row] &= right;
            if self.masks.counted[step][row] {
                metrics.right[step] += u64::from(right);
                metrics.all_right[step] += u64::from(alive[row]);
            }
        }
        metrics
    }
}
