//! Who holds a given block: the table's entry leads to the first slot of a list in the order of worker places,
//! and that first slot knows how long the list is. Recency is not its business.

use keyway_wire::block_hash::BlockHash;

use super::slab::{NIL, Slab};
use super::table::Table;

/// The slots that hold `hash`, in the order of worker places.
pub(super) fn iter<'a>(table: &Table, slab: &'a Slab, hash: BlockHash) -> impl Iterator<Item = u32> + 'a {
    let first = table.get(hash, |slot| slab[slot].hash);
    std::iter::successors(first, |&slot| Some(slab[slot].holder).filter(|&next| next != NIL))
}

/// How many workers hold `hash`.
pub(super) fn count(table: &Table, slab: &Slab, hash: BlockHash) -> usize {
    table.get(hash, |slot| slab[slot].hash).map_or(0, |first| usize::from(slab[first].holders))
}

/// The slot that says the worker at `place` holds `hash`.
pub(super) fn find(table: &Table, slab: &Slab, hash: BlockHash, place: u16) -> Option<u32> {
    iter(table, slab, hash)
        .find(|&slot| slab[slot].worker >= place)
        .filter(|&slot| slab[slot].worker == place)
}

/// Enters `slot` among the holders of its hash. Its worker must not be among them.
pub(super) fn attach(table: &mut Table, slab: &mut Slab, slot: u32) {
    let (hash, place) = (slab[slot].hash, slab[slot].worker);
    let Some(first) = table.get(hash, |slot| slab[slot].hash) else {
        slab[slot].holders = 1;
        table.set(hash, slot, |slot| slab[slot].hash);
        return;
    };
    let holders = slab[first].holders + 1;
    if place < slab[first].worker {
        slab[slot].holder = first;
        slab[slot].holders = holders;
        table.set(hash, slot, |slot| slab[slot].hash);
        return;
    }
    slab[first].holders = holders;
    let mut before = first;
    while slab[before].holder != NIL && slab[slab[before].holder].worker < place {
        before = slab[before].holder;
    }
    slab[slot].holder = slab[before].holder;
    slab[before].holder = slot;
}

/// Takes `slot` from among the holders of its hash.
pub(super) fn detach(table: &mut Table, slab: &mut Slab, slot: u32) {
    let hash = slab[slot].hash;
    let Some(first) = table.get(hash, |slot| slab[slot].hash) else { return };
    let holders = slab[first].holders - 1;
    if first != slot {
        let mut before = first;
        while slab[before].holder != slot {
            before = slab[before].holder;
        }
        slab[before].holder = slab[slot].holder;
        slab[first].holders = holders;
    } else if holders == 0 {
        table.remove(hash, |slot| slab[slot].hash);
    } else {
        let next = slab[slot].holder;
        slab[next].holders = holders;
        table.set(hash, next, |slot| slab[slot].hash);
    }
}
