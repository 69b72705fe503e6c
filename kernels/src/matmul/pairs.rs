//! Weights in bf16, and the product with them: `y[m][n]` is one chain of fused multiply-adds over ascending
//! `k` of `x[m][k]` rounded to bf16 with `w[n][k]`, summed in f32, two inputs an instruction where the
//! processor has one. Magnitudes below 2^-50 count as 0 (`simd/pairs.rs` says why). The tile sizes below
//! change speed, never a bit.
//!
//! Few rows read the weights once, at memory's speed. Many go in tall tiles, a few inputs after the other, so
//! that both stay in cache. Rounding `x` is [`super::rounded`]'s business.

use std::ops::Range;

use super::packed::PANEL;
use super::rounded::{Rounded, Rows};
use crate::arena::Arena;
use crate::compute::Compute;
use crate::grid::{Grid, Tile};
use crate::isa::PairBody;
use crate::simd::{PairDot, Simd, pair};

/// Panels that stand together in memory; the last block of a matrix is padded with zeros.
const BLOCK_PANELS: usize = 2;
/// Rows of a tall tile, two panels wide: their sums, the weights, and a pair of inputs, in 32 vector
/// registers.
pub(super) const WIDE_ROWS: usize = 12;
/// Rows of a tall tile, one panel wide, where a panel takes two of sixteen registers.
pub(super) const NARROW_ROWS: usize = 4;
/// Rows of `x` that stay in the second-level cache while all panels pass by; tall tiles divide it.
const ROW_BLOCK: usize = 96;
/// Pairs of inputs after which a block's rows go on to the next, their sums kept in `y`: these weights of two
/// panels, and a tall tile's inputs, stay in the first-level cache.
const DEPTH: usize = 192;
/// A weight up to this size is taken to be in the second-level cache, or near enough.
const CACHED_BYTES: usize = 1 << 20;
/// How far ahead of its use memory is asked for, by a single row and by several; see `packed/plain.rs`.
const PREFETCH_BYTES: [usize; 2] = [4096, 8192];

/// Two panels' weights of two inputs, the first in the upper halves.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([[u32; PANEL]; BLOCK_PANELS]);

/// A weight, `[N / 32][K / 2]` lines, both rounded up.
#[derive(Debug, Clone)]
pub(super) struct Pairs {
    lines: Arena<Line>,
    per_block: usize,
}

impl Pairs {
    /// `fill(n, row)` writes row `n`, which is rounded.
    pub(super) fn pack(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        let per_block = inputs.div_ceil(2);
        let blocks = outputs.div_ceil(BLOCK_PANELS * PANEL);
        let mut lines = Arena::filled(Line([[0; PANEL]; BLOCK_PANELS]), blocks * per_block);
        // A panel's rows together: elements that lie side by side are written together.
        let mut rows = vec![0.0; PANEL * 2 * per_block];
        for first in (0..outputs).step_by(PANEL) {
            let count = PANEL.min(outputs - first);
            for (n, row) in rows.chunks_exact_mut((2 * per_block).max(1)).take(count).enumerate() {
                fill(first + n, &mut row[..inputs]);
            }
            let (block, panel) = (first / (BLOCK_PANELS * PANEL), first / PANEL % BLOCK_PANELS);
            for (k, line) in lines[block * per_block..][..per_block].iter_mut().enumerate() {
                for (n, packed) in line.0[panel].iter_mut().take(count).enumerate() {
                    let inputs = &rows[(n * per_block + k) * 2..][..2];
                    *packed = pair(inputs[0], inputs[1]);
                }
            }
        }
        Self { lines, per_block }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    pub(super) fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let pair = self.lines[panel / BLOCK_PANELS * self.per_block + k / 2].0[panel % BLOCK_PANELS][column];
        f32::from_bits(if k.is_multiple_of(2) { pair & 0xffff_0000 } else { pair << 16 })
    }

    /// Writes `y = x w^T`, `x` `[rows, inputs]`; the tiles of `y` have all rows and begin with a block.
    pub(super) fn product(&self, compute: &Compute, x: &[f32], inputs: usize, y: Grid<'_>) {
        let x = &Rounded::new(compute, x, inputs);
        compute.tiles(y, |y| compute.isa().run_pairs(Product { x, weights: self, y }));
    }
}

/// The product of rounded rows with a weight, as far as the outputs of one tile go.
struct Product<'a> {
    x: &'a Rounded,
    weights: &'a Pairs,
    y: Tile<'a>,
}

impl PairBody for Product<'_> {
    type Out = ();

    #[inline(always)]
    fn run<D: PairDot>(mut self, dot: D) {
        let (tall, end) = (self.x.tall(), self.y.rows().end);
        for begin in (0..tall).step_by(ROW_BLOCK) {
            self.many_rows(dot, begin..(begin + ROW_BLOCK).min(tall));
        }
        match end - tall {
            0 => {}
            1 => self.one_row(dot, tall),
            _ => self.some_rows(dot, tall..end),
        }
    }
}

impl Product<'_> {
    fn panels(&self) -> Range<usize> {
        self.y.columns().start / PANEL..self.y.columns().end.div_ceil(PANEL)
    }

    #[inline(always)]
    fn one_row<D: PairDot>(&mut self, dot: D, row: usize) {
        let (Range { start: mut panel, end }, rows) = (self.panels(), row..row + 1);
        // One row has few sums under way in a tile. Where the weight is in cache more panels hide the
        // additions' latency; where it comes from memory one stream is read faster than two.
        let in_cache = self.weights.bytes() <= CACHED_BYTES;
        while panel + 4 <= end && in_cache {
            self.tiles::<D, 1, 4>(dot, rows.clone(), panel);
            panel += 4;
        }
        while panel + 2 <= end {
            self.tiles::<D, 1, 2>(dot, rows.clone(), panel);
            panel += 2;
        }
        if panel < end {
            self.tiles::<D, 1, 1>(dot, rows, panel);
        }
    }

    /// `rows` are fewer than a tall tile's.
    #[inline(always)]
    fn some_rows<D: PairDot>(&mut self, dot: D, rows: Range<usize>) {
        let Range { start: mut panel, end } = self.panels();
        while panel < end {
            if panel + 2 <= end && D::Floats::WIDE {
                let left = self.tiles::<D, 8, 2>(dot, rows.clone(), panel);
                let left = self.tiles::<D, 4, 2>(dot, left, panel);
                let left = self.tiles::<D, 2, 2>(dot, left, panel);
                self.tiles::<D, 1, 2>(dot, left, panel);
                panel += 2;
            } else {
                let left = self.tiles::<D, 2, 1>(dot, rows.clone(), panel);
                self.tiles::<D, 1, 1>(dot, left, panel);
                panel += 1;
            }
        }
    }

    /// Computes the outputs of `P` panels for `rows`, `R` at a time; returns those that were too few for a
    /// tile.
    #[inline(always)]
    fn tiles<D: PairDot, const R: usize, const P: usize>(
        &mut self,
        dot: D,
        rows: Range<usize>,
        panel: usize,
    ) -> Range<usize> {
        let mut row = rows.start;
        while row + R <= rows.end {
            let of = self.x;
            let x: [&[u32]; R] = std::array::from_fn(|r| of.row(row + r));
            let mut sums = [[[0.0; PANEL]; P]; R];
            tile::<D, _, R, P>(dot, x, self.weights, panel, 0, &mut sums);
            self.write(row, panel, &sums);
            row += R;
        }
        row..rows.end
    }

    /// `rows` are whole tall tiles.
    #[inline(always)]
    fn many_rows<D: PairDot>(&mut self, dot: D, rows: Range<usize>) {
        let Range { start: mut panel, end } = self.panels();
        while panel < end {
            if panel + 2 <= end && D::Floats::WIDE {
                self.tall::<D, WIDE_ROWS, 2>(dot, rows.clone(), panel);
                panel += 2;
            } else if D::Floats::WIDE {
                self.tall::<D, WIDE_ROWS, 1>(dot, rows.clone(), panel);
                panel += 1;
            } else {
                self.tall::<D, NARROW_ROWS, 1>(dot, rows.clone(), panel);
                panel += 1;
            }
        }
    }

    /// Computes the outputs of `P` panels for `rows`, whole tiles of `R`.
    #[inline(always)]
    fn tall<D: PairDot, const R: usize, const P: usize>(&mut self, dot: D, rows: Range<usize>, panel: usize) {
        let pairs = self.weights.per_block;
        for begin in (0..pairs).step_by(DEPTH) {
            for row in rows.clone().step_by(R) {
                let mut sums = [[[0.0; PANEL]; P]; R];
                if begin > 0 {
                    self.read(row, panel, &mut sums);
                }
                let x = &self.x.tile::<R>(row)[begin..(begin + DEPTH).min(pairs)];
                tile::<D, _, R, P>(dot, x, self.weights, panel, begin, &mut sums);
                self.write(row, panel, &sums);
            }
        }
    }

    /// Reads what [`Self::write`] wrote.
    #[inline(always)]
    fn read<const R: usize, const P: usize>(
        &mut self,
        row: usize,
        panel: usize,
        sums: &mut [[[f32; PANEL]; P]; R],
    ) {
        let column = panel * PANEL - self.y.columns().start;
        for (r, sums) in sums.iter_mut().enumerate() {
            let (whole, rest) = self.y.row(row + r)[column..].as_chunks::<PANEL>();
            for (p, sums) in sums.iter_mut().enumerate() {
                match whole.get(p) {
                    Some(y) => *sums = *y,
                    None => sums[..rest.len()].copy_from_slice(rest),
                }
            }
        }
    }

    /// Writes the sums of `P` panels from `panel` on, of which the matrix's last may be narrower.
    #[inline(always)]
    fn write<const R: usize, const P: usize>(
        &mut self,
        row: usize,
        panel: usize,
        sums: &[[[f32; PANEL]; P]; R],
    ) {
        let column = panel * PANEL - self.y.columns().start;
        for (r, sums) in sums.iter().enumerate() {
            let (whole, rest) = self.y.row(row + r)[column..].as_chunks_mut::<PANEL>();
            for (p, sums) in sums.iter().enumerate() {
                match whole.get_mut(p) {
                    Some(y) => *y = *sums,
                    None => rest.copy_from_slice(&sums[..rest.len()]),
                }
            }
        }
    }
}

/// Adds the products of `R` rows' pairs `x`, the first of which is number `first`, with the `P` panels from
/// `panel` on; the sums stay in registers.
#[inline(always)]
fn tile<D: PairDot, X: Rows<R>, const R: usize, const P: usize>(
    dot: D,
    x: X,
    weights: &Pairs,
    panel: usize,
    first: usize,
    out: &mut [[[f32; PANEL]; P]; R],
) {
    let (simd, len) = (dot.floats(), x.pairs());
    let mut sums = [[simd.zero(); P]; R];
    for r in 0..R {
        for p in 0..P {
            sums[r][p] = simd.load(&out[r][p]);
        }
    }
    let lines: [&[Line]; P] = std::array::from_fn(|p| {
        &weights.lines[(panel + p) / BLOCK_PANELS * weights.per_block + first..][..len]
    });
    for k in 0..len {
        for (p, lines) in lines.iter().enumerate() {
            let line = lines.as_ptr().wrapping_add(k);
            let ahead = PREFETCH_BYTES[usize::from(R > 1)] + (panel + p) % BLOCK_PANELS * (4 * PANEL);
            simd.prefetch(line, ahead);
        }
        let mut w = [dot.load(&[0; PANEL]); P];
        for p in 0..P {
            w[p] = dot.load(&lines[p][..len][k].0[(panel + p) % BLOCK_PANELS]);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = x.at(k, r, len);
            for (sums, w) in sums.iter_mut().zip(w) {
                *sums = dot.add(*sums, w, x);
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            simd.store(sums[r][p], &mut out[r][p]);
        }
    }
}
