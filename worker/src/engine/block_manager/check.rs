//! The block manager's integrity check: its invariants, written down as code. Runs after every step in tests
//! and, in debug builds, whenever the engine falls idle.

use super::{BlockId, BlockManager, BlockTable, Role};
use crate::engine::backend::NO_BLOCK;

impl BlockManager {
    /// Compares everything with `tables`, which are all tables in use, each with the number of its computed
    /// positions. To be called between two steps. The error names the first thing that is off.
    pub(crate) fn check<'a>(
        &self,
        tables: impl Iterator<Item = (&'a BlockTable, usize)>,
    ) -> Result<(), String> {
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
                return Err(format!("block {id} can be found and is not computed"));
            }
            match &block.role {
                Role::Private if block.refs > 1 => {
                    return Err(format!("block {id} is private and has {} holders", block.refs));
                }
                Role::Private => {}
                Role::Anchor(_) => self.check_anchor(id, &place)?,
                Role::Attached { anchor, group } => self.check_attached(id, *anchor, *group)?,
            }
        }
        let registered = self.blocks.iter().filter(|b| matches!(b.role, Role::Anchor(_))).count();
        if registered != self.index.len() {
            return Err(format!("{registered} registered blocks, {} in the index", self.index.len()));
        }
        Ok(())
    }

    /// Each block's place in the free list: there exactly if it has no holders.
    fn check_free_list(&self, holders: &[u32]) -> Result<Vec<Option<usize>>, String> {
        let mut place = vec![None; self.blocks.len()];
        for (i, block) in self.free.iter().enumerate() {
            if place[block as usize].replace(i).is_some() {
                return Err(format!("block {block} is in the free list twice"));
            }
        }
        if place.iter().flatten().count() != self.free.len() {
            return Err("the free list's length is off".to_owned());
        }
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != holders[id] {
                return Err(format!("block {id} counts {} holders and has {}", block.refs, holders[id]));
            }
            if (block.refs == 0) != place[id].is_some() {
                return Err(format!(
                    "block {id} has {} holders; in the free list: {:?}",
                    block.refs, place[id]
                ));
            }
        }
        Ok(place)
    }

    fn check_anchor(&self, id: BlockId, place: &[Option<usize>]) -> Result<(), String> {
        let Some(registration) = self.registration(id) else { return Ok(()) };
        if self.index.get(&registration.hash) != Some(&id) {
            return Err(format!("registered block {id} is not in the index"));
        }
        for g in 1..self.rules.len() {
            let Some(attached) = self.attached_to(id, g) else { continue };
            if !matches!(self.blocks[attached as usize].role, Role::Attached { anchor, group } if (anchor, group) == (id, g))
            {
                return Err(format!("block {attached} does not know that it is attached to {id}"));
            }
        }
        let Some(parent) = registration.parent else { return Ok(()) };
        if self.registration(parent).is_none() {
            return Err(format!("block {id} is registered and its parent {parent} is not"));
        }
        // `None < Some`: a held parent never leaves before a free child.
        if place[parent as usize].is_some() && place[parent as usize] < place[id as usize] {
            return Err(format!("parent {parent} would be evicted before its child {id}"));
        }
        Ok(())
    }

    fn check_attached(&self, id: BlockId, anchor: BlockId, group: usize) -> Result<(), String> {
        if self.registration(anchor).is_none() || self.attached_to(anchor, group) != Some(id) {
            return Err(format!("block {id} is attached to {anchor}, which does not know it"));
        }
        if self.blocks[id as usize].refs > self.blocks[anchor as usize].refs {
            return Err(format!("attached block {id} has more holders than its anchor {anchor}"));
        }
        Ok(())
    }

    fn check_table(&self, table: &BlockTable, computed: usize) -> Result<(), String> {
        for (i, block) in table.anchors().iter().enumerate() {
            let registration = self.registration(*block);
            if registration.is_some() != (i < table.registered) {
                return Err(format!("block {block} at place {i}: {} are registered", table.registered));
            }
            let parent = i.checked_sub(1).map(|p| table.anchors()[p]);
            if registration.is_some_and(|r| r.parent != parent) {
                return Err(format!("block {block} at place {i} has another parent than {parent:?}"));
            }
        }
        for (g, group) in table.groups.iter().enumerate() {
            if group.first != self.rules.first_block(g, computed) {
                return Err(format!(
                    "group {g} keeps from block {} with {computed} tokens computed",
                    group.first
                ));
            }
            for (i, block) in group.blocks.iter().enumerate() {
                if (*block == NO_BLOCK) != (i < group.first) {
                    return Err(format!("group {g} holds {block} at place {i}, and from {}", group.first));
                }
                let full = (i + 1) * self.block_size <= computed && i < table.registered;
                if g > 0 && full && i >= group.first && self.attached_at(table, g, i) != Some(*block) {
                    return Err(format!("group {g}'s block {block} at place {i} is not attached there"));
                }
            }
        }
        Ok(())
    }
}
