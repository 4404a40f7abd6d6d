//! One AdamW update in one pass over memory.

use rayon::prelude::*;

use crate::ops::AdamWStep;

/// Updates a parameter and its two moments in place; all slices have the same length.
pub(crate) fn update([param, first, second]: [&mut [f32]; 3], gradient: &[f32], step: &AdamWStep) {
    const ENTRIES: usize = 1 << 14;
    let correction = |beta: f64| (1.0 - beta.powf(step.number as f64)) as f32;
    let (first_part, second_part) = (correction(step.beta1), correction(step.beta2));
    let (beta1, beta2, rate) = (step.beta1 as f32, step.beta2 as f32, step.learning_rate as f32);
    let (new1, new2) = ((1.0 - step.beta1) as f32, (1.0 - step.beta2) as f32);
    let (scale, epsilon) = (step.gradient_scale as f32, step.epsilon as f32);
    let kept = (1.0 - step.learning_rate * step.weight_decay) as f32;
    let moments = first.par_chunks_mut(ENTRIES).zip(second.par_chunks_mut(ENTRIES));
    let all = param.par_chunks_mut(ENTRIES).zip(gradient.par_chunks(ENTRIES)).zip(moments);
    all.for_each(|((param, gradient), (first, second))| {
        let moments = first.iter_mut().zip(second);
        for ((x, g), (m, v)) in param.iter_mut().zip(gradient).zip(moments) {
            let g = g * scale;
            *m = *m * beta1 + g * new1;
            *v = *v * beta2 + g * g * new2;
            let root = (*v / second_part).sqrt() + epsilon;
            *x = *x * kept - *m / first_part / root * rate;
        }
    });
}
