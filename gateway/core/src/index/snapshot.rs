//! What an index knows of a worker, out of it and into another one: for a gateway that ends and the one that begins after
//! it. In which form it is kept is the caller's business.

use keyway_wire::block_hash::BlockHash;

use super::slab::NIL;
use super::{PrefixIndex, WorkerId};

impl PrefixIndex {
    /// The blocks that a worker holds, from the most to the least recently used: parents before their children, so any
    /// beginning of it is a state that could have been.
    pub fn by_recency(&self, worker: WorkerId) -> impl Iterator<Item = BlockHash> {
        let place = self.workers.get(worker);
        let newest = place.map_or(NIL, |place| self.workers[place].recency.newest);
        let older = |&slot: &u32| Some(self.held.slab[slot].older).filter(|&older| older != NIL);
        let slots = std::iter::successors(Some(newest).filter(|&slot| slot != NIL), older);
        slots.map(|slot| self.held.slab[slot].hash)
    }

    /// Takes what [`PrefixIndex::by_recency`] gave for a worker that holds nothing yet and does not announce its blocks
    /// itself. Stops where there is no room. Returns the blocks taken.
    pub fn restore(&mut self, worker: WorkerId, blocks: impl IntoIterator<Item = BlockHash>) -> usize {
        let stamp = self.next_stamp();
        let Some(place) = self.workers.get_or_add(worker) else { return 0 };
        if self.workers[place].exact || self.workers[place].recency.len > 0 {
            return 0;
        }
        let (mut parent, mut taken) = (NIL, 0);
        for hash in blocks {
            if self.held.find(hash, place).is_some() {
                continue; // No list has a block twice, but a file may be anything.
            }
            self.stamp = stamp;
            if self.workers[place].recency.len >= self.workers[place].capacity || self.held.slab.is_full() {
                break;
            }
            parent = self.insert(place, parent, hash);
            taken += 1;
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(start: u64, len: u64) -> Vec<BlockHash> {
        (start..start + len).map(BlockHash).collect()
    }

    #[test]
    fn an_index_made_of_another_s_blocks_matches_and_evicts_alike() {
        let (worker, mut old) = (WorkerId(3), PrefixIndex::new(1 << 20));
        old.place(worker, &chain(1, 40));
        old.place(worker, &[chain(1, 10), chain(100, 30)].concat());
        let blocks: Vec<_> = old.by_recency(worker).collect();
        assert_eq!(blocks.len(), 70);
        let mut new = PrefixIndex::new(1 << 20);
        assert_eq!(new.restore(worker, blocks.iter().copied()), 70);
        assert_eq!(new.by_recency(worker).collect::<Vec<_>>(), blocks);
        // The oldest leave first: the end of the first chain.
        for index in [&mut old, &mut new] {
            index.set_capacity(worker, Some(45));
            assert_eq!(index.lengths(&chain(1, 40)).of(worker), 15);
            assert_eq!(index.lengths(&[chain(1, 10), chain(100, 30)].concat()).of(worker), 40);
        }
    }

    #[test]
    fn what_does_not_fit_is_left_out_from_the_oldest() {
        let mut small = PrefixIndex::new(4 << 10);
        let room = small.capacity();
        assert!(small.restore(WorkerId(1), chain(1, 10_000)) == room && room > 0);
        assert!(
            small.holds(WorkerId(1), BlockHash(room as u64))
                && !small.holds(WorkerId(1), BlockHash(room as u64 + 1))
        );
        // Not over what is known already, and not for who says it itself.
        assert_eq!(small.restore(WorkerId(1), chain(1, 5)), 0);
        let mut exact = PrefixIndex::new(1 << 16);
        exact.set_exact(WorkerId(2), true);
        assert_eq!(exact.restore(WorkerId(2), chain(1, 5)), 0);
    }
}
