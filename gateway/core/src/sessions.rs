//! What a session's last prompt began with, to see whether the next one still does: a prefix cache serves a
//! conversation only as long as each turn repeats what came before. Names of blocks alone, no text, in a
//! bounded number of bytes; who was heard of least recently is forgotten first. Which requests are one
//! session is the caller's to say.

use std::collections::VecDeque;

use keyway_wire::block_hash::BlockHash;

use crate::spread_map::SpreadMap;

/// Bytes that a session takes besides its blocks: its entry in the map, what it keeps, and its places in the
/// order of age.
const SESSION_BYTES: usize = 192;
/// The order of age may have as many places that are no longer true as there are sessions, and so many more.
const STALE_MAX: usize = 64;

/// A prompt, as far as its session is concerned.
#[derive(Debug, Clone, Copy)]
pub struct SessionTurn<'a> {
    /// Names of its blocks.
    pub chain: &'a [BlockHash],
    /// Of these, how many lie before its last message. The last one may be asked again in other words, which
    /// is no drift; what stands before it should be there in every later turn.
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

/// What the last prompt of each session began with, in at most so many bytes as [`Sessions::new`] allows.
#[derive(Debug)]
pub struct Sessions {
    /// Their names are hashes.
    known: SpreadMap<u64, Past>,
    /// When a session was heard of, and its name, in order; of those of one session only the last is true.
    by_age: VecDeque<(u64, u64)>,
    tick: u64,
    bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct Past {
    /// Half of each name: enough to tell two prompts of one session apart, as names are chained.
    blocks: Vec<u32>,
    settled: usize,
    heard: u64,
}

impl Past {
    fn bytes(&self) -> usize {
        SESSION_BYTES + self.blocks.capacity() * size_of::<u32>()
    }

    /// Leading blocks that it has in common with another prompt.
    fn common(&self, chain: &[BlockHash]) -> usize {
        // A hash stands for all before it: where one is the same, so are those in front of it.
        let end = self.blocks.len().min(chain.len());
        let same = |at: usize| self.blocks[at] == short(chain[at]);
        if end == 0 || same(end - 1) {
            return end;
        }
        let (mut common, mut end) = (0, end - 1);
        while common < end {
            let middle = usize::midpoint(common, end);
            if same(middle) {
                common = middle + 1;
            } else {
                end = middle;
            }
        }
        common
    }

    /// Where a turn leaves it that has so much in common with it.
    fn drift(&self, turn: SessionTurn<'_>, common: usize) -> Option<Drift> {
        let left = common < self.settled && common < turn.chain.len();
        left.then(|| Drift { common, lost: self.settled - common })
    }
}

fn short(name: BlockHash) -> u32 {
    name.0 as u32
}

impl Sessions {
    /// Remembers at most so many bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self { known: SpreadMap::default(), by_age: VecDeque::new(), tick: 0, bytes: 0, max_bytes }
    }

    /// Where `turn` leaves the session's past; `None` if it goes on from there, is only shorter, or nothing
    /// is known.
    pub fn drift(&self, session: u64, turn: SessionTurn<'_>) -> Option<Drift> {
        let past = self.known.get(&session)?;
        past.drift(turn, past.common(turn.chain))
    }

    /// As [`Sessions::drift`], and takes `turn` for the session's past from now on.
    pub fn follow(&mut self, session: u64, turn: SessionTurn<'_>) -> Option<Drift> {
        self.tick += 1;
        let settled = turn.settled.min(turn.chain.len());
        let blocks = turn.chain.iter().copied().map(short);
        let mut drift = None;
        if let Some(past) = self.known.get_mut(&session) {
            let common = past.common(turn.chain);
            drift = past.drift(turn, common);
            self.bytes -= past.bytes();
            // What both have is not written again.
            past.blocks.truncate(common);
            past.blocks.reserve_exact(turn.chain.len() - common);
            past.blocks.extend(blocks.skip(common));
            (past.settled, past.heard) = (settled, self.tick);
            self.bytes += past.bytes();
        } else {
            let past = Past { blocks: blocks.collect(), settled, heard: self.tick };
            self.bytes += past.bytes();
            self.known.insert(session, past);
        }
        self.by_age.push_back((self.tick, session));
        while self.bytes > self.max_bytes {
            let Some((heard, oldest)) = self.by_age.pop_front() else { break };
            if self.is_true(heard, oldest) {
                self.forget(oldest);
            }
        }
        if self.by_age.len() > 2 * self.known.len() + STALE_MAX {
            let mut by_age = std::mem::take(&mut self.by_age);
            by_age.retain(|&(heard, session)| self.is_true(heard, session));
            self.by_age = by_age;
        }
        drift
    }

    fn is_true(&self, heard: u64, session: u64) -> bool {
        self.known.get(&session).is_some_and(|past| past.heard == heard)
    }

    /// Bytes that the remembered sessions take: a fixed number for each, and four for each block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn forget(&mut self, session: u64) {
        if let Some(past) = self.known.remove(&session) {
            self.bytes -= past.bytes();
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
        sessions.follow(7, SessionTurn { chain: past.0, settled: past.1 });
        assert_eq!(sessions.drift(8, SessionTurn { chain: now, settled: 0 }), None, "another session");
        sessions.drift(7, SessionTurn { chain: now, settled: 0 })
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

    #[test]
    fn what_a_session_said_last_counts_also_where_it_is_as_long() {
        let mut sessions = Sessions::new(1 << 20);
        for first in [0, 100] {
            let chain = chain(first..first + 10);
            sessions.follow(7, SessionTurn { chain: &chain, settled: 10 });
        }
        let drift =
            |first: u64| sessions.drift(7, SessionTurn { chain: &chain(first..first + 12), settled: 0 });
        assert_eq!(drift(100), None);
        assert_eq!(drift(0), Some(Drift { common: 0, lost: 10 }));
    }

    #[test]
    fn the_one_heard_of_least_recently_is_forgotten_not_the_one_that_came_first() {
        let blocks = chain(0..100);
        let turn = SessionTurn { chain: &blocks, settled: 100 };
        let mut sessions = Sessions::new(3 * (SESSION_BYTES + 400));
        for session in [1, 2, 3, 1, 4] {
            sessions.follow(session, turn);
        }
        let changed = chain(500..501);
        let known = |session| sessions.drift(session, SessionTurn { chain: &changed, settled: 0 }).is_some();
        assert_eq!([1, 2, 3, 4].map(known), [true, false, true, true]);
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_the_last_heard_stay(turns in prop::collection::vec((0_u64..40, 0_usize..200), 1..300)) {
            let max = 20_000;
            let mut sessions = Sessions::new(max);
            for (session, blocks) in &turns {
                let chain = chain(0..*blocks as u64);
                sessions.follow(*session, SessionTurn { chain: &chain, settled: *blocks });
                prop_assert!(sessions.bytes() <= max);
                let really: usize = sessions.known.values().map(Past::bytes).sum();
                prop_assert_eq!(really, sessions.bytes());
                // Each is in the order of age once, and what is besides is bounded.
                let order = &sessions.by_age;
                let once = order.iter().filter(|(heard, session)| sessions.is_true(*heard, *session)).count();
                prop_assert_eq!(once, sessions.known.len());
                prop_assert!(order.len() <= 2 * once + STALE_MAX);
            }
            let (last, blocks) = turns[turns.len() - 1];
            let changed = chain(500..501);
            let found = sessions.drift(last, SessionTurn { chain: &changed, settled: 0 });
            prop_assert_eq!(found.is_some(), blocks > 0);
        }
    }
}
