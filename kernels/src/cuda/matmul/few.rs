//! The blocks of `product_few.cuh`: how many warps they have, and what they need. Speed alone: no choice
//! changes a bit.

use super::Shape;
use crate::cuda::Argument;
use crate::cuda::constants::Block;
use crate::cuda::constants::product_few::{
    self, MANY_ROWS, MANY_THREADS_MAX, OUTPUTS, ROW_BYTES, ROWS, THREADS_MAX,
};

/// Blocks that there should be before a block gets more outputs: about one for each processor.
const BLOCKS: usize = 128;
/// Shared memory of a block at most; GPUs of compute capability 8.6, 8.9 and 12.0 have no more.
const SHARED_BYTES: usize = 99 << 10;
/// Threads of a warp.
const WARP: usize = 32;

/// How blocks of a product by weights of 8 or 4 bits are made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Few {
    shape: Shape,
    /// Rows of a block: 16 or 64.
    rows: usize,
    /// Rows that shared memory has room for.
    kept_rows: usize,
    /// Warps for outputs beside each other, and how often, for splits that are summed at once.
    warps: usize,
    splits: usize,
}

impl Few {
    /// For `blocks` blocks beside each other of at most `rows` rows, and `splits` splits that a block goes
    /// through.
    pub(in crate::cuda) fn choose(
        shape: Shape,
        block_rows: usize,
        rows: usize,
        blocks: usize,
        splits: usize,
    ) -> Self {
        if block_rows > ROWS {
            let warps = MANY_ROWS / OUTPUTS;
            return Self { shape, rows: MANY_ROWS, kept_rows: MANY_ROWS, warps, splits: 1 };
        }
        let enough = |warps: &usize| shape.outputs.div_ceil(warps * OUTPUTS) * blocks >= BLOCKS;
        let warps = [4, 2].into_iter().find(enough).unwrap_or(1);
        let kept_rows = rows.clamp(1, ROWS).next_power_of_two();
        let one = Self { shape, rows: ROWS, kept_rows, warps, splits: 1 };
        let fits = |splits: usize| Self { splits, ..one }.fits();
        let most = (1..=splits).rev().find(|splits| fits(*splits)).unwrap_or(1);
        // No fewer at once than it takes to go through them as often.
        Self { splits: splits.div_ceil(splits.div_ceil(most)), ..one }
    }

    /// Of two products in one launch, whose blocks have as many threads; the second's warps may lie otherwise
    /// among outputs and splits.
    pub(in crate::cuda) fn choose_pair([shape, down]: [Shape; 2], rows: usize, blocks: usize) -> [Self; 2] {
        let first = Self::choose(shape, ROWS, rows, blocks, shape.splits());
        let warps = first.warps * first.splits;
        let with = |splits: usize| Self { shape: down, warps: warps / splits, splits, ..first };
        let suits = |splits: &usize| warps.is_multiple_of(*splits) && with(*splits).fits();
        let splits = (1..=down.splits().min(warps)).rev().find(suits).unwrap_or(1);
        [first, with(splits)]
    }

    /// Whether there can be such blocks.
    fn fits(self) -> bool {
        self.threads() <= THREADS_MAX && self.shared_bytes() <= SHARED_BYTES
    }

    /// Whether its blocks have up to 16 rows, not up to 64.
    pub(in crate::cuda) fn is_of_few_rows(self) -> bool {
        self.rows == ROWS
    }

    pub(in crate::cuda) fn block(self) -> Block {
        let (rows, outputs) = (self.rows, self.warps * OUTPUTS);
        Block { rows, outputs, threads: self.threads(), shared_bytes: self.shared_bytes() }
    }

    fn threads(self) -> usize {
        self.warps * self.splits * WARP
    }

    /// Stages of each group of warps' rows and of each warp's codes, and the rows' numbers.
    fn shared_bytes(self) -> usize {
        let packing = self.shape.weights.packing().unwrap_or(product_few::INT8);
        let stage = self.splits * (self.kept_rows * ROW_BYTES + self.warps * packing.warp_bytes);
        packing.stages[usize::from(!self.is_of_few_rows())] * stage + self.rows * size_of::<u32>()
    }

    /// The last two arguments of its kernels: warps beside each other, and rows kept in shared memory.
    pub(in crate::cuda) fn arguments(self) -> [Argument; 2] {
        [self.warps.into(), self.kept_rows.into()]
    }

    /// The last three of those that make two products: warps beside each other of either, rows kept.
    pub(in crate::cuda) fn pair_arguments([first, second]: [Self; 2]) -> [Argument; 3] {
        [first.warps.into(), second.warps.into(), first.kept_rows.into()]
    }
}

// What kernels are compiled for.
const _: () = assert!(MANY_ROWS / OUTPUTS * WARP <= MANY_THREADS_MAX);
