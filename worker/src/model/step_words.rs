//! A rank's part of a step in words, for ranks in other processes: every chunk's head, tokens and block
//! tables. What comes from elsewhere is checked; moving it is `joint.rs`' business.

use crate::engine::backend::{Chunk, NO_BLOCK};

/// Chunks as words, and how many rows they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StepWords {
    pub(crate) words: Vec<u32>,
    /// Tokens of all chunks, each a row of the step.
    pub(crate) rows: usize,
    /// Chunks whose logits are wanted.
    pub(crate) wanted: usize,
}

/// What a step may ask of a backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) groups: usize,
    pub(super) block_size: usize,
    pub(super) num_blocks: usize,
    pub(super) vocab_size: usize,
    /// Positions of a sequence at most, by the model's configuration.
    pub(super) positions: usize,
}

/// A chunk without its tables.
#[derive(Debug)]
pub(super) struct Head<'a> {
    start: usize,
    tokens: &'a [u32],
    wants_logits: bool,
}

impl StepWords {
    /// Words before a chunk's tokens and tables, for `groups` cache groups: start, tokens, whether logits are
    /// wanted, and each table's length.
    const fn head(groups: usize) -> usize {
        3 + groups
    }

    /// The words that a step of so many tokens and chunks, in tables of so many blocks, takes at most.
    pub(crate) fn most(tokens: usize, chunks: usize, groups: usize, blocks: usize) -> usize {
        tokens + chunks * (Self::head(groups) + groups * blocks)
    }

    pub(crate) fn write(chunks: &[Chunk<'_>]) -> Self {
        let mut step = Self::default();
        for chunk in chunks {
            step.words.extend([chunk.start as u32, chunk.tokens.len() as u32, chunk.wants_logits.into()]);
            step.words.extend(chunk.tables.iter().map(|table| table.len() as u32));
            step.words.extend(chunk.tokens);
            step.words.extend(chunk.tables.iter().copied().flatten());
            step.rows += chunk.tokens.len();
            step.wanted += usize::from(chunk.wants_logits);
        }
        step
    }
}

/// The chunks' heads, and their tables one after the other; `None` if they ask for what a backend of these
/// `limits` does not have.
pub(super) fn read<'a>(words: &'a [u32], limits: &Limits) -> Option<(Vec<Head<'a>>, Vec<&'a [u32]>)> {
    let (mut heads, mut tables, mut rest) = (Vec::new(), Vec::new(), words);
    while !rest.is_empty() {
        let (head, behind) = rest.split_at_checked(StepWords::head(limits.groups))?;
        let [start, count, wants_logits, lengths @ ..] = head else { return None };
        let (tokens, behind) = behind.split_at_checked(*count as usize)?;
        rest = behind;
        let end = *start as usize + tokens.len();
        let known = tokens.iter().all(|token| (*token as usize) < limits.vocab_size);
        if tokens.is_empty() || !known || end > limits.positions {
            return None;
        }
        for length in lengths {
            let (table, behind) = rest.split_at_checked(*length as usize)?;
            rest = behind;
            let is_block = |block: &u32| *block == NO_BLOCK || (*block as usize) < limits.num_blocks;
            if table.len() * limits.block_size < end || !table.iter().all(is_block) {
                return None;
            }
            tables.push(table);
        }
        heads.push(Head { start: *start as usize, tokens, wants_logits: *wants_logits != 0 });
    }
    Some((heads, tables))
}

/// As a backend takes them.
pub(super) fn chunks<'a>(heads: &'a [Head<'a>], tables: &'a [&'a [u32]], groups: usize) -> Vec<Chunk<'a>> {
    let chunk = |(head, tables): (&Head<'a>, &'a [&'a [u32]])| Chunk {
        tokens: head.tokens,
        start: head.start,
        tables,
        wants_logits: head.wants_logits,
    };
    heads.iter().zip(tables.chunks_exact(groups)).map(chunk).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits =
        Limits { groups: 2, block_size: 16, num_blocks: 40, vocab_size: 100, positions: 640 };

    fn chunk() -> impl Strategy<Value = (usize, Vec<u32>, Vec<Vec<u32>>, bool)> {
        (0usize..600, prop::collection::vec(0u32..100, 1..40), any::<bool>()).prop_flat_map(
            |(start, tokens, wants)| {
                let blocks = (start + tokens.len()).div_ceil(16);
                let block = prop_oneof![9 => 0u32..40, 1 => Just(NO_BLOCK)];
                let table = prop::collection::vec(block, blocks..blocks + 3);
                (Just(start), Just(tokens), prop::collection::vec(table, 2), Just(wants))
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(parts in prop::collection::vec(chunk(), 0..6)) {
            let tables: Vec<Vec<&[u32]>> =
                parts.iter().map(|(_, _, tables, _)| tables.iter().map(Vec::as_slice).collect()).collect();
            let mut written = Vec::new();
            for ((start, tokens, _, wants), tables) in parts.iter().zip(&tables) {
                written.push(Chunk { tokens, start: *start, tables, wants_logits: *wants });
            }
            let step = StepWords::write(&written);
            let (heads, found) = read(&step.words, &LIMITS).unwrap();
            let again = chunks(&heads, &found, 2);
            prop_assert_eq!(format!("{written:?}"), format!("{again:?}"));
            prop_assert_eq!(step.rows, parts.iter().map(|part| part.1.len()).sum::<usize>());
            let most = StepWords::most(step.rows, parts.len(), 2, 43);
            prop_assert!(step.words.len() <= most);
        }

        #[test]
        fn any_words_are_read_or_refused(words in prop::collection::vec(0u32..60, 0..80)) {
            if let Some((heads, tables)) = read(&words, &LIMITS) {
                for chunk in chunks(&heads, &tables, 2) {
                    prop_assert!(!chunk.tokens.is_empty());
                    for table in chunk.tables {
                        prop_assert!(table.len() * 16 >= chunk.start + chunk.tokens.len());
                        prop_assert!(table.iter().all(|block| *block < 40));
                    }
                }
            }
        }
    }

    #[test]
    fn what_a_backend_does_not_have_is_refused() {
        let good = [0, 2, 1, 1, 1, 7, 8, 3, 4];
        assert!(read(&good, &LIMITS).is_some());
        // A position too far, no tokens, tables too short, an unknown token, an unknown block, cut.
        for (at, word) in [(0, 639), (1, 0), (3, 0), (5, 100), (7, 40), (1, u32::MAX)] {
            let mut bad = good;
            bad[at] = word;
            assert!(read(&bad, &LIMITS).is_none(), "word {at} is {word}");
        }
        assert!(read(&good[..8], &LIMITS).is_none());
    }
}
