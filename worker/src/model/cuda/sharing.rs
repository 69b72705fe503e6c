//! Experts that ranks share over the device's own exchange (`kernels/src/cuda/peer.rs`): which of them are
//! here, the exchange's buffers, and the launches of a layer's rounds. All ranks launch as many rounds a
//! step; a round takes so many tokens of each rank at most, so that what must hold the worst routing stays
//! bounded (`sharing/plan.rs`). Who is in the group, and what becomes of its faults, is `lead.rs`' and
//! `rank.rs`' business.

mod plan;

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use keyway_kernels::cuda::moe::{self, Ending, GroupedSlots, ProductRows};
use keyway_kernels::cuda::peer::{Arrivals, FIRST_ROUND, Layout, Mailboxes, Peers, Report, RoundTokens};
use keyway_kernels::cuda::{Device, DeviceError, Launch, Slice};
use keyway_kernels::fabric::{Fabric, FabricError, Phase};

pub(super) use self::plan::Load;
pub(in crate::model) use self::plan::Plan;
use crate::limits::EXPERT_JOIN_MAX;
use crate::model::config::Gate;

/// Makes the mailboxes of a group of processes, whose other ends are reached over the fabric.
pub(crate) type OpenMailboxes<D> =
    fn(&mut D, Layout, &mut dyn Fabric, Duration) -> Result<Mailboxes, DeviceError>;

/// A layer's experts as far as they are here.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldExperts {
    /// Gates and values in the order of [`moe::woven_row`].
    pub(super) gate_up: moe::ExpertWeights,
    pub(super) gate: Gate,
    pub(super) down: moe::ExpertWeights,
}

/// The tokens of the first rank here in a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Own {
    pub(super) tokens: RoundTokens,
    /// What is added to their sums, and where these go.
    pub(super) shared: Option<Slice<bf16>>,
    pub(super) out: Slice<bf16>,
}

/// What a rank's experts work on.
#[derive(Debug)]
struct Room {
    /// Rows that came, between the products, and behind them.
    rows: Slice<bf16>,
    gated: Slice<bf16>,
    given: Slice<bf16>,
    items: Slice<u32>,
    item_count: Slice<u32>,
    /// A count of no tokens.
    none: Slice<u32>,
}

/// The ranks of a group that are in this process, and what their device keeps for them.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) plan: Plan,
    rooms: Vec<Room>,
    /// Their ends of the exchange; none before the ranks have joined.
    peers: Vec<Peers>,
    /// The number of the first round that is not launched yet.
    next_round: u32,
    /// What the first rank here reported last.
    pub(super) last: Option<Report>,
    deadline: Duration,
}

// === impl Own ===

impl Own {
    /// No tokens, of a rank that takes part nevertheless.
    fn none(room: &Room) -> Self {
        let words = room.items.part(0, 0);
        let nothing = room.given.part(0, 0);
        let tokens = RoundTokens { counts: room.none, x: nothing, ids: words, weights: words.cast() };
        Self { tokens, shared: None, out: nothing }
    }
}

// === impl Room ===

impl Room {
    fn new(device: &mut dyn Device, plan: &Plan) -> Result<Self, DeviceError> {
        let Plan { layout, inner, .. } = plan;
        let rows = layout.rows();
        Ok(Self {
            rows: device.slice(rows * layout.width)?,
            gated: device.slice(rows * inner)?,
            given: device.slice(rows * layout.width)?,
            items: device.slice(GroupedSlots::item_words(rows, layout.held, GroupedSlots::ROWS_MIN))?,
            item_count: device.slice(1)?,
            none: device.upload(&[0u32])?,
        })
    }

    /// Where a round of at most `most` rows arrives, in items of `block_rows` rows.
    fn arrivals(&self, layout: &Layout, most: usize, block_rows: usize) -> Arrivals {
        let items = GroupedSlots::item_words(layout.rows(), layout.held, block_rows);
        Arrivals {
            rows: self.rows,
            most,
            items: self.items.part(0, items),
            item_counts: self.item_count,
            block_rows,
        }
    }
}

// === impl Sharing ===

impl Sharing {
    /// Room for `here` ranks of the group.
    pub(super) fn new(
        device: &mut dyn Device,
        plan: Plan,
        here: usize,
        deadline: Duration,
    ) -> Result<Self, DeviceError> {
        let rooms = (0..here).map(|_| Room::new(device, &plan)).collect::<Result<_, _>>()?;
        Ok(Self { plan, rooms, peers: Vec::new(), next_round: FIRST_ROUND, last: None, deadline })
    }

    /// Joins all ranks, which are here.
    pub(super) fn join_all(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let mailboxes = Arc::new(Mailboxes::in_one(device, self.plan.layout)?);
        let join = |rank| Peers::new(device, &mailboxes, rank, 1, &self.plan.placement, self.deadline);
        self.peers = (0..self.rooms.len()).map(join).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Joins a group of processes as one rank of it. What a group before had is given back, whose ranks must
    /// be gone.
    pub(super) fn join<D: Device>(
        &mut self,
        device: &mut D,
        fabric: &mut dyn Fabric,
        open: OpenMailboxes<D>,
    ) -> Result<(), DeviceError> {
        for peers in self.peers.drain(..) {
            peers.free(device);
        }
        (self.next_round, self.last) = (FIRST_ROUND, None);
        let mailboxes = Arc::new(open(device, self.plan.layout, fabric, EXPERT_JOIN_MAX)?);
        let peers = Peers::new(device, &mailboxes, fabric.rank(), 1, &self.plan.placement, self.deadline)?;
        // No rank sends before every rank's mailbox is as a group begins with it.
        let met = fabric.exchange(Phase::Placement, EXPERT_JOIN_MAX);
        met.map_err(|error| DeviceError(error.to_string()))?;
        self.peers.push(peers);
        Ok(())
    }

    /// The first rank's words for [`Sharing::read`], to be fetched behind a step.
    pub(super) fn report(&self) -> Option<Slice<u32>> {
        self.peers.first().map(Peers::report)
    }

    /// What the first rank here reported; the error that ended the group, if one did, in a step of `load`
    /// whose first round is `first_round`.
    pub(super) fn read(&self, words: &[u32], load: &Load, first_round: u32) -> Result<Report, FabricError> {
        let report = Report::of(words, &self.plan.layout, 1, 0);
        match report.fault(self.deadline) {
            None => Ok(report),
            Some((fault, round)) => {
                let layer = self.plan.layer_of(load, round.wrapping_sub(first_round));
                Err(layer.map_or(fault.clone(), |layer| fault.in_layer(layer)))
            }
        }
    }

    /// Takes note that a step is launched; the number of its first round.
    pub(super) fn begin(&mut self, load: &Load) -> u32 {
        let first = self.next_round;
        let [rounds, _] = self.plan.rounds_of(load);
        let (next, past_the_end) = first.overflowing_add(rounds);
        // 0 and 1 are left out when numbers begin again.
        self.next_round = if past_the_end { next + 2 } else { next };
        first
    }

    /// The launches of one round of a layer for the ranks here, of which only the first may have tokens:
    /// `own`, none if absent. `all`: the tokens of all ranks, at most.
    pub(super) fn round(&self, experts: &HeldExperts, own: Option<&Own>, all: usize) -> Vec<Launch> {
        let Layout { top, .. } = self.plan.layout;
        let slots = all * top;
        let (weights, unit) = (experts.down.shape.weights, experts.down.unit);
        let block_rows = GroupedSlots::choose_rows(slots, self.plan.placement.experts(), weights, unit);
        let own_of = |here: usize| match own {
            Some(own) if here == 0 => *own,
            _ => Own::none(&self.rooms[here]),
        };
        let ranks: Vec<(usize, &Peers, Own)> =
            self.peers.iter().enumerate().map(|(here, peers)| (here, peers, own_of(here))).collect();
        let mut launches = Vec::new();
        for (_, peers, own) in &ranks {
            launches.extend(peers.dispatch_send(&own.tokens));
        }
        for (here, peers, _) in &ranks {
            let room = &self.rooms[*here];
            let arrivals = room.arrivals(&self.plan.layout, slots, block_rows);
            launches.push(peers.dispatch_receive(&arrivals));
            launches.extend(self.products(experts, *here, peers.grouped(0, &arrivals)));
        }
        for (here, peers, _) in &ranks {
            launches.push(peers.combine_send(self.rooms[*here].given));
        }
        for (_, peers, own) in &ranks {
            launches.push(peers.combine_receive(&own.tokens, own.shared, own.out));
        }
        launches
    }

    /// A rank's experts on the rows that came.
    fn products(
        &self,
        experts: &HeldExperts,
        here: usize,
        (rows, grouped): (Slice<bf16>, GroupedSlots),
    ) -> impl Iterator<Item = Launch> {
        let (room, places) = (&self.rooms[here], grouped.places.len);
        let [gate_up, down] = [experts.gate_up, experts.down].map(|bank| self.bank(&bank, here));
        let gated = room.gated.part(0, places * down.shape.inputs);
        let given = room.given.part(0, places * down.shape.outputs);
        let ending = ending(experts.gate);
        let first = moe::product(rows, ProductRows::OfPlaces, &gate_up, &grouped, ending, gated);
        let second = moe::product(gated, ProductRows::OfPlaces, &down, &grouped, Ending::Plain, given);
        first.into_iter().chain(second)
    }

    /// A rank's experts among those of all ranks here, whose experts are neighbours.
    fn bank(&self, bank: &moe::ExpertWeights, here: usize) -> moe::ExpertWeights {
        if self.rooms.len() == 1 {
            return *bank;
        }
        let first: usize = (0..here).map(|rank| self.plan.held(rank)).sum();
        let count = self.plan.held(here);
        let bytes = bank.shape.packed_bytes();
        let scales = bank.scales.map(|scales| {
            let each = scales.len / bank.count;
            scales.part(first * each, count * each)
        });
        moe::ExpertWeights {
            count,
            images: bank.images.part(first * bytes, count * bytes),
            scales,
            bias: bank.bias.map(|bias| bias.part(first * bank.shape.outputs, count * bank.shape.outputs)),
            ..*bank
        }
    }
}

/// How the first of an expert's products ends.
pub(super) fn ending(gate: Gate) -> Ending {
    match gate {
        Gate::Silu => Ending::Silu,
        Gate::Clamped(by) => Ending::Clamped(by),
    }
}
