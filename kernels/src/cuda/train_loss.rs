//! Launches of the teacher's and the draft's softmax over blocks of the vocabulary. Knows nothing
//! of the products that make the logits.

use super::rows::vector_width;
use super::views::MatArg;
use super::{CudaError, DeviceMatrix, DeviceVector, Dtype, Launcher, Shape, ensure};

/// Running softmax of each row over the whole vocabulary: [rows] each.
#[derive(Clone, Copy, Debug)]
pub struct RunningSoftmax {
    /// Largest logit.
    pub most: DeviceVector<f32>,
    /// Sum of exponentials relative to it.
    pub total: DeviceVector<f32>,
    /// Its token.
    pub top: DeviceVector<u32>,
}

/// The teacher for a few states.
#[derive(Clone, Copy, Debug)]
pub struct TeacherViews {
    /// Logits of the draft's tokens, [states, draft vocabulary], f32.
    pub logits: DeviceMatrix,
    /// Logarithm of the sum of their exponentials, [states].
    pub draft_lse: DeviceVector<f32>,
    /// Over the whole vocabulary.
    pub running: RunningSoftmax,
    /// Number of the first of these states.
    pub first_state: u32,
    /// Target token of each draft token.
    pub ids: DeviceVector<u32>,
}

/// Rows of the draft to compare with the teacher.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// [rows, draft vocabulary], f32.
    pub logits: DeviceMatrix,
    /// Written, if wanted: gradient of the weighted loss by the logits, of the same shape.
    pub gradient: Option<DeviceMatrix>,
    /// Written: loss, overlap and rightness, [rows, 3], f32.
    pub outcomes: DeviceMatrix,
    /// State of each row.
    pub states: DeviceVector<u32>,
    /// Factor of each row's loss.
    pub weights: DeviceVector<f32>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScanArgs {
    logits: MatArg,
    most: u64,
    total: u64,
    top: u64,
    rows: u32,
    cols: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PickArgs {
    out: MatArg,
    logits: MatArg,
    ids: u64,
    rows: u32,
    begin: u32,
    count: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ShareArgs {
    teacher: MatArg,
    lse: u64,
    rows: u32,
    cols: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CompareArgs {
    logits: MatArg,
    gradient: MatArg,
    teacher: MatArg,
    outcomes: MatArg,
    draft_lse: u64,
    most: u64,
    total: u64,
    top: u64,
    state_of_row: u64,
    weights: u64,
    ids: u64,
    rows: u32,
    cols: u32,
    first_state: u32,
    /// Whether shared memory holds a row.
    keep: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WeightedArgs {
    out: u64,
    weights: u64,
    outcomes: MatArg,
    rows: u32,
}

/// Threads of a block that goes over one row.
const THREADS: u32 = 512;
/// Bytes of shared memory that sums over a block need beside a row.
const SHARED_REST: usize = 2048;

impl Launcher<'_> {
    /// Takes the logits of tokens from `first` on, f32, into running softmaxes; `first` 0 starts
    /// them.
    pub fn scan_vocabulary(
        &self,
        logits: &DeviceMatrix,
        first: usize,
        running: &RunningSoftmax,
    ) -> Result<(), CudaError> {
        let RunningSoftmax { most, total, top } = running;
        let rows = logits.rows;
        let fits = logits.dtype == Dtype::F32
            && [most.len, total.len, top.len].iter().all(|&len| len == rows);
        ensure(fits, || format!("running softmax {running:?} of {logits:?}"))?;
        if rows == 0 {
            return Ok(());
        }
        let args = ScanArgs {
            logits: logits.arg(),
            most: most.address,
            total: total.address,
            top: top.address,
            rows: rows as u32,
            cols: logits.cols as u32,
            first: first as u32,
        };
        let name = format!("train_scan_v{}", vector_width(&[logits]));
        self.launch(&name, Shape::new(rows, THREADS)?, &args)
    }

    /// Copies the logits of the draft tokens `begin..begin + count`, which lie in a block of the
    /// vocabulary that starts with token `first`.
    pub fn pick_tokens(
        &self,
        out: &DeviceMatrix,
        logits: &DeviceMatrix,
        ids: DeviceVector<u32>,
        [begin, count, first]: [usize; 3],
    ) -> Result<(), CudaError> {
        let fits = out.rows == logits.rows
            && out.dtype == Dtype::F32
            && logits.dtype == Dtype::F32
            && ids.len == out.cols
            && begin + count <= out.cols;
        ensure(fits, || format!("{count} tokens of {logits:?} in {out:?}"))?;
        if count == 0 || out.rows == 0 {
            return Ok(());
        }
        let args = PickArgs {
            out: out.arg(),
            logits: logits.arg(),
            ids: ids.address,
            rows: out.rows as u32,
            begin: begin as u32,
            count: count as u32,
            first: first as u32,
        };
        self.launch("train_pick", Shape::new(out.rows, 256)?, &args)
    }

    /// Logarithm of the sum of exponentials of each row, f32.
    pub fn log_sum(&self, lse: DeviceVector<f32>, x: &DeviceMatrix) -> Result<(), CudaError> {
        let fits = lse.len == x.rows && x.dtype == Dtype::F32;
        ensure(fits, || format!("log-sum of {x:?} in {} values", lse.len))?;
        if x.rows == 0 {
            return Ok(());
        }
        let (rows, cols) = (x.rows as u32, x.cols as u32);
        let args = ShareArgs { teacher: x.arg(), lse: lse.address, rows, cols };
        let name = format!("train_log_sum_v{}", vector_width(&[x]));
        self.launch(&name, Shape::new(x.rows, THREADS)?, &args)
    }

    /// Compares rows of the draft with the teacher.
    pub fn compare(&self, call: &Comparison, teacher: &TeacherViews) -> Result<(), CudaError> {
        let Comparison { logits, gradient, outcomes, states, weights } = call;
        let out = gradient.as_ref().unwrap_or(logits);
        let fits = out.shape() == logits.shape()
            && logits.dtype == Dtype::F32
            && teacher.logits.dtype == Dtype::F32
            && teacher.logits.cols == logits.cols
            && teacher.ids.len == logits.cols
            && outcomes.shape() == [logits.rows, 3]
            && states.len == logits.rows
            && weights.len == logits.rows;
        ensure(fits, || format!("{call:?} with {teacher:?}"))?;
        if logits.rows == 0 {
            return Ok(());
        }
        // A long row takes most of the shared memory: one block has a multiprocessor alone.
        let bytes = logits.cols * size_of::<f32>();
        let keep = bytes + SHARED_REST <= self.kernels.shared_limit();
        let threads = if keep && logits.cols > 8192 { 1024 } else { THREADS };
        let args = CompareArgs {
            logits: logits.arg(),
            gradient: gradient.map_or(MatArg { address: 0, stride: 0 }, |g| g.arg()),
            teacher: teacher.logits.arg(),
            outcomes: outcomes.arg(),
            draft_lse: teacher.draft_lse.address,
            most: teacher.running.most.address,
            total: teacher.running.total.address,
            top: teacher.running.top.address,
            state_of_row: states.address,
            weights: weights.address,
            ids: teacher.ids.address,
            rows: logits.rows as u32,
            cols: logits.cols as u32,
            first_state: teacher.first_state,
            keep: u32::from(keep),
        };
        let width = vector_width(&[logits, out, &teacher.logits]);
        let name = format!("train_compare_{}_v{width}", out.dtype.name());
        let shared = if keep { bytes as u32 } else { 0 };
        self.launch(&name, Shape { shared, ..Shape::new(logits.rows, threads)? }, &args)
    }

    /// Sum of the losses in `outcomes` times `weights`.
    pub fn weighted_loss(
        &self,
        out: DeviceVector<f32>,
        outcomes: &DeviceMatrix,
        weights: DeviceVector<f32>,
    ) -> Result<(), CudaError> {
        let fits = out.len == 1 && outcomes.rows == weights.len;
        ensure(fits, || format!("loss of {outcomes:?} and {} weights", weights.len))?;
        let args = WeightedArgs {
            out: out.address,
            weights: weights.address,
            outcomes: outcomes.arg(),
            rows: outcomes.rows as u32,
        };
        self.launch("train_weighted_loss", Shape::new(1, 1024)?, &args)
    }
}
