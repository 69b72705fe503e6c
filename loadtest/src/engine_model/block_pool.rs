//! The KV blocks of one engine and the prefix cache over them: named by chained hashes, counted by users,
//! evicted in the order of their last release. Knows no requests and no time.
//!
//! As in vLLM, equal blocks computed twice are two blocks (each is stored and removed by itself), and a
//! request's blocks are released from its tail, so that a chain loses its end first. Unlike there, a released
//! block without a name is used again before any named one: it holds nothing that could be reused.

use hashbrown::{HashTable, hash_table::Entry};
use keyway_wire::block_hash::BlockHash;

/// No block: the end of a list of released blocks or of blocks of one name.
const NIL: u32 = u32::MAX;
/// In place of the next block of the same name: it has no name.
const UNNAMED: u32 = u32::MAX - 1;

/// What happened to the cache, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<R> {
    /// Blocks `first..first + count` of a request's chain were computed.
    Stored {
        /// The request that they were computed for.
        request: R,
        /// Position of the first in the request's chain.
        first: u32,
        /// How many blocks in a row were computed.
        count: u32,
    },
    /// A block of this name was evicted; others of the same name may remain.
    Removed(BlockHash),
}

/// The KV blocks of one engine, used and released, and the names of those cached.
#[derive(Debug)]
pub struct BlockPool {
    capacity: u32,
    /// Blocks used so far; the rest was never used.
    blocks: Vec<Block>,
    /// First block of each name. Block hashes are uniform already, or placed as the caller wants them. A name
    /// itself is in its block: a table of a thousand engines is as small as it can be, since each of their
    /// blocks waits for memory.
    named: HashTable<u32>,
    /// Released blocks, the next one to be used first.
    free_first: u32,
    free_last: u32,
    free_count: u32,
}

#[derive(Debug)]
struct Block {
    /// Its name, if it has one.
    hash: BlockHash,
    users: u32,
    /// Neighbours among the released blocks.
    before: u32,
    after: u32,
    /// Next block of the same name.
    twin: u32,
}

// === impl BlockPool ===

impl BlockPool {
    /// A pool of `capacity` unused blocks.
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity,
            blocks: Vec::new(),
            named: HashTable::new(),
            free_first: NIL,
            free_last: NIL,
            free_count: 0,
        }
    }

    /// Blocks in all, used or not; never changes.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks that no request uses: never used or released.
    pub fn available(&self) -> u32 {
        self.capacity - self.blocks.len() as u32 + self.free_count
    }

    /// Leading blocks of `chain` that are cached.
    pub fn cached(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.find(**hash).is_some()).count()
    }

    /// Adds the leading blocks of `chain` that are cached to `out`.
    pub fn find_cached(&self, chain: &[BlockHash], out: &mut Vec<u32>) {
        out.extend(chain.iter().map_while(|hash| self.find(*hash)));
    }

    /// Distinct names held, in no order.
    pub fn names(&self) -> impl Iterator<Item = BlockHash> {
        self.named.iter().map(|block| self.blocks[*block as usize].hash)
    }

    /// How many of these no request uses: claiming those makes them unavailable.
    pub fn released_among(&self, blocks: &[u32]) -> u32 {
        let released = |block: &&u32| self.blocks[**block as usize].users == 0;
        blocks.iter().filter(released).count() as u32
    }

    /// Becomes a user of these blocks, all of which are cached.
    pub fn claim(&mut self, blocks: &[u32]) {
        for &block in blocks {
            if self.blocks[block as usize].users == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].users += 1;
        }
    }

    /// A block for something new: one never used, or else the one released longest ago, whose name is lost
    /// and given to `removed`. `None` when all are in use.
    pub fn take(&mut self, removed: impl FnOnce(BlockHash)) -> Option<u32> {
        if (self.blocks.len() as u32) < self.capacity && !self.unnamed_is_free() {
            let (hash, twin) = (BlockHash(0), UNNAMED);
            self.blocks.push(Block { hash, users: 1, before: NIL, after: NIL, twin });
            return Some(self.blocks.len() as u32 - 1);
        }
        let block = self.free_first;
        if block == NIL {
            return None;
        }
        self.unlink(block);
        self.blocks[block as usize].users = 1;
        if self.is_named(block) {
            self.forget(block);
            removed(self.blocks[block as usize].hash);
        }
        Some(block)
    }

    /// Names a block that a request has filled.
    pub fn name(&mut self, block: u32, hash: BlockHash) {
        debug_assert!(!self.is_named(block) && self.blocks[block as usize].users > 0, "fresh, and in use");
        let blocks = &self.blocks;
        let entry = self.named.entry(
            spread(hash),
            |one| blocks[*one as usize].hash == hash,
            |one| spread(blocks[*one as usize].hash),
        );
        let first = match entry {
            Entry::Occupied(mut first) => std::mem::replace(first.get_mut(), block),
            Entry::Vacant(vacant) => {
                vacant.insert(block);
                NIL
            }
        };
        let entry = &mut self.blocks[block as usize];
        (entry.hash, entry.twin) = (hash, first);
    }

    /// Ends the use of a request's blocks, in the request's order.
    pub fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            entry.users -= 1;
            if entry.users == 0 {
                if self.is_named(block) { self.link_last(block) } else { self.link_first(block) }
            }
        }
    }

    fn find(&self, hash: BlockHash) -> Option<u32> {
        self.named.find(spread(hash), |one| self.blocks[*one as usize].hash == hash).copied()
    }

    fn is_named(&self, block: u32) -> bool {
        self.blocks[block as usize].twin != UNNAMED
    }

    fn unnamed_is_free(&self) -> bool {
        self.free_first != NIL && !self.is_named(self.free_first)
    }

    /// Takes a block's name away.
    fn forget(&mut self, block: u32) {
        let Block { hash, twin: after, .. } = self.blocks[block as usize];
        self.blocks[block as usize].twin = UNNAMED;
        let blocks = &self.blocks;
        let is_it = |one: &u32| *one == block || blocks[*one as usize].hash == hash;
        let Ok(mut first) = self.named.find_entry(spread(hash), is_it) else { return };
        let mut twin = *first.get();
        if twin == block {
            if after == NIL {
                first.remove();
            } else {
                *first.get_mut() = after;
            }
            return;
        }
        while twin != NIL {
            let entry = &mut self.blocks[twin as usize];
            if entry.twin == block {
                entry.twin = after;
                return;
            }
            twin = entry.twin;
        }
    }

    fn link_last(&mut self, block: u32) {
        self.blocks[block as usize].before = self.free_last;
        self.blocks[block as usize].after = NIL;
        match self.free_last {
            NIL => self.free_first = block,
            last => self.blocks[last as usize].after = block,
        }
        self.free_last = block;
        self.free_count += 1;
    }

    fn link_first(&mut self, block: u32) {
        self.blocks[block as usize].before = NIL;
        self.blocks[block as usize].after = self.free_first;
        match self.free_first {
            NIL => self.free_last = block,
            first => self.blocks[first as usize].before = block,
        }
        self.free_first = block;
        self.free_count += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { before, after, .. } = self.blocks[block as usize];
        match before {
            NIL => self.free_first = after,
            before => self.blocks[before as usize].after = after,
        }
        match after {
            NIL => self.free_last = before,
            after => self.blocks[after as usize].before = before,
        }
        self.free_count -= 1;
    }
}

/// The map tells entries apart by the upper bits, of which a name's say how wide its span is. Names that are
/// neighbours stay so.
fn spread(BlockHash(bits): BlockHash) -> u64 {
    bits ^ bits << 3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same pool with nothing clever: a list of released blocks, searched and shifted.
    #[derive(Default)]
    struct Naive {
        capacity: usize,
        made: usize,
        free: Vec<(usize, Option<BlockHash>)>,
        used: Vec<(usize, Option<BlockHash>, u32)>,
    }

    impl Naive {
        fn take(&mut self) -> Option<(usize, Option<BlockHash>)> {
            let unnamed = self.free.first().is_some_and(|(_, hash)| hash.is_none());
            let (id, lost) = if self.made < self.capacity && !unnamed {
                self.made += 1;
                (self.made - 1, None)
            } else if self.free.is_empty() {
                return None;
            } else {
                self.free.remove(0)
            };
            self.used.push((id, None, 1));
            Some((id, lost))
        }

        fn release(&mut self, id: usize) {
            let at = self.used.iter().position(|used| used.0 == id).unwrap();
            self.used[at].2 -= 1;
            if self.used[at].2 == 0 {
                let (id, hash, _) = self.used.remove(at);
                if hash.is_some() { self.free.push((id, hash)) } else { self.free.insert(0, (id, hash)) }
            }
        }

        fn holds(&self, hash: BlockHash) -> bool {
            self.free.iter().any(|(_, h)| *h == Some(hash))
                || self.used.iter().any(|(_, h, _)| *h == Some(hash))
        }
    }

    proptest! {
        #[test]
        fn the_pool_equals_the_naive_one(
            capacity in 1u32..12,
            steps in prop::collection::vec((0u8..3, 0u64..6, 1usize..4), 1..120),
        ) {
            let mut pool = BlockPool::new(capacity);
            let mut naive = Naive { capacity: capacity as usize, ..Naive::default() };
            let mut held: Vec<Vec<u32>> = Vec::new();
            for (kind, name, count) in steps {
                match kind {
                    0 => {
                        let mut mine = Vec::new();
                        for i in 0..count {
                            let mut lost = None;
                            let got = pool.take(|hash| lost = Some(hash));
                            let want = naive.take();
                            prop_assert_eq!(got.map(|block| (block as usize, lost)), want);
                            let Some(block) = got else { break };
                            let hash = BlockHash(name * 4 + i as u64);
                            // Every third block stays a tail without a name.
                            if i < 2 {
                                pool.name(block, hash);
                                naive.used.last_mut().unwrap().1 = Some(hash);
                            }
                            mine.push(block);
                        }
                        held.push(mine);
                    }
                    1 => {
                        let chain: Vec<_> = (0..count as u64).map(|i| BlockHash(name * 4 + i)).collect();
                        let cached = pool.cached(&chain);
                        prop_assert_eq!(cached, chain.iter().take_while(|hash| naive.holds(**hash)).count());
                        let before = pool.available();
                        let mut mine = Vec::new();
                        pool.find_cached(&chain, &mut mine);
                        prop_assert_eq!(mine.len(), cached);
                        let released = pool.released_among(&mine);
                        pool.claim(&mine);
                        prop_assert_eq!(pool.available(), before - released);
                        for &block in &mine {
                            let id = block as usize;
                            if let Some(at) = naive.free.iter().position(|free| free.0 == id) {
                                let (id, hash) = naive.free.remove(at);
                                naive.used.push((id, hash, 1));
                            } else {
                                naive.used.iter_mut().find(|used| used.0 == id).unwrap().2 += 1;
                            }
                        }
                        held.push(mine);
                    }
                    _ => {
                        if let Some(mine) = held.pop() {
                            pool.release(&mine);
                            mine.iter().rev().for_each(|&block| naive.release(block as usize));
                        }
                    }
                }
                prop_assert_eq!(pool.available() as usize, naive.capacity - naive.used.len());
            }
        }
    }

    #[test]
    fn twins_are_removed_one_by_one() {
        let mut pool = BlockPool::new(2);
        let (a, b) = (pool.take(|_| ()).unwrap(), pool.take(|_| ()).unwrap());
        pool.name(a, BlockHash(7));
        pool.name(b, BlockHash(7));
        pool.release(&[a]);
        pool.release(&[b]);
        let mut removed = Vec::new();
        pool.take(|hash| removed.push(hash));
        assert_eq!(pool.cached(&[BlockHash(7)]), 1);
        pool.take(|hash| removed.push(hash));
        assert_eq!((pool.cached(&[BlockHash(7)]), removed), (0, vec![BlockHash(7); 2]));
    }
}
