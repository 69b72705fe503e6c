//! Where the holders of a chain last parted: mostly at the end of what many prompts begin with, such as a
//! system prompt that every worker holds. A guess of where they part next time, which a search then has to
//! confirm; it decides nothing.

use std::cell::Cell;

use keyway_wire::block_hash::BlockHash;

/// First blocks whose guesses are kept at a time.
const FORKS: usize = 256;

/// A guess for each of some first blocks of chains.
pub(super) struct Forks([Cell<Fork>; FORKS]);

/// Where chains parted whose first block's name has these upper bits. After no blocks: nowhere yet.
#[derive(Clone, Copy)]
struct Fork {
    root: u32,
    blocks: u32,
}

impl Forks {
    pub(super) const fn new() -> Self {
        Self([const { Cell::new(Fork { root: 0, blocks: 0 }) }; FORKS])
    }

    /// The guess for chains that begin with this block: so many blocks that some hold who do not hold the
    /// next one.
    pub(super) fn of(&self, root: BlockHash) -> Guess<'_> {
        Guess { at: &self.0[root.0 as usize % FORKS], root: (root.0 >> 32) as u32 }
    }
}

/// One guess, for chains with one first block ([`Forks::of`]): after how many blocks holders parted last.
#[derive(Clone, Copy)]
pub(super) struct Guess<'a> {
    at: &'a Cell<Fork>,
    root: u32,
}

impl Guess<'_> {
    /// What to look at next, of lengths above `held` and below `lost`: both sides of the guess, as far as
    /// they are among these.
    pub(super) fn between(self, held: usize, lost: usize) -> Option<[usize; 2]> {
        let fork = self.fork()?;
        match (held < fork && fork < lost, held < fork + 1 && fork + 1 < lost) {
            (true, true) => Some([fork, fork + 1]),
            (true, false) => Some([fork; 2]),
            (false, true) => Some([fork + 1; 2]),
            (false, false) => None,
        }
    }

    /// The blocks on both sides of it: the last that all of some holders have, and the one behind it. Without
    /// a guess, the first.
    pub(super) fn sides(self, chain: &[BlockHash]) -> impl Iterator<Item = BlockHash> {
        let (from, count) = self.fork().map_or((0, 1), |fork| (fork - 1, 2));
        chain.iter().copied().skip(from).take(count)
    }

    /// Notes that holders parted after `held` blocks, which the next search looks at first.
    pub(super) fn was(self, held: usize) {
        self.at.set(Fork { root: self.root, blocks: held as u32 });
    }

    fn fork(self) -> Option<usize> {
        let Fork { root, blocks } = self.at.get();
        (root == self.root && blocks > 0).then_some(blocks as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths that are looked at until it is known that `fork` blocks are held.
    fn looks(guess: Guess<'_>, fork: usize, blocks: usize) -> Vec<usize> {
        let (mut held, mut lost, mut looks) = (1, blocks + 1, Vec::new());
        while lost - held > 1 {
            for middle in guess.between(held, lost).unwrap_or([usize::midpoint(held, lost); 2]) {
                if looks.last() != Some(&middle) {
                    looks.push(middle);
                }
                if middle <= fork { held = held.max(middle) } else { lost = lost.min(middle) }
            }
        }
        guess.was(held);
        looks
    }

    #[test]
    fn what_parts_where_it_did_is_found_by_two_looks_and_all_else_by_not_many_more() {
        let forks = Forks::new();
        let guess = forks.of(BlockHash(7));
        assert_eq!(looks(guess, 256, 512).len(), 9);
        assert_eq!(looks(guess, 256, 512), [256, 257]);
        assert_eq!(looks(guess, 256, 5_000), [256, 257]);
        for (fork, blocks) in [(255, 512), (257, 512), (1, 512), (512, 512), (3, 3), (1, 1), (700, 5_000)] {
            guess.was(256);
            let looks = looks(guess, fork, blocks);
            assert!(looks.len() <= 2 + 13, "{fork} of {blocks}: {looks:?}");
        }
    }

    #[test]
    fn its_sides_are_what_is_looked_at_first() {
        let forks = Forks::new();
        let chain: Vec<_> = (0..300).map(BlockHash).collect();
        let guess = forks.of(chain[0]);
        for fork in [1, 256, 299] {
            guess.was(fork);
            let looked_at = looks(guess, fork, 299).into_iter().map(|blocks| chain[blocks - 1]);
            let sides: Vec<_> = guess.sides(&chain).collect();
            assert!(looked_at.into_iter().all(|block| sides.contains(&block)), "{fork}");
        }
        guess.was(500);
        assert_eq!(guess.sides(&chain).count(), 0);
    }

    #[test]
    fn what_begins_otherwise_has_no_guess() {
        let forks = Forks::new();
        let (one, other) = (BlockHash(7), BlockHash(7 + (1 << 32)));
        assert_eq!(forks.of(one).between(1, 600), None);
        forks.of(one).was(256);
        assert_eq!(forks.of(one).between(1, 600), Some([256, 257]));
        assert_eq!(forks.of(other).between(1, 600), None);
        assert_eq!(forks.of(other).sides(&[other, one]).collect::<Vec<_>>(), [other]);
        forks.of(other).was(9);
        assert_eq!(forks.of(one).between(1, 600), None, "there is room for one of them");
    }

    #[test]
    fn only_what_is_not_known_yet_is_looked_at() {
        let forks = Forks::new();
        let guess = forks.of(BlockHash(7));
        guess.was(10);
        let ranges = [(1, 11), (1, 10), (10, 12), (10, 11), (11, 20), (9, 12)];
        let looks = [Some([10; 2]), None, Some([11; 2]), None, None, Some([10, 11])];
        assert_eq!(ranges.map(|(held, lost)| guess.between(held, lost)), looks);
    }
}
