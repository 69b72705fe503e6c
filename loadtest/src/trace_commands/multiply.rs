//! A trace made from another one: what prompts share and what is their own grow by factors of their own, and
//! what is shared is split over several equal trees (the multipliers that AIPerf's trace synthesis has).
//! Decides about no times.

use std::collections::HashMap;

use crate::{
    args::trace::Multipliers,
    random::{Purpose, Rng, splitmix},
    workload::{Ask, scale::Block},
};

/// Which blocks several prompts of a trace have, and by how much everything grows.
#[derive(Debug)]
pub(super) struct Multiplier {
    by: Multipliers,
    seed: u64,
    /// Prompts that have the block.
    uses: HashMap<u64, u32>,
}

impl Multiplier {
    /// Counts the blocks of all `prompts`.
    pub(super) fn new(by: Multipliers, seed: u64, prompts: impl Iterator<Item = Ask>) -> Self {
        let mut uses = HashMap::new();
        for block in prompts.flat_map(|ask| ask.blocks) {
            *uses.entry(block.id).or_insert(0) += 1;
        }
        Self { by, seed, uses }
    }

    /// Row number `row` of the new trace, from the old one's. A block that grows keeps its id, so that equal
    /// prefixes stay equal; which of the trees it belongs to is drawn from the seed and `row`.
    pub(super) fn grow(&self, row: usize, mut ask: Ask) -> Ask {
        let tree = Rng::at(self.seed, Purpose::Group, row as u64).below(self.by.prefix_copies as usize);
        let is_own = |block: &Block| self.uses.get(&block.id).is_none_or(|&prompts| prompts < 2);
        for block in &mut ask.blocks {
            let factor =
                if is_own(block) { self.by.prompt_len_multiplier } else { self.by.prefix_len_multiplier };
            block.tokens = ((f64::from(block.tokens) * factor).round() as u32).max(1);
            if tree > 0 {
                block.id = splitmix(block.id ^ splitmix(tree as u64));
            }
        }
        ask
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(ids: &[u64]) -> Ask {
        let blocks = ids.iter().map(|&id| Block { id, tokens: 16 }).collect();
        Ask { blocks, output_tokens: 1, said: None, begins_history: false }
    }

    fn by(prefix: f64, prompt: f64, copies: u32) -> Multipliers {
        Multipliers { prefix_len_multiplier: prefix, prompt_len_multiplier: prompt, prefix_copies: copies }
    }

    #[test]
    fn what_is_shared_and_what_is_not_grow_by_their_own_factors() {
        let prompts = [ask(&[1, 2, 3]), ask(&[1, 2, 4]), ask(&[1, 5])];
        let multiplier = Multiplier::new(by(2.0, 0.5, 1), 7, prompts.clone().into_iter());
        let lengths = |row: usize| -> Vec<u32> {
            multiplier.grow(row, prompts[row].clone()).blocks.iter().map(|block| block.tokens).collect()
        };
        assert_eq!((lengths(0), lengths(2)), (vec![32, 32, 8], vec![32, 8]));
        assert_eq!(multiplier.grow(1, prompts[1].clone()).blocks[0].id, 1);
    }

    proptest! {
        /// Rows of one tree share what they shared, rows of two trees nothing; every tree gets its part.
        #[test]
        fn trees_are_equal_and_apart(seed in any::<u64>(), copies in 1u32..6) {
            let prompts: Vec<Ask> = (0..200).map(|row| ask(&[1, 2 + row % 3, 100 + row])).collect();
            let multiplier = Multiplier::new(by(1.0, 1.0, copies), seed, prompts.clone().into_iter());
            let grown: Vec<Ask> =
                prompts.iter().enumerate().map(|(row, ask)| multiplier.grow(row, ask.clone())).collect();
            let mut trees: Vec<u64> = grown.iter().map(|ask| ask.blocks[0].id).collect();
            for (a, was_a) in grown.iter().zip(&prompts) {
                for (b, was_b) in grown.iter().zip(&prompts) {
                    let one_tree = a.blocks[0].id == b.blocks[0].id;
                    let shared = was_a.blocks[1].id == was_b.blocks[1].id;
                    prop_assert_eq!(a.blocks[1].id == b.blocks[1].id, one_tree && shared);
                }
            }
            trees.sort_unstable();
            trees.dedup();
            prop_assert_eq!(trees.len(), copies as usize);
        }
    }
}
