//! Blocks that no worker has accepted yet: each residency knows how many placements vouch for all of it, or
//! for its last names. The first of them that is accepted makes these blocks like any others; the last of
//! them that is withdrawn takes them away.

use keyway_wire::block_hash::BlockHash;

use super::PrefixIndex;
use super::placement::Placement;
use super::room::Kept;
use super::runs::Spot;
use crate::spread_map::SpreadMap;

/// A block at the worker of a place.
type Claimed = (u16, BlockHash);

/// Claims of placements that are open still and mean nothing any more, by block: it was accepted with another
/// one of them, or it is gone, and may have come again since. As many as there are such claims, which is
/// mostly none.
#[derive(Default)]
pub(super) struct Voids(SpreadMap<Claimed, Void>);

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

    pub(super) fn add(&mut self, block: Claimed, claims: u32, until: u32) {
        if claims > 0 {
            let void = self.0.entry(block).or_insert(Void { claims: 0, until });
            void.claims += claims;
            void.until = until;
        }
    }

    /// Whether the claim of a placement is void; it is closed by that.
    fn take(&mut self, block: Claimed, sequence: u32) -> bool {
        if self.0.is_empty() {
            return false;
        }
        // They count modulo 2^32; none is open for half of that.
        let Some(void) = self.0.get_mut(&block).filter(|void| void.until.wrapping_sub(sequence) < 1 << 31)
        else {
            return false;
        };
        void.claims -= 1;
        if void.claims == 0 {
            self.0.remove(&block);
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
            let mut claims = &closed.claims[..];
            while let Some((last, before)) = claims.split_last() {
                claims = match self.claimed(closed.place, *last, closed.sequence) {
                    Some((held, names)) => {
                        self.accept(held, 1);
                        &claims[..claims.len().saturating_sub(names)]
                    }
                    None => before,
                };
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
        let (place, sequence) = (placement.place, placement.sequence);
        let all = placement.take_claims();
        let mut claims = &all[..];
        // Children first.
        while let Some((last, before)) = claims.split_last() {
            let Some((held, names)) = self.claimed(place, *last, sequence) else {
                claims = before;
                continue;
            };
            claims = &claims[..claims.len().saturating_sub(names)];
            let residency = self.held.cells.get(held);
            match residency.claims() {
                0 => {}
                1 => {
                    self.accept(held, 1);
                    self.shed(held, names);
                }
                claims => {
                    let left = residency.claimed(claims - 1, residency.claimed_from.into());
                    self.held.cells.set(held, left);
                }
            }
        }
    }

    /// The residency that ends with a block which a placement vouched for, and for how many of its names it
    /// did. `None` if the claim is void.
    fn claimed(&mut self, place: u16, last: BlockHash, sequence: u32) -> Option<(u32, usize)> {
        if self.voids.take((place, last), sequence) {
            return None;
        }
        let (held, _) = self.held.find(last, place)?;
        Some((held, self.held.cells.get(held).claimed_names().len().max(1)))
    }

    /// Counts a residency's blocks as ones like any others; so many of its claims are closed by now.
    pub(super) fn accept(&mut self, at: u32, closed: u32) {
        let held = self.held.cells.get(at);
        let claims = held.claims();
        if claims == 0 {
            return;
        }
        self.held.cells.set(at, held.claimed(0, 0));
        for at in held.claimed_names() {
            let name = self.held.cells.name(Spot { run: held.run, at });
            self.workers[held.worker].pending -= u64::from(name.blocks());
            self.voids.add((held.worker, name), claims - closed, self.sequence);
        }
    }
}
