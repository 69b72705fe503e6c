//! What launches of `pipeline_sm90.cuh`'s products have in common: blocks that stay, one on each processor,
//! and go through the work.

use super::constants::pipeline_sm90::{ROWS_64, ROWS_128, ROWS_256};

/// Processors of an H100 or H200; where there are fewer, some blocks come after the others.
const PROCESSORS: u32 = 132;

/// How many of 64, 128 and 256 rows a piece of work should have: the more, the less is read again, but some
/// processors have nothing to do in the last round.
pub(super) fn suits(outputs: usize, rows: usize) -> usize {
    let time = |tile: usize| {
        let pieces = rows.div_ceil(tile) * outputs.div_ceil(ROWS_256.outputs);
        // A piece takes as long as this many rows more.
        pieces.div_ceil(PROCESSORS as usize) * (tile + 32)
    };
    let tiles = [ROWS_256.rows, ROWS_128.rows, ROWS_64.rows];
    tiles.into_iter().min_by_key(|tile| time(*tile)).unwrap_or(ROWS_128.rows)
}

/// As many clusters of so many blocks as there are pieces of theirs, but no more than stay.
pub(super) fn grid(pieces: [u32; 3], cluster: u32) -> [u32; 3] {
    [pieces.iter().product::<u32>().min(PROCESSORS / cluster) * cluster, 1, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_smaller_where_large_ones_leave_processors_idle() {
        assert_eq!(suits(8192, 8192), 256);
        assert_eq!(suits(28_672, 2048), 256);
        assert_eq!(suits(4096, 512), 128);
        assert_eq!(suits(1024, 200), 64);
    }

    #[test]
    fn a_grid_is_made_of_whole_clusters() {
        assert_eq!(grid([3, 1, 1], 2), [6, 1, 1]);
        assert_eq!(grid([8, 16, 2], 2), [132, 1, 1]);
        assert_eq!(grid([8, 16, 2], 1), [132, 1, 1]);
    }
}
