//! The CUDA backend on the emulator, which compiles the very kernels for the CPU: against the CPU backend,
//! and held to the same promise of equal bits. Where there is no C++ compiler it says SKIPPED.

#[path = "../../../../kernels/tests/cuda/compile.rs"]
mod compile;
mod drawing;
#[path = "../../../../kernels/tests/cuda/emulator.rs"]
pub(crate) mod emulator;
mod experts;
mod generating;
mod group;
#[path = "../../../examples/cuda_backend/models.rs"]
mod models;
mod refusals;
mod shared_device;
mod sharing;
#[cfg(all(target_os = "linux", feature = "cuda"))]
#[path = "../../../../kernels/tests/driver/stand_in.rs"]
pub(crate) mod stand_in;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod through_driver;

use std::ops::Range;
use std::time::Duration;

use keyway_kernels::cuda::Device;
use proptest::prelude::*;

use self::emulator::Emulator;
use self::models::{MODELS, VOCAB, Variant};
use super::invariance::{side_by_side, tokens};
use super::*;

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 128 };

/// What a `config.json` says of products in FP8.
const FP8: &str = r#""quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}"#;

fn load(variant: &Variant) -> LoadedModel {
    LoadedModel::synthetic(&variant.config()).unwrap()
}

/// `None` where there is no compiler.
fn emulated_with(variant: &Variant, quantize: Quantize, layout: KvLayout) -> Option<CudaBackend<Emulator>> {
    let emulator = Emulator::start(1)?;
    Some(load(variant).onto(emulator, quantize).unwrap().into_backend(layout).unwrap())
}

fn emulated(variant: &Variant) -> Option<CudaBackend<Emulator>> {
    emulated_with(variant, Quantize::None, LAYOUT)
}

fn whole(backend: &mut dyn Backend, tokens: &[u32]) -> Vec<f32> {
    let (mut pool, mut sequence) = (Pool::ascending(backend), Sequence::new(backend));
    sequence.run(backend, &mut pool, tokens)
}

/// The root of the mean squared difference, over the deviation of `exact`.
fn distance(found: &[f32], exact: &[f32]) -> f64 {
    let mean = exact.iter().map(|x| f64::from(*x)).sum::<f64>() / exact.len() as f64;
    let variance = exact.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
    let error = found.iter().zip(exact).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
    (error / variance).sqrt()
}

fn reference(variant: &Variant, prompt: &[u32]) -> Vec<u32> {
    bits(&whole(&mut emulated(variant).unwrap(), prompt))
}

fn prompt_of(len: u32, step: u32) -> Vec<u32> {
    tokens(len, step).iter().map(|token| token % VOCAB).collect()
}

/// How far logits and hidden states behind each piece of a prompt are from the CPU's.
fn off(
    backend: &mut CudaBackend<Emulator>,
    cpu: &mut CpuBackend,
    prompt: &[u32],
    pieces: &[Range<usize>],
) -> Vec<f64> {
    let mut pools = [Pool::ascending(backend), Pool::ascending(cpu)];
    let (mut here, mut there) = (Sequence::new(backend), Sequence::new(cpu));
    let behind = |piece: &Range<usize>| {
        let found = here.run(backend, &mut pools[0], &prompt[piece.clone()]);
        let exact = there.run(cpu, &mut pools[1], &prompt[piece.clone()]);
        let hidden = distance(backend.hidden().unwrap(), cpu.hidden().unwrap());
        distance(&found, &exact).max(hidden)
    };
    pieces.iter().map(behind).collect()
}

/// Some ten roundings to bf16 a layer, 2^-9 each, of two layers. Where a router is torn between two experts
/// rounding decides, so of models with experts one row in four may be further off.
#[track_caller]
fn assert_near(off: &[f64], torn: bool, what: &str) {
    let mut sorted = off.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = if torn { sorted.len() * 3 / 4 } else { sorted.len() - 1 };
    assert!(sorted[last] < 0.03 && off.iter().all(|off| off.is_finite()), "{what}: off by {off:.4?}");
}

/// A prompt in uneven pieces, across a border of chunks of 256 positions, then single tokens.
#[test]
fn logits_are_the_cpus_within_bf16() {
    let prompt = prompt_of(270, 7);
    let singles = (262..270).map(|at| at..at + 1);
    let pieces: Vec<Range<usize>> = [0..190, 190..262].into_iter().chain(singles).collect();
    for variant in MODELS {
        let Some(mut backend) = emulated(variant) else { return };
        let mut cpu = load(variant).into_backend(LAYOUT).unwrap();
        let off = off(&mut backend, &mut cpu, &prompt, &pieces);
        println!("{}: {off:.4?}", variant.name);
        assert_near(&off, variant.has_experts(), variant.name);
    }
}

/// Of weights in whole numbers logits are off by what the numbers lose, as on the CPU: much less than a wrong
/// token or position changes.
#[test]
fn whole_numbers_are_near() {
    let prompt = prompt_of(60, 11);
    for (quantize, most) in [(Quantize::Int8, 0.06), (Quantize::Int4, 0.5)] {
        for variant in &MODELS[2..] {
            // Weights so coarse decide differently who serves a token.
            let most = if variant.has_experts() { 1.6 * most } else { most };
            let Some(mut backend) = emulated_with(variant, quantize, LAYOUT) else { return };
            let exact = run_whole(&mut load(variant).into_backend(LAYOUT).unwrap(), &prompt);
            let found = whole(&mut backend, &prompt);
            let off = distance(&found, &exact);
            println!("{} {quantize}: {off}", variant.name);
            assert!(off < most, "{} {quantize}: off by {off}", variant.name);
            let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
            sequence.run(&mut backend, &mut pool, &prompt[..59]);
            let last = sequence.run(&mut backend, &mut pool, &prompt[59..]);
            assert_eq!(bits(&last), bits(&found), "{} {quantize}: the last token alone", variant.name);
        }
    }
}

/// Keys, values and latents in FP8: near the CPU's, other numbers with their own name and half the room, and
/// as independent of pieces, blocks and neighbours as bf16's.
#[test]
fn a_cache_in_fp8_is_near_and_no_bit_depends_on_the_batch() {
    let with_fp8 = |variant: &Variant, layout| {
        let model = load(variant).onto(Emulator::start(1)?, Quantize::None).unwrap();
        let bytes = model.info.kv_bytes_per_block_position;
        let model = model.with_fp8_kv();
        assert_eq!(model.info.kv_bytes_per_block_position * 2, bytes);
        assert!(model.info.numerics_id.ends_with("-kvfp8"), "{}", model.info.numerics_id);
        Some(model.into_backend(layout).unwrap())
    };
    let prompts: Vec<Vec<u32>> =
        [(150, 7), (140, 11), (90, 13)].map(|(len, step)| prompt_of(len, step)).into();
    for variant in [&MODELS[0], &MODELS[1], &MODELS[3], &MODELS[7]] {
        let Some(mut backend) = with_fp8(variant, LAYOUT) else { return };
        let cuts = [vec![130, 1, 1], vec![70], vec![1, 100, 1]];
        let mut pool = Pool::ascending(&backend);
        let beside = side_by_side(&mut backend, &mut pool, &prompts, &cuts);
        for (prompt, beside) in prompts.iter().zip(beside) {
            let other = KvLayout { block_size: 64, num_blocks: 8 };
            let alone = whole(&mut with_fp8(variant, other).unwrap(), prompt);
            assert_eq!(beside, bits(&alone), "{}", variant.name);
            let off = distance(&alone, &run_whole(&mut load(variant).into_backend(LAYOUT).unwrap(), prompt));
            let in_bf16 = distance(&alone, &whole(&mut emulated(variant).unwrap(), prompt));
            println!("{}: {off:.4}, from bf16 {in_bf16:.4}", variant.name);
            assert!(off < 0.2 && in_bf16 > 0.003, "{}: off by {off}, from bf16 {in_bf16}", variant.name);
        }
    }
}

/// Weights that are made on the device for benchmarks have the sizes of a model's that are copied there, and
/// compute.
#[test]
fn weights_made_on_the_device_have_the_sizes_of_a_models() {
    let plain = MODELS.iter().map(|variant| (variant, Quantize::None));
    for (variant, quantize) in plain.chain(MODELS[2..].iter().map(|variant| (variant, Quantize::Int4))) {
        let Some(emulator) = Emulator::start(1) else { return };
        let made = CudaModel::synthetic(&variant.config(), emulator, quantize).unwrap();
        let copied = load(variant).onto(Emulator::start(1).unwrap(), quantize).unwrap();
        assert_eq!(made.info.weight_bytes, copied.info.weight_bytes, "{} {quantize}", variant.name);
        let logits = whole(&mut made.into_backend(LAYOUT).unwrap(), &prompt_of(5, 7));
        assert!(logits.iter().all(|logit| logit.is_finite()), "{} {quantize}", variant.name);
    }
}

/// Each of two layers sees `window - 1` tokens back: so far a token changes the logits, and not one further.
#[test]
fn a_window_ends_where_it_ends() {
    let (variant, window) = (&MODELS[1], 41);
    let prompt = prompt_of(120, 7);
    let changed = |back: usize| {
        let mut other = prompt.clone();
        let token = &mut other[119 - back];
        *token = (*token + 1) % VOCAB;
        whole(&mut emulated(variant).unwrap(), &other)
    };
    let Some(mut backend) = emulated(variant) else { return };
    let expected = bits(&whole(&mut backend, &prompt));
    assert_ne!(bits(&changed(2 * (window - 1))), expected);
    assert_eq!(bits(&changed(2 * (window - 1) + 1)), expected);
}

/// Decode steps are filled up, recorded and replayed: contexts across borders of blocks and of a chunk,
/// batches that shrink and grow again.
#[test]
fn recorded_steps_do_not_change_a_bit() {
    const DECODED: usize = 26;
    for variant in [&MODELS[2], &MODELS[3], &MODELS[4], &MODELS[6]] {
        let prompts: Vec<Vec<u32>> = [270, 60, 75].map(|len| prompt_of(len, len % 13 + 2)).into();
        let Some(mut backend) = emulated(variant) else { return };
        let mut pool = Pool::ascending(&backend);
        let mut sequences = vec![Sequence::new(&backend); prompts.len()];
        for (sequence, prompt) in sequences.iter_mut().zip(&prompts) {
            sequence.run(&mut backend, &mut pool, &prompt[..prompt.len() - DECODED]);
        }
        let mut last = vec![Vec::new(); prompts.len()];
        // In the middle the first one waits.
        for step in 0..DECODED + 6 {
            if step == 20 {
                // A larger step than all before: buffers move, which recordings name.
                Sequence::new(&backend).run(&mut backend, &mut pool, &prompt_of(300, 3));
            }
            let now: Vec<usize> = (0..prompts.len())
                .filter(|i| (*i > 0 || !(8..14).contains(&step)) && sequences[*i].len() < prompts[*i].len())
                .collect();
            for i in &now {
                sequences[*i].grow(&mut pool, 1);
            }
            let tables: Vec<Vec<&[u32]>> = now.iter().map(|i| sequences[*i].tables()).collect();
            let chunk = |(i, tables): (&usize, _)| {
                let start = sequences[*i].len();
                Chunk { tokens: &prompts[*i][start..=start], start, tables, wants_logits: true }
            };
            let chunks: Vec<Chunk<'_>> =
                now.iter().zip(tables.iter().map(Vec::as_slice)).map(chunk).collect();
            let mut logits = Vec::new();
            backend.step(&chunks, &mut logits).unwrap();
            for (i, row) in now.into_iter().zip(logits.chunks(backend.vocab_size())) {
                last[i] = bits(row);
                sequences[i].advance(1);
            }
        }
        for (prompt, last) in prompts.iter().zip(last) {
            assert_eq!(last, reference(variant, prompt), "{}", variant.name);
        }
        assert!(backend.replayed > 10, "{}: {} steps were replayed", variant.name, backend.replayed);
    }
}

/// A window within one block, the rest of which nobody has written yet, while the block before was given
/// back.
#[test]
fn a_short_window_multiplies_nothing_by_rubbish() {
    let variant = &Variant {
        name: "MistralForCausalLM",
        more: r#""num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 5"#,
    };
    let prompt = prompt_of(26, 7);
    let Some(mut backend) = emulated(variant) else { return };
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.run(&mut backend, &mut pool, &prompt[..22]);
    let logits = sequence.run(&mut backend, &mut pool, &prompt[22..]);
    let exact = run_whole(&mut load(variant).into_backend(LAYOUT).unwrap(), &prompt);
    assert!(distance(&logits, &exact) < 0.03, "{}", distance(&logits, &exact));
    assert_eq!(bits(&logits), reference(variant, &prompt));
}

fn variant() -> impl Strategy<Value = &'static Variant> {
    (0..MODELS.len()).prop_map(|i| &MODELS[i])
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..VOCAB, 1..300)
}

/// Few pieces, since the emulator is slow, some of them single tokens.
fn cuts() -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![1..4_usize, 60..70_usize, 250..260_usize, Just(500)];
    (prop::collection::vec(length, 1..3), 90..120_usize).prop_map(|(mut cuts, last)| {
        cuts.push(last);
        cuts
    })
}

fn shuffled() -> impl Strategy<Value = Vec<u32>> {
    Just((0..LAYOUT.num_blocks as u32).collect::<Vec<_>>()).prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn neither_batch_nor_cuts_nor_block_numbers_change_a_bit(
        variant in variant(),
        prompts in prop::collection::vec(prompt(), 1..4),
        cuts in prop::collection::vec(cuts(), 3),
        order in shuffled(),
    ) {
        let Some(mut shared) = emulated(variant) else { return Ok(()) };
        let results = side_by_side(&mut shared, &mut Pool::new(order), &prompts, &cuts);
        for (prompt, result) in prompts.iter().zip(results) {
            prop_assert_eq!(result, reference(variant, prompt));
        }
    }

    #[test]
    fn a_cached_prefix_of_another_request_does_not_change_a_bit(
        variant in variant(),
        prefix_blocks in 1..17_usize,
        prefix in prop::collection::vec(0..VOCAB, 272),
        ends in prop::collection::vec(prop::collection::vec(0..VOCAB, 1..60), 2),
    ) {
        let prefix = &prefix[..prefix_blocks * 16];
        let [other, own] = [0, 1].map(|i| [prefix, &ends[i]].concat());
        let Some(mut backend) = emulated(variant) else { return Ok(()) };
        let (mut pool, mut first) = (Pool::ascending(&backend), Sequence::new(&backend));
        first.run(&mut backend, &mut pool, &other);
        let mut second = first.fork(prefix.len());
        let logits = second.run(&mut backend, &mut pool, &ends[1]);
        prop_assert_eq!(bits(&logits), reference(variant, &own));
    }

    /// One chunk of a step may read what another chunk of that step writes, whichever comes first.
    #[test]
    fn kv_written_in_the_same_step_does_not_change_a_bit(
        variant in variant(),
        prompt in prompt(),
        at in any::<prop::sample::Index>(),
        reader_first in any::<bool>(),
    ) {
        let at = at.index(prompt.len());
        let Some(mut backend) = emulated(variant) else { return Ok(()) };
        let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
        sequence.grow(&mut pool, prompt.len());
        let tables = sequence.tables();
        let chunk = |from: usize, to: usize| Chunk {
            tokens: &prompt[from..to],
            start: from,
            tables: &tables,
            wants_logits: to == prompt.len(),
        };
        let mut chunks = vec![chunk(0, at), chunk(at, prompt.len())];
        chunks.retain(|chunk| !chunk.tokens.is_empty());
        if reader_first {
            chunks.reverse();
        }
        let mut logits = Vec::new();
        backend.step(&chunks, &mut logits).unwrap();
        prop_assert_eq!(bits(&logits), reference(variant, &prompt));
    }
}

#[test]
fn the_block_size_does_not_change_a_bit() {
    let prompt = prompt_of(150, 11);
    for variant in MODELS {
        for block_size in [8, 64, 256] {
            let layout = KvLayout { block_size, num_blocks: 640 / block_size };
            let Some(mut backend) = emulated_with(variant, Quantize::None, layout) else { return };
            let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
            sequence.run(&mut backend, &mut pool, &prompt[..110]);
            let logits = sequence.run(&mut backend, &mut pool, &prompt[110..]);
            assert_eq!(bits(&logits), reference(variant, &prompt), "{} {block_size}", variant.name);
        }
    }
}
