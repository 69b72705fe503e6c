//! Who holds which block: runs of names, residencies, and the way to them. The table has each name, and knows
//! no links. A run knows the first of its holders and how many there are. The next few lie together under the
//! run's number, where a search finds them in one line or two. What more there are lie apart, under the
//! number and a group of workers' places: so no part of the table fills up with a run that all workers hold.
//! Recency is the index's business.

mod enter;

use std::cell::RefCell;

use keyway_wire::block_hash::BlockHash;
use smallvec::{SmallVec, smallvec};

use super::cells::{BLOCK_BYTES, CELL_BYTES, Cells, NIL};
use super::crowds::{CROWD_MIN, Crowds, PlaceSet};
use super::runs::{RUN_MAX, Spot};
use super::table::Table;

/// A run's holders beyond so many lie apart.
pub(super) const TOGETHER: usize = 8;
/// Places of workers that make a group.
const GROUP: u16 = 16;
/// Groups whose holders are listed together: as many lines as a core has misses of its cache under way at
/// once.
const GATHERED_GROUPS: usize = 8;

/// Says of a number in the table that it is a residency's; else it is a name's place.
const RESIDENCY: u32 = 1 << 31;
/// Places of names in a block.
const SPOT_BITS: u32 = RUN_MAX.ilog2();
/// Blocks at most, so that their names' places and their cells have numbers.
const BLOCKS_MAX: usize = (RESIDENCY >> SPOT_BITS) as usize - 1;

/// Residencies, at most as many as there is room for.
pub(super) struct Holders {
    table: Table,
    pub(super) cells: Cells,
    /// What the table has room for still.
    left: usize,
    /// What it has room for.
    max: usize,
    crowds: RefCell<Crowds>,
    /// One more than the last place that ever held anything.
    places: u16,
}

/// Residencies, without an allocation where they are few.
pub(super) type Listed = SmallVec<[u32; 16]>;

impl Holders {
    /// As many as fit into so many bytes: enough of the table for runs that are full, and held by one.
    pub(super) fn new(byte_budget: usize) -> Self {
        // Block 0 comes on top of what the others take.
        let each = BLOCK_BYTES + CELL_BYTES;
        let slots = Table::slots_in(byte_budget.saturating_sub(BLOCK_BYTES), each.div_ceil(RUN_MAX));
        let table = Table::new(slots);
        let rest = byte_budget.saturating_sub(table.bytes() + BLOCK_BYTES);
        let cells = Cells::new((rest / BLOCK_BYTES).min(BLOCKS_MAX));
        Self { table, cells, left: slots, max: slots, crowds: RefCell::new(Crowds::new()), places: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.cells.bytes()
    }

    /// Names that fit if all runs are full and one worker holds each.
    pub(super) fn capacity(&self) -> usize {
        self.max
    }

    /// Names and further holders that the table has.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.max - self.left
    }

    /// Whether one more name fits, at a worker that holds none behind which it could stand, where runs that
    /// so many hold, one run or two, may be parted.
    pub(super) fn has_room(&self, parted: usize) -> bool {
        let (runs, residencies) = (1 + 2 * usize::from(parted > 0), 1 + parted);
        self.left > residencies && self.cells.has_room(runs, residencies)
    }

    /// Whether one more name fits into a run that is there.
    pub(super) fn has_room_in_runs(&self) -> bool {
        self.left > 1
    }

    /// Where this name is.
    #[inline]
    pub(super) fn spot(&self, name: BlockHash) -> Option<Spot> {
        self.table.tagged(name.0, name.0).find_map(|number| self.is_spot(number, name))
    }

    /// [`Holders::spot`] of several. They are looked at side by side: one alone waits for memory twice.
    #[inline]
    pub(super) fn spots<const N: usize>(&self, names: [BlockHash; N]) -> [Option<Spot>; N] {
        let likely = names.map(|name| self.table.likely(name.0, name.0));
        std::array::from_fn(|i| self.is_spot(likely[i], names[i]).or_else(|| self.spot(names[i])))
    }

    #[inline]
    fn is_spot(&self, number: u32, name: BlockHash) -> Option<Spot> {
        let spot = Spot { run: number >> SPOT_BITS, at: number as usize % RUN_MAX };
        let is_there = number & RESIDENCY == 0 && number != NIL;
        (is_there && self.cells.name(spot) == name).then_some(spot)
    }

    /// How many workers hold this name.
    #[inline]
    pub(super) fn count(&self, spot: Spot) -> usize {
        if self.cells.short(spot.run) == 0 {
            return self.cells.holders(spot.run);
        }
        self.list(spot).len()
    }

    /// The residencies of those that hold this name, in no particular order.
    pub(super) fn list(&self, spot: Spot) -> Listed {
        let mut listed = self.of_run(spot.run);
        if self.cells.short(spot.run) > 0 {
            listed.retain(|held| usize::from(self.cells.get(*held).len) > spot.at);
        }
        listed
    }

    /// The residencies of those that hold some of a run.
    pub(super) fn of_run(&self, run: u32) -> Listed {
        let count = self.cells.holders(run);
        let first = self.cells.first(run);
        let mut listed: Listed = smallvec![first];
        if count == 1 {
            return listed;
        }
        // One by one: not much else lies in their line before the last of them.
        listed.extend(self.near(run).take(count - 1));
        let groups = 0..self.places.div_ceil(GROUP);
        for from in groups.clone().step_by(GATHERED_GROUPS) {
            if listed.len() >= count {
                break;
            }
            let some = groups.clone().skip(from.into()).take(GATHERED_GROUPS);
            self.table.fetch(some.clone().map(|group| of_group(run, group)));
            let held = some.flat_map(|group| {
                let tags = (0..GROUP).map(move |nth| of_place(run, group * GROUP + nth));
                self.table.tagged_any(of_group(run, group), tags).map(move |number| (number, group))
            });
            let held = held.filter_map(|(number, group)| Some((residency(number)?, group)));
            // All are asked of memory before the first is looked at.
            let mut touched = 0;
            let held = held.inspect(|(held, _)| touched ^= self.cells.run_of(*held));
            let held: SmallVec<[(u32, u16); 32]> = held.collect();
            std::hint::black_box(touched);
            // What lies in the lines of two groups is one's alone.
            listed.extend(held.into_iter().filter_map(|(at, group)| {
                let held = self.cells.get(at);
                (held.run == run && held.is_apart && held.worker / GROUP == group).then_some(at)
            }));
        }
        listed
    }

    /// What `look` says of the places of those that hold this name; `None` where they are few, or some hold
    /// only names before it.
    pub(super) fn with_crowd<T>(&self, spot: Spot, look: impl FnOnce(&PlaceSet) -> T) -> Option<T> {
        if self.cells.short(spot.run) > 0 || self.cells.holders(spot.run) < CROWD_MIN {
            return None;
        }
        let mut crowds = self.crowds.borrow_mut();
        if crowds.of(spot.run).is_none() {
            let mut places = PlaceSet::new(usize::from(self.places));
            self.of_run(spot.run).into_iter().for_each(|held| places.add(self.cells.worker_of(held)));
            crowds.keep(spot.run, places);
        }
        crowds.of(spot.run).map(look)
    }

    /// The residency of the worker at `place` that has this name, and where the name is.
    #[inline]
    pub(super) fn find(&self, name: BlockHash, place: u16) -> Option<(u32, Spot)> {
        let spot = self.spot(name)?;
        let held = self.at(spot.run, place)?;
        (usize::from(self.cells.get(held).len) > spot.at).then_some((held, spot))
    }

    /// The residency of the worker at `place` that has some of a run.
    #[inline]
    pub(super) fn at(&self, run: u32, place: u16) -> Option<u32> {
        let first = self.cells.first(run);
        if self.cells.worker_of(first) == place {
            return Some(first);
        }
        if self.cells.holders(run) == 1 {
            return None;
        }
        self.together(run, place).or_else(|| self.apart(run, place))
    }

    /// Brings what leads to these names into the processor's cache.
    pub(super) fn fetch(&self, names: &[BlockHash]) {
        self.table.fetch(names.iter().map(|name| name.0));
    }

    /// As [`Holders::fetch`], with the runs themselves where their entries are at home.
    pub(super) fn approach(&self, names: impl Iterator<Item = BlockHash>) {
        let holders = |name: BlockHash| {
            let number = self.table.likely(name.0, name.0);
            if number & RESIDENCY == 0 { self.cells.holders(number >> SPOT_BITS) } else { 0 }
        };
        // Of an index that has nothing there is no block yet.
        let any = self.cells.has_block(NIL);
        std::hint::black_box(names.filter(|_| any).fold(0, |all, name| all ^ holders(name)));
    }

    /// The holder at this place, if it is one that lies together with the first.
    fn together(&self, run: u32, place: u16) -> Option<u32> {
        let held = self.table.tagged(of_run(run), of_place(run, place));
        held.filter_map(residency).find(|held| self.is_at(*held, run, place))
    }

    /// The same, if it lies apart.
    fn apart(&self, run: u32, place: u16) -> Option<u32> {
        let held = self.table.tagged(of_group(run, place / GROUP), of_place(run, place));
        held.filter_map(residency).find(|held| self.is_at(*held, run, place))
    }

    fn is_at(&self, held: u32, run: u32, place: u16) -> bool {
        self.cells.run_of(held) == run && self.cells.worker_of(held) == place
    }

    /// The holders that lie together, but for the first.
    fn near(&self, run: u32) -> impl Iterator<Item = u32> {
        self.table.all(of_run(run)).filter_map(residency).filter(move |at| {
            let held = self.cells.get(*at);
            held.run == run && !held.is_apart
        })
    }

    /// All holders but the first: those that lie together, then those that lie apart.
    fn others(&self, run: u32) -> impl Iterator<Item = u32> {
        // From the first's place on: when workers leave one after the other, the next one is near.
        let start = self.cells.worker_of(self.cells.first(run));
        let apart = (start..self.places).chain(0..start).filter_map(move |place| self.apart(run, place));
        self.near(run).chain(apart.filter(|held| self.cells.get(*held).is_apart))
    }
}

/// The residency that a number of the table says, if it is one's.
fn residency(number: u32) -> Option<u32> {
    (number & RESIDENCY != 0).then_some(number & !RESIDENCY)
}

/// The table's key of a run's holders that lie together: runs' numbers follow each other, its keys are to be
/// spread like names.
fn of_run(run: u32) -> u64 {
    (u64::from(run) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(29)
}

/// Its key of those that lie apart: of one run, and one group of places.
fn of_group(run: u32, group: u16) -> u64 {
    // An odd factor: groups differ in the low bits, where a key belongs is said by all.
    of_run(run).rotate_left(32) ^ (u64::from(group) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// What the tag of a holder is made of that is not the first.
fn of_place(run: u32, place: u16) -> u64 {
    of_run(run) ^ (u64::from(place) + 1).wrapping_mul(0xF135_7AEA_2E62_A9C5)
}
