//! One worker's KV events, made into residency in the index. Knows sequence numbers, gaps, restarts and
//! replays, but no socket: it says what to ask for ([`Action`]), and is told what came.
//!
//! The subscriber's part:
//! - [`KvFeed::connected`] whenever the live stream was connected anew: what went before may be another
//!   process's.
//! - [`KvFeed::live`] for every live message; [`KvFeed::reply`] for every reply to the request under way, and
//!   [`KvFeed::reply_ended`] when it ended or was given up.
//! - Each returns an action. One that asks for something replaces the request under way, whose replies must
//!   be dropped.
//!
//! A worker says as much at once as it likes, so the index is had for moments only ([`Moments`]): each of
//! these is a future that lets others have their turn in between. One that is dropped before its end leaves a
//! feed that is of no use.
//!
//! Where in doubt the worker's residency is cleared: too little known costs time, too much known costs more
//! of it.

mod apply;
mod blocks;
mod groups;
mod moments;
mod node;
mod runs;
#[cfg(test)]
mod tests;
mod tree;
mod walk;

use std::collections::BTreeMap;

use keyway_wire::block_hash::HashKey;
use keyway_wire::kv_event::{DecodeError, Events};

use self::blocks::Blocks;
pub use self::moments::{Alone, Moments};
use crate::index::WorkerId;

/// Live batches held back while a reply is under way; those beyond it are asked for again. At a thousand
/// steps a second a quarter of one, which is longer than a reply takes; at 3 KB each less than 1 MiB.
const HELD_BATCHES_MAX: usize = 256;
/// ... and their bytes.
const HELD_BYTES_MAX: usize = 4 << 20;

/// Events of stored blocks that said nothing of prefixes, one after the other, for which a worker's events
/// are of no use. Of each request's, those of a hybrid model's other groups come before those that do.
const BARREN_EVENTS: u32 = 64;

/// A batch, or why it cannot be read.
type Batch<'a> = Result<Events<'a>, DecodeError>;
/// The same, kept: how many events, and their bytes.
type Kept = Result<(u32, Box<[u8]>), DecodeError>;

/// What a worker can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing: after a gap the worker's residency is forgotten.
    Nothing,
    /// The last batches, by number.
    Replay,
    /// The last batches, or all of its state. A worker that does not know snapshots ends such a reply at
    /// once.
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
    /// Batches applied, live ones and those of replies.
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
    /// Events of other tiers that do not count or that name nothing known, of cache groups that say nothing
    /// of prefixes, or of unknown types.
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
    held: BTreeMap<u64, Kept>,
    held_bytes: usize,
    blocks: Blocks,
    block_size: Option<u32>,
    stats: FeedStats,
    /// Events of stored blocks that said nothing of prefixes, since the last one that did.
    barren: u32,
    /// Steps taken since others had their turn.
    steps: usize,
}

impl KvFeed {
    /// A feed that was not connected yet. `key` is the index's; `max_blocks` bounds what is known of the
    /// worker, at about 30 bytes a block.
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
            held_bytes: 0,
            blocks: Blocks::new(max_blocks),
            block_size: None,
            stats: FeedStats::default(),
            barren: 0,
            steps: 0,
        }
    }

    /// Lets blocks in the host's memory and on disks count too: as `any_tier` the index has what any tier of
    /// the worker holds, its own cache's blocks among it, from the first event of another tier on.
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

    /// Whether the worker stores blocks and nothing of that can be indexed: its events may be in order, but
    /// are of no use.
    pub fn is_barren(&self) -> bool {
        self.barren >= BARREN_EVENTS
    }

    /// The index counts on the worker's events from now on. What others have put there meanwhile says nothing
    /// of where a request of a hybrid model can go on, so that is told anew.
    pub async fn counted_on(&mut self, index: &impl Moments) {
        self.blocks.reckon_all();
        self.for_each(index, 0, |_, _, _, _| true).await;
    }

    /// The live stream is connected, for the first time or again.
    pub async fn connected(&mut self, index: &impl Moments) -> Action {
        self.forget_held();
        self.last_live = None;
        self.start_over(index).await
    }

    /// Everything anew: nothing that is known can be trusted.
    async fn start_over(&mut self, index: &impl Moments) -> Action {
        if self.recovery == Recovery::Snapshot {
            // What is known stays until the snapshot replaces it, and with it the numbers.
            self.next = None;
            return self.ask_for_snapshot();
        }
        self.clear(index).await;
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

    /// A batch that the worker has just published, under its number; says what to ask the worker for.
    pub async fn live(&mut self, index: &impl Moments, seq: u64, batch: Batch<'_>) -> Action {
        // Live messages come in order and once. What was asked for may have overtaken them, which is no
        // restart.
        if self.last_live.replace(seq).is_some_and(|last| seq <= last) {
            return self.restarted(index, seq, batch).await;
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
                    Recovery::Nothing => self.jump(index).await,
                    Recovery::Replay | Recovery::Snapshot => self.ask_for_replay(next),
                }
            }
            _ => self.apply(index, seq, batch).await,
        }
    }

    /// The worker's numbers began anew: another process, with an empty cache.
    async fn restarted(&mut self, index: &impl Moments, seq: u64, batch: Batch<'_>) -> Action {
        self.stats.restarts += 1;
        self.forget_held();
        self.clear(index).await;
        if seq == 0 {
            (self.state, self.next) = (State::Synced, Some(0));
            return self.apply(index, seq, batch).await;
        }
        self.hold(seq, batch);
        match self.start_over(index).await {
            Action::Wait => self.jump(index).await,
            action => action,
        }
    }

    /// One batch in reply to the request under way.
    pub async fn reply(&mut self, index: &impl Moments, seq: u64, batch: Batch<'_>) {
        match self.state {
            State::Synced => {}
            State::Snapshot { begun } => {
                if !begun {
                    self.clear(index).await;
                    self.state = State::Snapshot { begun: true };
                }
                // An unreadable part leaves its blocks unknown, nothing worse.
                self.take(index, batch).await;
                self.next = Some(seq);
            }
            State::Replay { .. } => self.replayed(index, seq, batch).await,
        }
    }

    async fn replayed(&mut self, index: &impl Moments, seq: u64, batch: Batch<'_>) {
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
            self.clear(index).await;
        }
        self.next = Some(seq + 1);
        if !self.take(index, batch).await {
            self.clear(index).await;
        }
    }

    /// The request under way was answered to its end, or (`complete` is false) given up: a lost end looks the
    /// same as a slow one. The subscriber waits before it repeats a request that was given up.
    pub async fn reply_ended(&mut self, index: &impl Moments, complete: bool) -> Action {
        match self.state {
            State::Synced => Action::Wait,
            State::Snapshot { .. } if !complete => self.ask_for_snapshot(),
            State::Snapshot { begun: false } => {
                // Not known there: what asks for it is a very large number to an engine without snapshots.
                self.recovery = Recovery::Replay;
                self.start_over(index).await
            }
            State::Replay { hole: true, .. } => self.ask_for_snapshot(),
            State::Replay { .. } if !complete => self.ask_for_replay(self.next.unwrap_or(0)),
            State::Replay { progress, .. } => self.caught_up(index, progress).await,
            State::Snapshot { begun: true } => self.caught_up(index, true).await,
        }
    }

    /// Applies what was held back, and sees whether anything is still missing.
    async fn caught_up(&mut self, index: &impl Moments, progress: bool) -> Action {
        let (before, last_live) = (self.next.unwrap_or(0), self.last_live);
        self.state = State::Synced;
        let action = self.drain(index).await;
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
            Recovery::Replay | Recovery::Nothing => self.jump(index).await,
        }
    }

    /// Gives up what is missing: from the next batch that is held, or that will come, on.
    async fn jump(&mut self, index: &impl Moments) -> Action {
        self.stats.cleared += 1;
        self.clear(index).await;
        self.state = State::Synced;
        self.next = self.held.first_key_value().map(|(seq, _)| *seq);
        self.drain(index).await
    }

    fn hold(&mut self, seq: u64, batch: Batch<'_>) {
        let kept: Kept = batch.map(|events| {
            let (count, bytes) = events.unread();
            (count, bytes.into())
        });
        let bytes = self.held_bytes + bytes_of(&kept);
        if self.held.len() < HELD_BATCHES_MAX && bytes <= HELD_BYTES_MAX && !self.held.contains_key(&seq) {
            self.held_bytes = bytes;
            self.held.insert(seq, kept);
        }
    }

    fn forget_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
    }

    /// Applies held batches whose turn it is.
    async fn drain(&mut self, index: &impl Moments) -> Action {
        while let Some(entry) = self.held.first_entry() {
            let (seq, next) = (*entry.key(), self.next.unwrap_or(0));
            if seq > next {
                break;
            }
            let kept = entry.remove();
            self.held_bytes -= bytes_of(&kept);
            if seq == next {
                let batch = kept.as_ref().map(|(count, bytes)| Events::resume((*count, bytes)));
                let action = self.apply(index, seq, batch.map_err(|error| *error)).await;
                if action != Action::Wait {
                    return action;
                }
            }
        }
        Action::Wait
    }

    /// Applies the batch whose turn it is.
    async fn apply(&mut self, index: &impl Moments, seq: u64, batch: Batch<'_>) -> Action {
        self.next = Some(seq + 1);
        if self.take(index, batch).await {
            return Action::Wait;
        }
        // What it removed is not known; a replay would bring the same bytes.
        self.stats.cleared += 1;
        self.clear(index).await;
        if self.recovery == Recovery::Snapshot { self.ask_for_snapshot() } else { Action::Wait }
    }

    /// Counts and applies a batch; false if it cannot be read.
    async fn take(&mut self, index: &impl Moments, batch: Batch<'_>) -> bool {
        let Ok(events) = batch else {
            self.stats.undecodable += 1;
            return false;
        };
        self.stats.batches += 1;
        self.apply_events(index, events).await;
        true
    }

    async fn clear(&mut self, index: &impl Moments) {
        self.blocks.clear();
        let any_tier = self.any_tier.filter(|_| std::mem::take(&mut self.tiers_seen));
        for id in [Some(self.worker), any_tier].into_iter().flatten() {
            let most = index.steps();
            while index.moment(|index| index.forget(id, most)) == most {
                index.between().await;
            }
        }
    }
}

fn bytes_of(kept: &Kept) -> usize {
    kept.as_ref().map_or(0, |(_, bytes)| bytes.len())
}
