//! A mixture of experts on a device: what a layer's weights are, the buffers of a step, and the launches from
//! normalised rows to the update. The host learns nothing of what the router chose, so that a recorded step
//! serves every choice.

use half::bf16;
use keyway_kernels::cuda::matmul::{self, Out, Packed, ProductCut};
use keyway_kernels::cuda::moe::{self, Ending, GroupedSlots, ProductRows, RouterSums};
use keyway_kernels::cuda::peer::RoundTokens;
use keyway_kernels::cuda::{Device, DeviceError, Slice};
use keyway_kernels::moe::Routing;

use super::forward::Forward;
use super::room::Grown;
use super::sharing::{HeldExperts, Own, Sharing, ending};
use super::weights::{DeviceFeedForward, DeviceMlp};
use crate::limits::GPU_PAIRED_TOKENS_MAX;
use crate::model::config::{Config, Experts, FeedForward};

/// A layer's router and experts on the device, as far as this process holds them.
#[derive(Debug)]
pub(super) struct DeviceExperts {
    pub(super) routing: Routing,
    /// bf16, however the experts are kept.
    pub(super) router: Packed,
    /// Takes part in the choice but not in the weights.
    pub(super) correction_bias: Option<Slice<f32>>,
    /// Those that are here: all, but where ranks share them.
    pub(super) held: HeldExperts,
    /// Serves every token beside the chosen ones.
    pub(super) shared: Option<DeviceMlp>,
}

/// What a row takes in the layers with experts, of each the most that a layer has; all 0 without.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ExpertWidths {
    experts: usize,
    /// Experts that a token has.
    top: usize,
    /// Inner widths of these, together.
    inner: usize,
    /// Whether an expert serves every token.
    shared: bool,
}

impl ExpertWidths {
    pub(super) fn new(config: &Config) -> Self {
        let layers = config.layers.iter().map(|layer| layer.feed_forward);
        layers.fold(Self::default(), |most, feed_forward| match feed_forward {
            FeedForward::Dense { .. } => most,
            FeedForward::Experts(Experts { count, width, routing, shared_width, .. }) => Self {
                experts: most.experts.max(count),
                top: most.top.max(routing.top),
                inner: most.inner.max(routing.top * width),
                shared: most.shared || shared_width.is_some(),
            },
        })
    }
}

/// The buffers of a step's experts; a slot is a row's choice of one.
#[derive(Debug, Default)]
pub(super) struct ExpertRoom {
    /// What the router says, `[rows, experts]` in f32.
    logits: Grown,
    /// By slot: the expert, its weight, and the slot's place among those of all experts.
    ids: Grown,
    weights: Grown,
    places: Grown,
    /// By place, the slot.
    slots_at: Grown,
    /// The work of the grouped products, and how much of it there is.
    items: Grown,
    item_count: Grown,
    /// By place: between the products, and behind them.
    gated: Grown,
    given: Grown,
    /// What the expert gives that serves every token.
    shared: Grown,
    /// Where both products of few tokens are one launch: what its blocks count, all 0 between launches.
    paired: Option<Grown>,
}

impl ExpertRoom {
    /// From now on both products of few tokens are one launch.
    pub(super) fn pair(&mut self) {
        self.paired.get_or_insert_default();
    }

    /// For a step of `rows` rows, `hidden` wide. How many buffers moved.
    pub(super) fn reserve(
        &mut self,
        device: &mut dyn Device,
        (widths, hidden): (ExpertWidths, usize),
        rows: usize,
    ) -> Result<u64, DeviceError> {
        let ExpertWidths { experts, top, inner, shared } = widths;
        let (slots, word, element) = (rows * top, size_of::<u32>(), size_of::<bf16>());
        let mut moves = 0;
        for (buffer, bytes) in [
            (&mut self.logits, rows * experts * size_of::<f32>()),
            (&mut self.ids, slots * word),
            (&mut self.weights, slots * size_of::<f32>()),
            (&mut self.places, slots * word),
            (&mut self.slots_at, slots * word),
            (&mut self.items, GroupedSlots::item_words(slots, experts, GroupedSlots::ROWS_MIN) * word),
            (&mut self.item_count, top.min(1) * word),
            (&mut self.gated, rows * inner * element),
            (&mut self.given, slots * hidden * element),
            (&mut self.shared, if shared { rows * hidden * element } else { 0 }),
        ] {
            moves += buffer.reserve(device, bytes)?;
        }
        if let Some(counts) = &mut self.paired {
            let bytes = moe::pair_words(rows.min(GPU_PAIRED_TOKENS_MAX) * top, experts) * word;
            moves += counts.reserve_zeros(device, bytes)?;
        }
        Ok(moves)
    }

    /// What one launch of both products counts, if `rows` rows are few enough for it and their items are.
    fn counts(&self, rows: usize, grouped: &GroupedSlots) -> Option<Slice<u32>> {
        let are_few = rows <= GPU_PAIRED_TOKENS_MAX && grouped.block_rows == GroupedSlots::ROWS_MIN;
        self.paired.as_ref().filter(|_| are_few).map(Grown::whole)
    }

    /// Where `slots` slots are grouped, in items of `block_rows` places.
    fn grouped(&self, slots: usize, experts: usize, block_rows: usize) -> GroupedSlots {
        GroupedSlots {
            places: self.places.slice(0, slots),
            slots_at: self.slots_at.slice(0, slots),
            items: self.items.slice(0, GroupedSlots::item_words(slots, experts, block_rows)),
            item_count: self.item_count.slice(0, 1),
            block_rows,
        }
    }
}

impl Forward<'_> {
    /// The experts that the router chooses for each row, and the one that serves all: from normalised rows to
    /// the update.
    pub(super) fn experts(&mut self, experts: &DeviceExperts) {
        let DeviceExperts { routing, held: HeldExperts { gate_up, down, gate }, .. } = experts;
        if let Some((sharing, load)) = self.sharing {
            return self.shared_experts(sharing, sharing.plan.tokens(load, self.layer), experts);
        }
        let (step_room, hidden) = (self.room, self.widths.hidden);
        let room = &step_room.experts;
        let (slots, count) = (self.rows * routing.top, down.count);
        let normed = step_room.normed.slice(0, self.rows * hidden);
        let (ids, weights) = (room.ids.slice(0, slots), room.weights.slice(0, slots));
        let grouped = room.grouped(
            slots,
            count,
            GroupedSlots::choose_rows(slots, count, down.shape.weights, down.unit),
        );
        // Rows that fill up a step choose no expert.
        let kv_slots = self.step.kv_slots().map(|slots| slots.of(&step_room.inputs));
        let bias = experts.correction_bias;
        let logits = room.logits.slice(0, self.rows * count);
        if moe::are_few(self.rows, count) {
            let sums = self.router(normed, &experts.router, logits);
            self.launches.extend(moe::choose(&sums, count, routing, bias, kv_slots, weights, &grouped));
        } else {
            self.product(normed, &experts.router, Out::F32(logits));
            self.launches.extend(moe::route(logits, count, routing, bias, kv_slots, (ids, weights)));
            self.launches.extend(moe::group(ids, count, &grouped));
        }
        let (of_tokens, of_places) = (ProductRows::OfTokens { top: routing.top }, ProductRows::OfPlaces);
        let gated = room.gated.slice(0, slots * down.shape.inputs);
        let given = room.given.slice(0, slots * hidden);
        let gate = ending(*gate);
        if let Some(counts) = room.counts(self.rows, &grouped) {
            let (products, outs) = ([gate_up, down], [gated, given]);
            self.launches.extend(moe::pair(normed, of_tokens, products, &grouped, gate, outs, counts));
        } else {
            self.launches.extend(moe::product(normed, of_tokens, gate_up, &grouped, gate, gated));
            self.launches.extend(moe::product(gated, of_places, down, &grouped, Ending::Plain, given));
        }
        let shared = self.serves_all(experts, normed);
        let update = step_room.update.slice(0, self.rows * hidden);
        self.launches.extend(moe::combine(given, grouped.places, weights, routing.top, shared, update));
    }

    /// The same where ranks share the experts: what a round has of this one's rows goes to the ranks that
    /// serve it, and comes back.
    fn shared_experts(&mut self, sharing: &Sharing, of_ranks: &[usize], experts: &DeviceExperts) {
        let DeviceExperts { routing, held, .. } = experts;
        let (step_room, hidden, rows) = (self.room, self.widths.hidden, self.rows);
        let (room, top) = (&step_room.experts, routing.top);
        let (slots, count) = (rows * top, experts.router.shape.outputs);
        let normed = step_room.normed.slice(0, rows * hidden);
        let (ids, weights) = (room.ids.slice(0, slots), room.weights.slice(0, slots));
        let kv_slots = self.step.kv_slots().map(|slots| slots.of(&step_room.inputs));
        let logits = room.logits.slice(0, rows * count);
        self.product(normed, &experts.router, Out::F32(logits));
        let bias = experts.correction_bias;
        self.launches.extend(moe::route(logits, count, routing, bias, kv_slots, (ids, weights)));
        let shared = self.serves_all(experts, normed);
        let update = step_room.update.slice(0, rows * hidden);
        let counts = self.step.counts(rows).of(&step_room.inputs);
        let most = sharing.plan.layout.tokens;
        for (round, all) in sharing.plan.rounds(of_ranks).enumerate() {
            let first = (round * most).min(rows);
            let len = most.min(rows - first);
            let of_rows = |all: Slice<bf16>| all.part(first * hidden, len * hidden);
            let own = (len > 0).then(|| Own {
                tokens: RoundTokens {
                    counts: counts.part(round, 1),
                    x: of_rows(normed),
                    ids: ids.part(first * top, len * top),
                    weights: weights.part(first * top, len * top),
                },
                shared: shared.map(of_rows),
                out: of_rows(update),
            });
            self.launches.extend(sharing.round(held, own.as_ref(), all));
        }
    }

    /// Takes part in a layer in which only other ranks have rows, if there are ranks.
    pub(super) fn serve_others(&mut self, feed_forward: &DeviceFeedForward) {
        if let (Some((sharing, load)), DeviceFeedForward::Experts(experts)) = (self.sharing, feed_forward) {
            for all in sharing.plan.rounds(sharing.plan.tokens(load, self.layer)) {
                self.launches.extend(sharing.round(&experts.held, None, all));
            }
        }
    }

    /// What the expert gives that serves every row, if there is one.
    fn serves_all(&mut self, experts: &DeviceExperts, normed: Slice<bf16>) -> Option<Slice<bf16>> {
        let mlp = experts.shared.as_ref()?;
        let to = self.room.experts.shared.slice(0, normed.len);
        self.mlp(mlp, normed, to);
        Some(to)
    }

    /// A router's product, whose splits, if they are apart, are left to who reads them.
    fn router(&mut self, x: Slice<bf16>, weight: &Packed, logits: Slice<f32>) -> RouterSums {
        let cut = ProductCut::choose(weight.shape, self.rows);
        let partials: Slice<f32> = self.room.partials.whole();
        let launches = matmul::launch(x, self.rows, weight, cut, Out::F32(logits), partials);
        // What adds the splits comes last.
        self.launches.extend(launches.into_iter().take(1));
        if !cut.apart {
            return RouterSums { sums: logits, splits: 1, bias: None };
        }
        let len = cut.partial_floats(weight.shape, self.rows);
        let sums = Slice::new(partials.buffer, partials.offset, len);
        RouterSums { sums, splits: weight.shape.splits(), bias: weight.bias }
    }
}

#[cfg(test)]
impl<D: Device> super::CudaBackend<D> {
    /// What a step of `rows` rows left of its last layer with experts: by slot, the place.
    pub(in crate::model) fn places(&mut self, rows: usize) -> Result<Vec<u32>, DeviceError> {
        let model = &mut self.model;
        let slots = rows * ExpertWidths::new(&model.config).top;
        let device: &mut dyn Device = &mut model.device;
        device.download(model.room.experts.places.slice(0, slots))
    }

    /// The device that it computes on.
    pub(in crate::model) fn device(&mut self) -> &mut D {
        &mut self.model.device
    }
}
