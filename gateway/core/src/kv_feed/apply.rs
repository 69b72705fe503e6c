//! Single events to changes of what the worker holds: which of them count, and what each block is called.

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, Events, ExtraKey, KvEvent};

use super::blocks::{Blocks, Held};
use super::groups::Part;
use super::node::Tier;
use super::{FeedStats, KvFeed, Moments};
use crate::index::WorkerId;
use crate::token_chain::{TokenSpace, extend};

impl KvFeed {
    pub(super) async fn apply_events(&mut self, index: &impl Moments, events: Events<'_>) {
        for event in events {
            match event {
                Ok(Some(KvEvent::BlockStored(event))) => self.stores(index, &event).await,
                Ok(Some(KvEvent::BlockRemoved(event))) => self.removes(index, &event).await,
                Ok(Some(KvEvent::AllBlocksCleared)) => self.clear(index).await,
                Ok(None) => self.stats.ignored += 1,
                Err(_) => self.stats.malformed += 1,
            }
            self.went_on(index, 1).await;
        }
    }

    async fn stores(&mut self, index: &impl Moments, event: &BlockStored) {
        let tier = self.tier(event.is_primary(), event.locality.as_deref());
        let part = tier.and_then(|_| self.blocks.part_of(event));
        match (tier, part) {
            _ if event.block_hashes.is_empty() => {}
            (Some(Tier::Own), Some(Part::Beside(group))) => self.stored_beside(index, group, event).await,
            // What another tier has of other groups is not told apart.
            (None, _) | (_, None | Some(Part::Beside(_))) => {
                self.stats.ignored += 1;
                self.barren += u32::from(tier == Some(Tier::Own));
            }
            // By name alone; of blocks of another size nothing can be told.
            (Some(Tier::Other), Some(Part::Prefix))
                if Some(event.block_size) != self.block_size || event.token_ids.is_empty() =>
            {
                self.stored_elsewhere(index, event).await;
            }
            (Some(tier), Some(Part::Prefix)) => self.stored(index, tier, event).await,
        }
    }

    async fn removes(&mut self, index: &impl Moments, event: &BlockRemoved) {
        let tier = self.tier(event.is_primary(), event.locality.as_deref());
        match (tier, self.blocks.part_of_removed(event.group_idx)) {
            (Some(tier), Some(Part::Prefix)) => self.removed(index, tier, event).await,
            (Some(Tier::Own), Some(Part::Beside(group))) => self.removed_beside(index, group, event).await,
            _ => self.stats.ignored += 1,
        }
    }

    /// Where the blocks of an event are, if that counts. What another machine's tier holds is no part of this
    /// worker.
    fn tier(&mut self, own: bool, locality: Option<&str>) -> Option<Tier> {
        if own {
            return Some(Tier::Own);
        }
        self.any_tier.filter(|_| locality != Some("REMOTE"))?;
        // A worker without other tiers does not pay for them.
        if !std::mem::replace(&mut self.tiers_seen, true) {
            self.blocks.count_all_tiers();
        }
        Some(Tier::Other)
    }

    pub(super) fn any_tier(&self) -> Option<WorkerId> {
        self.any_tier.filter(|_| self.tiers_seen)
    }

    /// Does `one` for each of `count` blocks, and all that it asks for before the next one; some blocks a
    /// moment. `one` says whether to go on.
    pub(super) async fn for_each(
        &mut self,
        index: &impl Moments,
        count: usize,
        mut one: impl FnMut(&mut Blocks, &mut FeedStats, &mut Held<'_>, usize) -> bool,
    ) {
        let (worker, any_tier) = (self.worker, self.any_tier());
        let (blocks, stats) = (&mut self.blocks, &mut self.stats);
        let (steps, mut next) = (index.steps(), 0);
        loop {
            index.moment(|index| {
                let mut held = Held { index, worker, any_tier, left: steps };
                blocks.settle(&mut held);
                while held.left > 0 && next < count {
                    held.left -= 1;
                    next = if one(blocks, stats, &mut held, next) { next + 1 } else { count };
                    blocks.settle(&mut held);
                }
            });
            if next == count && blocks.is_settled() {
                break;
            }
            index.between().await;
        }
        self.went_on(index, count).await;
    }

    /// Lets others have their turn, now and then: small events make many moments.
    async fn went_on(&mut self, index: &impl Moments, steps: usize) {
        self.steps += steps;
        if self.steps >= index.steps() {
            self.steps = 0;
            index.between().await;
        }
    }

    async fn stored_elsewhere(&mut self, index: &impl Moments, event: &BlockStored) {
        let hashes = &event.block_hashes;
        let one = |blocks: &mut Blocks, stats: &mut FeedStats, held: &mut Held<'_>, i: usize| {
            if !blocks.store_elsewhere(held, hashes[i].short()) {
                stats.ignored += 1;
            }
            true
        };
        self.for_each(index, hashes.len(), one).await;
    }

    /// Blocks of another group of the model than the one that keeps whole prefixes. Of those that its layers
    /// need no more the engine says nothing, so which tokens each stands for is known by its name alone.
    async fn stored_beside(&mut self, index: &impl Moments, group: usize, event: &BlockStored) {
        self.barren += 1;
        for hashes in event.block_hashes.chunks(index.steps()) {
            self.blocks.make_room_beside(hashes.len());
            let one = |blocks: &mut Blocks, _: &mut FeedStats, _: &mut Held<'_>, i: usize| {
                blocks.store_beside(group, hashes[i].short());
                true
            };
            self.for_each(index, hashes.len(), one).await;
        }
    }

    async fn removed_beside(&mut self, index: &impl Moments, group: usize, event: &BlockRemoved) {
        let mut lefts = event.remaining_copy_counts.iter().flatten().copied();
        let hashes = &event.block_hashes;
        let one = |blocks: &mut Blocks, stats: &mut FeedStats, _: &mut Held<'_>, i: usize| {
            let known = blocks.remove_beside(group, hashes[i].short(), lefts.next());
            stats.unknown_removals += u64::from(!known);
            true
        };
        self.for_each(index, hashes.len(), one).await;
    }

    async fn stored(&mut self, index: &impl Moments, tier: Tier, event: &BlockStored) {
        let (blocks, size) = (event.block_hashes.len(), event.block_size as usize);
        let keys_fit = event.extra_keys.is_empty() || event.extra_keys.len() == blocks;
        if size == 0 || event.token_ids.len() != blocks * size || !keys_fit {
            self.stats.malformed += 1;
            self.barren += 1;
            return;
        }
        self.barren = 0;
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
        let mut tokens = event.token_ids.chunks_exact(size).enumerate();
        let mut keys = Vec::with_capacity(index.steps().min(blocks));
        let mut unstored = blocks;
        for hashes in event.block_hashes.chunks(index.steps()) {
            self.blocks.make_room(hashes.len());
            keys.clear();
            keys.extend(tokens.by_ref().take(hashes.len()).map(|(i, tokens)| {
                prefix = extend(prefix, tokens, own_keys(event, extra(i), parent.is_none() && i == 0));
                prefix
            }));
            self.blocks.fetch(hashes.iter().map(EngineHash::short));
            let (new, last) = self.store_run(index, tier, (hashes, &keys), (before, space));
            let (hashes, keys) = (&hashes[new..], &keys[new..]);
            (before, unstored) = (last, unstored - new);
            self.went_on(index, new).await;
            if hashes.is_empty() {
                continue;
            }
            let one = |blocks: &mut Blocks, _: &mut FeedStats, held: &mut Held<'_>, i: usize| {
                if i == 0 {
                    held.index.fetch(keys);
                }
                before = blocks.store(held, tier, hashes[i].short(), before, keys[i], space);
                unstored -= usize::from(before.is_some());
                before.is_some()
            };
            self.for_each(index, hashes.len(), one).await;
            if before.is_none() {
                break;
            }
        }
        self.stats.over_capacity += unstored as u64;
    }

    /// The empty prefix of the event's space. Only that of a prompt's first block is complete: later ones
    /// inherit it.
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

    async fn removed(&mut self, index: &impl Moments, tier: Tier, event: &BlockRemoved) {
        let mut lefts = event.remaining_copy_counts.as_deref().unwrap_or_default();
        for hashes in event.block_hashes.chunks(index.steps()) {
            self.blocks.fetch(hashes.iter().map(EngineHash::short));
            let gone = if tier == Tier::Own { self.remove_run(index, hashes, lefts) } else { 0 };
            self.stats.removed += gone as u64;
            self.went_on(index, gone).await;
            lefts = lefts.get(gone..).unwrap_or_default();
            let hashes = &hashes[gone..];
            if hashes.is_empty() {
                continue;
            }
            let named = hashes.iter().filter_map(|hash| self.blocks.find_parent(hash.short(), None));
            let keys: Vec<BlockHash> = named.map(|node| self.blocks.key(node)).collect();
            let one = |blocks: &mut Blocks, stats: &mut FeedStats, held: &mut Held<'_>, i: usize| {
                if i == 0 {
                    held.index.fetch(&keys);
                }
                match (blocks.remove(held, tier, hashes[i].short(), lefts.get(i).copied()), tier) {
                    (true, Tier::Own) => stats.removed += 1,
                    (true, Tier::Other) => {}
                    (false, Tier::Own) => stats.unknown_removals += 1,
                    (false, Tier::Other) => stats.ignored += 1,
                }
                true
            };
            self.for_each(index, hashes.len(), one).await;
            lefts = lefts.get(hashes.len()..).unwrap_or_default();
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
