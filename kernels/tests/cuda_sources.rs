//! Every CUDA source compiles for every architecture we name, on machines without a GPU. NVRTC is
//! looked for on the loader's path, in `AERIE_NVRTC_DIR`, and last taken from PyPI.

#![allow(clippy::unwrap_used, clippy::panic, clippy::disallowed_methods)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kernels::cuda::{Arch, CudaError, SOURCES, TRAIN_SOURCES, compile};

/// Set in the process that has the library on its path.
const CHILD: &str = "AERIE_NVRTC_CHILD";
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.*";

fn architectures() -> [Arch; 4] {
    [(8, 0), (9, 0), (10, 0), (12, 0)].map(|(major, minor)| Arch::of(major, minor).unwrap())
}

#[test]
fn architectures_have_the_instructions_of_their_chips() {
    let names = architectures().map(|arch| arch.name().to_owned());
    assert_eq!(names, ["sm_80", "sm_90a", "sm_100a", "sm_120a"]);
    let error = Arch::of(7, 5).unwrap_err();
    assert_eq!(error.exit_code(), 69);
}

#[test]
fn every_source_compiles_everywhere() {
    let broken = ("broken.cu", "__global__ void k() { nonsense; }");
    match compile(broken, &architectures()[0]) {
        Err(CudaError::MissingLibrary { .. }) => return compile_in_child(),
        // Found, but not its second half: the loader's path has to lead to that.
        Err(CudaError::Compile { log, .. }) if log.contains("libnvrtc-builtins") => {
            return compile_in_child();
        }
        Err(CudaError::Compile { file, log, .. }) => {
            assert_eq!(file, "broken.cu");
            assert!(log.contains("broken.cu(1)") && log.contains("nonsense"), "{log}");
        }
        other => panic!("a broken source gave {other:?}"),
    }
    for (source, arch) in SOURCES
        .iter()
        .chain(&TRAIN_SOURCES[2..])
        .flat_map(|s| architectures().map(|arch| (*s, arch)))
    {
        let compiled = compile(source, &arch).unwrap_or_else(|error| panic!("{error}"));
        assert!(compiled.code.starts_with(b"\x7fELF"), "{} for {}", source.0, arch.name());
        // Such as warpgroup products that wait for each other, a third slower.
        let remarks = &compiled.remarks;
        assert!(
            !remarks.contains("Performance Loss"),
            "{} for {}: {remarks}",
            source.0,
            arch.name()
        );
    }
}

/// Runs this test again with the library where the loader finds it.
fn compile_in_child() {
    assert!(std::env::var_os(CHILD).is_none(), "NVRTC does not load from its own folder");
    let Some(dir) = nvrtc_dir() else {
        // Not captured, as `eprintln!` would be.
        let words = "SKIPPED, no CUDA source was compiled: no NVRTC here, and pip can't install";
        let _ = writeln!(std::io::stderr(), "{words} {PACKAGE}");
        return;
    };
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "every_source_compiles_everywhere", "--nocapture"])
        .env("LD_LIBRARY_PATH", &dir)
        .env(CHILD, "1")
        .status()
        .unwrap();
    assert!(status.success(), "with NVRTC from {}", dir.display());
}

fn nvrtc_dir() -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os("AERIE_NVRTC_DIR") {
        return Some(dir.into());
    }
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvrtc-13.0");
    if !root.is_dir() {
        let fresh = root.with_extension(format!("{}.tmp", std::process::id()));
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--target"];
        let installed = Command::new("python3").args(pip).arg(&fresh).arg(PACKAGE).status().ok()?;
        if !installed.success() {
            return None;
        }
        std::fs::rename(&fresh, &root).ok()?;
    }
    find_library(&root)
}

/// The folder that holds libnvrtc.so.13.
fn find_library(dir: &Path) -> Option<PathBuf> {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    if entries.iter().any(|path| path.ends_with("libnvrtc.so.13")) {
        return Some(dir.to_owned());
    }
    entries.iter().filter(|path| path.is_dir()).find_map(|path| find_library(path))
}
