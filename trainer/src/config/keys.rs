//! The table of configuration keys: what each means in one line. Flags and the printed
//! configuration come from it. Knows no values.

/// What a flag's text stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of a few words.
    Text,
    /// A directory.
    Dir,
    /// A whole or real number.
    Number,
    /// `true` or `false`.
    Bool,
    /// Numbers separated by commas.
    List,
}

/// One key of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// TOML table.
    pub section: &'static str,
    /// TOML key; the flag is the same with dashes.
    pub name: &'static str,
    /// Form of the value.
    pub kind: Kind,
    /// One line for `--help` and for the printed configuration.
    pub help: &'static str,
    /// Whether a resumed run may use another value than the one it started with.
    pub may_change: bool,
}

const fn key(section: &'static str, name: &'static str, kind: Kind, help: &'static str) -> Key {
    Key { section, name, kind, help, may_change: false }
}

const fn free(key: Key) -> Key {
    Key { may_change: true, ..key }
}

use Kind::{Bool, Dir, List, Number, Text};

/// Every key, in the order of the structs.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    free(key("data", "dataset", Dir, "directory written by `extractor run`")),
    key("data", "held_out", Number, "share of the samples kept out of training, decided by \
        sample id"),
    key("data", "max_tokens", Number, "tokens of one packed batch; a longer sample is a batch \
        of its own"),
    free(key("data", "verify", Text, "first (each shard's digest before its first use) or never")),
    free(key("data", "prefetch", Number, "batches prepared ahead of the training step")),
    key("draft", "layout", Text, "llama or mla"),
    key("draft", "draft_vocab_size", Number, "token ids the draft predicts; default: the \
        target's, at most 32000"),
    key("draft", "force_tokens", List, "token ids that must be in the draft vocabulary, beside \
        the end markers"),
    key("draft", "intermediate_size", Number, "width of the MLP; default: the target's dense MLP"),
    key("draft", "num_attention_heads", Number, "query heads; default: the target's"),
    key("draft", "num_key_value_heads", Number, "key and value heads of layout llama; default: \
        the target's"),
    key("draft", "head_dim", Number, "head width of layout llama; default: the target's"),
    key("draft", "q_lora_rank", Number, "query rank of layout mla; default: the target's"),
    key("draft", "kv_lora_rank", Number, "key and value rank of layout mla; default: the target's"),
    key("draft", "qk_nope_head_dim", Number, "unrotated head width of layout mla; default: the \
        target's"),
    key("draft", "qk_rope_head_dim", Number, "rotated head width of layout mla; default: the \
        target's"),
    key("draft", "v_head_dim", Number, "value head width of layout mla; default: the target's"),
    key("draft", "rope_theta", Number, "base of the rotary frequencies; default: the target's"),
    key("draft", "rope_scaling", Text, "target (its YaRN, if any) or none"),
    key("draft", "rms_norm_eps", Number, "epsilon of the draft's norms; default: the target's"),
    key("draft", "fc_norm", Bool, "EAGLE-3.1: one norm per aux state before fc"),
    key("draft", "norm_output", Bool, "EAGLE-3.1: feed back the normed output"),
    key("draft", "norm_before_residual", Bool, "the residual starts from the normed hidden state"),
    key("draft", "lm_head_init", Text, "random, or target (its rows of the draft vocabulary)"),
    key("draft", "freeze_lm_head", Bool, "lm_head stays as it starts"),
    key("train", "epochs", Number, "passes over the training samples; a \
        fraction ends within a pass"),
    key("train", "max_steps", Number, "upper limit of optimizer steps; 0 means none"),
    key("train", "seed", Number, "seed of the weights and of the order of samples"),
    key("train", "lr", Number, "highest learning rate"),
    key("train", "warmup_steps", Number, "optimizer steps of warm-up"),
    key("train", "schedule", Text, "cosine, linear, constant or step"),
    key("train", "lr_floor", Number, "cosine, linear: last learning rate as a fraction of the \
        highest"),
    key("train", "lr_milestones", List, "step: shares of the run after which the rate falls"),
    key("train", "lr_factor", Number, "step: the factor by which it falls"),
    key("train", "beta1", Number, "AdamW: decay of the first moment"),
    key("train", "beta2", Number, "AdamW: decay of the second moment"),
    key("train", "adam_eps", Number, "AdamW: added to the denominator"),
    key("train", "weight_decay", Number, "AdamW: decoupled decay of matrices, never of norms"),
    key("train", "clip", Number, "largest global gradient norm; 0 turns clipping off"),
    key("train", "ttt_steps", Number, "steps of the training-time test"),
    key("train", "step_decay", Number, "weight of a step relative to the one before"),
    key("train", "mask_mode", Text, "chain, or specforge for that trainer's rows"),
    key("train", "loss", Text, "ce (soft cross-entropy), kl, or lk: acceptance, with kl where it \
        is low"),
    key("train", "lk_eta", Number, "lk: weight of kl is exp(-lk_eta * acceptance)"),
    key("train", "noise", Number, "size of noise added to the aux states; 0 adds none"),
    key("train", "noise_kind", Text, "uniform (noise is half its width) or normal (its standard \
        deviation)"),
    key("train", "accumulate", Number, "batches of an optimizer step, over all processes"),
    key("train", "ema", Number, "decay of a moving average of the weights, which is evaluated and \
        exported then, at most (1 + n)/(10 + n) at step n; 0 keeps none"),
    // What comes of it is in the checkpoint, and compared there.
    free(key("train", "compute", Text, "f32, bf16, or auto: f32 on the CPU and bf16 on CUDA")),
    free(key("train", "activations", Text, "keep, recompute (gate and up of the MLP again in the \
        backward pass), or auto: by the memory of the device")),
    free(key("train", "exchange", Text, "between GPUs: copies (copy engines, within a host), nccl, \
        or auto: copies where every GPU can reach every other one")),
    free(key("train", "step_deadline", Number, "seconds after which a step, an evaluation or a \
        checkpoint that has not gone on ends the process (exit code 75); 0 waits for ever")),
    free(key("checkpoint", "run_dir", Dir, "directory of the run: metrics and checkpoints")),
    free(key("checkpoint", "checkpoint_every", Number, "optimizer steps between checkpoints")),
    free(key("checkpoint", "keep_last", Number, "newest checkpoints kept, beside the best")),
    free(key("checkpoint", "eval_every", Number, "optimizer steps between evaluations on \
        held-out samples")),
    key("checkpoint", "eval_samples", Number, "held-out samples of an evaluation: the first so \
        many by id"),
];

/// The entry of `section.name`.
pub fn find(section: &str, name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.section == section && key.name == name)
}
