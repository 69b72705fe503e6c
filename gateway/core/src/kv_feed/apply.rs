//! Single events to changes of what the worker holds: which of them count, and what each block is called.

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvEvent};

use super::blocks::{Held, Tier};
use super::{EventBatch, KvFeed};
use crate::index::{PrefixIndex, WorkerId};
use crate::token_chain::{TokenSpace, extend};

impl KvFeed {
    pub(super) fn apply_events(&mut self, index: &mut PrefixIndex, batch: EventBatch) {
        for event in &batch.events {
            match event {
                // Further groups of a hybrid model say what a window keeps; a prefix is there if the first one has it.
                KvEvent::BlockStored(event) => {
                    let own = event.is_primary();
                    match self.tier(index, own, event.group_idx, event.locality.as_deref()) {
                        None => self.stats.ignored += 1,
                        // By name alone; of blocks of another size nothing can be told.
                        Some(Tier::Other)
                            if Some(event.block_size) != self.block_size || event.token_ids.is_empty() =>
                        {
                            self.stored_elsewhere(index, event);
                        }
                        Some(tier) => self.stored(index, tier, event),
                    }
                }
                KvEvent::BlockRemoved(event) => {
                    let own = event.is_primary();
                    match self.tier(index, own, event.group_idx, event.locality.as_deref()) {
                        None => self.stats.ignored += 1,
                        Some(tier) => self.removed(index, tier, event),
                    }
                }
                KvEvent::AllBlocksCleared => self.clear(index),
            }
        }
    }

    /// Where the blocks of an event are, if that counts. What another machine's tier holds is no part of this worker.
    fn tier(
        &mut self,
        index: &mut PrefixIndex,
        own: bool,
        group: Option<u32>,
        locality: Option<&str>,
    ) -> Option<Tier> {
        if group.unwrap_or(0) != 0 {
            return None;
        }
        if own {
            return Some(Tier::Own);
        }
        self.any_tier.filter(|_| locality != Some("REMOTE"))?;
        // A worker without other tiers does not pay for them.
        if !std::mem::replace(&mut self.tiers_seen, true) {
            let mut held = Held { index, worker: self.worker, any_tier: self.any_tier };
            self.blocks.count_all_tiers(&mut held);
        }
        Some(Tier::Other)
    }

    fn any_tier(&self) -> Option<WorkerId> {
        self.any_tier.filter(|_| self.tiers_seen)
    }

    fn stored_elsewhere(&mut self, index: &mut PrefixIndex, event: &BlockStored) {
        let mut held = Held { index, worker: self.worker, any_tier: self.any_tier() };
        for hash in &event.block_hashes {
            if !self.blocks.store_elsewhere(&mut held, hash.short()) {
                self.stats.ignored += 1;
            }
        }
    }

    fn stored(&mut self, index: &mut PrefixIndex, tier: Tier, event: &BlockStored) {
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
        let mut held = Held { index, worker: self.worker, any_tier: self.any_tier() };
        for (i, (hash, key)) in event.block_hashes.iter().zip(keys).enumerate() {
            before = self.blocks.store(&mut held, tier, hash.short(), before, key, space);
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

    fn removed(&mut self, index: &mut PrefixIndex, tier: Tier, event: &BlockRemoved) {
        let named = event.block_hashes.iter().filter_map(|hash| self.blocks.find_parent(hash.short(), None));
        index.fetch(&named.map(|node| self.blocks.key(node)).collect::<Vec<_>>());
        let mut held = Held { index, worker: self.worker, any_tier: self.any_tier() };
        for (i, hash) in event.block_hashes.iter().enumerate() {
            let left = event.remaining_copy_counts.as_ref().and_then(|counts| counts.get(i)).copied();
            match (self.blocks.remove(&mut held, tier, hash.short(), left), tier) {
                (true, Tier::Own) => self.stats.removed += 1,
                (true, Tier::Other) => {}
                (false, Tier::Own) => self.stats.unknown_removals += 1,
                (false, Tier::Other) => self.stats.ignored += 1,
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
