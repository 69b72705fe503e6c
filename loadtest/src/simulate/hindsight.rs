//! How many blocks a better placement of the same requests would have found, told afterwards: a search over
//! which worker each agent's turns go to, with caches that forget the least recently used block.
//!
//! It is an estimate from below of the best placement. Requests come in the order in which they were sent,
//! one after the other, whatever the load: a placement that it finds may be one that keeps a worker busy
//! while others idle. So the run's own placement is measured in the same way to be compared.

use super::optimum::Prompts;
use crate::random::{Purpose, Rng};

/// No block.
const NIL: u32 = u32::MAX;

/// Where each prompt of a run went.
#[derive(Debug, Default)]
pub(super) struct Placements {
    /// For each prompt its agent, numbered from 0, and its worker.
    placed: Vec<(u32, u32)>,
    agents: usize,
    /// Of each agent its session, numbered from 0.
    sessions: Vec<u32>,
}

/// Blocks found by the run's placement, and by the best that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) own: usize,
    pub(super) best: usize,
}

/// A cache of single blocks, by number.
struct Lru {
    /// Of each block its neighbours in the order of their last use; `held` says whether it has any.
    around: Vec<(u32, u32)>,
    held: Vec<bool>,
    oldest: u32,
    newest: u32,
    count: usize,
}

/// A placement that is made better.
struct Search<'a> {
    prompts: &'a Prompts,
    placements: &'a Placements,
    capacity: usize,
    /// Of each agent its worker, and of each worker the blocks found there.
    worker_of: Vec<u32>,
    found: Vec<usize>,
    cache: Lru,
}

// === impl Placements ===

impl Placements {
    /// The next prompt goes to a worker; agents and sessions are numbered as they come.
    pub(super) fn add(&mut self, (agent, session): (u32, u32), worker: usize) {
        if agent as usize == self.agents {
            self.agents += 1;
            self.sessions.push(session);
        }
        self.placed.push((agent, worker as u32));
    }

    /// Tries so many changes of a placement on `workers` workers of `capacity` blocks each.
    pub(super) fn search(&self, prompts: &Prompts, (workers, capacity): (usize, usize), tries: u32) -> Found {
        let mut cache = Lru::new(prompts.distinct());
        let own = (0..workers as u32).map(|worker| {
            found(prompts, capacity, &mut cache, self.placed.iter().map(|(_, at)| *at == worker))
        });
        let own = own.sum();
        let worker_of = self.usual(workers);
        let mut search =
            Search { prompts, placements: self, capacity, worker_of, found: vec![0; workers], cache };
        search.found = (0..workers as u32).map(|worker| search.at(worker)).collect();
        let mut rng = Rng::at(1, Purpose::Phase, 0);
        for _ in 0..if workers > 1 { tries } else { 0 } {
            let agent = rng.below(self.agents);
            let to = ((search.worker_of[agent] as usize + 1 + rng.below(workers - 1)) % workers) as u32;
            // A single agent moves, or with it all of its session that are where it is.
            search.try_move(agent, to, rng.unit() < 0.5);
        }
        Found { own, best: search.found.iter().sum::<usize>().max(own) }
    }

    /// The worker to which most of each agent's turns went.
    fn usual(&self, workers: usize) -> Vec<u32> {
        let mut counts = vec![0_u32; self.agents * workers];
        for &(agent, worker) in &self.placed {
            counts[agent as usize * workers + worker as usize] += 1;
        }
        let most = |counts: &[u32]| (0..workers).max_by_key(|&worker| counts[worker]).unwrap_or(0) as u32;
        counts.chunks(workers).map(most).collect()
    }
}

// === impl Search ===

impl Search<'_> {
    /// Blocks found at one worker.
    fn at(&mut self, worker: u32) -> usize {
        let Self { prompts, placements, capacity, worker_of, cache, .. } = self;
        let goes = placements.placed.iter().map(|(agent, _)| worker_of[*agent as usize] == worker);
        found(prompts, *capacity, cache, goes)
    }

    /// Moves an agent, or all of its session beside it, if more is found then.
    fn try_move(&mut self, agent: usize, to: u32, with_session: bool) {
        let (from, sessions) = (self.worker_of[agent], &self.placements.sessions);
        let moves = |other: &usize| {
            *other == agent
                || (with_session && sessions[*other] == sessions[agent] && self.worker_of[*other] == from)
        };
        let moved: Vec<usize> = (0..sessions.len()).filter(moves).collect();
        for &agent in &moved {
            self.worker_of[agent] = to;
        }
        let (at_from, at_to) = (self.at(from), self.at(to));
        let (from_at, to_at) = (from as usize, to as usize);
        if at_from + at_to >= self.found[from_at] + self.found[to_at] {
            (self.found[from_at], self.found[to_at]) = (at_from, at_to);
        } else {
            for agent in moved {
                self.worker_of[agent] = from;
            }
        }
    }
}

/// Blocks that a cache finds of the prompts that go to it.
fn found(prompts: &Prompts, capacity: usize, cache: &mut Lru, goes: impl Iterator<Item = bool>) -> usize {
    cache.clear();
    let mut found = 0;
    for ((blocks, askable), _) in prompts.each().zip(goes).filter(|(_, goes)| *goes) {
        let is_held = |block: &&u32| cache.held[**block as usize];
        found += blocks[..askable].iter().take_while(is_held).count();
        // As engines give them back: a prompt loses its end first.
        for &block in blocks.iter().rev() {
            cache.touch(block);
        }
        while cache.count > capacity {
            cache.forget(cache.oldest);
        }
    }
    found
}

// === impl Lru ===

impl Lru {
    fn new(blocks: usize) -> Self {
        let (around, held) = (vec![(NIL, NIL); blocks], vec![false; blocks]);
        Self { around, held, oldest: NIL, newest: NIL, count: 0 }
    }

    fn clear(&mut self) {
        self.held.fill(false);
        (self.oldest, self.newest, self.count) = (NIL, NIL, 0);
    }

    fn touch(&mut self, block: u32) {
        if self.held[block as usize] {
            self.forget(block);
        }
        self.held[block as usize] = true;
        self.around[block as usize] = (self.newest, NIL);
        match self.newest {
            NIL => self.oldest = block,
            newest => self.around[newest as usize].1 = block,
        }
        self.newest = block;
        self.count += 1;
    }

    fn forget(&mut self, block: u32) {
        let (before, after) = self.around[block as usize];
        match before {
            NIL => self.oldest = after,
            before => self.around[before as usize].1 = after,
        }
        match after {
            NIL => self.newest = before,
            after => self.around[after as usize].0 = before,
        }
        self.held[block as usize] = false;
        self.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;
    use proptest::prelude::*;

    use super::*;

    /// Prompts of agents of one session each: which agent, which worker, which blocks.
    fn run(asked: &[(u32, usize, &[u64])]) -> (Prompts, Placements) {
        let (mut prompts, mut placements) = (Prompts::default(), Placements::default());
        for &(agent, worker, blocks) in asked {
            let chain: Vec<_> = blocks.iter().map(|&block| BlockHash(block)).collect();
            prompts.add(&chain, chain.len(), 16 * chain.len() as u64);
            placements.add((agent, agent), worker);
        }
        (prompts, placements)
    }

    #[test]
    fn agents_that_are_in_each_others_way_are_put_apart() {
        let (a, b): (&[u64], &[u64]) = (&[1, 2, 3], &[11, 12, 13]);
        let asked = [(0, 0, a), (1, 0, b), (0, 0, a), (1, 0, b), (0, 0, a), (1, 0, b)];
        let (prompts, placements) = run(&asked);
        // Of four blocks the least recently used are the first prompt's.
        assert_eq!(placements.search(&prompts, (2, 4), 0), Found { own: 4, best: 4 });
        assert_eq!(placements.search(&prompts, (2, 4), 20), Found { own: 4, best: 12 });
        assert_eq!(placements.search(&prompts, (2, 6), 0), Found { own: 12, best: 12 });
    }

    proptest! {
        /// Whatever is tried, no placement finds more than can be found at all.
        #[test]
        fn a_placement_finds_no_more_than_is_possible(
            asked in prop::collection::vec((0_u32..3, 0_usize..2, prop::collection::btree_set(0_u64..9, 1..5)), 1..20),
            capacity in 1_usize..8,
        ) {
            let mut seen = Vec::new();
            let asked: Vec<(u32, usize, Vec<u64>)> = asked.into_iter().map(|(agent, worker, blocks)| {
                let known = seen.iter().position(|other| *other == agent);
                let number = known.unwrap_or_else(|| { seen.push(agent); seen.len() - 1 });
                (number as u32, worker, blocks.into_iter().collect())
            }).collect();
            let asked: Vec<_> = asked.iter().map(|(agent, worker, blocks)| (*agent, *worker, &blocks[..])).collect();
            let (prompts, placements) = run(&asked);
            let Found { own, best } = placements.search(&prompts, (2, capacity), 10);
            prop_assert!(own <= best && best <= prompts.found(2 * capacity), "{own} {best}");
        }
    }
}
