//! Matrix product with a weight: `y[m][n] = sum over k of x[m][k] * w[n][k]`, `x` `[M, K]` and `y` `[M, N]`
//! row-major.
//!
//! The weight is packed into panels of 16 outputs, `[N / 16][K][16]`, so one load feeds 16 independent sums.
//! Each sum is one chain of fused multiply-adds over ascending `k`: the tile sizes below change speed, never
//! a bit, and a row's result is the same alone and in any batch. bf16 weights stay bf16 in memory and are
//! widened, exactly, when used.

use half::bf16;

use crate::compute::Compute;
use crate::grid::{Grid, Tile};
use crate::isa::Body;
use crate::lanes::LANES;
use crate::simd::Simd;

/// Outputs per panel.
const PANEL: usize = LANES;
/// What one multiplication, and one byte of the weight, takes one thread, in nanoseconds (`benches/roofline.rs`
/// on AVX-512: 120 a nanosecond, 60 bytes a nanosecond): decides who computes, nothing else.
const NS_PER_MULTIPLICATION: f64 = 1.0 / 120.0;
const NS_PER_BYTE: f64 = 1.0 / 60.0;
/// Rows of `x` that stay in the second-level cache while all panels pass by.
const ROW_BLOCK: usize = 64;

/// How a weight is kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Four bytes.
    F32,
    /// Two bytes, the upper half of an f32.
    Bf16,
}

/// A weight `[N, K]`, packed.
#[derive(Debug, Clone)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    panels: Panels,
}

#[derive(Debug, Clone)]
enum Panels {
    F32(Vec<Row<f32>>),
    Bf16(Vec<Row<u16>>),
}

/// One `k` of one panel.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
struct Row<E>([E; PANEL]);

trait Element: Copy + Default {
    fn load<S: Simd>(simd: S, from: &[Self; PANEL]) -> S::Vector;
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32; PANEL]) -> S::Vector {
        simd.load(from)
    }

    fn widen(self) -> f32 {
        self
    }

    fn narrow(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16; PANEL]) -> S::Vector {
        simd.load_bf16(from)
    }

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }

    fn narrow(value: f32) -> Self {
        bf16::from_f32(value).to_bits()
    }
}

impl PackedMatrix {
    /// Packs a weight of `outputs` rows and `inputs` columns; `fill(n, row)` writes row `n` into `row`
    /// `[inputs]`. With [`WeightType::Bf16`] values are rounded to bf16.
    pub fn pack(
        outputs: usize,
        inputs: usize,
        kept_as: WeightType,
        fill: impl FnMut(usize, &mut [f32]),
    ) -> Self {
        let panels = match kept_as {
            WeightType::F32 => Panels::F32(pack(outputs, inputs, fill)),
            WeightType::Bf16 => Panels::Bf16(pack(outputs, inputs, fill)),
        };
        Self { outputs, inputs, panels }
    }

    /// N.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes in memory, padding included.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(panels) => size_of_val(panels.as_slice()),
            Panels::Bf16(panels) => size_of_val(panels.as_slice()),
        }
    }

    /// Copies row `n` into `out` `[K]`: the embedding of token `n`.
    ///
    /// # Panics
    /// If `n` is not below N or `out` is not K long.
    pub fn copy_row(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.outputs && out.len() == self.inputs, "copy_row: out of range");
        let rows = n / PANEL * self.inputs..(n / PANEL + 1) * self.inputs;
        match &self.panels {
            Panels::F32(panels) => copy_column(&panels[rows], n % PANEL, out),
            Panels::Bf16(panels) => copy_column(&panels[rows], n % PANEL, out),
        }
    }
}

fn pack<E: Element>(outputs: usize, inputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Vec<Row<E>> {
    let mut panels = vec![Row([E::default(); PANEL]); outputs.div_ceil(PANEL) * inputs];
    let mut row = vec![0.0; inputs];
    for n in 0..outputs {
        fill(n, &mut row);
        let panel = &mut panels[n / PANEL * inputs..][..inputs];
        for (packed, value) in panel.iter_mut().zip(&row) {
            packed.0[n % PANEL] = E::narrow(*value);
        }
    }
    panels
}

fn copy_column<E: Element>(panel: &[Row<E>], column: usize, out: &mut [f32]) {
    for (out, row) in out.iter_mut().zip(panel) {
        *out = row.0[column].widen();
    }
}

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
    let rows = x.len() / w.inputs;
    assert!(x.len() == rows * w.inputs && y.len() == rows * w.outputs, "matmul: shapes disagree");
    let (inputs, outputs) = (w.inputs, w.outputs);
    let multiplications = NS_PER_MULTIPLICATION * (rows * inputs * outputs) as f64;
    let parts = compute.parts(multiplications.max(NS_PER_BYTE * w.bytes() as f64));
    let tile_columns = (outputs.div_ceil(2 * PANEL).div_ceil(parts) * 2 * PANEL).max(PANEL);
    compute.tiles(Grid::new(y, outputs, rows.max(1), tile_columns), |y| match &w.panels {
        Panels::F32(panels) => compute.isa().run(MatMul { x, panels, y, inputs }),
        Panels::Bf16(panels) => compute.isa().run(MatMul { x, panels, y, inputs }),
    });
}

struct MatMul<'a, E> {
    x: &'a [f32],
    /// Of the whole weight.
    panels: &'a [Row<E>],
    /// All rows of the outputs to compute, whose first is a panel's first.
    y: Tile<'a>,
    inputs: usize,
}

impl<E: Element> Body for MatMul<'_, E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.y.rows().end;
        let panels = self.y.columns().start / PANEL..self.y.columns().end.div_ceil(PANEL);
        for block in (0..rows).step_by(ROW_BLOCK) {
            let end = (block + ROW_BLOCK).min(rows);
            let mut panel = panels.start;
            while panel + 2 <= panels.end && S::WIDE {
                let row = self.tiles::<S, 8, 2>(simd, block, end, panel);
                let row = self.tiles::<S, 4, 2>(simd, row, end, panel);
                let row = self.tiles::<S, 2, 2>(simd, row, end, panel);
                self.tiles::<S, 1, 2>(simd, row, end, panel);
                panel += 2;
            }
            while panel < panels.end {
                let row = self.tiles::<S, 6, 1>(simd, block, end, panel);
                let row = self.tiles::<S, 2, 1>(simd, row, end, panel);
                self.tiles::<S, 1, 1>(simd, row, end, panel);
                panel += 1;
            }
        }
    }
}

impl<E: Element> MatMul<'_, E> {
    /// Computes the outputs of `P` panels for the rows `row..end`, `R` rows at a time; returns the first row
    /// that was too few for a tile.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        mut row: usize,
        end: usize,
        panel: usize,
    ) -> usize {
        let weights: [&[Row<E>]; P] =
            std::array::from_fn(|p| &self.panels[(panel + p) * self.inputs..][..self.inputs]);
        let column = panel * PANEL - self.y.columns().start;
        while row + R <= end {
            let x: [&[f32]; R] = std::array::from_fn(|r| &self.x[(row + r) * self.inputs..][..self.inputs]);
            let sums = tile(simd, x, weights);
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

/// `R` rows against `P` panels; the sums stay in registers.
#[inline(always)]
fn tile<S: Simd, E: Element, const R: usize, const P: usize>(
    simd: S,
    x: [&[f32]; R],
    weights: [&[Row<E>]; P],
) -> [[[f32; PANEL]; P]; R] {
    // Equal lengths by construction; said once more here, it spares the loop its bounds checks.
    let inputs = x[0].len();
    let x: [&[f32]; R] = std::array::from_fn(|r| &x[r][..inputs]);
    let weights: [&[Row<E>]; P] = std::array::from_fn(|p| &weights[p][..inputs]);
    let mut sums = [[simd.zero(); P]; R];
    for k in 0..inputs {
        let mut w = [simd.zero(); P];
        for p in 0..P {
            w[p] = E::load(simd, &weights[p][k].0);
        }
        for r in 0..R {
            let x = simd.splat(x[r][k]);
            for p in 0..P {
                sums[r][p] = simd.mul_add(x, w[p], sums[r][p]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, same_bits, values};

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

    #[test]
    fn bf16_weights_give_the_bits_of_the_same_values_in_f32() {
        let x = values(1, 5 * 48);
        let w: Vec<f32> = values(2, 70 * 48).iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
        let narrow = packed(&w, 48, WeightType::Bf16);
        let y = everywhere(|compute| product(compute, &x, &narrow));
        let wide = packed(&w, 48, WeightType::F32);
        assert!(same_bits(&y, &product(&Compute::single(), &x, &wide)));
        assert_eq!(2 * narrow.bytes(), wide.bytes());
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
