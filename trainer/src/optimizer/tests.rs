//! AdamW against its definition; clipping, refusals, frozen parameters, the average.

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
    AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, clip, frozen: None }
}

fn gradients(draft: &Eagle3Draft<Flex>, value: impl Fn(usize) -> f32) -> Summed<Flex> {
    let fill = |(name, param): (String, Param<Flex>)| {
        let shape = param.shape();
        let values = (0..shape.iter().product()).map(&value).collect();
        (name, Some(Param::from_vec(values, &shape, &Default::default())))
    };
    draft.parameters().into_iter().map(fill).collect()
}

fn values(draft: &Eagle3Draft<Flex>) -> Vec<f32> {
    draft.parameters().iter().flat_map(|(_, p)| p.to_vec()).collect()
}

/// All values of a kind.
fn moments(adamw: &AdamW<Flex>, what: Kept) -> impl Iterator<Item = f32> {
    let mut values = Vec::new();
    let mut take = |kept, _: &str, param: Param<Flex>| {
        if kept == what {
            values.extend(param.to_vec());
        }
    };
    adamw.each(&draft(), &Shards::alone(), &mut take).unwrap();
    values.into_iter()
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
    let mut adamw = AdamW::new(settings(0.0, 0.1), &start, &Shards::alone());
    let mut now = start.clone();
    let gradient = |at: usize| (at as f32 - 3.0) * 0.25;
    for _ in 0..5 {
        let step = (0.01, &Shards::alone());
        adamw.update(&mut now, gradients(&start, gradient), step).unwrap();
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
    let mut clipped = AdamW::new(settings(0.5, 0.0), &start, &Shards::alone());
    let norm = clipped
        .update(&mut start.clone(), gradients(&start, |_| 2.0), (0.01, &Shards::alone()))
        .unwrap();
    assert!((norm - 2.0 * count.sqrt()).abs() < 1e-3 * norm);
    let squares: f64 = moments(&clipped, Kept::First).map(|m| f64::from(m).powi(2)).sum();
    assert!((squares.sqrt() - 0.1 * 0.5).abs() < 1e-5, "{}", squares.sqrt());
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let start = draft();
    let mut adamw = AdamW::new(settings(0.5, 0.0), &start, &Shards::alone());
    for bad in [f32::NAN, f32::INFINITY] {
        let gradients = gradients(&start, |at| if at == 1 { bad } else { 1.0 });
        let mut now = start.clone();
        let error = adamw.update(&mut now, gradients, (0.01, &Shards::alone())).unwrap_err();
        assert_eq!(values(&now), values(&start));
        assert!(
            matches!(&error, GradientError::NotFinite { name, step: 0 } if name == "fc.weight")
        );
        assert_eq!(error.exit_code(), 65);
    }
    for what in [Kept::First, Kept::Second] {
        assert!(moments(&adamw, what).all(|x| x == 0.0));
    }
    assert_eq!(adamw.steps(), 0);
}

#[test]
fn what_is_frozen_stays_and_the_average_follows() {
    let start = draft();
    let shards = Shards::alone();
    let settings = AdamWConfig { frozen: Some("lm_head.weight"), ..settings(0.0, 0.0) };
    let mut adamw =
        AdamW::new(settings, &start, &shards).with_average(0.7, start.parameters(), &shards);
    let mut now = start.clone();
    let mut expected: Vec<f32> = values(&start);
    // Up to step 20 the average is young and follows faster than 0.7 allows.
    for step in 1..=25 {
        adamw.update(&mut now, gradients(&start, |_| 1.0), (0.01, &shards)).unwrap();
        let present = values(&now);
        let taken = f64::from(step);
        let share = if step > 20 { 0.7 } else { (1.0 + taken) / (10.0 + taken) };
        let follow = |old: f32, new: f32| share * f64::from(old) + (1.0 - share) * f64::from(new);
        expected.iter_mut().zip(present).for_each(|(old, new)| *old = follow(*old, new) as f32);
    }
    for ((name, before), (_, after)) in start.parameters().iter().zip(now.parameters()) {
        let same = before.to_vec() == after.to_vec();
        assert_eq!(same, name == "lm_head.weight", "{name}");
    }
    let average = adamw.average(&now, &shards).unwrap().unwrap();
    let average: Vec<f32> = average.iter().flat_map(|(_, p)| p.to_vec()).collect();
    for (at, (got, want)) in average.iter().zip(&expected).enumerate() {
        assert!((got - want).abs() < 1e-6, "{at}: {got} {want}");
    }
    // What is frozen is its own average, to the last bit.
    for _ in 0..20 {
        adamw.update(&mut now, gradients(&start, |_| 1.0), (0.01, &shards)).unwrap();
    }
    let average = adamw.average(&now, &shards).unwrap().unwrap();
    let head = |list: &Named<Flex>| list.last().unwrap().1.to_vec();
    assert_eq!(head(&average), head(&start.parameters()));
    // The norm is that of what is trained, and so are the moments.
    let count = values(&start).len() - 5 * 4;
    assert_eq!([Kept::First, Kept::Second].map(|what| moments(&adamw, what).count()), [count; 2]);
    let norm = adamw.update(&mut now, gradients(&start, |_| 1.0), (0.01, &shards)).unwrap();
    assert!((norm - (count as f64).sqrt()).abs() < 1e-4, "{norm}");
}
