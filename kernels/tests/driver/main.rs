//! `Gpu` on a stand-in for the CUDA driver: what it computes, and that it breaks none of the driver's rules.
//! Each test runs its inner half in a process of its own, whose driver is the stand-in.
#![cfg(target_os = "linux")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

#[allow(dead_code, reason = "shared with the emulator's tests")]
#[path = "../cuda/cases/mod.rs"]
mod cases;
#[path = "../cuda/compile.rs"]
mod compile;
mod rules;
mod stand_in;

use keyway_kernels::cuda::gpu::Gpu;

use stand_in::StandIn;

/// Operations whose cases take seconds.
const COMPUTED: [&str; 9] =
    ["elementwise", "gather", "matmul", "matmul_clustered", "probe", "rms_norm", "rope", "rules", "sample"];

#[test]
fn what_kernels_compute_through_the_driver_is_right() {
    let Some(driver) = StandIn::new() else { return };
    let report = driver.run_test("inside_cases", &[]);
    assert!(report.refused.is_empty(), "{:?}", report.refused);
    assert!(report.kernels > 50, "{report:?}");
}

#[test]
#[ignore = "runs where the driver is the stand-in"]
fn inside_cases() {
    if !StandIn::is_here() {
        return;
    }
    for case in cases::CASES.iter().filter(|case| COMPUTED.contains(&case.name)) {
        let mut gpu = Gpu::new(0).unwrap();
        let mut lab = cases::Lab::new(&mut gpu, cases::Size::Small);
        (case.run)(&mut lab).unwrap_or_else(|fault| panic!("{}: {fault}", case.name));
        assert!(lab.compared() > 0);
    }
}
