//! The training-time test: loss, metrics and (through the backend) gradients of one packed batch.
//! Knows nothing of optimizers, files or schedules.

use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use thiserror::Error;

use crate::batch::{BatchError, BatchTokens, FrozenTarget, TrainBatch};
use crate::draft::Eagle3Draft;
use crate::losses::LossKind;
use crate::masks::{Documents, MaskMode, RowMasks, RowPlan, row_masks};
use crate::metrics::{RowOutcomes, TttMetrics};
use crate::ops::{Activations, DeviceFault, DistillRows, DraftOps, RowIndex};
use crate::plan::{plan_batch, positions};

/// How a training step is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct TttOptions {
    /// Steps of the draft, `K`.
    pub steps: usize,
    /// Step `k` enters the loss with `step_decay` to the power `k`.
    pub step_decay: f64,
    /// Which rows are trained.
    pub mask_mode: MaskMode,
    /// Compute only the rows the loss can see. The result is that of the dense form.
    pub row_sparse: bool,
    /// What is minimised on each row.
    pub loss: LossKind,
    /// Divisor of each step's loss sum, `[K]`, instead of the batch's own: the rows of the whole
    /// optimizer step when that spans several batches or ranks (see [`step_rows`]).
    pub divisors: Option<Vec<f64>>,
    /// Teacher states whose full-vocabulary logits exist at the same time.
    pub teacher_rows: usize,
    /// What the backward pass finds of the forward pass.
    pub activations: Activations,
    /// Keep intermediate states for comparison with a reference.
    pub trace: bool,
}

impl Default for TttOptions {
    fn default() -> Self {
        Self {
            steps: 7,
            step_decay: 0.8,
            mask_mode: MaskMode::Chain,
            row_sparse: true,
            loss: LossKind::SoftCrossEntropy,
            divisors: None,
            teacher_rows: 512,
            activations: Activations::Keep,
            trace: false,
        }
    }
}

/// Loss of a batch and what is needed for its metrics.
#[derive(Clone, Debug)]
pub struct TttOutput<B: Backend> {
    /// `[1]`; 0 with zero gradients for a batch without trained rows.
    pub loss: Tensor<B, 1>,
    /// Intermediate states, when asked for.
    pub trace: Option<Trace<B>>,
    outcomes: RowOutcomes<B>,
}

impl<B: AutodiffBackend + DraftOps> TttOutput<B> {
    /// Gradients of everything the loss depends on. The graph is used up.
    pub fn backward(&self) -> B::Gradients {
        let mut made = None;
        B::on_device(&self.loss.device(), || made = Some(self.loss.backward()));
        let Some(made) = made else { unreachable!("the task has run") };
        made
    }
}

impl<B: Backend> TttOutput<B> {
    /// Waits for the device and copies what [`Self::metrics`] needs, so that the host can count
    /// while the device does something else.
    pub fn fetch(&mut self) {
        self.outcomes.fetch();
    }

    /// Sums and counts. Waits for the device unless they were fetched, so call it after the
    /// backward pass is on its way.
    pub fn metrics(&self) -> TttMetrics {
        self.outcomes.metrics()
    }
}

/// Intermediate states of a step.
#[derive(Clone, Debug)]
pub struct Trace<B: Backend> {
    /// Which rows were computed.
    pub rows: RowPlan,
    /// Masks that decided it.
    pub masks: RowMasks,
    /// Output of `fc`, `[base rows, H]`.
    pub h0: Tensor<B, 2>,
    /// For each step the layer's output before the norm, `[rows of the step, H]`.
    pub layer_output: Vec<Tensor<B, 2>>,
    /// The same after the norm: what the draft's head reads.
    pub normed: Vec<Tensor<B, 2>>,
}

/// A batch, draft and target that do not belong together.
#[derive(Debug, Error)]
pub enum TttError {
    /// Shapes or ids that do not fit.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceFault),
    /// `divisors` must have an entry for each step.
    #[error("{found} loss divisors for {steps} steps; expected one for each step")]
    Divisors {
        /// Steps.
        steps: usize,
        /// Divisors that came.
        found: usize,
    },
}

impl TttError {
    /// Exit code of a run that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Batch(error) => error.exit_code(),
            Self::Device(fault) => fault.exit_code,
            Self::Divisors { .. } => 70,
        }
    }
}

/// Rows each step would train in `chain` mode, for divisors that span several batches.
pub fn step_rows(tokens: &BatchTokens, steps: usize) -> Vec<u64> {
    let masks = row_masks(tokens, steps, MaskMode::Chain, &[]);
    masks.in_loss.iter().map(|rows| rows.iter().filter(|&&row| row).count() as u64).collect()
}

/// Runs the draft `options.steps` steps over the batch and compares each with the target.
///
/// The loss is `sum_k step_decay^k * loss_sum_k / divisor_k`. Documents never see each other.
/// Nothing is detached between steps. Errors when batch, draft and target differ in sizes.
pub fn ttt_step<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> Result<TttOutput<B>, TttError> {
    check(draft, frozen, batch, options)?;
    B::on_device(&draft.device(), || unchecked_step(draft, frozen, batch, options))
}

fn unchecked_step<B: DraftOps>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> Result<TttOutput<B>, TttError> {
    let tokens = batch.tokens();
    let masks =
        row_masks(tokens, options.steps, options.mask_mode, &known_top(frozen, batch, options));
    let rows = match options.row_sparse {
        true => RowPlan::sparse(tokens, &masks),
        false => RowPlan::dense(tokens.rows(), options.steps),
    };
    let mut outcomes = RowOutcomes::new(&masks, divisors(tokens, &masks, options));
    let device = draft.device();
    if rows.need.iter().all(Vec::is_empty) {
        // A constant could not be differentiated.
        let loss = draft.norm.clone().narrow(0, 0, 1) * 0.0;
        return Ok(TttOutput { loss, trace: None, outcomes });
    }
    let table = frozen.rotary.table(draft.config(), positions(tokens, &rows), &device);
    let plan = plan_batch(tokens, &rows, draft.config().attention_scale(), table);
    let mut passed = draft.unroll(&frozen.embed_tokens, &batch.aux, &plan, options.activations);
    let normed = match options.trace {
        true => passed.normed.clone(),
        false => std::mem::take(&mut passed.normed),
    };
    let compared = Comparison::new(tokens, &rows, plan.steps.len());
    let weights = outcomes.weights(&compared.order, options.step_decay);
    let states = compared.gather_states(batch, &device);
    let hidden = compared.order_rows(normed, &device);
    let distill = DistillRows {
        states: compared.state_of_row,
        weights,
        loss: options.loss,
        states_at_once: options.teacher_rows.max(1),
    };
    let lm_head = draft.lm_head.clone();
    let result = B::distill(hidden, lm_head, states, &frozen.head, &distill);
    outcomes.set(compared.order, result.rows);
    if let Some(fault) = B::fault(&device) {
        return Err(fault.into());
    }
    let trace = options.trace.then(|| Trace {
        rows,
        masks,
        h0: passed.h0,
        layer_output: passed.layer_output,
        normed: passed.normed,
    });
    Ok(TttOutput { loss: result.loss, trace, outcomes })
}

fn check<B: Backend>(
    draft: &Eagle3Draft<B>,
    frozen: &FrozenTarget<B>,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> Result<(), TttError> {
    let (config, rows) = (draft.config(), batch.tokens().rows());
    let width = config.hidden_size;
    let shapes = [
        ("aux states", batch.aux.dims(), [rows, config.num_aux * width]),
        ("last hidden state", batch.last_hidden.dims(), [rows, width]),
        ("target embed_tokens", frozen.embed_tokens.dims(), [config.vocab_size, width]),
        (
            "draft vocabulary",
            [frozen.vocabulary.draft_to_target().len(), width],
            [config.draft_vocab_size, width],
        ),
    ];
    for (what, found, expected) in shapes {
        if found != expected {
            return Err(BatchError::Shape { what, expected, found }.into());
        }
    }
    let vocab_size = config.vocab_size;
    let outside = |&(_, &id): &(usize, &u32)| id as usize >= vocab_size;
    if let Some((row, &id)) = batch.tokens().input_ids().iter().enumerate().find(outside) {
        return Err(BatchError::Token { id, row, vocab_size }.into());
    }
    match &options.divisors {
        Some(divisors) if divisors.len() != options.steps => {
            Err(TttError::Divisors { steps: options.steps, found: divisors.len() })
        }
        _ => Ok(()),
    }
}

/// For each state, and last for the zero state past the end, whether the teacher's top token is in
/// the draft vocabulary; empty where the mask rule does not ask.
fn known_top<B: DraftOps>(
    frozen: &FrozenTarget<B>,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> Vec<bool> {
    if options.mask_mode == MaskMode::Chain {
        return Vec::new();
    }
    let top = B::teacher_top(with_zero_row(&batch.last_hidden), &frozen.head, options.teacher_rows);
    top.into_iter().map(|id| frozen.vocabulary.in_draft()[id as usize]).collect()
}

fn with_zero_row<B: Backend>(states: &Tensor<B, 2>) -> Tensor<B, 2> {
    let zero = states.clone().narrow(0, 0, 1).zeros_like();
    Tensor::cat(vec![states.clone(), zero], 0)
}

fn divisors(tokens: &BatchTokens, masks: &RowMasks, options: &TttOptions) -> Vec<f64> {
    if let Some(divisors) = &options.divisors {
        return divisors.clone();
    }
    let divisor = |rows: &Vec<bool>| match options.mask_mode {
        // Not more where there are none: divisors of batches add up.
        MaskMode::Chain => rows.iter().filter(|&&row| row).count() as f64,
        MaskMode::Specforge { .. } => tokens.rows() as f64,
    };
    masks.in_loss.iter().map(divisor).collect()
}

/// The rows of all steps, ordered by the teacher state they are compared with, so that a teacher
/// distribution is made once and dropped after its last row.
struct Comparison {
    /// Step and row of each compared row.
    order: Vec<(usize, u32)>,
    /// For each step, where its rows are in `order`.
    places: Vec<Vec<u32>>,
    /// Its teacher state, as a place in `slots`.
    state_of_row: Vec<u32>,
    /// States in use; the number of rows stands for the zero state past the end.
    slots: Vec<u32>,
    rows: usize,
}

impl Comparison {
    fn new(tokens: &BatchTokens, rows: &RowPlan, steps: usize) -> Self {
        let documents = Documents::new(tokens);
        let mut all = Vec::new();
        for (step, need) in rows.need[..steps].iter().enumerate() {
            for (at, &row) in need.iter().enumerate() {
                let slot = documents.ahead(row as usize, 1 + step).unwrap_or(documents.rows());
                all.push((slot as u32, step, row, at));
            }
        }
        all.sort_unstable();
        let mut slots: Vec<u32> = Vec::new();
        let mut state_of_row = Vec::with_capacity(all.len());
        let mut places: Vec<_> =
            rows.need[..steps].iter().map(|need| vec![0; need.len()]).collect();
        for (place, &(slot, step, _, at)) in all.iter().enumerate() {
            places[step][at] = place as u32;
            if slots.last() != Some(&slot) {
                slots.push(slot);
            }
            state_of_row.push(slots.len() as u32 - 1);
        }
        Self {
            order: all.iter().map(|&(_, step, row, _)| (step, row)).collect(),
            places,
            state_of_row,
            slots,
            rows: documents.rows(),
        }
    }

    /// Rows of all steps in `order`.
    fn order_rows<B: DraftOps>(
        &self,
        steps: Vec<Tensor<B, 2>>,
        device: &B::Device,
    ) -> Tensor<B, 2> {
        let (width, dtype) = (steps[0].dims()[1], steps[0].dtype());
        let zeros = Tensor::zeros([self.order.len(), width], (device, dtype));
        steps.into_iter().zip(&self.places).fold(zeros, |ordered, (rows, places)| {
            B::place_rows(ordered, rows, &RowIndex::new(places.clone(), device))
        })
    }

    fn gather_states<B: DraftOps>(
        &self,
        batch: &TrainBatch<B>,
        device: &B::Device,
    ) -> Tensor<B, 2> {
        let past_end = self.slots.last() == Some(&(self.rows as u32));
        let states = match past_end {
            true => with_zero_row(&batch.last_hidden),
            false => batch.last_hidden.clone(),
        };
        B::gather_rows(states, &RowIndex::new(self.slots.clone(), device))
    }
}
