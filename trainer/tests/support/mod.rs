//! A small synthetic data set whose text a draft can learn. Knows nothing of real models.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::Path;

use serde_json::json;
use shared::manifest::{Manifest, SourceOutcome, SourceRecord};
use shared::{
    CaptureSpec, CapturedSample, DatasetDir, Fingerprint, LayerIndex, LayerState, ShardId,
    ShardWriter, StateDtype, StateRows, TokenSample,
};
use trainer::config::FitConfig;
use trainer::tensors::{HostTensor, TensorFile};

pub(crate) const VOCAB: usize = 48;
pub(crate) const HIDDEN: usize = 16;
pub(crate) const LAYERS: usize = 4;

/// Repeatable numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }

    pub(crate) fn real(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// Token embeddings, used as the target's head too.
pub(crate) fn embeddings() -> Vec<f32> {
    let mut random = Random(5);
    (0..VOCAB * HIDDEN).map(|_| random.real()).collect()
}

fn spec() -> CaptureSpec {
    CaptureSpec {
        layers: (0..LAYERS as u16).map(LayerIndex).collect(),
        hidden_size: HIDDEN,
        dtype: StateDtype::Bf16,
    }
}

/// A text in which each token nearly always decides the next one.
fn text(random: &mut Random) -> Vec<u32> {
    let mut ids = vec![random.below(40) as u32];
    for _ in 0..random.below(24) + 12 {
        let last = ids[ids.len() - 1];
        let next =
            if random.below(16) == 0 { random.below(40) as u32 } else { (last * 5 + 3) % 40 };
        ids.push(next);
    }
    ids
}

/// The loss mask of a sample by its number and its tokens.
type MaskOf<'a> = &'a dyn Fn(usize, usize) -> Vec<u8>;

/// All but the first quarter is trained.
fn answer(_: usize, tokens: usize) -> Vec<u8> {
    (0..tokens).map(|at| u8::from(at >= tokens / 4)).collect()
}

/// Every other token is trained: no row has a chain.
pub(crate) fn scattered(tokens: usize) -> Vec<u8> {
    (0..tokens).map(|at| (at % 2) as u8).collect()
}

fn sample(
    random: &mut Random,
    table: &[f32],
    (number, mask): (usize, MaskOf<'_>),
) -> CapturedSample {
    let ids = text(random);
    let mask = mask(number, ids.len());
    let row = |id: u32| &table[id as usize * HIDDEN..(id as usize + 1) * HIDDEN];
    let states = (0..LAYERS).map(|layer| {
        let mut rows = Vec::new();
        for (at, &id) in ids.iter().enumerate() {
            // The last state points at the next token, the others at the present one.
            let seen =
                if layer + 1 == LAYERS { ids.get(at + 1).copied().unwrap_or(id) } else { id };
            rows.extend(row(seen).iter().map(|v| 3.0 * v + 0.05 * random.real()));
        }
        LayerState {
            layer: LayerIndex(layer as u16),
            shape: vec![ids.len(), HIDDEN],
            rows: StateRows::from_f32(&rows, HIDDEN, StateDtype::Bf16),
        }
    });
    let states = states.collect();
    CapturedSample::new(TokenSample::new(ids.clone(), mask).unwrap(), &spec(), states, &[]).unwrap()
}

/// Writes a data set of `samples` samples in shards of 16.
pub(crate) fn dataset(dir: &Path, samples: usize) {
    dataset_of("synthetic", dir, samples);
}

/// The same under the fingerprint of another target.
pub(crate) fn dataset_of(target_name: &str, dir: &Path, samples: usize) {
    write(target_name, dir, samples, &answer);
}

/// A data set in which the odd samples of `samples` have no row, or all of them.
pub(crate) fn dataset_without_rows(dir: &Path, samples: usize, all: bool) {
    let mask = |number: usize, tokens: usize| match all || number % 2 == 1 {
        true => scattered(tokens),
        false => answer(number, tokens),
    };
    write("synthetic", dir, samples, &mask);
}

fn write(target_name: &str, dir: &Path, samples: usize, mask: MaskOf<'_>) {
    let fingerprint = Fingerprint::default().with("target", target_name);
    let manifest = Manifest::open_for_write(dir, &fingerprint, &spec()).unwrap();
    let table = embeddings();
    let mut random = Random(11);
    let mut left = samples;
    let mut line = 0;
    while left > 0 {
        let id = ShardId(line as u32 / 16);
        let mut writer =
            ShardWriter::create(&DatasetDir::new(dir), id, &spec(), &fingerprint.digest()).unwrap();
        let mut sources = Vec::new();
        for _ in 0..left.min(16) {
            let sample = sample(&mut random, &table, (line as usize, mask));
            line += 1;
            sources.push(SourceRecord {
                file: "synthetic".into(),
                line,
                digest: [0; 16],
                outcome: SourceOutcome::Committed(sample.sample().id()),
                truncated: false,
            });
            writer.push(&sample).unwrap();
        }
        left -= sources.len();
        manifest.commit_shard(&writer.seal().unwrap(), &sources).unwrap();
    }
    target(&dir.join("target"), &table);
}

fn target(dir: &Path, table: &[f32]) {
    let config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "max_position_embeddings": 512, "bos_token_id": 41, "eos_token_id": [42, 43],
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "use_cache": null, "num_nextn_predict_layers": 0,
    });
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut head = TensorFile::default();
    head.metadata.insert("rms_norm_eps".into(), "1e-5".into());
    let shape = [VOCAB, HIDDEN];
    head.tensors.insert("embed_tokens.weight".into(), HostTensor::bf16(table, &shape));
    head.tensors.insert("lm_head.weight".into(), HostTensor::bf16(table, &shape));
    head.tensors.insert("norm.weight".into(), HostTensor::bf16(&[1.0; HIDDEN], &[HIDDEN]));
    std::fs::write(dir.join("head.safetensors"), head.encode().unwrap()).unwrap();
}

/// Settings that finish in seconds.
pub(crate) fn config(dataset: &Path, run_dir: &Path) -> FitConfig {
    let mut config = FitConfig::default();
    config.data.dataset = dataset.to_owned();
    config.data.held_out = 0.2;
    config.data.max_tokens = 96;
    config.draft.draft_vocab_size = Some(44);
    config.train.ttt_steps = 3;
    config.train.lr = 5e-3;
    config.train.warmup_steps = 3;
    config.checkpoint.run_dir = run_dir.to_owned();
    config.checkpoint.checkpoint_every = 1000;
    config.checkpoint.eval_every = 1000;
    config
}
