//! What can be found by others: anchors by the hash of their prefix, other groups' blocks through their
//! anchor. Who holds a block is not decided here.

use std::sync::Arc;

use super::{
    Block, BlockId, BlockManager, BlockTable, CacheChange, FreeList, PrefixHash, Registration, Role,
};
use crate::engine::backend::NO_BLOCK;

impl BlockManager {
    /// The registered anchors that `tokens` begin with, never all of its tokens.
    pub(super) fn matched(&self, tokens: &[u32], salt: &Arc<[u8]>) -> Vec<BlockId> {
        self.matched_blocks(tokens, salt, tokens.len().saturating_sub(1) / self.block_size)
    }

    /// The registered anchors that `tokens` begin with, at most so many.
    pub(super) fn matched_blocks(&self, tokens: &[u32], salt: &[u8], most: usize) -> Vec<BlockId> {
        let mut matched = Vec::new();
        for ids in tokens.chunks_exact(self.block_size).take(most) {
            let (parent, hash) = self.chain(&matched, ids, salt);
            match self.index.get(&hash) {
                Some(block) if self.is(*block, parent, ids, salt) => matched.push(*block),
                _ => break,
            }
        }
        matched
    }

    /// Parent and hash of the block `ids` that follows the registered blocks `before`.
    pub(super) fn chain(
        &self,
        before: &[BlockId],
        ids: &[u32],
        salt: &[u8],
    ) -> (Option<BlockId>, PrefixHash) {
        let parent = before.last().copied();
        let registration = parent.and_then(|parent| self.registration(parent));
        let hash_before = registration.map_or_else(|| self.hasher.root(salt), |r| r.hash);
        (parent, self.hasher.extend(hash_before, ids))
    }

    pub(super) fn registration(&self, block: BlockId) -> Option<&Registration> {
        match &self.blocks[block as usize].role {
            Role::Anchor(registration) => Some(registration),
            _ => None,
        }
    }

    /// Whether anchor `block` holds exactly `ids` after `parent` under `salt`.
    pub(super) fn is(&self, block: BlockId, parent: Option<BlockId>, ids: &[u32], salt: &[u8]) -> bool {
        self.registration(block)
            .is_some_and(|r| r.parent == parent && *r.salt == *salt && self.ids(block) == ids)
    }

    fn ids(&self, block: BlockId) -> &[u32] {
        let start = block as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Makes `block` an anchor.
    pub(super) fn insert(&mut self, block: BlockId, ids: &[u32], registration: Registration) {
        let start = block as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(ids);
        self.index.insert(registration.hash, block);
        self.version += 1;
        self.blocks[block as usize].role = Role::Anchor(registration);
    }

    /// Registers the table's computed anchor at place `i`, or takes the equal one that is registered already.
    pub(super) fn register_place(&mut self, table: &mut BlockTable, i: usize, ids: &[u32], salt: &Arc<[u8]>) {
        let (parent, hash) = self.chain(&table.anchors()[..i], ids, salt);
        let own = table.anchors()[i];
        match self.index.get(&hash).copied() {
            None => self.insert(own, ids, Registration { hash, parent, salt: Arc::clone(salt) }),
            Some(other) if self.is(other, parent, ids, salt) => {
                self.hold(other);
                self.let_go(own);
                table.groups[0].blocks[i] = other;
            }
            Some(_) => {
                table.collided = true;
                return;
            }
        }
        table.registered += 1;
    }

    /// Attaches the table's blocks at place `i` to its anchor there, or takes those that are attached
    /// already.
    pub(super) fn attach_place(&mut self, table: &mut BlockTable, i: usize) {
        let anchor = table.anchors()[i];
        for g in 1..table.groups.len() {
            let Some(own) = table.groups[g].held(i) else { continue };
            match self.attached_to(anchor, g) {
                None => {
                    self.version += 1;
                    self.blocks[own as usize].role = Role::Attached { anchor, group: g };
                    *self.attachment(anchor, g) = own;
                }
                Some(other) if other != own => {
                    self.hold(other);
                    self.let_go(own);
                    table.groups[g].blocks[i] = other;
                }
                Some(_) => {}
            }
        }
    }

    /// Group `g`'s block attached to `anchor`.
    pub(super) fn attached_to(&self, anchor: BlockId, g: usize) -> Option<BlockId> {
        let block = self.attached[anchor as usize * (self.rules.len() - 1) + g - 1];
        (block != NO_BLOCK).then_some(block)
    }

    /// Group `g`'s block attached to the table's registered anchor at place `i`.
    pub(super) fn attached_at(&self, table: &BlockTable, g: usize, i: usize) -> Option<BlockId> {
        let findable = g > 0 && i < table.registered;
        if findable { self.attached_to(table.anchors()[i], g) } else { None }
    }

    pub(super) fn attachment(&mut self, anchor: BlockId, g: usize) -> &mut BlockId {
        &mut self.attached[anchor as usize * (self.rules.len() - 1) + g - 1]
    }

    /// Takes note that a full block's KV is there, and announces it if it can be found.
    pub(super) fn mark_computed(&mut self, block: Option<BlockId>) {
        let Some(block) = block else { return };
        if std::mem::replace(&mut self.blocks[block as usize].computed, true) || self.changes.is_none() {
            return;
        }
        let stored = self.stored(block);
        self.changes.iter_mut().for_each(|changes| changes.extend(stored.clone()));
    }

    /// Makes a block without holders unfindable, and first of all what is attached to it.
    pub(super) fn forget(&mut self, block: BlockId) {
        let (group, hash) = match std::mem::take(&mut self.blocks[block as usize].role) {
            Role::Private => return,
            Role::Attached { anchor, group } => {
                *self.attachment(anchor, group) = NO_BLOCK;
                (group, self.registration(anchor).map(|r| r.hash))
            }
            Role::Anchor(registration) => {
                let hash = registration.hash;
                self.blocks[block as usize].role = Role::Anchor(registration);
                for g in 1..self.rules.len() {
                    if let Some(attached) = self.attached_to(block, g) {
                        self.forget(attached);
                        // No lookup can find it again, so it goes before anything cached.
                        self.free.remove(attached);
                        self.free.push_front(attached);
                    }
                }
                self.blocks[block as usize].role = Role::Private;
                self.index.remove(&hash);
                (0, Some(hash))
            }
        };
        self.version += 1;
        if let (Some(changes), Some(hash)) = (&mut self.changes, hash) {
            changes.push(CacheChange::Removed { group, hash });
        }
    }

    /// Records changes of the prefix cache from now on. The caller must take them after every step.
    pub(crate) fn record_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Forgets everything, also what is held or promised: no table made before may be used any more.
    pub(crate) fn clear(&mut self) {
        if self.changes.is_some() {
            // Children before parents, what is attached before its anchor.
            let removed = self.resident().into_iter().rev().map(|stored| {
                let (group, hash) = stored.block();
                CacheChange::Removed { group, hash }
            });
            let removed: Vec<CacheChange> = removed.collect();
            self.changes.iter_mut().for_each(|changes| changes.extend(removed.iter().cloned()));
        }
        self.blocks.fill(Block::default());
        self.attached.fill(NO_BLOCK);
        self.free = FreeList::full(self.blocks.len());
        self.index.clear();
        self.version += 1;
    }

    /// What changed since the last call, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<CacheChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Every findable block as if it were stored now: parents before children, anchors before what is
    /// attached.
    pub(crate) fn resident(&self) -> Vec<CacheChange> {
        let mut resident = Vec::new();
        let mut seen = vec![false; self.blocks.len()];
        let mut path = Vec::new();
        for anchor in self.index.values() {
            let mut next = Some(*anchor);
            while let Some(block) = next.filter(|block| !std::mem::replace(&mut seen[*block as usize], true))
            {
                path.push(block);
                next = self.registration(block).and_then(|r| r.parent);
            }
            while let Some(block) = path.pop() {
                resident.extend(self.stored(block));
                let attached = (1..self.rules.len()).filter_map(|g| self.attached_to(block, g));
                resident.extend(attached.filter_map(|attached| self.stored(attached)));
            }
        }
        resident
    }

    fn stored(&self, block: BlockId) -> Option<CacheChange> {
        let (group, anchor) = match self.blocks[block as usize].role {
            Role::Private => return None,
            Role::Anchor(_) => (0, block),
            Role::Attached { anchor, group } => (group, anchor),
        };
        if !self.blocks[block as usize].computed {
            return None;
        }
        let registration = self.registration(anchor)?;
        Some(CacheChange::Stored {
            group,
            hash: registration.hash,
            parent: registration
                .parent
                .and_then(|parent| self.registration(parent))
                .map(|parent| parent.hash),
            tokens: self.ids(anchor).into(),
            salt: Arc::clone(&registration.salt),
        })
    }
}
