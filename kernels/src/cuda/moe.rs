//! Launches `moe.cu`, `moe_product.cu` and `moe_product_sm90.cu`: a mixture-of-experts layer as the router's
//! choice, the grouping of slots by expert, two grouped products (the gate at the end of the first), and the
//! sum of a token's experts. The host learns nothing of the choice: grids are as large as any choice could
//! need, so that a graph can be captured.

mod pair;

use half::bf16;

use super::constants::choice::{self, LANES as WARP};
use super::constants::moe::{self, GROUP_THREADS_MAX, GROUPED_AT_ONCE, ITEM_WORDS, TOGETHER};
use super::constants::numbers::PACKET;
use super::constants::{Block, pipeline_sm90, product};
use super::matmul::{Few, Shape, Unit, Weights};
use super::{Argument, Kernel, Launch, Slice, pipeline};
use crate::elementwise::ClampedGate;
use crate::moe::{GroupScore, Routing, Scoring};

pub use pair::{pair, pair_words};

/// Experts of a layer at most: each lane of a warp keeps a bit for 32 of them.
pub const EXPERTS_MAX: usize = choice::EXPERTS_MAX;
/// Groups of experts at most: a lane has one.
pub const GROUPS_MAX: usize = WARP;
/// Threads of a block of `moe_group` at least.
const GROUP_THREADS_MIN: usize = 256;
/// Bytes of shared memory that tokens of [`choose`] may have for their logits.
const FEW_BYTES: usize = 96 << 10;

/// The router's choice for every row of `logits` `[tokens, experts]`: `ids` and `weights` `[tokens,
/// routing.top]`. What they mean is in [`crate::moe::route`]; equal scores may differ from the CPU's in their
/// last bits. A token whose slot in the KV cache is [`NO_SLOT`](super::rope::NO_SLOT) gets no expert. `None`
/// if there are no tokens.
///
/// # Panics
/// If shapes disagree, or `routing` does not suit the number of experts.
pub fn route(
    logits: Slice<f32>,
    experts: usize,
    routing: &Routing,
    correction_bias: Option<Slice<f32>>,
    kv_slots: Option<Slice<u32>>,
    (ids, weights): (Slice<u32>, Slice<f32>),
) -> Option<Launch> {
    let tokens = logits.len / experts;
    assert!(
        experts <= EXPERTS_MAX && routing.check(experts).is_ok(),
        "route: the routing does not suit {experts} experts"
    );
    assert!(
        logits.len == tokens * experts
            && ids.len == tokens * routing.top
            && weights.len == ids.len
            && correction_bias.is_none_or(|bias| bias.len == experts)
            && kv_slots.is_none_or(|slots| slots.len == tokens)
            && routing.groups.is_none_or(|groups| groups.count <= GROUPS_MAX),
        "route: shapes disagree"
    );
    let mut arguments: Vec<Argument> =
        vec![logits.into(), correction_bias.into(), kv_slots.into(), ids.into(), weights.into()];
    arguments.extend(router(tokens, experts, routing));
    (tokens > 0).then(|| Launch {
        kernel: Kernel::moe_route,
        grid: [tokens.div_ceil(moe::ROUTE_TOKENS) as u32, 1, 1],
        cluster: 1,
        threads: moe::ROUTE_THREADS as u32,
        shared_bytes: (moe::ROUTE_TOKENS * (2 * experts + routing.top) * 4) as u32,
        arguments,
    })
}

/// What kernels want to know of a choice: `tokens` and on.
fn router(tokens: usize, experts: usize, routing: &Routing) -> [Argument; 9] {
    let scoring = match routing.scoring {
        Scoring::SoftmaxAll => choice::SOFTMAX_ALL,
        Scoring::SoftmaxTop => choice::SOFTMAX_TOP,
        Scoring::Sigmoid => choice::SIGMOID,
    };
    let (groups, keep, by_two) =
        routing.groups.map_or((0, 0, 0), |g| (g.count, g.keep, usize::from(g.by == GroupScore::TopTwoSum)));
    [
        tokens.into(),
        experts.into(),
        routing.top.into(),
        scoring.into(),
        usize::from(routing.renormalise).into(),
        routing.scale.into(),
        groups.into(),
        keep.into(),
        by_two.into(),
    ]
}

/// Slots grouped by expert, on the device.
#[derive(Debug, Clone, Copy)]
pub struct GroupedSlots {
    /// By slot, its place; `u32::MAX` of one without an expert.
    pub places: Slice<u32>,
    /// By place, its slot.
    pub slots_at: Slice<u32>,
    /// `[items_max, 4]`: expert, first place, end.
    pub items: Slice<u32>,
    /// `[1]`: how many items there are.
    pub item_count: Slice<u32>,
    /// Rows of an item.
    pub block_rows: usize,
}

impl GroupedSlots {
    /// The fewest rows of an item: items of them are the most that a choice can need, however it is cut.
    pub const ROWS_MIN: usize = 16;

    /// Items that any choice of `slots` slots among `experts` can need, at `block_rows` rows an item.
    pub fn items_max(slots: usize, experts: usize, block_rows: usize) -> usize {
        slots / block_rows + slots.min(experts)
    }

    /// Words of `items` for as many.
    pub fn item_words(slots: usize, experts: usize, block_rows: usize) -> usize {
        Self::items_max(slots, experts, block_rows) * ITEM_WORDS
    }

    /// Whether there is room for so many.
    fn fits(&self, slots: usize, experts: usize) -> bool {
        self.places.len == slots
            && self.slots_at.len == slots
            && self.items.len >= Self::item_words(slots, experts, self.block_rows)
            && self.item_count.len == 1
    }

    /// Rows of an item for `slots` slots: by an expert's average, at most what the kernels have. Speed alone.
    pub fn choose_rows(slots: usize, experts: usize, weights: Weights, unit: Unit) -> usize {
        let average = slots.div_ceil(experts.max(1));
        // A warpgroup's products are as wide as an item needs: nearly every expert's rows may be one item.
        let (up_to_64, up_to_128) = if unit == Unit::Warpgroup { (48, 112) } else { (96, usize::MAX) };
        match average {
            0..=16 => Self::ROWS_MIN,
            _ if average <= up_to_64 || weights != Weights::Bf16 => 64,
            _ if average <= up_to_128 => 128,
            _ => 256,
        }
    }
}

/// Groups the slots of `ids` `[tokens, top]` by expert; an id that is no expert's has no part in it. `None`
/// if there are no slots.
///
/// # Panics
/// If shapes disagree.
pub fn group(ids: Slice<u32>, experts: usize, to: &GroupedSlots) -> Option<Launch> {
    let slots = ids.len;
    assert!(experts <= EXPERTS_MAX && to.fits(slots, experts), "group: shapes disagree");
    (slots > 0).then(|| Launch {
        kernel: Kernel::moe_group,
        grid: [experts as u32, 1, 1],
        cluster: 1,
        threads: (slots / GROUPED_AT_ONCE).next_multiple_of(WARP).clamp(GROUP_THREADS_MIN, GROUP_THREADS_MAX)
            as u32,
        shared_bytes: ((experts + 2 + WARP) * 4) as u32,
        arguments: vec![
            ids.into(),
            slots.into(),
            experts.into(),
            to.block_rows.into(),
            to.places.into(),
            to.slots_at.into(),
            to.items.into(),
            to.item_count.into(),
        ],
    })
}

/// What a router's product left: the sums of its splits `[splits, tokens, experts]`, and the bias that is not
/// added yet.
#[derive(Debug, Clone, Copy)]
pub struct RouterSums {
    /// The sums in f32, not yet added up over the splits.
    pub sums: Slice<f32>,
    /// How many splits there are.
    pub splits: usize,
    /// The router's bias, `[experts]`; `None` if it has none, or if the product has added it.
    pub bias: Option<Slice<bf16>>,
}

/// Whether [`choose`] takes so many tokens.
pub fn are_few(tokens: usize, experts: usize) -> bool {
    tokens <= moe::CHOOSE_TOKENS_MAX && tokens * experts * 2 * size_of::<f32>() <= FEW_BYTES
}

/// [`route`] and [`group`] of a few tokens in one launch, with their bits. `None` if there are no tokens.
///
/// # Panics
/// If shapes disagree, there are too many tokens ([`are_few`]), or `routing` does not suit the number of
/// experts.
pub fn choose(
    logits: &RouterSums,
    experts: usize,
    routing: &Routing,
    correction_bias: Option<Slice<f32>>,
    kv_slots: Option<Slice<u32>>,
    weights: Slice<f32>,
    to: &GroupedSlots,
) -> Option<Launch> {
    let RouterSums { sums, splits, bias } = *logits;
    let (slots, top) = (weights.len, routing.top);
    let tokens = slots / top;
    assert!(
        experts <= EXPERTS_MAX && routing.check(experts).is_ok() && are_few(tokens, experts),
        "choose: the routing does not suit {experts} experts, or {tokens} tokens are too many"
    );
    assert!(
        sums.len == splits * tokens * experts
            && slots == tokens * top
            && [bias.map(|b| b.len), correction_bias.map(|b| b.len)]
                .iter()
                .flatten()
                .all(|len| *len == experts)
            && kv_slots.is_none_or(|slots| slots.len == tokens)
            && routing.groups.is_none_or(|groups| groups.count <= GROUPS_MAX)
            && to.block_rows.is_power_of_two()
            && to.fits(slots, experts),
        "choose: shapes disagree"
    );
    let mut arguments: Vec<Argument> = vec![
        sums.into(),
        splits.into(),
        bias.into(),
        correction_bias.into(),
        kv_slots.into(),
        weights.into(),
    ];
    arguments.extend(router(tokens, experts, routing));
    arguments.push(to.block_rows.trailing_zeros().into());
    arguments.extend([to.places, to.slots_at, to.items, to.item_count].map(Argument::from));
    (tokens > 0).then(|| Launch {
        kernel: Kernel::moe_choose,
        grid: [1, 1, 1],
        cluster: 1,
        threads: (tokens.max(experts.div_ceil(WARP)) * WARP) as u32,
        shared_bytes: ((2 * experts + WARP + tokens * WARP + slots + 2 * tokens * experts) * 4) as u32,
        arguments,
    })
}

/// Which row of `[gates; values]`, `width` of each, a gated product has as its output `output`: gates and
/// values lie beside each other in eights, rows of a weight before it is packed as well as biases.
pub fn woven_row(output: usize, width: usize) -> usize {
    let (both, within) = (output / (2 * TOGETHER), output % (2 * TOGETHER));
    let first = if within < TOGETHER { 0 } else { width };
    first + both * TOGETHER + within % TOGETHER
}

/// All experts' weights of one product on the device, one after another.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights {
    /// How many there are.
    pub count: usize,
    /// Of one of them.
    pub shape: Shape,
    /// The matrix instruction that multiplies them; the images are the same for either.
    pub unit: Unit,
    /// The images, `matmul::pack_*` of each.
    pub images: Slice<u8>,
    /// `[count, inputs / 128, outputs]`; `None` of bf16 and MXFP4.
    pub scales: Option<Slice<f32>>,
    /// Added to the rows of each expert before the ending, `[count, outputs]`; `None`: nothing is.
    pub bias: Option<Slice<bf16>>,
}

impl ExpertWeights {
    /// Panics unless a product of `slots` slots has so many inputs and results.
    fn check(&self, inputs: usize, slots: usize, results: usize, ending: Ending) {
        let Self { count, shape, images, scales, bias, .. } = self;
        let columns = if ending == Ending::Plain { shape.outputs } else { shape.outputs / 2 };
        shape.check();
        assert!(
            inputs == slots * shape.inputs
                && results == slots * columns
                && (ending == Ending::Plain || shape.outputs.is_multiple_of(2 * TOGETHER))
                && images.len == count * shape.packed_bytes()
                && scales.map_or(0, |scales| scales.len) == count * shape.scales()
                && bias.is_none_or(|bias| bias.len == count * shape.outputs),
            "experts: shapes disagree"
        );
    }
}

/// What becomes of a product's sums.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ending {
    /// They are rounded to bf16, one column for each output.
    Plain,
    /// SiLU of the gates times the values: half as many columns.
    Silu,
    /// gpt-oss's gate, of clamped gates and values: half as many columns.
    Clamped(ClampedGate),
}

impl Ending {
    /// What a kernel calls its gate, and that gate's numbers.
    fn gate(self) -> (u32, ClampedGate) {
        match self {
            Self::Plain => (moe::NO_GATE, ClampedGate { alpha: 0.0, limit: 0.0 }),
            Self::Silu => (moe::SILU, ClampedGate { alpha: 0.0, limit: 0.0 }),
            Self::Clamped(by) => (moe::CLAMPED, by),
        }
    }
}

/// Where the rows of a product come from, and go.
#[derive(Debug, Clone, Copy)]
pub enum ProductRows {
    /// A slot's row is its token's; tokens have `top` slots.
    OfTokens {
        /// How many experts each token chose.
        top: usize,
    },
    /// A place's row is its own.
    OfPlaces,
    /// A slot's row is its own, and so is its result's: products by groups of what stays in its order.
    OfSlots,
}

/// `y[place] = ending(x[row of place] w[expert of place]^T + bias)` for all places of `grouped`, with
/// [`ProductRows::OfSlots`] `y[slot]`. `None` if there are none.
///
/// # Panics
/// If shapes disagree.
pub fn product(
    x: Slice<bf16>,
    rows: ProductRows,
    experts: &ExpertWeights,
    grouped: &GroupedSlots,
    ending: Ending,
    y: Slice<bf16>,
) -> Option<Launch> {
    let ExpertWeights { count, shape, unit, images, scales, bias } = *experts;
    let slots = grouped.places.len;
    let (of_slots, top, to_slots) = match rows {
        ProductRows::OfTokens { top } => (Argument::from(grouped.slots_at), top, 0_u32),
        ProductRows::OfPlaces => (Argument::Null, 1, 0),
        ProductRows::OfSlots => (Argument::from(grouped.slots_at), 1, 1),
    };
    experts.check(x.len * top, slots, y.len, ending);
    let items = GroupedSlots::items_max(slots, count, grouped.block_rows);
    let few = Few::choose(shape, grouped.block_rows, slots, items, shape.splits());
    let blocks = Blocks::choose(shape, unit, grouped.block_rows, few);
    assert!(blocks.is_some(), "experts: no kernel takes {} rows of {:?}", grouped.block_rows, shape.weights);
    let blocks = blocks?;
    let (gate, by) = ending.gate();
    let mut arguments = vec![
        x.into(),
        images.into(),
        scales.into(),
        bias.into(),
        y.into(),
        grouped.items.into(),
        grouped.item_count.into(),
        of_slots,
        top.into(),
        shape.outputs.into(),
        shape.inputs.into(),
        shape.split_tiles().into(),
        gate.into(),
        by.alpha.into(),
        by.limit.into(),
        to_slots.into(),
    ];
    arguments.extend(blocks.few.into_iter().flat_map(Few::arguments));
    (slots > 0).then(|| Launch {
        kernel: blocks.kernel,
        grid: blocks.grid([shape.outputs.div_ceil(blocks.block.outputs) as u32, items as u32, 1]),
        cluster: 1,
        threads: blocks.block.threads as u32,
        shared_bytes: blocks.block.shared_bytes as u32,
        arguments,
    })
}

/// A kernel, and its blocks.
struct Blocks {
    kernel: Kernel,
    block: Block,
    /// Of weights that are not bf16.
    few: Option<Few>,
    /// Whether blocks stay, and go through the work.
    stay: bool,
}

impl Blocks {
    /// The kernel for items of so many rows; `None` if none takes them.
    fn choose(shape: Shape, unit: Unit, rows: usize, few: Few) -> Option<Self> {
        let (kernel, block) = match (unit, shape.weights, rows) {
            (Unit::Warpgroup, Weights::Bf16, 16) => (Kernel::moe_product_sm90_16, product::HOPPER_ROWS_16),
            (Unit::Warpgroup, Weights::Bf16, _) => return Self::staying(shape, rows),
            (_, Weights::Bf16, 16) => (Kernel::moe_product_bf16_16, product::ROWS_16),
            (_, Weights::Bf16, 64) => (Kernel::moe_product_bf16_64, product::ROWS_64),
            (_, Weights::Bf16, 128) => (Kernel::moe_product_bf16_128, product::ROWS_128),
            _ => return Self::few(shape.weights, rows, few),
        };
        Some(Self { kernel, block, few: None, stay: false })
    }

    fn few(weights: Weights, rows: usize, few: Few) -> Option<Self> {
        let kernel = match (weights, rows) {
            (Weights::Int8, 16) => Kernel::moe_product_int8_16,
            (Weights::Int8, 64) => Kernel::moe_product_int8_64,
            (Weights::Int4, 16) => Kernel::moe_product_int4_16,
            (Weights::Int4, 64) => Kernel::moe_product_int4_64,
            (Weights::Fp8, 16) => Kernel::moe_product_fp8_16,
            (Weights::Fp8, 64) => Kernel::moe_product_fp8_64,
            (Weights::Mxfp4, 16) => Kernel::moe_product_mxfp4_16,
            (Weights::Mxfp4, 64) => Kernel::moe_product_mxfp4_64,
            _ => return None,
        };
        Some(Self { kernel, block: few.block(), few: Some(few), stay: false })
    }

    fn staying(shape: Shape, rows: usize) -> Option<Self> {
        let (kernel, block) = match (rows, shape.splits()) {
            (64, _) => (Kernel::moe_product_sm90_64, pipeline_sm90::ROWS_64),
            (128, _) => (Kernel::moe_product_sm90_128, pipeline_sm90::ROWS_128),
            (256, 1) => (Kernel::moe_product_sm90_256_whole, pipeline_sm90::WHOLE_256),
            (256, _) => (Kernel::moe_product_sm90_256, pipeline_sm90::ROWS_256),
            _ => return None,
        };
        Some(Self { kernel, block, few: None, stay: true })
    }

    /// Of so many tiles.
    fn grid(&self, tiles: [u32; 3]) -> [u32; 3] {
        if self.stay { pipeline::grid(tiles, 1) } else { tiles }
    }
}

/// `out[t]`: the sum of the rows of token t's slots, each times its weight, in slot order; last `shared[t]`,
/// what an expert gave that serves every token. `rows` `[slots, width]` by place, `out` `[tokens, width]`.
/// `None` if there are no tokens.
///
/// # Panics
/// If shapes disagree, or the width is not a multiple of 8.
pub fn combine(
    rows: Slice<bf16>,
    places: Slice<u32>,
    weights: Slice<f32>,
    top: usize,
    shared: Option<Slice<bf16>>,
    out: Slice<bf16>,
) -> Option<Launch> {
    let tokens = places.len / top;
    let width = out.len.checked_div(tokens)?;
    assert!(
        width > 0
            && width.is_multiple_of(PACKET)
            && rows.len == places.len * width
            && places.len == tokens * top
            && weights.len == places.len
            && shared.is_none_or(|shared| shared.len == out.len)
            && out.len == tokens * width,
        "combine: shapes disagree"
    );
    Some(Launch {
        kernel: Kernel::moe_combine,
        grid: [width.div_ceil(PACKET * moe::COMBINE_THREADS) as u32, tokens as u32, 1],
        cluster: 1,
        threads: moe::COMBINE_THREADS as u32,
        shared_bytes: 0,
        arguments: vec![
            rows.into(),
            places.into(),
            weights.into(),
            shared.into(),
            out.into(),
            top.into(),
            width.into(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_values_alternate_in_eights() {
        let rows: Vec<usize> = (0..48).map(|output| woven_row(output, 24)).collect();
        assert_eq!([rows[0], rows[7], rows[8], rows[15], rows[16], rows[24]], [0, 7, 24, 31, 8, 32]);
        let mut sorted = rows;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..48).collect::<Vec<_>>());
    }

    #[test]
    fn there_is_room_for_the_items_of_any_choice() {
        for (counts, rows) in
            [(vec![1; 40], 16), (vec![640], 16), (vec![17, 1, 16, 33, 0], 16), (vec![129; 3], 128)]
        {
            let slots = counts.iter().sum();
            let items: usize = counts.iter().map(|count: &usize| count.div_ceil(rows)).sum();
            assert!(items <= GroupedSlots::items_max(slots, counts.len(), rows), "{counts:?}");
        }
    }
}
