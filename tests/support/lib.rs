//! Runs the real binaries for the end-to-end tests. Knows command lines and exit codes, nothing of
//! the libraries behind them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

pub mod interrupt;
pub mod small;

/// The repository root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Builds both binaries once a test process and returns the folder they are in.
///
/// Cargo builds binaries only for the integration tests of their own package, so this asks for
/// them: a no-op when `cargo test --workspace` has just built them, never a stale binary.
fn bin_dir() -> &'static Path {
    static BIN_DIR: OnceLock<PathBuf> = OnceLock::new();
    BIN_DIR.get_or_init(|| {
        // Binaries that are there already: an installation, or a copy that outlives the next build.
        if let Some(dir) = std::env::var_os("AERIE_BIN_DIR") {
            return PathBuf::from(dir);
        }
        // TARGET/PROFILE/deps/this-test
        let test = std::env::current_exe().unwrap_or_default();
        let bin_dir = test.ancestors().nth(2).unwrap_or(Path::new("."));
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--workspace", "--bins"]).current_dir(root());
        build.arg("--target-dir").arg(bin_dir.parent().unwrap_or(Path::new("target")));
        if bin_dir.ends_with("release") {
            build.arg("--release");
        }
        let built = build.status().is_ok_and(|status| status.success());
        assert!(built, "`cargo build --workspace --bins` did not pass");
        bin_dir.to_path_buf()
    })
}

/// What a finished command left behind.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; -1 when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// Panics with both streams unless the command ended with `code`.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(
            self.code, code,
            "unexpected exit code\nstdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        self
    }
}

/// A command line of `extractor`, run in `dir`.
pub fn extractor<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Finished {
    run("extractor", dir, args)
}

/// A command line of `trainer`, run in `dir`.
pub fn trainer<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Finished {
    run("trainer", dir, args)
}

/// The command behind [`extractor`] and [`trainer`], for tests that need the running child.
pub fn command<S: AsRef<OsStr>>(binary: &str, dir: &Path, args: &[S]) -> Command {
    let mut command = Command::new(bin_dir().join(binary));
    command.args(args).current_dir(dir).env_remove("RUST_LOG");
    command
}

fn run<S: AsRef<OsStr>>(binary: &str, dir: &Path, args: &[S]) -> Finished {
    finish(&mut command(binary, dir, args))
}

/// The same after `limits`, lines of a shell such as `ulimit -f 8`.
pub fn extractor_within<S: AsRef<OsStr>>(limits: &str, dir: &Path, args: &[S]) -> Finished {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{limits}; exec \"$@\""), "sh"]).arg(bin_dir().join("extractor"));
    shell.args(args).current_dir(dir).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
    finish(&mut shell)
}

fn finish(command: &mut Command) -> Finished {
    match command.output() {
        Ok(Output { status, stdout, stderr }) => Finished {
            code: status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        },
        Err(error) => Finished { code: -1, stdout: String::new(), stderr: error.to_string() },
    }
}
