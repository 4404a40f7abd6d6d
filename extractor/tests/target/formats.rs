//! The same weights in every number format give the same states, whole and cut over ranks.

use std::collections::BTreeMap;
use std::path::Path;

use extractor::target::{EngineOptions, RankGroup, TargetModel};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use crate::{apart, batch, ids, layers};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A model whose widths are not multiples of the FP8 block, but hold whole INT4 and NVFP4 groups.
const HIDDEN: usize = 160;
const INTERMEDIATE: usize = 320;
const EXPERT: usize = 128;
const EXPERTS: usize = 4;
const VOCAB: usize = 96;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Int4,
    Fp8,
    Nvfp4,
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 >> 33
    }

    fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() % 4096) as f32 / 4096.0
    }
}

/// A checkpoint in some format, and the same values in f32.
struct Pair {
    format: Format,
    numbers: Numbers,
    packed: Tensors,
    plain: Tensors,
}

impl Pair {
    fn put(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = (Dtype::F32, shape.to_vec(), bytes);
        self.packed.insert(name.to_owned(), tensor.clone());
        self.plain.insert(name.to_owned(), tensor);
    }

    fn vector(&mut self, name: &str, len: usize) {
        let values: Vec<f32> = (0..len).map(|_| self.numbers.between(0.5, 1.5)).collect();
        self.put(name, &[len], &values);
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) {
        let values: Vec<f32> =
            (0..shape[0] * shape[1]).map(|_| self.numbers.between(-0.15, 0.15)).collect();
        self.put(name, &shape, &values);
    }

    /// A quantised matrix: random codes and scales, and what they stand for.
    fn quantised(&mut self, name: &str, shape: [usize; 2]) {
        let decoded = match self.format {
            Format::Int4 => self.int4(name, shape),
            Format::Fp8 => self.fp8(name, shape),
            Format::Nvfp4 => self.nvfp4(name, shape),
        };
        let bytes = decoded.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.plain.insert(format!("{name}.weight"), (Dtype::F32, shape.to_vec(), bytes));
    }

    fn pack(&mut self, name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.packed.insert(name, (dtype, shape.to_vec(), bytes));
    }

    fn int4(&mut self, name: &str, [out, input]: [usize; 2]) -> Vec<f32> {
        let codes: Vec<u8> = (0..out * input).map(|_| (self.numbers.next() % 16) as u8).collect();
        let scales: Vec<bf16> = (0..out * input / 32)
            .map(|_| bf16::from_f32(self.numbers.between(0.005, 0.03)))
            .collect();
        // The first of eight codes lies in the lowest four bits.
        let words = codes.chunks(8).flat_map(|codes| {
            codes.iter().rev().fold(0u32, |word, &code| word << 4 | u32::from(code)).to_le_bytes()
        });
        let words: Vec<u8> = words.collect();
        let scale_bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let shape = [out as i32, input as i32].into_iter().flat_map(i32::to_le_bytes).collect();
        self.pack(format!("{name}.weight_packed"), Dtype::I32, &[out, input / 8], words);
        self.pack(format!("{name}.weight_scale"), Dtype::BF16, &[out, input / 32], scale_bytes);
        self.pack(format!("{name}.weight_shape"), Dtype::I32, &[2], shape);
        let value = |(i, &code): (usize, &u8)| {
            bf16::from_f32((f32::from(code) - 8.0) * scales[i / 32].to_f32()).to_f32()
        };
        codes.iter().enumerate().map(value).collect()
    }

    fn fp8(&mut self, name: &str, [out, input]: [usize; 2]) -> Vec<f32> {
        // Exponents of 2^-4 to 2^1, any sign and mantissa.
        let codes: Vec<u8> = (0..out * input)
            .map(|_| {
                let bits = self.numbers.next();
                let exponent = 3 + (bits >> 4) % 6;
                ((bits & 1) << 7 | exponent << 3 | (bits >> 1 & 7)) as u8
            })
            .collect();
        let blocks = [out.div_ceil(128), input.div_ceil(128)];
        let scales: Vec<f32> =
            (0..blocks[0] * blocks[1]).map(|_| self.numbers.between(0.05, 0.2)).collect();
        let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.pack(format!("{name}.weight"), Dtype::F8_E4M3, &[out, input], codes.clone());
        self.pack(format!("{name}.weight_scale_inv"), Dtype::F32, &blocks, bytes);
        let value = |(i, &code): (usize, &u8)| {
            let scale = scales[i / input / 128 * blocks[1] + i % input / 128];
            e4m3(code) * scale
        };
        codes.iter().enumerate().map(value).collect()
    }

    fn nvfp4(&mut self, name: &str, [out, input]: [usize; 2]) -> Vec<f32> {
        const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let codes: Vec<u8> = (0..out * input).map(|_| (self.numbers.next() % 16) as u8).collect();
        let scales: Vec<u8> =
            (0..out * input / 16).map(|_| (48 + self.numbers.next() % 16) as u8).collect();
        let global = self.numbers.between(0.02, 0.04);
        let bytes = codes.chunks(2).map(|pair| pair[1] << 4 | pair[0]).collect();
        self.pack(format!("{name}.weight"), Dtype::U8, &[out, input / 2], bytes);
        let dims = [out, input / 16];
        self.pack(format!("{name}.weight_scale"), Dtype::F8_E4M3, &dims, scales.clone());
        let global_bytes = global.to_le_bytes().to_vec();
        self.pack(format!("{name}.weight_scale_2"), Dtype::F32, &[], global_bytes);
        let value = |(i, &code): (usize, &u8)| {
            let size = E2M1[usize::from(code & 7)] * (e4m3(scales[i / 16]) * global);
            if code & 8 == 0 { size } else { -size }
        };
        codes.iter().enumerate().map(value).collect()
    }

    fn mlp(&mut self, prefix: &str, width: usize) {
        self.quantised(&format!("{prefix}.gate_proj"), [width, HIDDEN]);
        self.quantised(&format!("{prefix}.up_proj"), [width, HIDDEN]);
        self.quantised(&format!("{prefix}.down_proj"), [HIDDEN, width]);
    }

    fn layer(&mut self, index: usize) {
        let prefix = format!("model.layers.{index}");
        let attention = format!("{prefix}.self_attn");
        self.vector(&format!("{prefix}.input_layernorm.weight"), HIDDEN);
        self.vector(&format!("{prefix}.post_attention_layernorm.weight"), HIDDEN);
        self.vector(&format!("{attention}.kv_a_layernorm.weight"), 64);
        let shapes = [
            ("q_proj", [4 * 48, HIDDEN]),
            ("kv_a_proj_with_mqa", [64 + 16, HIDDEN]),
            ("kv_b_proj", [4 * 64, 64]),
            ("o_proj", [HIDDEN, 4 * 32]),
        ];
        for (name, shape) in shapes {
            // DeepSeek's FP8 covers the attention, the other formats leave it alone.
            match self.format {
                Format::Fp8 => self.quantised(&format!("{attention}.{name}"), shape),
                _ => self.matrix(&format!("{attention}.{name}.weight"), shape),
            }
        }
        let block = format!("{prefix}.mlp");
        if index == 0 {
            return self.mlp(&block, INTERMEDIATE);
        }
        self.matrix(&format!("{block}.gate.weight"), [EXPERTS, HIDDEN]);
        self.vector(&format!("{block}.gate.e_score_correction_bias"), EXPERTS);
        self.mlp(&format!("{block}.shared_experts"), EXPERT);
        for expert in 0..EXPERTS {
            self.mlp(&format!("{block}.experts.{expert}"), EXPERT);
        }
    }
}

/// sign, 4 bits of exponent with bias 7, 3 bits of mantissa; normal numbers only.
fn e4m3(code: u8) -> f32 {
    let size = (1.0 + f32::from(code & 7) / 8.0) * 2f32.powi(i32::from(code >> 3 & 15) - 7);
    if code & 128 == 0 { size } else { -size }
}

fn write(dir: &Path, tensors: &Tensors) {
    let config = json!({
        "model_type": "deepseek_v3", "hidden_size": HIDDEN, "num_hidden_layers": 3,
        "num_attention_heads": 4, "q_lora_rank": null, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
}

#[test]
fn formats_give_the_states_of_their_plain_values() {
    for format in [Format::Int4, Format::Fp8, Format::Nvfp4] {
        let (packed, plain) = (BTreeMap::new(), BTreeMap::new());
        let mut pair = Pair { format, numbers: Numbers(7), packed, plain };
        pair.matrix("model.embed_tokens.weight", [VOCAB, HIDDEN]);
        pair.matrix("lm_head.weight", [VOCAB, HIDDEN]);
        pair.vector("model.norm.weight", HIDDEN);
        (0..3).for_each(|index| pair.layer(index));
        let states = |tensors: &Tensors, tp| {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), tensors);
            let options = EngineOptions { tp, ..EngineOptions::new(dir.path()) };
            let mut target = RankGroup::open(&options).unwrap();
            let batch = batch(&[ids(50, VOCAB as u32, 1), ids(20, VOCAB as u32, 2)]);
            target.prefill(&batch, &layers(&[2])).unwrap().layers.remove(0).rows.to_f32()
        };
        let plain = states(&pair.plain, 1);
        for tp in [1, 2] {
            let apart = apart(&states(&pair.packed, tp), &plain);
            assert!(apart < 1e-5, "{format:?} tp {tp}: {apart}");
        }
    }
}
