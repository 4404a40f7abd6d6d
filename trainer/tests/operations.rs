//! The CPU forms of the training operations against plain burn operations, with gradients.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::backend::{Autodiff, Flex};
use burn::tensor::{FloatDType, Tensor, TensorData};
use proptest::prelude::*;
use trainer::losses::LossKind;
use trainer::ops::{
    Activations, AdamWState, AdamWStep, AttentionPlan, DistillRows, DraftOps, MlpWeights,
    RotaryTable, RowIndex, Segment, TeacherHead, plain,
};

type B = Autodiff<Flex>;

/// Numbers in -1..1 that differ by seed.
fn numbers<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<B, D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<B, D> {
    numbers(shape, seed).require_grad()
}

fn index(rows: &[u32]) -> RowIndex<B> {
    RowIndex::new(rows.to_vec(), &Default::default())
}

#[track_caller]
fn near<const D: usize>(got: Tensor<Flex, D>, want: Tensor<Flex, D>) {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (got.to_data(), want.to_data());
    let largest = want.iter::<f32>().fold(1e-3f32, |max, x| max.max(x.abs()));
    for (got, want) in got.iter::<f32>().zip(want.iter::<f32>()) {
        assert!((got - want).abs() <= 2e-5 * largest, "{got} is not {want} (of {largest})");
    }
}

/// Outputs, and gradients of a weighted sum of them, agree.
macro_rules! assert_same {
    ($seed:expr, $got:expr, $want:expr, [$($leaf:expr),+]) => {{
        let (got, want) = ($got, $want);
        near(got.clone().inner(), want.clone().inner());
        let weights = numbers(want.dims(), $seed ^ 77);
        let got = (got * weights.clone()).sum().backward();
        let want = (want * weights).sum().backward();
        $(near(
            $leaf.grad(&got).expect(concat!("got ", stringify!($leaf))),
            $leaf.grad(&want).expect(concat!("want ", stringify!($leaf))),
        );)+
    }};
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    #[test]
    fn row_operations(
        rows in 1usize..150,
        // The gradient of a norm of one value is a difference of nearly equal numbers.
        width in 2usize..40,
        out in 1usize..30,
        seed in any::<u64>(),
    ) {
        let (x, w) = (leaf([rows, width], seed), leaf([out, width], seed ^ 1));
        let sum = leaf([rows, out], seed ^ 4);
        assert_same!(
            seed,
            B::project_part(x.clone(), w.clone(), 0, Some(sum.clone())),
            plain::project_part(x.clone(), w.clone(), 0, Some(sum.clone())),
            [x, w, sum]
        );
        let (part, w) = (leaf([rows, width], seed), leaf([out, width + 5], seed ^ 1));
        assert_same!(
            seed,
            B::project_part(part.clone(), w.clone(), 3, None),
            plain::project_part(part.clone(), w.clone(), 3, None),
            [part, w]
        );
        // A leaf whose graph was consumed would lose gradients of a second pair of graphs.
        let (x, norm) = (leaf([rows, width], seed), leaf([width], seed ^ 2));
        assert_same!(
            seed,
            B::rms_norm(x.clone(), norm.clone(), 1e-3),
            plain::rms_norm(x.clone(), norm.clone(), 1e-3),
            [x, norm]
        );
    }

    #[test]
    fn an_mlp_with_and_without_its_activations(
        rows in 1usize..90,
        width in 2usize..20,
        inner in 1usize..30,
        seed in any::<u64>(),
    ) {
        for activations in [Activations::Keep, Activations::Recompute] {
            let (x, norm) = (leaf([rows, width], seed), leaf([width], seed ^ 2));
            let (gate, up) = (leaf([inner, width], seed ^ 3), leaf([inner, width], seed ^ 4));
            let down = leaf([width, inner], seed ^ 5);
            let weights = MlpWeights {
                norm: norm.clone(),
                eps: 1e-3,
                gate: gate.clone(),
                up: up.clone(),
                down: down.clone(),
            };
            // Twice, so that the gradients of the weights add up.
            assert_same!(
                seed,
                {
                    let once = B::mlp(x.clone(), weights.clone(), activations);
                    B::mlp(once, weights.clone(), activations)
                },
                plain::mlp(plain::mlp(x.clone(), weights.clone()), weights.clone()),
                [x, norm, gate, up, down]
            );
        }
    }

    #[test]
    fn a_weight_used_twice_adds_up(rows in 1usize..20, seed in any::<u64>()) {
        let (x, w) = (leaf([rows, 6], seed), leaf([6, 6], seed ^ 1));
        let twice = |f: fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>| {
            f(f(x.clone(), w.clone()), w.clone()) + x.clone().matmul(w.clone())
        };
        let plainly = |x, w| plain::project_part(x, w, 0, None);
        assert_same!(seed, twice(B::project), twice(plainly), [x, w]);
    }

    #[test]
    fn rotation(
        positions in proptest::collection::vec(0u32..20, 1..90),
        heads in 1usize..4,
        pairs in 1usize..9,
        interleaved in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let angles = numbers([20, pairs], seed ^ 5) * 3.0;
        let table = RotaryTable { cos: angles.clone().cos(), sin: angles.sin(), interleaved };
        let x = leaf([positions.len(), heads, 2 * pairs], seed);
        let positions = index(&positions);
        assert_same!(
            seed,
            B::rope(x.clone(), &table, &positions),
            plain::rope(x.clone(), &table, &positions),
            [x]
        );
    }

    #[test]
    fn attention(
        documents in proptest::collection::vec((1usize..9, 1usize..9), 1..4),
        (groups, each) in (1usize..3, 1usize..4),
        (key, value) in (1usize..9, 1usize..9),
        later in 0usize..4,
        seed in any::<u64>(),
    ) {
        let (mut segments, mut visible) = (Vec::new(), Vec::new());
        let (mut query, mut first) = (0, 0);
        for (queries, keys) in documents {
            // The last query sees the last key, earlier ones fewer.
            let end = |row| first + keys.saturating_sub(queries - 1 - row).max(1);
            let ends = (0..queries).map(end);
            visible.extend(ends.map(|end| end as u32));
            segments.push(Segment { queries: query..query + queries, keys: first..first + keys });
            (query, first) = (query + queries, first + keys);
        }
        // At each later step the rows are reversed, so that places matter.
        let own = vec![index(&(0..query as u32).rev().collect::<Vec<_>>()); later];
        let plan = AttentionPlan { segments, visible: index(&visible), own, scale: 0.7 };
        let queries = leaf([query, groups * each, key], seed);
        let rows = |step: usize| if step == 0 { first } else { query };
        let keys: Vec<_> =
            (0..=later).map(|s| leaf([rows(s), groups, key], seed ^ (10 + s as u64))).collect();
        let values: Vec<_> =
            (0..=later).map(|s| leaf([rows(s), groups, value], seed ^ (20 + s as u64))).collect();
        let all = || keys.iter().chain(&values).chain([&queries]);
        let got = B::ttt_attention(queries.clone(), &keys, &values, &plan);
        let want = plain::ttt_attention(queries.clone(), &keys, &values, &plan);
        near(got.clone().inner(), want.clone().inner());
        let weights = numbers(want.dims(), seed ^ 77);
        let got = (got * weights.clone()).sum().backward();
        let want = (want * weights).sum().backward();
        for operand in all() {
            near(operand.grad(&got).unwrap(), operand.grad(&want).unwrap());
        }
    }

    #[test]
    fn distillation(
        mut states in proptest::collection::vec(0u32..30, 1..60),
        at_once in 1usize..40,
        loss in 0usize..3,
        seed in any::<u64>(),
    ) {
        let loss = [
            LossKind::SoftCrossEntropy,
            LossKind::KullbackLeibler,
            LossKind::Acceptance { eta: 3.0 },
        ][loss];
        let (width, vocabulary) = (6, 4500);
        states.sort_unstable();
        let draft: Vec<u32> = (0..vocabulary as u32).filter(|id| id % 7 < 2).collect();
        let head = TeacherHead {
            norm: numbers([width], seed ^ 3),
            norm_eps: 1e-5,
            lm_head: numbers([vocabulary, width], seed ^ 4) * 3.0,
            draft_to_target: index(&draft),
        };
        let hidden = leaf([states.len(), width], seed);
        let lm_head = leaf([draft.len(), width], seed ^ 1);
        let all_states = numbers([30, width], seed ^ 2);
        let weights = (0..states.len()).map(|row| (row % 3) as f32 * 0.3).collect();
        let rows = DistillRows { states, weights, loss, states_at_once: at_once };
        let run = |f: fn(_, _, _, &TeacherHead<B>, &DistillRows) -> trainer::ops::Distilled<B>| {
            f(hidden.clone(), lm_head.clone(), all_states.clone(), &head, &rows)
        };
        let (got, want) = (run(B::distill), run(plain::distill));
        near(got.rows.inner(), want.rows.inner());
        assert_same!(seed, got.loss, want.loss, [hidden, lm_head]);
        prop_assert_eq!(
            B::teacher_top(all_states.clone(), &head, at_once),
            plain::teacher_top(all_states.clone(), &head, 30)
        );
    }
}

/// The acceptance loss of one row, from its definition in f64, and its slope by differences.
#[test]
fn the_acceptance_loss_follows_its_definition() {
    let (width, draft) = (4, [0u32, 2, 3, 5, 6]);
    let head = TeacherHead {
        norm: Tensor::ones([width], &Default::default()),
        norm_eps: 0.0,
        lm_head: numbers([8, width], 4) * 2.0,
        draft_to_target: index(&draft),
    };
    let (state, weight) = (numbers([1, width], 2), numbers([draft.len(), width], 1) * 2.0);
    let host = |x: Tensor<B, 2>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let product = |rows: &[f64], x: &[f64]| -> Vec<f64> {
        rows.chunks(width).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let softmax = |z: &[f64]| -> Vec<f64> {
        let total: f64 = z.iter().map(|z| z.exp()).sum();
        z.iter().map(|z| z.exp() / total).collect()
    };
    let raw = host(state.clone());
    let root = (raw.iter().map(|x| x * x).sum::<f64>() / width as f64).sqrt();
    let normed: Vec<f64> = raw.iter().map(|x| x / root).collect();
    let whole = softmax(&product(&host(head.lm_head.clone()), &normed));
    let p: Vec<f64> = draft.iter().map(|&id| whole[id as usize]).collect();
    let mass: f64 = p.iter().sum();
    let lm_head = host(weight.clone());
    // Overlap and divergence at `x`; the weight between them is that of the point itself.
    let parts = |x: &[f64]| {
        let q = softmax(&product(&lm_head, x));
        let overlap: f64 = p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum();
        let divergence: f64 = p.iter().zip(&q).map(|(p, q)| p / mass * (p / mass / q).ln()).sum();
        (overlap, divergence)
    };
    let hidden = leaf([1, width], 9);
    let at = host(hidden.clone());
    let along = (-3.0 * parts(&at).0).exp();
    let value = |x: &[f64]| {
        let (overlap, divergence) = parts(x);
        along * divergence + (1.0 - along) * (1.0 - overlap)
    };
    let rows = DistillRows {
        states: vec![0],
        weights: vec![1.0],
        loss: LossKind::Acceptance { eta: 3.0 },
        states_at_once: 1,
    };
    let distilled = B::distill(hidden.clone(), weight, state, &head, &rows);
    let loss: f64 = distilled.loss.to_data().iter::<f64>().next().unwrap();
    assert!((loss - value(&at)).abs() < 1e-5, "{loss} {}", value(&at));
    let gradient = hidden.grad(&distilled.loss.backward()).unwrap();
    let gradient = gradient.to_data().iter::<f64>().collect::<Vec<_>>();
    for place in 0..width {
        let moved = |by: f64| {
            let mut x = at.clone();
            x[place] += by;
            value(&x)
        };
        let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((slope - gradient[place]).abs() < 1e-4, "{place}: {slope} {}", gradient[place]);
    }
}

/// Numbers of two updates computed by hand from the definition.
#[test]
fn adamw_follows_its_definition() {
    // A part of a larger tensor, whose storage must not be touched.
    let whole = numbers([9], 1).inner();
    let start = whole.clone().narrow(0, 2, 5);
    let gradients = [numbers([5], 2).inner(), numbers([5], 3).inner()];
    let mut state = AdamWState {
        param: start.clone(),
        master: None,
        first: start.zeros_like(),
        second: start.zeros_like(),
    };
    for (at, gradient) in gradients.iter().enumerate() {
        let step = AdamWStep {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            number: at as u64 + 1,
            gradient_scale: 0.5,
        };
        state = Flex::adamw_step(state, gradient.clone(), &step);
    }
    let host = |x: &Tensor<Flex, 1>| x.to_data().iter::<f64>().collect::<Vec<_>>();
    let (got, start) = (host(&state.param), host(&start));
    assert_eq!(host(&whole), host(&numbers([9], 1).inner()));
    let gradients = gradients.each_ref().map(host);
    for place in 0..5 {
        let (mut x, mut m, mut v) = (start[place], 0.0, 0.0);
        for (at, gradient) in gradients.iter().enumerate() {
            let g = 0.5 * gradient[place];
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            let power = at as i32 + 1;
            let (m, v) = (m / (1.0 - 0.9f64.powi(power)), v / (1.0 - 0.95f64.powi(power)));
            x -= 0.01 * (m / (v.sqrt() + 1e-8) + 0.1 * x);
        }
        assert!((x - got[place]).abs() < 1e-6, "{x} {}", got[place]);
    }
}

#[test]
fn every_operation_agrees_with_its_plain_form() {
    let list = trainer::gradcheck::compare::<B>(FloatDType::F32, &Default::default()).unwrap();
    assert!(list.len() > 150, "{} values compared", list.len());
    for difference in list {
        assert!(difference.value < 2e-5, "{difference:?}");
    }
}
