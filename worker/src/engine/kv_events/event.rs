//! Changes of the prefix cache as KV events: which field says what. A run of blocks of one prefix becomes one
//! event, as vLLM does.

use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvEvent, MEDIUM_GPU};

use crate::engine::backend::CacheGroup;
use crate::engine::block_manager::CacheChange;

/// What all events of a worker have in common.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Tokens per block, equal in all cache groups.
    pub(crate) block_size: u32,
    pub(crate) groups: Vec<CacheGroup>,
    /// Of the engine whose cache it is.
    pub(crate) data_parallel_rank: u32,
}

impl Layout {
    /// The same changes, in the same order.
    pub(super) fn events<'a>(&self, changes: impl IntoIterator<Item = &'a CacheChange>) -> Vec<KvEvent> {
        let mut events = Vec::new();
        for change in changes {
            match change {
                CacheChange::Stored { group, hash, parent, tokens, salt } => {
                    let parent = parent.map(engine_hash);
                    let event = match events.last_mut() {
                        Some(KvEvent::BlockStored(event)) if continues(event, *group, parent.as_ref()) => {
                            event
                        }
                        _ => {
                            events.push(KvEvent::BlockStored(self.begin(*group, parent)));
                            let Some(KvEvent::BlockStored(event)) = events.last_mut() else { continue };
                            event
                        }
                    };
                    // The hash of every later block covers the salt through its parent's.
                    let salted = event.parent_block_hash.is_none() && event.block_hashes.is_empty();
                    event.extra_keys.push(if salted { salt_keys(salt) } else { Vec::new() });
                    event.block_hashes.push(engine_hash(*hash));
                    event.token_ids.extend_from_slice(tokens);
                }
                CacheChange::Removed { group, hash } => match events.last_mut() {
                    Some(KvEvent::BlockRemoved(event)) if event.group_idx == Some(*group as u32) => {
                        event.block_hashes.push(engine_hash(*hash));
                    }
                    _ => events.push(KvEvent::BlockRemoved(BlockRemoved {
                        block_hashes: vec![engine_hash(*hash)],
                        medium: Some(MEDIUM_GPU.to_owned()),
                        group_idx: Some(*group as u32),
                        ..BlockRemoved::default()
                    })),
                },
            }
        }
        events
    }

    /// An event without blocks.
    fn begin(&self, group: usize, parent: Option<EngineHash>) -> BlockStored {
        let (kind, window) = match self.groups.get(group) {
            None | Some(CacheGroup::Full) => ("full_attention", None),
            Some(CacheGroup::MlaLatent) => ("mla_attention", None),
            Some(CacheGroup::SlidingWindow { window }) => ("sliding_window", Some(*window as u32)),
        };
        BlockStored {
            parent_block_hash: parent,
            block_size: self.block_size,
            // The name of the primary tier, which routers act on; that this one may be a CPU's memory is no
            // difference to them.
            medium: Some(MEDIUM_GPU.to_owned()),
            group_idx: Some(group as u32),
            kv_cache_spec_kind: Some(kind.to_owned()),
            kv_cache_spec_sliding_window: window,
            ..BlockStored::default()
        }
    }
}

/// Whether a block after `parent` is the next one of `event`.
fn continues(event: &BlockStored, group: usize, parent: Option<&EngineHash>) -> bool {
    parent.is_some() && event.block_hashes.last() == parent && event.group_idx == Some(group as u32)
}

/// vLLM's default form: the low 64 bits.
fn engine_hash(hash: u128) -> EngineHash {
    EngineHash::Int(hash as u64)
}

fn salt_keys(salt: &[u8]) -> Vec<ExtraKey> {
    match std::str::from_utf8(salt) {
        Ok("") | Err(_) => Vec::new(), // a salt comes out of JSON, so it is text
        Ok(salt) => vec![ExtraKey::Text(salt.to_owned())],
    }
}
