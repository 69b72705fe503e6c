//! Blocks that no worker has accepted yet: each knows how many placements vouch for it. The first of them
//! that is accepted makes it a block like any other; the last of them that is withdrawn takes it away.

use super::PrefixIndex;
use super::placement::Placement;
use super::room::Kept;
use super::slab::CLAIMS_MAX;
use crate::spread_map::SpreadMap;

/// Claims of placements that are open still and mean nothing any more, by slot: its block was accepted with
/// another one of them, or it is gone, and the slot may be another block's by now. As many as there are such
/// claims, which is mostly none.
#[derive(Default)]
pub(super) struct Voids(SpreadMap<u32, Void>);

struct Void {
    claims: u32,
    /// Those of placements up to this one.
    until: u32,
}

impl Voids {
    /// Whether there are none.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, slot: u32, claims: u32, until: u32) {
        if claims > 0 {
            let void = self.0.entry(slot).or_insert(Void { claims: 0, until });
            void.claims += claims;
            void.until = until;
        }
    }

    /// Whether the claim of a placement is void; it is closed by that.
    fn take(&mut self, slot: u32, sequence: u32) -> bool {
        if self.0.is_empty() {
            return false;
        }
        // They count modulo 2^32; none is open for half of that.
        let Some(void) = self.0.get_mut(&slot).filter(|void| void.until.wrapping_sub(sequence) < 1 << 31)
        else {
            return false;
        };
        void.claims -= 1;
        if void.claims == 0 {
            self.0.remove(&slot);
        }
        true
    }
}

impl PrefixIndex {
    /// Takes note of the placements that were accepted since the last look, and evicts what is too much by
    /// now. Worth it before each choice; it costs next to nothing where there were none.
    pub fn settle(&mut self) {
        let mut closed = std::mem::take(&mut self.settling);
        self.accepted.take(&mut closed);
        for closed in closed.drain(..) {
            for slot in closed.claims {
                if !self.voids.take(slot, closed.sequence) {
                    self.accept(slot, 1);
                }
            }
            self.trim(closed.place, 0, Kept::Nothing);
        }
        self.settling = closed;
    }

    /// Undoes what a placement added, except blocks that another placement has touched since and was not
    /// withdrawn.
    pub fn withdraw(&mut self, mut placement: Placement) {
        self.settle();
        self.release(&placement);
        // Children first.
        for slot in placement.take_claims().into_iter().rev() {
            if self.voids.take(slot, placement.sequence) {
                continue;
            }
            match self.held.slab[slot].claims() {
                1 => {
                    self.accept(slot, 1);
                    self.evict(slot);
                }
                claims => self.held.slab[slot].set_claims(claims - 1),
            }
        }
    }

    /// Counts a block as one like any other; so many of its claims are closed by now.
    pub(super) fn accept(&mut self, at: u32, closed: u32) {
        let slot = &mut self.held.slab[at];
        let claims = slot.claims();
        if claims > 0 {
            slot.set_claims(0);
            self.workers[slot.worker].pending -= u64::from(slot.hash.blocks());
            self.voids.add(at, claims - closed, self.sequence);
        }
    }

    /// Vouches for some slots of a list, from `first` on to earlier use, as far as no worker has accepted
    /// them.
    pub(super) fn claim(&mut self, first: u32, slots: usize, claims: &mut Vec<u32>) {
        let mut at = first;
        for _ in 0..slots {
            let slot = &mut self.held.slab[at];
            // One too many to be counted goes by what becomes of the others.
            if (1..CLAIMS_MAX).contains(&slot.claims()) {
                slot.set_claims(slot.claims() + 1);
                claims.push(at);
            }
            at = slot.older;
        }
    }
}
