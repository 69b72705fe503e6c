//! Both products of a layer's experts in one launch: the bits of two launches, whoever chose what, and as
//! often as it is launched.

use half::bf16;
use keyway_kernels::cuda::matmul::{Shape, Unit, Weights};
use keyway_kernels::cuda::moe::{Ending, GroupedSlots, ProductRows, pair, pair_words, product};
use keyway_kernels::elementwise::ClampedGate;

use super::experts::Weight;
use super::moe::{choices, grouped};
use super::{Lab, values};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let few = Layer { experts: 5, top: 2, tokens: 1, width: 512, inner: 128, weights: Weights::Bf16 };
    // Several items of an expert, and two splits of the first product where the second has one.
    let more = Layer { experts: 3, top: 2, tokens: 19, width: 1024, ..few };
    let narrow = [Weights::Int8, Weights::Int4, Weights::Fp8, Weights::Mxfp4];
    let mut layers = vec![few, more];
    layers.extend(narrow.map(|weights| Layer { weights, tokens: 3, ..more }));
    // 64 inputs of the second product, half of what is read at once.
    layers.push(Layer { weights: Weights::Mxfp4, inner: 192, ..few });
    if lab.is_large() {
        let large = Layer { experts: 128, top: 8, tokens: 32, width: 2048, inner: 768, ..few };
        layers.extend([Weights::Bf16, Weights::Int4, Weights::Fp8].map(|weights| Layer { weights, ..large }));
    }
    for layer in layers {
        for unit in [Unit::Warp, Unit::Warpgroup] {
            if unit == Unit::Warpgroup && !(layer.weights == Weights::Bf16 && lab.has_warpgroups()) {
                continue;
            }
            layer.check(lab, unit).map_err(|fault| format!("{layer:?}, {unit:?}: {fault}"))?;
            lab.clear();
        }
    }
    Ok(())
}

/// A layer of experts, and how many tokens there are.
#[derive(Debug, Clone, Copy)]
struct Layer {
    experts: usize,
    top: usize,
    tokens: usize,
    width: usize,
    inner: usize,
    weights: Weights,
}

impl Layer {
    fn check(self, lab: &mut Lab<'_>, unit: Unit) -> Result<(), String> {
        let Self { experts, top, tokens, width, inner, weights } = self;
        let (slots, words) = (tokens * top, pair_words(tokens * top, experts));
        let up = Shape { outputs: 2 * inner, inputs: width, weights };
        let down = Shape { outputs: width, inputs: inner, weights };
        let (up, down) =
            (Weight::new(lab, experts, up, unit, 40)?, Weight::new(lab, experts, down, unit, 60)?);
        let both = [&up.device, &down.device];
        let (of_tokens, by_place) = (ProductRows::OfTokens { top }, ProductRows::OfPlaces);
        let (x, counts) = (lab.upload(&values(3, tokens * width))?, lab.upload(&vec![0_u32; words])?);
        let clamped = Ending::Clamped(ClampedGate { alpha: 1.702, limit: 7.0 });
        for (kind, ending) in [(0, Ending::Silu), (1, clamped), (2, Ending::Silu)] {
            let ids = choices(kind, slots, experts);
            let to = grouped(lab, &ids, experts, GroupedSlots::ROWS_MIN)?;
            let [h, h_apart] = [lab.poisoned(slots * inner)?, lab.poisoned(slots * inner)?];
            let [y, y_apart] = [lab.poisoned(slots * width)?, lab.poisoned(slots * width)?];
            lab.launch(product(x, of_tokens, both[0], &to, ending, h_apart))?;
            lab.launch(product(h_apart, by_place, both[1], &to, Ending::Plain, y_apart))?;
            lab.launch(pair(x, of_tokens, both, &to, ending, [h, y], counts))?;
            let [one, two]: [Vec<bf16>; 2] = [lab.download(y)?, lab.download(y_apart)?];
            lab.same(&format!("choice {kind} in one launch"), &one, &two)?;
            let left: Vec<u32> = lab.download(counts)?;
            lab.same("what blocks count in", &left, &vec![0; words])?;
        }
        Ok(())
    }
}
