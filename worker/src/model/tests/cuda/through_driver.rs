//! The backend through cudarc and a stand-in for the driver, as each kind of device: every family says what
//! it says on the emulator, by the same kernels, alone and with others, also from recorded steps. A device
//! whose blocks have too little shared memory for a family says so before the first request.

use std::sync::OnceLock;

use keyway_kernels::cuda::gpu::Gpu;

use super::generating::said_to;
use super::stand_in::StandIn;
use super::*;
use crate::engine::backend::StepError;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::GenerationRequest;

/// As many experts as DeepSeek-V3 has: with 32 tokens their choice takes more shared memory than a block has
/// without asking.
const MANY_EXPERTS: Variant = Variant {
    name: "Qwen3MoeForCausalLM",
    more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": true, "mlp_only_layers": [0]"#,
};
const MXFP4: Variant = Variant {
    name: "GptOssForCausalLM",
    more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 41, "quantization_config": {"quant_method": "mxfp4"}"#,
};
const LIMITS: StepLimits = StepLimits { max_batched_tokens: 96, max_running: 32 };
/// Requests at once, in turn.
const BURSTS: &[usize] = &[1, 8, 32];

/// A model, and what is not as usual.
type Case = (&'static Variant, Unusual);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Unusual {
    Nothing,
    /// Keys and values in FP8.
    Fp8Kv,
    /// Both products of few tokens' experts in one launch, which changes no answer.
    PairedExperts,
}

/// Every family with bf16 keys and values, and with FP8 ones where those have kernels of their own: head
/// widths of 64 and 128, windows, latents. Some experts' products in one launch too.
fn cases() -> Vec<Case> {
    let plain = MODELS.iter().chain([&MANY_EXPERTS, &MXFP4]).map(|variant| (variant, Unusual::Nothing));
    let fp8 = [0, 1, 3, 7].map(|i| (&MODELS[i], Unusual::Fp8Kv));
    plain.chain(fp8).chain([&MANY_EXPERTS, &MXFP4].map(|variant| (variant, Unusual::PairedExperts))).collect()
}

fn is_latent((variant, _): Case) -> bool {
    variant.more.contains("kv_lora_rank")
}

/// The first alone and long, others short, greedy and drawn.
fn burst(size: usize) -> Vec<GenerationRequest> {
    let request = |i: usize| GenerationRequest {
        prompt: prompt_of(if size == 1 { 70 } else { 1 + i as u32 % 5 }, i as u32 + 7),
        max_tokens: 4,
        ignore_eos: true,
        sampling: Sampling { temperature: (i % 2) as f32, seed: i as u64, ..Sampling::default() },
        ..GenerationRequest::default()
    };
    (0..size).map(request).collect()
}

fn on<D: Device>((variant, unusual): Case, device: D) -> CudaBackend<D> {
    let model = load(variant).onto(device, Quantize::None).unwrap();
    let model = match unusual {
        Unusual::Nothing => model,
        Unusual::Fp8Kv => model.with_fp8_kv(),
        Unusual::PairedExperts => model.with_paired_experts(),
    };
    model.into_backend(LAYOUT).unwrap()
}

/// What a model says to each burst, in a line; or why its device does not take it.
async fn lines<D: Device + Send + 'static>(case: Case, device: D) -> Vec<String> {
    let mut backend = on(case, device);
    let name = format!("{} fp8={}", case.0.name, case.1 == Unusual::Fp8Kv);
    if let Err(StepError(why)) = backend.try_out() {
        return vec![format!("{name} refused: {why}")];
    }
    let mut said = said_to(Box::new(backend), LIMITS, BURSTS.iter().copied().map(burst)).await.into_iter();
    let of = |size: &usize| format!("{name} {size}: {:?}", said.by_ref().take(*size).collect::<Vec<_>>());
    BURSTS.iter().map(of).collect()
}

/// What the emulator says to each case, with Hopper's matrix units or without: once for all tests.
fn expected(is_hopper: bool) -> Option<&'static Vec<Vec<String>>> {
    static SAID: [OnceLock<Option<Vec<Vec<String>>>>; 2] = [OnceLock::new(), OnceLock::new()];
    let said = SAID[usize::from(is_hopper)].get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let of = |case: Case| {
            let emulator = Emulator::start(1)?;
            let emulator = if is_hopper { emulator } else { emulator.without_warpgroups() };
            // What is said as usual is expected of one launch, too.
            let case = if case.1 == Unusual::PairedExperts { (case.0, Unusual::Nothing) } else { case };
            Some(runtime.block_on(lines(case, emulator)))
        };
        cases().into_iter().map(of).collect()
    });
    said.as_ref()
}

fn check(capability: &str) {
    let Some(expected) = expected(capability == "90") else { return };
    let Some(driver) = StandIn::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("said");
    let settings = [("SAID", file.to_str().unwrap()), ("CAPABILITY", capability)];
    let report = driver.run_test("model::tests::cuda::through_driver::inside", &settings);
    assert!(report.refused.is_empty(), "{:?}", report.refused);
    assert!(report.replays > 50, "{report:?}");
    let said = std::fs::read_to_string(file).unwrap();
    let mut said = said.lines();
    for (case, expected) in cases().into_iter().zip(expected) {
        if ["86", "89", "120"].contains(&capability) && is_latent(case) {
            let line = said.next().unwrap();
            assert!(line.contains("refused: ") && line.contains("attention_latent_"), "{line}");
            assert!(line.contains("bytes of shared memory a block, and this GPU has 101376"), "{line}");
            continue;
        }
        for expected in expected {
            assert_eq!(said.next().unwrap(), expected, "{capability}");
        }
    }
    assert_eq!(said.next(), None);
}

macro_rules! devices {
    ($($name:ident $capability:literal),*) => {
        $(#[test] fn $name() { check($capability); })*
    };
}
devices!(
    a_device_of_8_0_says_what_the_emulator_says "80",
    a_device_of_8_6_says_it_or_refuses "86",
    a_device_of_8_9_says_it_or_refuses "89",
    a_device_of_9_0_says_what_the_emulator_says "90",
    a_device_of_10_0_says_what_the_emulator_says "100",
    a_device_of_12_0_says_it_or_refuses "120"
);

#[tokio::test]
#[ignore = "runs where the driver is the stand-in"]
async fn inside() {
    if !StandIn::is_here() {
        return;
    }
    let mut said = Vec::new();
    for case in cases() {
        said.extend(lines(case, Gpu::new(0).unwrap()).await);
    }
    std::fs::write(std::env::var("STAND_IN_SAID").unwrap(), said.join("\n")).unwrap();
}
