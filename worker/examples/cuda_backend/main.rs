//! Checks and times the worker's CUDA backend on a GPU; `kernels/check` runs it and prints the table. Needs a
//! driver, no toolkit and no checkpoint.
//!
//! ```text
//! cuda_backend list          the names of cases and timings
//! cuda_backend case NAME     logits against the CPU backend's, equal bits however a batch is cut, equal
//!                            tokens ahead, and equal bits where ranks share the experts
//! cuda_backend rank FAMILY … one of the processes that `case backend_processes` starts
//! cuda_backend time NAME     a step of a model of published shape: how long it takes, and the bytes and
//!                            operations it cannot avoid; with steps that run ahead also for how long the
//!                            device rests between two
//! ```
//! Each answers with one line of JSON; a fault ends it with status 1 and the reason in `"fault"`.

mod ahead;
mod cases;
mod driver;
mod models;
#[cfg(target_os = "linux")]
mod processes;
mod ranks;
mod shapes;
mod timings;

use std::process::ExitCode;

use keyway_kernels::cuda::gpu::Gpu;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let answer = match words[..] {
        ["list"] => {
            let cases = [cases::NAMES, ranks::NAMES].concat();
            #[cfg(target_os = "linux")]
            let cases = [&cases[..], &[processes::NAME]].concat();
            Ok(serde_json::json!({ "cases": cases, "timings": timings::names() }))
        }
        #[cfg(target_os = "linux")]
        ["case", processes::NAME] => processes::run(),
        #[cfg(target_os = "linux")]
        ["rank", family, ref options @ ..] => processes::rank(family, options),
        ["case", name] => cases::run(name, || Gpu::new(0).map_err(cases::text)),
        ["time", name] => timings::run(name),
        _ => Err("usage: cuda_backend list | case NAME | time NAME".to_owned()),
    };
    match answer {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(fault) => {
            println!("{}", serde_json::json!({ "fault": fault }));
            ExitCode::FAILURE
        }
    }
}
