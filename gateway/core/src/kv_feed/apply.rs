//! Single events to changes of what the worker holds: which of them count, and what each block is called.

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvEvent};

use super::blocks::Held;
use super::{EventBatch, KvFeed};
use crate::index::PrefixIndex;
use crate::token_chain::{TokenSpace, extend};

impl KvFeed {
    pub(super) fn apply_events(&mut self, index: &mut PrefixIndex, batch: EventBatch) {
        for event in &batch.events {
            match event {
                // Further groups of a hybrid model say what a window keeps; a prefix is there if the first one has it.
                KvEvent::BlockStored(event) if event.is_primary() && event.group_idx.unwrap_or(0) == 0 => {
                    self.stored(index, event);
                }
                KvEvent::BlockRemoved(event) if event.is_primary() && event.group_idx.unwrap_or(0) == 0 => {
                    self.removed(index, event);
                }
                KvEvent::BlockStored(_) | KvEvent::BlockRemoved(_) => self.stats.ignored += 1,
                KvEvent::AllBlocksCleared => self.clear(index),
            }
        }
    }

    fn stored(&mut self, index: &mut PrefixIndex, event: &BlockStored) {
        let (blocks, size) = (event.block_hashes.len(), event.block_size as usize);
        let keys_fit = event.extra_keys.is_empty() || event.extra_keys.len() == blocks;
        if size == 0 || event.token_ids.len() != blocks * size || !keys_fit {
            self.stats.malformed += 1;
            return;
        }
        self.block_size = Some(event.block_size);
        let extra = |i: usize| event.extra_keys.get(i).map_or(&[][..], |keys| keys);
        let root = self.root(event);
        let parent = event.parent_block_hash.as_ref().map(EngineHash::short);
        let mut before = match parent {
            None => None,
            // An engine whose hashes do not cover the salt says it with each event.
            Some(parent) => match self.blocks.find_parent(parent, event.cache_salt.is_some().then_some(root))
            {
                None => {
                    self.stats.orphans += blocks as u64;
                    return;
                }
                found => found,
            },
        };
        let space = before.map_or(root, |node| self.blocks.root(node));
        let mut prefix = before.map_or(root, |node| self.blocks.key(node));
        let tokens = event.token_ids.chunks_exact(size).enumerate();
        let keys = tokens.map(|(i, tokens)| {
            prefix = extend(prefix, tokens, own_keys(event, extra(i), parent.is_none() && i == 0));
            prefix
        });
        let keys: Vec<BlockHash> = keys.collect();
        index.fetch(&keys);
        let mut held = Held { index, worker: self.worker };
        for (i, (hash, key)) in event.block_hashes.iter().zip(keys).enumerate() {
            before = self.blocks.store(&mut held, hash.short(), before, key, space);
            if before.is_none() {
                self.stats.over_capacity += (blocks - i) as u64;
                return;
            }
        }
    }

    /// The empty prefix of the event's space. Only that of a prompt's first block is complete: later ones inherit it.
    fn root(&self, event: &BlockStored) -> BlockHash {
        let of_first = event.extra_keys.first().filter(|_| event.parent_block_hash.is_none());
        let in_keys = of_first.and_then(|keys| salt_in(event, keys));
        // An adapter that has a number alone is none that a request names, and still not the base model.
        let nameless = event.lora_id.filter(|id| *id != 0 && event.lora_name.is_none());
        let nameless = nameless.map(|id| format!("\0{id}"));
        let space = TokenSpace {
            salt: event.cache_salt.as_deref().or(in_keys).unwrap_or_default().as_bytes(),
            adapter: event.lora_name.as_deref().or(nameless.as_deref()),
            block_size: event.block_size,
        };
        space.root(self.key)
    }

    fn removed(&mut self, index: &mut PrefixIndex, event: &BlockRemoved) {
        let mut held = Held { index, worker: self.worker };
        for (i, hash) in event.block_hashes.iter().enumerate() {
            let left = event.remaining_copy_counts.as_ref().and_then(|counts| counts.get(i)).copied();
            if self.blocks.remove(&mut held, hash.short(), left) {
                self.stats.removed += 1;
            } else {
                self.stats.unknown_removals += 1;
            }
        }
    }
}

/// The salt among a first block's keys: vLLM puts the adapter first, then images, then the salt.
fn salt_in<'a>(event: &BlockStored, keys: &'a [ExtraKey]) -> Option<&'a str> {
    match adapter_less(event, keys).last() {
        Some(ExtraKey::Text(salt)) => Some(salt),
        _ => None,
    }
}

/// What of a block's keys is not in its space already.
fn own_keys<'a>(event: &BlockStored, keys: &'a [ExtraKey], first: bool) -> &'a [ExtraKey] {
    let keys = adapter_less(event, keys);
    match keys {
        [rest @ .., ExtraKey::Text(_)] if first => rest,
        _ => keys,
    }
}

fn adapter_less<'a>(event: &BlockStored, keys: &'a [ExtraKey]) -> &'a [ExtraKey] {
    match (keys, &event.lora_name) {
        ([ExtraKey::Text(first), rest @ ..], Some(adapter)) if first == adapter => rest,
        _ => keys,
    }
}
