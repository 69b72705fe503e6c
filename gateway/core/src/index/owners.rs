//! Whose residencies the index holds, and who gives way when it is full: the owner that holds the most, so
//! that an owner with no more than an equal part loses nothing to another, however many prompts that one
//! sends. Where they lie is the workers' business.

/// Whose requests filled a block: a tenant, by a number that the caller gives it. 0 is no tenant in
/// particular: there are no tenants, they share their prompts, or the worker announced the block itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(pub u8);

impl Owner {
    /// Number 0, for blocks that no tenant has for itself.
    pub const NOBODY: Self = Self(0);
}

/// What each owner has, at all workers together.
pub(super) struct Owners {
    /// Blocks, and of all together.
    blocks: [u32; 1 << u8::BITS],
    total: u32,
    /// Residencies, of one to eight blocks each, and of all together. What they take of the index goes by
    /// these: whose prompts part after few blocks takes as much as one whose prompts are long.
    held: [u32; 1 << u8::BITS],
    held_by_all: u32,
}

impl Owners {
    pub(super) const fn new() -> Self {
        let none = [0; 1 << u8::BITS];
        Self { blocks: none, total: 0, held: none, held_by_all: 0 }
    }

    /// Blocks that count for one owner.
    pub(super) fn of(&self, owner: Owner) -> u32 {
        self.blocks[usize::from(owner.0)]
    }

    /// Blocks of all owners together.
    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// Residencies that count for one owner.
    pub(super) fn held(&self, owner: Owner) -> u32 {
        self.held[usize::from(owner.0)]
    }

    /// There are so many more blocks.
    pub(super) fn add(&mut self, owner: Owner, blocks: u32) {
        self.blocks[usize::from(owner.0)] += blocks;
        self.total += blocks;
    }

    pub(super) fn take(&mut self, owner: Owner, blocks: u32) {
        self.blocks[usize::from(owner.0)] -= blocks;
        self.total -= blocks;
    }

    /// There is one more residency.
    pub(super) fn enter(&mut self, owner: Owner) {
        self.held[usize::from(owner.0)] += 1;
        self.held_by_all += 1;
    }

    pub(super) fn leave(&mut self, owner: Owner) {
        self.held[usize::from(owner.0)] -= 1;
        self.held_by_all -= 1;
    }

    /// Who makes room for one more of `to`'s, and how many blocks at once, at most `batch`. The owner that
    /// holds the most does, `to` itself among equals; another one never falls below an equal part.
    pub(super) fn gives_way(&self, to: Owner, batch: usize) -> (Owner, usize) {
        let own = self.held(to);
        if own == self.held_by_all {
            return (to, batch);
        }
        let (mut largest, mut present) = (to, 0);
        for (number, &held) in (0..=u8::MAX).zip(&self.held) {
            present += u32::from(held > 0 || number == to.0);
            if held > self.held(largest) {
                largest = Owner(number);
            }
        }
        if largest == to {
            return (to, batch);
        }
        let above_its_part = self.held(largest) - self.held_by_all / present;
        (largest, batch.min(above_its_part as usize).max(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owners(held: &[u32]) -> Owners {
        let mut owners = Owners::new();
        for (owner, &held) in (0..).map(Owner).zip(held) {
            (0..held).for_each(|_| owners.enter(owner));
        }
        owners
    }

    proptest! {
        #[test]
        fn whoever_has_no_more_than_an_equal_part_gives_nothing_to_another(
            held in prop::collection::vec(0_u32..60, 1..8),
            to in 0_u8..9,
            batch in 1_usize..40,
        ) {
            let total: u32 = held.iter().sum();
            prop_assume!(total > 0);
            let owners = owners(&held);
            let (from, count) = owners.gives_way(Owner(to), batch);
            prop_assert!((1..=batch).contains(&count) && owners.held(from) > 0);
            let present = held.iter().filter(|held| **held > 0).count() as u32;
            let present = present + u32::from(owners.held(Owner(to)) == 0);
            // Before the last one goes it is still above its part: without rounding, as both sides are
            // multiplied.
            let is_above_its_part = || (owners.held(from) + 1 - count as u32) * present > total;
            prop_assert!(from == Owner(to) || is_above_its_part(), "{from:?} gives {count}");
        }
    }

    #[test]
    fn the_one_who_comes_gives_way_among_equals() {
        assert_eq!(owners(&[0, 50, 50]).gives_way(Owner(2), 32), (Owner(2), 32));
        assert_eq!(owners(&[0, 50, 50]).gives_way(Owner(1), 32), (Owner(1), 32));
        assert_eq!(owners(&[0, 50, 50]).gives_way(Owner(3), 32), (Owner(1), 17));
        assert_eq!(owners(&[0, 51, 49]).gives_way(Owner(2), 32), (Owner(1), 1));
        assert_eq!(owners(&[100]).gives_way(Owner(0), 32), (Owner(0), 32));
    }
}
