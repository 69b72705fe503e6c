//! The plan that is made on the device beside the pure one: every message, word for word; and whole layers,
//! with the grouped products between the two ways.

use half::bf16;
use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::matmul::{Shape, Unit, Weights, pack_bf16};
use keyway_kernels::cuda::moe::{self, Ending, ExpertWeights, GroupedSlots, ProductRows};
use keyway_kernels::cuda::peer::Layout;
use keyway_kernels::moe::{ExchangePlan, Placement};

use super::{BLOCK_ROWS, Group, Round};
use crate::cases::{Lab, values};

/// Every message is what the pure plan says, in its very order.
pub(super) fn plans(lab: &mut Lab<'_>) -> Result<(), String> {
    let redundant = Placement::from_holders(4, vec![15, 1, 2, 4, 8, 3, 12, 6, 9, 15, 5, 10]);
    let redundant = redundant.map_err(|error| error.to_string())?;
    let many = Placement::even(200, 4);
    // The last one has more slots than a block keeps in its own memory.
    for (placement, top, tokens) in [(redundant, 3, 40), (many.clone(), 5, 13), (many, 32, 130)] {
        let experts = placement.experts();
        let held = (0..4).map(|rank| (0..experts).filter(|e| placement.holds(rank, *e)).count()).max();
        let layout = Layout { ranks: 4, held: held.unwrap_or(0), tokens, top, width: 8 };
        let group = Group::new(lab, layout, placement, 4)?;
        let id = |rank: usize, slot: usize| (slot * slot * 7 + slot * 31 + rank) % experts;
        let round = Round::new(&layout, 3, &[tokens, tokens - 1, 1, 0], id);
        let sent = round.upload(lab, &layout, &group.members[0])?;
        lab.launch(group.members[0].peers.dispatch_send(&sent))?;
        let mut plan = ExchangePlan::default();
        for from in 0..4 {
            let own = &round.ids[from * layout.slots()..][..round.counts[from] * top];
            plan.make(own, top, &group.placement);
            for to in 0..4 {
                group.is_the_part(lab, &round, &plan, from, to)?;
            }
        }
        group.free(lab);
    }
    Ok(())
}

impl Group {
    /// What `from` sent `to` in the first round is that part of its plan: experts, rows, tokens.
    fn is_the_part(
        &self,
        lab: &mut Lab<'_>,
        round: &Round,
        plan: &ExchangePlan,
        from: usize,
        to: usize,
    ) -> Result<(), String> {
        let Layout { width, held, .. } = self.layout;
        let (part, experts) = (&plan.parts[to], self.placement.experts());
        let at = to * self.layout.mailbox_bytes() + self.layout.message_at(1, from);
        let buffer = self.mailboxes.buffer().ok_or("mailboxes of one device")?;
        let read = |lab: &mut Lab<'_>, at: usize, words: usize| {
            lab.download(Slice::<u32>::new(buffer, at as u64, words))
        };
        let counts =
            |e: usize| part.experts.iter().find(|(expert, _)| *expert as usize == e).map_or(0, |(_, n)| *n);
        let mut ends: Vec<u32> = Vec::new();
        for expert in (0..experts).filter(|e| self.placement.holds(to, *e)) {
            ends.push(ends.last().copied().unwrap_or(0) + counts(expert));
        }
        ends.resize(held, part.rows.len() as u32);
        let what = format!("what rank {from} sends rank {to}");
        let found = read(lab, at, held)?;
        lab.same(&format!("ends of {what}"), &found, &ends)?;
        let sent = read(lab, at + self.layout.rows_at(), part.rows.len() * 2)?;
        let mut rows = vec![0; sent.len()];
        let returns = plan.returns.iter().enumerate().filter(|(_, (rank, _))| *rank as usize == to);
        for (slot, (_, row)) in returns {
            let row = *row as usize;
            (rows[row * 2], rows[row * 2 + 1]) = (part.rows[row], slot as u32);
        }
        lab.same(&format!("rows of {what}"), &sent, &rows)?;
        let tokens =
            Slice::<bf16>::new(buffer, (at + self.layout.tokens_at()) as u64, part.tokens.len() * width);
        let tokens = lab.download(tokens)?;
        for (place, token) in part.tokens.iter().enumerate() {
            let x = &round.x[(from * self.layout.tokens + *token as usize) * width..][..width];
            lab.same(&format!("tokens of {what}"), &tokens[place * width..][..width], x)?;
        }
        Ok(())
    }
}

/// With the grouped products of `moe.cu` in between, beside one rank that holds all experts and exchanges
/// nothing.
pub(super) fn whole_layer(lab: &mut Lab<'_>) -> Result<(), String> {
    let (ranks, experts, tokens, top) = (4, 8, 3, 2);
    let (up, down) = (
        Shape { outputs: 128, inputs: 64, weights: Weights::Bf16 },
        Shape { outputs: 64, inputs: 64, weights: Weights::Bf16 },
    );
    let layout = Layout { ranks, held: experts / ranks, tokens, top, width: up.inputs };
    let image = |shape: Shape, seed: u64| -> Vec<u8> {
        let of = |expert: u64| pack_bf16(shape, &values(seed + expert, shape.outputs * shape.inputs));
        (0..experts as u64).flat_map(of).collect()
    };
    let (up_images, down_images) = (lab.upload(&image(up, 70))?, lab.upload(&image(down, 90))?);
    let held = |shape: Shape, images: Slice<u8>, first: usize, count: usize| {
        let (bytes, offset) = (shape.packed_bytes(), images.offset);
        let images = Slice::new(images.buffer, offset + (first * bytes) as u64, count * bytes);
        ExpertWeights { count, shape, unit: Unit::Warp, images, scales: None, bias: None }
    };
    let group = Group::new(lab, layout, Placement::even(experts, ranks), ranks)?;
    let member = &group.members[0];
    let round = Round::new(&layout, 5, &[3, 0, 3, 1], |rank, slot| (slot * 5 + rank * 3) % experts);
    let sent = round.upload(lab, &layout, member)?;
    lab.launch(member.peers.dispatch_send(&sent))?;
    lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
    for rank in 0..ranks {
        let (rows, grouped) = member.peers.grouped(rank, &member.arrivals);
        let gated = lab.poisoned(layout.rows() * up.outputs / 2)?;
        let y = layout.rows() * layout.width;
        let y = Slice::new(member.outputs.buffer, (rank * y * 2) as u64, y);
        let first = held(up, up_images, rank * layout.held, layout.held);
        let second = held(down, down_images, rank * layout.held, layout.held);
        lab.launch(moe::product(rows, ProductRows::OfPlaces, &first, &grouped, Ending::Silu, gated))?;
        lab.launch(moe::product(gated, ProductRows::OfPlaces, &second, &grouped, Ending::Plain, y))?;
    }
    let out: Slice<bf16> = lab.poisoned(sent.x.len)?;
    lab.launch([member.peers.combine_send(member.outputs), member.peers.combine_receive(&sent, None, out)])?;
    let out = lab.download(out)?;
    for rank in 0..ranks {
        let (slots, own) = (round.counts[rank] * top, round.counts[rank] * layout.width);
        let x = lab.upload(&round.x[rank * tokens * layout.width..][..own])?;
        let ids = lab.upload(&round.ids[rank * layout.slots()..][..slots])?;
        let weights = lab.upload(&round.weights[rank * layout.slots()..][..slots])?;
        let grouped = GroupedSlots {
            places: lab.poisoned(slots)?,
            slots_at: lab.poisoned(slots)?,
            items: lab.poisoned(GroupedSlots::item_words(slots, experts, BLOCK_ROWS))?,
            item_count: lab.poisoned(1)?,
            block_rows: BLOCK_ROWS,
        };
        let (gated, y, alone) =
            (lab.poisoned(slots * up.outputs / 2)?, lab.poisoned(slots * layout.width)?, lab.poisoned(own)?);
        let (first, second) = (held(up, up_images, 0, experts), held(down, down_images, 0, experts));
        let launches = [
            moe::group(ids, experts, &grouped),
            moe::product(x, ProductRows::OfTokens { top }, &first, &grouped, Ending::Silu, gated),
            moe::product(gated, ProductRows::OfPlaces, &second, &grouped, Ending::Plain, y),
            moe::combine(y, grouped.places, weights, top, None, alone),
        ];
        lab.launch(launches.into_iter().flatten())?;
        let alone = lab.download(alone)?;
        let own = &out[rank * tokens * layout.width..][..own];
        lab.same(&format!("the layer of rank {rank}"), own, &alone)?;
    }
    group.free(lab);
    Ok(())
}
