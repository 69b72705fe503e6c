//! How far apart the names of a text's prefixes stand: at each block where prompts mostly part, and further
//! apart behind, as a span of a thirty-second of what lies before it says nearly as much. So a long prompt
//! that is new has tens of names, not hundreds.
//!
//! A name tells for how many blocks it counts in a cache: for those of its span. What a prompt has behind its
//! last name, half of the next span in the mean, is cached too and has no name; so the last name before each
//! wider span counts for half as many blocks more.

use crate::block_hash::BlockHash;

/// Blocks at the front of a text that have a name each.
pub(crate) const SINGLE: usize = 64;
/// Names for each time that the text gets twice as long.
const PER_DOUBLING: usize = SINGLE / 2;
/// Doublings behind which spans get no wider.
const DOUBLINGS: usize = 6;
/// Blocks of the text that lie before the first of these.
const WIDEST_FROM: usize = SINGLE << DOUBLINGS;

/// Upper bits of a name that say for how many blocks it counts: how wide its span is, as a power of two, and
/// one bit for half as many again.
pub(crate) const COUNT_BITS: u32 = 4;
const COUNT_SHIFT: u32 = u64::BITS - COUNT_BITS;
const HALF_MORE: u64 = 1 << COUNT_SHIFT;

impl BlockHash {
    /// Blocks that it counts for in a cache.
    #[inline]
    pub const fn blocks(self) -> u32 {
        let width = 1 << (self.0 >> (COUNT_SHIFT + 1));
        if self.0 & HALF_MORE == 0 { width } else { width + width / 2 }
    }

    /// The name of these bits, for a span of so many blocks, a power of two up to 128, and whether a wider
    /// one follows. Of the bits all but the upper four count.
    #[inline]
    pub(crate) const fn spanning(bits: u64, width: u32, before_wider: bool) -> Self {
        let count = (width.trailing_zeros() as u64) << 1 | before_wider as u64;
        Self(bits & (HALF_MORE - 1) | count << COUNT_SHIFT)
    }
}

/// Blocks of the span that begins behind so many blocks of a text.
pub const fn width_behind(blocks: usize) -> usize {
    if blocks < SINGLE {
        return 1;
    }
    let doublings = (blocks / SINGLE).ilog2() as usize;
    if doublings < DOUBLINGS { 2 << doublings } else { 2 << DOUBLINGS }
}

/// Blocks of the span that ends there.
pub(crate) const fn width_before(end: usize) -> usize {
    // Where spans get wider one of the narrower ones ends.
    width_behind(end - 1)
}

/// How the names of one chain stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spans {
    /// One for each block: of tokens, and of short texts.
    Single,
    /// As this module says.
    OfText,
}

impl Spans {
    /// Those of this chain.
    #[inline]
    pub fn of(chain: &[BlockHash]) -> Self {
        // Texts that are no longer are named alike.
        if chain.get(SINGLE).is_some_and(|name| name.blocks() > 1) { Self::OfText } else { Self::Single }
    }

    /// Blocks of the prefix that the last of so many names stands for.
    #[inline]
    pub const fn blocks(self, names: usize) -> usize {
        match self {
            Self::OfText if names > SINGLE => {
                let (doublings, further) = ((names - SINGLE) / PER_DOUBLING, (names - SINGLE) % PER_DOUBLING);
                if doublings < DOUBLINGS {
                    return (SINGLE << doublings) + further * (2 << doublings);
                }
                WIDEST_FROM + (names - SINGLE - DOUBLINGS * PER_DOUBLING) * (2 << DOUBLINGS)
            }
            Self::OfText | Self::Single => names,
        }
    }

    /// Names of the prefixes that are no longer than so many blocks.
    #[inline]
    pub const fn names(self, blocks: usize) -> usize {
        match self {
            Self::OfText if blocks > SINGLE => {
                let doublings = (blocks / SINGLE).ilog2() as usize;
                let doublings = if doublings < DOUBLINGS { doublings } else { DOUBLINGS };
                let further = (blocks - (SINGLE << doublings)) / (2 << doublings);
                SINGLE + doublings * PER_DOUBLING + further
            }
            Self::OfText | Self::Single => blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ends of the spans, one after the other, up to so many blocks.
    fn ends(most: usize) -> Vec<usize> {
        std::iter::successors(Some(0), |end| Some(end + width_behind(*end)))
            .take_while(|end| *end <= most)
            .collect()
    }

    #[test]
    fn blocks_and_names_are_those_of_the_spans_laid_end_to_end() {
        for (names, end) in ends(40_000).into_iter().enumerate() {
            assert_eq!(Spans::OfText.blocks(names), end, "{names} names");
            assert_eq!(Spans::OfText.names(end), names);
            for inside in 1..width_behind(end) {
                assert_eq!(Spans::OfText.names(end + inside), names, "{inside} blocks behind {end}");
            }
        }
        assert_eq!((Spans::Single.blocks(700), Spans::Single.names(700)), (700, 700));
    }

    #[test]
    fn a_long_text_has_few_names_and_none_is_wider_than_a_part_of_what_lies_before_it() {
        // 32 KB in blocks of 64 bytes, half of it new, and 4 MiB.
        assert_eq!(
            (Spans::OfText.names(512), Spans::OfText.names(512) - Spans::OfText.names(256)),
            (160, 32)
        );
        assert_eq!(Spans::OfText.names(64 << 10), 64 + 6 * 32 + (65_536 - 4_096) / 128);
        for blocks in 1..10_000 {
            assert!(width_behind(blocks) <= (blocks / 32).max(1), "behind {blocks}");
        }
    }

    proptest! {
        #[test]
        fn a_name_tells_its_blocks_and_is_the_same_in_all_other_bits(bits: u64, doublings in 0_u32..8) {
            let [name, before_wider] = [false, true].map(|more| BlockHash::spanning(bits, 1 << doublings, more));
            prop_assert_eq!(name.blocks(), 1 << doublings);
            prop_assert_eq!(before_wider.blocks(), (3 << doublings) / 2);
            for name in [name, before_wider] {
                prop_assert_eq!((name.0 ^ bits) << COUNT_BITS, 0);
            }
        }
    }
}
