//! `FitConfig`: everything a training run depends on, from a TOML file and flags, checked once.
//! Knows no command line; `keys` lists the keys that the command line offers as flags.

pub mod keys;
mod sources;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::sources::{ConfigError, FieldChange, Origin, Override, Resolved};
use crate::dataset::Verify;
use crate::exchange::Transport;
use crate::schedule::Decay;

/// Settings of `trainer fit`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FitConfig {
    /// What is trained on.
    pub data: DataSection,
    /// What is trained.
    pub draft: DraftSection,
    /// How it is trained.
    pub train: TrainSection,
    /// What is kept.
    pub checkpoint: CheckpointSection,
}

/// Settings of the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Directory written by `extractor run`.
    pub dataset: PathBuf,
    /// Share of the samples kept out of training, 0 to below 1. Decided by the sample's id.
    pub held_out: f64,
    /// Tokens of one packed batch. A longer sample forms a batch of its own.
    pub max_tokens: usize,
    /// Whether shards are compared with their digests before they are used.
    pub verify: Verify,
    /// Batches prepared ahead of the training step.
    pub prefetch: usize,
}

impl Default for DataSection {
    fn default() -> Self {
        Self {
            dataset: PathBuf::new(),
            held_out: 0.05,
            max_tokens: 2048,
            verify: Verify::First,
            prefetch: 2,
        }
    }
}

/// Architecture family of the draft's attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Grouped-query attention, rotate-half RoPE.
    #[default]
    Llama,
    /// Multi-head latent attention, interleaved RoPE.
    Mla,
}

/// Where the draft's head starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LmHeadInit {
    /// Random.
    Random,
    /// The target's rows of the draft vocabulary.
    #[default]
    Target,
}

/// Whether the draft uses the target's context extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeScaling {
    /// YaRN of the target, where it has one.
    #[default]
    Target,
    /// Plain RoPE.
    None,
}

/// Settings of the draft head. Sizes left out are taken from the target's config.json.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DraftSection {
    /// Attention family.
    pub layout: Layout,
    /// Number of token ids the draft predicts; the target's vocabulary, at most 32000, if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_vocab_size: Option<usize>,
    /// Token ids that must be in the draft vocabulary beside the target's end markers.
    pub force_tokens: Vec<u32>,
    /// Width of the MLP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_attention_heads: Option<usize>,
    /// Key and value heads (llama).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head (llama).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Rank of the query projection (mla).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub q_lora_rank: Option<usize>,
    /// Rank of the key and value projection (mla).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_lora_rank: Option<usize>,
    /// Width of a head without position (mla).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_nope_head_dim: Option<usize>,
    /// Width of a head's rotated part (mla).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_rope_head_dim: Option<usize>,
    /// Width of a value head (mla).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v_head_dim: Option<usize>,
    /// Base of the rotary frequencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Context extension.
    pub rope_scaling: RopeScaling,
    /// Epsilon of the draft's norms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rms_norm_eps: Option<f64>,
    /// One norm per aux state before `fc` (EAGLE-3.1).
    pub fc_norm: bool,
    /// The normed output is fed back in place of the raw one (EAGLE-3.1).
    pub norm_output: bool,
    /// The residual starts from the normed hidden state.
    pub norm_before_residual: bool,
    /// Start of `lm_head`.
    pub lm_head_init: LmHeadInit,
    /// `lm_head` stays as it starts.
    pub freeze_lm_head: bool,
}

/// Which rows are trained at which step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskMode {
    /// Rows whose whole chain of predicted tokens is in the answer.
    #[default]
    Chain,
    /// The row's own mask, as SpecForge and EAGLE do.
    SpecForge,
}

/// What is minimised on a trained row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Soft cross-entropy against the teacher.
    #[default]
    Ce,
    /// Kullback-Leibler divergence: other values, the same gradients.
    Kl,
    /// Acceptance, with the divergence where acceptance is low.
    Lk,
}

/// Distribution of the noise on aux states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NoiseKind {
    /// Evenly between two ends.
    #[default]
    Uniform,
    /// Bell-shaped.
    Normal,
}

/// Type of states and products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// f32 on the CPU, bf16 on CUDA.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// 16-bit brain floats; parameters and moments are kept in f32 too.
    Bf16,
}

/// What the backward pass finds of the forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationPolicy {
    /// Keep where that fits the device, by the printed plan.
    #[default]
    Auto,
    /// Everything that takes a product to make.
    Keep,
    /// Gate and up of the MLP are made again: about a tenth more products.
    Recompute,
}

/// Settings of the optimisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Passes over the training samples; a fraction ends within a pass.
    pub epochs: f64,
    /// Upper limit of optimizer steps; 0 means no limit.
    pub max_steps: u64,
    /// Seed of the weights and of the order of samples.
    pub seed: u64,
    /// Highest learning rate.
    pub lr: f64,
    /// Optimizer steps of warm-up.
    pub warmup_steps: u64,
    /// Shape of the learning rate after warm-up.
    pub schedule: Decay,
    /// Schedules `cosine` and `linear`: last learning rate as a fraction of the highest.
    pub lr_floor: f64,
    /// Schedule `step`: shares of the run after which the learning rate falls, ascending.
    pub lr_milestones: Vec<f64>,
    /// Schedule `step`: the factor by which it falls.
    pub lr_factor: f64,
    /// AdamW: decay of the first moment.
    pub beta1: f64,
    /// AdamW: decay of the second moment.
    pub beta2: f64,
    /// AdamW: added to the denominator.
    pub adam_eps: f64,
    /// AdamW: decoupled weight decay of matrices; norms are never decayed.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip: f64,
    /// Steps of the training-time test.
    pub ttt_steps: usize,
    /// Weight of step k relative to step k-1.
    pub step_decay: f64,
    /// Which rows are trained.
    pub mask_mode: MaskMode,
    /// What is minimised on each.
    pub loss: Loss,
    /// How fast `lk` leaves the divergence as acceptance rises.
    pub lk_eta: f64,
    /// Size of noise added to the aux states: half the width of `uniform`, the standard deviation
    /// of `normal`; 0 adds none.
    pub noise: f64,
    /// Its distribution.
    pub noise_kind: NoiseKind,
    /// Batches summed into one optimizer step, over all processes of the run.
    pub accumulate: usize,
    /// Decay of a moving average of the weights, at most (1 + n)/(10 + n) at step n. The average is
    /// then what is evaluated and exported; 0 keeps none.
    pub ema: f64,
    /// Type of states and products.
    pub compute: Compute,
    /// What the backward pass finds of the forward pass.
    pub activations: ActivationPolicy,
    /// How gradients and parameters cross between the GPUs of a run.
    pub exchange: Transport,
    /// Seconds after which a step, an evaluation or a checkpoint that has not gone on ends the
    /// process; 0 waits for ever.
    pub step_deadline: u64,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            epochs: 1.0,
            max_steps: 0,
            seed: 0,
            lr: 1e-4,
            warmup_steps: 20,
            schedule: Decay::Cosine,
            lr_floor: 0.0,
            lr_milestones: vec![0.6, 0.85],
            lr_factor: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            adam_eps: 1e-8,
            weight_decay: 0.0,
            clip: 0.5,
            ttt_steps: 7,
            step_decay: 0.8,
            mask_mode: MaskMode::Chain,
            loss: Loss::Ce,
            lk_eta: 3.0,
            noise: 0.0,
            noise_kind: NoiseKind::Uniform,
            accumulate: 1,
            ema: 0.0,
            compute: Compute::Auto,
            activations: ActivationPolicy::Auto,
            exchange: Transport::Auto,
            step_deadline: 600,
        }
    }
}

/// Settings of checkpoints and evaluation during training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Directory of the run: metrics, checkpoints.
    pub run_dir: PathBuf,
    /// Optimizer steps between checkpoints.
    pub checkpoint_every: u64,
    /// Newest checkpoints kept, beside the best.
    pub keep_last: usize,
    /// Optimizer steps between evaluations on the held-out samples.
    pub eval_every: u64,
    /// Held-out samples of an evaluation: the first so many by id.
    pub eval_samples: usize,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            run_dir: PathBuf::new(),
            checkpoint_every: 200,
            keep_last: 2,
            eval_every: 200,
            eval_samples: 256,
        }
    }
}

/// Room for batches is taken when a run starts.
const MOST_PREFETCHED: usize = 1024;

impl FitConfig {
    /// Checks ranges that the types do not; the error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (data, train, keep) = (&self.data, &self.train, &self.checkpoint);
        let rules: [(bool, &str, String, &str); 25] = [
            given(
                "data.dataset",
                &data.dataset,
                "--dataset DIR, the directory written by `extractor run`",
            ),
            (
                (0.0..1.0).contains(&data.held_out),
                "data.held_out",
                data.held_out.to_string(),
                "0 to below 1",
            ),
            positive("data.max_tokens", data.max_tokens as u64),
            (
                (1..=MOST_PREFETCHED).contains(&data.prefetch),
                "data.prefetch",
                data.prefetch.to_string(),
                "1 to 1024",
            ),
            positive_real("train.epochs", train.epochs),
            positive_real("train.lr", train.lr),
            unit("train.lr_floor", train.lr_floor),
            unit("train.beta1", train.beta1),
            unit("train.beta2", train.beta2),
            (
                train.adam_eps as f32 > 0.0 && (train.adam_eps as f32).is_finite(),
                "train.adam_eps",
                train.adam_eps.to_string(),
                "above 0, in f32 too",
            ),
            at_least_zero("train.weight_decay", train.weight_decay),
            at_least_zero("train.clip", train.clip),
            (
                (1..=16).contains(&train.ttt_steps),
                "train.ttt_steps",
                train.ttt_steps.to_string(),
                "1 to 16",
            ),
            positive_real("train.step_decay", train.step_decay),
            positive_real("train.lk_eta", train.lk_eta),
            positive("train.accumulate", train.accumulate as u64),
            unit("train.ema", train.ema),
            unit("train.lr_factor", train.lr_factor),
            (
                train.lr_milestones.iter().all(|share| (0.0..=1.0).contains(share)),
                "train.lr_milestones",
                format!("{:?}", train.lr_milestones),
                "shares of the run, 0 to 1",
            ),
            // As f32, in which it is drawn.
            at_least_zero("train.noise", f64::from(train.noise as f32)),
            given(
                "checkpoint.run_dir",
                &keep.run_dir,
                "--run-dir DIR, a directory for metrics and checkpoints",
            ),
            positive("checkpoint.checkpoint_every", keep.checkpoint_every),
            positive("checkpoint.eval_every", keep.eval_every),
            positive("checkpoint.eval_samples", keep.eval_samples as u64),
            positive("checkpoint.keep_last", keep.keep_last as u64),
        ];
        rules.into_iter().try_for_each(kept)?;
        self.draft.validate_layout()
    }

    /// What [`Self::validate`] checks, and what only runs of earlier versions may have.
    pub fn validate_new(&self) -> Result<(), ConfigError> {
        self.validate()?;
        kept(self.train.floor_is_read())
    }
}

fn kept((holds, key, value, expected): Rule<'_>) -> Result<(), ConfigError> {
    match holds {
        true => Ok(()),
        false => {
            Err(ConfigError::Value { key: key.to_owned(), value, expected: expected.to_owned() })
        }
    }
}

impl TrainSection {
    /// A floor that the schedule would not end at: somebody meant something by it.
    fn floor_is_read(&self) -> Rule<'_> {
        (
            self.lr_floor == 0.0 || matches!(self.schedule, Decay::Cosine | Decay::Linear),
            "train.lr_floor",
            self.lr_floor.to_string(),
            "0 with this train.schedule: only cosine and linear end at a floor",
        )
    }
}

impl DraftSection {
    /// Name of the parameter that is not trained.
    pub fn frozen(&self) -> Option<&'static str> {
        self.freeze_lm_head.then_some("lm_head.weight")
    }

    /// Refuses sizes that the layout would not read: somebody meant something by them.
    fn validate_layout(&self) -> Result<(), ConfigError> {
        let (unread, layout) = match self.layout {
            Layout::Llama => (
                [
                    ("draft.q_lora_rank", self.q_lora_rank),
                    ("draft.kv_lora_rank", self.kv_lora_rank),
                    ("draft.qk_nope_head_dim", self.qk_nope_head_dim),
                    ("draft.qk_rope_head_dim", self.qk_rope_head_dim),
                    ("draft.v_head_dim", self.v_head_dim),
                ]
                .to_vec(),
                "llama",
            ),
            Layout::Mla => (
                [
                    ("draft.num_key_value_heads", self.num_key_value_heads),
                    ("draft.head_dim", self.head_dim),
                ]
                .to_vec(),
                "mla",
            ),
        };
        match unread.into_iter().find_map(|(key, value)| Some((key, value?))) {
            None => Ok(()),
            Some((key, value)) => Err(ConfigError::Value {
                key: key.to_owned(),
                value: value.to_string(),
                expected: format!("no value, because draft.layout = \"{layout}\" has no such size"),
            }),
        }
    }
}

type Rule<'a> = (bool, &'a str, String, &'a str);

fn given<'a>(key: &'a str, path: &Path, expected: &'a str) -> Rule<'a> {
    (!path.as_os_str().is_empty(), key, String::new(), expected)
}

fn positive(key: &str, value: u64) -> Rule<'_> {
    (value > 0, key, value.to_string(), "at least 1")
}

fn positive_real(key: &str, value: f64) -> Rule<'_> {
    (value > 0.0 && value.is_finite(), key, value.to_string(), "above 0")
}

fn at_least_zero(key: &str, value: f64) -> Rule<'_> {
    (value >= 0.0 && value.is_finite(), key, value.to_string(), "at least 0")
}

fn unit(key: &str, value: f64) -> Rule<'_> {
    ((0.0..1.0).contains(&value), key, value.to_string(), "0 to below 1")
}
