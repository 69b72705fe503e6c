//! Prints a model's speed on this machine, without the engine: `cargo run --release -p keyway-worker
//! --example throughput [DIR|builtin|random [THREADS]]`, on one thread unless told.

#![allow(clippy::expect_used, reason = "an example ends at whatever fails")]

use std::error::Error;
use std::num::NonZeroUsize;
use std::time::Instant;

use keyway_kernels::compute::Compute;
use keyway_worker::backend::{Backend, Chunk};
use keyway_worker::model::{CpuBackend, KvLayout, LoadedModel, ModelSource};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 2048;
const PREFILL_CHUNK: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let source: ModelSource = std::env::args().nth(1).unwrap_or_else(|| "builtin".into()).parse()?;
    let model = LoadedModel::load(&source)?;
    let info = model.info.clone();
    println!("{}: {} KiB of weights, {}", info.name, info.weight_bytes >> 10, info.numerics_id);
    let threads: NonZeroUsize = std::env::args().nth(2).map_or(Ok(NonZeroUsize::MIN), |n| n.parse())?;
    let layout = KvLayout { block_size: BLOCK_SIZE, num_blocks: NUM_BLOCKS };
    let mut backend = model.into_backend(layout)?.with_compute(Compute::new(threads));
    println!("on {threads} thread(s), {} KV bytes per block's position", info.kv_bytes_per_block_position);
    for context in [400, 1000, 4000, 16_000] {
        if context <= info.max_model_len {
            prefill(&mut backend, context);
        }
    }
    for (sequences, context) in [(1, 1000), (8, 1000), (32, 1000), (8, 4000)] {
        decode(&mut backend, sequences, context);
    }
    Ok(())
}

fn tokens(n: usize, vocab_size: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 % vocab_size) as u32).collect()
}

/// A block table per cache group, for `len` positions. Where the pool is too small, groups share blocks,
/// which changes what is computed but not how long it takes.
fn tables(backend: &CpuBackend, len: usize) -> Vec<Vec<u32>> {
    let blocks = len.div_ceil(BLOCK_SIZE);
    let table = |group| (0..blocks).map(|i| ((group * blocks + i) % NUM_BLOCKS) as u32).collect();
    (0..backend.cache_groups().len()).map(table).collect()
}

/// Prompts of `context` tokens, cut into chunks as the scheduler would.
fn prefill(backend: &mut CpuBackend, context: usize) {
    let tables = tables(backend, context);
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let (prompt, mut logits) = (tokens(context, backend.vocab_size()), Vec::new());
    let (begin, mut prompts) = (Instant::now(), 0);
    while begin.elapsed().as_secs_f64() < 1.0 {
        for start in (0..context).step_by(PREFILL_CHUNK) {
            let end = (start + PREFILL_CHUNK).min(context);
            let chunk =
                Chunk { tokens: &prompt[start..end], start, tables: &tables, wants_logits: end == context };
            backend.step(&[chunk], &mut logits).expect("no other process");
        }
        prompts += 1;
    }
    let rate = (prompts * context) as f64 / begin.elapsed().as_secs_f64();
    println!("prefill, prompts of {context}: {rate:.0} tokens/s");
}

/// One token for each of `sequences`, each `context` long; their KV is shared, which costs nothing less.
fn decode(backend: &mut CpuBackend, sequences: usize, context: usize) {
    let tables = tables(backend, context + 1);
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let next = tokens(sequences, backend.vocab_size());
    let chunks: Vec<Chunk<'_>> = next
        .chunks(1)
        .map(|tokens| Chunk { tokens, start: context, tables: &tables, wants_logits: true })
        .collect();
    let (mut logits, begin, mut steps) = (Vec::new(), Instant::now(), 0);
    while begin.elapsed().as_secs_f64() < 1.0 {
        backend.step(&chunks, &mut logits).expect("no other process");
        steps += 1;
    }
    let seconds = begin.elapsed().as_secs_f64() / f64::from(steps);
    println!(
        "decode, {sequences} sequences of {context}: {:.0} us a step, {:.0} tokens/s",
        seconds * 1e6,
        sequences as f64 / seconds
    );
}
