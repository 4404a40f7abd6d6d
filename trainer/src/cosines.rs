//! How far gradients in a rounded type turn away from those in f32, at a size where products are as
//! long as in use. Random weights and states that both types hold. Knows no files.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Tensor, TensorData};

use crate::batch::{BatchTokens, FrozenTarget, TargetWeights, TrainBatch};
use crate::draft::{AttentionConfig, DraftConfig, DraftVocabulary, Eagle3Draft, Param};
use crate::golden::{Difference, GoldenError, cosine};
use crate::losses::LossKind;
use crate::ops::{DeviceFault, DistillRows, DraftOps, RowIndex, TeacherHead};
use crate::ttt::{TttError, TttOptions, ttt_step};

/// Rows of each document.
const DOCUMENTS: [usize; 2] = [220, 164];
/// States, steps and vocabulary of a head whose gradient is the sum of as many blocks as that of a
/// batch of 4,096 tokens with the full vocabulary of Kimi-K2.5; and its width.
const HEAD: [usize; 4] = [4096, 7, 65_536, 128];

/// Gradients of a step, by parameter.
pub(crate) fn gradients<B: AutodiffBackend + DraftOps>(
    draft: &Eagle3Draft<B::InnerBackend>,
    target: &FrozenTarget<B>,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> Result<Vec<(String, Vec<f32>)>, TttError> {
    let draft = Eagle3Draft::<B>::tracked(draft);
    let output = ttt_step(&draft, target, batch, options)?;
    let mut gradients = output.backward();
    let all = draft.gradients(&mut gradients).into_iter();
    Ok(all.map(|(name, gradient)| (name, gradient.to_vec())).collect())
}

/// One less the cosine between gradients of the same parameters.
pub(crate) fn turned(
    exact: &[(String, Vec<f32>)],
    rounded: &[(String, Vec<f32>)],
) -> Vec<Difference> {
    let pairs = exact.iter().zip(rounded);
    let compared = pairs.map(|((name, a), (_, b))| Difference {
        name: format!("1 - cosine of grad.{name}"),
        value: 1.0 - cosine(a, b),
    });
    compared.collect()
}

/// Repeatable, roughly normal values that bf16 holds.
struct Random(u64);

impl Random {
    fn real(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            sum += (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        }
        sum / 1.1547
    }

    fn tensor<B: Backend, const D: usize>(
        &mut self,
        shape: [usize; D],
        spread: f32,
        device: &B::Device,
    ) -> Tensor<B, D> {
        let count = shape.iter().product();
        let value = |_| half::bf16::from_f32(self.real() * spread).to_f32();
        let values: Vec<f32> = (0..count).map(value).collect();
        Tensor::from_data(TensorData::new(values, shape), device)
    }
}

fn config() -> DraftConfig {
    DraftConfig {
        hidden_size: 1024,
        intermediate_size: 2816,
        num_attention_heads: 16,
        attention: AttentionConfig::Gqa { num_key_value_heads: 16, head_dim: 64 },
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        yarn: None,
        vocab_size: 4096,
        draft_vocab_size: 2048,
        num_aux: 3,
        fc_norm: false,
        norm_output: false,
        norm_before_residual: false,
    }
}

/// One less the cosine between the gradients of the same step in f32 and in `dtype`, by parameter.
pub fn compare<B: AutodiffBackend + DraftOps>(
    dtype: FloatDType,
    device: &B::Device,
) -> Result<Vec<Difference>, GoldenError> {
    let (config, mut random) = (config(), Random(3));
    let (width, vocab) = (config.hidden_size, config.vocab_size);
    let rows: usize = DOCUMENTS.iter().sum();
    let draft = Eagle3Draft::<B::InnerBackend>::from_parameters::<GoldenError>(
        config.clone(),
        &mut |_, shape| {
            Ok(match *shape {
                [rows, cols] => Param::Matrix(random.tensor([rows, cols], 0.02, device)),
                _ => Param::Vector(Tensor::ones([shape[0]], device)),
            })
        },
    )?;
    let weights = TargetWeights {
        embed_tokens: random.tensor([vocab, width], 0.02, device),
        norm: Tensor::ones([width], device),
        norm_eps: 1e-5,
        // Distributions with a clear top, as those of a trained target.
        lm_head: random.tensor([vocab, width], 0.1, device),
    };
    let every = vocab / config.draft_vocab_size;
    let ids: Vec<u32> = (0..config.draft_vocab_size).map(|id| (id * every) as u32).collect();
    let target = FrozenTarget::new(weights, DraftVocabulary::from_targets(ids, vocab)?)?;
    let ids = (0..rows).map(|row| (row * 7919 % vocab) as u32).collect();
    let mask: Vec<u8> = (0..rows).map(|row| u8::from(row % 64 >= 20)).collect();
    let tokens = BatchTokens::new(ids, &mask, vec![0, DOCUMENTS[0], rows])?;
    let aux = random.tensor([rows, 3 * width], 1.0, device);
    let batch = TrainBatch::new(tokens, aux, random.tensor([rows, width], 1.0, device))?;
    let options = TttOptions::default();
    let exact = gradients::<B>(&draft, &target, &batch, &options)?;
    let rounded = gradients::<B>(
        &draft.with_dtype(dtype),
        &target.with_dtype(dtype),
        &batch.with_dtype(dtype),
        &options,
    )?;
    Ok(turned(&exact, &rounded))
}

/// One less the cosine between the gradients of a large draft head and of its input in f32 and in
/// `dtype`. Meant for GPUs: it is 1.4 TFLOP of products.
pub fn compare_head<B: AutodiffBackend + DraftOps>(
    dtype: FloatDType,
    device: &B::Device,
) -> Result<Vec<Difference>, DeviceFault> {
    let exact = head_gradients::<B>(FloatDType::F32, device)?;
    Ok(turned(&exact, &head_gradients::<B>(dtype, device)?))
}

fn head_gradients<B: AutodiffBackend + DraftOps>(
    dtype: FloatDType,
    device: &B::Device,
) -> Result<Vec<(String, Vec<f32>)>, DeviceFault> {
    let ([count, steps, vocab, width], mut random) = (HEAD, Random(5));
    let mut matrix = |shape, spread| random.tensor::<B, 2>(shape, spread, device).cast(dtype);
    let states = matrix([count, width], 1.0);
    let hidden = matrix([steps * count, width], 1.0).require_grad();
    let lm_head = matrix([vocab, width], 0.05).require_grad();
    let teacher = TeacherHead {
        norm: Tensor::ones([width], device),
        norm_eps: 1e-5,
        lm_head: matrix([vocab, width], 0.5),
        draft_to_target: RowIndex::new((0..vocab as u32).collect(), device),
    };
    let rows = DistillRows {
        states: (0..steps * count).map(|row| (row / steps) as u32).collect(),
        weights: vec![1.0 / count as f32; steps * count],
        loss: LossKind::SoftCrossEntropy,
        states_at_once: B::TEACHER_ROWS,
    };
    let made = B::distill(hidden.clone(), lm_head.clone(), states, &teacher, &rows);
    let mut gradients = made.loss.backward();
    if let Some(fault) = B::fault(device) {
        return Err(fault);
    }
    // One that is missing is at no angle that would be allowed.
    let mut values = |leaf: &Tensor<B, 2>| {
        let gradient = leaf.grad_remove(&mut gradients);
        gradient.map_or(vec![f32::NAN], |gradient| Param::Matrix(gradient).to_vec())
    };
    Ok(vec![
        ("hidden of a large head".to_owned(), values(&hidden)),
        ("a large lm_head".to_owned(), values(&lm_head)),
    ])
}
