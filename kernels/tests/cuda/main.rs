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
use keyway_kernels::cuda::matmul::{Out, Packed, ProductCut, Shape, Unit, Weights, launch};
use keyway_kernels::cuda::{Device, Launch};

/// Shared memory that launches may ask for and not write: what only some batches need, such as rows' numbers.
/// A launcher and a kernel that disagree do so by a stage or a tile, which is more; a byte too few is an
/// access that the emulator refuses.
const IN_VAIN: usize = 2048;

/// Launches know of the kernels what the kernels' sources say.
#[test]
fn the_committed_constants_are_the_kernels() {
    let Some(mut emulator) = Emulator::start(1) else { return };
    let wanted = emulator.constants().expect("the emulator answers");
    let committed = include_str!("../../src/cuda/constants.rs");
    let differs = committed.lines().zip(wanted.lines()).find(|(here, there)| here != there);
    assert_eq!(differs, None, "src/cuda/constants.rs is stale: run kernels/build --constants");
    assert!(committed == wanted, "src/cuda/constants.rs has not all constants, or more");
}

/// A product in clusters, of two pieces of work.
fn clustered(device: &mut dyn Device) -> Launch {
    let shape = Shape { outputs: 128, inputs: 64, weights: Weights::Bf16 };
    let rows = 257;
    let mut slice = |bytes| device.slice::<u8>(bytes).expect("the emulator has memory");
    let packed = Packed {
        shape,
        unit: Unit::Warpgroup,
        images: slice(shape.packed_bytes()),
        scales: None,
        bias: None,
    };
    let (x, y, none) = (slice(rows * shape.inputs * 2), slice(rows * shape.outputs * 2), slice(0));
    let cut = ProductCut { rows: 128, apart: false, clustered: true };
    launch(x.cast(), rows, &packed, cut, Out::Bf16(y.cast()), none.cast()).remove(0)
}

/// What hardware refuses or never ends from: a grid of parts of clusters, blocks that lack their cluster.
#[test]
fn the_emulator_refuses_clusters_that_are_none() {
    for (grid, cluster) in [(4, 2), (3, 2), (4, 1), (4, 0), (16, 16)] {
        let Some(mut emulator) = Emulator::start(1) else { return };
        let launch = Launch { grid: [grid, 1, 1], cluster, ..clustered(&mut emulator) };
        assert_eq!(
            emulator.launch(&launch).is_ok(),
            (grid, cluster) == (4, 2),
            "{grid} blocks, {cluster} each"
        );
    }
}

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
        drop(lab);
        // Blocks of one launch hand over to each other: some came too early, and waited.
        let waited = emulator.waits().expect("the emulator answers") > 0;
        assert_eq!(waited, name == "experts_paired", "{name}: blocks wait for others");
        for (kernel, bytes) in emulator.shared_in_vain().expect("the emulator answers") {
            // Products of so few inputs do not fill their stages.
            let is_tiny = name == "peer" && kernel.starts_with("moe_product");
            assert!(bytes <= IN_VAIN || is_tiny, "{name}: {kernel} has {bytes} bytes that no block writes");
        }
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
    experts_paired,
    gather,
    matmul,
    matmul_clustered,
    moe,
    peer,
    probe,
    rms_norm,
    rope,
    rules,
    sample
);
