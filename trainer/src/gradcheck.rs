//! Every operation of a device, and its gradients, against the plain forms on the CPU, on random
//! shapes: odd sizes, rows with gaps, several documents. Knows no model.

mod rows;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};

use self::rows::{Gather, Mlp, Norm, Place, Project, Turn};
use crate::golden::{Difference, cosine};
use crate::losses::LossKind;
use crate::ops::{
    Activations, AdamWState, AdamWStep, AttentionPlan, DeviceFault, DistillRows, Distilled,
    DraftOps, RowIndex, Segment, TeacherHead, plain,
};

/// A backend with all operations, with gradients and without.
pub trait Differentiable: AutodiffBackend<InnerBackend: DraftOps> + DraftOps {}

impl<B: AutodiffBackend<InnerBackend: DraftOps> + DraftOps> Differentiable for B {}

/// What is compared: names and values.
type Values = Vec<(String, Vec<f32>)>;

/// Repeatable numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end.max(1)
    }

    /// Roughly normal, spread 1.
    fn real(&mut self) -> f32 {
        (0..6).map(|_| self.next() as f32 / (1u32 << 30) as f32 - 1.0).sum::<f32>() / 1.4
    }

    /// Values that bf16 holds exactly, so that both sides start from the same.
    fn reals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| half::bf16::from_f32(self.real()).to_f32()).collect()
    }

    /// `count` of `0..end`, ascending.
    fn some(&mut self, count: usize, end: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..end as u32).collect();
        for at in 0..count {
            let other = at + self.below(end - at);
            all.swap(at, other);
        }
        all.truncate(count);
        all.sort_unstable();
        all
    }
}

/// Runs a case on one backend, with the device's operations or the plain ones.
struct Runner<B: Backend> {
    device: B::Device,
    dtype: FloatDType,
    plain: bool,
}

type Leaves<B> = Vec<Tensor<B, 2>>;

impl<B: Differentiable> Runner<B> {
    fn tensor<const D: usize>(&self, values: &[f32], shape: [usize; D]) -> Tensor<B, D> {
        let data = TensorData::new(values.to_vec(), shape).convert_dtype(self.dtype.into());
        Tensor::from_data(data, (&self.device, DType::from(self.dtype)))
    }

    fn exact<const D: usize>(&self, values: &[f32], shape: [usize; D]) -> Tensor<B, D> {
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::from_data(data, (&self.device, DType::F32))
    }

    fn leaf(&self, values: &[f32], shape: [usize; 2]) -> Tensor<B, 2> {
        self.tensor(values, shape).require_grad()
    }

    fn rows(&self, rows: &[u32]) -> RowIndex<B> {
        RowIndex::new(rows.to_vec(), &self.device)
    }

    /// Output and gradients of the leaves, for the gradient `upstream` of the output.
    fn finish<const D: usize>(
        &self,
        output: Tensor<B, D>,
        upstream: &[f32],
        leaves: &Leaves<B>,
    ) -> Values {
        let shape = output.dims();
        let weighted = (output.clone().cast(FloatDType::F32) * self.exact(upstream, shape)).sum();
        let mut list = vec![("output".to_owned(), host(output))];
        list.extend(gradients(weighted, leaves));
        list
    }
}

fn host<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn gradients<B: AutodiffBackend>(loss: Tensor<B, 1>, leaves: &Leaves<B>) -> Values {
    let mut made = loss.backward();
    let mut take = |(at, leaf): (usize, &Tensor<B, 2>)| {
        let values = leaf.grad_remove(&mut made).map_or_else(Vec::new, host);
        (format!("gradient {at}"), values)
    };
    leaves.iter().enumerate().map(&mut take).collect()
}

/// A case that runs the same on every backend.
trait Case {
    fn name(&self) -> String;
    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values;
}

struct Attention {
    /// Rows of each document.
    documents: Vec<usize>,
    /// Of ten rows of a document, how many are queries.
    tenths: usize,
    heads: [usize; 2],
    sizes: [usize; 2],
    steps: usize,
}

impl Attention {
    /// Documents with query rows, and for each query row what it sees.
    fn visibility(&self, random: &mut Random) -> (Vec<Segment>, Vec<u32>) {
        let (mut segments, mut visible, mut key) = (Vec::new(), Vec::new(), 0);
        for &length in &self.documents {
            let count = (length * self.tenths / 10).max(1);
            let rows = random.some(count, length);
            let first = visible.len();
            visible.extend(rows.iter().map(|row| key as u32 + row + 1));
            let end = visible.last().map_or(key, |&end| end as usize);
            segments.push(Segment { queries: first..visible.len(), keys: key..end });
            key += length;
        }
        (segments, visible)
    }
}

impl Case for Attention {
    fn name(&self) -> String {
        let Self { documents, tenths, heads, sizes, steps } = self;
        format!("attention {documents:?} {tenths}/10 heads {heads:?} sizes {sizes:?} steps {steps}")
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([heads, groups], [qk, v]) = (self.heads, self.sizes);
        let mut random = Random(6);
        let (segments, visible) = self.visibility(&mut random);
        let (n, m) = (visible.len(), self.documents.iter().sum::<usize>());
        let mut leaves = vec![runner.leaf(&random.reals(n * heads * qk), [n, heads * qk])];
        let (mut keys, mut values, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..=self.steps {
            let rows = if step == 0 { m } else { n + 2 * (self.steps - step) };
            for (list, width) in [(&mut keys, groups * qk), (&mut values, groups * v)] {
                let leaf = runner.leaf(&random.reals(rows * width), [rows, width]);
                list.push(leaf.clone().reshape([rows, groups, width / groups]));
                leaves.push(leaf);
            }
            if step > 0 {
                own.push(runner.rows(&random.some(n, rows)));
            }
        }
        let scale = 1.0 / (qk as f64).sqrt();
        let plan = AttentionPlan { segments, visible: runner.rows(&visible), own, scale };
        let queries = leaves[0].clone().reshape([n, heads, qk]);
        let attend = |queries: Tensor<B, 3>| match runner.plain {
            true => plain::ttt_attention(queries, &keys, &values, &plan),
            false => B::ttt_attention(queries, &keys, &values, &plan),
        };
        // Twice, so that gradients of keys and values are added up.
        let out = attend(queries.clone()) + attend(queries * 0.5);
        runner.finish(out, &random.reals(n * heads * v), &leaves)
    }
}

struct Distill {
    rows: usize,
    states: usize,
    width: usize,
    /// Target and draft.
    vocabularies: [usize; 2],
    states_at_once: usize,
}

impl Case for Distill {
    fn name(&self) -> String {
        let Self { rows, states, width, vocabularies, states_at_once } = self;
        format!("distill {rows}/{states} x {width}, {vocabularies:?}, {states_at_once} at once")
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([vocab, draft], width, mut random) = (self.vocabularies, self.width, Random(7));
        let mut leaf = |rows: usize, spread: f32| {
            let values: Vec<f32> = random
                .reals(rows * width)
                .into_iter()
                .map(|x| half::bf16::from_f32(x * spread).to_f32())
                .collect();
            runner.leaf(&values, [rows, width])
        };
        let spread = 2.0 / (width as f32).sqrt();
        let leaves = vec![leaf(self.rows, 1.0), leaf(draft, spread)];
        let states = leaf(self.states, 1.5).detach();
        let lm_head = leaf(vocab, spread).detach();
        let head = TeacherHead {
            norm: runner.exact(&random.reals(width), [width]),
            norm_eps: 1e-5,
            lm_head,
            draft_to_target: runner.rows(&random.some(draft, vocab)),
        };
        let mut of_row: Vec<u32> =
            (0..self.rows).map(|_| random.below(self.states) as u32).collect();
        of_row.sort_unstable();
        let rows = DistillRows {
            weights: (0..self.rows).map(|row| (row % 5) as f32 * 0.1).collect(),
            states: of_row,
            loss: LossKind::SoftCrossEntropy,
            states_at_once: self.states_at_once,
        };
        let (hidden, weight) = (leaves[0].clone(), leaves[1].clone());
        let Distilled { loss, rows } = match runner.plain {
            true => plain::distill(hidden, weight, states, &head, &rows),
            false => B::distill(hidden, weight, states, &head, &rows),
        };
        let mut list = vec![("loss".to_owned(), host(loss.clone()))];
        let outcomes = host(rows);
        let column = |at: usize| outcomes.iter().skip(at).step_by(3).copied().collect();
        list.extend([("losses".to_owned(), column(0)), ("overlaps".to_owned(), column(1))]);
        if runner.dtype == FloatDType::F32 || runner.plain {
            list.push(("right".to_owned(), column(2)));
        }
        list.extend(gradients(loss * 1.5, &leaves));
        list
    }
}

struct Update([usize; 2]);

impl Case for Update {
    fn name(&self) -> String {
        format!("adamw {:?}", self.0)
    }

    fn run<B: Differentiable>(&self, runner: &Runner<B>) -> Values {
        let ([rows, cols], mut random) = (self.0, Random(8));
        let mixed = runner.dtype != FloatDType::F32;
        let start = runner.exact(&random.reals(rows * cols), self.0).inner();
        let param = runner.tensor(&host(start.clone()), self.0).inner();
        let zeros = runner.exact(&vec![0.0; rows * cols], self.0).inner();
        let mut state = AdamWState {
            param,
            master: mixed.then_some(start),
            first: zeros.clone(),
            second: zeros,
        };
        for number in 1..=3 {
            let gradient = runner.tensor(&random.reals(rows * cols), self.0).inner();
            let step = AdamWStep {
                learning_rate: 0.01,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
                number,
                gradient_scale: 0.5,
            };
            state = match runner.plain {
                true => plain::adamw_step(state, gradient, &step),
                false => B::InnerBackend::adamw_step(state, gradient, &step),
            };
        }
        let exact = state.master.clone().unwrap_or_else(|| state.param.clone());
        let squares = B::InnerBackend::square_sums(&[crate::Param::Matrix(exact.clone())]);
        vec![
            ("param".to_owned(), host(state.param)),
            ("master".to_owned(), host(exact)),
            ("first".to_owned(), host(state.first)),
            ("second".to_owned(), host(state.second)),
            ("squares".to_owned(), squares.into_iter().map(|sum| sum as f32).collect()),
        ]
    }
}

/// Compares every operation of `B` in a type with the plain forms in f32 on the CPU. Differences
/// are relative to the largest entry. Errors when the device stops working.
pub fn compare<B: Differentiable>(
    dtype: FloatDType,
    device: &B::Device,
) -> Result<Vec<Difference>, DeviceFault> {
    let mut list = Vec::new();
    macro_rules! check {
        ($($case:expr),* $(,)?) => { $(one::<B>(&$case, (dtype, device), &mut list)?;)* };
    }
    for shape in [[5, 7, 3], [33, 100, 257], [130, 192, 96]] {
        let alone = Project { shape, around: [0, 0] };
        check!(alone, Project { shape, around: [64, 0] }, Project { shape, around: [3, 9] });
    }
    check!(Norm([3, 7]), Norm([300, 100]), Norm([65, 7168]));
    for activations in [Activations::Keep, Activations::Recompute] {
        for shape in [[3, 7, 5], [70, 96, 40], [9, 64, 1000]] {
            check!(Mlp { shape, activations });
        }
    }
    check!(Place([23, 7, 9]), Place([120, 192, 60]));
    for interleaved in [false, true] {
        for shape in [[5, 3, 6], [40, 2, 64], [33, 4, 128]] {
            check!(Turn { shape, interleaved });
        }
    }
    check!(Gather([5, 7, 11]), Gather([60, 192, 40]));
    let sizes = [[8, 8], [10, 5], [64, 64], [128, 128], [192, 128]];
    for (at, sizes) in sizes.into_iter().enumerate() {
        let heads = if at % 2 == 0 { [4, 2] } else { [3, 3] };
        check!(
            Attention { documents: vec![23], tenths: 10, heads, sizes, steps: 0 },
            Attention { documents: vec![70, 1, 141], tenths: 6, heads, sizes, steps: 3 },
        );
    }
    let wide = Attention {
        documents: vec![300, 517],
        tenths: 10,
        heads: [2, 2],
        sizes: [128, 128],
        steps: 2,
    };
    check!(wide);
    let vocabularies = [[61, 37], [520, 256], [1500, 999]];
    for vocabularies in vocabularies {
        let states_at_once = 16;
        check!(Distill { rows: 90, states: 41, width: 48, vocabularies, states_at_once });
    }
    check!(Update([1, 5]), Update([33, 100]), Update([16, 256]));
    Ok(list)
}

fn one<B: Differentiable>(
    case: &impl Case,
    (dtype, device): (FloatDType, &B::Device),
    list: &mut Vec<Difference>,
) -> Result<(), DeviceFault> {
    let exact = FloatDType::F32;
    let reference =
        Runner::<Autodiff<Flex>> { device: Default::default(), dtype: exact, plain: true };
    let expected = case.run(&reference);
    let runner = Runner::<B> { device: device.clone(), dtype, plain: false };
    let computed = case.run(&runner);
    if let Some(fault) = B::fault(device) {
        return Err(DeviceFault {
            message: format!("{}: {}", case.name(), fault.message),
            ..fault
        });
    }
    for (name, computed) in computed {
        let Some((_, expected)) = expected.iter().find(|(known, _)| *known == name) else {
            continue;
        };
        let most = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = computed.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let worst =
            apart.fold(0.0f32, |worst, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) });
        let same_length = computed.len() == expected.len();
        let value = if same_length { f64::from(worst / most.max(1e-20)) } else { f64::INFINITY };
        let turned = 1.0 - cosine(&computed, expected);
        list.push(Difference {
            name: format!("{} {name} (turned {turned:.0e})", case.name()),
            value,
        });
    }
    Ok(())
}
