//! The exchange between ranks of one device: whatever the routing, the placement, the number of ranks and the
//! order in which they are launched, a token's sum has the bits of the dense loop; a rank that stays away is
//! named.

mod faults;
mod layers;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use keyway_kernels::cuda::peer::{Arrivals, Layout, Mailboxes, Peers, Report, RoundTokens};
use keyway_kernels::cuda::{Launch, Slice};
use keyway_kernels::fabric::FabricError;
use keyway_kernels::moe::Placement;

use super::{Lab, values, wide};

/// On a GPU by its clock; the emulator's counts questions.
const DEADLINE: Duration = Duration::from_millis(2);
const BLOCK_ROWS: usize = 16;
/// Numbers of rounds begin again, with 2, after three more.
const LATE: u32 = u32::MAX - 2;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    for ranks in [1, 2, 4, 8] {
        routings(lab, ranks)?;
    }
    wide_rows(lab)?;
    redundant_experts(lab)?;
    recorded_rounds(lab)?;
    few_tokens(lab)?;
    layers::plans(lab)?;
    a_fast_rank(lab)?;
    faults::messages_that_come_late(lab)?;
    faults::a_rank_that_stays_away(lab)?;
    faults::a_rank_that_waits_is_not_named(lab)?;
    faults::nonsense(lab)?;
    faults::misuse(lab)?;
    layers::whole_layer(lab)
}

/// What one round asks of a group: of each rank, its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    counts: Vec<usize>,
    /// `[ranks, tokens, top]`, `[ranks, tokens, width]`, `[ranks, tokens, top]`.
    ids: Vec<u32>,
    x: Vec<bf16>,
    weights: Vec<f32>,
    /// What is summed last, `[ranks, tokens, width]`.
    shared: Vec<bf16>,
    /// Whether ranks that are launched alone have arrays as long as their tokens.
    exact: bool,
}

/// A group on one device, its ranks launched `together` at a time.
pub(crate) struct Group {
    layout: Layout,
    placement: Placement,
    mailboxes: Arc<Mailboxes>,
    pub(crate) members: Vec<Member>,
}

/// Ranks that are launched together, and their buffers.
pub(crate) struct Member {
    pub(crate) peers: Peers,
    first: usize,
    count: usize,
    pub(crate) arrivals: Arrivals,
    outputs: Slice<bf16>,
}

impl Round {
    /// `counts` tokens by rank, of which slot `s` of rank `r` chooses expert `id(r, s)`.
    pub(crate) fn new(
        layout: &Layout,
        seed: usize,
        counts: &[usize],
        id: impl Fn(usize, usize) -> usize,
    ) -> Self {
        let slots = layout.slots();
        let every = |of: &dyn Fn(usize, usize) -> u32| -> Vec<u32> {
            (0..layout.ranks).flat_map(|rank| (0..slots).map(move |slot| of(rank, slot))).collect()
        };
        // What lies behind a rank's tokens is no expert.
        let known = |rank: usize, slot: usize| slot / layout.top < counts[rank];
        let of = |rank: usize, slot: usize| if known(rank, slot) { id(rank, slot) as u32 } else { u32::MAX };
        let weights = wide(&values(seed as u64 + 50, layout.rows()));
        Self {
            counts: counts.to_vec(),
            ids: every(&of),
            x: values(seed as u64, layout.ranks * layout.tokens * layout.width),
            weights: weights.iter().map(|w| w.abs().min(1.0) + 0.1).collect(),
            shared: values(seed as u64 + 90, layout.ranks * layout.tokens * layout.width),
            exact: false,
        }
    }

    /// Which of all ranks' rows of `width` a member's arrays have.
    fn rows(&self, layout: &Layout, member: &Member, width: usize) -> Range<usize> {
        let (first, row) = (member.first, layout.tokens * width);
        let len =
            if self.exact && member.count == 1 { self.counts[first] * width } else { member.count * row };
        first * row..first * row + len
    }

    pub(crate) fn upload(
        &self,
        lab: &mut Lab<'_>,
        layout: &Layout,
        member: &Member,
    ) -> Result<RoundTokens, String> {
        let (first, count) = (member.first, member.count);
        let slots = self.rows(layout, member, layout.top);
        let counts: Vec<u32> = self.counts[first..first + count].iter().map(|n| *n as u32).collect();
        Ok(RoundTokens {
            counts: lab.upload(&counts)?,
            x: lab.upload(&self.x[self.rows(layout, member, layout.width)])?,
            ids: lab.upload(&self.ids[slots.clone()])?,
            weights: lab.upload(&self.weights[slots])?,
        })
    }

    /// The dense loop: of each rank's tokens, slot by slot, in f32 and rounded once.
    fn dense(&self, layout: &Layout, rank: usize) -> Vec<bf16> {
        self.dense_of(layout, rank, Some(&self.shared), |id, x| expert(id, x).collect())
    }

    /// The same of any experts.
    fn dense_of(
        &self,
        layout: &Layout,
        rank: usize,
        shared: Option<&[bf16]>,
        expert: impl Fn(usize, &[bf16]) -> Vec<bf16>,
    ) -> Vec<bf16> {
        let mut out = Vec::new();
        for token in 0..self.counts[rank] {
            let row = rank * layout.tokens + token;
            let x = &self.x[row * layout.width..][..layout.width];
            let mut sums = vec![0.0f32; layout.width];
            for slot in row * layout.top..(row + 1) * layout.top {
                for (sum, value) in sums.iter_mut().zip(expert(self.ids[slot] as usize, x)) {
                    *sum = self.weights[slot].mul_add(value.to_f32(), *sum);
                }
            }
            for (sum, shared) in
                sums.iter_mut().zip(shared.into_iter().flat_map(|s| &s[row * layout.width..]))
            {
                *sum += shared.to_f32();
            }
            out.extend(sums.into_iter().map(bf16::from_f32));
        }
        out
    }
}

/// What an expert makes of a row: a function of both alone, such that large terms cancel and another order of
/// summation shows.
fn expert(expert: usize, x: &[bf16]) -> impl Iterator<Item = bf16> {
    let factor = expert as f32 + if expert.is_multiple_of(2) { 300.0 } else { -299.0 };
    x.iter().map(move |v| bf16::from_f32(v.to_f32() * factor + 0.3 * expert as f32))
}

impl Group {
    fn new(lab: &mut Lab<'_>, layout: Layout, placement: Placement, together: usize) -> Result<Self, String> {
        let mailboxes = Mailboxes::in_one(lab.device, layout).map_err(|e| e.to_string())?;
        lab.buffers.extend(mailboxes.buffer());
        Self::joined(lab, Arc::new(mailboxes), placement, 0..layout.ranks, together, DEADLINE)
    }

    /// These ranks of a group whose mailboxes are there already.
    pub(crate) fn joined(
        lab: &mut Lab<'_>,
        mailboxes: Arc<Mailboxes>,
        placement: Placement,
        ranks: Range<usize>,
        together: usize,
        deadline: Duration,
    ) -> Result<Self, String> {
        let layout = *mailboxes.layout();
        let mut members = Vec::new();
        for first in ranks.step_by(together) {
            let peers = Peers::new(lab.device, &mailboxes, first, together, &placement, deadline);
            let peers = peers.map_err(|e| e.to_string())?;
            let elements = together * layout.rows() * layout.width;
            let arrivals = Arrivals {
                rows: lab.poisoned(elements)?,
                items: lab.poisoned(together * peers.items_max(BLOCK_ROWS) * 4)?,
                item_counts: lab.poisoned(together)?,
                most: layout.rows(),
                block_rows: BLOCK_ROWS,
            };
            members.push(Member {
                peers,
                first,
                count: together,
                arrivals,
                outputs: lab.poisoned(elements)?,
            });
        }
        Ok(Self { layout, placement, mailboxes, members })
    }

    /// Begins anew, everything poisoned but what a reset makes.
    fn reset(&self, lab: &mut Lab<'_>, round: u32) -> Result<(), String> {
        let buffer = self.mailboxes.buffer().ok_or("mailboxes of one device")?;
        let poison = vec![0xffu8; self.layout.ranks * self.layout.mailbox_bytes()];
        lab.device.write(buffer, 0, &poison).map_err(|e| e.to_string())?;
        self.members.iter().try_for_each(|member| lab.launch([member.peers.reset(round)]))
    }

    pub(crate) fn fault(&self, lab: &mut Lab<'_>, member: usize) -> Result<Option<FabricError>, String> {
        self.members[member].peers.fault(lab.device).map_err(|e| e.to_string())
    }

    /// What each rank, launched alone, reports.
    fn reports(&self, lab: &mut Lab<'_>) -> Result<Vec<Report>, String> {
        let words = self.members.iter().map(|member| lab.download(member.peers.report()));
        words.map(|words| Ok(Report::of(&words?, &self.layout, 1, 0))).collect()
    }

    /// The experts of a member's ranks, on the host, from what its launches left on the device.
    fn experts(&self, lab: &mut Lab<'_>, member: &Member) -> Result<(), String> {
        let width = self.layout.width;
        let counts = lab.download(member.arrivals.item_counts)?;
        let mut outputs = vec![bf16::NAN; member.outputs.len];
        for (number, items_here) in counts.into_iter().enumerate() {
            let (rows, grouped) = member.peers.grouped(number, &member.arrivals);
            let (rows, items) = (lab.download(rows)?, lab.download(grouped.items)?);
            let rank = member.first + number;
            let held: Vec<usize> =
                (0..self.placement.experts()).filter(|e| self.placement.holds(rank, *e)).collect();
            let mut end_before = 0;
            for item in items.chunks_exact(4).take(items_here as usize) {
                let [local, first, end] = [item[0], item[1], item[2]].map(|word| word as usize);
                if first != end_before || end <= first || end - first > BLOCK_ROWS {
                    return Err(format!("rank {rank}: items are not in order: {items:?}"));
                }
                for row in first..end {
                    let at = (number * self.layout.rows() + row) * width;
                    let x = &rows[row * width..][..width];
                    outputs[at..at + width].iter_mut().zip(expert(held[local], x)).for_each(|(o, v)| *o = v);
                }
                end_before = end;
            }
        }
        lab.device.overwrite(member.outputs, &outputs).map_err(|e| e.to_string())
    }

    /// Sums what came back for a member's ranks and holds it against the dense loop.
    fn sum(
        &self,
        lab: &mut Lab<'_>,
        member: &Member,
        tokens: &RoundTokens,
        round: &Round,
    ) -> Result<(), String> {
        let out: Slice<bf16> = lab.poisoned(tokens.x.len)?;
        let shared = lab.upload(&round.shared[round.rows(&self.layout, member, self.layout.width)])?;
        lab.launch([member.peers.combine_receive(tokens, Some(shared), out)])?;
        if let Some(fault) = member.peers.fault(lab.device).map_err(|e| e.to_string())? {
            return Err(fault.to_string());
        }
        let out = lab.download(out)?;
        for number in 0..member.count {
            let rank = member.first + number;
            let row = out.len() / member.count;
            let own = &out[number * row..][..row];
            let (sums, behind) = own.split_at(round.counts[rank] * self.layout.width);
            lab.same(&format!("sums of rank {rank}"), sums, &round.dense(&self.layout, rank))?;
            // Behind a rank's tokens nothing is written.
            lab.same("what no token has", behind, &vec![bf16::from_bits(0xffff); behind.len()])?;
        }
        Ok(())
    }

    /// One round of all ranks, step by step; members go in another order in every step.
    pub(crate) fn round(&self, lab: &mut Lab<'_>, round: &Round) -> Result<(), String> {
        let forward: Vec<&Member> = self.members.iter().collect();
        let backward: Vec<&Member> = self.members.iter().rev().collect();
        let mut tokens = Vec::new();
        for member in &forward {
            tokens.push(round.upload(lab, &self.layout, member)?);
        }
        for (member, tokens) in backward.iter().zip(tokens.iter().rev()) {
            lab.launch(member.peers.dispatch_send(tokens))?;
        }
        for member in &forward {
            lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
            self.experts(lab, member)?;
        }
        for member in &backward {
            lab.launch([member.peers.combine_send(member.outputs)])?;
        }
        for (member, tokens) in forward.iter().zip(&tokens) {
            self.sum(lab, member, tokens, round)?;
        }
        Ok(())
    }

    pub(crate) fn free(self, lab: &mut Lab<'_>) {
        self.members.iter().for_each(|member| member.peers.free(lab.device));
        lab.clear();
    }
}

/// Experts of a token, and which expert a slot of a rank chooses.
type Routing<'a> = (usize, &'a dyn Fn(usize, usize) -> usize);

/// Every routing, several rounds in a row, all ranks in one launch and each in its own.
fn routings(lab: &mut Lab<'_>, ranks: usize) -> Result<(), String> {
    let (experts, tokens) = (8, 5);
    // Uniform; skewed, some tokens twice to one expert; all to one; ranks without rows; all experts.
    let routings: [Routing<'_>; 5] = [
        (2, &|rank, slot| (slot * 5 + rank) % 8),
        (3, &|rank, slot| if slot % 5 == 4 { (slot + rank) % 8 } else { slot % 2 }),
        (1, &|_, _| 6),
        (3, &|_, slot| slot % 3),
        (8, &|rank, slot| (slot * 3 + rank) % 8),
    ];
    for (kind, (top, id)) in routings.into_iter().enumerate() {
        for together in if ranks == 1 { vec![1] } else { vec![ranks, 1] } {
            let layout = Layout { ranks, held: 8_usize.div_ceil(ranks), tokens, top, width: 40 };
            let what = |fault: String| format!("{ranks} ranks, {together} a launch, routing {kind}: {fault}");
            let group = Group::new(lab, layout, Placement::even(experts, ranks), together)?;
            // Rounds that go past the end of their numbers.
            group.reset(lab, LATE)?;
            let few: Vec<usize> = (0..ranks).map(|rank| [0, tokens, 1][(rank + 1) % 3]).collect();
            for (number, counts) in
                [vec![tokens; ranks], few, vec![0; ranks], vec![tokens; ranks]].iter().enumerate()
            {
                let round = Round::new(&layout, 10 * kind + number, counts, id);
                group.round(lab, &round).map_err(what)?;
            }
            group.free(lab);
        }
    }
    Ok(())
}

/// Rows of more than one block's columns, on a GPU those of the largest models: 128 tokens over eight ranks.
fn wide_rows(lab: &mut Lab<'_>) -> Result<(), String> {
    let mut layouts = vec![Layout { ranks: 2, held: 4, tokens: 3, top: 2, width: 1032 }];
    if lab.is_large() {
        layouts.push(Layout { ranks: 8, held: 16, tokens: 16, top: 8, width: 7168 });
        layouts.push(Layout { ranks: 4, held: 32, tokens: 700, top: 6, width: 2048 });
    }
    for layout in layouts {
        let experts = layout.ranks * layout.held;
        let group = Group::new(lab, layout, Placement::even(experts, layout.ranks), layout.ranks)?;
        for number in 0..3 {
            let id = |rank: usize, slot: usize| (slot * 37 + rank * 11 + number) % experts;
            let round = Round::new(&layout, number, &vec![layout.tokens; layout.ranks], id);
            group.round(lab, &round).map_err(|fault| format!("{layout:?}: {fault}"))?;
        }
        group.free(lab);
    }
    Ok(())
}

/// Experts with several holders share their slots as the host's plan has it, and no bit changes.
fn redundant_experts(lab: &mut Lab<'_>) -> Result<(), String> {
    let placement = Placement::from_holders(3, vec![0b111, 0b001, 0b010, 0b110, 0b100, 0b101]);
    let placement = placement.map_err(|error| error.to_string())?;
    let layout = Layout { ranks: 3, held: 4, tokens: 24, top: 3, width: 16 };
    for together in [3, 1] {
        let group = Group::new(lab, layout, placement.clone(), together)?;
        for number in 0..2 {
            let id =
                |rank: usize, slot: usize| if slot.is_multiple_of(2) { 0 } else { (slot * slot + rank) % 6 };
            group.round(lab, &Round::new(&layout, number, &[24, 7, 23], id))?;
        }
        group.free(lab);
    }
    Ok(())
}

/// Ranks whose arrays have no more than their tokens, one of them none: launches have blocks for those alone.
/// What they report afterwards are the rows that each expert was sent, and that time has passed.
fn few_tokens(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 3, held: 3, tokens: 700, top: 2, width: 24 };
    let placement = Placement::even(8, 3);
    let mut group = Group::new(lab, layout, placement.clone(), 1)?;
    let counts = [5, 0, 3];
    let (mut sent, mut before) = (vec![0; 8 * 3], Vec::new());
    for number in 0..3 {
        let id = move |rank: usize, slot: usize| (slot * 3 + rank + number) % 8;
        let round = Round { exact: true, ..Round::new(&layout, number, &counts, id) };
        for member in &mut group.members {
            member.arrivals.most = 8 * layout.top;
        }
        group.round(lab, &round)?;
        for (rank, count) in counts.iter().enumerate().filter(|_| number > 0) {
            (0..count * layout.top).for_each(|slot| sent[rank * 8 + id(rank, slot)] += 1);
        }
        if number == 0 {
            before = group.reports(lab)?;
        }
    }
    for (rank, (before, now)) in before.iter().zip(group.reports(lab)?).enumerate() {
        let mut expected = vec![0; 3 * layout.held];
        for to in 0..3 {
            let held = (0..8).filter(|expert| placement.holds(to, *expert));
            held.enumerate().for_each(|(local, e)| expected[to * layout.held + local] = sent[rank * 8 + e]);
        }
        lab.same(&format!("rows that rank {rank} sent"), &now.rows_since(before), &expected)?;
        let times = now.times_since(before);
        if [times.dispatch, times.compute, times.combine].iter().any(Duration::is_zero) {
            return Err(format!("a part of rank {rank}'s rounds took no time: {times:?}"));
        }
    }
    group.free(lab);
    Ok(())
}

/// A round recorded once serves any tokens, since its numbers are the device's. Its experts give back what
/// they get.
fn recorded_rounds(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 4, held: 2, tokens: 3, top: 2, width: 16 };
    let group = Group::new(lab, layout, Placement::even(8, 4), 4)?;
    let member = &group.members[0];
    let round = |number: usize| {
        let counts: Vec<usize> = (0..4).map(|rank| (rank + number) % 4).collect();
        Round::new(&layout, number, &counts, move |rank, slot| (slot * 3 + rank * number) % 8)
    };
    let tokens = round(0).upload(lab, &layout, member)?;
    let out: Slice<bf16> = lab.poisoned(tokens.x.len)?;
    let mut launches: Vec<Launch> = member.peers.dispatch_send(&tokens).into();
    launches.push(member.peers.dispatch_receive(&member.arrivals));
    launches.push(member.peers.combine_send(member.arrivals.rows));
    launches.push(member.peers.combine_receive(&tokens, None, out));
    let recording = lab.device.record(&launches).map_err(|e| e.to_string())?;
    for number in 0..4 {
        let round = round(number);
        let counts: Vec<u32> = round.counts.iter().map(|count| *count as u32).collect();
        let device = &mut *lab.device;
        let written = device.overwrite(tokens.counts, &counts).and_then(|()| {
            device.overwrite(tokens.ids, &round.ids)?;
            device.overwrite(tokens.x, &round.x)?;
            device.overwrite(tokens.weights, &round.weights)?;
            device.replay(recording)
        });
        written.map_err(|e| e.to_string())?;
        let sums = lab.download(out)?;
        for rank in 0..4 {
            let own = &sums[rank * layout.tokens * layout.width..][..round.counts[rank] * layout.width];
            let dense = round.dense_of(&layout, rank, None, |_, x| x.to_vec());
            lab.same(&format!("sums of rank {rank} in replay {number}"), own, &dense)?;
        }
    }
    lab.device.forget(recording);
    group.free(lab);
    Ok(())
}

/// One rank sends its next tokens before the others have looked at the ones before; and is done before they
/// begin.
fn a_fast_rank(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 3, held: 3, tokens: 4, top: 2, width: 24 };
    let group = Group::new(lab, layout, Placement::even(8, 3), 1)?;
    let round = |number: usize| {
        Round::new(&layout, number, &[4, 4, 3], move |rank, slot| (slot * 3 + rank + number) % 8)
    };
    let [fast, one, two] = &group.members[..] else { return Err("three members".into()) };
    let mut sent = Vec::new();
    for member in [fast, one, two] {
        sent.push(round(0).upload(lab, &layout, member)?);
    }
    for (member, tokens) in [fast, one, two].into_iter().zip(&sent) {
        lab.launch(member.peers.dispatch_send(tokens))?;
    }
    for number in 0..4 {
        // The next round's tokens of the fast one are there before anybody has received this round's.
        let next = round(number + 1);
        let ahead = next.upload(lab, &layout, fast)?;
        lab.launch(fast.peers.dispatch_send(&ahead))?;
        for member in [two, fast, one] {
            lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
            group.experts(lab, member)?;
            lab.launch([member.peers.combine_send(member.outputs)])?;
        }
        group.sum(lab, fast, &sent[0], &round(number))?;
        sent[0] = ahead;
        for (i, member) in [(2, two), (1, one)] {
            group.sum(lab, member, &sent[i], &round(number))?;
            sent[i] = next.upload(lab, &layout, member)?;
            lab.launch(member.peers.dispatch_send(&sent[i]))?;
        }
    }
    group.free(lab);
    Ok(())
}
