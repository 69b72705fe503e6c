//! Products with packed weights: every type, ragged sizes, and that no cut and no neighbour changes a bit.

use half::bf16;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::matmul::{
    Cut, GROUP, Out, Packed, Shape, Unit, Weights, launch, pack_bf16, pack_integers,
};
use keyway_kernels::matmul::oracle;

use super::{BF16, Lab, values, wide};

/// Relative to the sum of magnitudes: f32 sums of a few thousand terms.
const SUMS: f64 = 2e-6;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let bf16 = Shape { outputs: 72, inputs: 192, weights: Weights::Bf16 };
    // Few tiles of inputs; three splits, the last shorter; outputs that end inside a tile.
    let mut shapes = vec![
        (bf16, vec![1, 17]),
        (Shape { outputs: 130, inputs: 1600, ..bf16 }, vec![1, 3, 70]),
        (Shape { outputs: 40, inputs: 1280, weights: Weights::Int8 }, vec![2, 65]),
        (Shape { outputs: 66, inputs: 1280, weights: Weights::Int4 }, vec![1, 20]),
    ];
    if lab.is_large() {
        for weights in [Weights::Bf16, Weights::Int8, Weights::Int4] {
            shapes.push((Shape { outputs: 1024, inputs: 4096, weights }, vec![1, 8, 64, 200]));
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
    Ok(())
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
        let (chosen, plain) = (Cut::choose(shape, rows), Cut { rows: 16, apart: false });
        let out = weight.multiply(lab, x, rows, chosen)?;
        let tolerance = |i: usize| f64::abs(exact[i]) * BF16 + bound[i] * SUMS + 1e-30;
        lab.close(&format!("{rows} rows"), &out, &exact[..out.len()], tolerance)?;
        let mut cuts = vec![
            plain,
            Cut { rows: 16, apart: true },
            Cut { rows: 64, apart: true },
            Cut { rows: 64, apart: false },
        ];
        if shape.weights == Weights::Bf16 {
            cuts.extend([Cut { rows: 128, apart: false }, Cut { rows: 128, apart: true }]);
        }
        for cut in cuts {
            let other = weight.multiply(lab, x, rows, cut)?;
            lab.same(&format!("{rows} rows, {cut:?}"), &other, &out)?;
        }
        let row = out[..shape.outputs].to_vec();
        if let Some(first) = &first_row {
            lab.same("the first row in batches of several sizes", first, &row)?;
        }
        first_row = Some(row);
        weight.logits(lab, x, rows, &out)?;
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
struct Weight {
    packed: Packed,
    values: Vec<f32>,
    bias: Vec<bf16>,
}

impl Weight {
    fn new(lab: &mut Lab<'_>, shape: Shape, unit: Unit) -> Result<Self, String> {
        let Shape { outputs, inputs, weights } = shape;
        let raw = values(5, outputs * inputs);
        let bias = values(6, outputs);
        let device_bias = Some(lab.upload(&bias)?);
        if weights == Weights::Bf16 {
            let images = lab.upload(&pack_bf16(shape, &raw))?;
            let packed = Packed { shape, unit, images, scales: None, bias: device_bias };
            return Ok(Self { packed, values: wide(&raw), bias });
        }
        let codes: Vec<i8> = raw.iter().map(|v| (v.to_bits().wrapping_mul(37) >> 5) as u8 as i8).collect();
        let codes: Vec<i8> =
            if weights == Weights::Int4 { codes.iter().map(|c| c >> 4).collect() } else { codes };
        let scales: Vec<f32> =
            (0..inputs / GROUP * outputs).map(|i| 0.01 + (i % 13) as f32 * 0.003).collect();
        let value = |i: usize| f32::from(codes[i]) * scales[i % inputs / GROUP * outputs + i / inputs];
        let values = (0..codes.len()).map(value).collect();
        let images = lab.upload(&pack_integers(shape, &codes))?;
        let packed = Packed { shape, unit, images, scales: Some(lab.upload(&scales)?), bias: device_bias };
        Ok(Self { packed, values, bias })
    }

    fn multiply(
        &self,
        lab: &mut Lab<'_>,
        x: Slice<bf16>,
        rows: usize,
        cut: Cut,
    ) -> Result<Vec<bf16>, String> {
        let shape = self.packed.shape;
        let (y, partials) =
            (lab.poisoned(rows * shape.outputs)?, lab.poisoned(cut.partial_floats(shape, rows))?);
        lab.launch(launch(x, rows, &self.packed, cut, Out::Bf16(y), partials))?;
        lab.download(y)
    }

    /// The f32 output is the same in every bit however it is cut, and rounds to the bf16 one.
    fn logits(&self, lab: &mut Lab<'_>, x: Slice<bf16>, rows: usize, narrow: &[bf16]) -> Result<(), String> {
        let shape = self.packed.shape;
        let mut first: Option<Vec<f32>> = None;
        for (block, apart) in [(16, false), (64, true), (64, false), (128, true)] {
            let cut = Cut { rows: block, apart };
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
