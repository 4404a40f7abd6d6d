//! What one CUDA device needs to run operations between those of burn: kernels, products, a stream
//! that takes turns with burn's, and the first fault. Knows no tensors.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::cuda::CudaDevice;
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;
use kernels::cuda::cudarc::driver::CudaStream;
use kernels::cuda::{
    Blas, CudaError, CudaKernels, DeviceMatrix, DeviceVector, Launcher, PartTimer, Product,
    SharedStream, TRAIN_SOURCES, context, download,
};

use crate::ops::DeviceFault;

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Products.
    Gemm,
    /// Attention, own keys included.
    Attention,
    /// Softmaxes of teacher and draft.
    Loss,
    /// Norm of the gradients, updates.
    Optimizer,
    /// Norms, gates, rotations, gathers.
    Rows,
    /// What has to wait for other processes.
    Exchange,
}

impl Part {
    /// All of them, in the order of [`take_times`].
    pub const ALL: [Self; 6] =
        [Self::Gemm, Self::Attention, Self::Loss, Self::Optimizer, Self::Rows, Self::Exchange];

    /// Bytes that may cross to other GPUs beside one operation: what takes about as long as a short
    /// one does, because the next one waits for both.
    fn bytes_beside(self) -> usize {
        match self {
            Self::Gemm | Self::Attention => 128 << 20,
            Self::Optimizer => 64 << 20,
            Self::Loss | Self::Rows | Self::Exchange => 0,
        }
    }
}

/// Bytes cuBLASLt may use beside operands.
const WORKSPACE: usize = 64 << 20;

/// Something that crosses to other GPUs beside the operations that follow, in order.
pub(super) struct Transfer {
    /// Bytes this GPU sends.
    pub(super) bytes: usize,
    /// Enqueues it. Everything before the operation that it runs beside is done by then.
    pub(super) enqueue: Enqueue,
}

type Enqueue = Box<dyn FnOnce(&CudaStream) -> Result<(), CudaError> + Send>;

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// One device.
#[derive(Debug)]
pub(super) struct Engine {
    kernels: CudaKernels,
    shared: SharedStream,
    blas: Mutex<Blas>,
    timer: Mutex<Option<PartTimer>>,
    transfers: Mutex<VecDeque<Transfer>>,
}

impl Engine {
    /// Starts transfers of up to `bytes` bytes beside the operation that has begun.
    fn send(&self, bytes: usize) -> Result<(), CudaError> {
        let mut waiting = lock(&self.transfers);
        let mut sent = 0;
        while sent < bytes
            && let Some(transfer) = waiting.pop_front()
        {
            sent += transfer.bytes;
            (transfer.enqueue)(self.shared.beside()?)?;
        }
        Ok(())
    }
}

static ENGINES: Mutex<BTreeMap<usize, Arc<Engine>>> = Mutex::new(BTreeMap::new());
static FAULT: Mutex<Option<DeviceFault>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles and loads all that device `ordinal` needs. Call this before anything else on the
/// device: burn itself panics where a driver or a library is missing.
pub fn open(ordinal: usize) -> Result<CudaDevice, CudaError> {
    engine(ordinal)?;
    Ok(CudaDevice { index: ordinal })
}

fn engine(ordinal: usize) -> Result<Arc<Engine>, CudaError> {
    let mut engines = lock(&ENGINES);
    if let Some(engine) = engines.get(&ordinal) {
        return Ok(engine.clone());
    }
    let context = context(ordinal)?;
    require_headers()?;
    let kernels = CudaKernels::load_sources(&context, cache_dir().as_deref(), &TRAIN_SOURCES)?;
    let shared = SharedStream::new(&context)?;
    let blas = Mutex::new(Blas::new(shared.stream(), WORKSPACE)?);
    let (timer, transfers) = Default::default();
    let engine = Arc::new(Engine { kernels, shared, blas, timer, transfers });
    engines.insert(ordinal, engine.clone());
    Ok(engine)
}

/// Burn compiles its kernels with NVIDIA's headers, and panics without.
fn require_headers() -> Result<(), CudaError> {
    let set = std::env::var_os("CUDA_PATH").map(PathBuf::from);
    let places = match set {
        Some(path) => vec![path],
        None => ["/usr/local/cuda", "/opt/cuda", "/usr"].map(PathBuf::from).to_vec(),
    };
    if places.iter().any(|place| place.join("include").join("cuda_bf16.h").is_file()) {
        return Ok(());
    }
    let hint = "install the CUDA toolkit (13.0), or set CUDA_PATH to a folder whose `include` has \
                the headers of the PyPI package nvidia-cuda-runtime";
    Err(CudaError::MissingLibrary { library: "cuda_bf16.h", hint })
}

/// Where compiled kernels are kept from one start to the next.
fn cache_dir() -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os("AERIE_KERNEL_CACHE") {
        return Some(dir.into());
    }
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("aerie").join("kernels"))
}

/// Notes what went wrong unless something did before.
pub(super) fn note(error: &CudaError) {
    note_fault(fault(error));
}

/// An error of the driver or of a library in words, with its causes.
pub(super) fn fault(error: &CudaError) -> DeviceFault {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        message = format!("{message}: {next}");
        cause = next.source();
    }
    DeviceFault { message, exit_code: error.exit_code() }
}

/// The same for a fault in words.
pub(super) fn note_fault(fault: DeviceFault) {
    lock(&FAULT).get_or_insert(fault);
}

/// Takes the first fault.
pub(super) fn take_fault() -> Option<DeviceFault> {
    lock(&FAULT).take()
}

/// What an operation works with.
pub(super) struct Work<'a> {
    /// Launches on the engine's stream.
    pub(super) launch: Launcher<'a>,
    engine: &'a Engine,
    blas: MutexGuard<'a, Blas>,
}

impl Work<'_> {
    /// Time from here on belongs to `part`.
    pub(super) fn part(&self, part: Part) -> Result<(), CudaError> {
        match &mut *lock(&self.engine.timer) {
            Some(timer) => timer.start(self.engine.shared.stream(), part as usize),
            None => Ok(()),
        }
    }

    /// A product by cuBLASLt.
    pub(super) fn product(
        &mut self,
        out: &DeviceMatrix,
        a: &DeviceMatrix,
        b: &DeviceMatrix,
        product: Product,
    ) -> Result<(), CudaError> {
        self.blas.matmul(out, a, b, product)
    }

    /// A product in the first of two matrices that adds to the second.
    pub(super) fn product_onto(
        &mut self,
        out_and_sum: (&DeviceMatrix, &DeviceMatrix),
        a: &DeviceMatrix,
        b: &DeviceMatrix,
        product: Product,
    ) -> Result<(), CudaError> {
        self.blas.matmul_onto(out_and_sum, a, b, product)
    }
}

/// Runs an operation behind all that burn was given so far, and before all it is given later. The
/// addresses must have been asked for before. After a fault nothing runs.
pub(super) fn run(
    device: &CudaDevice,
    part: Part,
    operation: impl FnOnce(&mut Work<'_>) -> Result<(), CudaError>,
) {
    run_beside(device, part, |engine| engine.send(part.bytes_beside()), operation);
}

/// The same behind all transfers that were asked for before.
pub(super) fn run_behind_transfers(
    device: &CudaDevice,
    operation: impl FnOnce(&mut Work<'_>) -> Result<(), CudaError>,
) {
    let send_all = |engine: &Engine| {
        engine.send(usize::MAX)?;
        engine.shared.join()
    };
    run_beside(device, Part::Exchange, send_all, operation);
}

/// Lets transfers run beside the next operations of the device.
pub(super) fn transfer(device: &CudaDevice, transfers: impl IntoIterator<Item = Transfer>) {
    match engine(device.index) {
        Ok(engine) => lock(&engine.transfers).extend(transfers),
        Err(error) => note(&error),
    }
}

fn run_beside(
    device: &CudaDevice,
    part: Part,
    beside: impl FnOnce(&Engine) -> Result<(), CudaError>,
    operation: impl FnOnce(&mut Work<'_>) -> Result<(), CudaError>,
) {
    if lock(&FAULT).is_some() {
        return;
    }
    let outcome = engine(device.index).and_then(|engine| {
        engine.shared.begin()?;
        beside(&engine)?;
        let launch = engine.kernels.on(engine.shared.stream());
        let mut work = Work { launch, engine: &engine, blas: lock(&engine.blas) };
        work.part(part)?;
        let outcome = operation(&mut work);
        if let Some(timer) = &mut *lock(&engine.timer) {
            timer.stop(engine.shared.stream())?;
        }
        engine.shared.end()?;
        outcome
    });
    if let Err(error) = outcome {
        note(&error);
    }
}

/// Runs a task on the thread of burn's runtime, to which every call from elsewhere is a message and
/// mostly a wait for its answer. A panic of the task goes on here.
pub(super) fn on_runtime<R: Send + 'static>(
    device: &CudaDevice,
    task: impl FnOnce() -> R + Send,
) -> R {
    let caught = || catch_unwind(AssertUnwindSafe(task));
    match CudaRuntime::client(device).exclusive(caught) {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(error) => resume_unwind(Box::new(format!("burn's runtime: {error:?}"))),
    }
}

/// Copies values to the host once everything before has run; nothing after a fault.
pub(super) fn fetch(device: &CudaDevice, vector: DeviceVector<f64>) -> Vec<f64> {
    if lock(&FAULT).is_some() {
        return Vec::new();
    }
    let fetched = engine(device.index).and_then(|engine| download(engine.shared.stream(), vector));
    fetched.unwrap_or_else(|error| {
        note(&error);
        Vec::new()
    })
}

/// Whether something went wrong and nothing runs any more.
pub(super) fn faulted() -> bool {
    lock(&FAULT).is_some()
}

/// The first fault, left where it is; `None` too while somebody else holds it.
pub(super) fn noted_fault() -> Option<DeviceFault> {
    FAULT.try_lock().ok()?.clone()
}

/// What a device that was opened says if it does not work any more. Waits for nothing, neither the
/// device nor another thread: this is asked in the middle of a panic.
pub(super) fn broken() -> Option<String> {
    let engines = ENGINES.try_lock().ok()?;
    let answer = |(ordinal, engine): (&usize, &Arc<Engine>)| {
        let error = engine.shared.health().err()?;
        let reason = std::error::Error::source(&error).map(|source| format!(": {source}"));
        Some(format!("device {ordinal}: {error}{}", reason.unwrap_or_default()))
    };
    engines.iter().find_map(answer)
}

/// Bytes of tensors that exist, and bytes that burn has reserved for tensors.
pub fn tensor_memory(device: &CudaDevice) -> [u64; 2] {
    let usage = CudaRuntime::client(device).memory_usage();
    usage.map_or([0; 2], |usage| [usage.bytes_in_use, usage.bytes_reserved])
}

/// Starts to measure the parts of all later operations.
pub fn start_timer(device: &CudaDevice) -> Result<(), CudaError> {
    let engine = engine(device.index)?;
    *lock(&engine.timer) = Some(PartTimer::new(engine.kernels.context()));
    Ok(())
}

/// Milliseconds of each [`Part`] since the timer started or was last asked.
pub fn take_times(device: &CudaDevice) -> Result<Vec<f64>, CudaError> {
    let engine = engine(device.index)?;
    match &mut *lock(&engine.timer) {
        Some(timer) => timer.take(Part::ALL.len()),
        None => Ok(vec![0.0; Part::ALL.len()]),
    }
}

/// Waits until the device has done everything, and gives its free and all bytes of memory.
pub fn settle(device: &CudaDevice) -> Result<[usize; 2], CudaError> {
    engine(device.index)?.shared.settle()
}
