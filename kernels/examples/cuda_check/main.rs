//! Checks every CUDA kernel against its plain-Rust twin on the device at hand, then measures it
//! against the device's own limits: `cuda_check [--quick] [--only NAME]`. One line a kernel, PASS
//! or FAIL last; exit code 1 where one failed, 69 where there is no device.

#![allow(clippy::print_stdout, reason = "a program whose output is its report")]

mod bench;
mod bench_train;
#[path = "../../tests/parity/mod.rs"]
mod parity;
mod watchdog;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use parity::{Gpu, cases};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let quick = args.iter().any(|arg| arg == "--quick");
    let at = args.iter().position(|arg| arg == "--only");
    let only = at.and_then(|at| args.get(at + 1)).map_or("", String::as_str);
    let started = Instant::now();
    watchdog::start();
    watchdog::step("compile and load");
    let mut gpu = match Gpu::new(quick) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("FAIL no device: {}", chain(&error));
            return ExitCode::from(error.exit_code());
        }
    };
    let context = gpu.kernels.context().clone();
    let name = context.name().unwrap_or_default();
    println!(
        "{name}, {}, {} multiprocessors, {} B shared, compiled and loaded in {:.1} s",
        gpu.kernels.arch().name(),
        gpu.kernels.multiprocessors(),
        gpu.kernels.shared_limit(),
        started.elapsed().as_secs_f32()
    );
    let mut failed = Vec::new();
    for case in cases().into_iter().filter(|case| case.name.contains(only)) {
        let started = Instant::now();
        watchdog::step(case.name);
        match (case.run)(&mut gpu) {
            Ok(()) => println!("ok   {:28} {:.2} s", case.name, started.elapsed().as_secs_f32()),
            Err(error) => {
                println!("FAIL {:28} {}", case.name, chain(error.as_ref()));
                failed.push(case.name);
            }
        }
        if let Err(error) = gpu.stream.synchronize() {
            println!("FAIL {:28} the device is lost: {error}", case.name);
            return ExitCode::FAILURE;
        }
    }
    if !quick && let Err(error) = bench::run(&mut gpu, only) {
        println!("FAIL bench: {}", chain(error.as_ref()));
        failed.push("bench");
    }
    match failed.as_slice() {
        [] => println!("PASS in {:.1} s", started.elapsed().as_secs_f32()),
        failed => println!("FAIL {}", failed.join(" ")),
    }
    ExitCode::from(u8::from(!failed.is_empty()))
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}
