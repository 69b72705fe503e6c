//! Matrix product with a weight: `y[m][n] = sum over k of x[m][k] * w[n][k]`, `x` `[M, K]` and `y` `[M, N]`
//! row-major.
//!
//! The weight is packed into panels of 16 outputs, so one load feeds 16 independent sums (`packed/plain.rs`).
//! Each sum is one chain of fused multiply-adds over ascending `k`: the tile sizes below change speed, never
//! a bit, and a row's result is the same alone and in any batch. How the weight is kept in memory is
//! `packed`'s business: narrow types are widened when used, to the f32 they stand for.

mod activations;
mod integers;
mod packed;
mod pairs;
mod rounded;

use std::ops::Range;

use crate::compute::Compute;
use crate::grid::{Grid, Tile};
use crate::isa::Body;
use crate::simd::Simd;
use integers::{IntMatMul, Integers, Quad4, Quad8};
use packed::{PANEL, Panels, Read};

pub use integers::IntBits;
pub use packed::{PackedMatrix, SmallFloats, WeightType};

/// What a multiplication, reading an element of the weight, and reading a byte of it take one thread at
/// least, in nanoseconds (`benches/roofline.rs` on AVX-512, the weight in cache): decides who computes,
/// nothing else.
const NS_PER_MULTIPLICATION: f64 = 1.0 / 120.0;
const NS_PER_WEIGHT: f64 = 1.0 / 40.0;
const NS_PER_BYTE: f64 = 1.0 / 100.0;
/// Outputs that a thread takes together at least: what one row computes at once.
const BLOCK: usize = 4 * PANEL;
/// Inputs after which many rows go on to the next tile, their sums kept in `y`: two panels' weights, eight
/// rows and what is asked for ahead stay in the first-level cache.
const DEPTH: usize = 256;
/// A weight up to this size is taken to be in the second-level cache, or near enough.
const CACHED_BYTES: usize = 1 << 20;
/// Rows of `x` that stay in the second-level cache while all panels pass by.
const ROW_BLOCK: usize = 64;

/// The definition, in float64; `w` is `[N, K]` row-major.
pub fn oracle(x: &[f32], w: &[f32], inputs: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    x.chunks(inputs).flat_map(|x| w.chunks(inputs).map(move |w| dot(x, w))).collect()
}

/// `y = x w^T`. Threads take panels, all rows and all of K each.
///
/// # Panics
/// If `x` is not whole rows of K, or `y` not as many rows of N.
pub fn cpu(compute: &Compute, x: &[f32], w: &PackedMatrix, y: &mut [f32]) {
    let (inputs, outputs) = (w.inputs(), w.outputs());
    let rows = x.len() / inputs;
    assert!(x.len() == rows * inputs && y.len() == rows * outputs, "matmul: shapes disagree");
    let weights = (inputs * outputs) as f64;
    let reading = (NS_PER_WEIGHT * weights).max(NS_PER_BYTE * w.bytes() as f64);
    let parts = compute.parts(reading.max(NS_PER_MULTIPLICATION * weights * rows as f64));
    let blocks = outputs.div_ceil(BLOCK);
    let tile_blocks = if parts == 1 { blocks } else { blocks.div_ceil(parts) };
    let tile_columns = (tile_blocks * BLOCK).max(BLOCK);
    let grid = Grid::new(y, outputs, rows.max(1), tile_columns);
    let (isa, in_cache) = (compute.isa(), w.bytes() <= CACHED_BYTES);
    match w.panels() {
        Panels::F32(weights) => compute.tiles(grid, |y| isa.run(MatMul { x, weights, y, inputs, in_cache })),
        Panels::Bf16(weights) => weights.product(compute, x, inputs, grid),
        Panels::Fp8(weights) => compute.tiles(grid, |y| isa.run(MatMul { x, weights, y, inputs, in_cache })),
        Panels::Mxfp4(weights) => {
            compute.tiles(grid, |y| isa.run(MatMul { x, weights, y, inputs, in_cache }));
        }
        Panels::Int8(weights) => {
            let x = Integers::<Quad8>::quantise(compute, x, inputs);
            compute.tiles(grid, |y| isa.run(IntMatMul { x: &x, weights, y }));
        }
        Panels::Int4(weights) => {
            let x = Integers::<Quad4>::quantise(compute, x, inputs);
            compute.tiles(grid, |y| isa.run(IntMatMul { x: &x, weights, y }));
        }
    }
}

struct MatMul<'a, W> {
    x: &'a [f32],
    /// The whole weight, of which this tile reads the panels of its outputs.
    weights: &'a W,
    /// All rows of the outputs to compute, whose first is a panel's first.
    y: Tile<'a>,
    inputs: usize,
    in_cache: bool,
}

impl<W: Read> Body for MatMul<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.y.rows().end;
        for begin in (0..rows).step_by(ROW_BLOCK) {
            let rows = begin..(begin + ROW_BLOCK).min(rows);
            if rows.len() == 1 {
                self.one_row(simd, begin);
            } else {
                self.some_rows(simd, rows);
            }
        }
    }
}

impl<W: Read> MatMul<'_, W> {
    fn panels(&self) -> Range<usize> {
        self.y.columns().start / PANEL..self.y.columns().end.div_ceil(PANEL)
    }

    #[inline(always)]
    fn one_row<S: Simd>(&mut self, simd: S, row: usize) {
        let (mut panel, end, rows, depth) =
            (self.panels().start, self.panels().end, row..row + 1, 0..self.inputs);
        // One row has few sums under way in a tile. Where the weight is in cache more panels hide the
        // additions' latency; where it comes from memory one stream is read faster than two.
        while panel + 4 <= end && self.in_cache {
            self.tiles::<S, 1, 4>(simd, rows.clone(), panel, depth.clone());
            panel += 4;
        }
        while panel + 2 <= end {
            self.tiles::<S, 1, 2>(simd, rows.clone(), panel, depth.clone());
            panel += 2;
        }
        if panel < end {
            self.tiles::<S, 1, 1>(simd, rows, panel, depth);
        }
    }

    #[inline(always)]
    fn some_rows<S: Simd>(&mut self, simd: S, rows: Range<usize>) {
        let (mut panel, end) = (self.panels().start, self.panels().end);
        // A scale's group is not cut.
        let whole = rows.len() <= 8 || self.weights.group() < self.inputs;
        let step = if whole { self.inputs.max(1) } else { DEPTH };
        let width = if S::WIDE { 2 } else { 1 };
        while panel < end {
            for begin in (0..self.inputs.max(1)).step_by(step) {
                let depth = begin..(begin + step).min(self.inputs);
                if panel + 2 <= end && S::WIDE {
                    let left = self.tiles::<S, 8, 2>(simd, rows.clone(), panel, depth.clone());
                    let left = self.tiles::<S, 4, 2>(simd, left, panel, depth.clone());
                    let left = self.tiles::<S, 2, 2>(simd, left, panel, depth.clone());
                    self.tiles::<S, 1, 2>(simd, left, panel, depth);
                } else {
                    let left = self.tiles::<S, 6, 1>(simd, rows.clone(), panel, depth.clone());
                    let left = self.tiles::<S, 2, 1>(simd, left, panel, depth.clone());
                    self.tiles::<S, 1, 1>(simd, left, panel, depth);
                }
            }
            panel += width;
        }
    }

    /// Adds to the outputs of `P` panels the products of the inputs `depth`, for `rows`, `R` rows at a time;
    /// returns the rows that were too few for a tile.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        rows: Range<usize>,
        panel: usize,
        depth: Range<usize>,
    ) -> Range<usize> {
        let column = panel * PANEL - self.y.columns().start;
        let mut row = rows.start;
        while row + R <= rows.end {
            let x: [&[f32]; R] =
                std::array::from_fn(|r| &self.x[(row + r) * self.inputs..][..self.inputs][depth.clone()]);
            let mut sums = [[[0.0; PANEL]; P]; R];
            if depth.start > 0 {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let y = self.y.row(row + r);
                    for (y, sums) in y[column..].chunks(PANEL).zip(sums) {
                        sums[..y.len()].copy_from_slice(y);
                    }
                }
            }
            tile::<S, W, R, P>(simd, x, self.weights, panel, depth.start, &mut sums);
            for (r, sums) in sums.iter().enumerate() {
                let y = self.y.row(row + r);
                for (y, sums) in y[column..].chunks_mut(PANEL).zip(sums) {
                    y.copy_from_slice(&sums[..y.len()]);
                }
            }
            row += R;
        }
        row..rows.end
    }
}

/// Adds the products of `R` rows' inputs from number `first` on with the `P` panels from `panel` on; the sums
/// stay in registers.
#[inline(always)]
fn tile<S: Simd, W: Read, const R: usize, const P: usize>(
    simd: S,
    x: [&[f32]; R],
    weights: &W,
    panel: usize,
    first: usize,
    out: &mut [[[f32; PANEL]; P]; R],
) {
    let inputs = x[0].len();
    let mut sums = [[simd.zero(); P]; R];
    for r in 0..R {
        for p in 0..P {
            sums[r][p] = simd.load(&out[r][p]);
        }
    }
    for begin in (0..inputs).step_by(weights.group()) {
        let len = weights.group().min(inputs - begin);
        // Equal lengths by construction; said once more here, it spares the loop its bounds checks.
        let x: [&[f32]; R] = std::array::from_fn(|r| &x[r][begin..begin + len]);
        let parts: [W::Part<'_>; P] = std::array::from_fn(|p| weights.part(panel + p, first + begin, len));
        let mut scales = [simd.zero(); P];
        for (p, scale) in scales.iter_mut().enumerate() {
            *scale = weights.scale(simd, panel + p, first + begin);
        }
        for k in (0..len).step_by(W::STEP) {
            W::prefetch::<S, R, P>(simd, parts, k);
            for step in 0..W::STEP {
                let mut w = [simd.zero(); P];
                for p in 0..P {
                    w[p] = W::load(simd, parts[p], len, k, step, scales[p]);
                }
                for r in 0..R {
                    let x = simd.splat(x[r][k + step]);
                    for p in 0..P {
                        sums[r][p] = simd.mul_add(x, w[p], sums[r][p]);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            simd.store(sums[r][p], &mut out[r][p]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, same_bits, values};
    use crate::quant::{decode_fp8, decode_mxfp4, e4m3};
    use crate::simd::round;

    fn packed(w: &[f32], inputs: usize, kept_as: WeightType) -> PackedMatrix {
        PackedMatrix::pack(w.len() / inputs, inputs, kept_as, |n, row| {
            row.copy_from_slice(&w[n * inputs..][..inputs]);
        })
    }

    fn product(compute: &Compute, x: &[f32], w: &PackedMatrix) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / w.inputs() * w.outputs()];
        cpu(compute, x, w, &mut y);
        y
    }

    #[test]
    fn agrees_with_the_oracle_everywhere() {
        let shapes = [(0, 5, 3), (1, 1, 1), (1, 33, 7), (2, 31, 64), (7, 32, 16), (9, 65, 100), (67, 8, 64)];
        for (m, n, k) in shapes {
            let (x, w) = (values(m as u64 + 1, m * k), values(n as u64, n * k));
            let y = everywhere(|compute| product(compute, &x, &packed(&w, k, WeightType::F32)));
            let magnitude = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let scale = oracle(&magnitude(&x), &magnitude(&w), k);
            // The worst chain of k roundings is k * 2^-24 of the sum of magnitudes.
            assert_close(&y, &oracle(&x, &w, k), &scale, (k as f64) * 6e-8);
        }
    }

    /// Both sides rounded, a product is that of the rounded numbers in f32.
    #[test]
    fn bf16_weights_give_the_bits_of_rounded_values_in_f32() {
        let rounded = |v: Vec<f32>| v.iter().map(|v| f32::from_bits(round(*v))).collect::<Vec<f32>>();
        for (m, n, k) in [(1, 70, 48), (5, 70, 48), (29, 40, 47), (29, 80, 801), (100, 33, 1), (3, 1, 2)] {
            let (x, w) = (values(1, m * k), values(2, n * k));
            let narrow = packed(&w, k, WeightType::Bf16);
            let y = everywhere(|compute| product(compute, &x, &narrow));
            let wide = packed(&rounded(w), k, WeightType::F32);
            assert!(same_bits(&y, &product(&Compute::single(), &rounded(x), &wide)), "{m}x{n}x{k}");
            assert_eq!(narrow.bytes() * k, wide.bytes() * k.div_ceil(2));
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden_in_bf16() {
        let w = packed(&[1.0; 3 * 64], 64, WeightType::Bf16);
        for odd in [f32::NAN, f32::INFINITY] {
            let mut x = [1.0; 64];
            x[37] = odd;
            let y = everywhere(|compute| product(compute, &x, &w));
            assert!(y.iter().all(|y| !y.is_finite()));
        }
    }

    /// FP8 codes and scales of `[n, k]`; no NaN.
    fn fp8(n: usize, k: usize, block: usize) -> (Vec<u8>, Vec<f32>) {
        let codes = (0..n * k).map(|i| (i * 167 % 256) as u8).map(|c| if c & 127 == 127 { 3 } else { c });
        (codes.collect(), values(8, n * k.div_ceil(block)))
    }

    #[test]
    fn fp8_weights_give_the_bits_of_the_same_values_in_f32() {
        for (n, k, block) in [(1, 1, 128), (37, 300, 128), (16, 256, 128), (40, 50, 16), (33, 7, 2)] {
            let (codes, scales) = fp8(n, k, block);
            let blocks = k.div_ceil(block);
            let narrow = PackedMatrix::pack_fp8(n, k, block, |n, row, row_scales| {
                row.copy_from_slice(&codes[n * k..][..k]);
                row_scales.copy_from_slice(&scales[n * blocks..][..blocks]);
            });
            let wide = PackedMatrix::pack(n, k, WeightType::F32, |n, row| {
                decode_fp8(&codes[n * k..][..k], &scales[n * blocks..][..blocks], block, row);
            });
            same_products(&narrow, &wide);
            let (mut row, mut row_scales) = (vec![0; k], vec![0.0; blocks]);
            for i in 0..n {
                narrow.copy_fp8_row(i, &mut row, &mut row_scales);
                assert_eq!(row, codes[i * k..][..k]);
                assert!(same_bits(&row_scales, &scales[i * blocks..][..blocks]));
            }
        }
    }

    #[test]
    fn mxfp4_weights_give_the_bits_of_the_same_values_in_f32() {
        for (n, k) in [(1, 32), (37, 320), (16, 64), (48, 96)] {
            let codes: Vec<u8> = (0..n * k / 2).map(|i| (i * 167 % 256) as u8).collect();
            // Beyond these scales products overflow; 0 is a subnormal number.
            let scales: Vec<u8> =
                (0..n * k / 32).map(|i| if i % 9 == 0 { 0 } else { 100 + (i * 7 % 50) as u8 }).collect();
            let narrow = PackedMatrix::pack_mxfp4(n, k, |n, row, row_scales| {
                row.copy_from_slice(&codes[n * k / 2..][..k / 2]);
                row_scales.copy_from_slice(&scales[n * k / 32..][..k / 32]);
            });
            let wide = PackedMatrix::pack(n, k, WeightType::F32, |n, row| {
                decode_mxfp4(&codes[n * k / 2..][..k / 2], &scales[n * k / 32..][..k / 32], row);
            });
            same_products(&narrow, &wide);
            // Four bits an element and sixteen for 32 of them.
            assert_eq!(narrow.bytes(), n.div_ceil(16) * 16 * k * 9 / 16);
            let (mut row, mut exponents) = (vec![0; k / 2], vec![0; k / 32]);
            for i in 0..n {
                narrow.copy_mxfp4_row(i, &mut row, &mut exponents);
                assert_eq!(
                    (row.as_slice(), exponents.as_slice()),
                    (&codes[i * k / 2..][..k / 2], &scales[i * k / 32..][..k / 32])
                );
            }
        }
    }

    fn same_products(narrow: &PackedMatrix, wide: &PackedMatrix) {
        let (n, k) = (wide.outputs(), wide.inputs());
        for m in [1, 2, 7, 17] {
            let x = values(m as u64, m * k);
            let y = everywhere(|compute| product(compute, &x, narrow));
            assert!(same_bits(&y, &product(&Compute::single(), &x, wide)), "{m}x{n}x{k}");
        }
        let (mut a, mut b) = (vec![0.0; k], vec![1.0; k]);
        for row in 0..n {
            narrow.copy_row(row, &mut a);
            wide.copy_row(row, &mut b);
            assert!(same_bits(&a, &b));
        }
    }

    #[test]
    fn every_code_is_decoded_alike_everywhere() {
        // One input: each product is a weight.
        let fp8 = PackedMatrix::pack_fp8(256, 1, 128, |n, code, scale| {
            (code[0], scale[0]) = (n as u8, 1.0);
        });
        let y = everywhere(|compute| product(compute, &[1.0], &fp8));
        for code in 0..=255_u8 {
            let (actual, exact) = (y[usize::from(code)], e4m3(code));
            // A sum starts at 0, which makes -0 a 0.
            assert!(actual == exact || actual.is_nan() && exact.is_nan(), "{code}: {actual} {exact}");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_every_batch() {
        let w = packed(&values(3, 40 * 50), 50, WeightType::F32);
        let x = values(4, 70 * 50);
        let all = product(&Compute::single(), &x, &w);
        for rows in [1, 2, 3, 5, 6, 7, 8, 11, 13, 15, 64, 65, 69] {
            assert!(
                same_bits(&all[..rows * 40], &product(&Compute::single(), &x[..rows * 50], &w)),
                "{rows}"
            );
        }
    }

    /// More rows than a tile go through the inputs in steps, their sums kept in between.
    #[test]
    fn steps_through_the_inputs_do_not_change_a_bit() {
        let (rows, outputs, inputs) = (13, 50, 2 * DEPTH + 40);
        let (x, w) = (values(6, rows * inputs), values(7, outputs * inputs));
        for kept_as in [WeightType::F32, WeightType::Bf16] {
            let w = packed(&w, inputs, kept_as);
            let together = everywhere(|compute| product(compute, &x, &w));
            let alone = x.chunks(inputs).flat_map(|x| product(&Compute::single(), x, &w));
            assert!(same_bits(&together, &alone.collect::<Vec<f32>>()));
        }
    }

    #[test]
    fn a_row_is_copied_back_exactly() {
        let w = values(5, 37 * 9);
        let matrix = packed(&w, 9, WeightType::F32);
        let mut row = [0.0; 9];
        for n in [0, 31, 32, 36] {
            matrix.copy_row(n, &mut row);
            assert!(same_bits(&row, &w[n * 9..][..9]));
        }
    }
}
