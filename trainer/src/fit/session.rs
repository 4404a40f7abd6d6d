//! What stays the same during a run: data set, split, target head, draft vocabulary, options.
//! Knows no weights.

use std::sync::Arc;

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use extractor::shutdown::Shutdown;

use super::FitError;
use super::split::split;
use crate::acceptance::{EvaluateError, Evaluation, EvaluationPlan, evaluate};
use crate::batch::{FrozenTarget, TargetWeights};
use crate::config::{ActivationPolicy, FitConfig, Loss, MaskMode};
use crate::cost::{Keeping, MemoryPlan};
use crate::dataset::{DatasetError, ManifestDataset, Split};
use crate::draft::{DraftConfig, Eagle3Draft};
use crate::input::{InputOps, RoomOf};
use crate::loader::{Loader, LoaderPlan, LoaderState, Reading};
use crate::losses::LossKind;
use crate::masks;
use crate::ops::{Activations, DraftOps};
use crate::target::{TargetConfig, TargetHead};
use crate::tensors::{HostTensor, TensorFile};
use crate::ttt::TttOptions;
use crate::vocab::{TokenCounts, VocabMap};
use crate::watch::Watch;
use crate::world::World;

/// Rows of the input kept for the check after export.
const GOLDEN_ROWS: usize = 16;
/// Threads that read a data set.
const MOST_READERS: usize = 8;

/// The fixed parts of a run on backend `B`.
#[derive(Debug)]
pub struct Session<B: AutodiffBackend> {
    /// Settings.
    pub config: FitConfig,
    /// The recorded samples.
    pub dataset: Arc<ManifestDataset>,
    /// Samples trained on, and not.
    pub split: Split,
    /// Draft vocabulary.
    pub vocab: VocabMap,
    /// Sizes of the draft.
    pub draft: DraftConfig,
    /// The target's config.json.
    pub target: TargetConfig,
    /// Steps, weights and masks of the training-time test.
    pub options: TttOptions,
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// A few rows of input for the check after export.
    pub golden: TensorFile,
    /// Where it runs.
    pub device: B::Device,
    /// Type of states and products.
    pub dtype: FloatDType,
    /// The frozen target, for training.
    pub frozen: FrozenTarget<B>,
    frozen_inner: FrozenTarget<B::InnerBackend>,
}

impl<B> Session<B>
where
    B: AutodiffBackend + DraftOps + InputOps,
    B::InnerBackend: DraftOps,
{
    /// Opens the data set and everything that follows from it and the settings.
    pub fn open(config: &FitConfig, place: (&B::Device, FloatDType)) -> Result<Self, FitError> {
        let dataset = ManifestDataset::open(&config.data.dataset)?;
        Self::over(dataset, config, (1, None, &Watch::default()), place)
    }

    /// The same for one of `processes` processes, of a data set that is open already. Of a run that
    /// continues on the same samples, whose tokens need not be counted again, the vocabulary is
    /// `kept`. `watch` is told of every sample read.
    pub(super) fn over(
        dataset: ManifestDataset,
        config: &FitConfig,
        (processes, kept, watch): (usize, Option<VocabMap>, &Watch),
        (device, dtype): (&B::Device, FloatDType),
    ) -> Result<Self, FitError> {
        let dataset = Arc::new(dataset.with_verify(config.data.verify));
        let head = TargetHead::load(&dataset.dir().target())?;
        watch.goes_on();
        check_layers(&dataset, &head.config)?;
        let split = split(&dataset, config, watch)?;
        let num_aux = dataset.spec().layers.len() - 1;
        let draft = head.config.draft_config(&config.draft, num_aux)?;
        let vocab = match kept {
            Some(vocab) => vocab,
            None => build_vocab((&dataset, &split.train, watch), &draft, (config, &head.config))?,
        };
        tracing::info!(
            "{} samples to train on, {} held out; draft vocabulary {} of {} covers {:.2} % of \
                the trained tokens",
            split.train.len(),
            split.held_out.len(),
            vocab.draft_vocab_size(),
            vocab.target_vocab_size(),
            100.0 * vocab.coverage(),
        );
        let golden = golden(&dataset, &split, &head)?;
        watch.goes_on();
        let plan = loader_plan(config, &split);
        let train = &config.train;
        let total_steps = plan.total_steps(&dataset, train.accumulate, train.max_steps);
        if train.warmup_steps >= total_steps {
            tracing::warn!(
                "train.warmup_steps = {} of {total_steps} steps: the learning rate only rises, and \
                    is {} in the mean; lower it to a few percent of the steps",
                train.warmup_steps,
                train.lr * (total_steps + 1) as f64 / (2 * train.warmup_steps) as f64
            );
        }
        let lengths = split.train.iter().map(|&at| dataset.samples()[at].tokens);
        let largest = largest_batch(lengths, config.data.max_tokens);
        let target = head.config.clone();
        let place = (device, dtype);
        let frozen_inner = frozen_target::<B::InnerBackend>(head, &vocab, place)?;
        Ok(Self {
            options: TttOptions {
                activations: activations::<B>((config, &draft), [largest, processes], place),
                teacher_rows: B::TEACHER_ROWS,
                ..ttt_options(config)
            },
            total_steps,
            frozen: lift::<B>(&frozen_inner)?,
            frozen_inner,
            config: config.clone(),
            dataset,
            split,
            vocab,
            draft,
            target,
            golden,
            device: device.clone(),
            dtype,
        })
    }

    /// Starts reading this process's training batches at a position.
    pub fn loader(&self, state: LoaderState, world: &World) -> Result<Loader<RoomOf<B>>, FitError> {
        let share = (world.rank(), world.size());
        let plan = LoaderPlan { share, ..loader_plan(&self.config, &self.split) };
        // The others compute, or feed the device.
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        let reading = Reading {
            prefetch: self.config.data.prefetch,
            threads: threads.clamp(1, MOST_READERS),
        };
        let rooms = B::rooms(&self.device).map_err(DatasetError::from)?;
        Ok(Loader::start(self.dataset.clone(), plan, state, (reading, rooms)))
    }

    /// Acceptance on the held-out samples, at most `checkpoint.eval_samples` of them; `None` when
    /// there are none, or none has a row.
    pub fn evaluate(
        &self,
        draft: &Eagle3Draft<B::InnerBackend>,
        (watch, stop): (&Watch, Option<&Shutdown>),
    ) -> Result<Option<Evaluation>, FitError> {
        let held_out = &self.split.held_out;
        if held_out.is_empty() {
            return Ok(None);
        }
        // Ordered by id, so that the samples stay the same ones whatever else is recorded.
        let count = held_out.len().min(self.config.checkpoint.eval_samples);
        let what = EvaluationPlan {
            indices: &held_out[..count],
            max_tokens: self.config.data.max_tokens,
            options: &self.options,
            watch,
            stop,
        };
        match evaluate(draft, &self.frozen_inner, &self.dataset, &what) {
            Err(error @ EvaluateError::NoRows { .. }) => {
                tracing::warn!("{error}");
                Ok(None)
            }
            measured => Ok(Some(measured?)),
        }
    }

    /// Rows of the target's head for the draft vocabulary, `[draft vocabulary, H]`.
    pub fn draft_rows_of_lm_head(&self) -> Tensor<B::InnerBackend, 2> {
        self.frozen_inner.draft_rows_of_lm_head()
    }
}

/// Options of the training-time test.
pub fn ttt_options(config: &FitConfig) -> TttOptions {
    TttOptions {
        steps: config.train.ttt_steps,
        step_decay: config.train.step_decay,
        loss: match config.train.loss {
            Loss::Ce => LossKind::SoftCrossEntropy,
            Loss::Kl => LossKind::KullbackLeibler,
            Loss::Lk => LossKind::Acceptance { eta: config.train.lk_eta },
        },
        mask_mode: match config.train.mask_mode {
            MaskMode::Chain => masks::MaskMode::Chain,
            MaskMode::SpecForge => masks::MaskMode::Specforge { zero_last_mask: true },
        },
        ..TttOptions::default()
    }
}

/// Tokens that no batch of samples of these lengths has more of: a sample longer than `max_tokens`
/// is a batch of its own.
fn largest_batch(lengths: impl Iterator<Item = usize> + Clone, max_tokens: usize) -> usize {
    max_tokens.min(lengths.clone().sum()).max(lengths.max().unwrap_or(0))
}

/// Prints what memory batches of up to `tokens` tokens need in one of `processes`, and decides what
/// the backward pass finds of the forward pass.
fn activations<B: DraftOps>(
    (config, draft): (&FitConfig, &DraftConfig),
    [tokens, processes]: [usize; 2],
    (device, dtype): (&B::Device, FloatDType),
) -> Activations {
    let rows = [tokens, config.train.ttt_steps];
    let value_bytes = DType::from(dtype).size() as u64;
    let (average, frozen) = (config.train.ema > 0.0, config.draft.frozen());
    let keeping = Keeping { value_bytes, average, processes, frozen };
    let plan = MemoryPlan::new(draft, rows, keeping);
    let memory = B::memory(device);
    let choice = match (config.train.activations, memory) {
        (ActivationPolicy::Keep, _) | (ActivationPolicy::Auto, None) => Activations::Keep,
        (ActivationPolicy::Recompute, _) => Activations::Recompute,
        (ActivationPolicy::Auto, Some(memory)) => plan.choose(memory),
    };
    if let Some(memory) = memory {
        let (total, all) = (plan.total(choice) as f64 / 1e9, memory as f64 / 1e9);
        tracing::info!("memory: {plan}; {choice:?}: {total:.1} of {all:.1} GB");
    }
    choice
}

fn loader_plan(config: &FitConfig, split: &Split) -> LoaderPlan {
    LoaderPlan {
        indices: split.train.clone(),
        seed: config.train.seed,
        epochs: config.train.epochs,
        max_tokens: config.data.max_tokens,
        share: (0, 1),
    }
}

fn check_layers(dataset: &ManifestDataset, target: &TargetConfig) -> Result<(), FitError> {
    let layers = &dataset.spec().layers;
    let last = match layers.last() {
        Some(last) if layers.len() > 1 => last.0,
        _ => return Err(DatasetError::Layers { layers: layers.len() }.into()),
    };
    let expected = target.num_hidden_layers()? - 1;
    if usize::from(last) != expected {
        return Err(DatasetError::Teacher { found: last, expected }.into());
    }
    Ok(())
}

fn build_vocab(
    (dataset, train, watch): (&ManifestDataset, &[usize], &Watch),
    draft: &DraftConfig,
    (config, target): (&FitConfig, &TargetConfig),
) -> Result<VocabMap, FitError> {
    let fingerprint = dataset.fingerprint().to_string();
    let asked = &config.draft.force_tokens;
    if draft.draft_vocab_size == draft.vocab_size {
        // Markers of the target that it has no row for take nothing from this vocabulary.
        return Ok(VocabMap::full_with(draft.vocab_size, asked, &fingerprint)?);
    }
    let mut forced = target.eos_token_ids();
    forced.extend(target.bos_token_id());
    forced.extend(asked);
    let mut counts = TokenCounts::new(draft.vocab_size);
    let reader = dataset.quick_reader();
    for &at in train {
        let sample = reader.read_tokens(at)?;
        counts.add(sample.input_ids(), sample.loss_mask())?;
        watch.goes_on();
    }
    Ok(VocabMap::build(&counts, draft.draft_vocab_size, &forced, &fingerprint)?)
}

fn golden(
    dataset: &ManifestDataset,
    split: &Split,
    head: &TargetHead,
) -> Result<TensorFile, FitError> {
    let mut file = TensorFile::default();
    let longest = split.held_out.iter().chain(&split.train);
    let Some(&at) = longest.max_by_key(|&&at| dataset.samples()[at].tokens) else {
        return Ok(file);
    };
    let sample = dataset.reader().read(at)?;
    let (ids, width) = (sample.sample().input_ids(), head.hidden_size);
    let rows = GOLDEN_ROWS.min(ids.len().saturating_sub(1));
    let fed: Vec<i64> = ids.iter().skip(1).take(rows).map(|&id| i64::from(id)).collect();
    let embeds: Vec<f32> = fed
        .iter()
        .flat_map(|&id| head.embed_tokens.iter().skip(id as usize * width).take(width).copied())
        .collect();
    file.tensors.insert("input_ids".into(), HostTensor::i64(&fed));
    file.tensors.insert("embeds".into(), HostTensor::f32(&embeds, &[rows, width]));
    for (n, state) in sample.states().iter().rev().skip(1).rev().enumerate() {
        let values = state.rows.to_f32();
        let kept = values.get(..rows * width).unwrap_or_default();
        file.tensors.insert(format!("aux.{n}"), HostTensor::f32(kept, &[rows, width]));
    }
    Ok(file)
}

/// Puts the target's head on a device, its matrices as values of type `dtype`.
pub fn frozen_target<B: Backend>(
    head: TargetHead,
    vocab: &VocabMap,
    (device, dtype): (&B::Device, FloatDType),
) -> Result<FrozenTarget<B>, FitError> {
    let (rows, width) = (head.vocab_size, head.hidden_size);
    let matrix = |values: Vec<f32>| {
        let data = TensorData::new(values, [rows, width]).convert_dtype(dtype.into());
        B::memory_persistent_allocations(device, data, |data| {
            Tensor::from_data(data, (device, DType::from(dtype)))
        })
    };
    let weights = TargetWeights {
        embed_tokens: matrix(head.embed_tokens),
        norm: Tensor::from_data(TensorData::new(head.norm, [width]), device),
        norm_eps: head.rms_norm_eps,
        lm_head: matrix(head.lm_head),
    };
    Ok(FrozenTarget::new(weights, vocab.vocabulary().clone())?)
}

/// The same tensors on the differentiating backend; storage is shared.
fn lift<B: AutodiffBackend>(
    inner: &FrozenTarget<B::InnerBackend>,
) -> Result<FrozenTarget<B>, FitError> {
    let weights = TargetWeights {
        embed_tokens: Tensor::from_inner(inner.embed_tokens.clone()),
        norm: Tensor::from_inner(inner.head.norm.clone()),
        norm_eps: inner.head.norm_eps,
        lm_head: Tensor::from_inner(inner.head.lm_head.clone()),
    };
    Ok(FrozenTarget::new(weights, inner.vocabulary.clone())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_planned_for_the_largest_batch_there_can_be() {
        let largest = |lengths: &[usize], max| largest_batch(lengths.iter().copied(), max);
        assert_eq!(largest(&[10, 20, 30], 50), 50);
        assert_eq!(largest(&[10, 20, 90], 50), 90, "a long sample is a batch of its own");
        assert_eq!(largest(&[10, 20, 30], usize::MAX), 60, "no batch has more than there is");
    }
}
