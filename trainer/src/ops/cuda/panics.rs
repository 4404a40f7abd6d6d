//! What a device has to do with a panic: burn panics where one of its reads meets an error of the
//! device. Knows no commands and no training.

use super::engine;
use crate::ops::DeviceFault;

/// Exit code of a run that another try may help.
const TRY_AGAIN: u8 = 75;
/// Exit code of a device that is not there, or too small.
const UNAVAILABLE: u8 = 69;
/// Exit code of a bug.
const BUG: u8 = 70;
/// What burn's runtime calls memory that the device does not have.
const NO_MEMORY: &str = "BufferTooBig";

/// From now on `end` is called for a panic on any thread that a device which was opened is behind,
/// before anything is unwound: what is unwound would use the device again. `end` must not return.
/// All other panics are what they were.
pub fn end_on_device_panic(end: fn(&DeviceFault)) {
    intercept(|panic| behind(panic, engine::noted_fault(), engine::broken()), end);
}

fn intercept(
    behind: impl Fn(&str) -> Option<DeviceFault> + Send + Sync + 'static,
    end: fn(&DeviceFault),
) {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        match behind(info.payload_as_str().unwrap_or_default()) {
            Some(fault) => end(&fault),
            None => others(info),
        }
    }));
}

/// The fault behind a panic with these words, if a device is behind it at all: one of our own
/// operations noted it before, or the device does not work any more, or it has no memory left. The
/// words of an error alone say nothing: a bug gets errors from a device that is well.
fn behind(panic: &str, noted: Option<DeviceFault>, broken: Option<String>) -> Option<DeviceFault> {
    // Operations do nothing after a fault, so that their empty results may be what panicked.
    if let Some(fault) = noted.filter(|fault| fault.exit_code != BUG) {
        return Some(fault);
    }
    let words = panic.lines().next().unwrap_or_default();
    if let Some(answer) = broken {
        let message = format!("{answer}; noticed by \"{words}\"");
        return Some(DeviceFault { message, exit_code: TRY_AGAIN });
    }
    panic.contains(NO_MEMORY).then(|| DeviceFault {
        message: format!(
            "the device has no memory left: lower data.max_tokens, or set train.activations = \
             \"recompute\"; noticed by \"{words}\""
        ),
        exit_code: UNAVAILABLE,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use burn::backend::Cuda;
    use burn::tensor::Tensor;
    use kernels::cuda::{DeviceMatrix, Dtype};

    use super::*;

    fn fault(exit_code: u8) -> DeviceFault {
        DeviceFault { message: "noted".to_owned(), exit_code }
    }

    #[test]
    fn only_a_device_that_does_not_work_makes_a_panic_worth_another_try() {
        let read = "Error while reading data: Generic { reason: \"CUDA_ERROR_LAUNCH_FAILED\" }\nat";
        let code = |panic, noted, broken: Option<&str>| {
            behind(panic, noted, broken.map(str::to_owned)).map(|fault| fault.exit_code)
        };
        assert_eq!(code(read, None, Some("CUDA_ERROR_LAUNCH_FAILED")), Some(75));
        // A device that is well: whatever the words are, it is a bug.
        assert_eq!(code(read, None, None), None);
        assert_eq!(code("index out of bounds: the len is 0", None, None), None);
        // What panics over an operation that did nothing after a fault.
        assert_eq!(code("index out of bounds: the len is 0", Some(fault(75)), None), Some(75));
        assert_eq!(code("index out of bounds: the len is 0", Some(fault(70)), None), None);
        assert_eq!(code("Err(BufferTooBig { size: 9 })", None, None), Some(69));
        let told = behind(read, None, Some("the GPU is gone".to_owned())).unwrap().to_string();
        assert!(told.contains("the GPU is gone") && !told.contains('\n'), "{told}");
    }

    const CHILD: &str = "AERIE_PANICKING_RUN";

    fn end(fault: &DeviceFault) {
        eprintln!("ended by {fault}");
        extractor::target::exit_at_once(fault.exit_code);
    }

    /// Runs a test of this module in a process of its own: exit code and words.
    fn process(test: &str, told: &str) -> (Option<i32>, String) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("ops::cuda::panics::tests::{test}")]);
        child.args(["--include-ignored", "--nocapture"]);
        let output = child.env(CHILD, told).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Not a test of its own: a thread like burn's panics, and the main thread would go on without
    /// it.
    #[test]
    fn child() {
        let Ok(broken) = std::env::var(CHILD) else { return };
        let answer = (!broken.is_empty()).then_some(broken);
        intercept(move |panic| behind(panic, None, answer.clone()), end);
        let runtime = std::thread::spawn(|| assert!(std::env::var(CHILD).is_err(), "a read"));
        runtime.join().expect("the runtime's answer");
    }

    #[test]
    fn a_panic_of_the_device_ends_the_process_and_a_bug_stays_a_panic() {
        let (code, words) = process("child", "CUDA_ERROR_ECC_UNCORRECTABLE");
        assert_eq!(code, Some(75), "{words}");
        assert!(words.contains("ended by CUDA_ERROR_ECC_UNCORRECTABLE"), "{words}");
        assert!(!words.contains("panicked at"), "{words}");
        let (code, words) = process("child", "");
        assert_eq!(code, Some(101), "{words}");
        assert!(words.contains("panicked at") && words.contains("a read"), "{words}");
    }

    /// Not a test of its own: one of burn's reads is the first to meet a device that a kernel
    /// broke, or there is a bug on a device that works.
    #[test]
    #[ignore = "needs a GPU, and another test to start it"]
    fn child_on_a_gpu() {
        let Ok(told) = std::env::var(CHILD) else { return };
        let device = engine::open(0).unwrap();
        end_on_device_panic(end);
        let ones = Tensor::<Cuda, 1>::ones([1 << 20], &device);
        assert_eq!(ones.clone().sum().into_scalar(), (1 << 20) as f32, "{told}");
        if told == "break" {
            let address = 64;
            let nowhere =
                DeviceMatrix { address, rows: 64, cols: 64, row_stride: 64, dtype: Dtype::F32 };
            engine::run(&device, engine::Part::Rows, |work| {
                work.launch.silu_mul(&nowhere, &nowhere, &nowhere)
            });
        }
        let sum = ones.sum().into_scalar();
        panic!("a bug, with a device that sums to {sum}");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn on_a_gpu_too_a_read_from_a_broken_device_ends_the_process_with_75() {
        let (code, words) = process("child_on_a_gpu", "break");
        assert_eq!(code, Some(75), "{words}");
        assert!(words.contains("ended by") && words.contains("CUDA_ERROR"), "{words}");
        let (code, words) = process("child_on_a_gpu", "bug");
        assert_eq!(code, Some(101), "{words}");
        assert!(words.contains("a device that sums to 1048576"), "{words}");
    }
}
