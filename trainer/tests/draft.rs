//! Draft configuration, parameters and fresh weights.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::backend::{Autodiff, Flex};
use trainer::draft::{AttentionConfig, DraftConfigError, ParamShapeError, Yarn};
use trainer::{DraftConfig, Eagle3Draft, Param};

fn mla() -> DraftConfig {
    DraftConfig {
        hidden_size: 24,
        intermediate_size: 40,
        num_attention_heads: 4,
        attention: AttentionConfig::Mla {
            q_lora_rank: 10,
            kv_lora_rank: 6,
            qk_nope_head_dim: 8,
            qk_rope_head_dim: 4,
            v_head_dim: 5,
        },
        rms_norm_eps: 1e-5,
        rope_theta: 50000.0,
        yarn: Some(Yarn {
            factor: 64.0,
            original_max_position_embeddings: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
        }),
        vocab_size: 50,
        draft_vocab_size: 20,
        num_aux: 3,
        fc_norm: true,
        norm_output: false,
        norm_before_residual: false,
    }
}

fn gqa() -> DraftConfig {
    let attention = AttentionConfig::Gqa { num_key_value_heads: 2, head_dim: 8 };
    DraftConfig { attention, yarn: None, fc_norm: false, ..mla() }
}

#[test]
fn config_reads_back_what_it_wrote() {
    for config in [mla(), gqa()] {
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<DraftConfig>(&text).unwrap(), config);
        let misspelt = text.replace("rope_theta", "rope_tehta");
        assert!(serde_json::from_str::<DraftConfig>(&misspelt).is_err());
        let extra = text.replace("\"kind\"", "\"window\":1,\"kind\"");
        assert!(serde_json::from_str::<DraftConfig>(&extra).is_err());
    }
}

#[test]
fn impossible_configs_are_named() {
    let zero = DraftConfig { intermediate_size: 0, ..gqa() }.validate().unwrap_err();
    assert!(matches!(zero, DraftConfigError::Zero { field: "intermediate_size" }));
    let groups = AttentionConfig::Gqa { num_key_value_heads: 3, head_dim: 8 };
    let heads = DraftConfig { attention: groups, ..gqa() }.validate().unwrap_err();
    assert!(matches!(heads, DraftConfigError::Heads { heads: 4, groups: 3 }));
    let none = AttentionConfig::Gqa { num_key_value_heads: 0, head_dim: 8 };
    let none = DraftConfig { attention: none, ..gqa() }.validate().unwrap_err();
    assert!(matches!(none, DraftConfigError::Zero { field: "attention.num_key_value_heads" }));
    let odd = AttentionConfig::Gqa { num_key_value_heads: 2, head_dim: 7 };
    let odd = DraftConfig { attention: odd, ..gqa() }.validate().unwrap_err();
    assert!(matches!(odd, DraftConfigError::OddRotation { field: "head_dim", size: 7 }));
    let vocabulary = DraftConfig { draft_vocab_size: 51, ..gqa() }.validate().unwrap_err();
    assert!(matches!(vocabulary, DraftConfigError::Vocabulary { draft: 51, target: 50 }));
    for eps in [0.0, f64::NAN, f64::INFINITY] {
        assert!(DraftConfig { rms_norm_eps: eps, ..gqa() }.validate().is_err());
    }
    let yarn = mla().yarn.map(|yarn| Yarn { mscale: 0.7, ..yarn });
    assert!(DraftConfig { yarn, ..mla() }.validate().is_err());
}

fn flat(draft: &Eagle3Draft<Flex>) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let all = draft.parameters().into_iter();
    all.map(|(name, param)| (name, param.shape(), param.to_vec())).collect()
}

#[test]
fn fresh_weights_follow_the_seed() {
    let draft = |seed| Eagle3Draft::<Flex>::init(mla(), seed, &Default::default()).unwrap();
    assert_eq!(flat(&draft(7)), flat(&draft(7)));
    assert_ne!(flat(&draft(7)), flat(&draft(8)));
    let shapes: Vec<_> =
        flat(&draft(7)).into_iter().map(|(name, shape, _)| (name, shape)).collect();
    assert_eq!(shapes, mla().parameter_shapes());
    let all: Vec<f32> = flat(&draft(7))
        .into_iter()
        .filter(|(_, shape, _)| shape.len() == 2)
        .flat_map(|(.., values)| values)
        .collect();
    let count = all.len() as f32;
    let mean = all.iter().sum::<f32>() / count;
    let spread = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / count).sqrt();
    assert!(mean.abs() < 1e-3 && (spread - 0.02).abs() < 1e-3, "{mean} {spread}");
}

#[test]
fn parameters_rebuild_the_draft() {
    for config in [mla(), gqa()] {
        let draft = Eagle3Draft::<Flex>::init(config.clone(), 3, &Default::default()).unwrap();
        let mut stored = draft.parameters().into_iter();
        let rebuilt = Eagle3Draft::from_parameters(config.clone(), &mut |name, _| {
            let (stored_name, param) = stored.next().unwrap();
            assert_eq!(stored_name, name);
            Ok::<_, ParamShapeError>(param)
        });
        assert_eq!(flat(&rebuilt.unwrap()), flat(&draft));
        let wrong = Eagle3Draft::<Flex>::from_parameters(config, &mut |_, shape| {
            let count = shape.iter().product();
            Ok::<_, ParamShapeError>(Param::from_vec(
                vec![0.0; count],
                &[count],
                &Default::default(),
            ))
        });
        assert_eq!(wrong.unwrap_err().name, "fc.weight");
        let tracked = Eagle3Draft::<Autodiff<Flex>>::tracked(&draft);
        assert_eq!(flat(&tracked.valid()), flat(&draft));
    }
}
