//! Prefixes that are held for somebody outside of the engine: computed ones that another worker shall fetch,
//! and ones in the making, whose KV comes from there. They are held as a sequence holds its blocks, and what
//! comes from outside is registered as what a sequence computed.

use std::ops::Range;
use std::sync::Arc;

use super::{BlockId, BlockManager, BlockTable, GroupTable, Registration, Role};
use crate::engine::backend::NO_BLOCK;

/// A prefix of whole blocks, and those of its blocks that are there.
#[derive(Debug)]
pub(crate) struct HeldPrefix {
    /// In the first group from the first block on, in others from the first that the token behind the prefix
    /// reads.
    table: BlockTable,
    tokens: Arc<[u32]>,
    salt: Arc<[u8]>,
}

/// What is to be done with a block of a held prefix that comes from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adoption {
    /// It is there already.
    There,
    /// Its KV is to be written here.
    At(BlockId),
    /// No block is free, it is not the next one, or another prefix has its hash.
    Refused,
}

impl HeldPrefix {
    /// Its tokens, of whole blocks.
    pub(crate) fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// The table, and the number of positions that it is for, as the integrity check takes them.
    pub(crate) fn checked(&self) -> (&BlockTable, usize) {
        (&self.table, self.tokens.len())
    }

    /// The first place at which a block is missing in a group; the number of its blocks if none is.
    pub(crate) fn first_missing(&self) -> usize {
        self.table.groups.iter().map(|group| group.blocks.len()).min().unwrap_or(0)
    }

    /// The blocks at these places, by place and then by group: their groups, places and numbers.
    pub(crate) fn blocks(&self, places: Range<usize>) -> impl Iterator<Item = (usize, usize, BlockId)> {
        let groups = &self.table.groups;
        let at = |place: usize| {
            let group = move |(g, group): (usize, &GroupTable)| Some((g, place, group.held(place)?));
            groups.iter().enumerate().filter_map(group)
        };
        places.flat_map(at)
    }
}

impl BlockManager {
    /// How many tokens the longest cached part of a prompt has that can be gone on from.
    pub(crate) fn usable_prefix(&self, prompt: &[u32], salt: &Arc<[u8]>) -> usize {
        let anchors = self.matched(prompt, salt);
        self.usable_of(anchors.len(), |i| anchors[i]) * self.block_size
    }

    /// Holds what is cached of a prefix of whole blocks.
    pub(crate) fn hold_prefix(&mut self, tokens: &[u32], salt: &Arc<[u8]>) -> HeldPrefix {
        let anchors = self.matched_blocks(tokens, salt, tokens.len() / self.block_size);
        let mut table = BlockTable { registered: anchors.len(), groups: Vec::new(), collided: false };
        table.groups.push(GroupTable { blocks: anchors, first: 0 });
        for g in 1..self.rules.len() {
            let first = self.rules.first_block(g, tokens.len());
            let mut blocks = vec![NO_BLOCK; first];
            blocks.extend((first..table.registered).map_while(|i| self.attached_at(&table, g, i)));
            table.groups.push(GroupTable { blocks, first });
        }
        for block in table.groups.iter().flat_map(|group| &group.blocks).filter(|block| **block != NO_BLOCK) {
            self.hold(*block);
        }
        HeldPrefix { table, tokens: tokens.into(), salt: Arc::clone(salt) }
    }

    /// How many blocks a prefix of so many tokens takes when all of it is held.
    pub(crate) fn held_blocks(&self, tokens: usize) -> usize {
        let blocks = tokens / self.block_size;
        (0..self.rules.len()).map(|g| blocks - self.rules.first_block(g, tokens).min(blocks)).sum()
    }

    /// How many leading tokens of a held prefix a prompt that begins with it could go on from now.
    pub(crate) fn usable_tokens(&self, held: &HeldPrefix) -> usize {
        let anchors = held.table.anchors();
        self.usable_of(anchors.len(), |i| anchors[i]) * self.block_size
    }

    /// Finds the block for KV that comes from outside, which must be that of the group's next place. Where
    /// it is to be written, [`BlockManager::adopted`] or [`BlockManager::abandon`] must follow at once.
    pub(crate) fn adopt(&mut self, held: &mut HeldPrefix, group: usize, place: usize) -> Adoption {
        let Some(table) = held.table.groups.get(group) else { return Adoption::Refused };
        if place < table.blocks.len() {
            return Adoption::There;
        }
        let has_anchor = group == 0 || place < held.table.registered;
        let is_next = place == table.blocks.len() && (place + 1) * self.block_size <= held.tokens.len();
        if !is_next || !has_anchor {
            return Adoption::Refused;
        }
        match self.present(held, group, place) {
            Err(()) => Adoption::Refused,
            Ok(Some(block)) => {
                self.hold(block);
                held.table.groups[group].blocks.push(block);
                held.table.registered += usize::from(group == 0);
                Adoption::There
            }
            Ok(None) => self.allocate().map_or(Adoption::Refused, Adoption::At),
        }
    }

    /// The block with this KV, if it is cached; an error where another prefix has its hash.
    fn present(&self, held: &HeldPrefix, group: usize, place: usize) -> Result<Option<BlockId>, ()> {
        if group > 0 {
            return Ok(self.attached_at(&held.table, group, place));
        }
        let ids = &held.tokens[place * self.block_size..(place + 1) * self.block_size];
        let (parent, hash) = self.chain(held.table.anchors(), ids, &held.salt);
        match self.index.get(&hash) {
            None => Ok(None),
            Some(block) if self.is(*block, parent, ids, &held.salt) => Ok(Some(*block)),
            Some(_) => Err(()),
        }
    }

    /// Takes note that the KV of a block is written: from now on others find it.
    pub(crate) fn adopted(&mut self, held: &mut HeldPrefix, group: usize, block: BlockId) {
        let place = held.table.groups[group].blocks.len();
        if group == 0 {
            let ids = &held.tokens[place * self.block_size..(place + 1) * self.block_size];
            let (parent, hash) = self.chain(held.table.anchors(), ids, &held.salt);
            self.insert(block, ids, Registration { hash, parent, salt: Arc::clone(&held.salt) });
            held.table.registered += 1;
        } else {
            let anchor = held.table.anchors()[place];
            self.version += 1;
            self.blocks[block as usize].role = Role::Attached { anchor, group };
            *self.attachment(anchor, group) = block;
        }
        held.table.groups[group].blocks.push(block);
        self.mark_computed(Some(block));
    }

    /// Gives back a block that was to be written and was not.
    pub(crate) fn abandon(&mut self, block: BlockId) {
        self.let_go(block);
    }

    /// Lets go of a held prefix. What is there of it stays cached, as of a sequence that ended.
    pub(crate) fn let_go_prefix(&mut self, mut held: HeldPrefix) {
        self.release(&mut held.table);
    }
}
