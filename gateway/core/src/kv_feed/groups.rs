//! The KV cache groups of a hybrid model, whose layers do not all keep the same. One group keeps every block
//! of a prefix: it is the tree of [`super::blocks`]. The others keep the last blocks of a window, or a state
//! now and then; what they have is here.
//!
//! An engine goes on with a prefix of `L` blocks if the first group has all of them, each window's group the
//! last blocks before `L` that its window reaches back to, and each recurrent layer's group a state at `L`
//! (vLLM 0.32, `HybridKVCacheCoordinator.find_longest_cache_hit`). Such an `L` is a *checkpoint* here. For
//! each block of the tree it is known how many blocks further up the last checkpoint is, so that a search
//! need not look for it.
//!
//! One block has one name in all groups, as an engine hashes the prefix that ends there.

use keyway_wire::kv_event::BlockStored;

use super::node::NodeId;
use crate::spread_map::SpreadMap;

/// Groups besides the first one: models have up to six.
const BESIDE_MAX: usize = 16;
/// What a group needs that keeps all blocks, too.
const ALL: u16 = u16::MAX;
/// Of a block that was not looked at yet.
const UNKNOWN: u32 = u32::MAX;

/// Which part a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// It keeps whole prefixes: its blocks are the tree.
    Prefix,
    /// It is the one at this place besides it.
    Beside(usize),
}

/// What a group's layers keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    Everything,
    /// So many tokens before the next one.
    Window(u32),
    /// A state, of all tokens before it.
    State,
}

#[derive(Debug)]
struct Group {
    number: u32,
    keeps: Keeps,
    block_size: u32,
    /// Blocks in a row that have to be there before one can go on.
    needs: u16,
}

/// All groups of one worker's model, and what those besides the first one have of each block.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Number of the group that keeps whole prefixes, and the tokens in a block of it.
    prefix: Option<(u32, u32)>,
    beside: Vec<Group>,
    /// Copies of a block that one of them has; see [`mark`].
    marks: SpreadMap<u64, u16>,
    /// For each block of the tree and each of them, the blocks in a row that end there, as far as they count.
    runs: Vec<u16>,
    /// For each block of the tree, how many blocks further up the last checkpoint is.
    back: Vec<u32>,
}

impl Groups {
    /// Forgets all of them: the next events say what there is.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether there are others than the one that keeps whole prefixes.
    pub(super) fn are_several(&self) -> bool {
        !self.beside.is_empty()
    }

    /// The part of a group that has stored something; `None` if it is of a kind that says nothing of
    /// prefixes. The second is whether all of the tree has to be looked at again.
    pub(super) fn part_of(&mut self, event: &BlockStored) -> (Option<Part>, bool) {
        let number = event.group_idx.unwrap_or(0);
        let known = self.find(number);
        if let Some(Part::Beside(_)) = known {
            return (known, false);
        }
        let Some(keeps) = keeps(event) else { return (None, false) };
        if keeps == Keeps::Everything && self.prefix.is_none_or(|(prefix, _)| prefix == number) {
            let is_new = self.prefix.replace((number, event.block_size)) != Some((number, event.block_size));
            return (Some(Part::Prefix), is_new && self.measure());
        }
        if self.beside.len() == BESIDE_MAX {
            return (None, false);
        }
        self.beside.push(Group { number, keeps, block_size: event.block_size, needs: 0 });
        self.measure();
        (Some(Part::Beside(self.beside.len() - 1)), true)
    }

    /// The part of a group that has dropped something.
    pub(super) fn part_of_removed(&self, number: Option<u32>) -> Option<Part> {
        let number = number.unwrap_or(0);
        self.find(number).or((self.prefix.is_none() && number == 0).then_some(Part::Prefix))
    }

    fn find(&self, number: u32) -> Option<Part> {
        let beside = self.beside.iter().position(|group| group.number == number);
        let is_prefix = self.prefix.is_some_and(|(prefix, _)| prefix == number);
        beside.map(Part::Beside).or(is_prefix.then_some(Part::Prefix))
    }

    /// What each of them needs, in blocks of the tree; whether that is something else than before.
    fn measure(&mut self) -> bool {
        let block_size = self.prefix.map(|(_, block_size)| block_size);
        let mut changed = false;
        for group in &mut self.beside {
            let needs = match group.keeps {
                Keeps::Everything => ALL,
                Keeps::State => 1,
                Keeps::Window(tokens) => {
                    let needs = tokens.saturating_sub(1).div_ceil(group.block_size.max(1));
                    let needs = needs.min(u32::from(ALL) - 1) as u16;
                    // In blocks of another size there is no telling which are in between: the last one has to
                    // do.
                    if block_size.is_none_or(|size| size == group.block_size) { needs } else { needs.min(1) }
                }
            };
            changed |= std::mem::replace(&mut group.needs, needs) != needs;
        }
        changed
    }

    /// From now on nothing is known of any block of the tree.
    pub(super) fn forget_reckoning(&mut self) {
        self.runs.clear();
        self.back.clear();
    }

    /// Makes room for so many more blocks.
    pub(super) fn make_room(&mut self, more: usize) {
        self.marks.reserve(more);
    }

    /// Counts one more copy of a block in one of them; whether it is the first. `max` bounds how many blocks
    /// are known.
    pub(super) fn store(&mut self, beside: usize, name: u64, max: usize) -> bool {
        let known = self.marks.len();
        let copies = match self.marks.entry(mark(beside, name)) {
            std::collections::hash_map::Entry::Vacant(_) if known >= max => return false,
            entry => entry.or_insert(0),
        };
        *copies = copies.saturating_add(1);
        *copies == 1
    }

    /// Counts one copy less, or as many as are `left`; whether it was the last, or `None` if there was none.
    pub(super) fn remove(&mut self, beside: usize, name: u64, left: Option<u32>) -> Option<bool> {
        let key = mark(beside, name);
        let copies = self.marks.get_mut(&key)?;
        *copies = left.map_or(*copies - 1, |left| left.min(u16::MAX.into()) as u16);
        let was_last = *copies == 0;
        if was_last {
            self.marks.remove(&key);
        }
        Some(was_last)
    }

    /// Reckons anew what is known of a block of the tree, from the one before it and what the groups have;
    /// whether anything changed, and with it what is known of those behind it.
    pub(super) fn reckon(&mut self, node: NodeId, name: u64, parent: Option<NodeId>) -> bool {
        let (at, groups) = (node as usize, self.beside.len());
        if self.back.len() <= at {
            self.back.resize(at + 1, UNKNOWN);
            self.runs.resize((at + 1) * groups, 0);
        }
        let (mut changed, mut is_checkpoint) = (false, true);
        for (i, group) in self.beside.iter().enumerate() {
            // Before the first block there is nothing to need.
            let before = parent.map_or(group.needs, |parent| self.runs[parent as usize * groups + i]);
            let run = match (self.marks.contains_key(&mark(i, name)), before == group.needs) {
                (false, _) => 0,
                (true, true) => group.needs,
                (true, false) if group.needs == ALL => 0,
                (true, false) => before + 1,
            };
            is_checkpoint &= run == group.needs;
            changed |= std::mem::replace(&mut self.runs[at * groups + i], run) != run;
        }
        let further = || parent.map_or(0, |parent| self.back[parent as usize]).saturating_add(1);
        let back = if is_checkpoint { 0 } else { further() };
        changed | (std::mem::replace(&mut self.back[at], back) != back)
    }

    /// How many blocks further up the last checkpoint is; as many as there are if there is none.
    pub(super) fn back(&self, node: NodeId) -> u32 {
        self.back.get(node as usize).copied().unwrap_or(UNKNOWN)
    }
}

/// What a group's layers keep, by its kind (`KVCacheSpecKind` of vLLM 0.32). An engine that names none has
/// one that counts, the first.
fn keeps(event: &BlockStored) -> Option<Keeps> {
    match event.kv_cache_spec_kind.as_deref() {
        Some("full_attention" | "mla_attention" | "sink_full_attention") => Some(Keeps::Everything),
        Some("sliding_window" | "sliding_window_mla") => {
            event.kv_cache_spec_sliding_window.map(Keeps::Window)
        }
        Some("mamba") => Some(Keeps::State),
        None if event.group_idx.unwrap_or(0) == 0 => Some(Keeps::Everything),
        _ => None,
    }
}

/// The key of a block in one of the groups: names are hashes of 64 bits, and so are these.
fn mark(beside: usize, name: u64) -> u64 {
    name ^ (beside as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(group: u32, kind: Option<&str>, window: Option<u32>, block_size: u32) -> BlockStored {
        BlockStored {
            group_idx: Some(group),
            kv_cache_spec_kind: kind.map(str::to_owned),
            kv_cache_spec_sliding_window: window,
            block_size,
            ..BlockStored::default()
        }
    }

    #[test]
    fn the_prefixes_are_those_of_the_group_whose_kind_keeps_all() {
        let mut groups = Groups::default();
        let mut part = |event: BlockStored| groups.part_of(&event).0;
        assert_eq!(part(event(0, Some("sliding_window"), Some(128), 16)), Some(Part::Beside(0)));
        assert_eq!(part(event(1, Some("encoder_only_attention"), None, 16)), None);
        assert_eq!(part(event(2, None, None, 16)), None, "it does not say what it is");
        assert_eq!(part(event(3, Some("mla_attention"), None, 16)), Some(Part::Prefix));
        assert_eq!(part(event(4, Some("full_attention"), None, 16)), Some(Part::Beside(1)));
        assert_eq!(part(event(0, Some("sliding_window"), Some(128), 16)), Some(Part::Beside(0)));
        let parts = (0..5).map(|number| groups.part_of_removed(Some(number)));
        let beside = |place| Some(Part::Beside(place));
        assert_eq!(parts.collect::<Vec<_>>(), [beside(0), None, None, Some(Part::Prefix), beside(1)]);
        assert_eq!(groups.beside.iter().map(|group| group.needs).collect::<Vec<_>>(), [8, ALL]);
    }

    #[test]
    fn without_kinds_it_is_the_first_group() {
        let mut groups = Groups::default();
        assert_eq!(groups.part_of_removed(None), Some(Part::Prefix));
        assert_eq!(groups.part_of(&event(1, None, None, 16)).0, None);
        assert_eq!(groups.part_of(&event(0, None, None, 16)), (Some(Part::Prefix), false));
        assert_eq!(groups.part_of_removed(Some(1)), None);
    }

    #[test]
    fn a_window_needs_as_many_blocks_as_it_reaches_into() {
        let needs = |window, block_size, of_prefix| {
            let mut groups = Groups::default();
            groups.part_of(&event(0, Some("sliding_window"), Some(window), block_size));
            groups.part_of(&event(1, Some("full_attention"), None, of_prefix));
            groups.beside[0].needs
        };
        assert_eq!([1, 2, 33, 34, 128].map(|window| needs(window, 32, 32)), [0, 1, 1, 2, 4]);
        assert_eq!(needs(1 << 30, 1, 1), ALL - 1);
        assert_eq!((needs(128, 16, 32), needs(128, 64, 32)), (1, 1));
    }

    #[test]
    fn a_block_is_gone_with_its_last_copy_in_its_own_group_alone() {
        let mut groups = Groups::default();
        assert!(groups.store(0, 7, 9) && !groups.store(0, 7, 9) && groups.store(1, 7, 9));
        assert_eq!(groups.remove(0, 7, None), Some(false));
        assert_eq!(groups.remove(0, 7, None), Some(true));
        assert_eq!((groups.remove(0, 7, None), groups.remove(2, 7, None)), (None, None));
        assert_eq!(groups.remove(1, 7, Some(0)), Some(true));
        assert!((0..9).all(|name| groups.store(0, name, 9)) && !groups.store(0, 9, 9));
        assert!(!groups.store(0, 8, 9), "known already");
    }
}
