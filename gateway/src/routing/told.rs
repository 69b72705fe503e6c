//! What other gateways are told of this one's placements, and what is recorded of theirs: the core's log
//! behind a lock, and the fleet's workers by the names that gateways have for them. Where no gateway
//! tells, there is none of it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use keyway_core::{
    index::{Owner, Placement, WorkerId},
    told::{Heard, Outcome, PlacementLog, Told, ToldWords, Word},
};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use parking_lot::Mutex;

use super::Router;
use crate::{
    fleet::Worker,
    limits::{PEER_PLACEMENTS_BYTES, PEER_PLACEMENTS_LINE_BYTES},
};

/// A worker that words on placements are about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The number that the words have for it: one for its blocks of text, one for those of tokens.
    pub number: WorkerId,
    /// Its own number, by which it is mostly found.
    pub id: WorkerId,
    /// The worker's name.
    pub worker: String,
}

/// What is told of placements.
#[derive(Debug)]
pub(super) struct Telling(Mutex<PlacementLog>);

impl Telling {
    pub(super) fn new() -> Self {
        Self(Mutex::new(PlacementLog::new(PEER_PLACEMENTS_BYTES)))
    }

    pub(super) fn placed(
        &self,
        now: Duration,
        owner: Owner,
        chain: &[BlockHash],
        placement: &Placement,
    ) -> Option<Told> {
        self.0.lock().placed(now, owner, chain, placement)
    }

    pub(super) fn closed(&self, now: Duration, told: Told, began: bool) {
        self.0.lock().closed(now, told, began);
    }
}

impl Router {
    /// Whether other gateways are told of its placements.
    pub fn tells_placements(&self) -> bool {
        self.telling.is_some()
    }

    /// Records a placement as a choice does, and tells it.
    #[cfg(test)]
    pub fn place_for_tests(&self, worker: &Worker, chain: &[BlockHash]) -> Placement {
        let placement = self.index.with(|index| index.place(worker.id, chain));
        if let Some(telling) = &self.telling {
            telling.placed(self.now(), Owner::NOBODY, chain, &placement);
        }
        placement
    }

    /// Another gateway listens from now on: where it begins. `None`: it is told nothing of placements.
    pub fn placements_from(&self) -> Option<u64> {
        Some(self.telling.as_ref()?.0.lock().listened_to(self.now()))
    }

    /// What is new from there on, as far as it fits a line, and the workers that it is about.
    pub fn placements_after(&self, next: u64) -> Option<(ToldWords, Vec<Placed>)> {
        let log = self.telling.as_ref()?.0.lock();
        if !log.has_after(next) {
            return None;
        }
        let mut said = log.read(next, self.now(), PEER_PLACEMENTS_LINE_BYTES);
        drop(log);
        said.workers.sort_unstable();
        let mut workers = Vec::with_capacity(said.workers.len());
        for worker in self.fleet.all().iter() {
            for number in [worker.id, worker.residency.token_id] {
                if said.workers.binary_search(&number).is_ok() {
                    workers.push(Placed { number, id: worker.id, worker: worker.name.clone() });
                }
            }
        }
        Some((said, workers))
    }

    /// Records what another gateway says of its placements; `workers` are those that it means. What
    /// became of the words is handed to `count`.
    pub fn hear_placements(
        &self,
        heard: &mut Heard,
        workers: &[Placed],
        words: impl Iterator<Item = Word>,
        mut count: impl FnMut(Outcome),
    ) {
        let fleet = self.fleet.all();
        let here: HashMap<WorkerId, WorkerId> = workers
            .iter()
            .filter_map(|placed| Some((placed.number, self.number_here(&fleet, placed)?)))
            .collect();
        for word in words {
            let at = match &word {
                Word::Placed { worker, .. } => here.get(worker).copied(),
                Word::Closed { .. } => None,
            };
            // A choice that waits is made before the next one.
            count(self.index.with_fairly(|index| heard.take(index, &word, at)));
        }
    }

    /// Another gateway is heard no more.
    pub fn forget_placements(&self, heard: &mut Heard) {
        if heard.open() > 0 {
            self.index.with(|index| heard.withdraw_all(index));
        }
    }

    /// What the index here calls a worker that another gateway means, if it models its cache.
    fn number_here(&self, fleet: &[Arc<Worker>], placed: &Placed) -> Option<WorkerId> {
        // Numbers follow from names, but where two workers' meet.
        let likely = fleet.binary_search_by_key(&placed.id, |worker| worker.id).ok().map(|at| &fleet[at]);
        let is_it = |worker: &&Arc<Worker>| worker.name == placed.worker;
        let worker = likely.filter(is_it).or_else(|| fleet.iter().find(is_it))?;
        self.index.recall(worker);
        if placed.number == placed.id {
            return Some(worker.id);
        }
        (!worker.residency.trusted()).then_some(worker.residency.token_id)
    }

    /// Tells which names this gateway gives to prompts: whose are others means other prompts by them.
    pub fn names_check(&self) -> u64 {
        names_check(self.hash_key, self.block_bytes)
    }
}

fn names_check(key: HashKey, block_bytes: usize) -> u64 {
    Chain::new(key, b"names of spans").hash(&(block_bytes as u64).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_another_key_or_blocks_of_another_size_gives_other_names() {
        let (one, other) = (HashKey::new(1), HashKey::new(2));
        let check = names_check(one, 64);
        assert!(check != names_check(one, 128) && check != names_check(other, 64));
        assert_eq!(check, names_check(one, 64));
    }
}
