//! The timings of a layer of experts: grouping, products, sum; with both products in one launch or in two.

use half::bf16;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::matmul::{Shape, Unit, Weights};
use keyway_kernels::cuda::moe::{self, Ending, ExpertWeights, GroupedSlots, ProductRows};
use keyway_kernels::moe::{Routing, Scoring};

use super::{Work, scales};
use crate::cases::Lab;

/// Whether both products are one launch.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Apart,
    Paired,
}

/// The timing of this name.
pub(super) fn work(lab: &mut Lab<'_>, name: &str) -> Result<Work, String> {
    let (warp, hopper) = (Unit::Warp, Unit::Warpgroup);
    match name {
        "moe_1" => experts(lab, &MOE, warp, 1, Cut::Apart),
        "moe_8" => experts(lab, &MOE, warp, 8, Cut::Apart),
        "moe_64" => experts(lab, &MOE, warp, 64, Cut::Apart),
        "moe_1024" => experts(lab, &MOE, warp, 1024, Cut::Apart),
        "moe_4096" => experts(lab, &MOE, warp, 4096, Cut::Apart),
        "moe_sm90_1" => experts(lab, &MOE, hopper, 1, Cut::Apart),
        "moe_sm90_8" => experts(lab, &MOE, hopper, 8, Cut::Apart),
        "moe_sm90_32" => experts(lab, &MOE, hopper, 32, Cut::Apart),
        "moe_sm90_64" => experts(lab, &MOE, hopper, 64, Cut::Apart),
        "moe_sm90_1024" => experts(lab, &MOE, hopper, 1024, Cut::Apart),
        "moe_sm90_4096" => experts(lab, &MOE, hopper, 4096, Cut::Apart),
        "moe_fp8_1" => experts(lab, &MOE_FP8, warp, 1, Cut::Apart),
        "moe_fp8_64" => experts(lab, &MOE_FP8, warp, 64, Cut::Apart),
        "moe_pair_1" => experts(lab, &MOE, warp, 1, Cut::Paired),
        "moe_pair_8" => experts(lab, &MOE, warp, 8, Cut::Paired),
        "moe_sm90_pair_1" => experts(lab, &MOE, hopper, 1, Cut::Paired),
        "moe_sm90_pair_8" => experts(lab, &MOE, hopper, 8, Cut::Paired),
        "moe_sm90_pair_32" => experts(lab, &MOE, hopper, 32, Cut::Paired),
        "moe_fp8_pair_1" => experts(lab, &MOE_FP8, warp, 1, Cut::Paired),
        "moe_route_group_combine_64" => around_experts(lab, 64),
        _ => Err(format!("no timing {name}")),
    }
}

/// The sizes of a timed layer of experts: how many there are, and how their weights are kept.
struct Moe {
    count: usize,
    /// How many of the experts are chosen for each token.
    top: usize,
    inner: usize,
    width: usize,
    weights: Weights,
}

/// Of Qwen3-30B-A3B's kind, and that model itself in FP8.
const MOE: Moe = Moe { count: 128, top: 8, inner: 704, width: 2816, weights: Weights::Bf16 };
const MOE_FP8: Moe = Moe { inner: 768, width: 2048, weights: Weights::Fp8, ..MOE };

/// What stands between a layer's kernels.
struct Around {
    ids: Slice<u32>,
    weights: Slice<f32>,
    grouped: GroupedSlots,
    rows: Slice<bf16>,
    out: Slice<bf16>,
    /// Experts that were chosen.
    busy: usize,
}

impl Around {
    /// Even choices, as many experts as there can be.
    fn new(lab: &mut Lab<'_>, moe: &Moe, unit: Unit, tokens: usize) -> Result<Self, String> {
        let Moe { count, top, width, weights, .. } = *moe;
        let slots = tokens * top;
        let block_rows = GroupedSlots::choose_rows(slots, count, weights, unit);
        let ids: Vec<u32> = (0..slots).map(|slot| (slot * 37 % count) as u32).collect();
        Ok(Self {
            ids: lab.upload(&ids)?,
            weights: lab.upload(&vec![0.125f32; slots])?,
            grouped: GroupedSlots {
                places: lab.poisoned(slots)?,
                slots_at: lab.poisoned(slots)?,
                items: lab.poisoned(GroupedSlots::item_words(slots, count, block_rows))?,
                item_count: lab.poisoned(1)?,
                block_rows,
            },
            rows: lab.filled(slots * width * 2, 11)?.cast(),
            out: lab.poisoned(tokens * width)?,
            busy: slots.min(count),
        })
    }
}

/// The experts of one layer: grouping, both products, the sum.
fn experts(lab: &mut Lab<'_>, moe: &Moe, unit: Unit, tokens: usize, cut: Cut) -> Result<Work, String> {
    if unit == Unit::Warpgroup && !lab.has_warpgroups() {
        return Err("this GPU has no wgmma".into());
    }
    let Moe { count, top, inner, width, weights } = *moe;
    let around = Around::new(lab, moe, unit, tokens)?;
    let up = Shape { outputs: 2 * inner, inputs: width, weights };
    let down = Shape { outputs: width, inputs: inner, weights };
    let mut weights = |shape: Shape, seed: u64| -> Result<ExpertWeights, String> {
        let images = lab.filled(count * shape.packed_bytes(), seed)?;
        let scales = scales(lab, count * shape.scales())?;
        Ok(ExpertWeights { count, shape, unit, images, scales, bias: None })
    };
    let (first, second) = (weights(up, 12)?, weights(down, 13)?);
    let (x, h) = (lab.filled(tokens * width * 2, 14)?.cast(), lab.poisoned(tokens * top * inner)?);
    let Around { ids, weights, grouped, rows, out, busy } = around;
    let of_tokens = ProductRows::OfTokens { top };
    let products = match cut {
        Cut::Apart => [
            moe::product(x, of_tokens, &first, &grouped, Ending::Silu, h),
            moe::product(h, ProductRows::OfPlaces, &second, &grouped, Ending::Plain, rows),
        ],
        Cut::Paired => {
            let counts = lab.upload(&vec![0; moe::pair_words(tokens * top, count)])?;
            [moe::pair(x, of_tokens, [&first, &second], &grouped, Ending::Silu, [h, rows], counts), None]
        }
    };
    let [first, second] = products;
    let sum = moe::combine(rows, grouped.places, weights, top, None, out);
    let launches = [moe::group(ids, count, &grouped), first, second, sum];
    Ok(Work {
        launches: launches.into_iter().flatten().collect(),
        // The weights of all experts that were chosen, and the tokens in and out.
        bytes: (busy * (bytes_of(up) + bytes_of(down)) + 2 * tokens * width * 2) as u64,
        operations: 2 * (tokens * top) as u64 * (3 * inner * width) as u64,
    })
}

fn bytes_of(shape: Shape) -> usize {
    shape.packed_bytes() + shape.scales() * size_of::<f32>()
}

/// What a layer does besides its products.
fn around_experts(lab: &mut Lab<'_>, tokens: usize) -> Result<Work, String> {
    let Moe { count, top, width, .. } = MOE;
    let Around { ids, weights, grouped, rows, out, .. } = Around::new(lab, &MOE, Unit::Warp, tokens)?;
    let logits: Vec<f32> = (0..tokens * count).map(|i| (i * 37 % 1009) as f32 * 0.01).collect();
    let logits = lab.upload(&logits)?;
    let routing = Routing { top, scoring: Scoring::SoftmaxAll, renormalise: true, scale: 1.0, groups: None };
    let launches = [
        moe::route(logits, count, &routing, None, None, (ids, weights)),
        moe::group(ids, count, &grouped),
        moe::combine(rows, grouped.places, weights, top, None, out),
    ];
    let bytes = (tokens * count * 4 + (tokens * top + tokens) * width * 2) as u64;
    Ok(Work { launches: launches.into_iter().flatten().collect(), bytes, operations: 0 })
}
