//! What an operation computes with: an instruction set, and how many threads may share the work. It decides
//! speed alone: every result has the same bits on any instruction set and any number of threads.
//!
//! How work is cut is the operations' business.

use std::num::NonZeroUsize;

use crate::grid::{Grid, Tile};
use crate::isa::Isa;

/// Work below this stays on the caller's thread.
const SHARED_FROM_NS: f64 = 20_000.0;
/// A part should take this long.
const PART_NS: f64 = 10_000.0;
/// More parts than threads, so that a thread that was interrupted holds up little.
const PARTS_PER_THREAD: usize = 4;

/// An instruction set and a number of threads. Clones share their threads.
#[derive(Clone, Debug)]
pub struct Compute {
    isa: Isa,
    threads: NonZeroUsize,
}

impl Compute {
    /// The widest instruction set of this machine on `threads` threads, the caller's among them.
    pub fn new(threads: NonZeroUsize) -> Self {
        Self { isa: Isa::detect(), threads }
    }

    /// The widest instruction set of this machine on the caller's thread alone.
    pub fn single() -> Self {
        Self::new(NonZeroUsize::MIN)
    }

    /// The same threads with another instruction set: slower or faster, equal bits.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = isa;
        self
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How many threads compute at once, the caller's among them.
    pub fn threads(&self) -> NonZeroUsize {
        self.threads
    }

    /// Into how many parts to cut work that takes one thread about `nanoseconds`: 1 where sharing would cost
    /// more than it saves.
    pub(crate) fn parts(&self, nanoseconds: f64) -> usize {
        if self.threads == NonZeroUsize::MIN || nanoseconds < SHARED_FROM_NS {
            return 1;
        }
        ((nanoseconds / PART_NS) as usize).clamp(self.threads.get(), PARTS_PER_THREAD * self.threads.get())
    }

    /// [`Compute::parts`] for work cut by rows: how many rows to take together, at least 1.
    pub(crate) fn tile_rows(&self, rows: usize, nanoseconds_per_row: f64) -> usize {
        rows.div_ceil(self.parts(nanoseconds_per_row * rows as f64)).max(1)
    }

    /// Runs `work` on every tile of `grid`, in any order.
    pub(crate) fn tiles(&self, grid: Grid<'_>, work: impl Fn(Tile<'_>) + Sync) {
        grid.in_order(work);
    }
}
