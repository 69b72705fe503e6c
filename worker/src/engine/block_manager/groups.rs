//! Which positions each cache group keeps, and how many blocks a sequence therefore needs. Arithmetic only.

use crate::engine::backend::CacheGroup;

/// The groups of a backend, as far as blocks go.
///
/// The first one is the *anchor*: it keeps every position (by its kind, or by decree where all groups are
/// windows), and its blocks name the cached prefixes.
#[derive(Debug, Clone)]
pub(crate) struct GroupRules {
    block_size: usize,
    /// Of each group the number of positions a token reads, itself included; `None`: all before it.
    windows: Vec<Option<usize>>,
}

impl GroupRules {
    pub(crate) fn new(groups: &[CacheGroup], block_size: usize) -> Self {
        let window = |(i, group): (usize, &CacheGroup)| match *group {
            CacheGroup::SlidingWindow { window } if i > 0 => Some(window),
            _ => None,
        };
        Self { block_size, windows: groups.iter().enumerate().map(window).collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.windows.len()
    }

    /// Whether group `g` gives blocks back.
    pub(super) fn slides(&self, g: usize) -> bool {
        self.windows[g].is_some()
    }

    /// The first block that the token at `position` reads in group `g`.
    pub(super) fn first_block(&self, g: usize, position: usize) -> usize {
        self.windows[g].map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
    }

    /// Blocks with which a sequence that grows to `len` positions, `chunk` of them at once at most, can
    /// always be finished when it is alone: its largest need at any time.
    pub(crate) fn blocks_needed(&self, len: usize, chunk: usize) -> usize {
        let all = len.div_ceil(self.block_size);
        let need = |window: &Option<usize>| match window {
            None => all,
            // The positions before the chunk that are still read, and the chunk: at worst one block more than
            // they fill, because they need not begin at a block's edge.
            Some(window) => all.min((window - 1 + chunk).div_ceil(self.block_size) + 1),
        };
        self.windows.iter().map(need).sum()
    }

    /// The longest sequence that `num_blocks` can always finish.
    pub(crate) fn longest(&self, num_blocks: usize, chunk: usize) -> usize {
        let fits = |blocks: &usize| self.blocks_needed(blocks * self.block_size, chunk) <= num_blocks;
        let (mut low, mut high) = (0, num_blocks + 1);
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            if fits(&middle) { low = middle } else { high = middle }
        }
        low * self.block_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: CacheGroup = CacheGroup::Full;

    fn rules(groups: &[CacheGroup]) -> GroupRules {
        GroupRules::new(groups, 4)
    }

    fn window(window: usize) -> CacheGroup {
        CacheGroup::SlidingWindow { window }
    }

    #[test]
    fn a_window_begins_at_the_block_of_its_oldest_position() {
        let rules = rules(&[FULL, window(5), window(1)]);
        let firsts = |position| [0, 1, 2].map(|g| rules.first_block(g, position));
        assert_eq!(firsts(4), [0, 0, 1]);
        assert_eq!(firsts(7), [0, 0, 1]); // 3..=7
        assert_eq!(firsts(8), [0, 1, 2]); // 4..=8
    }

    #[test]
    fn the_first_group_keeps_everything_even_if_it_is_a_window() {
        let rules = rules(&[window(2), window(2)]);
        assert_eq!((rules.first_block(0, 99), rules.first_block(1, 99)), (0, 24));
        assert!(!rules.slides(0) && rules.slides(1));
    }

    #[test]
    fn the_longest_sequence_is_the_longest_that_fits() {
        for groups in
            [vec![FULL], vec![FULL, FULL], vec![FULL, window(5)], vec![window(3), window(9), window(1)]]
        {
            let rules = rules(&groups);
            for num_blocks in 0..60 {
                let longest = rules.longest(num_blocks, 6);
                assert!(rules.blocks_needed(longest, 6) <= num_blocks);
                assert!(rules.blocks_needed(longest + 1, 6) > num_blocks, "{groups:?} {num_blocks}");
            }
        }
    }
}
