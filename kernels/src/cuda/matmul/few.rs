//! The blocks of `product_few.cuh`: how many warps they have, and what they need. Speed alone: no choice
//! changes a bit.

use super::{GROUP, Shape, Weights};
use crate::cuda::Argument;

/// Outputs of a warp.
const OUTPUTS: usize = 16;
/// Blocks that there should be before a block gets more outputs: about one for each processor.
const BLOCKS: usize = 128;
/// Threads and shared memory of a block at most; GPUs of compute capability 8.6, 8.9 and 12.0 have no more of
/// the latter.
const THREADS: usize = 512;
const SHARED_BYTES: usize = 99 << 10;

/// How blocks of a product by weights of 8 or 4 bits are made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Few {
    shape: Shape,
    /// Rows of a block: 16 or 64.
    pub(in crate::cuda) rows: usize,
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
        if block_rows > OUTPUTS {
            return Self { shape, rows: 64, kept_rows: 64, warps: 4, splits: 1 };
        }
        let enough = |warps: &usize| shape.outputs.div_ceil(warps * OUTPUTS) * blocks >= BLOCKS;
        let warps = [4, 2].into_iter().find(enough).unwrap_or(1);
        let kept_rows = rows.clamp(1, OUTPUTS).next_power_of_two();
        let one = Self { shape, rows: 16, kept_rows, warps, splits: 1 };
        let fits = |splits: usize| {
            let few = Self { splits, ..one };
            few.threads() as usize <= THREADS && few.shared_bytes() as usize <= SHARED_BYTES
        };
        let most = (1..=splits).rev().find(|splits| fits(*splits)).unwrap_or(1);
        // No fewer at once than it takes to go through them as often.
        Self { splits: splits.div_ceil(splits.div_ceil(most)), ..one }
    }

    /// Outputs of a block.
    pub(in crate::cuda) fn outputs(self) -> usize {
        self.warps * OUTPUTS
    }

    pub(in crate::cuda) fn threads(self) -> u32 {
        (self.warps * self.splits * 32) as u32
    }

    /// Stages of the pipeline, as the kernel has them.
    fn stages(self) -> usize {
        match self.shape.weights {
            Weights::Int4 | Weights::Mxfp4 if self.rows == 16 => 6,
            _ => 4,
        }
    }

    pub(in crate::cuda) fn shared_bytes(self) -> u32 {
        let codes = if matches!(self.shape.weights, Weights::Int4 | Weights::Mxfp4) { 2 } else { 1 };
        let warp = OUTPUTS * GROUP / codes + 64;
        let stage = self.splits * (self.kept_rows * GROUP * 2 + self.warps * warp);
        (self.stages() * stage + self.rows * 4) as u32
    }

    /// The last two arguments of its kernels: warps beside each other, and rows kept in shared memory.
    pub(in crate::cuda) fn arguments(self) -> [Argument; 2] {
        [self.warps.into(), self.kept_rows.into()]
    }
}
