//! Launches `elementwise.cu`: the gated activations.

use half::bf16;

use super::constants::elementwise::THREADS;
use super::constants::numbers::PACKET;
use super::{Kernel, Launch, Slice};
use crate::elementwise::ClampedGate;

/// SiLU of the gate times up: `gate_up` `[rows, 2 * width]` to `out` `[rows, width]`. `None` if there are
/// no rows.
///
/// # Panics
/// If shapes disagree, or `width` is not a multiple of 8.
pub fn silu_mul(gate_up: Slice<bf16>, width: usize, out: Slice<bf16>) -> Option<Launch> {
    launch(Kernel::silu_mul, gate_up, width, out)
}

/// gpt-oss's gate, laid out as for [`silu_mul`].
///
/// # Panics
/// As [`silu_mul`].
pub fn clamped_gate_mul(
    gate_up: Slice<bf16>,
    width: usize,
    by: ClampedGate,
    out: Slice<bf16>,
) -> Option<Launch> {
    let mut launch = launch(Kernel::clamped_gate_mul, gate_up, width, out)?;
    launch.arguments.extend([by.alpha, by.limit].map(super::Argument::F32));
    Some(launch)
}

fn launch(kernel: Kernel, gate_up: Slice<bf16>, width: usize, out: Slice<bf16>) -> Option<Launch> {
    assert!(
        width > 0
            && width.is_multiple_of(PACKET)
            && out.len.is_multiple_of(width)
            && gate_up.len == 2 * out.len,
        "{kernel}: shapes disagree"
    );
    let rows = out.len / width;
    (rows > 0).then(|| Launch {
        kernel,
        grid: [width.div_ceil(PACKET * THREADS) as u32, rows as u32, 1],
        cluster: 1,
        threads: THREADS as u32,
        shared_bytes: 0,
        arguments: vec![gate_up.into(), out.into(), width.into()],
    })
}
