//! Launches `rms_norm.cu`: RMSNorm of rows or of heads inside them, optionally after adding to the residual.

use half::bf16;

use super::constants::numbers::{PACKET, PACKET_WORDS};
use super::constants::rms_norm::THREADS_MAX;
use super::{Kernel, Launch, Slice};
use crate::heads::Heads;

/// Where the rows lie, and how many of a head's elements are normalised (`width`, from its beginning).
#[derive(Debug, Clone, Copy)]
pub struct NormRows {
    /// How many rows there are; `heads` says how far apart they begin.
    pub rows: usize,
    /// Elements that are normalised together.
    pub width: usize,
    /// Heads in a row; whole rows are one head.
    pub heads: Heads,
}

impl NormRows {
    /// `rows` whole rows of `width`.
    pub fn whole(rows: usize, width: usize) -> Self {
        Self { rows, width, heads: Heads { stride: width, first: 0, count: 1, pitch: width } }
    }
}

/// `out = norm(x + residual) * weight`, and the sum into `residual` if there is one. `x`, `residual` and
/// `out` are laid out as `rows` says; `out` may be `x`. `None` if there are no rows.
///
/// # Panics
/// If shapes disagree, or a size is not a multiple of 8.
pub fn launch(
    x: Slice<bf16>,
    residual: Option<Slice<bf16>>,
    weight: Slice<bf16>,
    eps: f32,
    rows: NormRows,
    out: Slice<bf16>,
) -> Option<Launch> {
    let NormRows { rows, width, heads } = rows;
    let len = rows * heads.stride;
    assert!(
        x.len == len && out.len == len && residual.is_none_or(|r| r.len == len) && weight.len == width,
        "rms_norm: shapes disagree"
    );
    assert!(
        heads.fit(width) && [width, heads.stride, heads.first, heads.pitch].iter().all(|n| n % PACKET == 0),
        "rms_norm: sizes must be multiples of {PACKET}"
    );
    if rows == 0 || heads.count == 0 {
        return None;
    }
    // A function of the width alone: it fixes the order of the sum.
    let threads = (width / PACKET).next_multiple_of(32).min(THREADS_MAX);
    let kernel = match width.div_ceil(THREADS_MAX * PACKET) {
        1 => Kernel::rms_norm_1,
        2 => Kernel::rms_norm_2,
        3 | 4 => Kernel::rms_norm_4,
        _ => Kernel::rms_norm,
    };
    Some(Launch {
        kernel,
        grid: [heads.count as u32, rows as u32, 1],
        cluster: 1,
        threads: threads as u32,
        // What warps have found is read in packets.
        shared_bytes: ((threads / 32).next_multiple_of(PACKET_WORDS) * 4) as u32,
        arguments: vec![
            x.starting_at(heads.first).into(),
            residual.map(|r| r.starting_at(heads.first)).into(),
            weight.into(),
            out.starting_at(heads.first).into(),
            width.into(),
            heads.stride.into(),
            heads.pitch.into(),
            heads.stride.into(),
            heads.pitch.into(),
            eps.into(),
        ],
    })
}
