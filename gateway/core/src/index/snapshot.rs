//! What an index knows of a worker, out of it and into another one: for a gateway that ends and the one that
//! begins after it. In which form it is kept is the caller's business.

use keyway_wire::block_hash::BlockHash;

use super::blocks::Way;
use super::cells::NIL;
use super::residency::{NUMBERS, stamp};
use super::runs::Spot;
use super::{Owner, PrefixIndex, WorkerId};

impl PrefixIndex {
    /// The blocks that a worker holds, with their owners, from the most to the least recently used: parents
    /// before their children, so any beginning of it is a state that could have been.
    pub fn by_recency(&self, worker: WorkerId) -> impl Iterator<Item = (Owner, BlockHash)> {
        let place = self.workers.get(worker);
        let lists = place.into_iter().flat_map(|place| self.workers.lists(place));
        let mut heads: Vec<(Owner, u32)> = lists.map(|(_, owner, list)| (owner, list.newest)).collect();
        let (mut at, mut name, mut number) = (0, 0, None);
        std::iter::from_fn(move || {
            let place = place?;
            let held_of = |head: &(Owner, u32)| Some(head.1).filter(|&held| held != NIL);
            let number_of = |held: u32| self.held.cells.get(held).number();
            // A placement's blocks follow each other on one list.
            if name == 0 && (heads.get(at).and_then(held_of).map(number_of) != number || number.is_none()) {
                let ages = (0..).zip(&heads).filter_map(|(i, head)| Some((i, held_of(head).map(number_of)?)));
                at = ages.min_by_key(|(_, number)| self.workers.age(place, *number))?.0;
            }
            let (owner, held) = heads[at];
            let residency = self.held.cells.get(held);
            let block = self.held.cells.name(Spot { run: residency.run, at: name });
            (number, name) = (Some(residency.number()), name + 1);
            if name == usize::from(residency.len) {
                (heads[at].1, name) = (residency.older, 0);
            }
            Some((owner, block))
        })
    }

    /// Takes what [`PrefixIndex::by_recency`] gave for a worker that holds nothing yet and does not announce
    /// its blocks itself. Stops where there is no room. Returns the blocks taken.
    pub fn restore(
        &mut self,
        worker: WorkerId,
        blocks: impl IntoIterator<Item = (Owner, BlockHash)>,
    ) -> usize {
        let Some(place) = self.workers.get_or_add(worker) else { return 0 };
        if self.workers[place].exact || self.workers.held_at(place) > 0 {
            return 0;
        }
        // Each row of one owner's blocks is numbered as one placement, the first one as the last.
        let mut number = self.workers.next_number(place);
        let (mut taken, mut last) = (0, None);
        for (owner, hash) in blocks {
            if self.held.find(hash, place).is_some() {
                continue; // No list has a block twice, but a file may be anything.
            }
            let worker = &self.workers[place];
            let more = worker.blocks + u64::from(hash.blocks());
            if more > worker.capacity.into() {
                break;
            }
            let list = self.workers.find_or_add_list(place, owner, &self.owners);
            let newer = self.workers.list(list).oldest;
            let way: Way = self.way(newer, hash);
            if !self.held.has_room(self.parted(newer, way)) {
                break;
            }
            if last.is_some_and(|last| last != owner) {
                number = number.wrapping_sub(1) % NUMBERS;
            }
            last = Some(owner);
            self.put_where(list, newer, (hash, way), stamp(number, list.nth), false);
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

    fn nobody_s(start: u64, len: u64) -> impl Iterator<Item = (Owner, BlockHash)> {
        chain(start, len).into_iter().map(|block| (Owner::NOBODY, block))
    }

    #[test]
    fn several_owners_blocks_keep_their_order_and_their_owners() {
        let (worker, mut old) = (WorkerId(3), PrefixIndex::new(1 << 20));
        let (alice, bob) = (Owner(1), Owner(2));
        for (owner, start) in
            [(alice, 100), (bob, 200), (alice, 300), (bob, 200), (Owner::NOBODY, 400), (bob, 500)]
        {
            old.place_of(owner, worker, &chain(start, 10));
        }
        let blocks: Vec<_> = old.by_recency(worker).collect();
        let starts: Vec<_> = blocks.chunks(10).map(|ten| (ten[0].0, ten[0].1.0)).collect();
        assert_eq!(starts, [(bob, 500), (Owner::NOBODY, 400), (bob, 200), (alice, 300), (alice, 100)]);
        let mut new = PrefixIndex::new(1 << 20);
        assert_eq!(new.restore(worker, blocks.iter().copied()), 50);
        assert_eq!(new.by_recency(worker).collect::<Vec<_>>(), blocks);
        assert_eq!([alice, bob, Owner::NOBODY].map(|owner| new.held_of(owner)), [20, 20, 10]);
        for index in [&mut old, &mut new] {
            index.set_capacity(worker, Some(25));
            let left = [500, 400, 200, 300, 100].map(|start| index.lengths(&chain(start, 10)).of(worker));
            assert_eq!(left, [10, 10, 5, 0, 0]);
        }
    }

    #[test]
    fn an_index_made_of_another_s_blocks_matches_and_evicts_alike() {
        let (worker, mut old) = (WorkerId(3), PrefixIndex::new(1 << 20));
        old.place(worker, &chain(1, 40));
        old.place(worker, &[chain(1, 10), chain(100, 30)].concat());
        let blocks: Vec<_> = old.by_recency(worker).collect();
        assert!(blocks.iter().all(|(owner, _)| *owner == Owner::NOBODY));
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
        let room = small.restore(WorkerId(1), nobody_s(1, 10_000));
        assert!((1..10_000).contains(&room) && room == small.len());
        assert!(
            small.holds(WorkerId(1), BlockHash(room as u64))
                && !small.holds(WorkerId(1), BlockHash(room as u64 + 1))
        );
        // Not over what is known already, and not for who says it itself.
        assert_eq!(small.restore(WorkerId(1), nobody_s(1, 5)), 0);
        let mut exact = PrefixIndex::new(1 << 16);
        exact.set_exact(WorkerId(2), true);
        assert_eq!(exact.restore(WorkerId(2), nobody_s(1, 5)), 0);
    }
}
