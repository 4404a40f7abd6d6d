//! Draft head, teacher and soft cross-entropy, streamed over blocks of rows and of the vocabulary,
//! with the gradients of a weighted sum of 1 in the same pass. Knows no graph.

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;
use burn::tensor::DType;
use kernels::cuda::{
    Comparison, CudaError, DeviceMatrix, DeviceVector, Form, Product, RowLoss, RunningSoftmax,
    TeacherViews,
};

use super::engine::{Part, Work, faulted, run};
use super::norm_weight;
use super::views::{Ids, T, empty, empty_ids, ids, in_rows, matrix, upload, upload_floats, vector};
use crate::losses::LossKind;
use crate::ops::{DistillRows, Distilled, TeacherHead};

/// Entries of the teacher's or the draft's f32 logits that exist at a time.
const LOGITS: usize = 1 << 26;
/// Rows of the draft in a block at least: the head's gradient is rounded once for each block that
/// is added to it, so that of a large vocabulary must not have many.
const LEAST_ROWS: usize = 1024;

/// Rows or columns of a block: what the limit allows, in whole tiles.
fn block(limit: usize, all: usize) -> usize {
    (limit / 256 * 256).max(256).min(all.max(1))
}

/// Room for the teacher of a few states.
struct Room {
    /// `[states, block of the vocabulary]`.
    block: T<2>,
    /// `[states, draft vocabulary]`.
    logits: T<2>,
    draft_lse: T<1>,
    most: T<1>,
    total: T<1>,
    top: Ids,
}

/// Views of [`Room`] and of the frozen head.
struct Teacher<'a> {
    room: DeviceMatrix,
    logits: DeviceMatrix,
    draft_lse: DeviceVector<f32>,
    running: RunningSoftmax,
    lm_head: DeviceMatrix,
    ids: DeviceVector<u32>,
    host_ids: &'a [u32],
}

impl Room {
    /// For up to `states` states; without the draft's tokens if `draft` is 0.
    fn new([states, vocabulary, draft]: [usize; 3], device: &CudaDevice) -> Self {
        let columns = block(LOGITS / 2 / states.max(1), vocabulary);
        let float = (device, DType::F32);
        Self {
            block: empty([states, columns], float),
            logits: empty([states, draft.max(1)], float),
            draft_lse: empty([states], float),
            most: empty([states], float),
            total: empty([states], float),
            top: empty_ids(states, device),
        }
    }

    fn teacher<'a>(
        &self,
        lm_head: DeviceMatrix,
        ids_of: (DeviceVector<u32>, &'a [u32]),
    ) -> Teacher<'a> {
        let running = RunningSoftmax {
            most: vector(&self.most),
            total: vector(&self.total),
            top: ids(&self.top),
        };
        Teacher {
            room: matrix(&self.block),
            logits: matrix(&self.logits),
            draft_lse: vector(&self.draft_lse),
            running,
            lm_head,
            ids: ids_of.0,
            host_ids: ids_of.1,
        }
    }
}

impl Teacher<'_> {
    /// Streams the head over `states [s, H]`, already normed; numbers of states start with
    /// `first_state`.
    fn stream(
        &self,
        work: &mut Work<'_>,
        states: &DeviceMatrix,
        (first_state, with_draft): (usize, bool),
    ) -> Result<TeacherViews, CudaError> {
        let count = states.rows;
        let running = RunningSoftmax {
            most: self.running.most.range(0..count),
            total: self.running.total.range(0..count),
            top: self.running.top.range(0..count),
        };
        let picked = self.logits.row_range(0..count);
        for first in (0..self.lm_head.rows).step_by(self.room.cols) {
            let last = (first + self.room.cols).min(self.lm_head.rows);
            // Without gaps, so that rows are aligned whatever the last block's width.
            let logits = self.room.row_range(0..count).columns(0..last - first);
            let weight = self.lm_head.row_range(first..last);
            work.part(Part::Gemm)?;
            work.product(&logits, states, &weight, Product::LINEAR)?;
            work.part(Part::Loss)?;
            work.launch.scan_vocabulary(&logits, first, &running)?;
            if with_draft {
                let place =
                    |token: usize| self.host_ids.partition_point(|&id| (id as usize) < token);
                let (begin, end) = (place(first), place(last));
                let place = [begin, end - begin, first];
                work.launch.pick_tokens(&picked, &logits, self.ids, place)?;
            }
        }
        let draft_lse = self.draft_lse.range(0..count);
        if with_draft {
            work.launch.log_sum(draft_lse, &picked)?;
        }
        let first_state = first_state as u32;
        Ok(TeacherViews { logits: picked, draft_lse, running, first_state, ids: self.ids })
    }
}

/// Views of the draft's side.
struct Draft {
    hidden: DeviceMatrix,
    lm_head: DeviceMatrix,
    /// Room for a block of rows: logits, and their gradient if wanted.
    logits: DeviceMatrix,
    gradient: Option<DeviceMatrix>,
    outcomes: DeviceMatrix,
    states: DeviceVector<u32>,
    weights: DeviceVector<f32>,
    loss: RowLoss,
    /// Written: gradients of hidden rows and of the head.
    out: Option<[DeviceMatrix; 2]>,
}

impl Draft {
    /// Compares the rows `first..last`, whose states the teacher knows.
    fn compare(
        &self,
        work: &mut Work<'_>,
        teacher: &TeacherViews,
        (first, last): (usize, usize),
    ) -> Result<(), CudaError> {
        let count = last - first;
        let (hidden, logits) =
            (self.hidden.row_range(first..last), self.logits.row_range(0..count));
        work.part(Part::Gemm)?;
        work.product(&logits, &hidden, &self.lm_head, Product::LINEAR)?;
        work.part(Part::Loss)?;
        let gradient = self.gradient.map(|gradient| gradient.row_range(0..count));
        let rows = Comparison {
            logits,
            gradient,
            outcomes: self.outcomes.row_range(first..last),
            states: self.states.range(first..last),
            weights: self.weights.range(first..last),
            loss: self.loss,
        };
        work.launch.compare(&rows, teacher)?;
        if let (Some(gradient), Some([d_hidden, d_head])) = (gradient, self.out) {
            work.part(Part::Gemm)?;
            let product = Product { form: Form::Nn, accumulate: false, alpha: 1.0 };
            work.product(&d_hidden.row_range(first..last), &gradient, &self.lm_head, product)?;
            // The first block starts the sum of the head.
            let product = Product { form: Form::Tn, accumulate: first > 0, alpha: 1.0 };
            work.product(&d_head, &gradient, &hidden, product)?;
        }
        Ok(())
    }
}

fn normed_states(states: T<2>, head: &TeacherHead<Cuda>) -> T<2> {
    <Cuda as crate::ops::DraftOps>::rms_norm(states, norm_weight(head.norm.clone()), head.norm_eps)
}

/// See [`crate::DraftOps::distill`]; with the gradients of `hidden` and `lm_head` when asked for,
/// else with these themselves.
pub(super) fn distill(
    (hidden, lm_head): (T<2>, T<2>),
    states: T<2>,
    head: &TeacherHead<Cuda>,
    (rows, with_gradients): (&DistillRows, bool),
) -> (Distilled<Cuda>, [T<2>; 2]) {
    let (hidden, lm_head) = (in_rows(hidden), in_rows(lm_head));
    let (device, dtype) = (hidden.device(), hidden.dtype());
    let states = in_rows(normed_states(states, head));
    let frozen = in_rows(head.lm_head.clone());
    let ([count, _], [vocabulary, _]) = (hidden.dims(), lm_head.dims());
    let states_at_once = rows.states_at_once.clamp(1, states.dims()[0].max(1));
    let room = Room::new([states_at_once, frozen.dims()[0], vocabulary], &device);
    let teacher = room
        .teacher(matrix(&frozen), (ids(&head.draft_to_target.device), head.draft_to_target.host()));
    let row_block = block((LOGITS / vocabulary.max(1)).max(LEAST_ROWS), count);
    let logits = empty([row_block, vocabulary], (&device, DType::F32));
    let gradient = with_gradients.then(|| empty([row_block, vocabulary], (&device, dtype)));
    let outcomes = empty([count, 3], (&device, DType::F32));
    let loss = empty([1], (&device, DType::F32));
    let of_row = upload(rows.states.clone(), &device);
    let weights = upload_floats(&rows.weights, &device);
    let out = with_gradients.then(|| {
        [empty(hidden.dims(), (&device, dtype)), empty(lm_head.dims(), (&device, lm_head.dtype()))]
    });
    let draft = Draft {
        hidden: matrix(&hidden),
        lm_head: matrix(&lm_head),
        logits: matrix(&logits),
        gradient: gradient.as_ref().map(matrix),
        outcomes: matrix(&outcomes),
        states: ids(&of_row),
        weights: vector(&weights),
        loss: match rows.loss {
            LossKind::SoftCrossEntropy => RowLoss::Cross,
            LossKind::KullbackLeibler => RowLoss::Divergence,
            LossKind::Acceptance { eta } => RowLoss::Acceptance { eta: eta as f32 },
        },
        out: out.as_ref().map(|[d_hidden, d_head]| [matrix(d_hidden), matrix(d_head)]),
    };
    let (all_states, sum) = (matrix(&states), vector(&loss));
    run(&device, Part::Loss, |work| {
        let mut first = 0;
        for start in (0..all_states.rows).step_by(states_at_once) {
            let end = (start + states_at_once).min(all_states.rows);
            let last = rows.states.partition_point(|&state| (state as usize) < end);
            if first == last {
                continue;
            }
            let some = all_states.row_range(start..end);
            let views = teacher.stream(work, &some, (start, true))?;
            for from in (first..last).step_by(row_block) {
                draft.compare(work, &views, (from, (from + row_block).min(last)))?;
            }
            first = last;
        }
        work.part(Part::Loss)?;
        work.launch.weighted_loss(sum, &draft.outcomes, draft.weights)
    });
    (Distilled { loss, rows: outcomes }, out.unwrap_or([hidden, lm_head]))
}

/// See [`crate::DraftOps::teacher_top`].
pub(super) fn teacher_top(
    states: T<2>,
    head: &TeacherHead<Cuda>,
    states_at_once: usize,
) -> Vec<u32> {
    let states = in_rows(normed_states(states, head));
    let frozen = in_rows(head.lm_head.clone());
    let device = states.device();
    let count = states.dims()[0];
    let at_once = states_at_once.clamp(1, count.max(1));
    let room = Room::new([at_once, frozen.dims()[0], 0], &device);
    let ids_of = (ids(&head.draft_to_target.device), head.draft_to_target.host());
    let teacher = room.teacher(matrix(&frozen), ids_of);
    let all = matrix(&states);
    let mut top = Vec::with_capacity(count);
    for start in (0..count).step_by(at_once) {
        let end = (start + at_once).min(count);
        run(&device, Part::Loss, |work| {
            teacher.stream(work, &all.row_range(start..end), (start, false)).map(|_| ())
        });
        if faulted() {
            // The caller asks for the fault next; until then any token will do.
            return vec![0; count];
        }
        let some = room.top.clone().into_data();
        top.extend(some.iter::<i32>().take(end - start).map(|token| token as u32));
    }
    top
}
