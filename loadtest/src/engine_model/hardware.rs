//! The named profiles, derived from public specifications of accelerators and models. The only assumed
//! numbers are the efficiencies in [`Efficiency`]; a profile is a model of an engine, not a measurement of
//! one.
//!
//! Sources: NVIDIA's data sheets (H100 SXM: 989 TFLOP/s dense BF16, 3.35 TB/s, 80 GB; H200: 4.8 TB/s, 141 GB;
//! A100 SXM 80 GB: 312 TFLOP/s, 2.039 TB/s; L4: 121 TFLOP/s, 300 GB/s, 24 GB) and the models' published
//! `config.json`: layers, attention heads, KV heads, head size.

use super::profile::{Profile, StepCost};

/// An accelerator, by the figures of its data sheet.
struct Device {
    /// Peak of dense BF16 arithmetic, in FLOP/s.
    flops: f64,
    /// Peak bandwidth of its memory, in bytes a second.
    bandwidth: f64,
    /// Size of its memory, in bytes.
    memory: f64,
}

/// A decoder in BF16.
struct Model {
    /// All parameters, whether a token uses them or not: all are held in memory.
    parameters: f64,
    /// Parameters that one token uses: all, or a mixture's active ones.
    active: f64,
    layers: f64,
    query_heads: f64,
    kv_heads: f64,
    head_size: f64,
}

/// Shares of the peak that kernels reach, and times that no specification names. Assumed: serving engines
/// report 40 to 60 % of peak arithmetic in prefill and about 80 % of peak bandwidth in decoding.
struct Efficiency;

impl Efficiency {
    const LINEAR: f64 = 0.55;
    const ATTENTION: f64 = 0.35;
    const BANDWIDTH: f64 = 0.80;
    /// Scheduling and launching one step with captured graphs.
    const STEP_NS: f64 = 1.5e6;
    /// One all-reduce of a tensor-parallel layer; a layer has two.
    const ALL_REDUCE_NS: f64 = 1.2e4;
    /// Sampling and detokenising one sequence.
    const SEQUENCE_NS: f64 = 1.0e4;
    /// Share of the memory that an engine takes (vLLM's default), and what activations take of it.
    const MEMORY: f64 = 0.90;
    const ACTIVATION_BYTES: f64 = 3e9;
}

const BYTES_PER_VALUE: f64 = 2.0;
const KV_BLOCK_TOKENS: u32 = 16;

const H100: Device = Device { flops: 989e12, bandwidth: 3.35e12, memory: 80e9 };
const H200: Device = Device { flops: 989e12, bandwidth: 4.8e12, memory: 141e9 };
const A100: Device = Device { flops: 312e12, bandwidth: 2.039e12, memory: 80e9 };
const L4: Device = Device { flops: 121e12, bandwidth: 0.3e12, memory: 24e9 };

const LLAMA_8B: Model = Model {
    parameters: 8.03e9,
    active: 8.03e9,
    layers: 32.0,
    query_heads: 32.0,
    kv_heads: 8.0,
    head_size: 128.0,
};
const LLAMA_70B: Model = Model {
    parameters: 70.6e9,
    active: 70.6e9,
    layers: 80.0,
    query_heads: 64.0,
    kv_heads: 8.0,
    head_size: 128.0,
};
const QWEN3_30B_A3B: Model = Model {
    parameters: 30.5e9,
    active: 3.3e9,
    layers: 48.0,
    query_heads: 32.0,
    kv_heads: 4.0,
    head_size: 128.0,
};

/// Every profile, in the order in which they are listed to users.
pub const PROFILES: [Profile; 10] = [
    derive("h100-8b", "Llama 3.1 8B on one H100 SXM", &H100, &LLAMA_8B, 1.0, 8192),
    derive("h200-8b", "Llama 3.1 8B on one H200", &H200, &LLAMA_8B, 1.0, 8192),
    derive("a100-8b", "Llama 3.1 8B on one A100 80 GB", &A100, &LLAMA_8B, 1.0, 8192),
    derive("l4-8b", "Llama 3.1 8B on one L4", &L4, &LLAMA_8B, 1.0, 2048),
    derive("h100x4-70b", "Llama 3.1 70B on four H100 SXM", &H100, &LLAMA_70B, 4.0, 8192),
    derive(
        "h200-30b-a3b",
        "Qwen3 30B-A3B (mixture of experts) on one H200",
        &H200,
        &QWEN3_30B_A3B,
        1.0,
        8192,
    ),
    CPU_WORKER,
    FCFS_6K,
    SMG_80K,
    INSTANT,
];

/// `keyway-worker` with its random model on one thread, fitted to the figures of `kernels/docs/figures.md`:
/// prefill of 400 to 16,000 tokens at 519,000 to 35,000 tokens/s; a decode step of 17 µs for one sequence of
/// 1,000 tokens, 421 µs for 32. Bounds are the worker's defaults.
const CPU_WORKER: Profile = Profile {
    name: "cpu-worker",
    about: "keyway-worker's random model on one CPU thread",
    block_tokens: 16,
    kv_blocks: 8192,
    token_budget: 512,
    running_max: 64,
    cost: StepCost {
        step_ns: 4.0e3,
        weights_ns: 0.0,
        token_ns: 740.0,
        attention_ns: 3.5,
        kv_read_ns: 3.5,
        sequence_ns: 8.8e3,
    },
};

/// Everything takes no time: what is left is the client's and the gateway's own cost.
const INSTANT: Profile = Profile {
    name: "instant",
    about: "no time at all: measures whatever stands before the engine",
    block_tokens: KV_BLOCK_TOKENS,
    kv_blocks: 65_536,
    token_budget: 1 << 20,
    running_max: 1024,
    cost: StepCost::ZERO,
};

/// What routers are compared on: 6,000 prompt tokens a second in order of arrival, whatever their length, so
/// that a figure can be checked by hand; a decode step takes 20 ms, as long as 120 tokens of prompt.
const FCFS_6K: Profile = Profile {
    name: "fcfs-6k",
    about: "6,000 prompt tokens a second in order of arrival: for comparing routers",
    block_tokens: KV_BLOCK_TOKENS,
    kv_blocks: 32_768,
    // One step is at most 85 ms, and mostly one prompt's alone.
    token_budget: 512,
    running_max: 256,
    cost: StepCost { weights_ns: 20e6, token_ns: 1e9 / 6_000.0, ..StepCost::ZERO },
};

/// The engines of SMG's simulated fleets, ten times as fast as real ones: a step takes 4.3 ms, or 12.5 us for
/// each of its tokens where that is more. Source: `scripts/generate_sim/profiles/local-medium.json` of
/// smg-project/smg, which has 80,000 prompt tokens a second, chunks of 320, 80 requests running, 1.2 million
/// tokens of KV.
const SMG_80K: Profile = Profile {
    name: "smg-80k",
    about: "80,000 prompt tokens a second, 4.3 ms a decode step: the engines of SMG's own comparison",
    block_tokens: 256,
    kv_blocks: 1_200_000 / 256,
    token_budget: 320 + 80,
    running_max: 80,
    cost: StepCost { weights_ns: 4.3e6, token_ns: 1e9 / 80_000.0, ..StepCost::ZERO },
};

/// There is no profile of this name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown profile `{name}`: use one of {known}",
    known = PROFILES.map(|profile| profile.name).join(", ")
)]
pub struct UnknownProfile {
    /// The name that was asked for.
    pub name: String,
}

/// The profile of this name.
pub fn named(name: &str) -> Result<Profile, UnknownProfile> {
    let found = PROFILES.into_iter().find(|profile| profile.name == name);
    found.ok_or_else(|| UnknownProfile { name: name.into() })
}

/// `model` on `devices` with tensor parallelism. FLOPs of a token: 2 for each active parameter; of a pair in
/// attention: 4 for each query channel and layer (scores, then values).
const fn derive(
    name: &'static str,
    about: &'static str,
    device: &Device,
    model: &Model,
    devices: f64,
    token_budget: u32,
) -> Profile {
    let flops = device.flops * devices;
    let bandwidth = device.bandwidth * devices * Efficiency::BANDWIDTH;
    let weights = model.parameters * BYTES_PER_VALUE;
    let kv_bytes = 2.0 * model.layers * model.kv_heads * model.head_size * BYTES_PER_VALUE;
    let attention = 4.0 * model.layers * model.query_heads * model.head_size;
    let all_reduces = if devices > 1.0 { 2.0 * model.layers * Efficiency::ALL_REDUCE_NS } else { 0.0 };
    let kv_memory =
        device.memory * devices * Efficiency::MEMORY - weights - Efficiency::ACTIVATION_BYTES * devices;
    Profile {
        name,
        about,
        block_tokens: KV_BLOCK_TOKENS,
        kv_blocks: (kv_memory / kv_bytes) as u32 / KV_BLOCK_TOKENS,
        token_budget,
        running_max: 256,
        cost: StepCost {
            step_ns: Efficiency::STEP_NS + all_reduces,
            weights_ns: weights / bandwidth * 1e9,
            token_ns: 2.0 * model.active / (flops * Efficiency::LINEAR) * 1e9,
            attention_ns: attention / (flops * Efficiency::ATTENTION) * 1e9,
            kv_read_ns: kv_bytes / bandwidth * 1e9,
            sequence_ns: Efficiency::SEQUENCE_NS,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_model::StepWork;

    #[test]
    fn names_are_found_and_unknown_ones_answered_with_the_list() {
        for profile in PROFILES {
            assert_eq!(named(profile.name).unwrap(), profile);
        }
        assert!(named("b200").unwrap_err().to_string().contains("h100-8b, h200-8b"));
    }

    /// What anyone who has served these models would call plausible; a slipped power of ten is not.
    #[test]
    fn derived_speeds_are_of_the_known_order() {
        let decode_ms = |profile: &Profile, decodes: u64| {
            let work = StepWork {
                decodes,
                decode_context: decodes * 2000,
                sequences: decodes,
                ..StepWork::default()
            };
            profile.cost.of(&work) / 1e6
        };
        let h100 = named("h100-8b").unwrap();
        assert!((20_000.0..40_000.0).contains(&h100.prefill_rate(8192)), "{}", h100.prefill_rate(8192));
        assert!((6.0..10.0).contains(&decode_ms(&h100, 1)), "{}", decode_ms(&h100, 1));
        assert!((300_000..500_000).contains(&h100.kv_tokens()), "{}", h100.kv_tokens());
        let l4 = named("l4-8b").unwrap();
        assert!((60.0..90.0).contains(&decode_ms(&l4, 1)), "{}", decode_ms(&l4, 1));
        assert!((10_000..60_000).contains(&l4.kv_tokens()), "{}", l4.kv_tokens());
    }

    #[test]
    fn long_prompts_run_slower_per_token_than_short_ones() {
        let h100 = named("h100-8b").unwrap();
        assert!(h100.prefill_rate(100_000) < 0.7 * h100.prefill_rate(8192));
    }
}
