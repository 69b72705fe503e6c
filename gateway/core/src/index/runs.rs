//! Runs: up to eight names that stand one behind the other in some chain, stored once for all workers that
//! hold them. Chains part between runs, never within one: all that stands behind a run stands behind its last
//! name.

use keyway_wire::block_hash::BlockHash;

use super::cells::{BLOCK_BYTES, BLOCK_WORDS, Block, Cells, set_word, word};
use super::residency::Residency;

/// Names of a run at most.
pub(super) const RUN_MAX: usize = 8;

const NAME_BYTES: usize = size_of::<BlockHash>();

/// Words of a block behind the names: the run before this one, the first that holds it, how many do, of which
/// how many hold its first names only, and how many names it has.
const PARENT: usize = 2 * RUN_MAX;
const FIRST: usize = PARENT + 1;
const HOLDERS: usize = FIRST + 1;
const LEN: usize = HOLDERS + 1;
const _: () = assert!(LEN + 1 == BLOCK_WORDS);

const SHORT_SHIFT: u32 = 16;
const BEHIND_SHIFT: u32 = 8;
/// So many runs behind one are not counted any more: the count stays.
const BEHIND_MAX: u32 = 255;
/// Says of a block that it is a run: there stands in a cell how many names a worker holds, which are fewer.
const IS_RUN: u32 = 15 << 16;

/// The run before one of which only the names came, as from a snapshot. Neither is it known then that its own
/// names follow each other.
pub(super) const UNKNOWN: u32 = u32::MAX;

/// Where a name stands in its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) run: u32,
    pub(super) at: usize,
}

impl Cells {
    /// A run without names behind this one. The caller has looked for room.
    pub(super) fn take_run(&mut self, parent: u32) -> u32 {
        let run = self.take_empty_run(parent);
        self.count_behind(parent, 1);
        run
    }

    fn take_empty_run(&mut self, parent: u32) -> u32 {
        let run = self.take_block();
        let block = self.block_mut(run);
        *block = [0; BLOCK_BYTES];
        set_word(block, PARENT, parent);
        set_word(block, LEN, IS_RUN);
        run
    }

    /// Forgets one that nobody holds.
    pub(super) fn give_run(&mut self, run: u32) {
        self.count_behind(self.parent(run), -1);
        set_word(self.block_mut(run), LEN, 0);
        self.give_block(run);
    }

    /// Puts a new run in front of one, as yet without names.
    pub(super) fn take_run_before(&mut self, run: u32) -> u32 {
        let parent = self.parent(run);
        let before = self.take_empty_run(parent);
        if parent != UNKNOWN {
            set_word(self.block_mut(run), PARENT, before);
            self.count_behind(before, 1);
        }
        before
    }

    pub(super) fn name(&self, spot: Spot) -> BlockHash {
        name_of(self.block(spot.run), spot.at)
    }

    /// The run's names, and beyond them what is none.
    pub(super) fn names(&self, run: u32) -> [BlockHash; RUN_MAX] {
        let block = self.block(run);
        std::array::from_fn(|at| name_of(block, at))
    }

    /// How many of the run's first names the chain begins with.
    #[inline]
    pub(super) fn common(&self, run: u32, chain: &[BlockHash]) -> usize {
        self.common_from(run, 0, chain)
    }

    /// How many of the run's names from this one on the chain begins with.
    #[inline]
    pub(super) fn common_from(&self, run: u32, from: usize, chain: &[BlockHash]) -> usize {
        let block = self.block(run);
        let names = (from..word(block, LEN) as usize & 15).zip(chain);
        names.take_while(|(at, name)| name_of(block, *at) == **name).count()
    }

    /// The last name of a residency.
    pub(super) fn last_name(&self, held: &Residency) -> BlockHash {
        self.name(Spot { run: held.run, at: usize::from(held.len).saturating_sub(1) })
    }

    pub(super) fn push_name(&mut self, run: u32, name: BlockHash) {
        let block = self.block_mut(run);
        let len = word(block, LEN);
        block.as_chunks_mut().0[len as usize & 15] = name.0.to_ne_bytes();
        set_word(block, LEN, len + 1);
    }

    /// Forgets the run's names from this one on.
    pub(super) fn cut_names(&mut self, run: u32, len: usize) {
        let block = self.block_mut(run);
        let others = word(block, LEN) & !15;
        set_word(block, LEN, others | len as u32);
    }

    /// Forgets the run's first names.
    pub(super) fn cut_first_names(&mut self, run: u32, count: usize) {
        let len = self.len(run);
        self.block_mut(run).copy_within(NAME_BYTES * count..NAME_BYTES * len, 0);
        self.cut_names(run, len - count);
    }

    /// How many names the run has.
    pub(super) fn len(&self, run: u32) -> usize {
        word(self.block(run), LEN) as usize & 15
    }

    pub(super) fn parent(&self, run: u32) -> u32 {
        word(self.block(run), PARENT)
    }

    /// It is known by now what stands before it.
    pub(super) fn set_parent(&mut self, run: u32, parent: u32) {
        set_word(self.block_mut(run), PARENT, parent);
        self.count_behind(parent, 1);
    }

    /// Whether a run stands behind this one.
    pub(super) fn has_behind(&self, run: u32) -> bool {
        self.behind(run) != 0
    }

    fn behind(&self, run: u32) -> u32 {
        word(self.block(run), LEN) >> BEHIND_SHIFT & BEHIND_MAX
    }

    /// Whether there is a run of this number. What stands before a run is held by who holds the run, but for
    /// where names collide, or more placements vouch for it than are counted.
    pub(super) fn is_run(&self, run: u32) -> bool {
        self.has_block(run) && word(self.block(run), LEN) & IS_RUN == IS_RUN
    }

    /// The residency that was entered first; [`NIL`] if there is none.
    pub(super) fn first(&self, run: u32) -> u32 {
        word(self.block(run), FIRST)
    }

    pub(super) fn set_first(&mut self, run: u32, residency: u32) {
        set_word(self.block_mut(run), FIRST, residency);
    }

    /// How many workers hold some of the run.
    pub(super) fn holders(&self, run: u32) -> usize {
        word(self.block(run), HOLDERS) as usize & 0xFFFF
    }

    pub(super) fn add_holders(&mut self, run: u32, more: i32) {
        self.add_to(run, HOLDERS, more);
    }

    /// How many of them hold only its first names.
    pub(super) fn short(&self, run: u32) -> usize {
        word(self.block(run), HOLDERS) as usize >> SHORT_SHIFT
    }

    pub(super) fn add_short(&mut self, run: u32, more: i32) {
        self.add_to(run, HOLDERS, more << SHORT_SHIFT);
    }

    fn count_behind(&mut self, parent: u32, more: i32) {
        if !self.is_run(parent) {
            return;
        }
        let behind = self.behind(parent);
        if behind < BEHIND_MAX && (more > 0 || behind > 0) {
            self.add_to(parent, LEN, more << BEHIND_SHIFT);
        }
    }

    fn add_to(&mut self, run: u32, at: usize, more: i32) {
        let block = self.block_mut(run);
        let sum = word(block, at).wrapping_add_signed(more);
        set_word(block, at, sum);
    }
}

#[inline]
fn name_of(block: &Block, at: usize) -> BlockHash {
    BlockHash(u64::from_ne_bytes(block.as_chunks().0[at]))
}
