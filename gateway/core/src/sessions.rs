//! What a session's last prompt began with, to see whether the next one still does: a prefix cache serves a conversation
//! only as long as each turn repeats what came before. Names of blocks alone, no text, in a bounded number of bytes; who
//! was heard of least recently is forgotten first. Which requests are one session is the caller's to say.

use std::collections::{BTreeMap, HashMap};

use keyway_wire::block_hash::BlockHash;

/// Bytes that a session takes besides its blocks: two maps' entries and what it keeps.
const SESSION_BYTES: usize = 192;

/// A prompt, as far as its session is concerned.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a> {
    /// Names of its blocks.
    pub chain: &'a [BlockHash],
    /// Of these, how many lie before its last message. The last one may be asked again in other words, which is no drift;
    /// what stands before it should be there in every later turn.
    pub settled: usize,
}

/// Where a session's prompt left its own past.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drift {
    /// Blocks that both have.
    pub common: usize,
    /// Settled blocks of the past that were lost with the next one.
    pub lost: usize,
}

/// The sessions.
#[derive(Debug)]
pub struct Sessions {
    known: HashMap<u64, Past>,
    by_age: BTreeMap<u64, u64>,
    tick: u64,
    bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct Past {
    /// Half of each name: enough to tell two prompts of one session apart, as names are chained.
    blocks: Box<[u32]>,
    settled: usize,
    heard: u64,
}

impl Past {
    fn bytes(&self) -> usize {
        SESSION_BYTES + size_of_val(&*self.blocks)
    }
}

fn short(name: BlockHash) -> u32 {
    name.0 as u32
}

impl Sessions {
    /// Remembers at most so many bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self { known: HashMap::new(), by_age: BTreeMap::new(), tick: 0, bytes: 0, max_bytes }
    }

    /// Where `turn` leaves the session's past; `None` if it goes on from there, is only shorter, or nothing is known.
    pub fn drift(&self, session: u64, turn: Turn<'_>) -> Option<Drift> {
        let past = self.known.get(&session)?;
        // A hash stands for all before it: where one is the same, so are those in front of it.
        let (mut common, mut end) = (0, past.blocks.len().min(turn.chain.len()));
        while common < end {
            let middle = usize::midpoint(common, end);
            if past.blocks[middle] == short(turn.chain[middle]) {
                common = middle + 1;
            } else {
                end = middle;
            }
        }
        let left = common < past.settled && common < turn.chain.len();
        left.then(|| Drift { common, lost: past.settled - common })
    }

    /// Takes `turn` for the session's past from now on.
    pub fn remember(&mut self, session: u64, turn: Turn<'_>) {
        self.forget(session);
        self.tick += 1;
        let blocks = turn.chain.iter().copied().map(short).collect();
        let past = Past { blocks, settled: turn.settled.min(turn.chain.len()), heard: self.tick };
        if past.bytes() > self.max_bytes {
            return;
        }
        self.bytes += past.bytes();
        self.known.insert(session, past);
        self.by_age.insert(self.tick, session);
        while self.bytes > self.max_bytes {
            let Some((_, oldest)) = self.by_age.pop_first() else { return };
            self.forget(oldest);
        }
    }

    /// Bytes taken.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn forget(&mut self, session: u64) {
        if let Some(past) = self.known.remove(&session) {
            self.bytes -= past.bytes();
            self.by_age.remove(&past.heard);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chain(blocks: impl IntoIterator<Item = u64>) -> Vec<BlockHash> {
        // As chained names are: each depends on all before it.
        let step = |state: &mut u64, block: u64| {
            *state = (*state ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
            Some(BlockHash(*state))
        };
        blocks.into_iter().scan(1, step).collect()
    }

    fn drift(past: (&[BlockHash], usize), now: &[BlockHash]) -> Option<Drift> {
        let mut sessions = Sessions::new(1 << 20);
        sessions.remember(7, Turn { chain: past.0, settled: past.1 });
        assert_eq!(sessions.drift(8, Turn { chain: now, settled: 0 }), None, "another session");
        sessions.drift(7, Turn { chain: now, settled: 0 })
    }

    #[test]
    fn going_on_asking_again_and_starting_over_are_no_drift() {
        let past = chain(0..10);
        for turn in [chain(0..30), chain(0..10), chain((0..8).chain(50..60)), chain(0..3), chain(0..0)] {
            assert_eq!(drift((&past, 8), &turn), None);
        }
    }

    #[test]
    fn a_change_in_what_was_settled_is_found_where_it_is() {
        let past = chain(0..10);
        let now = chain((0..3).chain(100..120));
        assert_eq!(drift((&past, 8), &now), Some(Drift { common: 3, lost: 5 }));
        assert_eq!(drift((&past, 8), &chain(100..101)), Some(Drift { common: 0, lost: 8 }));
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_the_last_heard_stay(turns in prop::collection::vec((0_u64..40, 0_usize..200), 1..300)) {
            let max = 20_000;
            let mut sessions = Sessions::new(max);
            for (session, blocks) in &turns {
                let chain = chain(0..*blocks as u64);
                sessions.remember(*session, Turn { chain: &chain, settled: *blocks });
                prop_assert!(sessions.bytes() <= max);
                let really: usize = sessions.known.values().map(Past::bytes).sum();
                prop_assert_eq!((really, sessions.by_age.len()), (sessions.bytes(), sessions.known.len()));
            }
            let (last, blocks) = turns[turns.len() - 1];
            let changed = chain(500..501);
            let found = sessions.drift(last, Turn { chain: &changed, settled: 0 });
            prop_assert_eq!(found.is_some(), blocks > 0);
        }
    }
}
