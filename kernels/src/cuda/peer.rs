//! Launches `peer.cu`: tokens go to the ranks that hold their experts, and outputs back, through memory that
//! the ranks reach themselves. The ranks may share a GPU, in one process ([`Mailboxes::in_one`]) or in
//! several (`gpu::ipc`), or have one each that sees the others' memory; the kernels know base addresses
//! alone. What goes where is [`crate::moe::ExchangePlan`]'s, made on the device, so that a graph of these
//! launches can be replayed for any tokens.
//!
//! A round is [`Peers::dispatch_send`], [`Peers::dispatch_receive`], the experts' products,
//! [`Peers::combine_send`], [`Peers::combine_receive`], in this order on every rank; the next round's
//! `dispatch_send` may come before this one's `combine_receive`, and no sooner. A rank takes part whether it
//! has tokens or not. Only receivers wait, `deadline` at most.

mod layout;
mod offer;
mod report;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;

use super::constants::moe::ITEM_WORDS;
use super::constants::numbers::PACKET;
use super::constants::peer::{self, LANES, PART, SHARED_WORDS, STATE_WORDS, WHOLE};
use super::moe::{EXPERTS_MAX, GroupedSlots};
use super::{Argument, Device, DeviceError, Kernel, Launch, Slice};
use crate::fabric::FabricError;
use crate::moe::Placement;

pub use layout::{CONTROL_BYTES, Layout, LayoutError, PAIRS_MAX, TOKENS_MAX, TOP_MAX};
pub use offer::{HANDLE_BYTES, exchange as exchange_handles};
pub use report::Report;

/// The first round of a new group. Any number but 0 will do, if it is the same on all ranks.
pub const FIRST_ROUND: u32 = 1;
/// Slots of a rank whose ways a block keeps in its own memory: 16 KB.
const SHARED_SLOTS_MAX: usize = 4096;
/// Blocks that copy whole rows, for each processor: as many as it holds of 256 threads at 2 KB of registers
/// each.
const BLOCKS_PER_PROCESSOR: usize = 4;

/// What keeps mailboxes where they are.
pub trait Keeper: fmt::Debug + Send + Sync {}
impl<T: fmt::Debug + Send + Sync> Keeper for T {}

/// Where the mailbox of each rank of a group lies, as one device sees them.
#[derive(Debug)]
pub struct Mailboxes {
    layout: Layout,
    addresses: Vec<u64>,
    /// Mappings are closed when this goes.
    _keeper: Option<Box<dyn Keeper>>,
    /// The device's buffer that holds all of them.
    buffer: Option<u64>,
}

/// Which rank serves which expert, as the device reads it.
#[derive(Debug)]
struct Ways {
    experts: usize,
    /// `[experts]`: the only holder and the expert's number among those of that rank.
    homes: Option<Slice<u32>>,
    /// If some have several: `[experts]`, a bit for each rank, and `[ranks, experts]`, those numbers.
    holders: Option<Slice<u32>>,
    locals: Option<Slice<u32>>,
    /// `[count, slots]`, where a block has no room for them.
    of_slots: Option<Slice<u32>>,
}

/// Some ranks of a group, neighbours by number, on one device.
#[derive(Debug)]
pub struct Peers {
    mailboxes: Arc<Mailboxes>,
    /// The first rank here, and how many.
    first: usize,
    count: usize,
    deadline: Duration,
    ways: Ways,
    /// Of launches that copy whole rows, for each rank here.
    blocks: usize,
    bases: Slice<u64>,
    /// `[count, STATE_WORDS]`, behind them `[count, ranks, held]`: the rows that each expert was sent.
    report: Slice<u32>,
    /// `[count, tokens, ranks]`, `[count, rows, 2]`.
    places: Slice<u32>,
    origins: Slice<u32>,
}

/// The tokens of the ranks here in one round. A rank's arrays are as long as those of one with all the
/// layout's tokens; of one rank alone as long as there can be tokens in the round, for which launches have
/// blocks.
#[derive(Debug, Clone, Copy)]
pub struct RoundTokens {
    /// `[count]`: how many there are.
    pub counts: Slice<u32>,
    /// `[count, tokens, width]`: what goes into the layer's experts.
    pub x: Slice<bf16>,
    /// `[count, tokens, top]`: the router's choice.
    pub ids: Slice<u32>,
    /// `[count, tokens, top]`: the outputs' weights.
    pub weights: Slice<f32>,
}

/// What comes for the experts of the ranks here.
#[derive(Debug, Clone, Copy)]
pub struct Arrivals {
    /// `[count, rows, width]`, as many as the layout has: by expert, then by the rank they are of, then by
    /// slot.
    pub rows: Slice<bf16>,
    /// How many rows come for a rank at most, so that the products have no more blocks than they need.
    pub most: usize,
    /// `[count, items_max, 4]`: local expert, first row, end.
    pub items: Slice<u32>,
    /// `[count]`: how many items there are.
    pub item_counts: Slice<u32>,
    /// Rows of an item.
    pub block_rows: usize,
}

// === impl Mailboxes ===

impl Mailboxes {
    /// The mailboxes of ranks that all share this device and process.
    pub fn in_one(device: &mut dyn Device, layout: Layout) -> Result<Self, DeviceError> {
        layout.check()?;
        let buffer = device.allocate(layout.ranks * layout.mailbox_bytes())?;
        let base = device.address_of(buffer)?;
        let addresses = (0..layout.ranks).map(|rank| base + (rank * layout.mailbox_bytes()) as u64).collect();
        Ok(Self { layout, addresses, _keeper: None, buffer: Some(buffer) })
    }

    /// Mailboxes at these addresses, by rank, which stay there for as long as `keeper` lives.
    ///
    /// # Panics
    /// If there is not one for each rank.
    pub fn kept_by(layout: Layout, addresses: Vec<u64>, keeper: Box<dyn Keeper>) -> Self {
        assert_eq!(addresses.len(), layout.ranks, "peers: a mailbox for each rank");
        Self { layout, addresses, _keeper: Some(keeper), buffer: None }
    }

    /// What they were made for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The device's buffer, where all mailboxes are in one.
    pub fn buffer(&self) -> Option<u64> {
        self.buffer
    }
}

// === impl Ways ===

impl Ways {
    fn new(
        device: &mut dyn Device,
        layout: &Layout,
        count: usize,
        placement: &Placement,
    ) -> Result<Self, DeviceError> {
        let (experts, holders) = (placement.experts(), placement.holders());
        let locals = locals(placement);
        assert!(locals.most <= layout.held, "peers: a rank holds more experts than the layout says");
        assert!(experts <= EXPERTS_MAX, "peers: more than {EXPERTS_MAX} experts");
        let slots = count * layout.slots();
        let of_slots = if layout.slots() > SHARED_SLOTS_MAX { Some(device.slice(slots)?) } else { None };
        if holders.iter().any(|mask| !mask.is_power_of_two()) {
            let (holders, locals) = (device.upload(holders)?, device.upload(&locals.numbers)?);
            return Ok(Self { experts, homes: None, holders: Some(holders), locals: Some(locals), of_slots });
        }
        let home = |(expert, mask): (usize, &u32)| {
            let rank = mask.trailing_zeros();
            rank << peer::RANK_BIT | locals.numbers[rank as usize * experts + expert]
        };
        let homes: Vec<u32> = holders.iter().enumerate().map(home).collect();
        Ok(Self { experts, homes: Some(device.upload(&homes)?), holders: None, locals: None, of_slots })
    }
}

// === impl Peers ===

impl Peers {
    /// Ranks `first..first + count` of a group, of which this device has room for what they keep to
    /// themselves. Before the first launch every rank of the group must have got this far: where they are
    /// processes, they must meet in between.
    ///
    /// # Panics
    /// If there are no such ranks, or the placement is one of other ranks or puts more experts on one than
    /// the layout says.
    pub fn new(
        device: &mut dyn Device,
        mailboxes: &Arc<Mailboxes>,
        first: usize,
        count: usize,
        placement: &Placement,
        deadline: Duration,
    ) -> Result<Self, DeviceError> {
        let layout = mailboxes.layout;
        let there = first + count <= layout.ranks && placement.ranks() == layout.ranks;
        assert!(count > 0 && there, "peers: there are no such ranks");
        let peers = Self {
            mailboxes: Arc::clone(mailboxes),
            first,
            count,
            deadline,
            ways: Ways::new(device, &layout, count, placement)?,
            blocks: (device.processors() * BLOCKS_PER_PROCESSOR).div_ceil(count).min(layout.rows()),
            bases: device.upload(&mailboxes.addresses)?,
            report: device.slice(count * (STATE_WORDS + layout.ranks * layout.held))?,
            places: device.slice(count * layout.tokens * layout.ranks)?,
            origins: device.slice(count * layout.rows() * 2)?,
        };
        device.zero(peers.report.buffer, peers.report.len * size_of::<u32>())?;
        device.launch(&peers.reset(FIRST_ROUND))?;
        // Which waits until it is done.
        device.download(peers.report)?;
        Ok(peers)
    }

    /// Gives back what the ranks kept to themselves. The mailboxes stay with the caller that made them.
    pub fn free(&self, device: &mut dyn Device) {
        let Ways { homes, holders, locals, of_slots, .. } = self.ways;
        let words =
            [Some(self.report), homes, holders, locals, of_slots, Some(self.places), Some(self.origins)];
        let words = words.into_iter().flatten().map(|slice| slice.buffer);
        for buffer in words.chain([self.bases.buffer]) {
            device.free(buffer);
        }
    }

    /// Makes the group begin anew with `round`, after a failure: the same on all ranks, when none of their
    /// launches is under way, and none may follow before all ranks are through with it.
    pub fn reset(&self, round: u32) -> Launch {
        self.launch(Kernel::peer_reset, [self.count, 1, 1], PART, 0, vec![round.into()])
    }

    /// Plans the tokens' ways and sends them.
    ///
    /// # Panics
    /// If shapes disagree.
    pub fn dispatch_send(&self, tokens: &RoundTokens) -> [Launch; 2] {
        let layout = self.mailboxes.layout;
        self.check(tokens);
        let Ways { experts, homes, holders, locals, of_slots } = self.ways;
        let of_several = if homes.is_none() { 2 * experts + layout.ranks } else { 0 };
        let of_slots_here = if of_slots.is_none() { layout.slots() } else { 0 };
        let plan = vec![
            tokens.counts.into(),
            tokens.ids.into(),
            homes.into(),
            holders.into(),
            locals.into(),
            experts.into(),
            of_slots.into(),
            self.places.into(),
            self.loads().into(),
        ];
        let words = layout.ranks * layout.held + of_several + of_slots_here;
        let send = vec![tokens.counts.into(), tokens.x.into(), self.places.into()];
        [
            self.launch(Kernel::peer_plan, [self.count, 1, 1], LANES * layout.ranks, words, plan),
            self.launch(Kernel::peer_dispatch_send, self.parts(tokens), PART, 0, send),
        ]
    }

    /// Waits for the tokens of all ranks and gathers their rows by expert.
    ///
    /// # Panics
    /// If shapes disagree.
    pub fn dispatch_receive(&self, to: &Arrivals) -> Launch {
        let layout = self.mailboxes.layout;
        let items_max = self.items_max(to.block_rows);
        assert!(
            to.rows.len == self.count * layout.rows() * layout.width
                && to.items.len == self.count * items_max * ITEM_WORDS
                && to.item_counts.len == self.count
                && to.most <= layout.rows(),
            "peers: shapes disagree"
        );
        let pairs = layout.ranks * layout.held;
        let arguments = vec![
            to.rows.into(),
            self.origins.into(),
            to.items.into(),
            to.item_counts.into(),
            items_max.into(),
            to.block_rows.into(),
        ];
        let words = 2 * pairs + layout.held + 2;
        self.launch(Kernel::peer_dispatch_receive, [self.blocks, 1, self.count], WHOLE, words, arguments)
    }

    /// Sends `outputs` `[count, rows, width]`, each where its input was among [`Arrivals::rows`], back to its
    /// token's rank.
    ///
    /// # Panics
    /// If shapes disagree.
    pub fn combine_send(&self, outputs: Slice<bf16>) -> Launch {
        let layout = self.mailboxes.layout;
        assert_eq!(outputs.len, self.count * layout.rows() * layout.width, "peers: shapes disagree");
        let arguments = vec![outputs.into(), self.origins.into()];
        self.launch(Kernel::peer_combine_send, [self.blocks, 1, self.count], WHOLE, 0, arguments)
    }

    /// Waits for the outputs of all ranks and sums those of each token, in slot order and last what `shared`
    /// `[count, tokens, width]` has of it, to `out` of the same shape.
    ///
    /// # Panics
    /// If shapes disagree.
    pub fn combine_receive(
        &self,
        tokens: &RoundTokens,
        shared: Option<Slice<bf16>>,
        out: Slice<bf16>,
    ) -> Launch {
        self.check(tokens);
        let alike = out.len == tokens.x.len && shared.is_none_or(|shared| shared.len == out.len);
        assert!(alike, "peers: shapes disagree");
        let arguments = vec![tokens.counts.into(), tokens.weights.into(), shared.into(), out.into()];
        self.launch(Kernel::peer_combine_receive, self.parts(tokens), PART, 0, arguments)
    }

    /// Of the `number`th rank here, its rows as the grouped products want them: each place is its own.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn grouped(&self, number: usize, arrivals: &Arrivals) -> (Slice<bf16>, GroupedSlots) {
        let layout = self.mailboxes.layout;
        let items = self.items_max(arrivals.block_rows) * 4;
        // Products of places ask for neither slots nor places, but for how many there can be.
        let places = self.origins.part(number * layout.rows() * 2, arrivals.most);
        let grouped = GroupedSlots {
            places,
            slots_at: places,
            items: arrivals.items.part(number * items, items),
            item_count: arrivals.item_counts.part(number, 1),
            block_rows: arrivals.block_rows,
        };
        let row = layout.rows() * layout.width;
        (arrivals.rows.part(number * row, arrivals.most * layout.width), grouped)
    }

    /// Items that any rows of a rank can need, at `block_rows` rows an item.
    pub fn items_max(&self, block_rows: usize) -> usize {
        let layout = self.mailboxes.layout;
        GroupedSlots::items_max(layout.rows(), layout.held, block_rows)
    }

    /// The error that ended the group, if one did: after it launches do nothing, and what they should have
    /// written means nothing. Waits for what was launched.
    pub fn fault(&self, device: &mut dyn Device) -> Result<Option<FabricError>, DeviceError> {
        let words = device.download(self.report)?;
        let report = |number| Report::of(&words, &self.mailboxes.layout, self.count, number);
        let faults = (0..self.count).filter_map(|number| report(number).fault(self.deadline));
        Ok(faults.map(|(error, _)| error).min_by_key(|error| error.rank))
    }

    /// The words of a [`Report`] of each rank here: to be fetched with a round's results.
    pub fn report(&self) -> Slice<u32> {
        self.report
    }

    /// Of the [`Peers::report`], the rows that each expert was sent.
    fn loads(&self) -> Slice<u32> {
        self.report.starting_at(self.count * STATE_WORDS)
    }

    fn check(&self, tokens: &RoundTokens) {
        let layout = self.mailboxes.layout;
        let rows = tokens.x.len / layout.width;
        let known = rows == self.count * layout.tokens || (self.count == 1 && rows < layout.tokens);
        assert!(
            known
                && tokens.counts.len == self.count
                && tokens.x.len == rows * layout.width
                && tokens.ids.len == rows * layout.top
                && tokens.weights.len == tokens.ids.len,
            "peers: shapes disagree"
        );
    }

    /// The grid of launches that take a part of a row: columns, tokens, ranks here.
    fn parts(&self, tokens: &RoundTokens) -> [usize; 3] {
        let layout = self.mailboxes.layout;
        // A rank without tokens takes part too.
        let rows = (tokens.x.len / layout.width / self.count).max(1);
        [layout.width.div_ceil(PACKET * PART), rows, self.count]
    }

    fn launch(
        &self,
        kernel: Kernel,
        grid: [usize; 3],
        threads: usize,
        words: usize,
        arguments: Vec<Argument>,
    ) -> Launch {
        let Layout { ranks, held, tokens, top, width } = self.mailboxes.layout;
        let deadline_us = u32::try_from(self.deadline.as_micros()).unwrap_or(u32::MAX);
        let group = [self.first, deadline_us as usize, ranks, held, tokens, top, width].map(Argument::from);
        let own: [Argument; 2] = [self.bases.into(), self.report.into()];
        Launch {
            kernel,
            grid: grid.map(|size| size as u32),
            cluster: 1,
            threads: threads as u32,
            shared_bytes: ((SHARED_WORDS + words) * 4) as u32,
            arguments: own.into_iter().chain(group).chain(arguments).collect(),
        }
    }
}

/// An expert's number among those of a rank, ascending.
struct Locals {
    /// `[ranks, experts]`; of an expert that a rank does not hold it means nothing.
    numbers: Vec<u32>,
    /// The most that a rank holds.
    most: usize,
}

fn locals(placement: &Placement) -> Locals {
    let (mut numbers, mut most) = (Vec::new(), 0);
    for rank in 0..placement.ranks() {
        let mut held = 0;
        for expert in 0..placement.experts() {
            numbers.push(held as u32);
            held += usize::from(placement.holds(rank, expert));
        }
        most = most.max(held);
    }
    Locals { numbers, most }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_numbered_among_those_of_their_rank() {
        let placement = Placement::from_holders(2, vec![0b01, 0b11, 0b10, 0b01]).unwrap();
        let Locals { numbers, most } = locals(&placement);
        let of = |rank: usize, expert: usize| numbers[rank * 4 + expert];
        assert_eq!((of(0, 0), of(0, 1), of(0, 3)), (0, 1, 2));
        assert_eq!((of(1, 1), of(1, 2), most), (0, 1, 3));
    }
}
