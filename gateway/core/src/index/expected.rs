//! What workers are computing: blocks that were sent to a worker whose own events say what it holds, and that it has
//! not announced yet. They count as held as long as a request that needs them is under way, so that a burst of one
//! prompt goes to one worker before its first event; an engine pins the blocks of what it runs, so they are there.
//! Recency and eviction are not its business.

use std::collections::HashMap;

use keyway_wire::block_hash::BlockHash;

use super::WorkerId;

/// Blocks expected of one worker. At about 20 bytes each 1.3 MiB; what is under way on one worker is at most its cache,
/// of which mostly a part is known already. What does not fit is not expected, which costs time at most.
const EXPECTED_BLOCKS_MAX: usize = 1 << 16;

/// For each worker with events of its own: the requests under way that need each block.
#[derive(Default)]
pub(super) struct Expected {
    workers: HashMap<WorkerId, HashMap<BlockHash, u32>>,
}

impl Expected {
    /// Whether this worker's events are the truth.
    pub(super) fn is_exact(&self, worker: WorkerId) -> bool {
        self.workers.contains_key(&worker)
    }

    pub(super) fn set_exact(&mut self, worker: WorkerId, exact: bool) {
        if exact {
            self.workers.entry(worker).or_default();
        } else {
            self.workers.remove(&worker);
        }
    }

    /// One more request needs these; returns those that were taken.
    pub(super) fn add(&mut self, worker: WorkerId, blocks: &[BlockHash]) -> Vec<BlockHash> {
        let Some(known) = self.workers.get_mut(&worker) else { return Vec::new() };
        let room = EXPECTED_BLOCKS_MAX.saturating_sub(known.len());
        let taken = &blocks[..blocks.len().min(room)];
        for block in taken {
            *known.entry(*block).or_default() += 1;
        }
        taken.to_vec()
    }

    /// That request is over.
    pub(super) fn release(&mut self, worker: WorkerId, blocks: &[BlockHash]) {
        let Some(known) = self.workers.get_mut(&worker) else { return };
        for block in blocks {
            if let Some(requests) = known.get_mut(block) {
                *requests -= 1;
                if *requests == 0 {
                    known.remove(block);
                }
            }
        }
    }

    /// Raises each worker's `matched` blocks of `chain` by those that follow and are expected.
    pub(super) fn extend(&self, chain: &[BlockHash], matched: &mut Vec<(WorkerId, u32)>) {
        let run = |known: &HashMap<BlockHash, u32>, held: usize| {
            let more = chain[held..].iter().take_while(|block| known.contains_key(block)).count();
            (held + more) as u32
        };
        let Some(first) = chain.first() else { return };
        for (worker, held) in &mut *matched {
            if let Some(known) = self.workers.get(worker).filter(|known| !known.is_empty()) {
                *held = run(known, *held as usize);
            }
        }
        // Those that hold nothing of it yet; few, so that searching for each is cheap.
        for (worker, known) in self.workers.iter().filter(|(_, known)| known.contains_key(first)) {
            if !matched.iter().any(|(other, _)| other == worker) {
                matched.push((*worker, run(known, 0)));
            }
        }
    }

    /// Blocks expected of all workers.
    pub(super) fn len(&self) -> usize {
        self.workers.values().map(HashMap::len).sum()
    }
}
