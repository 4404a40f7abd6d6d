//! Cases of row-wise operations and projections. Knows no attention and no loss.

use burn::tensor::Tensor;

use super::{Case, Differentiable, Random, Runner, Values};
use crate::ops::{Activations, MlpWeights, RotaryTable, plain};

pub(super) struct Project {
    /// Rows, columns read, rows of the weight.
    pub(super) shape: [usize; 3],
    /// Columns of the weight before and behind those read.
    pub(super) around: [usize; 2],
}

impl Case for Project {
    fn name(&self) -> String {
        format!("project_part {:?} of {:?}", self.shape, self.around)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([n, input, output], mut random) = (self.shape, Random(1));
        let ([first, behind], count) = (self.around, n * output);
        let width = first + input + behind;
        let x = runner.leaf(&random.reals(n * input), [n, input]);
        let weight = runner.leaf(&random.reals(output * width), [output, width]);
        let sum = runner.leaf(&random.reals(count), [n, output]);
        let once = |x: Tensor<B, 2>, sum: Option<Tensor<B, 2>>| match runner.plain {
            true => plain::project_part(x, weight.clone(), first, sum),
            false => B::project_part(x, weight.clone(), first, sum),
        };
        // Twice, so that the second gradients are added to the first; the first sum is held by
        // others, the second by nobody.
        let out = once(x.clone(), Some(sum.clone()));
        let out = once(x.clone() * 0.5, Some(out)) + once(x.clone(), None);
        runner.finish(out, &random.reals(count), &vec![x, weight, sum])
    }
}

pub(super) struct Norm(pub(super) [usize; 2]);

impl Case for Norm {
    fn name(&self) -> String {
        format!("rms_norm {:?}", self.0)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([n, width], mut random) = (self.0, Random(2));
        let x = runner.leaf(&random.reals(n * width), [n, width]);
        let weight = runner.exact(&random.reals(width), [1, width]).require_grad();
        let vector = weight.clone().reshape([width]);
        let once = |x: Tensor<B, 2>| match runner.plain {
            true => plain::rms_norm(x, vector.clone(), 1e-5),
            false => B::rms_norm(x, vector.clone(), 1e-5),
        };
        let out = once(x.clone()) + once(x.clone()) * 0.5;
        runner.finish(out, &random.reals(n * width), &vec![x, weight])
    }
}

pub(super) struct Mlp {
    /// Rows, width, inner width.
    pub(super) shape: [usize; 3],
    pub(super) activations: Activations,
}

impl Case for Mlp {
    fn name(&self) -> String {
        format!("mlp {:?} {:?}", self.shape, self.activations)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([n, width, inner], mut random) = (self.shape, Random(3));
        let mut matrix = |rows: usize, cols: usize| {
            let spread = 1.0 / (cols as f32).sqrt();
            let values = random.reals(rows * cols).into_iter().map(|x| x * spread);
            let values: Vec<f32> = values.map(|x| half::bf16::from_f32(x).to_f32()).collect();
            runner.leaf(&values, [rows, cols])
        };
        let (x, gate) = (matrix(n, width) * 3.0, matrix(inner, width));
        let (up, down) = (matrix(inner, width), matrix(width, inner));
        let x = x.detach().require_grad();
        let norm = runner.exact(&random.reals(width), [1, width]).require_grad();
        let weights = MlpWeights {
            norm: norm.clone().reshape([width]),
            eps: 1e-5,
            gate: gate.clone(),
            up: up.clone(),
            down: down.clone(),
        };
        let once = |x: Tensor<B, 2>| match runner.plain {
            true => plain::mlp(x, weights.clone()),
            false => B::mlp(x, weights.clone(), self.activations),
        };
        let out = once(once(x.clone()));
        runner.finish(out, &random.reals(n * width), &vec![x, norm, gate, up, down])
    }
}

pub(super) struct Place(pub(super) [usize; 3]);

impl Case for Place {
    fn name(&self) -> String {
        format!("place_rows {:?}", self.0)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([m, width, n], mut random) = (self.0, Random(9));
        let all = random.some(2 * n, m);
        let of = |at: usize| all.iter().skip(at).step_by(2).copied().collect::<Vec<u32>>();
        let x = runner.leaf(&random.reals(n * width), [n, width]);
        let mut out = runner.tensor(&vec![0.0; m * width], [m, width]);
        for (at, x) in [(0, x.clone()), (1, x.clone() * 0.5)] {
            out = match runner.plain {
                true => plain::place_rows(out, x, &runner.rows(&of(at))),
                false => B::place_rows(out, x, &runner.rows(&of(at))),
            };
        }
        runner.finish(out, &random.reals(m * width), &vec![x])
    }
}

pub(super) struct Turn {
    pub(super) shape: [usize; 3],
    pub(super) interleaved: bool,
}

impl Case for Turn {
    fn name(&self) -> String {
        format!("rope {:?}{}", self.shape, if self.interleaved { " interleaved" } else { "" })
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([n, heads, size], mut random) = (self.shape, Random(4));
        let x = runner.leaf(&random.reals(n * heads * size), [n, heads * size]);
        let angles: Vec<f32> = random.reals(37 * size / 2);
        let part = |part: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| part(angle)).collect();
            runner.exact(&values, [37, size / 2])
        };
        let interleaved = self.interleaved;
        let table = RotaryTable { cos: part(f32::cos), sin: part(f32::sin), interleaved };
        let positions: Vec<u32> = (0..n).map(|_| random.below(37) as u32).collect();
        let (split, positions) = (x.clone().reshape(self.shape), runner.rows(&positions));
        let out = match runner.plain {
            true => plain::rope(split, &table, &positions),
            false => B::rope(split, &table, &positions),
        };
        runner.finish(out, &random.reals(n * heads * size), &vec![x])
    }
}

pub(super) struct Gather(pub(super) [usize; 3]);

impl Case for Gather {
    fn name(&self) -> String {
        format!("gather_rows {:?}", self.0)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([m, width, n], mut random) = (self.0, Random(5));
        let x = runner.leaf(&random.reals(m * width), [m, width]);
        let rows: Vec<u32> = (0..n).map(|_| random.below(m) as u32).collect();
        let rows = runner.rows(&rows);
        let once = |x: Tensor<B, 2>| match runner.plain {
            true => plain::gather_rows(x, &rows),
            false => B::gather_rows(x, &rows),
        };
        // Twice, so that the second gradient is added to the first.
        let out = once(x.clone()) + once(x.clone()) * 0.5;
        runner.finish(out, &random.reals(n * width), &vec![x])
    }
}
