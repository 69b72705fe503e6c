//! One worker's KV events, made into residency in the index. Knows sequence numbers, gaps, restarts and replays, but no
//! socket: it says what to ask for ([`Action`]), and is told what came.
//!
//! The subscriber's part:
//! - [`KvFeed::connected`] whenever the live stream was connected anew: what went before may be another process's.
//! - [`KvFeed::live`] for every live message; [`KvFeed::reply`] for every reply to the request under way, and
//!   [`KvFeed::reply_ended`] when it ended or was given up.
//! - Each returns an action. One that asks for something replaces the request under way, whose replies must be dropped.
//!
//! Where in doubt the worker's residency is cleared: too little known costs time, too much known costs more of it.

mod apply;
mod blocks;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use keyway_wire::block_hash::HashKey;
use keyway_wire::kv_event::{DecodeError, Decoded, EventBatch};

use self::blocks::Blocks;
use crate::index::{PrefixIndex, WorkerId};

/// Live batches held back while a reply is under way; those beyond it are asked for again. At a thousand steps a second
/// a quarter of one, which is longer than a reply takes; at 3 KB each less than 1 MiB.
const HELD_BATCHES_MAX: usize = 256;

/// What a worker can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing: after a gap the worker's residency is forgotten.
    Nothing,
    /// The last batches, by number.
    Replay,
    /// The last batches, or all of its state. A worker that does not know snapshots ends such a reply at once.
    Snapshot,
}

/// What the subscriber is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Action {
    /// Nothing but going on.
    Wait,
    /// Ask for all batches from this number on.
    Replay {
        /// The first one missing.
        from: u64,
    },
    /// Ask for the whole state.
    Snapshot,
}

/// What a feed has met. All but `batches` and `removed` are signs of something worth a look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FeedStats {
    /// Batches applied.
    pub batches: u64,
    /// Batches that could not be read at all.
    pub undecodable: u64,
    /// Times that batches were missing.
    pub gaps: u64,
    /// Times that the numbers began anew.
    pub restarts: u64,
    /// Times that residency was forgotten because what was missing could not be had.
    pub cleared: u64,
    /// Events that made no sense.
    pub malformed: u64,
    /// Events of other tiers that do not count or that name nothing known, of other cache groups, or of unknown types.
    pub ignored: u64,
    /// Blocks stored after a parent that is not known.
    pub orphans: u64,
    /// Removals of blocks that were known.
    pub removed: u64,
    /// Blocks removed that were not known.
    pub unknown_removals: u64,
    /// Blocks not taken because the feed holds as many as it may.
    pub over_capacity: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Live batches follow each other.
    Synced,
    /// A replay is under way.
    Replay {
        /// Whether it brought anything new.
        progress: bool,
        /// Whether it begins too late, or lacks something.
        hole: bool,
    },
    /// A snapshot is under way.
    Snapshot {
        /// Whether it brought anything.
        begun: bool,
    },
}

/// The events of one worker.
#[derive(Debug)]
pub struct KvFeed {
    worker: WorkerId,
    /// Its name in the index for blocks in any tier, if other tiers count.
    any_tier: Option<WorkerId>,
    /// Whether it has announced other tiers since it was last empty.
    tiers_seen: bool,
    key: HashKey,
    recovery: Recovery,
    state: State,
    /// Number of the next batch to apply; `None`: whichever comes.
    next: Option<u64>,
    /// Number of the last live message.
    last_live: Option<u64>,
    /// Live batches that came before their turn.
    held: BTreeMap<u64, Result<Decoded, DecodeError>>,
    blocks: Blocks,
    block_size: Option<u32>,
    stats: FeedStats,
}

impl KvFeed {
    /// A feed that was not connected yet. `key` is the index's; `max_blocks` bounds what is known of the worker, at
    /// about 50 bytes a block.
    pub fn new(worker: WorkerId, key: HashKey, recovery: Recovery, max_blocks: usize) -> Self {
        Self {
            worker,
            any_tier: None,
            tiers_seen: false,
            key,
            recovery,
            state: State::Synced,
            next: None,
            last_live: None,
            held: BTreeMap::new(),
            blocks: Blocks::new(max_blocks),
            block_size: None,
            stats: FeedStats::default(),
        }
    }

    /// Lets blocks in the host's memory and on disks count too: as `any_tier` the index has what any tier of the worker holds,
    /// its own cache's blocks among it, from the first event of another tier on.
    #[must_use]
    pub fn with_tiers(self, any_tier: Option<WorkerId>) -> Self {
        Self { any_tier, ..self }
    }

    /// What it has met so far.
    pub fn stats(&self) -> FeedStats {
        self.stats
    }

    /// Tokens in a block, as the last stored ones had them; `None` before the first.
    pub fn block_size(&self) -> Option<u32> {
        self.block_size
    }

    /// Whether the index has all that the worker has announced.
    pub fn is_synced(&self) -> bool {
        self.state == State::Synced
    }

    /// The live stream is connected, for the first time or again.
    pub fn connected(&mut self, index: &mut PrefixIndex) -> Action {
        self.held.clear();
        self.last_live = None;
        self.start_over(index)
    }

    /// Everything anew: nothing that is known can be trusted.
    fn start_over(&mut self, index: &mut PrefixIndex) -> Action {
        if self.recovery == Recovery::Snapshot {
            // What is known stays until the snapshot replaces it, and with it the numbers.
            self.next = None;
            return self.ask_for_snapshot();
        }
        self.clear(index);
        if self.recovery == Recovery::Nothing {
            (self.state, self.next) = (State::Synced, None);
            return Action::Wait;
        }
        self.next = Some(0);
        self.ask_for_replay(0)
    }

    fn ask_for_snapshot(&mut self) -> Action {
        self.state = State::Snapshot { begun: false };
        Action::Snapshot
    }

    fn ask_for_replay(&mut self, from: u64) -> Action {
        self.state = State::Replay { progress: false, hole: false };
        Action::Replay { from }
    }

    /// A live message.
    pub fn live(&mut self, index: &mut PrefixIndex, seq: u64, batch: Result<Decoded, DecodeError>) -> Action {
        // Live messages come in order and once. What was asked for may have overtaken them, which is no restart.
        if self.last_live.replace(seq).is_some_and(|last| seq <= last) {
            return self.restarted(index, seq, batch);
        }
        match self.next {
            Some(next) if seq < next => Action::Wait,
            _ if self.state != State::Synced => {
                self.hold(seq, batch);
                Action::Wait
            }
            Some(next) if seq > next => {
                self.stats.gaps += 1;
                self.hold(seq, batch);
                match self.recovery {
                    Recovery::Nothing => self.jump(index),
                    Recovery::Replay | Recovery::Snapshot => self.ask_for_replay(next),
                }
            }
            _ => self.apply(index, seq, batch),
        }
    }

    /// The worker's numbers began anew: another process, with an empty cache.
    fn restarted(
        &mut self,
        index: &mut PrefixIndex,
        seq: u64,
        batch: Result<Decoded, DecodeError>,
    ) -> Action {
        self.stats.restarts += 1;
        self.held.clear();
        self.clear(index);
        if seq == 0 {
            (self.state, self.next) = (State::Synced, Some(0));
            return self.apply(index, seq, batch);
        }
        self.hold(seq, batch);
        match self.start_over(index) {
            Action::Wait => self.jump(index),
            action => action,
        }
    }

    /// One batch in reply to the request under way.
    pub fn reply(&mut self, index: &mut PrefixIndex, seq: u64, batch: Result<Decoded, DecodeError>) {
        match self.state {
            State::Synced => {}
            State::Snapshot { begun } => {
                if !begun {
                    self.clear(index);
                    self.state = State::Snapshot { begun: true };
                }
                // An unreadable part leaves its blocks unknown, nothing worse.
                self.take(index, batch);
                self.next = Some(seq);
            }
            State::Replay { .. } => self.replayed(index, seq, batch),
        }
    }

    fn replayed(&mut self, index: &mut PrefixIndex, seq: u64, batch: Result<Decoded, DecodeError>) {
        let State::Replay { progress, hole } = &mut self.state else { return };
        let next = self.next.unwrap_or(0);
        if seq < next || *hole {
            return;
        }
        if seq > next && self.recovery == Recovery::Snapshot {
            *hole = true;
            return;
        }
        *progress = true;
        if seq > next {
            self.stats.cleared += 1;
            self.clear(index);
        }
        self.next = Some(seq + 1);
        if !self.take(index, batch) {
            self.clear(index);
        }
    }

    /// The request under way was answered to its end, or (`complete` is false) given up: a lost end looks the same
    /// as a slow one. The subscriber waits before it repeats a request that was given up.
    pub fn reply_ended(&mut self, index: &mut PrefixIndex, complete: bool) -> Action {
        match self.state {
            State::Synced => Action::Wait,
            State::Snapshot { .. } if !complete => self.ask_for_snapshot(),
            State::Snapshot { begun: false } => {
                // Not known there: what asks for it is a very large number to an engine without snapshots.
                self.recovery = Recovery::Replay;
                self.start_over(index)
            }
            State::Replay { hole: true, .. } => self.ask_for_snapshot(),
            State::Replay { .. } if !complete => self.ask_for_replay(self.next.unwrap_or(0)),
            State::Replay { progress, .. } => self.caught_up(index, progress),
            State::Snapshot { begun: true } => self.caught_up(index, true),
        }
    }

    /// Applies what was held back, and sees whether anything is still missing.
    fn caught_up(&mut self, index: &mut PrefixIndex, progress: bool) -> Action {
        let (before, last_live) = (self.next.unwrap_or(0), self.last_live);
        self.state = State::Synced;
        let action = self.drain(index);
        if action != Action::Wait {
            return action;
        }
        let next = self.next.unwrap_or(0);
        if last_live.is_none_or(|last| last < next) {
            return Action::Wait;
        }
        match self.recovery {
            _ if progress || next > before => self.ask_for_replay(next),
            Recovery::Snapshot => self.ask_for_snapshot(),
            Recovery::Replay | Recovery::Nothing => self.jump(index),
        }
    }

    /// Gives up what is missing: from the next batch that is held, or that will come, on.
    fn jump(&mut self, index: &mut PrefixIndex) -> Action {
        self.stats.cleared += 1;
        self.clear(index);
        self.state = State::Synced;
        self.next = self.held.first_key_value().map(|(seq, _)| *seq);
        self.drain(index)
    }

    fn hold(&mut self, seq: u64, batch: Result<Decoded, DecodeError>) {
        if self.held.len() < HELD_BATCHES_MAX {
            self.held.insert(seq, batch);
        }
    }

    /// Applies held batches whose turn it is.
    fn drain(&mut self, index: &mut PrefixIndex) -> Action {
        while let Some(entry) = self.held.first_entry() {
            let (seq, next) = (*entry.key(), self.next.unwrap_or(0));
            if seq > next {
                break;
            }
            let batch = entry.remove();
            if seq == next {
                let action = self.apply(index, seq, batch);
                if action != Action::Wait {
                    return action;
                }
            }
        }
        Action::Wait
    }

    /// Applies the batch whose turn it is.
    fn apply(&mut self, index: &mut PrefixIndex, seq: u64, batch: Result<Decoded, DecodeError>) -> Action {
        self.next = Some(seq + 1);
        if self.take(index, batch) {
            return Action::Wait;
        }
        // What it removed is not known; a replay would bring the same bytes.
        self.stats.cleared += 1;
        self.clear(index);
        if self.recovery == Recovery::Snapshot { self.ask_for_snapshot() } else { Action::Wait }
    }

    /// Counts and applies a batch; false if it cannot be read.
    fn take(&mut self, index: &mut PrefixIndex, batch: Result<Decoded, DecodeError>) -> bool {
        let Ok(decoded) = batch else {
            self.stats.undecodable += 1;
            return false;
        };
        self.stats.batches += 1;
        self.stats.malformed += decoded.malformed as u64;
        self.stats.ignored += decoded.unknown as u64;
        self.apply_events(index, decoded.batch);
        true
    }

    fn clear(&mut self, index: &mut PrefixIndex) {
        self.blocks.clear();
        index.remove_worker(self.worker);
        if let Some(any_tier) = self.any_tier.filter(|_| std::mem::take(&mut self.tiers_seen)) {
            index.remove_worker(any_tier);
        }
    }
}
