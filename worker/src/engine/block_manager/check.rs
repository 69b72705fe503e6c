//! The block manager's integrity check: its invariants, written down as code. Runs after every step in tests
//! and, in debug builds, whenever the engine falls idle.

use super::{BlockId, BlockManager, BlockTable, Damage, GroupTable, Role};
use crate::engine::backend::NO_BLOCK;

impl BlockManager {
    /// Compares everything with `tables`, which are all tables in use, each with the number of its computed
    /// positions. To be called between two steps. The error names the first thing that is off.
    pub(crate) fn check<'a>(
        &self,
        tables: impl Iterator<Item = (&'a BlockTable, usize)>,
    ) -> Result<(), Damage> {
        let mut holders = vec![0; self.blocks.len()];
        for (table, computed) in tables {
            self.check_table(table, computed)?;
            for block in table.tables().flatten().filter(|block| **block != NO_BLOCK) {
                holders[*block as usize] += 1;
            }
        }
        let place = self.check_free_list(&holders)?;
        for (id, block) in self.blocks.iter().enumerate() {
            let id = id as BlockId;
            if !block.computed && !matches!(block.role, Role::Private) {
                return Err(Damage::NotComputed(id));
            }
            match &block.role {
                Role::Private if block.refs > 1 => {
                    return Err(Damage::PrivateShared { block: id, holders: block.refs });
                }
                Role::Private => {}
                Role::Anchor(_) => self.check_anchor(id, &place)?,
                Role::Attached { anchor, group } => self.check_attached(id, *anchor, *group)?,
            }
        }
        let registered = self.blocks.iter().filter(|b| matches!(b.role, Role::Anchor(_))).count();
        if registered != self.index.len() {
            return Err(Damage::IndexLength { registered, indexed: self.index.len() });
        }
        Ok(())
    }

    /// Each block's place in the free list: there exactly if it has no holders.
    fn check_free_list(&self, holders: &[u32]) -> Result<Vec<Option<usize>>, Damage> {
        let mut place = vec![None; self.blocks.len()];
        for (i, block) in self.free.iter().enumerate() {
            if place[block as usize].replace(i).is_some() {
                return Err(Damage::FreeTwice(block));
            }
        }
        if place.iter().flatten().count() != self.free.len() {
            return Err(Damage::FreeLength);
        }
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != holders[id] {
                return Err(Damage::Holders { block: id, counted: block.refs, holders: holders[id] });
            }
            if (block.refs == 0) != place[id].is_some() {
                return Err(Damage::FreePlace { block: id, holders: block.refs, place: place[id] });
            }
        }
        Ok(place)
    }

    fn check_anchor(&self, id: BlockId, place: &[Option<usize>]) -> Result<(), Damage> {
        let Some(registration) = self.registration(id) else { return Ok(()) };
        if self.index.get(&registration.hash) != Some(&id) {
            return Err(Damage::NotIndexed(id));
        }
        for g in 1..self.rules.len() {
            let Some(attached) = self.attached_to(id, g) else { continue };
            if !matches!(self.blocks[attached as usize].role, Role::Attached { anchor, group } if (anchor, group) == (id, g))
            {
                return Err(Damage::AttachedUnaware { attached, anchor: id });
            }
        }
        let Some(parent) = registration.parent else { return Ok(()) };
        if self.registration(parent).is_none() {
            return Err(Damage::ParentUnregistered { block: id, parent });
        }
        // `None < Some`: a held parent never leaves before a free child.
        if place[parent as usize].is_some() && place[parent as usize] < place[id as usize] {
            return Err(Damage::ParentFirst { block: id, parent });
        }
        Ok(())
    }

    fn check_attached(&self, id: BlockId, anchor: BlockId, group: usize) -> Result<(), Damage> {
        if self.registration(anchor).is_none() || self.attached_to(anchor, group) != Some(id) {
            return Err(Damage::AnchorUnaware { attached: id, anchor });
        }
        if self.blocks[id as usize].refs > self.blocks[anchor as usize].refs {
            return Err(Damage::AnchorReleased { attached: id, anchor });
        }
        Ok(())
    }

    fn check_table(&self, table: &BlockTable, computed: usize) -> Result<(), Damage> {
        for (place, block) in table.anchors().iter().copied().enumerate() {
            let (registration, registered) = (self.registration(block), table.registered);
            if registration.is_some() != (place < registered) {
                return Err(Damage::Registered { block, place, registered });
            }
            let parent = place.checked_sub(1).map(|before| table.anchors()[before]);
            if registration.is_some_and(|r| r.parent != parent) {
                return Err(Damage::OtherParent { block, place, parent });
            }
        }
        for (group, GroupTable { blocks, first }) in table.groups.iter().enumerate() {
            let first = *first;
            if first != self.rules.first_block(group, computed) {
                return Err(Damage::FirstKept { group, first, computed });
            }
            for (place, block) in blocks.iter().copied().enumerate() {
                if (block == NO_BLOCK) != (place < first) {
                    return Err(Damage::HeldPlace { group, block, place, first });
                }
                let full = (place + 1) * self.block_size <= computed && place < table.registered;
                if group > 0 && full && place >= first && self.attached_at(table, group, place) != Some(block)
                {
                    return Err(Damage::NotAttached { group, block, place });
                }
            }
        }
        Ok(())
    }
}
