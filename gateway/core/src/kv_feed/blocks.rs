//! What one worker has announced: the engine's name of each block, how many copies there are, and its place in the
//! tree of prefixes. A block is in the index while it and all blocks before it have a copy.
//!
//! Where the worker announces other tiers too, the index has it twice: what the engine's own cache holds, and what any tier
//! holds, which a request finds after a fetch.
//!
//! A block whose last copy went while later blocks are still there stays as an empty place: if it is stored again,
//! those are reachable again. Engines evict the last block of a prefix first, so that is rare.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use keyway_wire::block_hash::BlockHash;

use crate::index::{PrefixIndex, WorkerId};
use crate::spread_map::Spread;

/// The worker's part of the index.
pub(super) struct Held<'a> {
    pub(super) index: &'a mut PrefixIndex,
    pub(super) worker: WorkerId,
    /// Its name for blocks in any tier, where they count.
    pub(super) any_tier: Option<WorkerId>,
}

/// Where a copy of a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    /// In the engine's own cache.
    Own,
    /// In the host's memory or on a disk.
    Other,
}

/// One of the worker's names in the index: what counts as held there.
#[derive(Clone, Copy)]
enum Reach {
    /// What the engine's own cache holds.
    Own,
    /// What any tier holds.
    Any,
}

impl Held<'_> {
    fn id(&self, reach: Reach) -> Option<WorkerId> {
        match reach {
            Reach::Own => Some(self.worker),
            Reach::Any => self.any_tier,
        }
    }
}

/// Place of a node.
pub(super) type NodeId = u32;

/// No node.
const NONE: NodeId = NodeId::MAX;

/// As small as can be: a fleet's caches hold tens of millions of blocks.
#[derive(Debug, Clone, Copy)]
struct Node {
    name: u64,
    /// Its name in the index.
    key: BlockHash,
    /// Copies the engine's own cache has, and other tiers.
    copies: u16,
    elsewhere: u16,
    /// The prompt's first block, which stays while one behind it does: it knows the empty prefix that they descend from.
    first: NodeId,
    parent: NodeId,
    first_child: NodeId,
    /// The one before and the one after it among those behind `parent`; of a first block, which has none, its empty prefix.
    siblings: [NodeId; 2],
}

const _: () = assert!(size_of::<Node>() == 40, "a block costs more than ARCHITECTURE.md says");

impl Node {
    /// Of a first block.
    fn empty_prefix(&self) -> BlockHash {
        let [low, high] = self.siblings;
        BlockHash(u64::from(high) << 32 | u64::from(low))
    }

    fn is_held(&self, reach: Reach) -> bool {
        self.copies > 0 || (matches!(reach, Reach::Any) && self.elsewhere > 0)
    }

    fn copies_in(&mut self, tier: Tier) -> &mut u16 {
        match tier {
            Tier::Own => &mut self.copies,
            Tier::Other => &mut self.elsewhere,
        }
    }
}

#[derive(Debug)]
pub(super) struct Blocks {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    /// All of them by name; several have the same where hashes do not cover the salt.
    names: HashTable<NodeId>,
    max: usize,
}

impl Blocks {
    pub(super) fn new(max: usize) -> Self {
        let max = max.min(NONE as usize);
        Self { nodes: Vec::new(), free: Vec::new(), names: HashTable::new(), max }
    }

    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.free.clear();
        self.names.clear();
    }

    /// Blocks known.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    pub(super) fn key(&self, node: NodeId) -> BlockHash {
        self.nodes[node as usize].key
    }

    pub(super) fn root(&self, node: NodeId) -> BlockHash {
        self.nodes[self.nodes[node as usize].first as usize].empty_prefix()
    }

    /// The block of this name; where several have it, the one below `root`.
    pub(super) fn find_parent(&self, name: u64, root: Option<BlockHash>) -> Option<NodeId> {
        let below = |node: &NodeId| root.is_none_or(|root| self.root(*node) == root);
        self.named(name).find(below)
    }

    /// Puts all that is known into the index's other half: from now on other tiers count.
    pub(super) fn count_all_tiers(&self, held: &mut Held<'_>) {
        let roots = (0..self.nodes.len() as NodeId).filter(|node| {
            let Node { parent, copies, .. } = self.nodes[*node as usize];
            parent == NONE && copies > 0
        });
        roots.for_each(|root| self.attach(held, root, Reach::Any));
    }

    /// Counts one more copy, in another tier, of a block that is announced there by its name alone; false if that is not
    /// known, or stands for several.
    pub(super) fn store_elsewhere(&mut self, held: &mut Held<'_>, name: u64) -> bool {
        let alone = {
            let mut named = self.named(name);
            named.next().filter(|_| named.next().is_none())
        };
        if let Some(node) = alone {
            self.count_copy(held, Tier::Other, node);
        }
        alone.is_some()
    }

    /// Counts one more copy of a block. `None` if there is no room for another block.
    pub(super) fn store(
        &mut self,
        held: &mut Held<'_>,
        tier: Tier,
        name: u64,
        parent: Option<NodeId>,
        key: BlockHash,
        root: BlockHash,
    ) -> Option<NodeId> {
        let same = self.named(name).find(|node| self.key(*node) == key);
        let node = match same {
            Some(node) => node,
            None => self.add(name, parent.unwrap_or(NONE), key, root)?,
        };
        self.count_copy(held, tier, node);
        Some(node)
    }

    fn count_copy(&mut self, held: &mut Held<'_>, tier: Tier, id: NodeId) {
        let node = &mut self.nodes[id as usize];
        let before = *node;
        let copies = node.copies_in(tier);
        *copies = copies.saturating_add(1);
        self.moved(held, id, &before);
    }

    /// Brings the index up to date with a block whose copies were others `before`.
    fn moved(&self, held: &mut Held<'_>, id: NodeId, before: &Node) {
        for reach in [Reach::Own, Reach::Any] {
            match (before.is_held(reach), self.nodes[id as usize].is_held(reach)) {
                (false, true) => self.attach(held, id, reach),
                (true, false) => self.detach(held, id, reach),
                _ => {}
            }
        }
    }

    /// Counts one copy less, or as many as are `left`; false if the block is not known. Where several have the name,
    /// each loses a copy: which one is meant is not said, and too little known is the better mistake.
    pub(super) fn remove(&mut self, held: &mut Held<'_>, tier: Tier, name: u64, left: Option<u32>) -> bool {
        let mut named = self.named(name);
        let first = named.next();
        // Rarely any, so this allocates nothing.
        let others: Vec<NodeId> = named.collect();
        let mut known = false;
        for node in first.into_iter().chain(others) {
            // An engine may even name two blocks of one prefix alike; the first may then have gone with the second.
            if Some(node) != first && !self.named(name).any(|other| other == node) {
                continue;
            }
            let before = self.nodes[node as usize];
            let copies = self.nodes[node as usize].copies_in(tier);
            known |= *copies > 0;
            let left = left.map(|left| u16::try_from(left).unwrap_or(u16::MAX));
            *copies = left.unwrap_or(copies.saturating_sub(1));
            self.moved(held, node, &before);
            self.discard(node);
        }
        known
    }

    /// All blocks of this name.
    fn named(&self, name: u64) -> impl Iterator<Item = NodeId> {
        let same = move |node: &NodeId| self.nodes[*node as usize].name == name;
        self.names.iter_hash(spread(name)).copied().filter(same)
    }

    fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        let first = Some(self.nodes[node as usize].first_child).filter(|child| *child != NONE);
        let step =
            |child: &NodeId| Some(self.nodes[*child as usize].siblings[1]).filter(|next| *next != NONE);
        std::iter::successors(first, step)
    }

    /// Puts a block that now has a copy into the index, and what waited behind it. The index refuses a block whose
    /// parent it lacks, so a gap further up holds all of them back.
    fn attach(&self, held: &mut Held<'_>, node: NodeId, reach: Reach) {
        let Some(worker) = held.id(reach) else { return };
        let mut todo = Vec::new();
        let mut next = Some(node);
        while let Some(node) = next {
            let Node { key, parent, .. } = self.nodes[node as usize];
            let parent = (parent != NONE).then(|| self.key(parent));
            let is_held = self.nodes[node as usize].is_held(reach);
            if is_held && held.index.store_block(worker, parent, key) {
                todo.extend(self.children(node));
            }
            next = todo.pop();
        }
    }

    /// Takes a block without a copy out of the index, and all blocks behind it before it.
    fn detach(&self, held: &mut Held<'_>, node: NodeId, reach: Reach) {
        let Some(worker) = held.id(reach) else { return };
        if self.nodes[node as usize].first_child == NONE {
            held.index.drop_block(worker, self.key(node));
            return;
        }
        let mut todo = vec![node];
        let mut order = Vec::new();
        while let Some(node) = todo.pop() {
            if held.index.holds(worker, self.key(node)) {
                order.push(node);
                todo.extend(self.children(node));
            }
        }
        for node in order.into_iter().rev() {
            held.index.drop_block(worker, self.key(node));
        }
    }

    fn add(&mut self, name: u64, parent: NodeId, key: BlockHash, root: BlockHash) -> Option<NodeId> {
        if self.nodes.len() - self.free.len() >= self.max {
            return None;
        }
        let id = self.free.pop().unwrap_or(self.nodes.len() as NodeId);
        let (first, siblings) = match self.nodes.get(parent as usize) {
            Some(parent) => (parent.first, [NONE, parent.first_child]),
            None => (id, [root.0 as NodeId, (root.0 >> 32) as NodeId]),
        };
        let node = Node { name, key, copies: 0, elsewhere: 0, first, parent, first_child: NONE, siblings };
        match self.nodes.get_mut(id as usize) {
            Some(place) => *place = node,
            None => self.nodes.push(node),
        }
        let nodes = &mut self.nodes;
        if parent != NONE {
            if let Some(next) = nodes.get_mut(siblings[1] as usize) {
                next.siblings[0] = id;
            }
            nodes[parent as usize].first_child = id;
        }
        self.names.insert_unique(spread(name), id, |id| spread(nodes[*id as usize].name));
        Some(id)
    }

    /// Forgets a block without copies and without blocks behind it, and those before it that were kept for it.
    fn discard(&mut self, mut id: NodeId) {
        while id != NONE {
            let node = self.nodes[id as usize];
            if node.is_held(Reach::Any) || node.first_child != NONE {
                return;
            }
            self.unlink(id, &node);
            self.free.push(id);
            id = node.parent;
        }
    }

    fn unlink(&mut self, id: NodeId, node: &Node) {
        if node.parent != NONE {
            let [previous, next] = node.siblings;
            if let Some(next) = self.nodes.get_mut(next as usize) {
                next.siblings[0] = previous;
            }
            match self.nodes.get_mut(previous as usize) {
                Some(previous) => previous.siblings[1] = next,
                None => self.nodes[node.parent as usize].first_child = next,
            }
        }
        if let Ok(entry) = self.names.find_entry(spread(node.name), |other| *other == id) {
            entry.remove();
        }
    }
}

/// Names are hashes or numbers that count, which no client chooses.
fn spread(name: u64) -> u64 {
    Spread::default().hash_one(name)
}
