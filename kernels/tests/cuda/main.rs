//! The CUDA kernels against their oracles, on the CPU: the emulator in `emulate/` compiles the very `.cu`
//! files with the machine's C++ compiler. Shows index arithmetic, numerics, missing barriers and accesses
//! outside of buffers; cannot show real races inside one instruction, timing, or how the matrix units
//! round. `examples/check.rs` runs the same cases on a GPU.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test by panicking")]

mod cases;
mod compile;
mod emulator;
mod manifest;

use emulator::Emulator;

/// Runs the case `name` under a few orders of threads.
fn emulated(name: &str) {
    let case = cases::CASES.iter().find(|case| case.name == name).expect("a case of that name");
    for seed in [1, 2] {
        let Some(mut emulator) = Emulator::start(seed) else { return };
        let mut lab = cases::Lab::new(&mut emulator, cases::Size::Small);
        if let Err(fault) = (case.run)(&mut lab) {
            panic!("{name}, seed {seed}: {fault}");
        }
        assert!(lab.compared() > 0, "{name} compares something");
    }
}

macro_rules! emulated {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { emulated(stringify!($name)); })*

        #[test]
        fn every_case_is_run() {
            let run = [$(stringify!($name)),*];
            for case in cases::CASES {
                assert!(run.contains(&case.name), "{} is not run", case.name);
            }
        }
    };
}

emulated!(
    attention,
    elementwise,
    experts,
    experts_narrow,
    gather,
    matmul,
    moe,
    peer,
    probe,
    rms_norm,
    rope,
    rules,
    sample
);
