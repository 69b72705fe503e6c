//! Launches `gather.cu`: rows of a matrix by their numbers, plain or packed for products; and tokens in the
//! places that a plan left for them.

use half::bf16;

use super::constants::gather::{self, THREADS};
use super::constants::numbers::PACKET;
use super::matmul::{Packed, Weights};
use super::{Argument, Kernel, Launch, Slice};

/// Marks a token that is not known yet, with the number of the row of the step before that draws it.
pub const PENDING: u32 = gather::PENDING;

/// The first `width` elements of the rows `rows` of `matrix` `[…, stride]`, to `out` `[rows, width]`. `None`
/// if there are no rows. Row numbers must be within the matrix, which is not checked here.
///
/// # Panics
/// If shapes disagree, or a size is not a multiple of 8.
pub fn plain(
    matrix: Slice<bf16>,
    stride: usize,
    rows: Slice<u32>,
    width: usize,
    out: Slice<bf16>,
) -> Option<Launch> {
    assert!(
        width > 0
            && width <= stride
            && [width, stride].iter().all(|n| n.is_multiple_of(PACKET))
            && matrix.len.is_multiple_of(stride)
            && out.len == rows.len * width,
        "gather: shapes disagree"
    );
    let arguments = vec![matrix.into(), rows.into(), out.into(), width.into(), stride.into()];
    launch(Kernel::gather, rows.len, width, arguments)
}

/// The rows `rows` of a bf16 weight, to `out` `[rows, inputs]`: a look-up of embeddings. `None` if there are
/// no rows. Row numbers must be below its outputs, which is not checked here.
///
/// # Panics
/// If shapes disagree, or the weight is not bf16.
pub fn packed(weight: &Packed, rows: Slice<u32>, out: Slice<bf16>) -> Option<Launch> {
    let (shape, width) = (weight.shape, weight.shape.inputs);
    shape.check();
    assert!(
        shape.weights == Weights::Bf16
            && weight.images.len == shape.packed_bytes()
            && out.len == rows.len * width,
        "gather: shapes disagree"
    );
    launch(
        Kernel::gather_packed,
        rows.len,
        width,
        vec![weight.images.into(), rows.into(), out.into(), width.into()],
    )
}

/// Puts what was drawn, `drawn[r]`, in the place of each of `tokens` that is [`PENDING`] `| r`. `None` if
/// there are no tokens. Row numbers must be within `drawn`, which is not checked here.
pub fn fill_in(tokens: Slice<u32>, drawn: Slice<u32>) -> Option<Launch> {
    (tokens.len > 0).then(|| Launch {
        kernel: Kernel::fill_in,
        grid: [tokens.len.div_ceil(THREADS) as u32, 1, 1],
        cluster: 1,
        threads: THREADS as u32,
        shared_bytes: 0,
        arguments: vec![tokens.into(), drawn.into(), tokens.len.into()],
    })
}

fn launch(kernel: Kernel, rows: usize, width: usize, arguments: Vec<Argument>) -> Option<Launch> {
    (rows > 0).then(|| Launch {
        kernel,
        grid: [width.div_ceil(PACKET * THREADS) as u32, rows as u32, 1],
        cluster: 1,
        threads: THREADS as u32,
        shared_bytes: 0,
        arguments,
    })
}
