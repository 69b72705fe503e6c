//! Prompts of a trace as the engine and the router see them: lengths and chains of block hashes, no text.
//! Equal text in equal places gives equal hashes, whatever the sizes of the trace's blocks and of the
//! cache's.

use keyway_wire::block_hash::{BlockHash, Chain, HashKey, TextChain};

use crate::{
    trace::Row,
    workload::scale::{Block, Scale},
};

/// Blocks in a row whose hashes are neighbours.
const ROW: usize = 32;

/// Hashes of the full blocks of `block_tokens` in a prompt of trace blocks. With another key nothing is
/// shared.
///
/// The lower half of a hash says the row of 32 blocks, by its first one, and the place in it, so that a table
/// by the lower bits has them side by side: a simulation of many engines waits for memory more than for
/// anything else. The upper half tells apart the prompts that part within the row.
pub(super) fn chain(scale: Scale, index: usize, row: &Row, key: u64, block_tokens: u32) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(key), b"");
    let mut hashes = Vec::with_capacity((scale.prompt_tokens(row) / u64::from(block_tokens)) as usize);
    let mut first = 0;
    each_block(scale, index, row, block_tokens, |block| {
        let (BlockHash(own), place) = (chain.push(block), hashes.len() % ROW);
        if place == 0 {
            first = own;
        }
        hashes.push(BlockHash(own & !0xffff_ffff | u64::from((first as u32) << 5) | place as u64));
    });
    hashes
}

/// Names of the same prompt's spans, as a gateway has them that knows text alone, cut into blocks of so many
/// tokens.
pub(super) fn spans(scale: Scale, index: usize, row: &Row, key: u64, block_tokens: u32) -> Vec<BlockHash> {
    let (mut chain, mut names) = (TextChain::new(HashKey::new(key), b""), Vec::new());
    each_block(scale, index, row, block_tokens, |block| names.extend(chain.push(block)));
    names
}

/// Says of each full block what it is.
fn each_block(scale: Scale, index: usize, row: &Row, block_tokens: u32, mut says: impl FnMut(&[u8])) {
    let (mut piece, mut missing) = (Vec::with_capacity(32), block_tokens);
    for Block { id, tokens } in scale.blocks(index, row) {
        let mut from = 0;
        while from < tokens {
            let taken = missing.min(tokens - from);
            piece.extend_from_slice(&id.to_le_bytes());
            piece.extend_from_slice(&from.to_le_bytes());
            (from, missing) = (from + taken, missing - taken);
            if missing == 0 {
                says(&piece);
                piece.clear();
                missing = block_tokens;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::spans::Spans;
    use proptest::prelude::*;

    use super::*;
    use crate::workload::prompt::PromptText;

    fn row(blocks: Vec<u64>, tail: u32) -> Row {
        let input_tokens = (blocks.len() as u32 - 1) * 512 + tail;
        Row { timestamp_ms: 0, input_tokens, output_tokens: 1, blocks: blocks.into() }
    }

    fn shared<T: PartialEq>(a: &[T], b: &[T]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    /// The text that the tester would send, at four bytes a token.
    fn text(scale: Scale, row: &Row) -> Vec<u8> {
        let mut out = Vec::new();
        for block in scale.blocks(0, row) {
            PromptText::new(1).append(block.id, block.tokens as usize * 4, &mut out);
        }
        out
    }

    proptest! {
        #[test]
        fn chains_share_what_the_texts_share(
            a in prop::collection::vec(0u64..3, 1..5),
            b in prop::collection::vec(0u64..3, 1..5),
            tails in (1u32..=512, 1u32..=512),
            factor in prop_oneof![Just(0.125), Just(0.03125), Just(0.05), Just(0.09)],
            block_tokens in prop_oneof![Just(16u32), Just(10), Just(64)],
        ) {
            let scale = Scale::new(factor);
            let (a, b) = (row(a, tails.0), row(b, tails.1));
            let (hashes_a, hashes_b) = (chain(scale, 0, &a, 0, block_tokens), chain(scale, 0, &b, 0, block_tokens));
            let (text_a, text_b) = (text(scale, &a), text(scale, &b));
            prop_assert_eq!(hashes_a.len(), text_a.len() / 4 / block_tokens as usize);
            let (chunks_a, chunks_b): (Vec<_>, Vec<_>) = {
                let size = block_tokens as usize * 4;
                (text_a.chunks_exact(size).collect(), text_b.chunks_exact(size).collect())
            };
            prop_assert_eq!(shared(&hashes_a, &hashes_b), shared(&chunks_a, &chunks_b));
            let [spans_a, spans_b] = [&a, &b].map(|row| spans(scale, 0, row, 0, block_tokens));
            prop_assert_eq!(spans_a.len(), Spans::OfText.names(chunks_a.len()));
            let alike = Spans::OfText.names(shared(&chunks_a, &chunks_b));
            prop_assert_eq!(shared(&spans_a, &spans_b), alike);
        }
    }

    #[test]
    fn copies_share_nothing() {
        let row = row(vec![1, 2, 3], 512);
        let of = |copy| chain(Scale::new(1.0), 0, &row, copy, 16);
        assert_eq!((of(0).len(), shared(&of(0), &of(1))), (96, 0));
    }
}
