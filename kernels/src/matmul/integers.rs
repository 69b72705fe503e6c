//! Weights as whole numbers of 8 or 4 bits with a scale per 32 inputs of a row, and the product with them.
//!
//! `y[m][n] = sum over groups g, ascending, of (xs[m][g] * ws[n][g]) * D`, where `D = sum over k in g of
//! xc[m][k] * wc[n][k]` is the whole number that the codes give ([`super::activations`] makes those of `x`).
//! `D` is exact in whatever order it is summed; the sum over groups is one chain of fused multiply-adds. So
//! the bits depend neither on the batch nor on the instruction set.
//!
//! Weights are kept as unsigned codes, `wc = code - ZERO`: instructions multiply unsigned with signed bytes.

use super::activations::{Activations, Group};
use super::packed::PANEL;
use crate::arena::Arena;
use crate::compute::Compute;
use crate::grid::Tile;
use crate::isa::Body;
use crate::simd::Simd;

mod quantise;

/// Inputs that share a scale.
pub(super) const GROUP: usize = 32;
/// Panels that stand together in memory.
const BLOCK_PANELS: usize = 2;
/// Fours of a group's inputs.
const QUADS: usize = GROUP / 4;
/// How far ahead of its use memory is asked for, by a single row and by several; see `packed/plain.rs`.
const PREFETCH_BYTES: [usize; 2] = [4096, 8192];
/// Rows whose codes stay in the second-level cache while all weights pass by.
const ROW_BLOCK: usize = 128;

/// How many bits a whole number has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntBits {
    /// From -127 to 127.
    Eight,
    /// From -8 to 7.
    Four,
}

/// Codes of one panel and four inputs: byte `4 n + i` is output `n`'s of input `i`.
pub(super) type Quad = [u8; 4 * PANEL];

/// One group of a block's outputs.
pub(super) trait QuadGroup: Copy + Send + Sync + 'static {
    /// What a weight of 0 is coded as.
    const ZERO: i32;

    /// A group of weights that are all 0: every code is [`QuadGroup::ZERO`], every scale 0.
    const EMPTY: Self;

    /// Quantises a row's group of 32.
    fn codes(values: &[f32; GROUP]) -> ([u8; GROUP], u16);

    /// Stores the code of input `k` of panel `panel`'s output `column`.
    fn set(&mut self, panel: usize, column: usize, k: usize, code: u8);

    /// The code that [`QuadGroup::set`] stored at the same place.
    fn get(&self, panel: usize, column: usize, k: usize) -> u8;

    /// The scales as bf16.
    fn scales(&self) -> &[[u16; PANEL]; BLOCK_PANELS];

    /// The scales of all outputs as bf16, to be written.
    fn scales_mut(&mut self) -> &mut [[u16; PANEL]; BLOCK_PANELS];

    /// Codes of the fours `2 pair` and `2 pair + 1` of a panel.
    fn load<S: Simd>(&self, simd: S, panel: usize, pair: usize) -> [S::Bytes; 2];
}

/// A byte a weight.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Quad8 {
    codes: [[Quad; BLOCK_PANELS]; QUADS],
    scales: [[u16; PANEL]; BLOCK_PANELS],
}

/// Two weights a byte: of the fours `2 p` in the low halves, `2 p + 1` in the high halves of pair `p`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Quad4 {
    codes: [[Quad; BLOCK_PANELS]; QUADS / 2],
    scales: [[u16; PANEL]; BLOCK_PANELS],
}

/// A weight, `[N / 32][K / 32]` groups, both rounded up.
#[derive(Debug, Clone)]
pub(super) struct Integers<Q: Copy> {
    groups: Arena<Q>,
    per_block: usize,
}

impl<Q: QuadGroup> Integers<Q> {
    /// `x` as products with such weights want it.
    pub(super) fn quantise(compute: &Compute, x: &[f32], inputs: usize) -> Activations {
        Activations::quantise(compute, x, inputs, Q::ZERO)
    }

    /// `fill(n, row)` writes row `n`.
    pub(super) fn pack(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        let per_block = inputs.div_ceil(GROUP);
        let mut groups = Arena::filled(Q::EMPTY, outputs.div_ceil(BLOCK_PANELS * PANEL) * per_block);
        let mut row = vec![0.0; per_block * GROUP];
        for n in 0..outputs {
            fill(n, &mut row[..inputs]);
            let (panel, column) = (n / PANEL % BLOCK_PANELS, n % PANEL);
            let block = &mut groups[n / (BLOCK_PANELS * PANEL) * per_block..][..per_block];
            for (group, values) in block.iter_mut().zip(row.as_chunks().0) {
                let (codes, scale) = Q::codes(values);
                for (k, code) in codes.into_iter().enumerate() {
                    group.set(panel, column, k, code);
                }
                group.scales_mut()[panel][column] = scale;
            }
        }
        Self { groups, per_block }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.groups)
    }

    /// The value of one weight: exact, since a code and a scale have eight bits each.
    pub(super) fn element(&self, panel: usize, column: usize, k: usize) -> f32 {
        let group = &self.groups[panel / BLOCK_PANELS * self.per_block + k / GROUP];
        let code = i32::from(group.get(panel % BLOCK_PANELS, column, k % GROUP)) - Q::ZERO;
        let scale = group.scales()[panel % BLOCK_PANELS][column];
        code as f32 * f32::from_bits(u32::from(scale) << 16)
    }
}

// === impl QuadGroup ===

impl QuadGroup for Quad8 {
    const ZERO: i32 = 128;

    const EMPTY: Self =
        Self { codes: [[[128; 4 * PANEL]; BLOCK_PANELS]; QUADS], scales: [[0; PANEL]; BLOCK_PANELS] };

    fn codes(values: &[f32; GROUP]) -> ([u8; GROUP], u16) {
        quantise::eight(values)
    }

    fn set(&mut self, panel: usize, column: usize, k: usize, code: u8) {
        self.codes[k / 4][panel][4 * column + k % 4] = code;
    }

    fn get(&self, panel: usize, column: usize, k: usize) -> u8 {
        self.codes[k / 4][panel][4 * column + k % 4]
    }

    fn scales(&self) -> &[[u16; PANEL]; BLOCK_PANELS] {
        &self.scales
    }

    fn scales_mut(&mut self) -> &mut [[u16; PANEL]; BLOCK_PANELS] {
        &mut self.scales
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, panel: usize, pair: usize) -> [S::Bytes; 2] {
        let panel = panel % BLOCK_PANELS;
        [simd.load_bytes(&self.codes[2 * pair][panel]), simd.load_bytes(&self.codes[2 * pair + 1][panel])]
    }
}

impl QuadGroup for Quad4 {
    const ZERO: i32 = 8;

    const EMPTY: Self =
        Self { codes: [[[0x88; 4 * PANEL]; BLOCK_PANELS]; QUADS / 2], scales: [[0; PANEL]; BLOCK_PANELS] };

    fn codes(values: &[f32; GROUP]) -> ([u8; GROUP], u16) {
        quantise::four(values)
    }

    fn set(&mut self, panel: usize, column: usize, k: usize, code: u8) {
        let byte = &mut self.codes[k / 8][panel][4 * column + k % 4];
        *byte = if (k / 4).is_multiple_of(2) { *byte & 0xf0 | code } else { *byte & 0x0f | code << 4 };
    }

    fn get(&self, panel: usize, column: usize, k: usize) -> u8 {
        self.codes[k / 8][panel][4 * column + k % 4] >> (k / 4 % 2 * 4) & 15
    }

    fn scales(&self) -> &[[u16; PANEL]; BLOCK_PANELS] {
        &self.scales
    }

    fn scales_mut(&mut self) -> &mut [[u16; PANEL]; BLOCK_PANELS] {
        &mut self.scales
    }

    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, panel: usize, pair: usize) -> [S::Bytes; 2] {
        simd.load_halves(&self.codes[pair][panel % BLOCK_PANELS])
    }
}

// === impl IntMatMul ===

/// A product; see [`super::cpu`].
pub(super) struct IntMatMul<'a, Q: Copy> {
    pub(super) x: &'a Activations,
    /// The whole weight, of which this tile reads the blocks of its outputs.
    pub(super) weights: &'a Integers<Q>,
    /// All rows of the outputs to compute, whose first is a block's first.
    pub(super) y: Tile<'a>,
}

impl<Q: QuadGroup> Body for IntMatMul<'_, Q> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.y.rows().end;
        let panels = self.y.columns().start / PANEL..self.y.columns().end.div_ceil(PANEL);
        for begin in (0..rows).step_by(ROW_BLOCK) {
            let end = (begin + ROW_BLOCK).min(rows);
            let mut panel = panels.start;
            while panel + 2 <= panels.end && S::WIDE {
                let row = self.tiles::<S, 4, 2>(simd, begin, end, panel);
                let row = self.tiles::<S, 2, 2>(simd, row, end, panel);
                self.tiles::<S, 1, 2>(simd, row, end, panel);
                panel += 2;
            }
            while panel < panels.end {
                let row = self.tiles::<S, 2, 1>(simd, begin, end, panel);
                self.tiles::<S, 1, 1>(simd, row, end, panel);
                panel += 1;
            }
        }
    }
}

impl<Q: QuadGroup> IntMatMul<'_, Q> {
    /// Computes the outputs of `P` panels of a block for the rows `row..end`, `R` rows at a time; returns the
    /// first row that was too few for a tile.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        mut row: usize,
        end: usize,
        panel: usize,
    ) -> usize {
        let column = panel * PANEL - self.y.columns().start;
        let per_block = self.weights.per_block;
        let block = &self.weights.groups[panel / BLOCK_PANELS * per_block..][..per_block];
        while row + R <= end {
            let x: [&[Group]; R] = std::array::from_fn(|r| self.x.row(row + r));
            let sums = tile::<S, Q, R, P>(simd, x, block, panel % BLOCK_PANELS);
            for (r, sums) in sums.iter().enumerate() {
                let y = self.y.row(row + r);
                for (y, sums) in y[column..].chunks_mut(PANEL).zip(sums) {
                    y.copy_from_slice(&sums[..y.len()]);
                }
            }
            row += R;
        }
        row
    }
}

/// `R` rows against `P` panels of a block from its panel `first` on; the sums stay in registers.
#[inline(always)]
fn tile<S: Simd, Q: QuadGroup, const R: usize, const P: usize>(
    simd: S,
    x: [&[Group]; R],
    block: &[Q],
    first: usize,
) -> [[[f32; PANEL]; P]; R] {
    // Equal lengths by construction; said once more here, it spares the loop its bounds checks.
    let x: [&[Group]; R] = std::array::from_fn(|r| &x[r][..block.len()]);
    let mut sums = [[simd.zero(); P]; R];
    for (g, weights) in block.iter().enumerate() {
        prefetch::<S, Q, R>(simd, weights);
        let mut dots = [[simd.splat_int(0); P]; R];
        for (dots, x) in dots.iter_mut().zip(x) {
            *dots = [simd.splat_int(x[g].bias); P];
        }
        for pair in 0..QUADS / 2 {
            for (p, panel) in (first..first + P).enumerate() {
                let [low, high] = weights.load(simd, panel, pair);
                for r in 0..R {
                    dots[r][p] = simd.dot(dots[r][p], low, x[r][g].quads[2 * pair]);
                    dots[r][p] = simd.dot(dots[r][p], high, x[r][g].quads[2 * pair + 1]);
                }
            }
        }
        for (p, panel) in (first..first + P).enumerate() {
            let scales = simd.load_bf16(&weights.scales()[panel % BLOCK_PANELS]);
            for r in 0..R {
                let scale = simd.mul(scales, simd.splat(x[r][g].scale));
                sums[r][p] = simd.mul_add(simd.to_floats(dots[r][p]), scale, sums[r][p]);
            }
        }
    }
    let mut out = [[[0.0; PANEL]; P]; R];
    for r in 0..R {
        for p in 0..P {
            simd.store(sums[r][p], &mut out[r][p]);
        }
    }
    out
}

/// Asks memory for a group some way ahead.
#[inline(always)]
fn prefetch<S: Simd, Q: QuadGroup, const R: usize>(simd: S, group: &Q) {
    for line in 0..size_of::<Q>() / 64 {
        simd.prefetch(group, PREFETCH_BYTES[usize::from(R > 1)] + 64 * line);
    }
}

#[cfg(test)]
mod tests;
