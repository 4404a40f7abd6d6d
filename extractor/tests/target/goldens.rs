//! Expected values of the Hugging Face implementation in float32.

use extractor::golden::{Golden, GoldenReport};
use extractor::target::{EngineOptions, ExpertPlan, QaNormEps, RankGroup};

use crate::{NANO_KIMI, STORIES, TINY_ODD, options, repository};

const TOLERANCE: f64 = 1e-4;

/// Models with experts.
const ROUTED: [(&str, &str); 3] = [
    ("nano_kimi_int4", NANO_KIMI),
    ("tiny_odd", TINY_ODD),
    ("tiny_qwen3_moe", "tests/fixtures/tiny-qwen3-moe"),
];

fn compare(golden: &str, options: &EngineOptions) -> GoldenReport {
    let path = repository(&format!("tests/fixtures/golden/{golden}.safetensors"));
    let golden = Golden::read(&path, options.qa_norm_eps).unwrap();
    let mut target = RankGroup::open(options).unwrap();
    let together = golden.compare(&mut target, true).unwrap();
    assert!(together.agrees(TOLERANCE), "one batch of all prompts: {together:#?}");
    golden.compare(&mut target, false).unwrap()
}

/// Tensor parallelism must not change what the model computes.
fn agrees_at_every_tp(golden: &str, model: &str) -> GoldenReport {
    agrees_at(&[1, 2, 4, 8], golden, model)
}

fn agrees_at(tps: &[usize], golden: &str, model: &str) -> GoldenReport {
    let mut last = None;
    for &tp in tps {
        let report = compare(golden, &options(model, tp));
        assert!(report.agrees(TOLERANCE), "tp {tp}: {report:#?}");
        last = Some(report);
    }
    last.unwrap()
}

#[test]
fn nano_kimi_int4() {
    let report = agrees_at_every_tp("nano_kimi_int4", NANO_KIMI);
    // 7 routed layers of prompts of 1, 17, 131 and 401 tokens, and 32 tokens of continuation.
    assert_eq!(report.routed + report.routed_near_ties, 7 * (1 + 17 + 131 + 401));
    assert_eq!(report.greedy, 32);
    let states = report.differences.iter().filter(|d| d.tensor.contains(".h_")).count();
    assert_eq!(states, 4 * 9);
}

/// No query latent, two shared experts, groups of experts, value heads of another width.
#[test]
fn tiny_odd() {
    agrees_at_every_tp("tiny_odd", TINY_ODD);
}

/// A Llama with a tied head; at 8 ranks two of them share a key-value head.
#[test]
fn stories260k() {
    let report = agrees_at_every_tp("stories260k", STORIES);
    assert_eq!(report.greedy, 128);
}

/// Biases on queries, keys and values, and a tied head.
#[test]
fn tiny_qwen2() {
    let report = agrees_at(&[1, 2, 4], "tiny_qwen2", "tests/fixtures/tiny-qwen2");
    assert_eq!(report.greedy, 16);
}

/// Norms of query and key heads, and YaRN that scales cos and sin.
#[test]
fn tiny_qwen3() {
    let report = agrees_at(&[1, 2, 4], "tiny_qwen3", "tests/fixtures/tiny-qwen3");
    assert_eq!(report.greedy, 16);
}

/// A softmax over all experts for a router, no shared ones, and attention in groups.
#[test]
fn tiny_qwen3_moe() {
    let report = agrees_at(&[1, 2, 4], "tiny_qwen3_moe", "tests/fixtures/tiny-qwen3-moe");
    assert_eq!(report.routed + report.routed_near_ties, 3 * 90);
    assert_eq!(report.greedy, 16);
}

/// The router's own experts, given, are the same computation; others are another, and are noticed.
#[test]
fn experts_may_be_given() {
    for (golden, model) in ROUTED {
        let path = repository(&format!("tests/fixtures/golden/{golden}.safetensors"));
        let mut golden = Golden::read(&path, QaNormEps::Hf).unwrap();
        let mut target = RankGroup::open(&options(model, 2)).unwrap();
        for together in [false, true] {
            let report = golden.compare_given(&mut target, together).unwrap().unwrap();
            assert!(report.agrees() && report.largest_margin < 1e-4, "{report:#?}");
            assert!(report.cosines.iter().all(|it| it.worst > 1.0 - 1e-6), "{report:#?}");
        }
        let (_, choice) = golden.prompts[0].routers.iter_mut().next().unwrap();
        let row = choice.indices.len() / choice.margins.len();
        let other = (0..).find(|expert| !choice.indices[..row].contains(expert)).unwrap();
        choice.indices[0] = other;
        let report = golden.compare_given(&mut target, true).unwrap().unwrap();
        assert!(!report.agrees() && report.otherwise > 0, "{report:#?}");

        let (_, choice) = golden.prompts[0].routers.iter_mut().next().unwrap();
        choice.indices[0] = u32::MAX;
        let refused = golden.compare_given(&mut target, true).unwrap_err().to_string();
        assert!(refused.contains("different experts below"), "{refused}");
    }
}

/// The same states whether ranks hold whole experts or a part of each.
#[test]
fn experts_cut_over_all_ranks() {
    for (golden, model) in ROUTED {
        let options = EngineOptions { experts: ExpertPlan::Sharded, ..options(model, 4) };
        let report = compare(golden, &options);
        assert!(report.agrees(TOLERANCE), "{report:#?}");
    }
}

/// The two readings of the latent norms' epsilon differ by more than this engine's error, so each
/// agrees with its own values only.
#[test]
fn latent_norm_epsilon() {
    let config = EngineOptions { qa_norm_eps: QaNormEps::Config, ..options(NANO_KIMI, 1) };
    let report = compare("nano_kimi_int4", &config);
    assert!(report.agrees(2e-5), "{report:#?}");
    let path = repository("tests/fixtures/golden/nano_kimi_int4.safetensors");
    let golden = Golden::read(&path, QaNormEps::Config).unwrap();
    let mut hf = RankGroup::open(&options(NANO_KIMI, 1)).unwrap();
    let crossed = golden.compare(&mut hf, false).unwrap();
    assert!(!crossed.agrees(2e-5), "{crossed:#?}");
}

/// The comparison itself must notice a wrong state, expert and continuation.
#[test]
fn a_wrong_golden_is_noticed() {
    let path = repository("tests/fixtures/golden/nano_kimi_int4.safetensors");
    let golden = Golden::read(&path, QaNormEps::Hf).unwrap();
    let mut target = RankGroup::open(&options(NANO_KIMI, 1)).unwrap();
    let mut check = |spoil: &dyn Fn(&mut Golden)| {
        let mut golden = golden.clone();
        golden.prompts.retain(|prompt| prompt.name == "p17");
        spoil(&mut golden);
        golden.compare(&mut target, false).unwrap().agrees(TOLERANCE)
    };
    assert!(check(&|_| {}));
    assert!(!check(&|golden| golden.prompts[0].states.get_mut(&5).unwrap()[77] += 0.01));
    assert!(!check(&|golden| golden.prompts[0].logits[3] = f32::NAN));
    assert!(!check(&|golden| golden.prompts[0].greedy_ids[20] ^= 1));
    assert!(!check(&|golden| {
        let choice = golden.prompts[0].routers.get_mut(&3).unwrap();
        choice.indices[0] = (choice.indices[0] + 1) % 8;
        choice.weights.clear();
    }));
}
