//! A token's logits depend on the tokens before it and on nothing else, bit for bit.

use keyway_kernels::isa::Isa;
use proptest::prelude::*;

use super::*;

const VOCAB: u32 = 320;
const NUM_BLOCKS: usize = 128;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn source(family: usize) -> ModelSource {
    FAMILIES.get(family).map_or(ModelSource::Builtin, |family| ModelSource::Dir(family_dir(family)))
}

/// Logits after the whole of `prompt`, alone and in one piece.
fn reference(family: usize, prompt: &[u32]) -> Vec<u32> {
    let blocks: Vec<u32> = (0..prompt.len().div_ceil(16) as u32).collect();
    bits(&run(&mut backend(&source(family), NUM_BLOCKS), prompt, 0, &blocks))
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
fn side_by_side(
    backend: &mut CpuBackend,
    prompts: &[Vec<u32>],
    cuts: &[Vec<usize>],
    tables: &[Vec<u32>],
) -> Vec<Vec<u32>> {
    let vocab = backend.vocab_size();
    let tables: Vec<[&[u32]; 1]> = tables.iter().map(|table| [table.as_slice()]).collect();
    let plans: Vec<_> = prompts.iter().zip(cuts).map(|(p, c)| pieces(p.len(), c)).collect();
    let mut results = vec![Vec::new(); prompts.len()];
    for step in 0..plans.iter().map(Vec::len).max().unwrap_or(0) {
        let (mut chunks, mut owners) = (Vec::new(), Vec::new());
        for (i, plan) in plans.iter().enumerate() {
            let Some(piece) = plan.get(step) else {
                continue;
            };
            let wants_logits = piece.end == prompts[i].len();
            if wants_logits {
                owners.push(i);
            }
            let tokens = &prompts[i][piece.clone()];
            chunks.push(Chunk { tokens, start: piece.start, tables: &tables[i], wants_logits });
        }
        let mut logits = Vec::new();
        backend.step(&chunks, &mut logits);
        assert_eq!(logits.len(), owners.len() * vocab);
        for (owner, row) in owners.into_iter().zip(logits.chunks(vocab)) {
            results[owner] = bits(row);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn neither_batch_nor_cuts_nor_block_numbers_change_a_bit(
        family in 0..=FAMILIES.len(),
        prompts in prop::collection::vec(prompt(), 1..5),
        cuts in prop::collection::vec(cuts(), 4),
        order in Just((0..NUM_BLOCKS as u32).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut free = order.into_iter();
        let tables: Vec<Vec<u32>> =
            prompts.iter().map(|p| free.by_ref().take(p.len().div_ceil(16)).collect()).collect();
        let mut shared = backend(&source(family), NUM_BLOCKS);
        let results = side_by_side(&mut shared, &prompts, &cuts, &tables);
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
        let mut backend = backend(&source(family), NUM_BLOCKS);
        let other_blocks: Vec<u32> = (40..40 + other.len().div_ceil(16) as u32).collect();
        run(&mut backend, &other, 0, &other_blocks);
        let own_blocks: Vec<u32> =
            [&other_blocks[..prefix_blocks], &(80..80 + own_end.len().div_ceil(16) as u32).collect::<Vec<_>>()]
                .concat();
        let logits = run(&mut backend, &own_end, prefix.len(), &own_blocks);
        prop_assert_eq!(bits(&logits), reference(family, &own));
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let prompt: Vec<u32> = (0..300).map(|i| i * 7 % VOCAB).collect();
    for family in 0..=FAMILIES.len() {
        let expected = reference(family, &prompt);
        for isa in Isa::available() {
            let blocks: Vec<u32> = (0..20).collect();
            let mut backend = backend(&source(family), NUM_BLOCKS).with_isa(isa);
            assert_eq!(bits(&run(&mut backend, &prompt, 0, &blocks)), expected, "{}", isa.name());
        }
    }
}

#[test]
fn the_block_size_does_not_change_a_bit() {
    let prompt: Vec<u32> = (0..190).map(|i| i * 11 % VOCAB).collect();
    let layout = KvLayout { block_size: 48, num_blocks: 4 };
    let mut large = LoadedModel::load(&ModelSource::Builtin).unwrap().into_backend(layout).unwrap();
    let logits = run(&mut large, &prompt, 0, &[2, 0, 3, 1]);
    assert_eq!(bits(&logits), reference(FAMILIES.len(), &prompt));
}

#[test]
fn the_built_in_model_does_not_fall_into_one_token() {
    let blocks: Vec<u32> = (0..NUM_BLOCKS as u32).collect();
    for prompt in ["Hello", "The quick brown fox jumps over the lazy dog. ", "1, 2, 3, "] {
        let mut ids: Vec<u32> = prompt.bytes().map(u32::from).collect();
        let mut backend = backend(&ModelSource::Builtin, NUM_BLOCKS);
        let mut logits = run(&mut backend, &ids, 0, &blocks);
        for _ in 0..64 {
            // As a sampler that suppresses everything unprintable would choose.
            let next = 32 + keyway_kernels::scalar::argmax(&logits[32..127]) as u32;
            logits = run(&mut backend, &[next], ids.len(), &blocks);
            ids.push(next);
        }
        let last: std::collections::BTreeSet<u32> = ids[ids.len() - 32..].iter().copied().collect();
        assert!(last.len() >= 8, "after {prompt:?}: {last:?}");
    }
}

/// The promise behind the numerics id: these bits change only together with `NUMERICS_VERSION`.
#[test]
fn the_built_in_models_bits_are_pinned() {
    let prompt: Vec<u32> = (0..300).map(|i| i * 13 % VOCAB).collect();
    let bytes: Vec<u8> = reference(FAMILIES.len(), &prompt).into_iter().flat_map(u32::to_le_bytes).collect();
    let fingerprint = xxhash_rust::xxh3::xxh3_64(&bytes);
    assert_eq!((keyway_kernels::NUMERICS_VERSION, fingerprint), (1, PINNED), "{fingerprint:#x}");
}

const PINNED: u64 = 0x1b51bcf4543afc16;
