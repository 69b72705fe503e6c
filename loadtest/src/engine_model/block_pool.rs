//! The KV blocks of one engine and the prefix cache over them: named by chained hashes, counted by users,
//! evicted in the order of their last release. Knows no requests and no time.
//!
//! As in vLLM, equal blocks computed twice are two blocks (each is stored and removed by itself), and a
//! request's blocks are released from its tail, so that a chain loses its end first. Unlike there, a released
//! block without a name is used again before any named one: it holds nothing that could be reused.
//!
//! Blocks are kept as runs (`block_pool/runs.rs`): blocks of one chain, one after the other, that the same
//! requests use. A run is claimed, released and evicted as one, and where requests part it is split. Blocks
//! without a name are only counted. So a prompt of a thousand blocks costs a handful of accesses to memory,
//! for which a simulation of many engines waits more than for anything else.
//!
//! That a search need only know the first name of each run follows from two things:
//!
//! - A name says all that is before it. Who holds a block holds one of each name before it, and releases
//!   that later. So what is cached of a chain is its beginning, and where a request's first new block has a
//!   new name the ones after it have, too.
//! - Where two blocks have one name each is a run by itself. So the block after one that was found is the
//!   next of its run, or the first of another.

mod runs;
#[cfg(test)]
mod tests;

use hashbrown::{HashTable, hash_table::Entry};
use keyway_wire::block_hash::BlockHash;

use self::runs::{NIL, Run, Runs};

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
    /// Blocks that requests use, with and without a name.
    used: u32,
    runs: Runs,
    /// The run that begins with a name; of several the one that was named last.
    begins: HashTable<u32>,
    /// Room for a request's runs while they are released.
    pieces: Vec<u32>,
}

/// The blocks that one request uses: its chain's first ones have names.
#[derive(Debug, Default)]
pub(super) struct Held {
    parts: Vec<Part>,
    named: u32,
    unnamed: u32,
}

/// So many blocks from the begin of a run on, and if it was split since, of what came of its rest.
#[derive(Debug, Clone, Copy)]
struct Part {
    run: u32,
    blocks: u32,
}

// === impl Held ===

impl Held {
    /// Blocks with a name.
    pub(super) fn named(&self) -> u32 {
        self.named
    }

    /// Forgets what was found and not claimed.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
        (self.named, self.unnamed) = (0, 0);
    }
}

// === impl BlockPool ===

impl BlockPool {
    /// A pool of `capacity` unused blocks.
    pub fn new(capacity: u32) -> Self {
        Self { capacity, used: 0, runs: Runs::default(), begins: HashTable::new(), pieces: Vec::new() }
    }

    /// Blocks in all, used or not; never changes.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks that no request uses: never used or released.
    pub fn available(&self) -> u32 {
        self.capacity - self.used
    }

    /// Leading blocks of `chain` that are cached. `chain` is a request's from its first block on.
    pub fn cached(&self, chain: &[BlockHash]) -> usize {
        self.found(chain).map(|part| part.blocks as usize).sum()
    }

    /// Distinct names held, in no order.
    pub fn names(&self) -> impl Iterator<Item = BlockHash> {
        self.begins.iter().flat_map(|run| self.runs[*run].names()).copied()
    }

    /// Notes in `held`, which is empty, the leading blocks of `chain` that are cached. Gives how many of them
    /// no request uses: claiming those makes them unavailable.
    pub(super) fn find(&self, chain: &[BlockHash], held: &mut Held) -> u32 {
        held.parts.extend(self.found(chain));
        held.named = held.parts.iter().map(|part| part.blocks).sum();
        let released = held.parts.iter().filter(|part| self.runs[part.run].users == 0);
        released.map(|part| part.blocks).sum()
    }

    /// Becomes a user of the blocks that were just found.
    pub(super) fn claim(&mut self, held: &Held) {
        for &Part { run, blocks } in &held.parts {
            if blocks < self.runs[run].len {
                self.split(run, blocks);
            }
            if self.runs[run].users == 0 {
                self.runs.unlink(run);
                self.used += blocks;
            }
            self.runs[run].users += 1;
        }
    }

    /// Gives a request `count` blocks for something new, no more than are available: such that hold nothing,
    /// then those released longest ago, whose names are lost. `removed` is told these, each time some that
    /// follow each other in a chain, of which the last is lost first.
    pub(super) fn take(&mut self, held: &mut Held, count: u32, mut removed: impl FnMut(&[BlockHash])) {
        let blank = self.available() - self.runs.released();
        let mut missing = count.saturating_sub(blank);
        while missing > 0
            && let Some(run) = self.runs.oldest()
        {
            let lost = self.runs[run].len.min(missing);
            let names = self.runs[run].names();
            removed(&names[names.len() - lost as usize..]);
            if names.len() == lost as usize {
                self.forget(run);
                self.runs.unlink(run);
                self.runs.remove(run);
            } else {
                self.runs.shorten(run, lost);
            }
            missing -= lost;
        }
        self.used += count;
        held.unnamed += count;
    }

    /// Names the first blocks without a name of a request, which has filled them.
    pub(super) fn name(&mut self, held: &mut Held, names: &[BlockHash]) {
        debug_assert!(held.unnamed >= names.len() as u32, "taken");
        held.named += names.len() as u32;
        held.unnamed -= names.len() as u32;
        let mut names = names;
        while let Some(first) = names.first() {
            let runs = &self.runs;
            let entry = self.begins.entry(
                spread(*first),
                |one| runs[*one].first == *first,
                |one| spread(runs[*one].first),
            );
            let (run, blocks) = match entry {
                Entry::Vacant(vacant) => {
                    let run = self.runs.insert(Run::new(names));
                    vacant.insert(run);
                    (run, names.len() as u32)
                }
                Entry::Occupied(mut first) => {
                    let twin = *first.get();
                    let run = self.runs.insert(Run::new(&names[..1]));
                    self.runs[run].twin = twin;
                    *first.get_mut() = run;
                    if self.runs[twin].len > 1 {
                        self.split(twin, 1);
                    }
                    (run, 1)
                }
            };
            held.parts.push(Part { run, blocks });
            names = &names[blocks as usize..];
        }
    }

    /// Ends the use of a request's blocks.
    pub(super) fn release(&mut self, held: &mut Held) {
        let mut pieces = std::mem::take(&mut self.pieces);
        for &Part { mut run, mut blocks } in &held.parts {
            pieces.push(run);
            while blocks > self.runs[run].len {
                blocks -= self.runs[run].len;
                run = self.runs[run].rest;
                pieces.push(run);
            }
        }
        for run in pieces.drain(..).rev() {
            let entry = &mut self.runs[run];
            entry.users -= 1;
            if entry.users == 0 {
                self.used -= entry.len;
                self.runs.link_last(run);
            }
        }
        self.pieces = pieces;
        self.used -= held.unnamed;
        held.clear();
    }

    /// The runs that begin `chain`, of the last one maybe its first blocks alone.
    fn found<'a>(&'a self, mut chain: &'a [BlockHash]) -> impl Iterator<Item = Part> {
        std::iter::from_fn(move || {
            let run = self.begins_with(*chain.first()?)?;
            let names = self.runs[run].names();
            let blocks = names.iter().zip(chain).take_while(|(ours, theirs)| ours == theirs).count();
            chain = &chain[blocks..];
            Some(Part { run, blocks: blocks as u32 })
        })
    }

    fn begins_with(&self, name: BlockHash) -> Option<u32> {
        self.begins.find(spread(name), |one| self.runs[*one].first == name).copied()
    }

    /// Makes two runs of one, the first of which has `len` blocks.
    fn split(&mut self, run: u32, len: u32) {
        let rest = self.runs.split(run, len);
        let runs = &self.runs;
        self.begins.insert_unique(spread(runs[rest].first), rest, |one| spread(runs[*one].first));
    }

    /// Takes a run out of those that begin with its name.
    fn forget(&mut self, run: u32) {
        let Run { first: name, twin: after, .. } = self.runs[run];
        let runs = &self.runs;
        let Ok(mut first) = self.begins.find_entry(spread(name), |one| runs[*one].first == name) else {
            return;
        };
        let mut twin = *first.get();
        if twin == run {
            if after == NIL {
                first.remove();
            } else {
                *first.get_mut() = after;
            }
            return;
        }
        while twin != NIL {
            let entry = &mut self.runs[twin];
            if entry.twin == run {
                entry.twin = after;
                return;
            }
            twin = entry.twin;
        }
    }
}

/// Names may differ in few bits alone; a table looks at the lowest and at the highest.
pub(super) fn spread(BlockHash(bits): BlockHash) -> u64 {
    let mixed = bits.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}
