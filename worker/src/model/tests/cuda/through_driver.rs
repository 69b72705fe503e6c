//! The backend through cudarc and a stand-in for the driver: every token and bit that it has on the emulator,
//! by the same kernels, also from recorded steps.

use keyway_kernels::cuda::gpu::Gpu;

use super::generating::said_by;
use super::stand_in::StandIn;
use super::*;
use crate::engine::scheduler::StepLimits;

#[test]
fn what_a_gpu_says_is_what_the_emulator_says() {
    let Some(driver) = StandIn::new() else { return };
    let report = driver.run_test("model::tests::cuda::through_driver::inside", &[]);
    assert!(report.refused.is_empty(), "{:?}", report.refused);
    assert!(report.replays > 10, "{report:?}");
}

#[tokio::test]
#[ignore = "runs where the driver is the stand-in"]
async fn inside() {
    if !StandIn::is_here() {
        return;
    }
    let limits = StepLimits { max_batched_tokens: 64, max_running: 8 };
    // Grouped heads, experts, latents; windows of one group and of two.
    for variant in [&MODELS[0], &MODELS[1], &MODELS[5], &MODELS[7]] {
        let on_gpu = || {
            let gpu = Gpu::new(0).unwrap();
            load(variant).onto(gpu, Quantize::None).unwrap().into_backend(LAYOUT).unwrap()
        };
        let mut backend = on_gpu();
        backend.try_out().unwrap();
        assert!(backend.replayed > 0, "{}: a recorded step was tried", variant.name);
        let prompt = prompt_of(70, 7);
        assert_eq!(bits(&whole(&mut backend, &prompt)), reference(variant, &prompt), "{}", variant.name);
        let expected = said_by(Box::new(emulated(variant).unwrap()), limits).await;
        assert_eq!(said_by(Box::new(on_gpu()), limits).await, expected, "{}", variant.name);
    }
}
