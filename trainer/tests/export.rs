//! Exports of a short run: names, shapes, fields and ids, and what the reload check refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::backend::{Autodiff, Flex};
use burn::tensor::FloatDType;
use extractor::shutdown::Shutdown;
use safetensors::Dtype;
use serde_json::{Value, json};
use trainer::checkpoint::{Checkpoint, Parts};
use trainer::config::{Layout, RopeScaling};
use trainer::export::{
    Embeddings, Engine, ExportDtype, ExportError, ExportLayout, ExportOptions, ExportedDraft,
    Server, export, golden_logits,
};
use trainer::fit::{self, Start};
use trainer::tensors::{HostTensor, TensorFile};
use trainer::watch::Watch;

fn checkpoint(dir: &Path, change: impl FnOnce(&mut trainer::config::FitConfig)) -> Checkpoint {
    let data = dir.join("data");
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.join("run"));
    config.train.max_steps = 2;
    change(&mut config);
    let start = (Start::Fresh, &trainer::world::World::alone());
    let (cpu, guards) = (Default::default(), (&Shutdown::default(), &Watch::default()));
    let place = (&cpu, FloatDType::F32);
    let report = fit::run::<Autodiff<Flex>>(&config, start, place, guards).unwrap();
    Checkpoint::load(&report.checkpoint, Parts::Inference).unwrap()
}

fn options(layout: ExportLayout) -> ExportOptions {
    ExportOptions {
        layout,
        dtype: ExportDtype::Bf16,
        engine: Engine::Vllm,
        embeddings: None,
        draft_tokens: 3,
        target_name: "org/target".into(),
    }
}

fn written(dir: &Path) -> (Value, BTreeMap<String, (Dtype, Vec<usize>)>) {
    let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let file = TensorFile::read(&dir.join("model.safetensors")).unwrap();
    let tensors = file.tensors.into_iter().map(|(name, t)| (name, (t.dtype, t.shape)));
    (config, tensors.collect())
}

fn table(rows: &[(&str, &[usize])]) -> BTreeMap<String, (Dtype, Vec<usize>)> {
    let mut table: BTreeMap<_, _> = rows
        .iter()
        .map(|&(name, shape)| (name.to_owned(), (Dtype::BF16, shape.to_vec())))
        .collect();
    table.insert("d2t".into(), (Dtype::I64, vec![44]));
    table.insert("t2d".into(), (Dtype::BOOL, vec![48]));
    table
}

#[test]
fn llama_names_shapes_and_fields() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path(), |_| {});
    let out = dir.path().join("out");
    let report = export(&checkpoint, &out, &options(ExportLayout::Llama)).unwrap();
    assert!(report.golden_difference < 0.02, "{}", report.golden_difference);
    let (config, tensors) = written(&out);
    assert_eq!(
        tensors,
        table(&[
            ("fc.weight", &[16, 48]),
            ("midlayer.self_attn.q_proj.weight", &[16, 32]),
            ("midlayer.self_attn.k_proj.weight", &[8, 32]),
            ("midlayer.self_attn.v_proj.weight", &[8, 32]),
            ("midlayer.self_attn.o_proj.weight", &[16, 16]),
            ("midlayer.mlp.gate_proj.weight", &[32, 16]),
            ("midlayer.mlp.up_proj.weight", &[32, 16]),
            ("midlayer.mlp.down_proj.weight", &[16, 32]),
            ("midlayer.input_layernorm.weight", &[16]),
            ("midlayer.hidden_norm.weight", &[16]),
            ("midlayer.post_attention_layernorm.weight", &[16]),
            ("norm.weight", &[16]),
            ("lm_head.weight", &[44, 16]),
        ])
    );
    for (key, value) in [
        ("architectures", json!(["LlamaForCausalLMEagle3"])),
        ("model_type", json!("llama")),
        ("num_hidden_layers", json!(1)),
        ("head_dim", json!(8)),
        ("num_key_value_heads", json!(1)),
        ("max_position_embeddings", json!(512)),
        ("tie_word_embeddings", json!(false)),
        ("vocab_size", json!(48)),
        ("draft_vocab_size", json!(44)),
        ("bos_token_id", json!(41)),
        ("eos_token_id", json!([42, 43])),
        ("torch_dtype", json!("bfloat16")),
        ("norm_before_residual", json!(false)),
        ("norm_output", json!(false)),
        ("eagle_aux_hidden_state_layer_ids", json!([1, 2, 3])),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([1, 2, 3]));
    assert_eq!(config["eagle_config"]["use_aux_hidden_state"], json!(true));
    for absent in ["use_cache", "num_nextn_predict_layers"] {
        assert!(config.get(absent).is_none(), "{absent}");
    }
    // Engines multiply cosine and sine by (0.1 ln 4 + 1) * attn_factor; training used 1.
    let scaling = &config["rope_scaling"];
    let factor = scaling["attn_factor"].as_f64().unwrap() * (0.1 * 4f64.ln() + 1.0);
    assert!((factor - 1.0).abs() < 1e-12);
    assert_eq!(scaling["type"], scaling["rope_type"]);
    assert_eq!(config["rope_parameters"]["factor"], scaling["factor"]);
    assert_eq!(config["rope_parameters"]["rope_theta"], json!(50000.0));
}

#[test]
fn mla_and_speculators_names_and_fields() {
    let dir = tempfile::tempdir().unwrap();
    let mla = checkpoint(&dir.path().join("m"), |config| config.draft.layout = Layout::Mla);
    let out = dir.path().join("mla");
    export(&mla, &out, &options(ExportLayout::Mla)).unwrap();
    let (config, tensors) = written(&out);
    assert_eq!(
        tensors,
        table(&[
            ("fc.weight", &[16, 48]),
            ("layers.0.self_attn.q_a_proj.weight", &[12, 32]),
            ("layers.0.self_attn.q_a_layernorm.weight", &[12]),
            ("layers.0.self_attn.q_b_proj.weight", &[20, 12]),
            ("layers.0.self_attn.kv_a_proj_with_mqa.weight", &[14, 32]),
            ("layers.0.self_attn.kv_a_layernorm.weight", &[10]),
            ("layers.0.self_attn.kv_b_proj.weight", &[28, 10]),
            ("layers.0.self_attn.o_proj.weight", &[16, 16]),
            ("layers.0.mlp.gate_proj.weight", &[32, 16]),
            ("layers.0.mlp.up_proj.weight", &[32, 16]),
            ("layers.0.mlp.down_proj.weight", &[16, 32]),
            ("layers.0.input_layernorm.weight", &[16]),
            ("layers.0.hidden_norm.weight", &[16]),
            ("layers.0.post_attention_layernorm.weight", &[16]),
            ("norm.weight", &[16]),
            ("lm_head.weight", &[44, 16]),
        ])
    );
    assert_eq!(config["architectures"], json!(["Eagle3DeepseekV2ForCausalLM"]));
    assert_eq!(config["model_type"], json!("kimi_k2"));
    assert_eq!(config["kv_lora_rank"], json!(10));
    assert!(config["rope_scaling"].get("attn_factor").is_none());
    assert_eq!(config["rope_scaling"]["rope_theta"], json!(50000.0));

    let llama = checkpoint(&dir.path().join("l"), |config| {
        config.draft.norm_output = true;
        config.draft.fc_norm = true;
        config.draft.draft_vocab_size = Some(48);
    });
    let old = ExportOptions { engine: Engine::SglangOld, ..options(ExportLayout::Llama) };
    let refused = export(&llama, &dir.path().join("old"), &old).unwrap_err();
    assert!(matches!(refused, ExportError::Unsupported { flag: "fc_norm", .. }), "{refused}");
    let out = dir.path().join("speculators");
    export(&llama, &out, &options(ExportLayout::Speculators)).unwrap();
    let (config, tensors) = written(&out);
    assert!(tensors.contains_key("layers.0.self_attn.q_proj.weight"));
    assert!(tensors.contains_key("fc_norm.2.weight"));
    // A full vocabulary needs no mapping.
    assert!(!tensors.contains_key("d2t") && !tensors.contains_key("t2d"));
    assert_eq!(config["speculators_model_type"], json!("eagle3"));
    assert_eq!(config["norm_before_residual"], json!(false));
    assert_eq!((&config["norm_output"], &config["fc_norm"]), (&json!(true), &json!(true)));
    assert_eq!(config["transformer_layer_config"]["model_type"], json!("llama"));
    assert_eq!(config["transformer_layer_config"]["num_aux_hidden_states"], json!(3));
    let speculators = &config["speculators_config"];
    assert_eq!(speculators["proposal_methods"][0]["speculative_tokens"], json!(3));
    assert_eq!(speculators["verifier"]["name_or_path"], json!("org/target"));
}

#[test]
fn a_float32_export_gives_the_checkpoints_logits_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path(), |_| {});
    let out = dir.path().join("out");
    let values = HostTensor::bf16(&support::embeddings(), &[48, 16]).to_f32().unwrap();
    let embeddings = Some(Embeddings { values, from: "data".into() });
    let options =
        ExportOptions { dtype: ExportDtype::F32, embeddings, ..options(ExportLayout::Llama) };
    export(&checkpoint, &out, &options).unwrap();
    let device = Default::default();
    let exported = ExportedDraft::load(&out).unwrap().draft::<Flex>(&device).unwrap();
    let expected = golden_logits::<Flex>(checkpoint.draft(&device).unwrap(), &checkpoint.golden);
    let expected = expected.unwrap();
    assert!(expected.len() > 44 && expected.iter().any(|v| v.abs() > 0.1));
    assert_eq!(golden_logits::<Flex>(exported, &checkpoint.golden).unwrap(), expected);
    let (_, tensors) = written(&out);
    assert_eq!(tensors["embed_tokens.weight"], (Dtype::F32, vec![48, 16]));
    assert!(matches!(export(&checkpoint, &out, &options), Err(ExportError::Exists { .. })));
}

#[test]
fn exports_that_engines_would_misread_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = checkpoint(dir.path(), |_| {});
    let out = |name: &str| dir.path().join(name);
    let current = ExportOptions { engine: Engine::Current, ..options(ExportLayout::Llama) };
    let error = export(&checkpoint, &out("a"), &current).unwrap_err();
    assert!(matches!(error, ExportError::FirstLayer { first: 0, .. }), "{error}");
    let kimi = checkpoint.state.target["architectures"].take();
    checkpoint.state.target["architectures"] = json!(["LlamaForCausalLM"]);
    export(&checkpoint, &out("dense"), &current).unwrap();
    let (config, _) = written(&out("dense"));
    // SGLang's Llama code adds one to each id of the nested list; vLLM reads the other.
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([1, 2, 3]));
    assert_eq!(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([0, 1, 2]));
    std::fs::remove_dir_all(out("dense")).unwrap();
    checkpoint.state.target["architectures"] = kimi;
    let error = export(&checkpoint, &out("b"), &options(ExportLayout::Mla)).unwrap_err();
    assert!(matches!(error, ExportError::Layout { .. }), "{error}");
    checkpoint.state.layers.clear();
    let error = export(&checkpoint, &out("c"), &options(ExportLayout::Llama)).unwrap_err();
    assert!(matches!(error, ExportError::NoLayerIds { found: 0, num_aux: 3 }), "{error}");
    let left: Vec<PathBuf> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left.len(), 2, "nothing but data and run stays: {left:?}");
}

/// vLLM's older MLA draft reads nothing of the rotary settings but `rope_scaling`.
#[test]
fn an_mla_draft_with_plain_rope_keeps_its_base_in_every_engine() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path(), |config| {
        config.draft.layout = Layout::Mla;
        config.draft.rope_scaling = RopeScaling::None;
    });
    assert_eq!(checkpoint.state.draft.yarn, None);
    let out = dir.path().join("out");
    let options = ExportOptions { dtype: ExportDtype::F32, ..options(ExportLayout::Mla) };
    let report = export(&checkpoint, &out, &options).unwrap();
    assert!(report.golden_difference < 1e-6, "{}", report.golden_difference);
    let (config, _) = written(&out);
    for schema in ["rope_scaling", "rope_parameters"] {
        assert_eq!(config[schema]["rope_theta"], json!(50000.0), "{schema}");
        // Dividing by 1 below a context is plain RoPE, and so is ln 1 in the scale.
        assert_eq!(config[schema]["factor"], json!(1.0), "{schema}");
        assert_eq!(config[schema]["original_max_position_embeddings"], json!(512), "{schema}");
    }
}

/// A draft that feeds back something else differs in no first step.
#[test]
fn the_golden_rows_see_what_is_fed_back() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path(), |config| config.draft.norm_output = true);
    let out = dir.path().join("out");
    let exact = ExportOptions { dtype: ExportDtype::F32, ..options(ExportLayout::Llama) };
    export(&checkpoint, &out, &exact).unwrap();
    let (mut config, _) = written(&out);
    config["norm_output"] = json!(false);
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let device = Default::default();
    let changed = ExportedDraft::load(&out).unwrap().draft::<Flex>(&device).unwrap();
    let changed = golden_logits::<Flex>(changed, &checkpoint.golden).unwrap();
    let kept = checkpoint.draft(&device).unwrap();
    let expected = golden_logits::<Flex>(kept, &checkpoint.golden).unwrap();
    let differ = |rows: std::ops::Range<usize>| {
        let rows = rows.start * 44..rows.end * 44;
        expected[rows.clone()].iter().zip(&changed[rows]).any(|(a, b)| (a - b).abs() > 1e-3)
    };
    let rows = expected.len() / 44 - 3;
    assert!(!differ(0..rows), "the first step reads nothing that was fed back");
    assert!(differ(rows..rows + 3));
}

/// SGLang adds one to the ids of a Llama or Qwen target, and takes those of a DeepSeek as they are.
#[test]
fn ids_follow_the_targets_family() {
    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = checkpoint(dir.path(), |_| {});
    checkpoint.state.layers = [1, 2, 3, 4].map(shared::LayerIndex).to_vec();
    let current = ExportOptions { engine: Engine::Current, ..options(ExportLayout::Llama) };
    for (target, nested) in [
        ("DeepseekV3ForCausalLM", json!([2, 3, 4])),
        ("LlamaForCausalLM", json!([1, 2, 3])),
        ("Qwen3ForCausalLM", json!([1, 2, 3])),
    ] {
        checkpoint.state.target["architectures"] = json!([target]);
        let out = dir.path().join(target);
        let report = export(&checkpoint, &out, &current).unwrap();
        assert_eq!(report.servers, [Server::Vllm, Server::Sglang]);
        let (config, _) = written(&out);
        assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([2, 3, 4]), "{target}");
        let ids = &config["eagle_config"]["eagle_aux_hidden_state_layer_ids"];
        assert_eq!(*ids, nested, "{target}");
    }
    checkpoint.state.target["architectures"] = json!(["GptOssForCausalLM"]);
    let out = dir.path().join("unknown");
    let error = export(&checkpoint, &out, &current).unwrap_err();
    assert!(matches!(error, ExportError::UnknownTarget { .. }), "{error}");
    // The speculators format is read by vLLM alone, whose ids are the same for every target.
    let format = ExportOptions { layout: ExportLayout::Speculators, ..current };
    assert_eq!(export(&checkpoint, &out, &format).unwrap().servers, [Server::Vllm]);
}

#[test]
fn a_checkpoint_with_a_value_that_is_not_finite_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = checkpoint(dir.path(), |_| {});
    let norm = checkpoint.weights.tensors.get_mut("norm.weight").unwrap();
    *norm = HostTensor::f32(&[f32::NAN; 16], &[16]);
    let error =
        export(&checkpoint, &dir.path().join("out"), &options(ExportLayout::Llama)).unwrap_err();
    assert!(error.to_string().contains("norm.weight"), "{error}");
    assert!(!dir.path().join("out").exists());
}

/// Changes a written export and reads it again.
fn tampered(out: &Path, change: impl FnOnce(&mut Value, &mut TensorFile)) -> String {
    let copy = out.with_file_name("tampered");
    let _ = std::fs::remove_dir_all(&copy);
    std::fs::create_dir(&copy).unwrap();
    let (mut config, _) = written(out);
    let mut file = TensorFile::read(&out.join("model.safetensors")).unwrap();
    change(&mut config, &mut file);
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();
    std::fs::write(copy.join("model.safetensors"), file.encode().unwrap()).unwrap();
    let draft =
        ExportedDraft::load(&copy).and_then(|export| export.draft::<Flex>(&Default::default()));
    draft.unwrap_err().to_string()
}

#[test]
fn tampered_exports_are_named_when_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path(), |_| {});
    let out = dir.path().join("out");
    export(&checkpoint, &out, &options(ExportLayout::Llama)).unwrap();
    let message = tampered(&out, |_, file| {
        file.tensors.remove("midlayer.mlp.up_proj.weight");
    });
    assert!(message.contains("midlayer.mlp.up_proj.weight"), "{message}");
    let message = tampered(&out, |_, file| {
        file.tensors.remove("d2t");
    });
    assert!(message.contains("d2t"), "{message}");
    // Ids in place of offsets.
    let ids: Vec<i64> = checkpoint.vocab.draft_to_target().iter().map(|&id| id.into()).collect();
    let message = tampered(&out, |_, file| {
        file.tensors.insert("d2t".into(), HostTensor::i64(&ids));
    });
    assert!(message.contains("d2t"), "{message}");
    let message = tampered(&out, |config, _| {
        config.as_object_mut().unwrap().remove("eagle_aux_hidden_state_layer_ids");
    });
    assert!(message.contains("eagle_aux_hidden_state_layer_ids"), "{message}");
    let message = tampered(&out, |config, _| {
        config["rope_scaling"].as_object_mut().unwrap().remove("attn_factor");
    });
    assert!(message.contains("attn_factor"), "{message}");
    let message = tampered(&out, |config, _| config["hidden_size"] = json!(8));
    assert!(message.contains("fc.weight"), "{message}");
}
