//! The log against a follower that decodes what it gives: replays have no holes, snapshots are the state.

use std::collections::HashMap;
use std::sync::Arc;

use keyway_wire::kv_event::EngineHash;
use proptest::prelude::*;

use super::*;
use crate::engine::backend::CacheGroup;

fn log() -> Log {
    let groups = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 128 }];
    Log::new(Layout { block_size: 2, groups, data_parallel_rank: 0 }, WireFormat::VllmMap)
}

/// All batches from `seq` on that are kept.
fn since(log: &Log, seq: u64) -> Vec<Numbered> {
    std::iter::successors(log.first_since(seq), |(seq, _)| log.first_since(seq + 1)).collect()
}

fn stored(hash: u128, parent: Option<u128>) -> CacheChange {
    let tokens = Arc::from([hash as u32, 7]);
    CacheChange::Stored { group: 0, hash, parent, tokens, salt: Arc::from([]) }
}

fn removed(hash: u128) -> CacheChange {
    CacheChange::Removed { group: 0, hash }
}

fn step(changes: Vec<CacheChange>) -> Step {
    Step { at: 1.5, changes }
}

fn decode(payload: &[u8]) -> EventBatch {
    let decoded = EventBatch::decode(payload).unwrap();
    assert_eq!((decoded.malformed, decoded.unknown), (0, 0));
    decoded.batch
}

/// What a follower knows: each block's parent.
#[derive(Debug, Default, PartialEq)]
struct Naive(HashMap<EngineHash, Option<EngineHash>>);

impl Naive {
    fn apply(&mut self, batch: EventBatch) {
        for event in batch.events {
            match event {
                KvEvent::BlockStored(event) => {
                    let mut parent = event.parent_block_hash;
                    assert_eq!(event.token_ids.len(), event.block_hashes.len() * event.block_size as usize);
                    for hash in event.block_hashes {
                        assert!(
                            parent.as_ref().is_none_or(|parent| self.0.contains_key(parent)),
                            "an orphan"
                        );
                        assert!(self.0.insert(hash.clone(), parent.replace(hash)).is_none(), "stored twice");
                    }
                }
                KvEvent::BlockRemoved(event) => {
                    for hash in event.block_hashes {
                        assert!(self.0.remove(&hash).is_some(), "not there");
                    }
                }
                KvEvent::AllBlocksCleared => self.0.clear(),
            }
        }
    }
}

#[test]
fn a_replay_begins_exactly_where_it_was_asked_to() {
    let mut log = log();
    for seq in 0..5 {
        assert_eq!(log.append(&step(vec![stored(seq, None)])).0, seq as u64);
    }
    let seqs = |from| since(&log, from).into_iter().map(|(seq, _)| seq).collect::<Vec<_>>();
    assert_eq!(seqs(0), [0, 1, 2, 3, 4]);
    assert_eq!(seqs(3), [3, 4]);
    assert_eq!(seqs(5), [0; 0]);
    assert_eq!(seqs(u64::MAX), [0; 0]);
    let KvEvent::BlockStored(event) = &decode(&since(&log, 3)[0].1).events[0] else { panic!("a store") };
    assert_eq!(event.block_hashes, [EngineHash::Int(3)]);
}

#[test]
fn old_batches_are_dropped_by_number_and_by_bytes() {
    let mut many = log();
    for i in 0..KV_REPLAY_BATCHES_MAX as u128 + 3 {
        many.append(&step(vec![removed(i)]));
    }
    let kept = since(&many, 0);
    assert_eq!((kept.len(), kept[0].0), (KV_REPLAY_BATCHES_MAX, 3));

    let mut large = log();
    let tokens: Arc<[u32]> = Arc::from(vec![u32::MAX; 2 << 20]); // 10 MiB of payload
    for hash in 0..9 {
        let change = CacheChange::Stored {
            group: 0,
            hash,
            parent: None,
            tokens: Arc::clone(&tokens),
            salt: Arc::from([]),
        };
        large.append(&step(vec![change]));
    }
    let kept: Vec<usize> = since(&large, 0).iter().map(|(_, payload)| payload.len()).collect();
    let bytes: usize = kept.iter().sum();
    assert_eq!(bytes, large.kept_bytes);
    assert!(bytes <= KV_REPLAY_BYTES_MAX && bytes + kept[0] > KV_REPLAY_BYTES_MAX, "{kept:?}");
}

#[test]
fn a_run_of_one_prefix_is_one_event_and_its_first_block_names_the_salt() {
    let mut log = log();
    let salted = |group, hash, parent: Option<u128>| CacheChange::Stored {
        group,
        hash,
        parent,
        tokens: Arc::from([1, 2]),
        salt: Arc::from(&b"tenant"[..]),
    };
    let changes = vec![
        salted(0, 1, None),
        salted(0, 2, Some(1)),
        salted(1, 2, Some(1)),
        salted(0, 9, Some(2)),
        removed(5),
        removed(4),
    ];
    let events = decode(&log.append(&step(changes)).1).events;
    let [
        KvEvent::BlockStored(run),
        KvEvent::BlockStored(window),
        KvEvent::BlockStored(tail),
        KvEvent::BlockRemoved(gone),
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(run.block_hashes, [EngineHash::Int(1), EngineHash::Int(2)]);
    assert_eq!((run.block_size, run.token_ids.len(), run.group_idx), (2, 4, Some(0)));
    let salt = keyway_wire::kv_event::ExtraKey::Text("tenant".to_owned());
    assert_eq!(run.extra_keys, [vec![salt], vec![]]);
    assert_eq!(run.kv_cache_spec_kind.as_deref(), Some("full_attention"));
    assert!(run.is_primary());
    assert_eq!((window.group_idx, window.kv_cache_spec_sliding_window), (Some(1), Some(128)));
    assert_eq!(
        (tail.parent_block_hash.clone(), &tail.extra_keys[..]),
        (Some(EngineHash::Int(2)), &[vec![]][..])
    );
    assert_eq!(gone.block_hashes, [EngineHash::Int(5), EngineHash::Int(4)]);
}

proptest! {
    /// Blocks 1 to 15 form a binary tree: the parent of `n` is `n / 2`.
    #[test]
    fn a_snapshot_and_a_replay_both_lead_to_the_state(
        picks in prop::collection::vec((1_u128..16, any::<bool>()), 0..80),
    ) {
        let mut log = log();
        let mut resident: Vec<u128> = Vec::new();
        for (block, merge) in picks {
            let has = |block: u128| resident.contains(&block);
            let change = if has(block) {
                (!has(2 * block) && !has(2 * block + 1)).then(|| removed(block))
            } else {
                (block == 1 || has(block / 2)).then(|| stored(block, (block > 1).then_some(block / 2)))
            };
            let Some(change) = change else { continue };
            match change {
                CacheChange::Stored { hash, .. } => resident.push(hash),
                CacheChange::Removed { hash, .. } => resident.retain(|block| *block != hash),
            }
            // A step of one change, or of that and its undoing and redoing.
            let undone = matches!(change, CacheChange::Stored { .. }) && merge;
            let changes =
                if undone { vec![change.clone(), removed(block), change] } else { vec![change] };
            log.append(&step(changes));
        }
        let mut replayed = Naive::default();
        for (_, payload) in since(&log, 0) {
            replayed.apply(decode(&payload));
        }
        prop_assert_eq!(replayed.0.len(), resident.len());
        let mut restored = Naive::default();
        restored.0.insert(EngineHash::Int(99), None); // of an earlier life
        let (snapshot, seq_then) = (log.snapshot(0.0), log.next_seq);
        // What comes later is none of it.
        log.append(&step(vec![stored(77, None)]));
        for (seq, payload) in snapshot {
            prop_assert_eq!(seq, seq_then);
            restored.apply(decode(&payload));
        }
        prop_assert_eq!(replayed, restored);
    }
}
