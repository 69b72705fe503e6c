//! Launches `probe.cu`: what the device itself reaches.

use super::constants::probe;
use super::{Kernel, Launch, Slice};

const THREADS: u32 = probe::THREADS as u32;
/// Words of matrix fragments that a block's threads start from.
pub const SEED_WORDS: usize = probe::THREADS * probe::SEED_WORDS;
const WARPS: u32 = THREADS / 32;
/// Operations (a multiplication and an addition are two) of a warp in a round: eight products of 16 x 8 x 16.
const ROUND_OPERATIONS: u64 = 8 * 2 * 16 * 8 * 16;

/// `to = from`, of as many whole packets of 16 bytes as `from` has.
///
/// # Panics
/// If `to` is shorter, or there is nothing to copy.
pub fn copy(from: Slice<u8>, to: Slice<u8>, processors: usize) -> Launch {
    let packets = from.len / 16;
    assert!(to.len >= from.len && packets > 0, "probe: nothing to copy, or nowhere to");
    Launch {
        kernel: Kernel::copy,
        grid: [processors as u32 * 8, 1, 1],
        cluster: 1,
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![from.into(), to.into(), packets.into()],
    }
}

/// Products of registers on every processor, and how many operations they are. `seed` is [`SEED_WORDS`]
/// long, `out` as long as [`matrix_peak_outputs`] says.
///
/// # Panics
/// If shapes disagree.
pub fn matrix_peak(seed: Slice<u32>, out: Slice<f32>, processors: usize, rounds: u32) -> (Launch, u64) {
    assert!(seed.len == SEED_WORDS && out.len == matrix_peak_outputs(processors), "probe: shapes disagree");
    let blocks = processors as u32 * 2;
    let launch = Launch {
        kernel: Kernel::matrix_peak,
        grid: [blocks, 1, 1],
        cluster: 1,
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![seed.into(), out.into(), rounds.into()],
    };
    (launch, u64::from(blocks) * u64::from(WARPS) * u64::from(rounds) * ROUND_OPERATIONS)
}

/// Elements that [`matrix_peak`] writes.
pub fn matrix_peak_outputs(processors: usize) -> usize {
    processors * 2 * THREADS as usize
}
