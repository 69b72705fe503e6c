//! The block manager's integrity check: its invariants, written down as code. Runs after every step in tests and,
//! in debug builds, whenever the engine falls idle.

use super::{BlockManager, BlockTable};

impl BlockManager {
    /// Compares everything with `tables`, which are all tables in use. The error names the first thing that is off.
    pub(crate) fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        let mut holders = vec![0; self.blocks.len()];
        for table in tables {
            self.check_table(table)?;
            for block in &table.blocks {
                holders[*block as usize] += 1;
            }
        }
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
            let Some(registration) = &block.registration else { continue };
            if self.index.get(&registration.hash) != Some(&(id as u32)) {
                return Err(format!("registered block {id} is not in the index"));
            }
            let Some(parent) = registration.parent else { continue };
            if self.blocks[parent as usize].registration.is_none() {
                return Err(format!("block {id} is registered and its parent {parent} is not"));
            }
            // `None < Some`: a held parent never leaves before a free child.
            if place[parent as usize].is_some() && place[parent as usize] < place[id] {
                return Err(format!("parent {parent} would be evicted before its child {id}"));
            }
        }
        let registered = self.blocks.iter().filter(|b| b.registration.is_some()).count();
        if registered != self.index.len() {
            return Err(format!("{registered} registered blocks, {} in the index", self.index.len()));
        }
        Ok(())
    }

    fn check_table(&self, table: &BlockTable) -> Result<(), String> {
        for (i, block) in table.blocks.iter().enumerate() {
            let registration = &self.blocks[*block as usize].registration;
            if registration.is_some() != (i < table.registered) {
                return Err(format!("block {block} at place {i}: {} are registered", table.registered));
            }
            let parent = i.checked_sub(1).map(|p| table.blocks[p]);
            if registration.as_ref().is_some_and(|r| r.parent != parent) {
                return Err(format!("block {block} at place {i} has another parent than {parent:?}"));
            }
        }
        Ok(())
    }
}
