//! Compiles the CUDA sources for the device at hand, or takes what an earlier start compiled, and
//! launches functions by name. Knows nothing of what the functions compute.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};
use rayon::prelude::*;

use super::{CudaError, Launcher, Shape};

const PRELUDE: &str = include_str!("../../cuda/prelude.cuh");

/// The text of a source that needs headers beside prelude.cuh.
macro_rules! after {
    ($header:literal, $file:literal) => {
        concat!(
            include_str!(concat!("../../cuda/", $header)),
            "\n#line 1 \"",
            $file,
            "\"\n",
            include_str!(concat!("../../cuda/", $file))
        )
    };
    ($first:literal, $($rest:literal),+) => {
        concat!(include_str!(concat!("../../cuda/", $first)), after!($($rest),+))
    };
}

/// Every source file: name and text. Each is compiled after prelude.cuh.
pub const SOURCES: [(&str, &str); 10] = [
    ("rows.cu", include_str!("../../cuda/rows.cu")),
    ("norm.cu", include_str!("../../cuda/norm.cu")),
    ("rope.cu", include_str!("../../cuda/rope.cu")),
    ("moe.cu", include_str!("../../cuda/moe.cu")),
    ("dequant.cu", include_str!("../../cuda/dequant.cu")),
    ("stats.cu", include_str!("../../cuda/stats.cu")),
    ("attention_any.cu", include_str!("../../cuda/attention_any.cu")),
    ("attention_mma.cu", after!("mma.cuh", "attention_mma.cu")),
    ("attention_wgmma.cu", after!("hopper.cuh", "attention_hopper.cuh", "attention_wgmma.cu")),
    ("experts_wgmma.cu", after!("hopper.cuh", "experts_wgmma.cu")),
];

/// The sources that training needs.
pub const TRAIN_SOURCES: [(&str, &str); 10] = [
    SOURCES[0],
    SOURCES[1],
    ("train_rows.cu", include_str!("../../cuda/train_rows.cu")),
    ("train_optimizer.cu", include_str!("../../cuda/train_optimizer.cu")),
    ("train_loss.cu", include_str!("../../cuda/train_loss.cu")),
    ("train_attention_any.cu", include_str!("../../cuda/train_attention_any.cu")),
    ("train_attention_own.cu", include_str!("../../cuda/train_attention_own.cu")),
    ("train_attention_mma.cu", after!("mma.cuh", "train_attention_mma.cu")),
    (
        "train_attention_wgmma.cu",
        after!(
            "hopper.cuh",
            "attention_hopper.cuh",
            "train_attention_hopper.cuh",
            "train_attention_wgmma.cu"
        ),
    ),
    (
        "train_attention_back_wgmma.cu",
        after!(
            "hopper.cuh",
            "attention_hopper.cuh",
            "train_attention_hopper.cuh",
            "train_attention_back_wgmma.cu"
        ),
    ),
];

/// An architecture that NVRTC compiles for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arch(String);

impl Arch {
    /// That of a compute capability; with the instructions of that chip alone where it has some.
    pub fn of(major: i32, minor: i32) -> Result<Self, CudaError> {
        if major < 8 {
            return Err(CudaError::OldDevice { major, minor });
        }
        let suffix = if major >= 9 { "a" } else { "" };
        Ok(Self(format!("sm_{major}{minor}{suffix}")))
    }

    /// As NVRTC names it, "sm_90a".
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// CUDA devices that this process can see.
pub fn device_count() -> Result<usize, CudaError> {
    require_driver()?;
    result::init().map_err(CudaError::driver("cuInit"))?;
    let count = result::device::get_count().map_err(CudaError::driver("cuDeviceGetCount"))?;
    Ok(count.unsigned_abs() as usize)
}

/// The primary context of a device, without the event bookkeeping of cudarc's own buffers.
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>, CudaError> {
    let found = device_count()?;
    if ordinal >= found {
        return Err(CudaError::NoDevice { ordinal, found });
    }
    let context = CudaContext::new(ordinal)
        .map_err(CudaError::driver(format!("primary context of device {ordinal}")))?;
    // SAFETY: the buffers of this crate order their uses by explicit events, never by cudarc's.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

fn require_driver() -> Result<(), CudaError> {
    // SAFETY: opens and closes the library, whose initialisers are the vendor's.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let hint = "install the NVIDIA driver, or use the CPU";
    Err(CudaError::MissingLibrary { library: "libcuda", hint })
}

fn require_nvrtc() -> Result<(), CudaError> {
    // SAFETY: opens and closes the library, whose initialisers are the vendor's.
    if unsafe { nvrtc_sys::is_culib_present() } {
        return Ok(());
    }
    let hint = "install the CUDA toolkit (13.0), or put the folder of the PyPI package \
                nvidia-cuda-nvrtc on LD_LIBRARY_PATH";
    Err(CudaError::MissingLibrary { library: "libnvrtc", hint })
}

/// The version of the NVRTC library found.
fn nvrtc_version() -> Result<(i32, i32), CudaError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers.
    let answer = unsafe { nvrtc_sys::nvrtcVersion(&mut major, &mut minor) }.result();
    answer.map_err(|source| compile_error("version", "any", String::new(), source))?;
    Ok((major, minor))
}

fn compile_error(file: &str, arch: &str, log: String, source: nvrtc::NvrtcError) -> CudaError {
    CudaError::Compile { file: file.into(), arch: arch.into(), log, source }
}

/// A compiled source.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code, an ELF file.
    pub code: Vec<u8>,
    /// What the compiler said of it, such as that products wait for each other.
    pub remarks: String,
}

/// One of [`SOURCES`] for an architecture. Needs NVRTC, but no device.
pub fn compile((file, text): (&str, &str), arch: &Arch) -> Result<Compiled, CudaError> {
    require_nvrtc()?;
    let text = format!("{PRELUDE}\n#line 1 \"{file}\"\n{text}");
    let (Ok(text), Ok(name)) = (CString::new(text), CString::new(file)) else {
        return Err(CudaError::shape(format!("{file} holds a zero byte")));
    };
    let wrong = |source| compile_error(file, arch.name(), String::new(), source);
    let program = nvrtc::create_program(&text, Some(&name)).map_err(wrong)?;
    let code = compile_program(program, file, arch);
    // SAFETY: created above, destroyed nowhere else.
    unsafe { nvrtc::destroy_program(program) }.map_err(wrong)?;
    code
}

fn compile_program(
    program: nvrtc_sys::nvrtcProgram,
    file: &str,
    arch: &Arch,
) -> Result<Compiled, CudaError> {
    let options = [format!("--gpu-architecture={}", arch.name()), "--std=c++17".to_owned()];
    // SAFETY: the program is live throughout, and both sizes are those NVRTC asks for.
    unsafe {
        let compiled = nvrtc::compile_program(program, &options);
        let log = nvrtc::get_program_log(program).unwrap_or_default();
        let log: Vec<u8> = log.iter().map(|&c| c as u8).collect();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        let remarks = log.to_string_lossy().into_owned();
        if let Err(source) = compiled {
            return Err(compile_error(file, arch.name(), remarks, source));
        }
        let wrong = |source| compile_error(file, arch.name(), String::new(), source);
        let mut size = 0;
        nvrtc_sys::nvrtcGetCUBINSize(program, &mut size).result().map_err(wrong)?;
        let mut code = vec![0u8; size];
        let answer = nvrtc_sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast());
        answer.result().map_err(wrong)?;
        Ok(Compiled { code, remarks })
    }
}

/// The kernels, loaded into the context of one device.
#[derive(Debug)]
pub struct CudaKernels {
    context: Arc<CudaContext>,
    arch: Arch,
    modules: Vec<Module>,
    functions: Mutex<HashMap<String, Function>>,
    multiprocessors: usize,
    shared_limit: usize,
}

#[derive(Debug)]
struct Module {
    handle: sys::CUmodule,
}

#[derive(Clone, Copy, Debug)]
struct Function(sys::CUfunction);

// SAFETY: handles of the driver may be used from any thread on which the context is current, and
// `launch` makes it current first.
unsafe impl Send for Module {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Module {}
// SAFETY: as for `Module`, which outlives its functions inside `CudaKernels`.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Drop for CudaKernels {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for module in &self.modules {
            // SAFETY: loaded by `load`, unloaded only here; the functions go with `self`.
            if let Err(error) = unsafe { result::module::unload(module.handle) } {
                tracing::warn!(%error, "CUDA module not unloaded");
            }
        }
    }
}

impl CudaKernels {
    /// Compiles all kernels for the device of `context`, or takes from `cache_dir` what an earlier
    /// call compiled from the same sources with the same NVRTC for the same architecture. A cache
    /// that can't be written costs time at the next start, nothing else.
    pub fn load(context: &Arc<CudaContext>, cache_dir: Option<&Path>) -> Result<Self, CudaError> {
        Self::load_sources(context, cache_dir, &SOURCES)
    }

    /// The same for some sources: names and texts. They are compiled side by side.
    pub fn load_sources(
        context: &Arc<CudaContext>,
        cache_dir: Option<&Path>,
        sources: &[(&str, &str)],
    ) -> Result<Self, CudaError> {
        let (major, minor) = context
            .compute_capability()
            .map_err(CudaError::driver("compute capability of the device"))?;
        let arch = Arch::of(major, minor)?;
        require_nvrtc()?;
        let attribute = |name: sys::CUdevice_attribute| {
            let value = context.attribute(name).map_err(CudaError::driver("device attribute"))?;
            Ok::<_, CudaError>(value.unsigned_abs() as usize)
        };
        type A = sys::CUdevice_attribute;
        let mut kernels = Self {
            context: context.clone(),
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_limit: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            arch,
            modules: Vec::new(),
            functions: Mutex::default(),
        };
        context.bind_to_thread().map_err(CudaError::driver("make the context current"))?;
        let version = nvrtc_version()?;
        let compile = |source: &(&str, &str)| cached(*source, &kernels.arch, version, cache_dir);
        let compiled: Vec<_> = sources.par_iter().map(compile).collect();
        for (source, code) in sources.iter().zip(compiled) {
            kernels.add_module(source.0, &code?)?;
        }
        Ok(kernels)
    }

    /// The architecture compiled for.
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// Multiprocessors of the device.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Bytes of shared memory that one block may use.
    pub fn shared_limit(&self) -> usize {
        self.shared_limit
    }

    /// The context the kernels are loaded into.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Launches on a stream of the same context.
    pub fn on<'a>(&'a self, stream: &'a CudaStream) -> Launcher<'a> {
        Launcher { kernels: self, stream }
    }

    fn add_module(&mut self, file: &str, code: &[u8]) -> Result<(), CudaError> {
        // SAFETY: `code` is a whole cubin; the driver copies it.
        let handle = unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(CudaError::driver(format!("load {file} for {}", self.arch.name())))?;
        self.modules.push(Module { handle });
        Ok(())
    }

    /// A function by name, looked for in all modules the first time.
    fn function(&self, name: &str) -> Result<Function, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        for module in &self.modules {
            let Ok(symbol) = CString::new(name) else { break };
            // SAFETY: the module is loaded, and lives as long as `self`.
            if let Ok(handle) = unsafe { result::module::get_function(module.handle, symbol) } {
                functions.insert(name.to_owned(), Function(handle));
                return Ok(Function(handle));
            }
        }
        Err(CudaError::shape(format!("there is no kernel {name}")))
    }
}

impl Launcher<'_> {
    /// Launches a kernel whose one parameter is the struct `args`, laid out as in C.
    pub(super) fn launch<T: Copy>(
        &self,
        name: &str,
        shape: Shape,
        args: &T,
    ) -> Result<(), CudaError> {
        let wrong = || CudaError::driver(format!("launch {name} {shape:?}"));
        self.kernels.context.bind_to_thread().map_err(wrong())?;
        let function = self.kernels.function(name)?;
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded, and `args` is the struct its one parameter is declared
        // as. What the kernel does with the addresses inside is the promise of their views.
        unsafe {
            if shape.shared > 48 * 1024 {
                let attribute =
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(
                    function.0,
                    attribute,
                    shape.shared as i32,
                )
                .map_err(wrong())?;
            }
            let Shape { grid, block, shared } = shape;
            let stream = self.stream.cu_stream();
            result::launch_kernel(function.0, grid, block, shared, stream, &mut params)
        }
        .map_err(wrong())
    }
}

/// Machine code from the cache, or from the compiler and then into the cache.
fn cached(
    source: (&str, &str),
    arch: &Arch,
    (major, minor): (i32, i32),
    cache_dir: Option<&Path>,
) -> Result<Vec<u8>, CudaError> {
    let Some(dir) = cache_dir else { return Ok(compile(source, arch)?.code) };
    let mut hash = blake3::Hasher::new();
    hash.update(PRELUDE.as_bytes());
    hash.update(source.1.as_bytes());
    let key = hash.finalize().to_hex();
    let name = format!("{}-{}-{major}.{minor}-{}.cubin", source.0, arch.name(), &key[..24]);
    let path = dir.join(name);
    if let Some(code) = read_checked(&path) {
        return Ok(code);
    }
    let code = compile(source, arch)?.code;
    if let Err(error) = write_checked(&path, &code) {
        tracing::warn!(path = %path.display(), %error, "compiled kernels not cached");
    }
    Ok(code)
}

/// A cached file whose first 32 bytes are the digest of the rest.
fn read_checked(path: &PathBuf) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let code = bytes.split_off(32.min(bytes.len()));
    (blake3::hash(&code).as_bytes().as_slice() == bytes).then_some(code)
}

#[expect(
    clippy::disallowed_methods,
    reason = "a cache with a digest: a torn file is compiled anew"
)]
fn write_checked(path: &Path, code: &[u8]) -> std::io::Result<()> {
    // The ranks of a process compile the same sources at the same time.
    static WRITES: AtomicU64 = AtomicU64::new(0);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let write = WRITES.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{write}.tmp", std::process::id()));
    std::fs::write(&temporary, [blake3::hash(code).as_bytes().as_slice(), code].concat())?;
    std::fs::rename(temporary, path)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests write their inputs")]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cache_the_same_code_do_not_disturb_each_other() {
        let dir = std::env::temp_dir().join(format!("aerie-kernels-{}", std::process::id()));
        let path = dir.join("rows.cu-sm_90a-13.0-0123.cubin");
        let code = vec![7; 1 << 20];
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| write_checked(&path, &code))).collect();
            writers.into_iter().for_each(|writer| writer.join().unwrap().unwrap());
        });
        assert_eq!(read_checked(&path), Some(code));
        std::fs::write(&path, [0; 40]).unwrap();
        assert_eq!(read_checked(&path), None, "a torn file");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
