//! Decoding and prefilling the exact shape of Qwen3-0.6B with random weights, against what this machine's
//! memory and arithmetic allow in the same minute: `cargo bench -p keyway-worker --bench qwen3_0_6b [--
//! OPTION...]`
//!
//!     --threads N     [default: one for each core]
//!     --rounds N      repetitions, of which the median is printed [default: 7]
//!     --only LIST     of bf16, int8, int4 [default: all]
//!     --write DIR     write the checkpoint into DIR and stop: other engines can be measured with it
//!
//! Takes about 4 GiB of memory, and 1.2 GB of a temporary folder. A step's floor is the weights it reads over
//! the bandwidth that a probe reaches just before it: each round probes, decodes and prefills in turn.

#![allow(clippy::expect_used, reason = "a benchmark ends at whatever fails")]

mod checkpoint;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use keyway_kernels::compute::Compute;
use keyway_kernels::probe::{Bandwidth, multiplications};
use keyway_worker::backend::{Backend, Chunk};
use keyway_worker::model::{CpuBackend, KvLayout, LoadedModel, ModelSource, Quantize};

const BLOCK_SIZE: usize = 16;
const PREFILL: usize = 512;
/// Sequences at once, beside one alone.
const BATCHES: [usize; 2] = [8, 32];
/// Most of them.
const BATCH_MAX: usize = 32;
/// Tokens decoded in a round, from an empty context on.
const DECODE: usize = 24;

struct Options {
    compute: Compute,
    rounds: usize,
    only: Option<String>,
    write: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    if let Some(dir) = &options.write {
        std::fs::create_dir_all(dir)?;
        return Ok(checkpoint::write(dir)?);
    }
    let dir = tempfile::tempdir()?;
    checkpoint::write(dir.path())?;
    let bandwidth = Bandwidth::new(&options.compute);
    println!("{} threads, {}", options.compute.threads(), options.compute.isa().name());
    println!("medians of {} rounds; decode of {DECODE} tokens from an empty context", options.rounds);
    for quantize in [Quantize::None, Quantize::Int8, Quantize::Int4] {
        let name = if quantize == Quantize::None { "bf16".to_owned() } else { quantize.to_string() };
        if options.only.as_ref().is_none_or(|only| only.contains(&name)) {
            bench(&options, &bandwidth, dir.path().into(), quantize, &name)?;
        }
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let (mut threads, mut rounds, mut only, mut write) =
        (std::thread::available_parallelism()?, 7, None, None);
    let mut args = std::env::args().skip(1);
    while let Some(option) = args.next() {
        if option == "--bench" {
            continue;
        }
        let value = args.next().ok_or(format!("{option} needs a value"))?;
        match option.as_str() {
            "--threads" => threads = value.parse::<NonZeroUsize>()?,
            "--rounds" => rounds = value.parse::<NonZeroUsize>()?.get(),
            "--only" => only = Some(value),
            "--write" => write = Some(value.into()),
            _ => return Err(format!("unknown option {option}: see the head of this benchmark's file").into()),
        }
    }
    Ok(Options { compute: Compute::new(threads), rounds, only, write })
}

/// What a round found.
struct Round {
    /// Bytes per second.
    bandwidth: f64,
    /// Operations per second.
    arithmetic: f64,
    /// Seconds per step of one sequence, of each of [`BATCHES`], and of a prompt.
    decode: f64,
    batches: [f64; BATCHES.len()],
    prefill: f64,
}

fn bench(
    options: &Options,
    bandwidth: &Bandwidth,
    dir: PathBuf,
    quantize: Quantize,
    name: &str,
) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let model = LoadedModel::load_quantized(&ModelSource::Dir(dir), quantize)?;
    let loading = begin.elapsed().as_secs_f64();
    let weights = model.info.weight_bytes as f64;
    let layout = KvLayout {
        block_size: BLOCK_SIZE,
        num_blocks: PREFILL.max(BATCH_MAX * DECODE) / BLOCK_SIZE + BATCH_MAX,
    };
    let mut backend = model.into_backend(layout)?.with_compute(options.compute.clone());
    println!("{name}: {:.0} MB of weights, loaded in {loading:.1} s", weights / 1e6);
    decode(&mut backend, 1);
    let rounds: Vec<Round> = (0..options.rounds)
        .map(|_| Round {
            bandwidth: bandwidth.measure(&options.compute),
            decode: decode(&mut backend, 1),
            batches: BATCHES.map(|sequences| decode(&mut backend, sequences)),
            arithmetic: multiplications(&options.compute),
            prefill: prefill(&mut backend),
        })
        .collect();
    let of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let share = median(rounds.iter().map(|round| weights / round.bandwidth / round.decode).collect());
    println!("  read probe                 {:7.1} GB/s", of(&|r| r.bandwidth) / 1e9);
    println!("  f32 multiply-add probe     {:7.0} GFLOP/s", of(&|r| r.arithmetic) / 1e9);
    println!(
        "  decode, batch 1            {:7.1} tokens/s, {:.0} % of the floor",
        of(&|r| 1.0 / r.decode),
        100.0 * share
    );
    for (i, sequences) in BATCHES.into_iter().enumerate() {
        println!(
            "  decode, batch {sequences:<2}           {:7.1} tokens/s, {:.2} times batch 1",
            of(&|r| sequences as f64 / r.batches[i]),
            of(&|r| sequences as f64 * r.decode / r.batches[i])
        );
    }
    println!(
        "  prefill of {PREFILL}             {:7.0} tokens/s, {:.0} % of the multiply-add probe",
        of(&|r| PREFILL as f64 / r.prefill),
        of(&|r| 100.0 * 2.0 * PREFILL as f64 * checkpoint::LAYER_WEIGHTS as f64 / r.prefill / r.arithmetic)
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds per step of `sequences` that begin empty and grow by a token a step.
fn decode(backend: &mut CpuBackend, sequences: usize) -> f64 {
    let per_sequence = DECODE.div_ceil(BLOCK_SIZE) as u32;
    let blocks: Vec<Vec<u32>> =
        (0..sequences as u32).map(|s| (s * per_sequence..(s + 1) * per_sequence).collect()).collect();
    let tables: Vec<[&[u32]; 1]> = blocks.iter().map(|blocks| [blocks.as_slice()]).collect();
    let mut logits = Vec::new();
    let begin = Instant::now();
    for start in 0..DECODE {
        let token = [(start * 7919 % backend.vocab_size()) as u32];
        let chunk = |tables| Chunk { tokens: &token, start, tables, wants_logits: true };
        let chunks: Vec<Chunk<'_>> = tables.iter().map(|tables| chunk(tables.as_slice())).collect();
        backend.step(&chunks, &mut logits).expect("no other process");
    }
    begin.elapsed().as_secs_f64() / DECODE as f64
}

/// Seconds for a prompt.
fn prefill(backend: &mut CpuBackend) -> f64 {
    let blocks: Vec<u32> = (0..(PREFILL / BLOCK_SIZE) as u32).collect();
    let prompt: Vec<u32> = (0..PREFILL).map(|i| (i * 7919 % backend.vocab_size()) as u32).collect();
    let mut logits = Vec::new();
    let begin = Instant::now();
    let chunk = Chunk { tokens: &prompt, start: 0, tables: &[&blocks], wants_logits: true };
    backend.step(&[chunk], &mut logits).expect("no other process");
    begin.elapsed().as_secs_f64()
}
