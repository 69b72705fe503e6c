//! What launches of `pipeline_sm90.cuh`'s products have in common: blocks that stay, one on each processor,
//! and go through the work.

/// Processors of an H100 or H200; where there are fewer, some blocks come after the others.
const PROCESSORS: u32 = 132;
/// Bytes of a packed tile of bf16 weights, and of the room that a warpgroup's sums pass on their way out.
const IMAGE: usize = 64 * 64 * 2;
/// Threads of a block that multiply: two warpgroups, for which a third brings weights and rows.
const CONSUMERS: usize = 256;

/// The parameters that a kernel's name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pipeline {
    /// Of a piece of work.
    pub(super) rows: usize,
    pub(super) stages: usize,
    /// Sums of a thread that lie in shared memory.
    stashed: usize,
}

impl Pipeline {
    /// Outputs of a piece of work.
    pub(super) const OUTPUTS: usize = 128;
    pub(super) const THREADS: u32 = 384;
    /// For [`Pipeline::choose`]: 256 rows whose K is one split.
    pub(super) const WHOLE: usize = 257;

    pub(super) const ROWS_64: Self = Self { rows: 64, stages: 8, stashed: 0 };
    pub(super) const ROWS_128: Self = Self { rows: 128, stages: 6, stashed: 0 };
    pub(super) const ROWS_192: Self = Self { rows: 192, stages: 5, stashed: 0 };
    pub(super) const ROWS_256: Self = Self { rows: 256, stages: 3, stashed: 64 };
    pub(super) const ROWS_256_WHOLE: Self = Self { rows: 256, stages: 4, stashed: 0 };

    pub(super) fn choose(rows: usize) -> Self {
        match rows {
            0..=64 => Self::ROWS_64,
            65..=128 => Self::ROWS_128,
            129..=192 => Self::ROWS_192,
            Self::WHOLE => Self::ROWS_256_WHOLE,
            _ => Self::ROWS_256,
        }
    }

    /// How many of 64, 128 and 256 rows a piece should have: the more, the less is read again, but some
    /// processors have nothing to do in the last round.
    pub(super) fn suits(outputs: usize, rows: usize) -> usize {
        let time = |tile: usize| {
            let pieces = rows.div_ceil(tile) * outputs.div_ceil(Self::OUTPUTS);
            // A piece takes as long as this many rows more.
            pieces.div_ceil(PROCESSORS as usize) * (tile + 32)
        };
        [256, 128, 64].into_iter().min_by_key(|tile| time(*tile)).unwrap_or(128)
    }

    /// As many blocks as there are pieces, but no more than stay.
    pub(super) fn grid(pieces: [u32; 3]) -> [u32; 3] {
        [pieces.iter().product::<u32>().min(PROCESSORS), 1, 1]
    }

    /// Stages, the room on the way out, stashed sums, two barriers a stage, the rows' numbers.
    pub(super) fn shared_bytes(self) -> usize {
        self.stages * (self.rows * 128 + 2 * IMAGE + 16)
            + 2 * IMAGE
            + self.stashed * CONSUMERS * 4
            + self.rows * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_smaller_where_large_ones_leave_processors_idle() {
        assert_eq!(Pipeline::suits(8192, 8192), 256);
        assert_eq!(Pipeline::suits(28_672, 2048), 256);
        assert_eq!(Pipeline::suits(4096, 512), 128);
        assert_eq!(Pipeline::suits(1024, 200), 64);
    }

    #[test]
    fn shared_memory_is_what_a_block_can_have() {
        for pipeline in [Pipeline::ROWS_64, Pipeline::ROWS_128, Pipeline::ROWS_256, Pipeline::ROWS_256_WHOLE]
        {
            assert!(pipeline.shared_bytes() <= 227 << 10, "{pipeline:?}");
        }
    }
}
