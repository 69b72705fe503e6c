//! The models against Hugging Face's, against themselves in every batch, and loading that fails.

mod block_copies;
pub(crate) mod cuda;
mod data_parallel;
mod experts;
mod invariance;
mod loading;
mod parity;
mod quantized;
mod sequence;

use std::path::{Path, PathBuf};

use self::sequence::{Pool, Sequence};
use super::*;
use crate::engine::backend::{Backend, Chunk};

const FAMILIES: [&str; 11] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_fp8",
];

/// Enough for four sequences of 400 tokens in three groups.
const NUM_BLOCKS: usize = 320;

fn family_dir(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(family)
}

/// Every family, and behind them the random model.
fn sources() -> impl Iterator<Item = ModelSource> {
    (0..=FAMILIES.len()).map(source)
}

fn source(family: usize) -> ModelSource {
    FAMILIES.get(family).map_or(ModelSource::Random, |family| ModelSource::Dir(family_dir(family)))
}

fn backend(source: &ModelSource) -> CpuBackend {
    backend_with(source, KvLayout { block_size: 16, num_blocks: NUM_BLOCKS })
}

fn backend_with(source: &ModelSource, layout: KvLayout) -> CpuBackend {
    LoadedModel::load(source).unwrap().into_backend(layout).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits after the last of `tokens`, alone, in one piece, in blocks from 0 on.
fn run_whole(backend: &mut CpuBackend, tokens: &[u32]) -> Vec<f32> {
    let mut pool = Pool::ascending(backend);
    let mut sequence = Sequence::new(backend);
    sequence.run(backend, &mut pool, tokens)
}
