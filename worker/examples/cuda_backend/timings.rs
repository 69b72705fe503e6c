//! What is timed: steps of models of published shapes with random weights, as an engine asks for them:
//! planning, copies, launches and the logits' way back, or tokens drawn there and steps that run ahead.
//! Judging the figures is `kernels/check`'s.

use std::time::Instant;

use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::scalar::argmax;
use keyway_worker::model::{CudaBackend, CudaModel, KvLayout, Quantize};
use serde_json::{Value, json};

use crate::ahead::When;
use crate::cases::text;
use crate::driver::{Driver, Sequence};
use crate::shapes::{LLAMA_8B, QWEN3_30B, Shape, VOCAB};

const BLOCK_SIZE: usize = 16;
/// Tokens before the steps that are timed, how many a piece of them has, and steps.
const CONTEXT: usize = 1024;
const PIECE: usize = 512;
const STEPS: usize = 40;
const REPEATS: usize = 20;

/// What a timing is of.
#[derive(Debug, Clone, Copy)]
enum Timing {
    /// A token of each of so many sequences.
    Decode(usize, Quantize),
    /// The same, drawn on the device, with each step started while the one before runs.
    Ahead(usize),
    /// So many tokens of a prompt in one step.
    Prefill(usize),
    /// A token of each of so many sequences, the experts shared by so many ranks, all of them here: what the
    /// exchange adds.
    Ranks(usize, usize),
}

const ALL: &[(&str, Shape, Timing)] = &[
    ("llama_8b_decode_1", LLAMA_8B, Timing::Decode(1, Quantize::None)),
    ("llama_8b_decode_8", LLAMA_8B, Timing::Decode(8, Quantize::None)),
    ("llama_8b_decode_64", LLAMA_8B, Timing::Decode(64, Quantize::None)),
    ("llama_8b_ahead_1", LLAMA_8B, Timing::Ahead(1)),
    ("qwen3_30b_decode_1", QWEN3_30B, Timing::Decode(1, Quantize::None)),
    ("qwen3_30b_ahead_1", QWEN3_30B, Timing::Ahead(1)),
    ("llama_8b_ahead_8", LLAMA_8B, Timing::Ahead(8)),
    ("llama_8b_ahead_64", LLAMA_8B, Timing::Ahead(64)),
    ("llama_8b_decode_1_int8", LLAMA_8B, Timing::Decode(1, Quantize::Int8)),
    ("llama_8b_decode_1_int4", LLAMA_8B, Timing::Decode(1, Quantize::Int4)),
    ("llama_8b_prefill_2048", LLAMA_8B, Timing::Prefill(2048)),
    ("qwen3_30b_ahead_64", QWEN3_30B, Timing::Ahead(64)),
    ("qwen3_30b_decode_1_int4", QWEN3_30B, Timing::Decode(1, Quantize::Int4)),
    ("qwen3_30b_prefill_2048", QWEN3_30B, Timing::Prefill(2048)),
    ("qwen3_30b_ranks_2_decode_1", QWEN3_30B, Timing::Ranks(2, 1)),
    ("qwen3_30b_ranks_4_decode_1", QWEN3_30B, Timing::Ranks(4, 1)),
];

/// The names of all timings, as the program lists them and [`run`] takes them.
pub(crate) fn names() -> Vec<&'static str> {
    ALL.iter().map(|(name, ..)| *name).collect()
}

/// The median step, and what no step can avoid: the weights and the KV cache read once, the products.
pub(crate) fn run(name: &str) -> Result<Value, String> {
    let timing = ALL.iter().find(|(known, ..)| *known == name).ok_or_else(|| format!("no timing {name}"))?;
    let shape = &timing.1;
    match timing.2 {
        Timing::Decode(batch, quantize) => decode(name, shape, (batch, 1), quantize),
        Timing::Ranks(ranks, batch) => decode(name, shape, (batch, ranks), Quantize::None),
        Timing::Ahead(batch) => ahead(name, shape, batch),
        Timing::Prefill(tokens) => prefill(name, shape, tokens),
    }
}

/// The model with room for `positions`, and the bytes of all its weights and of a position.
fn model(
    shape: &Shape,
    quantize: Quantize,
    positions: usize,
    (step, ranks): ([usize; 2], usize),
) -> Result<(Driver<CudaBackend<Gpu>>, [usize; 2]), String> {
    let gpu = Gpu::new(0).map_err(text)?;
    let mut model = CudaModel::synthetic(shape.config, gpu, quantize).map_err(text)?;
    model.reserve_steps(step[0], step[1]).map_err(text)?;
    if ranks > 1 {
        model = model.with_ranks_here(ranks, step[0]).map_err(text)?;
    }
    let bytes = [model.info.weight_bytes, model.info.kv_bytes_per_block_position];
    let kv = KvLayout { block_size: BLOCK_SIZE, num_blocks: positions.div_ceil(BLOCK_SIZE) };
    Ok((Driver::new(model.into_backend(kv).map_err(text)?, 1), bytes))
}

/// Sequences of [`CONTEXT`] tokens each, and the likeliest token behind each.
fn prompted(driver: &mut Driver<CudaBackend<Gpu>>, batch: usize) -> Result<(Vec<Sequence>, Tokens), String> {
    let (mut sequences, mut tokens) = (Vec::new(), Vec::new());
    for i in 0..batch {
        let mut sequence = [driver.sequence()];
        let prompt: Vec<u32> = (0..CONTEXT as u32).map(|t| (t * 7 + i as u32) % VOCAB).collect();
        let mut rows = Vec::new();
        for piece in prompt.chunks(PIECE) {
            rows = driver.step(&mut sequence, &[piece])?;
        }
        let [sequence] = sequence;
        sequences.push(sequence);
        tokens.push(vec![argmax(&rows[0]) as u32]);
    }
    Ok((sequences, tokens))
}

/// Bytes and operations that a decode step cannot avoid.
fn floor(shape: &Shape, batch: usize, quantize: Quantize, [weights, position]: [usize; 2]) -> [usize; 2] {
    let bytes = shape.weight_bytes(weights, batch, quantize) + batch * (CONTEXT + STEPS / 2) * position;
    [bytes, shape.operations(batch, batch)]
}

fn decode(
    name: &str,
    shape: &Shape,
    (batch, ranks): (usize, usize),
    quantize: Quantize,
) -> Result<Value, String> {
    let longest = (CONTEXT + STEPS + 2).next_multiple_of(BLOCK_SIZE);
    let (mut driver, sizes) = model(shape, quantize, batch * longest, ([PIECE, batch], ranks))?;
    let (mut sequences, mut tokens) = prompted(&mut driver, batch)?;
    let mut times = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let begun = Instant::now();
        let rows = driver.step(&mut sequences, &slices(&tokens))?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
        tokens = rows.iter().map(|row| vec![argmax(row) as u32]).collect();
    }
    let device_us = device(&mut driver, &mut sequences, &slices(&tokens))?;
    Ok(answer(name, times, device_us, floor(shape, batch, quantize, sizes)))
}

/// `idle_us` is the device's own time between the end of a step and the beginning of the next one, the copy
/// of its inputs included: the median, and what nine of ten steps stay below. The bar is 20 us.
fn ahead(name: &str, shape: &Shape, batch: usize) -> Result<Value, String> {
    let longest = (CONTEXT + STEPS + 2).next_multiple_of(BLOCK_SIZE);
    let (mut driver, sizes) = model(shape, Quantize::None, batch * longest, ([PIECE, batch], 1))?;
    let (mut sequences, tokens) = prompted(&mut driver, batch)?;
    driver.backend.watch_idle();
    let how = (STEPS, 0.8);
    let (steps, times) = crate::ahead::decode(&mut driver, &mut sequences, &tokens, how, When::Ahead)?;
    let mut idle = driver.backend.idle().map_err(text)?;
    idle.sort_by(f32::total_cmp);
    let last: Vec<Vec<u32>> = steps[STEPS - 1].iter().map(|token| vec![*token]).collect();
    let device_us = device(&mut driver, &mut sequences, &slices(&last))?;
    let mut answer = answer(name, times, device_us, floor(shape, batch, Quantize::None, sizes));
    answer["idle_us"] = json!(f64::from(idle[idle.len() / 2]) * 1e3);
    answer["idle_p90_us"] = json!(f64::from(idle[idle.len() * 9 / 10]) * 1e3);
    Ok(answer)
}

fn prefill(name: &str, shape: &Shape, count: usize) -> Result<Value, String> {
    let rounds = 5;
    let (mut driver, [weights, position]) =
        model(shape, Quantize::None, (rounds + 1) * count, ([count, 1], 1))?;
    let prompt: Vec<u32> = (0..count as u32).map(|t| t * 7 % VOCAB).collect();
    let mut times = Vec::new();
    for _ in 0..rounds {
        let mut sequence = [driver.sequence()];
        let begun = Instant::now();
        driver.step(&mut sequence, &[&prompt])?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let mut sequence = [driver.sequence()];
    let device_us = device(&mut driver, &mut sequence, &[&prompt])?;
    let bytes = shape.weight_bytes(weights, count, Quantize::None) + count * position;
    let operations = shape.operations(count, 1) + shape.attention_operations(count);
    Ok(answer(name, times, device_us, [bytes, operations]))
}

/// New tokens of each sequence.
type Tokens = Vec<Vec<u32>>;

fn slices(tokens: &[Vec<u32>]) -> Vec<&[u32]> {
    tokens.iter().map(Vec::as_slice).collect()
}

/// Microseconds of one more step on the device alone.
fn device(
    driver: &mut Driver<CudaBackend<Gpu>>,
    sequences: &mut [Sequence],
    tokens: &[&[u32]],
) -> Result<f64, String> {
    let mut times = driver.with_chunks(sequences, tokens, |backend, chunks| {
        backend.time_on_device(chunks, REPEATS).map_err(text)
    })?;
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[REPEATS / 2]) * 1e3)
}

fn answer(name: &str, mut times: Vec<f64>, device_us: f64, [bytes, operations]: [usize; 2]) -> Value {
    times.sort_by(f64::total_cmp);
    json!({
        "timing": name,
        "us": times[times.len() / 2],
        "device_us": device_us,
        "bytes": bytes,
        "operations": operations,
    })
}
