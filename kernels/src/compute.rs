//! What an operation computes with: an instruction set, and how many threads may share the work. It decides
//! speed alone: every result has the same bits on any instruction set and any number of threads.
//!
//! How work is cut is the operations' business.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::grid::{Grid, Tile};
use crate::isa::Isa;
use crate::pool::Pool;

/// Work below this stays on the caller's thread. Waking a sleeping thread costs the caller 2 to 3 us (a futex
/// call; nothing where the thread still spins), and that thread comes tens of microseconds later: from 20 us
/// on the loss is at most an eighth and the gain up to half.
const SHARED_FROM_NS: f64 = 20_000.0;
/// A part should take this long: fifty times what taking one costs, and short enough for a thread that comes
/// late to find some.
const PART_NS: f64 = 5_000.0;
/// More parts than threads, so that a thread that was interrupted, or gets less of the memory's bandwidth,
/// holds up little.
const PARTS_PER_THREAD: usize = 8;

/// An instruction set, and threads that its clones share.
#[derive(Clone, Debug)]
pub struct Compute {
    isa: Isa,
    /// `None`: the caller alone.
    pool: Option<Arc<Pool>>,
    /// [`SHARED_FROM_NS`]; tests share everything.
    shared_from_ns: f64,
}

impl Compute {
    /// The widest instruction set of this machine on `threads` threads, the caller's among them (fewer if the
    /// system grants no more).
    pub fn new(threads: NonZeroUsize) -> Self {
        let workers = threads.get() - 1;
        let pool = (workers > 0).then(|| Arc::new(Pool::new(workers)));
        Self { isa: Isa::detect(), pool, shared_from_ns: SHARED_FROM_NS }
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

    /// The instruction set that operations run with: the machine's widest, unless [`Compute::with_isa`] set
    /// it.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How many threads compute at once, the caller's among them.
    pub fn threads(&self) -> NonZeroUsize {
        let threads = self.pool.as_ref().map_or(1, |pool| pool.threads());
        NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN)
    }

    /// Shares work of any size.
    #[cfg(test)]
    pub(crate) fn sharing_everything(mut self) -> Self {
        self.shared_from_ns = 0.0;
        self
    }

    /// Into how many parts to cut work that takes one thread about `nanoseconds`: 1 where sharing would cost
    /// more than it saves.
    pub(crate) fn parts(&self, nanoseconds: f64) -> usize {
        let threads = self.threads().get();
        if threads == 1 || nanoseconds < self.shared_from_ns {
            return 1;
        }
        ((nanoseconds / PART_NS) as usize).clamp(threads, PARTS_PER_THREAD * threads)
    }

    /// [`Compute::parts`] for work cut by rows: how many rows to take together, at least 1.
    pub(crate) fn tile_rows(&self, rows: usize, nanoseconds_per_row: f64) -> usize {
        match self.parts(nanoseconds_per_row * rows as f64) {
            1 => rows.max(1),
            parts => rows.div_ceil(parts).max(1),
        }
    }

    /// Runs `work(i, tile)` on every tile of every grid `i`; on the caller's thread alone unless `shared`.
    #[allow(unsafe_code)]
    pub(crate) fn tiles_of<T: Send>(
        &self,
        grids: Vec<Grid<'_, T>>,
        shared: bool,
        work: impl Fn(usize, Tile<'_, T>) + Sync,
    ) {
        match &self.pool {
            Some(pool) if shared => {
                // Where each grid's tiles end among all.
                let mut tiles = 0;
                let ends: Vec<usize> = grids.iter().map(|grid| (tiles += grid.len(), tiles).1).collect();
                pool.run(tiles, &|task| {
                    let i = ends.partition_point(|end| *end <= task);
                    let first = ends[i] - grids[i].len();
                    // SAFETY: the pool runs each task once, each of which is another tile; the grids end
                    // here.
                    work(i, unsafe { grids[i].tile(task - first) });
                });
            }
            _ => grids.into_iter().enumerate().for_each(|(i, grid)| grid.in_order(|tile| work(i, tile))),
        }
    }

    /// Runs `work` on every tile of `grid`, in any order, on any of the threads.
    #[allow(unsafe_code)]
    pub(crate) fn tiles<T: Send>(&self, mut grid: Grid<'_, T>, work: impl Fn(Tile<'_, T>) + Sync) {
        if let Some(tile) = grid.only_tile() {
            return work(tile);
        }
        match &self.pool {
            // SAFETY: the pool runs each of the grid's tiles once, and the grid ends here.
            Some(pool) => pool.run(grid.len(), &|i| work(unsafe { grid.tile(i) })),
            None => grid.in_order(work),
        }
    }
}
