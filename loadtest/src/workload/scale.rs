//! Shrinks a trace's lengths and keeps its block structure, so that a small machine can replay a large trace:
//! every block keeps its id and becomes `round(512 · scale)` tokens (or of what length the trace's blocks
//! are). Makes no text.

use crate::{
    trace::{BLOCK_TOKENS, Row},
    workload::unshared_id,
};

/// How much shorter prompts and answers become.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Tokens sent for one token of the trace.
    factor: f64,
    /// Tokens of one block of the trace.
    whole_tokens: u32,
    /// Tokens of one scaled block, at least 1.
    block_tokens: u32,
}

/// A piece of a prompt: the text of block `id`, cut to `tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Equal ids have equal text.
    pub id: u64,
    /// Length; less than a full block only at the prompt's end.
    pub tokens: u32,
}

impl Scale {
    /// A scale of `factor` > 0 for a trace with Mooncake's blocks.
    pub fn new(factor: f64) -> Self {
        Self::of(factor, BLOCK_TOKENS)
    }

    /// A scale of `factor` > 0 for a trace with blocks of `whole_tokens`.
    pub fn of(factor: f64, whole_tokens: u32) -> Self {
        let block_tokens = ((f64::from(whole_tokens) * factor).round() as u32).max(1);
        Self { factor, whole_tokens, block_tokens }
    }

    /// Tokens of a full scaled block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// The blocks of the trace's row number `index`, in order. Blocks whose id the trace left out get one of
    /// their own, which no other row shares.
    pub fn blocks<'a>(&self, index: usize, row: &'a Row) -> impl ExactSizeIterator<Item = Block> + use<'a> {
        let (scale, count) = (*self, row.input_tokens.div_ceil(self.whole_tokens));
        (0..count).map(move |i| Block {
            id: row.blocks.get(i as usize).copied().unwrap_or_else(|| unshared_id(index, i)),
            tokens: if i + 1 == count { scale.last_tokens(row) } else { scale.block_tokens },
        })
    }

    /// Tokens of the scaled prompt.
    pub fn prompt_tokens(&self, row: &Row) -> u64 {
        let full = u64::from(row.input_tokens.div_ceil(self.whole_tokens) - 1);
        full * u64::from(self.block_tokens) + u64::from(self.last_tokens(row))
    }

    /// Tokens to generate: at least 1.
    pub fn output_tokens(&self, row: &Row) -> u64 {
        ((f64::from(row.output_tokens) * self.factor).round() as u64).max(1)
    }

    fn last_tokens(&self, row: &Row) -> u32 {
        let rest = (row.input_tokens - 1) % self.whole_tokens + 1;
        ((f64::from(rest) * self.factor).round() as u32).clamp(1, self.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(input_tokens: u32, output_tokens: u32, ids: u64) -> Row {
        Row { timestamp_ms: 0, input_tokens, output_tokens, blocks: (0..ids).collect() }
    }

    #[test]
    fn lengths_of_a_scaled_row() {
        let scale = Scale::new(0.03125);
        assert_eq!(scale.block_tokens(), 16);
        let blocks: Vec<_> = scale.blocks(0, &row(1024 + 320, 500, 3)).collect();
        let tokens: Vec<_> = blocks.iter().map(|b| (b.id, b.tokens)).collect();
        assert_eq!(tokens, [(0, 16), (1, 16), (2, 10)]);
        assert_eq!(scale.prompt_tokens(&row(1024 + 320, 500, 3)), 42);
        assert_eq!(scale.output_tokens(&row(1, 500, 1)), 16);
        assert_eq!(scale.output_tokens(&row(1, 1, 1)), 1);
        assert_eq!(scale.prompt_tokens(&row(1, 0, 1)), 1);
    }

    #[test]
    fn blocks_without_an_id_are_shared_with_no_other_row() {
        let scale = Scale::new(1.0);
        let (a, b) = (row(1024, 1, 1), row(1024, 1, 1));
        let (a, b): (Vec<_>, Vec<_>) = (scale.blocks(1, &a).collect(), scale.blocks(2, &b).collect());
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1].id, b[1].id);
    }

    proptest! {
        #[test]
        fn the_blocks_sum_to_the_prompt_and_only_the_last_is_partial(tokens in 1u32..200_000, factor in 0.002f64..2.0) {
            let (scale, row) = (Scale::new(factor), row(tokens, 1, 0));
            let blocks: Vec<_> = scale.blocks(0, &row).collect();
            prop_assert_eq!(blocks.iter().map(|b| u64::from(b.tokens)).sum::<u64>(), scale.prompt_tokens(&row));
            for block in &blocks[..blocks.len() - 1] {
                prop_assert_eq!(block.tokens, scale.block_tokens());
            }
            prop_assert!((1..=scale.block_tokens()).contains(&blocks[blocks.len() - 1].tokens));
        }
    }
}
