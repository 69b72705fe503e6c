//! The publisher's memory: the last batches for replay, and the state for snapshots. One lock keeps both true
//! to one sequence number. No sockets.
//!
//! What it answers is made piece by piece, as it is asked for: a client that takes its time for an answer
//! holds on to no more of it than handles of the blocks.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use keyway_wire::kv_event::{EventBatch, KvEvent, WireFormat};

use super::event::Layout;
use super::mirror::Mirror;
use super::recorder::Step;
use crate::engine::block_manager::CacheChange;
use crate::limits::{KV_REPLAY_BATCHES_MAX, KV_REPLAY_BYTES_MAX, KV_SNAPSHOT_BLOCKS_PER_BATCH};

/// An encoded batch and its number.
pub(super) type Numbered = (u64, Bytes);

#[derive(Debug)]
pub(super) struct Log {
    layout: Layout,
    format: WireFormat,
    next_seq: u64,
    /// The last batches, oldest first, numbered without gaps.
    kept: VecDeque<Numbered>,
    kept_bytes: usize,
    mirror: Mirror,
}

impl Log {
    pub(super) fn new(layout: Layout, format: WireFormat) -> Self {
        let (kept, mirror) = (VecDeque::new(), Mirror::default());
        Self { layout, format, next_seq: 0, kept, kept_bytes: 0, mirror }
    }

    /// Numbers and keeps a step as a batch.
    pub(super) fn append(&mut self, step: &Step) -> Numbered {
        step.changes.iter().for_each(|change| self.mirror.apply(change));
        let payload = encode(&self.layout, self.format, step.at, self.layout.events(&step.changes));
        let batch = (self.next_seq, payload);
        self.next_seq += 1;
        self.keep(batch.clone());
        batch
    }

    fn keep(&mut self, batch: Numbered) {
        self.kept_bytes += batch.1.len();
        self.kept.push_back(batch);
        while self.kept.len() > KV_REPLAY_BATCHES_MAX || self.kept_bytes > KV_REPLAY_BYTES_MAX {
            let Some((_, payload)) = self.kept.pop_front() else { return };
            self.kept_bytes -= payload.len();
        }
    }

    /// The number of the batch that comes next.
    pub(super) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The first batch from `seq` on that is kept.
    pub(super) fn first_since(&self, seq: u64) -> Option<Numbered> {
        let (oldest, _) = self.kept.front()?;
        let place = usize::try_from(seq.saturating_sub(*oldest)).ok()?;
        self.kept.get(place).cloned()
    }

    /// Batches that make any state into the present one, each with the number of the first batch to come
    /// after it.
    pub(super) fn snapshot(&self, at: f64) -> Snapshot {
        let blocks = self.mirror.blocks().cloned().collect();
        Snapshot {
            layout: self.layout.clone(),
            format: self.format,
            seq: self.next_seq,
            at,
            blocks,
            told: None,
        }
    }
}

fn encode(layout: &Layout, format: WireFormat, ts: f64, events: Vec<KvEvent>) -> Bytes {
    EventBatch { ts, events, data_parallel_rank: Some(layout.data_parallel_rank) }.encode(format).into()
}

/// The state at one moment, as batches.
#[derive(Debug)]
pub(super) struct Snapshot {
    layout: Layout,
    format: WireFormat,
    seq: u64,
    /// When it was asked for, in seconds since 1970: all its batches carry this time.
    at: f64,
    blocks: Vec<Arc<CacheChange>>,
    /// How many of the blocks were told; `None` before the beginning.
    told: Option<usize>,
}

impl Iterator for Snapshot {
    type Item = Numbered;

    fn next(&mut self) -> Option<Numbered> {
        let events = match self.told {
            None => {
                self.told = Some(0);
                vec![KvEvent::AllBlocksCleared]
            }
            Some(told) => {
                let part = self
                    .blocks
                    .get(told..)
                    .and_then(|rest| rest.chunks(KV_SNAPSHOT_BLOCKS_PER_BATCH).next())?;
                self.told = Some(told + part.len());
                self.layout.events(part.iter().map(|block| &**block))
            }
        };
        Some((self.seq, encode(&self.layout, self.format, self.at, events)))
    }
}

#[cfg(test)]
mod tests;
