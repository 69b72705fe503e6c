//! Blocks that come to a worker and leave it, by the worker's recency list, and the runs that are parted for
//! them.

use keyway_wire::block_hash::BlockHash;

use super::PrefixIndex;
use super::cells::NIL;
use super::residency::{self, Residency, with_claims};
use super::runs::{RUN_MAX, Spot, UNKNOWN};
use super::workers::ListId;

/// Where a name is that a worker does not hold.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// The next of the run whose first names the worker holds.
    Next,
    At(Spot),
    /// No worker holds it, so it has no place.
    Nowhere,
}

impl PrefixIndex {
    /// Where a name is, which stands behind the last one of the residency `after`, if that is one.
    #[inline]
    pub(super) fn way(&self, after: u32, name: BlockHash) -> Way {
        let cells = &self.held.cells;
        if after != NIL {
            let Residency { run, len, .. } = cells.get(after);
            let at = usize::from(len);
            if at < cells.len(run) && cells.name(Spot { run, at }) == name {
                return Way::Next;
            }
        }
        self.held.spot(name).map_or(Way::Nowhere, Way::At)
    }

    /// How many residencies may be parted in two where a name comes to stand behind `after`.
    pub(super) fn parted(&self, after: u32, way: Way) -> usize {
        let cells = &self.held.cells;
        let in_a_run = match way {
            Way::At(Spot { run, at }) if at > 0 => cells.holders(run),
            _ => 0,
        };
        if after == NIL {
            return in_a_run;
        }
        let Residency { run, len, .. } = cells.get(after);
        in_a_run + if usize::from(len) < cells.len(run) { cells.holders(run) } else { 0 }
    }

    /// Makes a block resident that its worker does not hold, most recent after the last one of `after`, a
    /// residency of the list that ends with the block before it; [`NIL`]: most recent of all. There must be
    /// room. Returns the residency that ends with it.
    pub(super) fn put(&mut self, list: ListId, after: u32, name: BlockHash, stamp: u32, way: Way) -> u32 {
        self.put_where(list, after, (name, way), stamp, true)
    }

    /// [`PrefixIndex::put`] where it may not be `known` that `after` ends with the block before it.
    pub(super) fn put_where(
        &mut self,
        list: ListId,
        after: u32,
        (name, way): (BlockHash, Way),
        stamp: u32,
        known: bool,
    ) -> u32 {
        self.grew(list, 1, name.blocks().into());
        let (mut parent, mut is_moved) = (if known { NIL } else { UNKNOWN }, false);
        if after != NIL {
            let last = self.held.cells.get(after);
            let (held, names) = (usize::from(last.len), self.held.cells.len(last.run));
            if let Some(grown) = self.grown(last, stamp) {
                let pushes = matches!(way, Way::Nowhere) && held == names && self.may_grow(last.run);
                if pushes {
                    self.held.push(last.run, name);
                }
                if pushes || matches!(way, Way::Next) {
                    self.held.cells.set(after, grown);
                    self.held.lengthen(after, 1);
                    return after;
                }
            }
            if held < names {
                // What comes parts from what others hold there.
                self.split(last.run, held);
                is_moved = true;
            }
            if known {
                parent = self.held.cells.run_of(after);
            }
        }
        let mut spot = match way {
            Way::Nowhere => None,
            Way::At(spot) if !is_moved => Some(spot),
            Way::At(_) | Way::Next => self.held.spot(name),
        };
        if let Some(Spot { run, at: at @ 1.. }) = spot {
            // Names collide, or come from a snapshot, which does not say where chains part.
            self.split(run, at);
            spot = self.held.spot(name);
        }
        let run = spot.map_or_else(
            || {
                let run = self.held.cells.take_run(parent);
                self.held.push(run, name);
                run
            },
            |spot| spot.run,
        );
        self.owners.enter(self.workers.owner(list));
        let held = self.held.enter(run, list.place, stamp, 1);
        self.held.cells.link(self.workers.list_mut(list), after, held);
        held
    }

    /// Puts as many of these blocks, one after the other, at the worker as its residency `after` can say,
    /// which ends with the block before them: those that its run has, or has room for. Returns how many, and
    /// of how many blocks they are the names.
    pub(super) fn extend(
        &mut self,
        list: ListId,
        after: u32,
        names: &[BlockHash],
        stamp: u32,
    ) -> (usize, u64) {
        let last = self.held.cells.get(after);
        let (run, held) = (last.run, usize::from(last.len));
        let Some(grown) = self.grown(last, stamp) else { return (0, 0) };
        let mut count = self.held.cells.common_from(run, held, names);
        if held == self.held.cells.len(run) && self.may_grow(run) {
            let most = names.len().min(RUN_MAX - held);
            while count < most && self.held.has_room_in_runs() && self.held.spot(names[count]).is_none() {
                self.held.push(run, names[count]);
                count += 1;
            }
        }
        if count == 0 {
            return (0, 0);
        }
        self.held.cells.set(after, grown);
        self.held.lengthen(after, count);
        let width = names[..count].iter().map(|name| u64::from(name.blocks())).sum();
        self.grew(list, count as u32, width);
        (count, width)
    }

    /// A residency as one that may have a name with this stamp as its next; `None` if that says otherwise
    /// than its own.
    fn grown(&self, held: Residency, stamp: u32) -> Option<Residency> {
        // An exact worker's stamps number nothing.
        let number = if self.workers[held.worker].exact { residency::NUMBERS - 1 } else { 0 };
        let next = Residency { stamp, ..held };
        let is_alike =
            (with_claims(held.stamp, 0) ^ with_claims(stamp, 0)) & !residency::stamp(number, 0) == 0;
        match (held.claims(), next.claims()) {
            _ if !is_alike => None,
            (held_by, next_by) if held_by == next_by => Some(held),
            // Names that no worker has accepted may follow others in one run.
            (0, claims) if usize::from(held.len) < RUN_MAX => Some(held.claimed(claims, held.len.into())),
            _ => None,
        }
    }

    /// Whether one more name may stand at the end of this run.
    fn may_grow(&self, run: u32) -> bool {
        let cells = &self.held.cells;
        cells.holders(run) == 1 && cells.len(run) < RUN_MAX && !cells.has_behind(run)
    }

    /// Parts a run behind so many of its names. Residencies that hold no more than these stay what they are;
    /// of others the rest does. Returns the run of the first names.
    pub(super) fn split(&mut self, run: u32, count: usize) -> u32 {
        let (workers, owners) = (&mut self.workers, &mut self.owners);
        self.held.split(run, count, |cells, head, rest| {
            let held = cells.get(rest);
            cells.link(workers.list_mut(held.list()), held.newer, head);
            owners.enter(workers.owner(held.list()));
            if workers[held.worker].by_checkpoints {
                let (back, mut held) = (cells.get(head).back(count), cells.get(rest));
                if held.marks & 1 == 0 {
                    held.set_back(0, back);
                }
                cells.set(rest, held);
            }
        })
    }

    /// Takes the last `count` names of a residency away from its worker.
    pub(super) fn shed(&mut self, at: u32, count: usize) {
        let held = self.held.cells.get(at);
        let (list, len) = (held.list(), usize::from(held.len));
        let (mut width, claimed) = (0, held.claimed_names());
        for at in (len - count..len).rev() {
            let name = self.held.cells.name(Spot { run: held.run, at });
            width += u64::from(name.blocks());
            if claimed.contains(&at) {
                self.workers[list.place].pending -= u64::from(name.blocks());
                self.voids.add((list.place, name), held.claims(), self.sequence);
            }
        }
        self.shrank(list, count as u32, width);
        if count < len {
            self.held.shorten(at, len - count);
            return;
        }
        self.held.cells.unlink(self.workers.list_mut(list), at);
        if self.workers[list.place].last == at {
            self.workers[list.place].last = NIL;
        }
        self.owners.leave(self.workers.owner(list));
        self.held.leave(at);
    }

    /// There are so many more names on a list, of so many blocks.
    fn grew(&mut self, list: ListId, names: u32, width: u64) {
        self.workers.list_mut(list).len += names;
        self.workers.grew(list.place, names, width);
        self.owners.add(self.workers.owner(list), names);
    }

    fn shrank(&mut self, list: ListId, names: u32, width: u64) {
        self.workers.list_mut(list).len -= names;
        self.workers.shrank(list.place, names, width);
        self.owners.take(self.workers.owner(list), names);
    }
}
