//! What no placement of requests can beat: how many blocks of their prompts, in the order in which they were
//! sent, one cache as large as all workers' together would find that knows what will be asked.
//!
//! Each worker takes its requests in the order in which they were sent, so what it holds when it takes one is
//! what its cache made of those before. All caches together never hold more blocks than this one may, and
//! whatever a request finds is in one of them. Of all ways to choose what such a cache keeps, none finds more
//! than to give up what is asked for last, or what has just been asked for if that is later still (L. A.
//! Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
//! 1966). Where engines preempt requests, blocks come back at other times, and it is no bound but near one.

use std::collections::{BTreeSet, HashMap};

use keyway_wire::block_hash::BlockHash;

/// Never asked again.
const NEVER: u32 = u32::MAX;

/// All prompts of a run.
#[derive(Debug, Default)]
pub(super) struct Prompts {
    numbers: HashMap<BlockHash, u32>,
    /// Blocks of all prompts, one after the other; a prompt's end by itself, and how many of its blocks may
    /// be found.
    blocks: Vec<u32>,
    ends: Vec<(usize, usize)>,
    pub(super) prompt_tokens: u64,
}

// === impl Prompts ===

impl Prompts {
    /// The next prompt; `askable` of its blocks may be found cached.
    pub(super) fn add(&mut self, chain: &[BlockHash], askable: usize, prompt_tokens: u64) {
        for block in chain {
            let next = self.numbers.len() as u32;
            self.blocks.push(*self.numbers.entry(*block).or_insert(next));
        }
        self.ends.push((self.blocks.len(), askable));
        self.prompt_tokens += prompt_tokens;
    }

    /// Different blocks of all of them.
    pub(super) fn distinct(&self) -> usize {
        self.numbers.len()
    }

    /// The blocks of each, by number, and how many of them may be found cached.
    pub(super) fn each(&self) -> impl Iterator<Item = (&[u32], usize)> {
        let ends = self.ends.iter().map(|(end, _)| *end);
        let begins = std::iter::once(0).chain(ends);
        begins.zip(&self.ends).map(|(begin, &(end, askable))| (&self.blocks[begin..end], askable))
    }

    /// Blocks that a cache of `capacity` blocks finds at best.
    pub(super) fn found(&self, capacity: usize) -> usize {
        let next = self.next_uses();
        // What is kept, by when it is asked for next.
        let mut kept: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut next_of = vec![NEVER; self.numbers.len()];
        let (mut found, mut from) = (0, 0);
        for (prompt, (blocks, askable)) in (0..).zip(self.each()) {
            let nexts = &next[from..from + blocks.len()];
            from += blocks.len();
            // First all are found, then it is decided what is kept: a prompt's own are not in its way.
            for (at, &block) in blocks.iter().enumerate() {
                if next_of[block as usize] == prompt && kept.remove(&(prompt, block)) {
                    found += usize::from(at < askable);
                }
            }
            for (&block, &next) in blocks.iter().zip(nexts) {
                next_of[block as usize] = next;
                kept.extend((next != NEVER).then_some((next, block)));
            }
            while kept.len() > capacity {
                kept.pop_last();
            }
        }
        found
    }

    /// Of each block of each prompt the prompt that asks for it next.
    fn next_uses(&self) -> Vec<u32> {
        let mut coming = vec![NEVER; self.numbers.len()];
        let mut next = vec![NEVER; self.blocks.len()];
        let mut at = self.blocks.len();
        for prompt in (0..self.ends.len()).rev() {
            let from = prompt.checked_sub(1).map_or(0, |before| self.ends[before].0);
            while at > from {
                at -= 1;
                next[at] = std::mem::replace(&mut coming[self.blocks[at] as usize], prompt as u32);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompts(asked: &[Vec<u64>]) -> Prompts {
        let mut prompts = Prompts::default();
        for chain in asked {
            let chain: Vec<_> = chain.iter().map(|&block| BlockHash(block)).collect();
            prompts.add(&chain, chain.len(), 16 * chain.len() as u64);
        }
        prompts
    }

    #[test]
    fn what_is_asked_last_is_given_up() {
        let asked = [vec![1], vec![2], vec![3], vec![1], vec![2], vec![1]];
        // One: 1 is kept for the fourth prompt and for the last.
        for (capacity, found) in [(0, 0), (1, 2), (2, 3), (9, 3)] {
            assert_eq!(prompts(&asked).found(capacity), found, "{capacity}");
        }
    }

    /// Of all subsets that a cache of single blocks may keep after each prompt, the best.
    fn by_force(asked: &[Vec<u64>], capacity: usize) -> usize {
        let mut states = HashMap::from([(0_u32, 0)]);
        for chain in asked {
            let mut next = HashMap::new();
            for (held, found) in states {
                let wanted = chain.iter().fold(0, |set, block| set | 1 << block);
                let found: usize = found + (held & wanted as u32).count_ones() as usize;
                let all = held | wanted as u32;
                let mut kept = all;
                loop {
                    if kept.count_ones() as usize <= capacity {
                        let best = next.entry(kept).or_insert(0);
                        *best = found.max(*best);
                    }
                    if kept == 0 {
                        break;
                    }
                    kept = (kept - 1) & all;
                }
            }
            states = next;
        }
        states.into_values().max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn no_way_to_keep_blocks_finds_more(
            asked in prop::collection::vec(prop::collection::btree_set(0_u64..6, 1..4), 1..12),
            capacity in 0_usize..5,
        ) {
            let asked: Vec<Vec<u64>> = asked.into_iter().map(|set| set.into_iter().collect()).collect();
            prop_assert_eq!(prompts(&asked).found(capacity), by_force(&asked, capacity));
        }
    }
}
