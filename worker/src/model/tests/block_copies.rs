//! KV that was copied from another backend's blocks is the KV that would be computed: the logits behind it
//! are the same, bit for bit, in every family, wherever the prompt is cut.

use super::*;
use crate::engine::backend::{CopyError, NO_BLOCK};

const PROMPT: u32 = 150;

/// Copies what `to` needs of the first `len` tokens from `from`.
fn copy(from: (&CpuBackend, &Sequence), to: (&mut CpuBackend, &Sequence)) -> usize {
    let layout = from.0.block_layout().unwrap();
    let mut bytes = Vec::new();
    let mut copied = 0;
    for (group, (own, others)) in to.1.tables().iter().zip(from.1.tables()).enumerate() {
        for (own, other) in own.iter().zip(others).filter(|(own, _)| **own != NO_BLOCK) {
            bytes.clear();
            from.0.copy_block(group, *other, &mut bytes).unwrap();
            assert_eq!(bytes.len(), layout.block_bytes[group]);
            to.0.write_block(group, *own, &bytes).unwrap();
            copied += 1;
        }
    }
    copied
}

/// The logits behind a prompt whose first `blocks` blocks another backend has computed.
fn behind_copies(
    from: (&CpuBackend, &Sequence),
    to: &mut CpuBackend,
    prompt: &[u32],
    blocks: usize,
) -> Vec<u32> {
    let block_size = to.block_size();
    // Not the numbers that the blocks have at the other backend.
    let mut pool = Pool::new((0..to.num_blocks() as u32).rev().collect());
    let sequence = Sequence::with_blocks(to, &mut pool, blocks);
    let copied = copy(from, (to, &sequence));
    assert!(copied > 0, "the next token reads something");
    let mut sequence = sequence;
    bits(&sequence.run(to, &mut pool, &prompt[blocks * block_size..]))
}

#[test]
fn logits_behind_copied_blocks_are_those_behind_computed_ones() {
    let prompt = invariance::tokens(PROMPT, 7);
    for source in sources() {
        let layout = KvLayout { block_size: 16, num_blocks: 64 };
        let mut from = backend_with(&source, layout);
        // Nothing is given back, so that every cut has its windows.
        let mut pool = Pool::ascending(&from);
        let mut whole = Sequence::keeping_all(&from);
        let expected = bits(&whole.run(&mut from, &mut pool, &prompt));
        let mut to = backend_with(&source, layout);
        for blocks in 1..=prompt.len() / 16 {
            let found = behind_copies((&from, &whole), &mut to, &prompt, blocks);
            assert_eq!(found, expected, "{source} from block {blocks} on");
        }
    }
}

#[test]
fn quantised_weights_and_other_block_sizes_do_the_same() {
    let prompt = invariance::tokens(PROMPT, 11);
    for (family, quantize) in
        [(3, Quantize::Int8), (3, Quantize::Int4), (6, Quantize::Int8), (9, Quantize::Int8)]
    {
        let backend = || {
            let model = LoadedModel::load_quantized(&source(family), quantize).unwrap();
            model.into_backend(KvLayout { block_size: 32, num_blocks: 40 }).unwrap()
        };
        let (mut from, mut to) = (backend(), backend());
        let mut pool = Pool::ascending(&from);
        let mut whole = Sequence::keeping_all(&from);
        let expected = bits(&whole.run(&mut from, &mut pool, &prompt));
        for blocks in 1..=prompt.len() / 32 {
            assert_eq!(
                behind_copies((&from, &whole), &mut to, &prompt, blocks),
                expected,
                "{family} {blocks}"
            );
        }
    }
}

/// One bit of a block is enough to change what is computed behind it: the copies are what is read.
#[test]
fn a_flipped_bit_shows() {
    let prompt = invariance::tokens(40, 7);
    let mut from = backend(&ModelSource::Random);
    let mut pool = Pool::ascending(&from);
    let mut whole = Sequence::keeping_all(&from);
    let expected = bits(&whole.run(&mut from, &mut pool, &prompt));
    let mut to = backend(&ModelSource::Random);
    let mut bytes = Vec::new();
    from.copy_block(0, whole.tables()[0][0], &mut bytes).unwrap();
    // The sign of a key of the first position.
    bytes[3] ^= 0x80;
    from.write_block(0, whole.tables()[0][0], &bytes).unwrap();
    assert_ne!(behind_copies((&from, &whole), &mut to, &prompt, 2), expected);
}

#[test]
fn what_has_another_size_is_refused_and_layouts_tell_models_apart() {
    let mut backends: Vec<CpuBackend> = sources().map(|source| backend(&source)).collect();
    for backend in &mut backends {
        let layout = backend.block_layout().unwrap();
        for (group, bytes) in layout.block_bytes.iter().enumerate() {
            for wrong in [0, bytes - 1, bytes + 1] {
                assert_eq!(backend.write_block(group, 0, &vec![0; wrong]), Err(CopyError));
            }
        }
    }
    let words: std::collections::BTreeSet<String> =
        backends.iter().map(|backend| backend.block_layout().unwrap().words).collect();
    assert!(words.len() > 3, "{words:?}");
    let larger = backend_with(&ModelSource::Random, KvLayout { block_size: 32, num_blocks: 8 });
    assert!(!words.contains(&larger.block_layout().unwrap().words));
}
