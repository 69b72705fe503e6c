//! Checks and times the CUDA kernels on a GPU; `kernels/check` runs it and prints the table. Needs a
//! driver, no toolkit.
//!
//! ```text
//! check list           the names of cases and timings
//! check device         the GPU
//! check case NAME      a kernel against its oracle, and for equal bits however its work is cut
//! check time NAME      how long it takes, and the bytes and operations it cannot avoid
//! check fixed NAME     how long it takes beside itself cut as suits the batch, which would cost it its
//!                      independence of it
//! check rank N PATH    one of the processes that `case peer_processes` starts
//! check nccl N PATH    one of the processes that `case nccl_processes` starts
//! ```
//! Each answers with one line of JSON; a fault ends it with status 1 and the reason in `"fault"`. One name
//! a process, so that a kernel that crashes the context spoils nothing else.

#[allow(unused_macros, clippy::expect_used, clippy::panic, reason = "shared with tests")]
#[path = "../../tests/cuda/cases/mod.rs"]
mod cases;
mod exchange;
mod fixed;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod processes;
mod timings;

use std::process::ExitCode;

use cases::{CASES, Lab, Size};
use keyway_kernels::cuda::Device;
use keyway_kernels::cuda::gpu::Gpu;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let answer = match words[..] {
        ["list"] => Ok(list()),
        ["device"] => device(),
        #[cfg(target_os = "linux")]
        ["case", processes::NAME, ..] => processes::run(),
        #[cfg(target_os = "linux")]
        ["rank", number, path] => processes::rank(number, path),
        #[cfg(target_os = "linux")]
        ["case", nccl::NAME, ..] => nccl::run(),
        #[cfg(target_os = "linux")]
        ["nccl", number, path] => nccl::rank(number, path),
        ["case", name] => case(name, Size::Large),
        // What compute-sanitizer can wait for.
        ["case", name, "small"] => case(name, Size::Small),
        ["fixed", name] => fixed::run(name),
        ["time", name] if exchange::NAMES.contains(&name) => exchange::run(name),
        ["time", name] => timings::run(name),
        _ => Err("usage: check list | device | case NAME [small] | time NAME | fixed NAME".to_owned()),
    };
    match answer {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(fault) => {
            println!("{{\"fault\": {}}}", quoted(&fault));
            ExitCode::FAILURE
        }
    }
}

fn list() -> String {
    let names = |names: Vec<&str>| names.iter().map(|n| quoted(n)).collect::<Vec<_>>().join(", ");
    let mut cases: Vec<&str> = CASES.iter().map(|case| case.name).collect();
    #[cfg(target_os = "linux")]
    cases.extend([processes::NAME, nccl::NAME]);
    let timings = names([timings::NAMES, exchange::NAMES].concat());
    let fixed = names(fixed::NAMES.to_vec());
    format!("{{\"cases\": [{}], \"timings\": [{timings}], \"fixed\": [{fixed}]}}", names(cases))
}

fn device() -> Result<String, String> {
    let gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let (name, processors) = (gpu.name().map_err(|e| e.to_string())?, gpu.processors());
    Ok(format!("{{\"device\": {}, \"processors\": {processors}}}", quoted(&name)))
}

fn case(name: &str, size: Size) -> Result<String, String> {
    let case = CASES.iter().find(|case| case.name == name).ok_or_else(|| format!("no case {name}"))?;
    let mut gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let mut lab = Lab::new(&mut gpu, size);
    (case.run)(&mut lab)?;
    Ok(format!(
        "{{\"case\": {}, \"compared\": {}, \"worst\": {:.3}}}",
        quoted(name),
        lab.compared(),
        lab.worst()
    ))
}

/// As a JSON string.
fn quoted(text: &str) -> String {
    let escaped = text.chars().flat_map(|c| match c {
        '"' | '\\' => vec!['\\', c],
        c if c < ' ' => vec![' '],
        c => vec![c],
    });
    format!("\"{}\"", escaped.collect::<String>())
}
