//! Which layer's keys and values lie where: cache groups of equally many layers over one pool of blocks, as
//! in vLLM's hybrid KV cache manager (`docs/design/hybrid_kv_cache_manager.md`).
//!
//! Block `b` of the pool is block `b` of every slab. A layer at slot `s` of group `g` uses slab `s` through
//! group `g`'s block table, so a block costs the same in whichever group's table it stands. The kind with the
//! fewest layers decides how many slots there are; a kind with more becomes several groups, the last of them
//! perhaps with slots to spare.

use crate::engine::backend::CacheGroup;

/// Where each layer's cache is.
#[derive(Debug)]
pub(super) struct CachePlan {
    /// One block table each; a sliding window comes behind all others.
    pub(super) groups: Vec<CacheGroup>,
    /// Layers per group, which is the number of slabs.
    pub(super) slots: usize,
    /// By layer, the group and the slab of its cache.
    pub(super) places: Vec<Place>,
}

/// Where one layer's cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) group: usize,
    pub(super) slot: usize,
}

impl CachePlan {
    /// For layers that keep what `kept` says, one each.
    pub(super) fn new(kept: impl Iterator<Item = CacheGroup>) -> Self {
        let kept: Vec<CacheGroup> = kept.collect();
        let mut kinds: Vec<CacheGroup> = Vec::new();
        for kind in &kept {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        kinds.sort_by_key(|kind| matches!(kind, CacheGroup::SlidingWindow { .. }));
        let layers_of = |kind: CacheGroup| kept.iter().filter(move |kept| **kept == kind).count();
        let slots = kinds.iter().map(|kind| layers_of(*kind)).min().unwrap_or(1);
        let mut groups = Vec::new();
        let mut places = vec![Place { group: 0, slot: 0 }; kept.len()];
        for kind in kinds {
            let of_kind = places.iter_mut().zip(&kept).filter(|(_, kept)| **kept == kind);
            for (i, (place, _)) in of_kind.enumerate() {
                *place = Place { group: groups.len() + i / slots, slot: i % slots };
            }
            groups.resize(groups.len() + layers_of(kind).div_ceil(slots), kind);
        }
        Self { groups, slots, places }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: CacheGroup = CacheGroup::SlidingWindow { window: 32 };

    fn places(plan: &CachePlan) -> Vec<(usize, usize)> {
        plan.places.iter().map(|place| (place.group, place.slot)).collect()
    }

    #[test]
    fn equal_layers_are_one_group() {
        for kind in [CacheGroup::Full, CacheGroup::MlaLatent, WINDOW] {
            let plan = CachePlan::new([kind; 3].into_iter());
            assert_eq!((plan.groups.as_slice(), plan.slots), ([kind].as_slice(), 3));
            assert_eq!(places(&plan), [(0, 0), (0, 1), (0, 2)]);
        }
    }

    #[test]
    fn the_rarer_kind_decides_how_many_layers_a_group_has() {
        let layers = [WINDOW, CacheGroup::Full, WINDOW, CacheGroup::Full, WINDOW];
        let plan = CachePlan::new(layers.into_iter());
        assert_eq!((plan.groups.as_slice(), plan.slots), ([CacheGroup::Full, WINDOW, WINDOW].as_slice(), 2));
        assert_eq!(places(&plan), [(1, 0), (0, 0), (1, 1), (0, 1), (2, 0)]);
    }

    proptest! {
        #[test]
        fn no_two_layers_share_a_place_and_each_is_in_a_group_of_its_kind(
            layers in prop::collection::vec(prop::sample::select(vec![CacheGroup::Full, WINDOW]), 1..40)
        ) {
            let plan = CachePlan::new(layers.iter().copied());
            let mut taken = std::collections::HashSet::new();
            for (place, kind) in plan.places.iter().zip(&layers) {
                prop_assert_eq!(plan.groups[place.group], *kind);
                prop_assert!(place.slot < plan.slots && taken.insert((place.group, place.slot)));
            }
            prop_assert!(plan.groups.is_sorted_by_key(|kind| *kind == WINDOW));
            let spare = plan.groups.len() * plan.slots - layers.len();
            prop_assert!(spare < 2 * plan.slots, "{spare} slots to spare");
        }
    }
}
