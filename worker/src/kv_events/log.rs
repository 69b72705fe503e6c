//! The publisher's memory: the last batches for replay, and the state for snapshots. One lock keeps both true to one
//! sequence number. No sockets.

use std::collections::VecDeque;

use bytes::Bytes;
use keyway_wire::kv_event::{EventBatch, KvEvent, WireFormat};

use super::event::Layout;
use super::mirror::Mirror;
use super::recorder::Step;
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
        let payload = self.encode(step.at, self.layout.events(&step.changes));
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

    /// The batches from `seq` on that are kept.
    pub(super) fn since(&self, seq: u64) -> Vec<Numbered> {
        let oldest = self.kept.front().map_or(self.next_seq, |(seq, _)| *seq);
        let skip = usize::try_from(seq.saturating_sub(oldest)).unwrap_or(usize::MAX);
        self.kept.iter().skip(skip).cloned().collect()
    }

    /// Batches that make any state into the present one, each with the number of the first batch to come after it.
    pub(super) fn snapshot(&self, at: f64) -> Vec<Numbered> {
        let blocks: Vec<_> = self.mirror.blocks().collect();
        let clear = std::iter::once(vec![KvEvent::AllBlocksCleared]);
        let stores = blocks.chunks(KV_SNAPSHOT_BLOCKS_PER_BATCH);
        let batches = clear.chain(stores.map(|part| self.layout.events(part.iter().copied())));
        batches.map(|events| (self.next_seq, self.encode(at, events))).collect()
    }

    fn encode(&self, ts: f64, events: Vec<KvEvent>) -> Bytes {
        let data_parallel_rank = Some(self.layout.data_parallel_rank);
        EventBatch { ts, events, data_parallel_rank }.encode(self.format).into()
    }
}

#[cfg(test)]
mod tests;
