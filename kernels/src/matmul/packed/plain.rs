//! Weights as f32: `[N / 32][K][2][16]`. The two panels of a block stand together: a tile reads one stream of
//! memory.

use super::{PANEL, Read};
use crate::arena::Arena;
use crate::simd::Simd;

/// Panels of a block; the last one of a matrix is padded with zeros.
const BLOCK_PANELS: usize = 2;
/// How far ahead of its use memory is asked for, by a single row and by several, which take longer over a
/// byte: long enough to cover a fetch from memory, short enough to stay in the first-level cache until then.
/// It runs over into the next block, which is read next.
const PREFETCH_BYTES: [usize; 2] = [4096, 8192];

/// Two panels' values for one input.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([[f32; PANEL]; BLOCK_PANELS]);

/// Every element by itself.
#[derive(Debug, Clone)]
pub(in crate::matmul) struct Plain {
    lines: Arena<Line>,
    inputs: usize,
}

/// A panel's lines of some inputs, and which of the block's panels it is.
#[derive(Debug, Clone, Copy)]
pub(in crate::matmul) struct Part<'a> {
    lines: &'a [Line],
    panel: usize,
}

impl Plain {
    pub(super) fn pack(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        let blocks = outputs.div_ceil(BLOCK_PANELS * PANEL);
        let mut lines = Arena::filled(Line([[0.0; PANEL]; BLOCK_PANELS]), blocks * inputs);
        // A panel's rows together: elements that lie side by side are written together.
        let mut rows = vec![0.0; PANEL * inputs];
        for first in (0..outputs).step_by(PANEL) {
            let count = PANEL.min(outputs - first);
            for (n, row) in rows.chunks_exact_mut(inputs.max(1)).take(count).enumerate() {
                fill(first + n, row);
            }
            let (block, panel) = (first / (BLOCK_PANELS * PANEL), first / PANEL % BLOCK_PANELS);
            for (k, line) in lines[block * inputs..][..inputs].iter_mut().enumerate() {
                for (n, packed) in line.0[panel].iter_mut().take(count).enumerate() {
                    *packed = rows[n * inputs + k];
                }
            }
        }
        Self { lines, inputs }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    pub(super) fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        self.lines[panel / BLOCK_PANELS * self.inputs + k].0[panel % BLOCK_PANELS][column]
    }
}

impl Read for Plain {
    const STEP: usize = 1;

    type Part<'a> = Part<'a>;

    #[inline(always)]
    fn group(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn part(&self, panel: usize, begin: usize, len: usize) -> Part<'_> {
        let lines = &self.lines[panel / BLOCK_PANELS * self.inputs + begin..][..len];
        Part { lines, panel: panel % BLOCK_PANELS }
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _: usize, _: usize) -> S::Vector {
        simd.zero()
    }

    #[inline(always)]
    fn prefetch<S: Simd, const R: usize, const P: usize>(simd: S, parts: [Part<'_>; P], k: usize) {
        for part in parts {
            let line = part.lines.as_ptr().wrapping_add(k);
            let ahead = PREFETCH_BYTES[usize::from(R > 1)] + part.panel * size_of::<[f32; PANEL]>();
            simd.prefetch(line, ahead);
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, part: Part<'_>, len: usize, k: usize, _: usize, _: S::Vector) -> S::Vector {
        // Below `BLOCK_PANELS` already: said so that the compiler sees it.
        simd.load(&part.lines[..len][k].0[part.panel % BLOCK_PANELS])
    }
}
