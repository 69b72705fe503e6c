//! What one worker has announced: the engine's name of each block, how many copies there are, and its place
//! in the tree of prefixes. A block is in the index while it and all blocks before it have a copy.
//!
//! Where the worker announces other tiers too, the index has it twice: what the engine's own cache holds, and
//! what any tier holds, which a request finds after a fetch.
//!
//! A block whose last copy went while later blocks are still there stays as an empty place: if it is stored
//! again, those are reachable again. Engines evict the last block of a prefix first, so that is rare.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::BlockStored;

use super::groups::{Groups, Part};
use super::node::{Copies, NONE, Node, NodeId, Reach, Tier};
use super::tree::{BLOCKS_MAX, Tree};
use super::walk::{Walk, Way};
use crate::index::{PrefixIndex, WorkerId};
use crate::spread_map::Spread;

/// The worker's part of the index.
pub(super) struct Held<'a> {
    pub(super) index: &'a mut PrefixIndex,
    pub(super) worker: WorkerId,
    /// Its name for blocks in any tier, where they count.
    pub(super) any_tier: Option<WorkerId>,
    /// Steps that may be taken before others must have the index.
    pub(super) left: usize,
}

impl Held<'_> {
    pub(super) fn id(&self, reach: Reach) -> Option<WorkerId> {
        match reach {
            Reach::Own => Some(self.worker),
            Reach::Any => self.any_tier,
        }
    }
}

/// Blocks that may have one name: of as many salts as one prompt is known under. Each further one would be
/// searched for among all of them.
const ALIKE_MAX: usize = 1_024;

#[derive(Debug)]
pub(super) struct Blocks {
    tree: Tree,
    /// All of them by name; several have the same where hashes do not cover the salt.
    names: HashTable<NodeId>,
    /// Whether several had one name since nothing was known.
    any_alike: bool,
    max: usize,
    /// What the other groups of a hybrid model have.
    groups: Groups,
    /// What the last change still asks for, last in, first out. Empty before the next one.
    agenda: Vec<Step>,
}

/// Something left to do; done in small pieces, so that what one event can set off takes the index from
/// requests for moments only.
#[derive(Debug, Clone, Copy)]
enum Step {
    Walk(Walk),
    /// One copy of a block goes.
    Remove {
        node: NodeId,
        tier: Tier,
        left: Option<u32>,
    },
    /// A block that may be forgotten, if it has neither a copy nor blocks behind it.
    Discard(NodeId),
    /// Other tiers count from now on: from this block on they are not in the index's other half yet.
    CountTiers(NodeId),
    /// What the other groups have has changed for a block and those behind it.
    Reckon(Walk),
    /// ... and for all blocks from this one on.
    ReckonAll(NodeId),
}

impl Blocks {
    pub(super) fn new(max: usize) -> Self {
        let max = max.min(BLOCKS_MAX);
        let (tree, names) = (Tree::default(), HashTable::new());
        Self { tree, names, any_alike: false, max, groups: Groups::default(), agenda: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        self.tree.clear();
        self.names.clear();
        self.any_alike = false;
        self.groups.clear();
        self.agenda.clear();
    }

    /// Blocks with a node, those without a copy among them.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.tree.len()
    }

    pub(super) fn node(&self, node: NodeId) -> Node {
        self.tree.node(node)
    }

    pub(super) fn key(&self, node: NodeId) -> BlockHash {
        self.tree.key(node)
    }

    pub(super) fn root(&self, node: NodeId) -> BlockHash {
        self.tree.root(node)
    }

    /// The block of this name; where several have it, the one below `root`.
    pub(super) fn find_parent(&self, name: u64, root: Option<BlockHash>) -> Option<NodeId> {
        let below = |node: &NodeId| root.is_none_or(|root| self.root(*node) == root);
        if self.any_alike { self.named(name).find(below) } else { self.first_named(name).filter(below) }
    }

    /// Brings what leads to blocks of these names into the processor's cache, all at once.
    pub(super) fn fetch(&self, names: impl Iterator<Item = u64>) {
        std::hint::black_box(names.filter(|name| self.first_named(*name).is_some()).count());
    }

    /// Puts all that is known into the index's other half: from now on other tiers count.
    pub(super) fn count_all_tiers(&mut self) {
        self.agenda.push(Step::CountTiers(0));
    }

    /// Counts one more copy, in another tier, of a block that is announced there by its name alone; false if
    /// that is not known, or stands for several.
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

    /// Counts one more copy of a block. `None` if there is no room for another block, or of this name.
    pub(super) fn store(
        &mut self,
        held: &mut Held<'_>,
        tier: Tier,
        name: u64,
        parent: Option<NodeId>,
        key: BlockHash,
        root: BlockHash,
    ) -> Option<NodeId> {
        let (mut same, mut alike) = (self.first_named(name), 0);
        if same.is_some_and(|first| self.key(first) != key) {
            same = self.named(name).inspect(|_| alike += 1).find(|node| self.key(*node) == key);
            self.any_alike = true;
        }
        held.left = held.left.saturating_sub(alike);
        let node = match same {
            Some(node) => node,
            None if alike < ALIKE_MAX => self.add(name, parent.unwrap_or(NONE), key, root)?,
            None => return None,
        };
        self.count_copy(held, tier, node);
        Some(node)
    }

    /// Adds a block with its first copy, if none has this name yet and nothing depends on it: what the index
    /// is to be told is that it is there, and no more. `None`, and nothing changed, otherwise.
    pub(super) fn add_first(
        &mut self,
        tier: Tier,
        name: u64,
        parent: Option<NodeId>,
        key: BlockHash,
        root: BlockHash,
    ) -> Option<NodeId> {
        if !self.is_plain() || self.tree.len() >= self.max {
            return None;
        }
        let tree = &self.tree;
        let hash = |id: &NodeId| spread(tree.name(*id));
        let Entry::Vacant(place) = self.names.entry(spread(name), |id| tree.name(*id) == name, hash) else {
            return None;
        };
        let id = self.tree.add(name, key, parent.unwrap_or(NONE), root);
        place.insert(id);
        let mut copies = Copies::default();
        copies.add(tier);
        self.tree.set_copies(id, copies);
        Some(id)
    }

    /// Forgets a block that goes with its only copy, in the engine's own cache, and has none behind it: what
    /// the index is to be told is that it is gone, and no more. `None`, and nothing changed, otherwise.
    pub(super) fn take_last(&mut self, name: u64, left: Option<u32>) -> Option<BlockHash> {
        if !self.is_plain() || self.any_alike || left.is_some_and(|left| left > 0) {
            return None;
        }
        let tree = &self.tree;
        let named = self.names.find_entry(spread(name), |id| tree.name(*id) == name).ok()?;
        let id = *named.get();
        let is_last = tree.copies(id) == Copies { own: 1, elsewhere: 0 } && tree.first_child(id) == NONE;
        let parent = tree.parent(id);
        // One before it without a copy would have to go as well.
        if !is_last || (parent != NONE && tree.copies(parent) == Copies::default()) {
            return None;
        }
        named.remove();
        let key = self.tree.key(id);
        self.tree.remove(id);
        Some(key)
    }

    /// Whether nothing is left to do, and nothing but a block's copies says what the index is told of it.
    fn is_plain(&self) -> bool {
        self.is_settled() && !self.groups.are_several()
    }

    fn count_copy(&mut self, held: &mut Held<'_>, tier: Tier, id: NodeId) {
        let before = self.tree.copies(id);
        let mut copies = before;
        copies.add(tier);
        self.tree.set_copies(id, copies);
        self.moved(held, id, before);
    }

    /// Brings the index up to date with a block whose copies were others `before`.
    fn moved(&mut self, held: &mut Held<'_>, id: NodeId, before: Copies) {
        let copies = self.tree.copies(id);
        for reach in [Reach::Own, Reach::Any] {
            let Some(worker) = held.id(reach) else { continue };
            let way = match (before.is_held(reach), copies.is_held(reach)) {
                (false, true) => Way::Attach,
                (true, false) => Way::Detach,
                _ => continue,
            };
            match (self.tree.first_child(id), way) {
                (NONE, Way::Attach) => {
                    self.attach(held, worker, id);
                }
                (NONE, Way::Detach) => held.index.drop_block(worker, self.key(id)),
                _ => self.agenda.push(Step::Walk(Walk::new(way, reach, id))),
            }
        }
    }

    /// Puts a block into the index; false if that has no room for it, or lacks the one before it.
    pub(super) fn attach(&self, held: &mut Held<'_>, worker: WorkerId, id: NodeId) -> bool {
        let (key, parent) = (self.key(id), self.tree.parent(id));
        let parent = Some(parent).filter(|parent| *parent != NONE).map(|parent| self.key(parent));
        let stored = held.index.store_block(worker, parent, key);
        if stored && self.groups.are_several() {
            held.index.set_checkpoint(worker, key, self.groups.back(id));
        }
        stored
    }

    /// The part of the group that this was stored in, if that counts.
    pub(super) fn part_of(&mut self, event: &BlockStored) -> Option<Part> {
        let (part, changed) = self.groups.part_of(event);
        if changed {
            self.reckon_all();
        }
        part
    }

    /// The part of the group that this was dropped from, if that counts.
    pub(super) fn part_of_removed(&self, group: Option<u32>) -> Option<Part> {
        self.groups.part_of_removed(group)
    }

    /// Tells the index of all blocks anew where one can go on behind them.
    pub(super) fn reckon_all(&mut self) {
        if self.groups.are_several() {
            self.groups.forget_reckoning();
            self.agenda.push(Step::ReckonAll(0));
        }
    }

    /// One more copy of a block is in the group at this place.
    pub(super) fn store_beside(&mut self, beside: usize, name: u64) {
        if self.groups.store(beside, name, self.max) {
            self.reckon_named(name);
        }
    }

    /// One copy less, or as many as are `left`; false if there was none.
    pub(super) fn remove_beside(&mut self, beside: usize, name: u64, left: Option<u32>) -> bool {
        let was_last = self.groups.remove(beside, name, left);
        if was_last == Some(true) {
            self.reckon_named(name);
        }
        was_last.is_some()
    }

    fn reckon_named(&mut self, name: u64) {
        // By its field: the agenda is written meanwhile.
        let (tree, names) = (&self.tree, &self.names);
        for &node in names.iter_hash(spread(name)).filter(|node| tree.name(**node) == name) {
            self.agenda.push(Step::Reckon(Walk::new(Way::Attach, Reach::Own, node)));
        }
    }

    /// One step of a walk over what another group's block has to do with.
    fn reckon(&mut self, held: &mut Held<'_>, walk: Walk) -> Option<Walk> {
        let Some(id) = walk.comes_to() else { return walk.left(&self.node(walk.at())) };
        let node = self.node(id);
        let changed = self.groups.reckon(id, self.tree.name(id), node.parent());
        if changed {
            for worker in [held.id(Reach::Own), held.id(Reach::Any)].into_iter().flatten() {
                held.index.set_checkpoint(worker, node.key, self.groups.back(id));
            }
        }
        Some(walk.entered(&node, changed))
    }

    /// Counts one copy less, or as many as are `left`; false if the block is not known. Where several have
    /// the name, each loses a copy: which one is meant is not said, and too little known is the better
    /// mistake.
    pub(super) fn remove(&mut self, held: &mut Held<'_>, tier: Tier, name: u64, left: Option<u32>) -> bool {
        if !self.any_alike {
            let Some(node) = self.first_named(name) else { return false };
            let known = self.tree.copies(node).are_in(tier);
            self.take_copy(held, node, tier, left);
            return known;
        }
        let first = self.agenda.len();
        let (mut known, mut alike) = (false, 0);
        // By its field: the agenda is written meanwhile.
        let (tree, names) = (&self.tree, &self.names);
        for &node in names.iter_hash(spread(name)).filter(|node| tree.name(**node) == name) {
            known |= tree.copies(node).are_in(tier);
            self.agenda.push(Step::Remove { node, tier, left });
            alike += 1;
        }
        held.left = held.left.saturating_sub(alike);
        self.agenda[first..].reverse();
        known
    }

    /// Whether nothing is left of what the last change asks for.
    pub(super) fn is_settled(&self) -> bool {
        self.agenda.is_empty()
    }

    /// Does what the last change asks for, as far as [`Held::left`] lets it.
    pub(super) fn settle(&mut self, held: &mut Held<'_>) {
        while held.left > 0
            && let Some(step) = self.agenda.pop()
        {
            held.left -= 1;
            match step {
                Step::Walk(walk) => {
                    let next = walk.step(self, held);
                    self.agenda.extend(next.map(Step::Walk));
                }
                Step::Remove { node, tier, left } => self.take_copy(held, node, tier, left),
                Step::Discard(node) => self.discard(node),
                Step::CountTiers(node) => self.count_tiers(node),
                Step::Reckon(walk) => {
                    let next = self.reckon(held, walk);
                    self.agenda.extend(next.map(Step::Reckon));
                }
                Step::ReckonAll(node) => self.reckon_from(node),
            }
        }
    }

    fn take_copy(&mut self, held: &mut Held<'_>, id: NodeId, tier: Tier, left: Option<u32>) {
        // An engine may even name two blocks of one prefix alike; the first may then have gone with the
        // second.
        if !self.tree.is_known(id) {
            return;
        }
        let before = self.tree.copies(id);
        let mut copies = before;
        copies.take(tier, left);
        self.tree.set_copies(id, copies);
        let steps = self.agenda.len();
        self.moved(held, id, before);
        if self.agenda.len() == steps {
            self.discard(id);
        } else {
            // Once those behind it are done.
            self.agenda.insert(steps, Step::Discard(id));
        }
    }

    fn count_tiers(&mut self, id: NodeId) {
        let Some(node) = self.tree.get(id) else { return };
        let is_root = node.parent == NONE && node.copies.is_held(Reach::Own);
        self.agenda.push(Step::CountTiers(id + 1));
        if is_root {
            self.agenda.push(Step::Walk(Walk::new(Way::Attach, Reach::Any, id)));
        }
    }

    fn reckon_from(&mut self, id: NodeId) {
        let Some(node) = self.tree.get(id) else { return };
        let is_root = self.tree.is_known(id) && node.parent == NONE;
        self.agenda.push(Step::ReckonAll(id + 1));
        if is_root {
            self.agenda.push(Step::Reckon(Walk::new(Way::Attach, Reach::Own, id)));
        }
    }

    /// A block of this name: the only one, where no two are alike.
    fn first_named(&self, name: u64) -> Option<NodeId> {
        self.names.find(spread(name), |node| self.tree.name(*node) == name).copied()
    }

    /// All blocks of this name.
    fn named(&self, name: u64) -> impl Iterator<Item = NodeId> {
        let same = move |node: &NodeId| self.tree.name(*node) == name;
        self.names.iter_hash(spread(name)).copied().filter(same)
    }

    /// Makes room for so many more blocks, which may move all of them: before the index is had, not
    /// meanwhile.
    pub(super) fn make_room(&mut self, more: usize) {
        let more = more.min(self.max - self.tree.len());
        self.tree.make_room(more);
        let tree = &self.tree;
        self.names.reserve(more, |id| spread(tree.name(*id)));
    }

    /// The same for blocks of the other groups.
    pub(super) fn make_room_beside(&mut self, more: usize) {
        self.groups.make_room(more);
    }

    fn add(&mut self, name: u64, parent: NodeId, key: BlockHash, root: BlockHash) -> Option<NodeId> {
        if self.tree.len() >= self.max {
            return None;
        }
        let id = self.tree.add(name, key, parent, root);
        let tree = &self.tree;
        self.names.insert_unique(spread(name), id, |id| spread(tree.name(*id)));
        if self.groups.are_several() {
            self.groups.reckon(id, name, Some(parent).filter(|parent| *parent != NONE));
        }
        Some(id)
    }

    /// Forgets a block without copies and without blocks behind it; those before it that were kept for it are
    /// next.
    fn discard(&mut self, id: NodeId) {
        if !self.tree.is_known(id)
            || self.tree.copies(id).is_held(Reach::Any)
            || self.tree.first_child(id) != NONE
        {
            return;
        }
        let parent = self.tree.parent(id);
        if let Ok(entry) = self.names.find_entry(spread(self.tree.name(id)), |other| *other == id) {
            entry.remove();
        }
        self.tree.remove(id);
        if parent != NONE && !self.tree.copies(parent).is_held(Reach::Any) {
            self.agenda.push(Step::Discard(parent));
        }
    }
}

/// Names are hashes or numbers that count, which no client chooses.
fn spread(name: u64) -> u64 {
    Spread::default().hash_one(name)
}
