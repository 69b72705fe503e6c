//! Products with packed weights: every type, ragged sizes, and that no cut and no neighbour changes a bit.

use half::bf16;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::matmul::{
    Out, Packed, ProductCut, Shape, TILE, Unit, Weights, launch, launch_split, pack_fp8, pack_mxfp4,
};
use keyway_kernels::matmul::oracle;
use keyway_kernels::quant::{e2m1, e4m3, e8m0};

use super::packed::{Made, NARROW};
use super::{BF16, Lab, values, wide};

/// Relative to the sum of magnitudes: f32 sums of a few thousand terms.
const SUMS: f64 = 2e-6;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let bf16 = Shape { outputs: 72, inputs: 192, weights: Weights::Bf16 };
    // Few tiles of inputs; three splits, the last shorter; outputs that end inside a tile.
    let mut shapes = vec![
        (bf16, vec![1, 17, 300]),
        (Shape { outputs: 130, inputs: 1600, ..bf16 }, vec![1, 3, 70]),
        // Two splits; more rows than any block takes.
        (Shape { outputs: 130, inputs: 1088, ..bf16 }, vec![260]),
        (Shape { outputs: 40, inputs: 1280, weights: Weights::Int8 }, vec![2, 65]),
        (Shape { outputs: 66, inputs: 1280, weights: Weights::Int4 }, vec![1, 20]),
        (Shape { outputs: 72, inputs: 1280, weights: Weights::Fp8 }, vec![1, 20, 65]),
        (Shape { outputs: 70, inputs: 1344, weights: Weights::Mxfp4 }, vec![1, 20, 65]),
        // Warps beside each other in a block, and two splits at once.
        (Shape { outputs: 4100, inputs: 1024, weights: Weights::Int4 }, vec![3]),
    ];
    if lab.is_large() {
        for weights in NARROW.into_iter().chain([Weights::Bf16]) {
            shapes.push((Shape { outputs: 1024, inputs: 4096, weights }, vec![1, 8, 64, 200]));
            // Blocks of more outputs, the last with some that do not exist.
            shapes.push((Shape { outputs: 8200, inputs: 1280, weights }, vec![1, 16]));
        }
        shapes.push((Shape { outputs: 2000, inputs: 1024, ..bf16 }, vec![1, 333]));
    }
    for (shape, counts) in shapes {
        for unit in [Unit::Warp, Unit::Warpgroup] {
            if unit == Unit::Warpgroup && (shape.weights != Weights::Bf16 || !lab.has_warpgroups()) {
                continue;
            }
            one(lab, shape, unit, &counts).map_err(|fault| format!("{shape:?}, {unit:?}: {fault}"))?;
            lab.clear();
        }
    }
    every_code(lab)
}

/// Weights of one code each, by a row with a single one: what each code is worth, exactly.
fn every_code(lab: &mut Lab<'_>) -> Result<(), String> {
    const PLACE: usize = 5;
    let fp8 = Shape { outputs: 256, inputs: 128, weights: Weights::Fp8 };
    let mut codes = vec![0; fp8.outputs * fp8.inputs];
    for (n, row) in codes.chunks_mut(fp8.inputs).enumerate() {
        row[PLACE] = n as u8;
    }
    let scales: Vec<f32> = (0..256).map(|n| 0.3 + n as f32).collect();
    let worth = |n: usize| if n & 127 == 127 { 480.0_f32.copysign(127.5 - n as f32) } else { e4m3(n as u8) };
    let exact: Vec<f32> = (0..256).map(|n| worth(n) * scales[n]).collect();
    single_one(lab, fp8, &pack_fp8(fp8, &codes), &scales, PLACE, &exact)?;
    let mxfp4 = Shape { outputs: 128, inputs: 64, weights: Weights::Mxfp4 };
    let exponents = [0, 1, 100, 127, 128, 252, 253, 255];
    let mut codes = vec![0; mxfp4.outputs * mxfp4.inputs / 2];
    for (n, row) in codes.chunks_mut(mxfp4.inputs / 2).enumerate() {
        row[PLACE / 2] = (n as u8 % 16) << (PLACE % 2 * 4);
    }
    let powers: Vec<u8> = (0..128).flat_map(|n| [exponents[n / 16], 127]).collect();
    let exact: Vec<f32> = (0..128).map(|n| e2m1(n as u8) * e8m0(exponents[n / 16])).collect();
    single_one(lab, mxfp4, &pack_mxfp4(mxfp4, &codes, &powers), &[], PLACE, &exact)
}

/// The row of zeros with a one at `place` by a weight gives `exact`, but that a sum of zeros is 0, and any
/// NaN for NaN.
fn single_one(
    lab: &mut Lab<'_>,
    shape: Shape,
    images: &[u8],
    scales: &[f32],
    place: usize,
    exact: &[f32],
) -> Result<(), String> {
    let scales = if scales.is_empty() { None } else { Some(lab.upload(scales)?) };
    let packed = Packed { shape, unit: Unit::Warp, images: lab.upload(images)?, scales, bias: None };
    let mut x = vec![bf16::ZERO; shape.inputs];
    x[place] = bf16::ONE;
    let (x, y, none) = (lab.upload(&x)?, lab.poisoned(shape.outputs)?, lab.poisoned(0)?);
    lab.launch(launch(x, 1, &packed, cut(16, false), Out::F32(y), none))?;
    let y = lab.download(y)?;
    let plain = |v: &f32| if v.is_nan() { f32::NAN } else { v + 0.0 };
    let (y, exact): (Vec<f32>, Vec<f32>) = (y.iter().map(plain).collect(), exact.iter().map(plain).collect());
    lab.same(&format!("codes of {:?}", shape.weights), &y, &exact)
}

/// Blocks that share no weights.
pub(super) fn cut(rows: usize, apart: bool) -> ProductCut {
    ProductCut { rows, apart, clustered: false }
}

fn one(lab: &mut Lab<'_>, shape: Shape, unit: Unit, counts: &[usize]) -> Result<(), String> {
    let weight = Weight::new(lab, shape, unit)?;
    let most = counts.iter().copied().max().unwrap_or(0);
    let x = values(11, most * shape.inputs);
    let exact = exact(&x, &weight, shape);
    let magnitudes = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<f32>>();
    let bound = oracle(&magnitudes(&wide(&x)), &magnitudes(&weight.values), shape.inputs);
    let mut first_row: Option<Vec<bf16>> = None;
    for &rows in counts {
        let x = lab.upload(&x[..rows * shape.inputs])?;
        let (chosen, plain) = (ProductCut::choose(shape, rows), cut(16, false));
        let out = weight.multiply(lab, x, rows, chosen)?;
        let tolerance = |i: usize| f64::abs(exact[i]) * BF16 + bound[i] * SUMS + 1e-30;
        lab.close(&format!("{rows} rows"), &out, &exact[..out.len()], tolerance)?;
        let mut cuts = vec![plain, cut(16, true), cut(64, true), cut(64, false)];
        if shape.weights == Weights::Bf16 {
            cuts.extend([cut(128, false), cut(128, true)]);
            cuts.extend([192, 256].map(|rows| cut(rows, false)));
        }
        for cut in cuts {
            let other = weight.multiply(lab, x, rows, cut)?;
            lab.same(&format!("{rows} rows, {cut:?}"), &other, &out)?;
            if unit == Unit::Warpgroup && cut.rows > 16 {
                let other = weight.by_two_blocks(lab, x, rows, cut)?;
                lab.same(&format!("{rows} rows by two blocks, {cut:?}"), &other, &out)?;
            }
        }
        for apart in [false, true] {
            let other = weight.split_in_twos(lab, x, rows, apart)?;
            lab.close(&format!("{rows} rows, splits of two tiles"), &other, &exact[..out.len()], tolerance)?;
        }
        let row = out[..shape.outputs].to_vec();
        if let Some(first) = &first_row {
            lab.same("the first row in batches of several sizes", first, &row)?;
        }
        first_row = Some(row);
        weight.logits(lab, x, rows, &out)?;
        if let Some(in_bf16) = weight.in_bf16 {
            let other = multiply(lab, x, rows, &in_bf16, chosen)?;
            lab.same(&format!("{rows} rows by the same values in bf16"), &other, &out)?;
        }
    }
    Ok(())
}

/// Row-major sums with the bias, in float64.
fn exact(x: &[bf16], weight: &Weight, shape: Shape) -> Vec<f64> {
    let mut exact = oracle(&wide(x), &weight.values, shape.inputs);
    for row in exact.chunks_mut(shape.outputs) {
        for (sum, bias) in row.iter_mut().zip(&weight.bias) {
            *sum += f64::from(bias.to_f32());
        }
    }
    exact
}

/// A weight on the device, and what it is worth.
pub(super) struct Weight {
    pub(super) packed: Packed,
    values: Vec<f32>,
    bias: Vec<bf16>,
    /// The same in bf16, where its values are.
    in_bf16: Option<Packed>,
}

/// The scale at `i`: none equal to its neighbours, some zero, negative, subnormal or so large that a group
/// alone decides.
fn scale(i: usize) -> f32 {
    match i % 31 {
        3 => 0.0,
        7 => -0.02,
        11 => 1e-39,
        19 => 1e30,
        _ => 0.01 + (i % 13) as f32 * 0.003,
    }
}

impl Weight {
    pub(super) fn new(lab: &mut Lab<'_>, shape: Shape, unit: Unit) -> Result<Self, String> {
        let Shape { outputs, weights, .. } = shape;
        let made = Made::new(shape, 5, scale);
        let bias = values(6, outputs);
        let device_bias = Some(lab.upload(&bias)?);
        let scales = if made.scales.is_empty() { None } else { Some(lab.upload(&made.scales)?) };
        let packed = Packed { shape, unit, images: lab.upload(&made.images)?, scales, bias: device_bias };
        let in_bf16 = if weights == Weights::Mxfp4 {
            let images = lab.upload(&made.images_in_bf16(shape))?;
            Some(Packed { shape: Shape { weights: Weights::Bf16, ..shape }, images, ..packed })
        } else {
            None
        };
        Ok(Self { packed, values: made.values, bias, in_bf16 })
    }

    pub(super) fn multiply(
        &self,
        lab: &mut Lab<'_>,
        x: Slice<bf16>,
        rows: usize,
        cut: ProductCut,
    ) -> Result<Vec<bf16>, String> {
        multiply(lab, x, rows, &self.packed, cut)
    }

    /// By two blocks, which go through many pieces of work: a small product has fewer pieces than a GPU has
    /// processors.
    pub(super) fn by_two_blocks(
        &self,
        lab: &mut Lab<'_>,
        x: Slice<bf16>,
        rows: usize,
        cut: ProductCut,
    ) -> Result<Vec<bf16>, String> {
        let shape = self.packed.shape;
        let y = lab.poisoned(rows * shape.outputs)?;
        let partials = lab.poisoned(cut.partial_floats(shape, rows))?;
        let mut launches = launch(x, rows, &self.packed, cut, Out::Bf16(y), partials);
        let grid = &mut launches[0].grid;
        assert_eq!(grid[1..], [1, 1], "blocks of these products stay");
        grid[0] = grid[0].min(2);
        lab.launch(launches)?;
        lab.download(y)
    }

    /// By splits as short as they can be, whatever the weight's shape says.
    fn split_in_twos(
        &self,
        lab: &mut Lab<'_>,
        x: Slice<bf16>,
        rows: usize,
        apart: bool,
    ) -> Result<Vec<bf16>, String> {
        let shape = self.packed.shape;
        let y = lab.poisoned(rows * shape.outputs)?;
        let partials = lab.poisoned((shape.inputs / TILE).div_ceil(2) * rows * shape.outputs)?;
        lab.launch(launch_split(x, rows, &self.packed, cut(64, apart), 2, Out::Bf16(y), partials))?;
        lab.download(y)
    }

    /// The f32 output is the same in every bit however it is cut, and rounds to the bf16 one.
    fn logits(&self, lab: &mut Lab<'_>, x: Slice<bf16>, rows: usize, narrow: &[bf16]) -> Result<(), String> {
        let shape = self.packed.shape;
        let mut first: Option<Vec<f32>> = None;
        for (block, apart) in [(16, false), (64, true), (64, false), (128, true), (256, false)] {
            let cut = cut(block, apart);
            let y = lab.poisoned(rows * shape.outputs)?;
            let partials = lab.poisoned(cut.partial_floats(shape, rows))?;
            lab.launch(launch(x, rows, &self.packed, cut, Out::F32(y), partials))?;
            let y = lab.download(y)?;
            let rounded: Vec<bf16> = y.iter().map(|v| bf16::from_f32(*v)).collect();
            lab.same("logits, rounded", &rounded, narrow)?;
            lab.same(&format!("logits, {cut:?}"), &y, first.as_ref().unwrap_or(&y))?;
            first = Some(y);
        }
        Ok(())
    }
}

fn multiply(
    lab: &mut Lab<'_>,
    x: Slice<bf16>,
    rows: usize,
    weight: &Packed,
    cut: ProductCut,
) -> Result<Vec<bf16>, String> {
    let shape = weight.shape;
    let (y, partials) = (lab.poisoned(rows * shape.outputs)?, lab.poisoned(cut.partial_floats(shape, rows))?);
    lab.launch(launch(x, rows, weight, cut, Out::Bf16(y), partials))?;
    lab.download(y)
}
