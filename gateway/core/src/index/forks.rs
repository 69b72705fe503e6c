//! Where the holders of a chain last parted: mostly at the end of what many prompts begin with, such as a
//! system prompt that every worker holds. A guess of where they part next time, which a search then has to
//! confirm; it decides nothing.

use std::cell::Cell;

use keyway_wire::block_hash::BlockHash;

/// First blocks that are told apart; of more than these some share a guess.
const FORKS: usize = 256;

/// A guess for each first block of a chain.
pub(super) struct Forks([Cell<u32>; FORKS]);

impl Forks {
    pub(super) const fn new() -> Self {
        Self([const { Cell::new(0) }; FORKS])
    }

    /// The guess for chains that begin with this block: so many blocks that some hold who do not hold the
    /// next one.
    pub(super) fn of(&self, root: BlockHash) -> Guess<'_> {
        Guess(&self.0[root.0 as usize % FORKS])
    }
}

/// One guess, for chains whose first blocks fall together ([`Forks::of`]): after how many blocks holders
/// parted last. 0 before any did.
#[derive(Clone, Copy)]
pub(super) struct Guess<'a>(&'a Cell<u32>);

impl Guess<'_> {
    /// What to look at next, of lengths above `held` and below `lost`: both sides of the guess first, and
    /// then the middle.
    pub(super) fn between(self, held: usize, lost: usize) -> usize {
        let fork = self.0.get() as usize;
        let side = if held == fork { fork + 1 } else { fork };
        if held < side && side < lost { side } else { usize::midpoint(held, lost) }
    }

    /// The blocks on both sides of it: the last that all of some holders have, and the one behind it.
    pub(super) fn sides(self, chain: &[BlockHash]) -> impl Iterator<Item = BlockHash> {
        let fork = self.0.get() as usize;
        chain.iter().copied().skip(fork.saturating_sub(1)).take(2)
    }

    /// Notes that holders parted after `held` blocks, which the next search looks at first.
    pub(super) fn was(self, held: usize) {
        self.0.set(held as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths that are looked at until it is known that `fork` blocks are held.
    fn looks(guess: Guess<'_>, fork: usize, blocks: usize) -> Vec<usize> {
        let (mut held, mut lost, mut looks) = (1, blocks + 1, Vec::new());
        while lost - held > 1 {
            let middle = guess.between(held, lost);
            looks.push(middle);
            if middle <= fork { held = middle } else { lost = middle }
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
}
