//! Placing a chain at a worker that is modelled: what it holds of it becomes most recent, run by run, and
//! what it does not hold is put behind that.

use keyway_wire::block_hash::BlockHash;

use super::blocks::Way;
use super::cells::NIL;
use super::placement::Placement;
use super::residency::{CLAIMS_MAX, Residency, stamp, with_claims};
use super::room::Kept;
use super::runs::{Spot, UNKNOWN};
use super::workers::ListId;
use super::{Owner, PrefixIndex, WorkerId};

/// Blocks whose table entries are fetched together: as many as a core has misses of its cache under way at
/// once.
pub(super) const FETCHED_TOGETHER: usize = 16;

/// How far the placing of a chain has come.
struct Placing<'a> {
    chain: &'a [BlockHash],
    /// Names of it that the worker holds by now.
    done: usize,
    place: u16,
    list: ListId,
    stamp: u32,
    /// The residency that ends with the last of them.
    last: u32,
    /// The residency that the next one is most likely in.
    likely: u32,
    /// What is not held, or held here and there, is searched for block by block, so all of it is fetched at
    /// once: so many are.
    fetched: usize,
    scattered: bool,
    added: usize,
    claims: Vec<BlockHash>,
}

/// What is known of a name at a worker.
#[derive(Clone, Copy)]
enum Found {
    /// The residency that has it, and where.
    Held(u32, usize),
    Not(Way),
}

impl PrefixIndex {
    /// Places a chain, which fits into the worker's capacity, at a worker that does not announce its blocks.
    pub(super) fn place_at(
        &mut self,
        (worker, place): (WorkerId, u16),
        owner: Owner,
        chain: &[BlockHash],
        number: u32,
    ) -> Placement {
        let Some(&root) = chain.first() else { return Placement::nothing(worker) };
        // A chain placed before lies in the list in order, so the next block is mostly in the next residency;
        // and chains that begin alike follow each other, so the first is often in the newest. A search would
        // look at every other holder.
        let newest = self.workers.find_list(place, owner).map_or(NIL, |list| self.workers.list(list).newest);
        let first = if self.begins(newest, root) {
            newest
        } else {
            self.held.find(root, place).map_or(NIL, |(held, _)| held)
        };
        // What begins alike is on one list, so that children leave before their parents.
        let list = match first {
            NIL => self.workers.find_or_add_list(place, owner, &self.owners),
            first => self.held.cells.get(first).list(),
        };
        let mut placing = Placing {
            chain,
            done: 0,
            place,
            list,
            stamp: stamp(number, list.nth),
            last: NIL,
            likely: first,
            fetched: 0,
            scattered: false,
            added: 0,
            claims: Vec::new(),
        };
        while placing.done < chain.len() && self.place_next(&mut placing) {}
        let Placing { last, done, added, claims, .. } = placing;
        self.end_run(last);
        // What has made room for it was void before.
        self.sequence = self.sequence.wrapping_add(1);
        let counts = (added as u32, done);
        Placement::claims(worker, (place, self.sequence), counts, claims, &self.accepted)
    }

    /// Places some more of a chain; false if that is all of it that can be.
    fn place_next(&mut self, placing: &mut Placing<'_>) -> bool {
        let found = self.look_up(placing);
        let parted = match found {
            Found::Held(held, at) => {
                let held = self.held.cells.get(held);
                if held.list() != placing.list {
                    return false; // Two hashes collide.
                }
                if held.bears(placing.stamp) {
                    placing.done += 1; // A chain never repeats a hash, unless two of them collide.
                    return true;
                }
                let names = self.held.cells.common(held.run, placing.rest());
                if at > 0 || names < usize::from(held.len) { self.held.cells.holders(held.run) } else { 0 }
            }
            Found::Not(way) => self.parted(placing.last, way),
        };
        let needs_room = parted > 0 || matches!(found, Found::Not(_));
        if needs_room && !self.held.has_room(parted) {
            // What gives way may be what was just found, so that is looked for anew.
            placing.likely = NIL;
            return self.make_room(placing.list, Kept::Touched(placing.stamp), parted);
        }
        match found {
            Found::Held(held, at @ 1..) => {
                // Names collide, or come from a snapshot, which does not say where chains part.
                self.split(self.held.cells.run_of(held), at);
                placing.likely = NIL;
            }
            Found::Held(held, _) => {
                let held = self.up_to(held, placing.rest());
                placing.likely = self.held.cells.older(held);
                self.touch(held, placing);
            }
            Found::Not(way) => self.add(way, placing),
        }
        true
    }

    /// Puts the next name behind the last one, and those behind it that stand in the same run.
    fn add(&mut self, way: Way, placing: &mut Placing<'_>) {
        let (stamp, rest) = (with_claims(placing.stamp, 1), placing.rest());
        placing.likely = NIL;
        placing.last = self.put(placing.list, placing.last, rest[0], stamp, way);
        let (more, width) = self.extend(placing.list, placing.last, &rest[1..], stamp);
        self.workers[placing.place].pending += u64::from(rest[0].blocks()) + width;
        placing.claims.extend_from_slice(&rest[..=more]);
        placing.added += 1 + more;
        placing.done += 1 + more;
    }

    /// Parts the run of a residency where that ends: what other workers hold behind it is asked for by its
    /// own number of holders then.
    pub(super) fn end_run(&mut self, at: u32) {
        if at == NIL {
            return;
        }
        let held = self.held.cells.get(at);
        let is_short = usize::from(held.len) < self.held.cells.len(held.run);
        if is_short && self.held.has_room(self.held.cells.holders(held.run)) {
            self.split(held.run, held.len.into());
        }
    }

    /// Whether there is such a residency, and its run begins with this name.
    #[inline]
    fn begins(&self, at: u32, name: BlockHash) -> bool {
        at != NIL && self.held.cells.name(Spot { run: self.held.cells.run_of(at), at: 0 }) == name
    }

    /// What is known of the next name at the worker.
    #[inline]
    fn look_up(&self, placing: &mut Placing<'_>) -> Found {
        let name = placing.rest()[0];
        if self.begins(placing.likely, name) {
            return Found::Held(placing.likely, 0);
        }
        if placing.scattered && placing.done >= placing.fetched {
            let some = &placing.rest()[..placing.rest().len().min(FETCHED_TOGETHER)];
            placing.fetched = placing.done + some.len();
            self.held.fetch(some);
        }
        placing.scattered = true;
        let way = self.way(placing.last, name);
        if let Way::At(Spot { run, at }) = way
            && let Some(held) = self.held.at(run, placing.place)
            && usize::from(self.held.cells.get(held).len) > at
        {
            return Found::Held(held, at);
        }
        Found::Not(way)
    }

    /// The residency of the names that a run has in common with a chain, of which its worker holds some: the
    /// run is parted behind them if need be.
    fn up_to(&mut self, held: u32, chain: &[BlockHash]) -> u32 {
        let before = self.held.cells.get(held);
        let names = self.held.cells.common(before.run, chain);
        if names >= usize::from(before.len) {
            return held;
        }
        let first = self.split(before.run, names);
        self.held.at(first, before.worker).unwrap_or(held)
    }

    /// Makes a residency most recent behind the last one, of names that come next in the chain. Vouches for
    /// it as far as no worker has accepted it.
    fn touch(&mut self, at: u32, placing: &mut Placing<'_>) {
        let cells = &mut self.held.cells;
        let held = cells.get(at);
        let (run, names, claimed) = (held.run, usize::from(held.len), held.claimed_names());
        let mut claims = held.claims();
        // One too many to be counted goes by what becomes of the others.
        if (1..CLAIMS_MAX).contains(&claims) {
            claims += 1;
            placing.claims.extend_from_slice(&placing.rest()[claimed.clone()]);
        }
        let touched = Residency { stamp: placing.stamp, ..held };
        cells.set(at, touched.claimed(claims, claimed.start));
        if cells.parent(run) == UNKNOWN && names == cells.len(run) {
            let parent = if placing.last == NIL { NIL } else { cells.run_of(placing.last) };
            if parent == NIL || cells.parent(parent) != UNKNOWN {
                cells.set_parent(run, parent);
            }
        }
        cells.move_behind(self.workers.list_mut(placing.list), placing.last, at);
        placing.last = at;
        placing.done += names;
    }
}

impl<'a> Placing<'a> {
    fn rest(&self) -> &'a [BlockHash] {
        &self.chain[self.done..]
    }
}

/// The longest part of a chain that a cache of so many blocks can hold.
pub(super) fn fitting(chain: &[BlockHash], capacity: u32) -> &[BlockHash] {
    let mut left = capacity;
    let fits = |name: &&BlockHash| left.checked_sub(name.blocks()).map(|less| left = less).is_some();
    if capacity == u32::MAX { chain } else { &chain[..chain.iter().take_while(fits).count()] }
}
