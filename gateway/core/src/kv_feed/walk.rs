//! A way through a block and all blocks behind it, step by step: into the index, each after its parent, or
//! out of it, each before its parent. Or past them, to reckon something anew. It remembers one place, however
//! many blocks there are.

use super::blocks::{Blocks, Held};
use super::node::{Node, NodeId, Reach};

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
    pub(super) fn step(self, blocks: &Blocks, held: &mut Held<'_>) -> Option<Self> {
        let worker = held.id(self.reach)?;
        let node = blocks.node(self.at);
        if !self.leaves {
            let goes_on = match self.way {
                Way::Attach => node.copies.is_held(self.reach) && blocks.attach(held, worker, self.at),
                Way::Detach => held.index.holds(worker, node.key),
            };
            return Some(self.entered(&node, goes_on));
        }
        if self.way == Way::Detach {
            held.index.drop_block(worker, node.key);
        }
        self.left(&node)
    }

    /// The block that it has come to; `None` if it is done with that and those behind it.
    pub(super) fn comes_to(&self) -> Option<NodeId> {
        (!self.leaves).then_some(self.at)
    }

    /// The block at hand, whether it has just been come to or those behind it are done.
    pub(super) fn at(&self) -> NodeId {
        self.at
    }

    /// On from `node`, where it stands: to those behind it if it `goes_on`.
    pub(super) fn entered(mut self, node: &Node, goes_on: bool) -> Self {
        match node.first_child().filter(|_| goes_on) {
            Some(child) => self.at = child,
            None => self.leaves = true,
        }
        self
    }

    /// On from `node`, where it stands and those behind which are done; `None` at its end.
    pub(super) fn left(mut self, node: &Node) -> Option<Self> {
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
