//! A token's logits depend on the tokens before it and on nothing else, bit for bit, in every family.

use std::num::NonZeroUsize;

use keyway_kernels::compute::Compute;
use keyway_kernels::isa::Isa;
use proptest::prelude::*;

use super::*;

const VOCAB: u32 = 320;

/// Logits after the whole of `prompt`, alone and in one piece.
fn reference(family: usize, prompt: &[u32]) -> Vec<u32> {
    bits(&run_whole(&mut backend(&source(family)), prompt))
}

pub(super) fn tokens(len: u32, step: u32) -> Vec<u32> {
    (0..len).map(|i| i * step % VOCAB).collect()
}

/// Cuts of a prompt, as piece lengths in turn; the last piece takes what is left.
fn pieces(len: usize, cuts: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    let mut pieces = Vec::new();
    for cut in cuts.iter().cycle() {
        if start == len {
            break;
        }
        let end = (start + cut).min(len);
        pieces.push(start..end);
        start = end;
    }
    pieces
}

/// Runs all prompts side by side, each in its own pieces, one piece each per step; returns the logits after
/// each prompt's last token.
pub(super) fn side_by_side(
    backend: &mut dyn Backend,
    pool: &mut Pool,
    prompts: &[Vec<u32>],
    cuts: &[Vec<usize>],
) -> Vec<Vec<u32>> {
    let vocab = backend.vocab_size();
    let plans: Vec<_> = prompts.iter().zip(cuts).map(|(p, c)| pieces(p.len(), c)).collect();
    let mut sequences = vec![Sequence::new(backend); prompts.len()];
    let mut results = vec![Vec::new(); prompts.len()];
    for step in 0..plans.iter().map(Vec::len).max().unwrap_or(0) {
        let now: Vec<_> = (0..prompts.len()).filter_map(|i| Some((i, plans[i].get(step)?.clone()))).collect();
        for (i, piece) in &now {
            sequences[*i].grow(pool, piece.len());
        }
        let tables: Vec<Vec<&[u32]>> = now.iter().map(|(i, _)| sequences[*i].tables()).collect();
        let chunk = |((i, piece), tables): (&(usize, std::ops::Range<usize>), _)| Chunk {
            tokens: &prompts[*i][piece.clone()],
            start: piece.start,
            tables,
            wants_logits: piece.end == prompts[*i].len(),
        };
        let chunks: Vec<Chunk<'_>> = now.iter().zip(tables.iter().map(Vec::as_slice)).map(chunk).collect();
        let mut logits = Vec::new();
        backend.step(&chunks, &mut logits).unwrap();
        let owners: Vec<usize> =
            now.iter().filter(|(i, piece)| piece.end == prompts[*i].len()).map(|(i, _)| *i).collect();
        assert_eq!(logits.len(), owners.len() * vocab);
        for (owner, row) in owners.into_iter().zip(logits.chunks(vocab)) {
            results[owner] = bits(row);
        }
        for (i, piece) in now {
            sequences[i].advance(piece.len());
        }
    }
    results
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..VOCAB, 1..400)
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![Just(1), 1..20_usize, 250..260_usize, Just(500)], 1..4)
}

fn shuffled() -> impl Strategy<Value = Vec<u32>> {
    Just((0..NUM_BLOCKS as u32).collect::<Vec<_>>()).prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Nor do blocks given back behind a sliding window, which somebody else overwrites at once.
    #[test]
    fn neither_batch_nor_cuts_nor_block_numbers_change_a_bit(
        family in 0..=FAMILIES.len(),
        prompts in prop::collection::vec(prompt(), 1..5),
        cuts in prop::collection::vec(cuts(), 4),
        order in shuffled(),
    ) {
        let mut shared = backend(&source(family));
        let results = side_by_side(&mut shared, &mut Pool::new(order), &prompts, &cuts);
        for (prompt, result) in prompts.iter().zip(results) {
            prop_assert_eq!(result, reference(family, prompt));
        }
    }

    #[test]
    fn a_cached_prefix_of_another_request_does_not_change_a_bit(
        family in 0..=FAMILIES.len(),
        prefix_blocks in 1..20_usize,
        prefix in prop::collection::vec(0..VOCAB, 320),
        other_end in prompt(),
        own_end in prompt(),
    ) {
        let prefix = &prefix[..prefix_blocks * 16];
        let (other, own) = ([prefix, &other_end].concat(), [prefix, &own_end].concat());
        let mut backend = backend(&source(family));
        let (mut pool, mut first) = (Pool::ascending(&backend), Sequence::new(&backend));
        first.run(&mut backend, &mut pool, &other);
        let mut second = first.fork(prefix.len());
        let logits = second.run(&mut backend, &mut pool, &own_end);
        prop_assert_eq!(bits(&logits), reference(family, &own));
    }

    /// One chunk of a step may read what another chunk of that step writes, whichever comes first.
    #[test]
    fn kv_written_in_the_same_step_does_not_change_a_bit(
        family in 0..=FAMILIES.len(),
        prompt in prompt(),
        at in any::<prop::sample::Index>(),
        cached in any::<prop::sample::Index>(),
        reader_first in any::<bool>(),
    ) {
        let (at, mut backend) = (at.index(prompt.len()), backend(&source(family)));
        let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
        let cached = cached.index(at + 1);
        if cached > 0 {
            sequence.run(&mut backend, &mut pool, &prompt[..cached]);
        }
        sequence.grow(&mut pool, prompt.len() - cached);
        let tables = sequence.tables();
        let chunk = |from: usize, to: usize| Chunk {
            tokens: &prompt[from..to],
            start: from,
            tables: &tables,
            wants_logits: to == prompt.len(),
        };
        let mut chunks = vec![chunk(cached, at), chunk(at, prompt.len())];
        chunks.retain(|chunk| !chunk.tokens.is_empty());
        if reader_first {
            chunks.reverse();
        }
        let mut logits = Vec::new();
        backend.step(&chunks, &mut logits).unwrap();
        prop_assert_eq!(bits(&logits), reference(family, &prompt));
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let prompt = tokens(300, 7);
    for (family, source) in sources().enumerate() {
        let expected = reference(family, &prompt);
        for isa in Isa::available() {
            let mut backend = backend(&source).with_isa(isa);
            assert_eq!(bits(&run_whole(&mut backend, &prompt)), expected, "{source} on {}", isa.name());
        }
    }
}

/// A long piece of one prompt, which threads share, then a batch of single tokens.
#[test]
fn every_number_of_threads_gives_the_same_bits() {
    let prompts: Vec<Vec<u32>> = [7, 11, 13, 17].map(|step| tokens(384, step)).into();
    let cuts = vec![vec![380, 1]; prompts.len()];
    for (family, source) in sources().enumerate() {
        let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| reference(family, prompt)).collect();
        for threads in 1..=4 {
            let compute = Compute::new(NonZeroUsize::new(threads).unwrap());
            let mut backend = backend(&source).with_compute(compute);
            let mut pool = Pool::ascending(&backend);
            let results = side_by_side(&mut backend, &mut pool, &prompts, &cuts);
            assert_eq!(results, expected, "{source} on {threads} threads");
        }
    }
}

#[test]
fn the_block_size_does_not_change_a_bit() {
    let prompt = tokens(190, 11);
    for (family, source) in sources().enumerate() {
        let expected = reference(family, &prompt);
        for block_size in [32, 48, 256] {
            let mut backend = backend_with(&source, KvLayout { block_size, num_blocks: 40 });
            let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
            sequence.run(&mut backend, &mut pool, &prompt[..150]);
            let logits = sequence.run(&mut backend, &mut pool, &prompt[150..]);
            assert_eq!(bits(&logits), expected, "{source} in blocks of {block_size}");
        }
    }
}

#[test]
fn the_built_in_model_does_not_fall_into_one_token() {
    for prompt in ["Hello", "The quick brown fox jumps over the lazy dog. ", "1, 2, 3, "] {
        let mut ids: Vec<u32> = prompt.bytes().map(u32::from).collect();
        let mut backend = backend(&ModelSource::Random);
        let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
        let mut logits = sequence.run(&mut backend, &mut pool, &ids);
        for _ in 0..64 {
            // As a sampler that suppresses everything unprintable would choose.
            let next = 32 + keyway_kernels::scalar::argmax(&logits[32..127]) as u32;
            logits = sequence.run(&mut backend, &mut pool, &[next]);
            ids.push(next);
        }
        let last: std::collections::BTreeSet<u32> = ids[ids.len() - 32..].iter().copied().collect();
        assert!(last.len() >= 8, "after {prompt:?}: {last:?}");
    }
}

/// The promise behind the numerics id: these bits change only together with `NUMERICS_VERSION`.
#[test]
fn the_built_in_models_bits_are_pinned() {
    let prompt = tokens(300, 13);
    let bytes: Vec<u8> = reference(FAMILIES.len(), &prompt).into_iter().flat_map(u32::to_le_bytes).collect();
    let fingerprint = xxhash_rust::xxh3::xxh3_64(&bytes);
    assert_eq!((keyway_kernels::NUMERICS_VERSION, fingerprint), (3, PINNED), "{fingerprint:#x}");
}

const PINNED: u64 = 0x1b51bcf4543afc16;
