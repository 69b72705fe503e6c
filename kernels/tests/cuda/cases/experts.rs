//! The experts of a layer: grouped products with their gates, in the order of places and of slots, against
//! the dense product of each expert alone and the float64 oracle; and that no row's result depends on its
//! company or on how the work is cut.

use half::bf16;
use keyway_kernels::cuda::matmul::{self, Out, Packed, ProductCut, Shape, Unit, Weights};
use keyway_kernels::cuda::moe::{Ending, ExpertWeights, ProductRows, combine, product};
use keyway_kernels::elementwise::{ClampedGate, clamped_gate_mul_oracle, silu_mul_oracle};
use keyway_kernels::matmul::oracle;

use super::moe::{choices, grouped};
use super::packed::{Made, NARROW};
use super::{BF16, Lab, values, wide};

/// Weights in bf16, by both units.
pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let mut layers = vec![
        Layer { experts: 5, top: 2, tokens: 1, shape: BF16_SHAPE },
        Layer { experts: 5, top: 2, tokens: 37, shape: BF16_SHAPE },
        // More rows of one expert than any block takes.
        Layer { experts: 2, top: 2, tokens: 140, shape: BF16_SHAPE },
        // Three splits; every expert of every token.
        Layer { experts: 2, top: 2, tokens: 21, shape: Shape { outputs: 80, inputs: 1600, ..BF16_SHAPE } },
    ];
    if lab.is_large() {
        layers.extend([1, 64, 1024].map(|tokens| Layer { experts: 16, top: 8, tokens, shape: LARGE }));
    }
    check_all(lab, layers)
}

/// Weights of 8 and 4 bits: a case of its own, since the oracles take long.
pub(crate) mod narrow {
    use super::{BF16_SHAPE, LARGE, Lab, Layer, NARROW, Shape, Weights, check_all};

    pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
        let of = |(weights, top)| Layer {
            experts: 3,
            top,
            tokens: 9,
            shape: Shape { inputs: 256, weights, ..BF16_SHAPE },
        };
        let mut layers: Vec<Layer> = NARROW.into_iter().zip([1, 2, 2, 1]).map(of).collect();
        if lab.is_large() {
            let shape = Shape { weights: Weights::Fp8, ..LARGE };
            layers.extend([1, 64, 1024].map(|tokens| Layer { experts: 16, top: 8, tokens, shape }));
        }
        check_all(lab, layers)
    }
}

const BF16_SHAPE: Shape = Shape { outputs: 48, inputs: 192, weights: Weights::Bf16 };
const LARGE: Shape = Shape { outputs: 1408, inputs: 2816, weights: Weights::Bf16 };

fn check_all(lab: &mut Lab<'_>, layers: Vec<Layer>) -> Result<(), String> {
    for layer in layers {
        for unit in [Unit::Warp, Unit::Warpgroup] {
            let bf16 = layer.shape.weights == Weights::Bf16;
            if unit == Unit::Warpgroup && !(bf16 && lab.has_warpgroups()) {
                continue;
            }
            layer.check(lab, unit).map_err(|fault| format!("{layer:?}, {unit:?}: {fault}"))?;
            lab.clear();
        }
    }
    Ok(())
}

/// The first product of a layer with a gate, and its second one back to the tokens' width.
#[derive(Debug, Clone, Copy)]
struct Layer {
    experts: usize,
    top: usize,
    tokens: usize,
    /// Of the first product, gates and values together.
    shape: Shape,
}

/// Weights of one product, of all experts.
pub(super) struct Weight {
    pub(super) device: ExpertWeights,
    /// Of each expert, as rows of outputs.
    values: Vec<Vec<f32>>,
    biases: Vec<Vec<bf16>>,
}

impl Weight {
    pub(super) fn new(
        lab: &mut Lab<'_>,
        count: usize,
        shape: Shape,
        unit: Unit,
        seed: u64,
    ) -> Result<Self, String> {
        let (mut images, mut scales, mut values_of) = (Vec::new(), Vec::new(), Vec::new());
        for expert in 0..count {
            let scale = |i: usize| 0.001 + ((i + expert) % 13) as f32 * 0.0003;
            let made = Made::new(shape, seed + expert as u64, scale);
            images.extend(made.images);
            scales.extend(made.scales);
            values_of.push(made.values);
        }
        let biases: Vec<Vec<bf16>> =
            (0..count).map(|expert| values(seed + 90 + expert as u64, shape.outputs)).collect();
        let device = ExpertWeights {
            count,
            shape,
            unit,
            images: lab.upload(&images)?,
            scales: if scales.is_empty() { None } else { Some(lab.upload(&scales)?) },
            bias: Some(lab.upload(&biases.concat())?),
        };
        Ok(Self { device, values: values_of, biases })
    }

    /// One row by one expert in float64, and the sum of magnitudes.
    fn exact(&self, expert: usize, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let inputs = self.device.shape.inputs;
        let magnitudes = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<f32>>();
        let mut sums = oracle(x, &self.values[expert], inputs);
        let bounds = oracle(&magnitudes(x), &magnitudes(&self.values[expert]), inputs);
        for (sum, bias) in sums.iter_mut().zip(&self.biases[expert]) {
            *sum += f64::from(bias.to_f32());
        }
        (sums, bounds)
    }

    /// One expert's weight alone, for `matmul.rs`.
    fn alone(&self, expert: usize) -> Packed {
        let ExpertWeights { shape, unit, images, scales, bias, .. } = self.device;
        let part = shape.packed_bytes();
        let per_expert = shape.scales();
        let cut = |len: usize, of: keyway_kernels::cuda::Slice<u8>| {
            keyway_kernels::cuda::Slice::new(of.buffer, of.offset + (expert * len) as u64, len)
        };
        Packed {
            shape,
            unit,
            images: cut(part, images),
            scales: scales.map(|s| cut(per_expert * 4, s.cast()).cast()),
            bias: bias.map(|b| cut(shape.outputs * 2, b.cast()).cast()),
        }
    }
}

impl Layer {
    fn check(self, lab: &mut Lab<'_>, unit: Unit) -> Result<(), String> {
        let weight = Weight::new(lab, self.experts, self.shape, unit, 40)?;
        let x = values(3, self.tokens * self.shape.inputs);
        for kind in 0..3 {
            let ids = choices(kind, self.tokens * self.top, self.experts);
            let plain = self.first_product(lab, &weight, &x, &ids, Ending::Plain, 16)?;
            self.is_the_dense_product(lab, &weight, &x, &ids, &plain)?;
            for &rows in self.cuts(unit) {
                let other = self.first_product(lab, &weight, &x, &ids, Ending::Plain, rows)?;
                lab.same(&format!("{rows} rows"), &other, &plain)?;
            }
            for ending in [Ending::Silu, Ending::Clamped(ClampedGate { alpha: 1.702, limit: 7.0 })] {
                let gated = self.first_product(lab, &weight, &x, &ids, ending, 16)?;
                self.has_the_gate(lab, &weight, &x, &ids, ending, &gated)?;
                for &rows in self.cuts(unit) {
                    let other = self.first_product(lab, &weight, &x, &ids, ending, rows)?;
                    lab.same(&format!("{ending:?} by {rows} rows"), &other, &gated)?;
                }
            }
            for rows in [16, 64] {
                self.in_slot_order(lab, &weight, &ids, rows)?;
            }
        }
        self.whole(lab, &weight, unit, &x)
    }

    fn cuts(self, unit: Unit) -> &'static [usize] {
        match (self.shape.weights, unit) {
            (Weights::Bf16, Unit::Warpgroup) => &[64, 128, 256],
            (Weights::Bf16, Unit::Warp) => &[64, 128],
            _ => &[64],
        }
    }

    /// By slot, so that groupings can be compared.
    fn first_product(
        self,
        lab: &mut Lab<'_>,
        weight: &Weight,
        x: &[bf16],
        ids: &[u32],
        ending: Ending,
        rows: usize,
    ) -> Result<Vec<bf16>, String> {
        let to = grouped(lab, ids, self.experts, rows)?;
        let columns = if ending == Ending::Plain { self.shape.outputs } else { self.shape.outputs / 2 };
        let (x, y) = (lab.upload(x)?, lab.poisoned(ids.len() * columns)?);
        let mut launch = product(x, ProductRows::OfTokens { top: self.top }, &weight.device, &to, ending, y);
        if let Some(launch) = launch.as_mut().filter(|launch| launch.threads == 384 && rows > 64) {
            // Blocks that stay have several pieces of work each, as in a large product.
            launch.grid[0] = launch.grid[0].min(2);
        }
        lab.launch(launch)?;
        let (y, places) = (lab.download(y)?, lab.download(to.places)?);
        Ok(places.iter().flat_map(|p| y[*p as usize * columns..][..columns].to_vec()).collect())
    }

    /// Rows that stay in the order of slots have the bits of those in the order of places.
    fn in_slot_order(
        self,
        lab: &mut Lab<'_>,
        weight: &Weight,
        ids: &[u32],
        rows: usize,
    ) -> Result<(), String> {
        let Shape { outputs, inputs, .. } = self.shape;
        let x = values(5, ids.len() * inputs);
        let to = grouped(lab, ids, self.experts, rows)?;
        let places = lab.download(to.places)?;
        let mut by_place = x.clone();
        for (row, place) in x.chunks(inputs).zip(&places) {
            by_place[*place as usize * inputs..][..inputs].copy_from_slice(row);
        }
        let (x, by_place) = (lab.upload(&x)?, lab.upload(&by_place)?);
        let (y, expected) = (lab.poisoned(ids.len() * outputs)?, lab.poisoned(ids.len() * outputs)?);
        lab.launch(product(x, ProductRows::OfSlots, &weight.device, &to, Ending::Plain, y))?;
        lab.launch(product(by_place, ProductRows::OfPlaces, &weight.device, &to, Ending::Plain, expected))?;
        let (y, expected): (Vec<bf16>, Vec<bf16>) = (lab.download(y)?, lab.download(expected)?);
        let expected: Vec<bf16> =
            places.iter().flat_map(|p| expected[*p as usize * outputs..][..outputs].to_vec()).collect();
        lab.same("rows in the order of slots", &y, &expected)
    }

    /// What each slot got is what its token alone gets of its expert's weight alone, bit for bit.
    fn is_the_dense_product(
        self,
        lab: &mut Lab<'_>,
        weight: &Weight,
        x: &[bf16],
        ids: &[u32],
        got: &[bf16],
    ) -> Result<(), String> {
        let Shape { outputs, inputs, .. } = self.shape;
        for (slot, expert) in ids.iter().enumerate().step_by(ids.len().div_ceil(7)) {
            let row = lab.upload(&x[slot / self.top * inputs..][..inputs])?;
            let y = lab.poisoned(outputs)?;
            let none = lab.poisoned(0)?;
            let cut = ProductCut { rows: 16, apart: false, clustered: false };
            lab.launch(matmul::launch(row, 1, &weight.alone(*expert as usize), cut, Out::Bf16(y), none))?;
            let y = lab.download(y)?;
            lab.same(&format!("slot {slot} alone"), &y, &got[slot * outputs..][..outputs])?;
        }
        Ok(())
    }

    fn has_the_gate(
        self,
        lab: &mut Lab<'_>,
        weight: &Weight,
        x: &[bf16],
        ids: &[u32],
        ending: Ending,
        got: &[bf16],
    ) -> Result<(), String> {
        let (inputs, width) = (self.shape.inputs, self.shape.outputs / 2);
        for (slot, expert) in ids.iter().enumerate().step_by(ids.len().div_ceil(7)) {
            let row = wide(&x[slot / self.top * inputs..][..inputs]);
            let (sums, bounds) = weight.exact(*expert as usize, &row);
            let (exact, slack) = gate_of(&sums, &bounds, ending);
            let got = &got[slot * width..][..width];
            lab.close(&format!("{ending:?} of slot {slot}"), got, &exact, |i| slack[i])?;
        }
        Ok(())
    }

    /// Both products and the sum, beside float64 from the first to the last; and a token's bits whatever the
    /// others choose.
    fn whole(self, lab: &mut Lab<'_>, first: &Weight, unit: Unit, x: &[bf16]) -> Result<(), String> {
        let Shape { outputs, inputs, weights } = self.shape;
        if (outputs / 2) % weights.granule() != 0 {
            return Ok(());
        }
        let back = Shape { outputs: inputs, inputs: outputs / 2, weights };
        let second = Weight::new(lab, self.experts, back, unit, 60)?;
        let run = |lab: &mut Lab<'_>, kind: usize, rows: usize| {
            let ids = choices(kind, self.tokens * self.top, self.experts);
            let to = grouped(lab, &ids, self.experts, rows)?;
            let (h, y) = (lab.poisoned(ids.len() * outputs / 2)?, lab.poisoned(ids.len() * inputs)?);
            let (x, out) = (lab.upload(x)?, lab.poisoned(self.tokens * inputs)?);
            let weights: Vec<f32> = (0..ids.len()).map(|slot| 0.2 + (slot % 5) as f32 * 0.1).collect();
            let weights = lab.upload(&weights)?;
            lab.launch(product(
                x,
                ProductRows::OfTokens { top: self.top },
                &first.device,
                &to,
                Ending::Silu,
                h,
            ))?;
            lab.launch(product(h, ProductRows::OfPlaces, &second.device, &to, Ending::Plain, y))?;
            lab.launch(combine(y, to.places, weights, self.top, None, out))?;
            lab.download(out)
        };
        let all = run(lab, 0, 16)?;
        for rows in self.cuts(unit) {
            let other = run(lab, 0, *rows)?;
            lab.same(&format!("the layer by {rows} rows"), &other, &all)?;
        }
        // Token 0's first choice is expert 0 in both; with one expert a token, the others' choices do not
        // matter.
        if self.top == 1 {
            let other = run(lab, 2, 16)?;
            lab.same("token 0 beside other choices", &other[..inputs], &all[..inputs])?;
        }
        Ok(())
    }
}

/// The gate of float64 sums, and how far rounded sums may lead away from it.
fn gate_of(sums: &[f64], bounds: &[f64], ending: Ending) -> (Vec<f64>, Vec<f64>) {
    let pick = |all: &[f64], values: bool| -> Vec<f64> {
        let eight = |eight: &[f64]| if values { eight[8..].to_vec() } else { eight[..8].to_vec() };
        all.chunks(16).flat_map(eight).collect()
    };
    let gate = |gates: &[f64], values: &[f64]| -> Vec<f64> {
        let narrow: Vec<f32> = gates.iter().chain(values).map(|v| *v as f32).collect();
        match ending {
            Ending::Clamped(by) => clamped_gate_mul_oracle(&narrow, gates.len(), by),
            _ => silu_mul_oracle(&narrow, gates.len()),
        }
    };
    let (gates, ups) = (pick(sums, false), pick(sums, true));
    let exact = gate(&gates, &ups);
    // Both gates have slopes of at most 1.2 in the gate and of at most the gate's magnitude in the value.
    let (gate_slack, up_slack) = (pick(bounds, false), pick(bounds, true));
    let slack = (0..exact.len()).map(|i| {
        let moved =
            1.2 * gate_slack[i] * 2e-6 * (ups[i].abs() + 1.0) + (gates[i].abs() + 1.0) * up_slack[i] * 2e-6;
        exact[i].abs() * (BF16 + 3e-5) + moved + 1e-6
    });
    (exact.clone(), slack.collect())
}
