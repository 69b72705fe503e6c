//! One residency: a worker holds a run of names, or the first of them. It is a cell, and threaded onto a
//! recency list of its worker's. A run's earlier names count as used later, so a list's end goes first.

use std::ops::Range;

use super::cells::{Cell, Cells, NIL, of_words, set_word, word, words};
use super::runs::RUN_MAX;
use super::workers::ListId;

/// What one cell says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Residency {
    pub(super) run: u32,
    /// Neighbour in its recency list that was used later.
    pub(super) newer: u32,
    /// Neighbour in its recency list that was used earlier.
    pub(super) older: u32,
    /// From the lower bits: which of its worker's lists it is on, how many placements vouch for its last
    /// names ([`super::claims`]), and the number of the last placement at that worker that touched it.
    pub(super) stamp: u32,
    /// Place of the worker in the workers' table.
    pub(super) worker: u16,
    /// Names of the run that the worker holds, from the first on.
    pub(super) len: u8,
    /// The first name that placements vouch for, if any do: those behind it are vouched for too.
    pub(super) claimed_from: u8,
    /// Whether the table has it under a group of workers, and not beside the run's first ones.
    pub(super) is_apart: bool,
    /// A bit for each name behind which a request can go on, at an exact worker: [`super::checkpoints`].
    pub(super) marks: u8,
}

/// Where each is among a cell's words.
const RUN: usize = 0;
const NEWER: usize = 1;
const OLDER: usize = 2;
const REST: usize = 4;

const LEN_SHIFT: u32 = 16;
const APART: u32 = 1 << 20;
const CLAIMED_SHIFT: u32 = 21;
const MARKS_SHIFT: u32 = 24;

/// Placements at one worker that a stamp tells apart; the next one is taken for the first again. Where
/// exactly so many came in between, that spares a block from eviction, or takes one too early.
pub(super) const NUMBERS: u32 = 1 << (u32::BITS - NUMBER_SHIFT);
/// Placements that can vouch for names at a time.
pub(super) const CLAIMS_MAX: u32 = (1 << (NUMBER_SHIFT - CLAIMS_SHIFT)) - 1;
const CLAIMS_SHIFT: u32 = u8::BITS;
const NUMBER_SHIFT: u32 = 12;
const CLAIMS: u32 = CLAIMS_MAX << CLAIMS_SHIFT;

/// What a placement stamps residencies of one list with.
pub(super) const fn stamp(number: u32, list: u8) -> u32 {
    number << NUMBER_SHIFT | list as u32
}

/// A stamp with so many claims instead of its own.
pub(super) const fn with_claims(stamp: u32, claims: u32) -> u32 {
    stamp & !CLAIMS | claims << CLAIMS_SHIFT
}

impl Residency {
    /// The list it is on.
    pub(super) fn list(&self) -> ListId {
        ListId { place: self.worker, nth: self.stamp as u8 }
    }

    /// Number of the last placement that touched it.
    pub(super) fn number(&self) -> u32 {
        self.stamp >> NUMBER_SHIFT
    }

    /// Whether it bears this stamp.
    pub(super) fn bears(&self, stamp: u32) -> bool {
        self.stamp & !CLAIMS == stamp
    }

    /// How many placements vouch for its last names, as long as no worker has accepted these.
    pub(super) fn claims(&self) -> u32 {
        (self.stamp & CLAIMS) >> CLAIMS_SHIFT
    }

    /// So many do, for those from this name on.
    #[must_use]
    pub(super) fn claimed(self, claims: u32, from: usize) -> Self {
        let from = if claims == 0 { 0 } else { from as u8 };
        Self { stamp: with_claims(self.stamp, claims), claimed_from: from, ..self }
    }

    /// The names that placements vouch for.
    pub(super) fn claimed_names(&self) -> Range<usize> {
        let len = usize::from(self.len);
        if self.claims() == 0 { len..len } else { self.claimed_from.into()..len }
    }

    /// Itself as two: of its first names, so many, and of the others.
    pub(super) fn parted(self, count: usize) -> [Self; 2] {
        let (len, claimed, claims) = (count as u8, usize::from(self.claimed_from), self.claims());
        let first = Self { len, marks: self.marks & (u8::MAX >> (RUN_MAX - count)), ..self };
        let rest = Self { len: self.len - len, marks: self.marks >> count, ..self };
        [
            if claimed < count { first } else { first.claimed(0, 0) },
            rest.claimed(claims, claimed.saturating_sub(count)),
        ]
    }

    /// Of an exact worker: how many names further up than this one the last is behind which a request can go
    /// on. That of the first name stands where the number does of one that is modelled.
    pub(super) fn back(&self, at: usize) -> u32 {
        let marks = self.marks & (u8::MAX >> (7 - at));
        match marks.checked_ilog2() {
            Some(mark) => at as u32 - mark,
            None => self.number() + at as u32,
        }
    }

    /// Says so of one name; those before it that are in between are no such ones.
    pub(super) fn set_back(&mut self, at: usize, back: u32) {
        let up_to = u8::MAX >> (7 - at);
        if let Some(mark) = (at as u32).checked_sub(back) {
            let between = up_to & !(u8::MAX >> (7 - mark));
            self.marks = self.marks & !between | 1 << mark;
        } else {
            self.marks &= !up_to;
            let number = (back - at as u32).min(NUMBERS - 1);
            self.stamp = self.stamp & ((1 << NUMBER_SHIFT) - 1) | number << NUMBER_SHIFT;
        }
    }

    fn rest(&self) -> u32 {
        let apart = if self.is_apart { APART } else { 0 };
        u32::from(self.worker)
            | u32::from(self.len) << LEN_SHIFT
            | apart
            | u32::from(self.claimed_from & 7) << CLAIMED_SHIFT
            | u32::from(self.marks) << MARKS_SHIFT
    }
}

impl From<&Cell> for Residency {
    #[inline]
    fn from(cell: &Cell) -> Self {
        let [run, newer, older, stamp, rest] = words(cell);
        let (len, marks) = ((rest >> LEN_SHIFT) as u8 & 15, (rest >> MARKS_SHIFT) as u8);
        let (is_apart, claimed_from) = (rest & APART != 0, (rest >> CLAIMED_SHIFT) as u8 & 7);
        Self { run, newer, older, stamp, worker: rest as u16, len, claimed_from, is_apart, marks }
    }
}

impl From<Residency> for Cell {
    fn from(held: Residency) -> Self {
        of_words([held.run, held.newer, held.older, held.stamp, held.rest()])
    }
}

/// Residencies of one worker, from the most to the least recently used.
#[derive(Clone, Copy, Default)]
pub(super) struct Recency {
    pub(super) newest: u32,
    pub(super) oldest: u32,
    /// Names that they hold together.
    pub(super) len: u32,
}

impl Cells {
    pub(super) fn get(&self, at: u32) -> Residency {
        self.cell(at).into()
    }

    pub(super) fn set(&mut self, at: u32, held: Residency) {
        *self.cell_mut(at) = held.into();
    }

    pub(super) fn older(&self, at: u32) -> u32 {
        word(self.cell(at), OLDER)
    }

    pub(super) fn newer(&self, at: u32) -> u32 {
        word(self.cell(at), NEWER)
    }

    pub(super) fn run_of(&self, at: u32) -> u32 {
        word(self.cell(at), RUN)
    }

    pub(super) fn worker_of(&self, at: u32) -> u16 {
        word(self.cell(at), REST) as u16
    }

    /// Puts a residency behind `newer` in recency, or in front of all if that is [`NIL`].
    pub(super) fn link(&mut self, list: &mut Recency, newer: u32, at: u32) {
        let older = if newer == NIL { list.newest } else { self.older(newer) };
        self.join(list, newer, at);
        self.join(list, at, older);
    }

    /// Takes a residency off its recency list.
    pub(super) fn unlink(&mut self, list: &mut Recency, at: u32) {
        self.join(list, self.newer(at), self.older(at));
    }

    /// Puts a residency of the list behind another one, or in front of all if that is [`NIL`].
    pub(super) fn move_behind(&mut self, list: &mut Recency, newer: u32, at: u32) {
        if self.newer(at) != newer {
            self.unlink(list, at);
            self.link(list, newer, at);
        }
    }

    /// Makes two residencies neighbours; [`NIL`] stands for the list's end on that side.
    fn join(&mut self, list: &mut Recency, newer: u32, older: u32) {
        match newer {
            NIL => list.newest = older,
            newer => set_word(self.cell_mut(newer), OLDER, older),
        }
        match older {
            NIL => list.oldest = newer,
            older => set_word(self.cell_mut(older), NEWER, newer),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::cells::CELL_WORDS;
    use super::*;

    proptest! {
        #[test]
        fn a_cell_says_all_of_a_residency(cell in any::<[u32; CELL_WORDS]>(), len in 1_u8..=8) {
            let held = Residency { len, ..Residency::from(&of_words(cell)) };
            prop_assert_eq!(Residency::from(&Cell::from(held)), held);
        }

        #[test]
        fn what_was_said_of_a_name_s_checkpoint_holds_until_a_later_name_says_otherwise(
            said in prop::collection::vec(0_u32..20, 1..8), before in 0_u32..20,
        ) {
            // What is said of names one after the other never contradicts what was said before.
            let mut backs = Vec::new();
            let mut last = before;
            for say in said {
                last = if say == 0 { 0 } else { last + 1 };
                backs.push(last);
            }
            let mut held = Residency::from(&of_words([0; CELL_WORDS]));
            for (at, back) in backs.iter().enumerate() {
                held.set_back(at, *back);
            }
            let known: Vec<u32> = (0..backs.len()).map(|at| held.back(at)).collect();
            prop_assert_eq!(known, backs);
        }
    }

    #[test]
    fn a_checkpoint_that_is_gone_is_told_by_the_names_behind_it() {
        let mut held = Residency { stamp: stamp(0, 3), ..Residency::from(&of_words([0; CELL_WORDS])) };
        held.set_back(2, 0);
        held.set_back(5, 1);
        assert_eq!([1, 2, 3, 4, 5, 7].map(|at| held.back(at)), [1, 0, 1, 0, 1, 3]);
        held.set_back(5, 9);
        assert_eq!((held.back(5), held.back(2), held.list().nth), (9, 6, 3));
        held.set_back(0, u32::MAX);
        assert_eq!(held.back(0), NUMBERS - 1);
    }
}
