//! Model configurations that are read, and those that are refused.

use extractor::target::{
    AttentionSpec, Device, EngineOptions, ExpertPlan, RankGroup, RankPlan, RopeScaling,
    TargetError, TargetSpec,
};
use kernels::router::Scoring;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{NANO_KIMI, STORIES, TINY_ODD, options, repository};

fn config(model: &str) -> Value {
    let text = std::fs::read_to_string(repository(model).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Sets fields (null removes) and reads the result.
fn with(mut config: Value, fields: &Value) -> Result<TargetSpec, TargetError> {
    let map = config.as_object_mut().unwrap();
    for (name, value) in fields.as_object().unwrap() {
        map.insert(name.clone(), value.clone());
    }
    TargetSpec::from_json(&config)
}

#[test]
fn kimi_k2_5_nests_its_text_model() {
    let spec = TargetSpec::read(&repository(NANO_KIMI)).unwrap();
    assert_eq!((spec.model_type.as_str(), spec.num_layers, spec.vocab_size), ("kimi_k25", 8, 4096));
    assert_eq!(spec.eos_token_ids, [3842]);
    assert_eq!(spec.dtype.as_deref(), Some("bfloat16"));
    // 0.1 ln(4) + 1, squared, goes into the softmax; cos and sin stay as they are.
    assert!((spec.rope.softmax_factor() - 1.296_476_6).abs() < 1e-6);
    assert_eq!(spec.rope.amplitude(), 1.0);
    let flat = config(NANO_KIMI)["text_config"].clone();
    let flat = TargetSpec::from_json(&flat).unwrap();
    assert_eq!(TargetSpec { model_type: "kimi_k25".to_owned(), ..flat }, spec);
}

/// A wrapped Qwen3 keeps its norms of heads, and what would be left out of a checkpoint is refused.
#[test]
fn no_part_of_a_checkpoint_is_left_out_in_silence() {
    let wrapped =
        json!({"model_type": "kimi_k25", "text_config": config("tests/fixtures/tiny-qwen3")});
    let spec = TargetSpec::from_json(&wrapped).unwrap();
    assert!(matches!(&spec.attention, AttentionSpec::Gqa(gqa) if gqa.qk_norm), "{spec:?}");

    for (model, field, value, part) in [
        ("tests/fixtures/tiny-qwen2", "attention_bias", json!(false), "k_proj.bias"),
        ("tests/fixtures/tiny-qwen3", "model_type", json!("llama"), "k_norm.weight"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(repository(model)).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        let mut changed = config(model);
        changed[field] = value;
        std::fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
        let Err(error) = RankGroup::open(&EngineOptions::new(dir.path())) else {
            panic!("{model} is opened without its {part}");
        };
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn rope_parameters_of_transformers_5() {
    let old = with(
        config(TINY_ODD),
        &json!({
            "rope_theta": 5e4,
            "rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 256},
        }),
    );
    let new = with(
        config(TINY_ODD),
        &json!({
            "rope_theta": null,
            "rope_scaling": null,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 256},
            "torch_dtype": null,
            "dtype": "bfloat16",
        }),
    );
    let old = old.unwrap();
    assert!(matches!(old.rope.scaling, RopeScaling::Yarn(_)));
    assert_eq!(old, new.unwrap());
}

#[test]
fn qwen_has_biases_or_head_norms() {
    let attention = |model_type: &str| match with(
        config(STORIES),
        &json!({
            "model_type": model_type, "attention_bias": null, "eos_token_id": [7, 8],
        }),
    ) {
        Ok(TargetSpec { attention: AttentionSpec::Gqa(gqa), .. }) => (gqa.qkv_bias, gqa.qk_norm),
        other => panic!("{other:?}"),
    };
    assert_eq!(attention("llama"), (false, false));
    assert_eq!(attention("qwen2"), (true, false));
    assert_eq!(attention("qwen3"), (false, true));
}

#[test]
fn qwen_experts_are_scored_by_a_softmax_in_every_layer() {
    const MOE: &str = "tests/fixtures/tiny-qwen3-moe";
    let spec = TargetSpec::from_json(&config(MOE)).unwrap();
    let moe = spec.moe.clone().unwrap();
    assert_eq!((moe.num_experts, moe.top_k, moe.num_shared_experts), (8, 3, 0));
    assert_eq!(moe.scoring, Scoring::Softmax);
    assert!((0..spec.num_layers).all(|layer| spec.is_moe_layer(layer)));
    let AttentionSpec::Gqa(gqa) = &spec.attention else { panic!("{:?}", spec.attention) };
    assert!(gqa.qk_norm && !gqa.qkv_bias);
    // As transformers 5 writes it.
    let renamed = json!({"num_experts": null, "num_local_experts": 8});
    assert_eq!(with(config(MOE), &renamed).unwrap(), spec);
    for (fields, want) in [
        (json!({"num_experts": null}), "`num_local_experts` is missing"),
        (json!({"decoder_sparse_step": 2}), "only 1, every layer, is supported"),
        (json!({"mlp_only_layers": [0]}), "names 1 layers; none is supported"),
        (json!({"num_experts_per_tok": 9}), "only 8 experts"),
    ] {
        let error = with(config(MOE), &fields).unwrap_err().to_string();
        assert!(error.contains(want), "{fields}: {error}");
    }
}

#[test]
fn unknown_models_are_named_with_the_known_ones() {
    let error = with(config(STORIES), &json!({"model_type": "mamba"})).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    assert_eq!(
        error.to_string(),
        "model_type `mamba` is not supported; supported are deepseek_v3, kimi_k2, kimi_k25, llama, \
         qwen2, qwen3, qwen3_moe"
    );
}

#[test]
fn fields_out_of_range_are_named() {
    let cases = [
        (TINY_ODD, json!({"hidden_size": null}), "`hidden_size` is missing"),
        (TINY_ODD, json!({"hidden_size": 0}), "`hidden_size` is 0; an integer from 1 to 65536"),
        (TINY_ODD, json!({"hidden_size": "64"}), "`hidden_size` is \"64\"; an integer"),
        (TINY_ODD, json!({"num_hidden_layers": -1}), "`num_hidden_layers` is -1"),
        (TINY_ODD, json!({"vocab_size": 1e30}), "`vocab_size` is 1e+30"),
        (TINY_ODD, json!({"qk_rope_head_dim": 7}), "`qk_rope_head_dim` is 7; it must be even"),
        (TINY_ODD, json!({"rms_norm_eps": 2.0}), "`rms_norm_eps` is 2.0; a number from"),
        (TINY_ODD, json!({"n_group": 5}), "`n_group` is 5, which does not divide"),
        (TINY_ODD, json!({"n_group": 16}), "`n_group` is 16, which leaves 1 expert a group"),
        (TINY_ODD, json!({"topk_group": 5}), "`topk_group` is 5, more than n_group, 4"),
        (TINY_ODD, json!({"num_experts_per_tok": 9}), "only 8 experts are in the kept groups"),
        (TINY_ODD, json!({"num_key_value_heads": 4}), "needs num_attention_heads, 8"),
        (TINY_ODD, json!({"scoring_func": "softmax"}), "only sigmoid is supported"),
        (TINY_ODD, json!({"hidden_act": "gelu"}), "only silu is supported"),
        (TINY_ODD, json!({"rope_scaling": 3}), "`rope_scaling` is a number; an object"),
        (TINY_ODD, json!({"rope_scaling": {"type": "ntk"}}), "`rope_scaling.rope_type` is `ntk`"),
        (TINY_ODD, json!({"eos_token_id": [1, "x"]}), "`eos_token_id` holds \"x\""),
        (STORIES, json!({"num_key_value_heads": 3}), "does not divide num_attention_heads, 8"),
        (STORIES, json!({"attention_bias": true}), "biases are supported for qwen2 only"),
        (STORIES, json!({"use_sliding_window": true}), "sliding windows are not supported"),
        (STORIES, json!({"tie_word_embeddings": 1}), "true or false is expected"),
    ];
    for (model, fields, want) in cases {
        let error = with(config(model), &fields).unwrap_err().to_string();
        assert!(error.contains(want), "{fields}: {error}");
    }
    let error = TargetSpec::from_json(&json!([])).unwrap_err().to_string();
    assert!(error.contains("an object is expected"), "{error}");
}

#[test]
fn directories_without_a_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = TargetSpec::read(dir.path()).unwrap_err();
    assert_eq!(error.exit_code(), 74);
    std::fs::write(dir.path().join("config.json"), "{\"model_type\":").unwrap();
    let error = TargetSpec::read(dir.path()).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    // A configuration without its weights.
    let text = std::fs::read(repository(STORIES).join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    assert!(matches!(
        RankGroup::open(&EngineOptions::new(dir.path())).err().unwrap(),
        TargetError::Weights(_)
    ));
}

#[test]
fn a_configuration_without_end_is_not_read_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("config.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    let error = TargetSpec::read(dir.path()).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(source, "more than 16777216 bytes");
}

/// One layer more in the configuration than in the files: every rank stops, and the cause comes
/// back whichever rank saw it first.
#[test]
fn missing_weights_stop_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(STORIES);
    config["num_hidden_layers"] = json!(6);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let weights = repository(STORIES).join("model.safetensors");
    std::fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
    let options = EngineOptions { tp: 4, ..EngineOptions::new(dir.path()) };
    let error = RankGroup::open(&options).err().unwrap();
    assert!(error.to_string().contains("model.layers.5"), "{error}");
}

/// Any JSON in place of a field.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..2000).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{0,8}", inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    /// A hostile configuration is an error or a model whose ranks tile it; never a panic.
    #[test]
    fn damaged_configurations_never_panic(
        model in prop::sample::select(vec![TINY_ODD, STORIES]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
        tp in 1usize..=16,
    ) {
        let mut config = config(model);
        let map = config.as_object_mut().unwrap();
        let names: Vec<String> = map.keys().cloned().collect();
        for (index, value) in changes {
            map.insert(index.get(&names).clone(), value);
        }
        if let Ok(spec) = TargetSpec::from_json(&config) {
            let plans = (0..tp).map(|rank| RankPlan::new(&spec, tp, rank, ExpertPlan::Auto));
            if let Ok(plans) = plans.collect::<Result<Vec<_>, _>>() {
                let rows: usize = plans.iter().map(|plan| plan.vocab.len()).sum();
                let columns: usize = plans.iter().map(|plan| plan.dense.len()).sum();
                prop_assert_eq!((rows, columns), (spec.vocab_size, spec.intermediate_size));
            }
        }
    }
}

#[test]
fn cuda_is_refused_with_its_own_exit_code() {
    let options = EngineOptions { device: Device::Cuda, ..options(STORIES, 1) };
    let error = RankGroup::open(&options).err().unwrap();
    assert_eq!(error.exit_code(), 69);
}
