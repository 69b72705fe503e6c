//! Multi-head latent attention on a device, absorbed as in `mla.rs`: weights, buffers, launches. What each
//! head does with its part of every row is a grouped product whose groups are heads.

use half::bf16;
use keyway_kernels::cuda::matmul::{Out, Packed};
use keyway_kernels::cuda::moe::{self, Ending, GroupedSlots, ProductRows};
use keyway_kernels::cuda::paged_attention::Pages;
use keyway_kernels::cuda::rms_norm::{self, NormRows};
use keyway_kernels::cuda::rope::{self, ProjectedTokens};
use keyway_kernels::cuda::{Device, DeviceError, Slice};
use keyway_kernels::heads::Heads;
use keyway_kernels::matmul::{PackedMatrix, WeightType};

use super::forward::Forward;
use super::room::Grown;
use super::step::GroupStep;
use super::weights::{Kept, Order, Upload};
use crate::model::config::{Attention, Config, Latent};
use crate::model::mla::NORM_EPS;
use crate::model::weights::LatentWeights;

/// The weights of one layer's latent attention, packed for the device.
#[derive(Debug)]
pub(super) struct DeviceLatent {
    /// To the queries' bottleneck, and its norm.
    pub(super) query_down: Option<(Packed, Slice<bf16>)>,
    pub(super) query: Packed,
    /// To the latent, then the rotated key that all heads share.
    pub(super) kv_down: Packed,
    pub(super) latent_norm: Slice<bf16>,
    /// Per head, from a query to the latent's space, `[rank + rope_dim, nope_dim + rope_dim]`; ones take
    /// along what turns.
    pub(super) absorb: moe::ExpertWeights,
    /// Per head, from what was attended to a value, `[value_dim, rank]`.
    pub(super) expand: moe::ExpertWeights,
    pub(super) output: Packed,
}

impl DeviceLatent {
    /// The products that all rows go through whole.
    pub(super) fn packed(&self) -> impl Iterator<Item = Packed> {
        let down = self.query_down.map(|(down, _)| down);
        [self.query, self.kv_down, self.output].into_iter().chain(down)
    }
}

/// One head's absorbed key factor, with ones for the part of a query that turns.
fn with_ones(absorb: &PackedMatrix, rope_dim: usize) -> PackedMatrix {
    let (rank, nope_dim) = (absorb.outputs(), absorb.inputs());
    PackedMatrix::pack(rank + rope_dim, nope_dim + rope_dim, WeightType::Bf16, |n, row| {
        row.fill(0.0);
        match n.checked_sub(rank) {
            None => absorb.copy_row(n, &mut row[..nope_dim]),
            Some(turned) => row[nope_dim + turned] = 1.0,
        }
    })
}

impl Upload<'_> {
    /// The heads' factors stay bf16, however the rest is kept.
    pub(super) fn latent(&mut self, latent: &LatentWeights, kept: Kept) -> Result<DeviceLatent, DeviceError> {
        let query_down = match &latent.query_down {
            Some((down, norm)) => Some((self.linear(down, kept)?, self.vector(norm)?)),
            None => None,
        };
        let rope_dim = latent.shape.rope_dim;
        let absorb: Vec<PackedMatrix> = latent.absorb.iter().map(|head| with_ones(head, rope_dim)).collect();
        let (absorb, expand) = (absorb.iter().map(|m| (m, None)), latent.expand.iter().map(|m| (m, None)));
        Ok(DeviceLatent {
            query_down,
            query: self.linear(&latent.query, kept)?,
            kv_down: self.linear(&latent.kv_down, kept)?,
            latent_norm: self.vector(&latent.latent_norm)?,
            absorb: self.bank(absorb, Kept::Bf16, Order::AsStored)?,
            expand: self.bank(expand, Kept::Bf16, Order::AsStored)?,
            output: self.linear(&latent.output, kept)?,
        })
    }
}

/// What a row takes; all 0 where attention is another.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LatentWidths {
    heads: usize,
    /// Elements of the queries' bottleneck; 0 where they have none.
    query_down: usize,
    /// The latent and the key that all heads share.
    latent: usize,
    /// Of all heads: queries in the latent's space, and values.
    absorbed: usize,
    values: usize,
}

impl LatentWidths {
    pub(super) fn new(config: &Config) -> Self {
        let Attention::Latent(Latent { heads, query_rank, rank, rope_dim, value_dim, .. }) = config.attention
        else {
            return Self::default();
        };
        Self {
            heads,
            query_down: query_rank.unwrap_or(0),
            latent: rank + rope_dim,
            absorbed: heads * (rank + rope_dim),
            values: heads * value_dim,
        }
    }
}

/// The buffers of a step; a slot is one head's part of a row.
#[derive(Debug, Default)]
pub(super) struct LatentRoom {
    /// By slot, its head.
    heads: Grown,
    places: Grown,
    slots_at: Grown,
    items: Grown,
    item_count: Grown,
    query_down: Grown,
    latent: Grown,
    absorbed: Grown,
    values: Grown,
}

impl LatentRoom {
    /// For a step of `rows` rows. How many buffers moved.
    pub(super) fn reserve(
        &mut self,
        device: &mut dyn Device,
        widths: &LatentWidths,
        rows: usize,
    ) -> Result<u64, DeviceError> {
        let LatentWidths { heads, query_down, latent, absorbed, values } = *widths;
        let (slots, word, element) = (rows * heads, size_of::<u32>(), size_of::<bf16>());
        let mut moves = self.heads.reserve(device, slots * word)?;
        if moves > 0 {
            let of_slots: Vec<u32> = (0..slots).map(|slot| (slot % heads) as u32).collect();
            device.overwrite(self.heads.whole(), &of_slots)?;
        }
        for (buffer, bytes) in [
            (&mut self.places, slots * word),
            (&mut self.slots_at, slots * word),
            (&mut self.items, GroupedSlots::item_words(slots, heads, GroupedSlots::ROWS_MIN) * word),
            (&mut self.item_count, heads.min(1) * word),
            (&mut self.query_down, rows * query_down * element),
            (&mut self.latent, rows * latent * element),
            (&mut self.absorbed, rows * absorbed * element),
            (&mut self.values, rows * values * element),
        ] {
            moves += buffer.reserve(device, bytes)?;
        }
        Ok(moves)
    }
}

impl Forward<'_> {
    /// Turned queries of every row in the latent's space, and latents to their pages. Distance between rows
    /// as well.
    pub(super) fn latent_queries(
        &mut self,
        layer: &DeviceLatent,
        group: &GroupStep,
        pages: &Pages,
    ) -> (Slice<bf16>, usize) {
        let (room, rows, widths) = (self.room, self.rows, self.widths);
        let normed = room.normed.slice(0, rows * widths.hidden);
        let mut x = normed;
        if let Some((down, norm)) = &layer.query_down {
            let width = down.shape.outputs;
            x = room.latent.query_down.slice(0, rows * width);
            self.product(normed, down, Out::Bf16(x));
            self.launches.extend(rms_norm::launch(x, None, *norm, NORM_EPS, NormRows::whole(rows, width), x));
        }
        let queries = room.qkv.slice(0, rows * widths.qkv);
        self.product(x, &layer.query, Out::Bf16(queries));
        let (stride, rank) = (widths.latent.latent, layer.latent_norm.len);
        let latent = room.latent.latent.slice(0, rows * stride);
        self.product(normed, &layer.kv_down, Out::Bf16(latent));
        let heads = Heads { stride, first: 0, count: 1, pitch: stride };
        let of_latent = NormRows { rows, width: rank, heads };
        self.launches.extend(rms_norm::launch(latent, None, layer.latent_norm, NORM_EPS, of_latent, latent));
        let absorbed = room.latent.absorbed.slice(0, rows * widths.latent.absorbed);
        self.by_head(queries, &layer.absorb, absorbed);
        let tokens = ProjectedTokens {
            x: absorbed,
            stride: widths.latent.absorbed,
            kv: Some((latent, stride)),
            heads: widths.latent.heads,
            norms: None,
            angles: self.step.angles.map(|part| part.of(&room.inputs).cast()),
            rotated_from: rank,
            pairing: self.config.rope.pairing,
            slots: group.slots.of(&room.inputs),
        };
        self.launches.extend(rope::launch(&tokens, pages, [1.0; 2]));
        (absorbed, widths.latent.absorbed)
    }

    /// From what was attended to the update.
    pub(super) fn latent_output(&mut self, layer: &DeviceLatent, attended: Slice<bf16>, update: Slice<bf16>) {
        let values = self.room.latent.values.slice(0, self.rows * self.widths.latent.values);
        self.by_head(attended, &layer.expand, values);
        self.product(values, &layer.output, Out::Bf16(update));
    }

    /// Each head's part of every row by that head's factor.
    fn by_head(&mut self, x: Slice<bf16>, factors: &moe::ExpertWeights, y: Slice<bf16>) {
        let (room, heads) = (&self.room.latent, factors.count);
        let slots = self.rows * heads;
        let block_rows = GroupedSlots::choose_rows(slots, heads, factors.shape.weights, factors.unit);
        let grouped = GroupedSlots {
            places: room.places.slice(0, slots),
            slots_at: room.slots_at.slice(0, slots),
            items: room.items.slice(0, GroupedSlots::item_words(slots, heads, block_rows)),
            item_count: room.item_count.slice(0, 1),
            block_rows,
        };
        // Once for all layers, and again where only rows whose logits are wanted go on.
        if self.rows_by_head != self.rows {
            self.rows_by_head = self.rows;
            self.launches.extend(moe::group(room.heads.slice(0, slots), heads, &grouped));
        }
        self.launches.extend(moe::product(x, ProductRows::OfSlots, factors, &grouped, Ending::Plain, y));
    }
}
