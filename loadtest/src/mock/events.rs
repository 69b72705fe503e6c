//! KV events of one worker: from what changed in the engine's cache to numbered batches in the chosen
//! engine's format, kept for replay. No sockets: they are in `event_sockets.rs`.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use keyway_wire::{
    block_hash::{BlockHash, Chain, HashKey},
    kv_event::{
        BlockRemoved, BlockStored, EngineHash, EventBatch, ExtraKey, KvEvent, MEDIUM_GPU, WireFormat,
    },
};
use tokio::sync::mpsc;

use super::prompt::{TOKEN_BYTES, Tokens};
use crate::{
    engine_model::{Change, RequestId},
    limits::{MOCK_EVENT_BATCHES_MAX, MOCK_EVENT_BYTES_MAX},
};

/// A numbered, encoded batch.
pub(super) type Numbered = (u64, Bytes);

/// What was published, and what is next.
#[derive(Debug)]
pub(super) struct EventLog {
    format: WireFormat,
    next: u64,
    kept: VecDeque<Numbered>,
    kept_bytes: usize,
    live: mpsc::Sender<Numbered>,
    /// What the published events add up to.
    held: HashMap<EngineHash, Held>,
}

/// A block in the cache, as it was told.
#[derive(Debug)]
struct Held {
    /// The event that stores this block alone, as a snapshot tells it.
    stored: Arc<BlockStored>,
    /// Blocks before it in its chain; a snapshot tells blocks in this order.
    depth: u32,
    /// Blocks of this name.
    copies: u32,
}

/// Blocks in one batch of a snapshot: with 16 tokens each about 100 KB.
const SNAPSHOT_BATCH: usize = 1000;

// === impl EventLog ===

impl EventLog {
    /// An empty log whose live batches go to `live`; what does not fit there is lost to subscribers, and seen
    /// by the gap in the numbers.
    pub(super) fn new(format: WireFormat, live: mpsc::Sender<Numbered>) -> Self {
        Self { format, next: 0, kept: VecDeque::new(), kept_bytes: 0, live, held: HashMap::new() }
    }

    /// Publishes what changed as one batch; `lost`: it is numbered and kept, but not sent. `said` gives a
    /// request's tokens and salt.
    pub(super) fn publish<'a>(
        &mut self,
        changes: Vec<Change<RequestId>>,
        block_tokens: u32,
        said: impl Fn(RequestId) -> Option<&'a (Tokens, Option<String>)>,
        lost: bool,
    ) {
        let events = events(changes, block_tokens, said);
        if events.is_empty() {
            return;
        }
        for event in &events {
            self.hold(event);
        }
        let batch = (self.next, encode(self.format, events));
        self.next += 1;
        if !lost {
            // Full: the subscribers' side is too slow. They will see the gap.
            let _ = self.live.try_send(batch.clone());
        }
        self.kept_bytes += batch.1.len();
        self.kept.push_back(batch);
        while self.kept.len() > MOCK_EVENT_BATCHES_MAX || self.kept_bytes > MOCK_EVENT_BYTES_MAX {
            self.kept_bytes -= self.kept.pop_front().map_or(0, |(_, payload)| payload.len());
        }
    }

    /// The number of the batch that comes next.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The first batch from number `start` on that is kept.
    pub(super) fn first_since(&self, start: u64) -> Option<Numbered> {
        let (oldest, _) = self.kept.front()?;
        self.kept.get(usize::try_from(start.saturating_sub(*oldest)).ok()?).cloned()
    }

    /// A new process: numbers begin anew, nothing is kept.
    pub(super) fn restart(&mut self) {
        (self.next, self.kept_bytes) = (0, 0);
        self.kept.clear();
        self.held.clear();
    }

    /// The whole cache: `AllBlocksCleared`, then every block after its parent. All batches carry the number
    /// of the first live one that they do not cover.
    pub(super) fn snapshot(&self) -> Snapshot {
        let mut held: Vec<&Held> = self.held.values().collect();
        held.sort_by_key(|held| held.depth);
        // Each copy is removed by itself, so each is told by itself.
        let stored = held.iter().flat_map(|held| std::iter::repeat_n(&held.stored, held.copies as usize));
        let stored: Vec<_> = stored.cloned().collect();
        Snapshot { format: self.format, number: self.next, cleared: false, stored: stored.into_iter() }
    }

    fn hold(&mut self, event: &KvEvent) {
        match event {
            KvEvent::BlockStored(stored) => self.hold_blocks(stored),
            KvEvent::BlockRemoved(removed) => {
                for hash in &removed.block_hashes {
                    let Some(held) = self.held.get_mut(hash) else { continue };
                    held.copies -= 1;
                    if held.copies == 0 {
                        self.held.remove(hash);
                    }
                }
            }
            KvEvent::AllBlocksCleared => self.held.clear(),
        }
    }

    fn hold_blocks(&mut self, stored: &BlockStored) {
        let size = stored.block_size as usize;
        let mut parent = stored.parent_block_hash.clone();
        for (i, hash) in stored.block_hashes.iter().enumerate() {
            let depth =
                parent.as_ref().and_then(|parent| self.held.get(parent)).map_or(0, |held| held.depth + 1);
            let alone = || BlockStored {
                block_hashes: vec![hash.clone()],
                parent_block_hash: parent.clone(),
                token_ids: stored.token_ids[i * size..(i + 1) * size].to_vec(),
                extra_keys: stored.extra_keys.get(i).cloned().into_iter().collect(),
                ..stored.clone()
            };
            let held = self.held.entry(hash.clone());
            let held = held.or_insert_with(|| Held { stored: Arc::new(alone()), depth, copies: 0 });
            held.copies += 1;
            parent = Some(hash.clone());
        }
    }
}

fn encode(format: WireFormat, events: Vec<KvEvent>) -> Bytes {
    let ts = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    Bytes::from(EventBatch { ts, events, data_parallel_rank: Some(0) }.encode(format))
}

/// The whole cache at one moment as batches, each encoded when it is asked for.
#[derive(Debug)]
pub(super) struct Snapshot {
    format: WireFormat,
    number: u64,
    /// Whether it was said that everything is to be forgotten.
    cleared: bool,
    stored: std::vec::IntoIter<Arc<BlockStored>>,
}

impl Iterator for Snapshot {
    type Item = Numbered;

    fn next(&mut self) -> Option<Numbered> {
        let events: Vec<_> = if std::mem::replace(&mut self.cleared, true) {
            let part = self.stored.by_ref().take(SNAPSHOT_BATCH);
            part.map(|block| KvEvent::BlockStored(Arc::unwrap_or_clone(block))).collect()
        } else {
            vec![KvEvent::AllBlocksCleared]
        };
        (!events.is_empty()).then(|| (self.number, encode(self.format, events)))
    }
}

fn events<'a>(
    changes: Vec<Change<RequestId>>,
    block_tokens: u32,
    said: impl Fn(RequestId) -> Option<&'a (Tokens, Option<String>)>,
) -> Vec<KvEvent> {
    let mut events = Vec::with_capacity(changes.len());
    for change in changes {
        match change {
            Change::Stored { request, first, count } => {
                if let Some((tokens, salt)) = said(request) {
                    events.push(stored(
                        tokens,
                        salt.as_deref(),
                        block_tokens,
                        first as usize,
                        count as usize,
                    ));
                }
            }
            Change::Removed(hash) => {
                // Removals in a row are one event.
                if let Some(KvEvent::BlockRemoved(last)) = events.last_mut() {
                    last.block_hashes.push(name(hash));
                } else {
                    events.push(KvEvent::BlockRemoved(BlockRemoved {
                        block_hashes: vec![name(hash)],
                        medium: Some(MEDIUM_GPU.into()),
                        group_idx: Some(0),
                        ..BlockRemoved::default()
                    }));
                }
            }
        }
    }
    events
}

fn stored(tokens: &Tokens, salt: Option<&str>, block_tokens: u32, first: usize, count: usize) -> KvEvent {
    let block_bytes = block_tokens as usize * TOKEN_BYTES;
    let mut chain = Chain::new(HashKey::new(0), salt.unwrap_or_default().as_bytes());
    let names: Vec<_> =
        tokens.bytes().chunks_exact(block_bytes).take(first + count).map(|block| chain.push(block)).collect();
    let size = block_tokens as usize;
    // vLLM tells a salt with the first block of the prompt only, and nothing when there is nothing to tell.
    let extra_keys = match salt {
        Some(salt) if first == 0 => {
            let mut keys = vec![Vec::new(); count];
            keys[0] = vec![ExtraKey::Text(salt.to_owned())];
            keys
        }
        _ => Vec::new(),
    };
    KvEvent::BlockStored(BlockStored {
        block_hashes: names[first..].iter().copied().map(name).collect(),
        parent_block_hash: first.checked_sub(1).map(|parent| name(names[parent])),
        token_ids: tokens.ids(first * size..(first + count) * size),
        block_size: block_tokens,
        medium: Some(MEDIUM_GPU.into()),
        extra_keys,
        group_idx: Some(0),
        kv_cache_spec_kind: Some("full_attention".into()),
        cache_salt: salt.map(str::to_owned),
        ..BlockStored::default()
    })
}

fn name(hash: BlockHash) -> EngineHash {
    EngineHash::Int(hash.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_model::{Engine, Listener, Submission, Token, named};

    struct Nobody;

    impl Listener for Nobody {
        fn token(&mut self, _: Token) {}
    }

    /// One request of 40 tokens, as changes, with its tokens.
    fn changes() -> (Vec<Change<RequestId>>, Tokens, Box<[BlockHash]>) {
        let mut tokens = Tokens::default();
        (0..40).for_each(|id| tokens.push_id(id));
        let mut chain = Chain::new(HashKey::new(0), b"salt");
        let chain: Box<[_]> = tokens.bytes().chunks_exact(64).map(|block| chain.push(block)).collect();
        let mut engine = Engine::new(named("instant").unwrap()).recording();
        engine
            .submit(
                0,
                Submission { prompt_tokens: 38, output_tokens: 2, chain: chain.clone(), fetched_tokens: 0 },
            )
            .unwrap();
        engine.advance(0, &mut Nobody);
        (engine.take_changes(), tokens, chain)
    }

    #[test]
    fn stored_blocks_tell_tokens_names_and_salt() {
        let (changes, tokens, chain) = changes();
        let said = (tokens, Some("salt".to_owned()));
        let events = events(changes, 16, |_| Some(&said));
        let [KvEvent::BlockStored(stored)] = &events[..] else { panic!("{events:?}") };
        assert_eq!(stored.block_hashes, [EngineHash::Int(chain[0].0), EngineHash::Int(chain[1].0)]);
        assert_eq!(stored.token_ids, (0..32).collect::<Vec<_>>());
        assert_eq!((stored.parent_block_hash.clone(), stored.block_size), (None, 16));
        assert_eq!(stored.extra_keys, [vec![ExtraKey::Text("salt".into())], vec![]]);
    }

    #[test]
    fn a_snapshot_tells_every_block_after_its_parent_and_each_copy() {
        let (live, _received) = mpsc::channel(10);
        let mut log = EventLog::new(WireFormat::VllmMap, live);
        let (stored, tokens, chain) = changes();
        let said = (tokens, Some("salt".to_owned()));
        log.publish(stored.clone(), 16, |_| Some(&said), false);
        // Computed twice, and the second block's one copy removed.
        log.publish(stored, 16, |_| Some(&said), false);
        log.publish(vec![Change::Removed(chain[1])], 16, |_| None, false);
        let mut stored = Vec::new();
        for (number, payload) in log.snapshot() {
            assert_eq!(number, 3);
            for event in EventBatch::decode(&payload).unwrap().batch.events {
                match event {
                    KvEvent::AllBlocksCleared => assert!(stored.is_empty()),
                    KvEvent::BlockStored(one) => stored.push(one),
                    event @ KvEvent::BlockRemoved(_) => panic!("{event:?}"),
                }
            }
        }
        let names: Vec<_> = stored.iter().map(|one| one.block_hashes[0].clone()).collect();
        let [a, b] = [EngineHash::Int(chain[0].0), EngineHash::Int(chain[1].0)];
        assert_eq!(names, [a.clone(), a.clone(), b]);
        assert_eq!((&stored[0].parent_block_hash, &stored[2].parent_block_hash), (&None, &Some(a)));
        assert_eq!(stored[2].token_ids, (16..32).collect::<Vec<_>>());
        log.publish(vec![Change::Removed(chain[1])], 16, |_| None, false);
        log.restart();
        assert_eq!(log.snapshot().count(), 1);
    }

    #[test]
    fn a_lost_batch_leaves_a_gap_that_replay_fills() {
        let (live, mut received) = mpsc::channel(10);
        let mut log = EventLog::new(WireFormat::VllmMap, live);
        for lost in [false, true, false] {
            let (changes, tokens, _) = changes();
            let said = (tokens, None);
            log.publish(changes, 16, |_| Some(&said), lost);
        }
        let mut numbers = Vec::new();
        while let Ok((number, payload)) = received.try_recv() {
            assert_eq!(EventBatch::decode(&payload).unwrap().batch.events.len(), 1);
            numbers.push(number);
        }
        assert_eq!(numbers, [0, 2]);
        let since_1 = std::iter::successors(log.first_since(1), |(number, _)| log.first_since(number + 1));
        assert_eq!(since_1.map(|(number, _)| number).collect::<Vec<_>>(), [1, 2]);
        log.restart();
        assert!(log.first_since(0).is_none());
    }
}
