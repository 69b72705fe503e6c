//! The models against Hugging Face's, against themselves in every batch, and loading that fails.

mod invariance;
mod loading;
mod parity;

use std::path::{Path, PathBuf};

use super::*;
use crate::backend::{Backend, Chunk};

const FAMILIES: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen3_moe"];

fn family_dir(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(family)
}

fn backend(source: &ModelSource, num_blocks: usize) -> CpuBackend {
    let layout = KvLayout { block_size: 16, num_blocks };
    LoadedModel::load(source).unwrap().into_backend(layout).unwrap()
}

/// Runs one chunk and returns the logits after its last token.
fn run(backend: &mut CpuBackend, tokens: &[u32], start: usize, blocks: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    backend.step(&[Chunk { tokens, start, tables: &[blocks], wants_logits: true }], &mut logits);
    logits
}
