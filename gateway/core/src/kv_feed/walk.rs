//! A way through a block and all blocks behind it, step by step: into the index, each after its parent, or
//! out of it, each before its parent. It remembers one place, however many blocks there are.

use super::blocks::{Blocks, Held};
use super::node::{NodeId, Reach};

/// Where a walk stands, and what it does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Walk {
    way: Way,
    reach: Reach,
    root: NodeId,
    at: NodeId,
    /// Whether it is done with the blocks behind this one.
    leaves: bool,
}

/// Which way the blocks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Into the index: what now has a copy, and what waited behind it. The index refuses a block whose parent
    /// it lacks, so a gap further up holds all of them back.
    Attach,
    /// Out of it: what lost its last copy, with all blocks behind it.
    Detach,
}

impl Walk {
    pub(super) fn new(way: Way, reach: Reach, root: NodeId) -> Self {
        Self { way, reach, root, at: root, leaves: false }
    }

    /// One step; where the walk stands then, unless it has come to its end.
    pub(super) fn step(mut self, blocks: &Blocks, held: &mut Held<'_>) -> Option<Self> {
        let worker = held.id(self.reach)?;
        let node = blocks.node(self.at);
        if !self.leaves {
            let goes_on = match self.way {
                Way::Attach => {
                    let parent = node.parent().map(|parent| blocks.key(parent));
                    node.is_held(self.reach) && held.index.store_block(worker, parent, node.key)
                }
                Way::Detach => held.index.holds(worker, node.key),
            };
            match node.first_child().filter(|_| goes_on) {
                Some(child) => self.at = child,
                None => self.leaves = true,
            }
            return Some(self);
        }
        if self.way == Way::Detach {
            held.index.drop_block(worker, node.key);
        }
        if self.at == self.root {
            return None;
        }
        match node.next_sibling() {
            Some(next) => (self.at, self.leaves) = (next, false),
            None => self.at = node.parent()?,
        }
        Some(self)
    }
}
