//! What this gateway has to tell of its placements: a log that everybody who listens reads at its own
//! pace, of the last seconds and of so many bytes at most. Who reads too slowly misses the oldest, and is
//! told so.

use std::collections::VecDeque;
use std::time::Duration;

use keyway_wire::block_hash::BlockHash;

use super::word::Word;
use crate::index::{CHAIN_BLOCKS_MAX, Owner, Placement, WorkerId};

/// Time for which a word is kept for who has not read it, or has yet to begin to listen.
const KEPT_FOR: Duration = Duration::from_secs(5);
/// Words from before somebody began to listen that it is told all the same: what was placed between the
/// index that it got from elsewhere and its first question.
const HISTORY: Duration = Duration::from_secs(2);
/// Time after which a chain is told whole again: what is missed is missed for so long at most. Of turns
/// that follow each other within that time each but the first is told by what it adds.
const WHOLE_EVERY: Duration = Duration::from_secs(60);
/// Ends of chains of which it is known when they were told whole.
const ENDS: usize = 1 << 14;
/// Bytes that each word takes beside its own.
const ENTRY_BYTES: usize = size_of::<Entry>();

/// A placement that was told, to be closed ([`PlacementLog::closed`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told(u64);

/// The log.
#[derive(Debug)]
pub struct PlacementLog {
    entries: VecDeque<Entry>,
    /// Number of the first entry, among all that ever were.
    first: u64,
    bytes: usize,
    bytes_max: usize,
    placements: u64,
    ends: Box<[End]>,
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    /// Where it was placed, if it is a placement.
    worker: Option<WorkerId>,
    word: Box<[u8]>,
}

/// The last block of a chain at a worker, and when the chain up to there was told whole.
#[derive(Debug, Clone, Copy, Default)]
struct End {
    name: u64,
    whole_at: Duration,
}

/// What is told in one go.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ToldWords {
    /// As [`super::words`] reads it.
    pub bytes: Vec<u8>,
    /// The workers that it names, each once.
    pub workers: Vec<WorkerId>,
    /// Where to read on.
    pub next: u64,
    /// Placements among it.
    pub placements: u64,
    /// Words that came before it and are gone.
    pub missed: u64,
}

impl PlacementLog {
    /// An empty one, of about so many bytes at most.
    pub fn new(bytes_max: usize) -> Self {
        let ends = vec![End::default(); ENDS].into_boxed_slice();
        Self { entries: VecDeque::new(), first: 0, bytes: 0, bytes_max, placements: 0, ends }
    }

    /// A chain was placed at a worker. `None`: there is nothing to tell, as the worker says itself what
    /// it holds.
    pub fn placed(
        &mut self,
        now: Duration,
        owner: Owner,
        chain: &[BlockHash],
        placement: &Placement,
    ) -> Option<Told> {
        // A line has room for so much. Its head is told.
        let kept = chain.len().min(placement.kept()).min(CHAIN_BLOCKS_MAX);
        let new = kept.saturating_sub(placement.added());
        let (worker, chain) = (placement.worker(), &chain[..kept]);
        let last = *chain.last()?;
        let behind = new.checked_sub(1).map(|before| chain[before]);
        let whole_at = behind.and_then(|block| self.whole_at(now, worker, block));
        let mut word = Vec::with_capacity(24 + (kept - whole_at.map_or(0, |_| new)) * size_of::<u64>());
        match whole_at {
            Some(_) => Word::placed(&mut word, self.placements, (worker, owner), behind, &chain[new..]),
            None => Word::placed(&mut word, self.placements, (worker, owner), None, chain),
        }
        // Others may go on from where this one did.
        let whole_at = whole_at.unwrap_or(now);
        for block in behind.into_iter().chain([last]) {
            let (at, name) = end_of(worker, block);
            self.ends[at] = End { name, whole_at };
        }
        let told = Told(self.placements);
        self.placements += 1;
        self.add(now, Some(worker), word);
        Some(told)
    }

    /// A placement's worker has begun to answer (`began`), or never will.
    pub fn closed(&mut self, now: Duration, Told(number): Told, began: bool) {
        let mut word = Vec::with_capacity(8);
        Word::closed(&mut word, number, began);
        self.add(now, None, word);
    }

    /// Somebody listens from now on. It may know nothing, so whole chains are told. Where it is to read
    /// first.
    pub fn listened_to(&mut self, now: Duration) -> u64 {
        self.ends.fill(End::default());
        let old = self.entries.partition_point(|entry| entry.at + HISTORY < now);
        self.first + old as u64
    }

    /// What there is from `next` on, as it was `until` then, of so many bytes and a word at most.
    pub fn read(&self, next: u64, until: Duration, bytes: usize) -> ToldWords {
        let missed = self.first.saturating_sub(next);
        let mut said = ToldWords { next: next.max(self.first), missed, ..ToldWords::default() };
        let from = (said.next - self.first) as usize;
        for entry in self.entries.range(from.min(self.entries.len())..) {
            if entry.at > until || said.bytes.len() >= bytes {
                break;
            }
            said.next += 1;
            said.bytes.extend_from_slice(&entry.word);
            if let Some(worker) = entry.worker {
                said.placements += 1;
                if !said.workers.contains(&worker) {
                    said.workers.push(worker);
                }
            }
        }
        said
    }

    /// Whether there is something from `next` on.
    pub fn has_after(&self, next: u64) -> bool {
        self.first + self.entries.len() as u64 > next
    }

    /// Where to read on for who is to hear nothing of what there is.
    pub fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Bytes that are waiting for who listens.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn add(&mut self, at: Duration, worker: Option<WorkerId>, word: Vec<u8>) {
        self.bytes += word.len() + ENTRY_BYTES;
        self.entries.push_back(Entry { at, worker, word: word.into_boxed_slice() });
        let mut lost = false;
        while let Some(oldest) = self.entries.front() {
            let is_full = self.bytes > self.bytes_max;
            if !is_full && oldest.at + KEPT_FOR >= at {
                break;
            }
            lost |= is_full;
            self.bytes -= oldest.word.len() + ENTRY_BYTES;
            self.entries.pop_front();
            self.first += 1;
        }
        if lost {
            // What somebody has missed others may go on from.
            self.ends.fill(End::default());
        }
    }

    /// When the chain up to this block was told whole, if that is not long ago.
    fn whole_at(&self, now: Duration, worker: WorkerId, block: BlockHash) -> Option<Duration> {
        let (at, name) = end_of(worker, block);
        let end = self.ends[at];
        (end.name == name && end.whole_at + WHOLE_EVERY >= now).then_some(end.whole_at)
    }
}

/// Where it is noted, and by which name. No name is 0, but for one in 2^64.
fn end_of(worker: WorkerId, BlockHash(block): BlockHash) -> (usize, u64) {
    // 2^64 divided by the golden ratio, odd: it fills the upper bits.
    let name = (block ^ u64::from(worker.0) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((name >> 32) as usize % ENDS, name)
}
