//! What changes who holds what: names and holders that come and go, and runs that are parted.

use keyway_wire::block_hash::BlockHash;

use super::super::cells::{Cells, NIL};
use super::super::residency::Residency;
use super::super::runs::{Spot, UNKNOWN};
use super::{GROUP, Holders, Listed, RESIDENCY, SPOT_BITS, TOGETHER, of_group, of_place, of_run};

impl Holders {
    /// One more name at the end of a run: that nobody else holds, or that has no name yet.
    pub(in super::super) fn push(&mut self, run: u32, name: BlockHash) {
        let at = self.cells.len(run);
        self.cells.push_name(run, name);
        self.table.insert(name.0, name.0, number(Spot { run, at }));
        self.left -= 1;
    }

    /// The worker at `place`, which held nothing of the run, holds so many of its names from now on. On no
    /// recency list yet. There must be room.
    pub(in super::super) fn enter(&mut self, run: u32, place: u16, stamp: u32, len: usize) -> u32 {
        let at = self.cells.take_cell();
        let held = Residency {
            run,
            newer: NIL,
            older: NIL,
            stamp,
            worker: place,
            len: len as u8,
            claimed_from: 0,
            is_apart: false,
            marks: 0,
        };
        self.cells.set(at, held);
        self.join(run, at);
        at
    }

    /// A residency is one of this run from now on.
    fn join(&mut self, run: u32, at: u32) {
        let holders = self.cells.holders(run);
        let mut held = self.cells.get(at);
        self.places = self.places.max(held.worker + 1);
        (held.run, held.is_apart) = (run, holders > TOGETHER);
        self.cells.set(at, held);
        self.cells.add_holders(run, 1);
        if usize::from(held.len) < self.cells.len(run) {
            self.cells.add_short(run, 1);
        }
        if holders == 0 {
            self.cells.set_first(run, at);
            return;
        }
        self.left -= 1;
        self.table.insert(key(run, &held), of_place(run, held.worker), at | RESIDENCY);
        self.crowds.get_mut().came(run, held.worker);
    }

    /// The worker holds so many more of the run's names.
    pub(in super::super) fn lengthen(&mut self, at: u32, count: usize) {
        let mut held = self.cells.get(at);
        held.len += count as u8;
        self.cells.set(at, held);
        // Where the run has just got these names, there is no other holder.
        if usize::from(held.len) == self.cells.len(held.run) && self.cells.short(held.run) > 0 {
            self.cells.add_short(held.run, -1);
        }
    }

    /// The worker holds no more than so many of the run's names, of which at least one.
    pub(in super::super) fn shorten(&mut self, at: u32, len: usize) {
        let mut held = self.cells.get(at);
        let (run, before) = (held.run, usize::from(held.len));
        [held, _] = held.parted(len);
        self.cells.set(at, held);
        if self.cells.holders(run) == 1 {
            self.forget_names(run, len);
        } else if before == self.cells.len(run) {
            self.cells.add_short(run, 1);
        }
    }

    /// Forgets a residency that is on no recency list any more, and the run with its last one.
    pub(in super::super) fn leave(&mut self, at: u32) {
        let run = self.cells.run_of(at);
        if self.cells.holders(run) == 1 {
            self.forget_names(run, 0);
            self.cells.give_run(run);
        } else {
            self.part(run, at);
        }
        self.cells.give_cell(at);
    }

    /// A residency, which is not its last, is none of this run any more.
    fn part(&mut self, run: u32, at: u32) {
        let held = self.cells.get(at);
        if self.cells.first(run) == at {
            let next = self.others(run).next();
            if let Some(next) = next {
                self.unlist(run, next);
                self.cells.set_first(run, next);
                let next_held = self.cells.get(next);
                self.cells.set(next, Residency { is_apart: false, ..next_held });
            }
        } else {
            self.unlist(run, at);
        }
        if usize::from(held.len) < self.cells.len(run) {
            self.cells.add_short(run, -1);
        }
        self.cells.add_holders(run, -1);
        let holders = self.cells.holders(run);
        self.crowds.get_mut().left(run, held.worker, holders);
        if holders == 1 && self.cells.short(run) > 0 {
            let len = self.cells.get(self.cells.first(run)).len;
            self.cells.add_short(run, -1);
            self.forget_names(run, len.into());
        }
    }

    /// Takes a holder that is not the first out of the table.
    fn unlist(&mut self, run: u32, at: u32) {
        let held = self.cells.get(at);
        self.table.remove(key(run, &held), of_place(run, held.worker), at | RESIDENCY);
        self.left += 1;
    }

    /// Forgets the names of a run behind so many, which nobody holds.
    fn forget_names(&mut self, run: u32, len: usize) {
        let (names, count) = (self.cells.names(run), self.cells.len(run));
        self.fetch(&names[len..count]);
        for (at, name) in names.into_iter().enumerate().take(count).skip(len) {
            self.table.remove(name.0, name.0, number(Spot { run, at }));
        }
        self.left += count.saturating_sub(len);
        self.cells.cut_names(run, len);
    }

    /// Parts a run behind so many of its names: a new run has the first ones, and who holds more than these
    /// gets a residency of the first ones too, of which `splits` is told beside that of the rest. Returns the
    /// run of the first ones, which is the same if nobody holds more. There must be room.
    pub(in super::super) fn split(
        &mut self,
        run: u32,
        count: usize,
        mut splits: impl FnMut(&mut Cells, u32, u32),
    ) -> u32 {
        let (few, more): (Listed, Listed) =
            self.of_run(run).into_iter().partition(|at| usize::from(self.cells.get(*at).len) <= count);
        if more.is_empty() {
            let full = few.iter().filter(|at| usize::from(self.cells.get(**at).len) == count).count();
            self.cells.add_short(run, -(full as i32));
            self.forget_names(run, count);
            return run;
        }
        let before = self.cells.take_run_before(run);
        let (names, len) = (self.cells.names(run), self.cells.len(run));
        for (at, name) in names.into_iter().enumerate().take(len) {
            let now = if at < count { Spot { run: before, at } } else { Spot { run, at: at - count } };
            self.table.replace(name.0, name.0, number(Spot { run, at }), number(now));
            if at < count {
                self.cells.push_name(before, name);
            }
        }
        self.cells.cut_first_names(run, count);
        for at in more {
            let [first, rest] = self.cells.get(at).parted(count);
            let head = self.cells.take_cell();
            self.cells.set(head, first);
            self.cells.set(at, rest);
            self.join(before, head);
            splits(&mut self.cells, head, at);
        }
        for at in few {
            let held = self.cells.get(at);
            // Of what is left of the run it holds nothing.
            self.cells.set(at, Residency { len: 0, ..held });
            self.part(run, at);
            let held = Residency { len: held.len, ..self.cells.get(at) };
            self.cells.set(at, held);
            self.join(before, at);
        }
        before
    }
}

/// Under which key a holder that is not the first lies.
fn key(run: u32, held: &Residency) -> u64 {
    if held.is_apart { of_group(run, held.worker / GROUP) } else { of_run(run) }
}

fn number(Spot { run, at }: Spot) -> u32 {
    debug_assert!(run != UNKNOWN);
    run << SPOT_BITS | at as u32
}
