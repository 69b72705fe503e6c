//! The tree of prefixes that one worker has announced, as small as can be: a fleet's caches hold tens of
//! millions of blocks. An engine stores a prompt's blocks one after the other, so mostly a block stands right
//! behind the one before it, which has no other behind it: a bit says so. Only what differs, as where prompts
//! part, has links of its own.

use keyway_wire::block_hash::BlockHash;

use super::node::{Copies, NONE, Node, NodeId};
use crate::spread_map::SpreadMap;

/// Links that one more block takes at most: its own, its parent's, and those of another one behind that.
const LINKS_EACH: usize = 3;

/// Blocks at most: what a place of the first block of a prompt has bits for.
pub(super) const BLOCKS_MAX: usize = DISCARDED as usize;

/// One block as the tree keeps it. Not aligned to its numbers of 64 bits, which would take four bytes more.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed(4))]
struct Entry {
    /// What the engine calls it.
    name: u64,
    key: BlockHash,
    /// From the lower bits: where the prompt's first block is ([`FIRST_BITS`]), how many copies there are
    /// ([`CODES`]), and whether it [`FOLLOWS`] and is [`LINKED`]. The first block stays while one behind it
    /// does: it knows the empty prefix that they descend from.
    rest: u32,
}

const FIRST_BITS: u32 = 27;
/// Stands for the first block in one that was discarded.
const DISCARDED: NodeId = (1 << FIRST_BITS) - 1;
/// A block stands right behind its parent, which has no other child.
const FOLLOWS: u32 = 1 << 30;
/// A block has links: it does not follow, or what is behind it does not.
const LINKED: u32 = 1 << 31;

/// Copies that a block has mostly, by their code of three bits.
const CODES: [Copies; 6] = {
    let mut codes = [Copies { own: 0, elsewhere: 0 }; 6];
    let mut code = 0;
    while code < codes.len() {
        codes[code] = Copies { own: code as u16 % 3, elsewhere: code as u8 / 3 };
        code += 1;
    }
    codes
};
/// The code of others, which are beside the entries.
const OTHERS: u32 = 7;

impl Entry {
    fn has(&self, bit: u32) -> bool {
        self.rest & bit != 0
    }

    fn first(&self) -> NodeId {
        self.rest & DISCARDED
    }

    fn code(&self) -> u32 {
        self.rest >> FIRST_BITS & 7
    }

    fn set_code(&mut self, code: u32) {
        self.rest = self.rest & !(7 << FIRST_BITS) | code << FIRST_BITS;
    }
}

const _: () = assert!(size_of::<Entry>() == 20, "a block costs more than docs/figures.md says");

/// What is before and behind a block.
#[derive(Debug, Clone, Copy)]
struct Links {
    /// Meaningless where the block follows.
    parent: NodeId,
    /// [`NONE`] where the one behind it follows.
    first_child: NodeId,
    /// The one before and the one after it among those behind `parent`; of a first block, which has none, its
    /// empty prefix.
    siblings: [NodeId; 2],
}

const NO_LINKS: Links = Links { parent: NONE, first_child: NONE, siblings: [NONE, NONE] };

#[derive(Debug, Default)]
pub(super) struct Tree {
    entries: Vec<Entry>,
    free: Vec<NodeId>,
    links: SpreadMap<NodeId, Links>,
    /// Copies of blocks that have more than there are [`CODES`] for.
    copies: SpreadMap<NodeId, Copies>,
}

impl Tree {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.free.clear();
        self.links.clear();
        self.copies.clear();
    }

    /// Blocks that are known.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Makes room for so many more.
    pub(super) fn make_room(&mut self, more: usize) {
        self.entries.reserve(more.saturating_sub(self.free.len()));
        self.links.reserve(LINKS_EACH * more);
        self.copies.reserve(more);
    }

    /// The block at this place, discarded or not; `None` behind the last one.
    pub(super) fn get(&self, id: NodeId) -> Option<Node> {
        let entry = self.entries.get(id as usize)?;
        let links = self.links_of(id);
        let parent = if entry.has(FOLLOWS) { id - 1 } else { links.parent };
        let next_sibling = if entry.has(FOLLOWS) || parent == NONE { NONE } else { links.siblings[1] };
        let (copies, first_child) = (self.copies(id), self.first_child(id));
        Some(Node { key: entry.key, copies, parent, first_child, next_sibling })
    }

    /// One that is there.
    pub(super) fn node(&self, id: NodeId) -> Node {
        self.get(id).unwrap_or_else(|| unreachable!("no block is at {id}"))
    }

    /// Not one that was discarded.
    pub(super) fn is_known(&self, id: NodeId) -> bool {
        self.entries.get(id as usize).is_some_and(|entry| entry.first() != DISCARDED)
    }

    pub(super) fn name(&self, id: NodeId) -> u64 {
        self.entries[id as usize].name
    }

    pub(super) fn key(&self, id: NodeId) -> BlockHash {
        self.entries[id as usize].key
    }

    pub(super) fn copies(&self, id: NodeId) -> Copies {
        let code = self.entries[id as usize].code();
        CODES.get(code as usize).or_else(|| self.copies.get(&id)).copied().unwrap_or_default()
    }

    pub(super) fn set_copies(&mut self, id: NodeId, copies: Copies) {
        let entry = &mut self.entries[id as usize];
        let code = if copies.own < 3 && copies.elsewhere < 2 {
            u32::from(copies.own) + 3 * u32::from(copies.elsewhere)
        } else {
            OTHERS
        };
        if code == OTHERS {
            self.copies.insert(id, copies);
        } else if entry.code() == OTHERS {
            self.copies.remove(&id);
        }
        entry.set_code(code);
    }

    /// The empty prefix that it descends from.
    pub(super) fn root(&self, id: NodeId) -> BlockHash {
        let [low, high] = self.links_of(self.entries[id as usize].first()).siblings;
        BlockHash(u64::from(high) << 32 | u64::from(low))
    }

    /// The first of those behind it; [`NONE`] if there are none.
    pub(super) fn first_child(&self, id: NodeId) -> NodeId {
        let next = id + 1;
        let follows = self.entries.get(next as usize).is_some_and(|entry| entry.has(FOLLOWS));
        if follows { next } else { self.links_of(id).first_child }
    }

    /// The block before it.
    pub(super) fn parent(&self, id: NodeId) -> NodeId {
        if self.entries[id as usize].has(FOLLOWS) { id - 1 } else { self.links_of(id).parent }
    }

    /// One more block, without a copy, behind `parent` or, if that is [`NONE`], the empty prefix `root`.
    pub(super) fn add(&mut self, name: u64, key: BlockHash, parent: NodeId, root: BlockHash) -> NodeId {
        let id = self.free.pop().unwrap_or(self.entries.len() as NodeId);
        let child = if parent == NONE { NONE } else { self.first_child(parent) };
        let follows = parent != NONE && child == NONE && id == parent + 1;
        let first = if parent == NONE { id } else { self.entries[parent as usize].first() };
        let bits = if follows { FOLLOWS } else { 0 };
        let entry = Entry { name, key, rest: first | bits };
        match self.entries.get_mut(id as usize) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        if parent == NONE {
            self.links_mut(id).siblings = [root.0 as NodeId, (root.0 >> 32) as NodeId];
        } else if !follows {
            if child != NONE {
                self.unfollow(child);
                self.links_mut(child).siblings[0] = id;
            }
            self.links_mut(parent).first_child = id;
            *self.links_mut(id) = Links { parent, first_child: NONE, siblings: [NONE, child] };
        }
        id
    }

    /// Forgets a block that has none behind it.
    pub(super) fn remove(&mut self, id: NodeId) {
        let entry = self.entries[id as usize];
        let Links { parent, siblings: [previous, next], .. } = self.links_of(id);
        if !entry.has(FOLLOWS) && parent != NONE {
            if next != NONE {
                self.links_mut(next).siblings[0] = previous;
            }
            match previous {
                NONE => self.links_mut(parent).first_child = next,
                previous => self.links_mut(previous).siblings[1] = next,
            }
            self.follow_again(parent);
        }
        if entry.has(LINKED) {
            self.links.remove(&id);
        }
        self.set_copies(id, Copies::default());
        self.entries[id as usize].rest = DISCARDED;
        self.free.push(id);
    }

    /// A block that followed its parent has links of its own from now on; the caller says the parent so.
    fn unfollow(&mut self, id: NodeId) {
        if self.entries[id as usize].has(FOLLOWS) {
            self.entries[id as usize].rest &= !FOLLOWS;
            let links = self.links_mut(id);
            (links.parent, links.siblings) = (id - 1, [NONE, NONE]);
        }
    }

    /// Gives up the links behind `parent` where a bit does as well.
    fn follow_again(&mut self, parent: NodeId) {
        let child = self.links_of(parent).first_child;
        if child == parent + 1 && self.links_of(child).siblings == [NONE, NONE] {
            self.entries[child as usize].rest |= FOLLOWS;
            self.links_mut(parent).first_child = NONE;
            self.give_up_links(child);
        }
        self.give_up_links(parent);
    }

    /// Forgets links that say nothing.
    fn give_up_links(&mut self, id: NodeId) {
        if self.entries[id as usize].has(FOLLOWS) && self.links_of(id).first_child == NONE {
            self.links.remove(&id);
            self.entries[id as usize].rest &= !LINKED;
        }
    }

    fn links_of(&self, id: NodeId) -> Links {
        let is_linked = self.entries.get(id as usize).is_some_and(|entry| entry.has(LINKED));
        if is_linked { self.links.get(&id).copied().unwrap_or(NO_LINKS) } else { NO_LINKS }
    }

    fn links_mut(&mut self, id: NodeId) -> &mut Links {
        self.entries[id as usize].rest |= LINKED;
        self.links.entry(id).or_insert(NO_LINKS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A block of the model: what is before it, and its empty prefix.
    type Model = std::collections::BTreeMap<NodeId, (NodeId, BlockHash)>;

    fn children(tree: &Tree, of: NodeId) -> Vec<NodeId> {
        let first = Some(tree.first_child(of)).filter(|child| *child != NONE);
        let mut children: Vec<_> =
            std::iter::successors(first, |child| tree.node(*child).next_sibling()).collect();
        children.sort_unstable();
        children
    }

    fn check(tree: &Tree, model: &Model) -> Result<(), TestCaseError> {
        prop_assert_eq!(tree.len(), model.len());
        for (&id, &(parent, root)) in model {
            prop_assert_eq!((tree.parent(id), tree.node(id).parent, tree.root(id)), (parent, parent, root));
            prop_assert!(tree.is_known(id));
            let expected: Vec<_> =
                model.iter().filter(|(_, (parent, _))| *parent == id).map(|(id, _)| *id).collect();
            prop_assert_eq!(children(tree, id), expected);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn equals_a_map_of_parents(ops in prop::collection::vec((any::<bool>(), 0_usize..40), 0..300)) {
            let (mut tree, mut model) = (Tree::default(), Model::new());
            let mut last = NONE;
            for (number, (adds, at)) in ops.into_iter().enumerate() {
                let some = model.keys().copied().nth(at);
                if adds {
                    // Mostly behind the one that came last, as engines do; now and then in front of all.
                    let parent = match at {
                        0 => NONE,
                        1..20 if model.contains_key(&last) => last,
                        _ => some.unwrap_or(NONE),
                    };
                    let root = model.get(&parent).map_or(BlockHash(number as u64 * 0x1_0000_0001), |(_, root)| *root);
                    last = tree.add(number as u64, BlockHash(number as u64 + 7), parent, root);
                    prop_assert_eq!((tree.name(last), tree.key(last).0), (number as u64, number as u64 + 7));
                    prop_assert!(model.insert(last, (parent, root)).is_none());
                } else if let Some(id) = some.filter(|id| tree.first_child(*id) == NONE) {
                    tree.remove(id);
                    model.remove(&id);
                    prop_assert!(!tree.is_known(id));
                }
                check(&tree, &model)?;
            }
            while let Some(id) = model.keys().copied().find(|id| tree.first_child(*id) == NONE) {
                tree.remove(id);
                model.remove(&id);
                check(&tree, &model)?;
            }
            prop_assert!(tree.links.is_empty(), "links of nothing are left");
        }
    }

    proptest! {
        #[test]
        fn copies_are_those_that_were_set(
            sets in prop::collection::vec((0_usize..4, prop_oneof![0_u16..5, any::<u16>()], 0_u8..4, any::<bool>()), 1..60),
        ) {
            let mut tree = Tree::default();
            let mut model = [(); 4].map(|()| Copies::default());
            let ids: Vec<_> = (0..4).map(|name| tree.add(name, BlockHash(name), NONE, BlockHash(9))).collect();
            for (i, own, elsewhere, removes) in sets {
                model[i] = if removes { Copies::default() } else { Copies { own, elsewhere } };
                if removes {
                    tree.remove(ids[i]);
                    prop_assert_eq!(tree.add(7, BlockHash(7), NONE, BlockHash(9)), ids[i]);
                } else {
                    tree.set_copies(ids[i], model[i]);
                }
                let copies: Vec<_> = ids.iter().map(|id| tree.copies(*id)).collect();
                prop_assert_eq!(&copies[..], &model[..]);
                prop_assert!(ids.iter().all(|id| tree.is_known(*id) && tree.root(*id) == BlockHash(9)));
            }
            for id in ids {
                tree.remove(id);
            }
            prop_assert!(tree.copies.is_empty(), "copies of nothing are left");
        }
    }

    #[test]
    fn a_prompt_takes_one_link_and_a_fork_three_more() {
        let mut tree = Tree::default();
        let mut last = NONE;
        for name in 0..100 {
            last = tree.add(name, BlockHash(name), last, BlockHash(9));
        }
        assert_eq!(tree.links.len(), 1);
        let fork = tree.add(100, BlockHash(100), 49, BlockHash(9));
        assert_eq!((tree.links.len(), children(&tree, 49)), (4, vec![50, fork]));
        tree.remove(fork);
        assert_eq!((tree.links.len(), children(&tree, 49)), (1, vec![50]));
    }
}
