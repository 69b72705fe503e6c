//! Both products of the experts of few tokens in one launch (`moe_pair.cuh`): with the bits of two launches,
//! without the time between them.

use half::bf16;

use super::{Ending, ExpertWeights, GroupedSlots, ProductRows};
use crate::cuda::constants::{Block, product};
use crate::cuda::matmul::{Few, Unit, Weights};
use crate::cuda::{Argument, Kernel, Launch, Slice};

/// Words that the blocks of [`pair`] count in.
pub fn pair_words(slots: usize, experts: usize) -> usize {
    1 + GroupedSlots::items_max(slots, experts, GroupedSlots::ROWS_MIN)
}

/// Both [`product`](super::product)s of a layer, with their bits: `h` `[slots, second's inputs]` is the first
/// one's, by `rows`, with its gate; `y[place]` the second one's, of the rows of `h`. `counts` has
/// [`pair_words`], all 0 before the first launch, and again behind each. `None` if there are no slots.
///
/// # Panics
/// If shapes disagree, items have more than [`GroupedSlots::ROWS_MIN`] rows, or there is no gate.
pub fn pair(
    x: Slice<bf16>,
    rows: ProductRows,
    [first, second]: [&ExpertWeights; 2],
    grouped: &GroupedSlots,
    ending: Ending,
    [h, y]: [Slice<bf16>; 2],
    counts: Slice<u32>,
) -> Option<Launch> {
    let (slots, items) =
        (grouped.places.len, GroupedSlots::items_max(grouped.places.len, first.count, grouped.block_rows));
    let (of_slots, top) = match rows {
        ProductRows::OfTokens { top } => (Argument::from(grouped.slots_at), top),
        ProductRows::OfPlaces | ProductRows::OfSlots => (Argument::Null, 1),
    };
    first.check(x.len * top, slots, h.len, ending);
    second.check(h.len, slots, y.len, Ending::Plain);
    assert!(
        ending != Ending::Plain
            && !matches!(rows, ProductRows::OfSlots)
            && second.shape.inputs * 2 == first.shape.outputs
            && (first.count, first.unit, first.shape.weights)
                == (second.count, second.unit, second.shape.weights)
            && grouped.block_rows == GroupedSlots::ROWS_MIN
            && counts.len >= pair_words(slots, first.count),
        "experts: shapes disagree"
    );
    let few = Few::choose_pair([first.shape, second.shape], slots, items);
    let (kernel, [block, down_block]) = blocks(first, few);
    let tiles =
        first.shape.outputs.div_ceil(block.outputs) + second.shape.outputs.div_ceil(down_block.outputs);
    let (gate, by) = ending.gate();
    let mut arguments = vec![
        x.into(),
        first.images.into(),
        first.scales.into(),
        first.bias.into(),
        h.into(),
        second.images.into(),
        second.scales.into(),
        second.bias.into(),
        y.into(),
        grouped.items.into(),
        grouped.item_count.into(),
        of_slots,
        counts.into(),
        top.into(),
        first.shape.outputs.into(),
        first.shape.inputs.into(),
        first.shape.split_tiles().into(),
        gate.into(),
        by.alpha.into(),
        by.limit.into(),
        second.shape.outputs.into(),
        second.shape.split_tiles().into(),
    ];
    if first.shape.weights != Weights::Bf16 {
        arguments.extend(Few::pair_arguments(few));
    }
    (slots > 0).then(|| Launch {
        kernel,
        grid: [(items * tiles) as u32, 1, 1],
        cluster: 1,
        threads: block.threads as u32,
        shared_bytes: block.shared_bytes.max(down_block.shared_bytes) as u32,
        arguments,
    })
}

/// The kernel, and the blocks of either product.
fn blocks(weights: &ExpertWeights, few: [Few; 2]) -> (Kernel, [Block; 2]) {
    let narrow = few.map(Few::block);
    match (weights.shape.weights, weights.unit) {
        (Weights::Bf16, Unit::Warpgroup) => (Kernel::moe_product_sm90_pair, [product::HOPPER_ROWS_16; 2]),
        (Weights::Bf16, Unit::Warp) => (Kernel::moe_product_pair_bf16, [product::ROWS_16; 2]),
        (Weights::Int8, _) => (Kernel::moe_product_pair_int8, narrow),
        (Weights::Int4, _) => (Kernel::moe_product_pair_int4, narrow),
        (Weights::Fp8, _) => (Kernel::moe_product_pair_fp8, narrow),
        (Weights::Mxfp4, _) => (Kernel::moe_product_pair_mxfp4, narrow),
    }
}
