//! The random model: a tiny Qwen3-MoE over bytes, its weights drawn from a fixed seed, for benchmarks and for
//! tests that need an engine but no sense. Its text means nothing.
//!
//! Tokens 0..=255 are bytes, 256 is `<|endoftext|>`, 257 `<|im_start|>`, 258 `<|im_end|>`; the vocabulary is
//! padded to 320.

use std::borrow::Cow;

use keyway_kernels::moe::{Routing, Scoring};
use keyway_kernels::rope::{Pairing, RopeScaling};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::config::{
    Attention, Config, Experts, FeedForward, Gate, Grouped, LayerShape, Quantisation, RopeShape,
};
use super::tensor::{Tensor, TensorSource, TensorType};
use super::{ModelError, families};

const SEED: u64 = 0x6b65_7977_6179_0001;
const END_OF_TEXT: u32 = 256;
const IM_END: u32 = 258;

/// The random model's configuration: two layers with eight experts, of which two serve a token.
pub(super) fn config() -> Config {
    let routing =
        Routing { top: 2, scoring: Scoring::SoftmaxAll, renormalise: true, scale: 1.0, groups: None };
    let feed_forward = FeedForward::Experts(Experts {
        count: 8,
        width: 64,
        routing,
        correction_bias: false,
        biases: false,
        gate: Gate::Silu,
        shared_width: None,
    });
    Config {
        vocab_size: 320,
        hidden: 64,
        max_positions: 32_768,
        norm_eps: 1e-6,
        attention: Attention::Grouped(Grouped {
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            qkv_bias: false,
            output_bias: false,
            qk_norm: true,
            sinks: false,
        }),
        rope: RopeShape { theta: 10_000.0, scaling: RopeScaling::None, pairing: Pairing::Halves },
        layers: vec![LayerShape { window: None, feed_forward }; 2],
        tied_embeddings: false,
        names: &families::NAMES,
        quantisation: Quantisation::None,
        eos_token_ids: vec![END_OF_TEXT, IM_END],
    }
}

/// The random model's tensors, made from a fixed seed whenever one is read.
#[derive(Debug)]
pub(super) struct Random;

impl TensorSource for Random {
    /// Element `i` of a tensor is a function of (seed, tensor's name, `i`) in integers and two exact float
    /// operations: the same on every machine.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let stream = xxh3_64_with_seed(name.as_bytes(), SEED);
        let (mean, deviation) = distribution(name);
        let count: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..count as u64)
            .flat_map(|i| normal(stream, i).mul_add(deviation, mean).to_le_bytes())
            .collect();
        let width = shape.last().copied().unwrap_or(1);
        Ok(Tensor { kind: TensorType::F32, width, bytes: Cow::Owned(bytes) })
    }
}

/// Mean and deviation of a tensor's elements. Products keep the size of their inputs (deviation 1 /
/// sqrt(64)), small embeddings let the layers dominate and doubled queries sharpen attention: with flatter
/// choices greedy decoding soon repeats one token.
fn distribution(name: &str) -> (f32, f32) {
    if name.ends_with("q_norm.weight") {
        (2.0, 0.1)
    } else if name.ends_with("norm.weight") {
        (1.0, 0.1)
    } else if name.contains("embed_tokens") {
        (0.0, 0.08)
    } else {
        (0.0, 0.125)
    }
}

/// An approximately standard normal value: the sum of eight uniform bytes, centred, over its deviation
/// `sqrt(8 * (256^2 - 1) / 12)`.
fn normal(stream: u64, index: u64) -> f32 {
    let sum: u32 = mix(stream.wrapping_add(index)).to_le_bytes().iter().map(|byte| u32::from(*byte)).sum();
    (sum as f32 - 1020.0) / 209.021_53
}

/// SplitMix64's output function over a counter (Steele, Lea and Flood, OOPSLA 2014).
fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
