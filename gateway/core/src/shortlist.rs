//! The choice by cost among many workers, without each worker's price: the same pick, to the bit, as
//! [`crate::route::consider`] makes of all of them.
//!
//! What a worker costs changes from moment to moment though nothing happens there: its backlog is worked off,
//! and what it was sent counts for less. Yet all of that fades alike, so the numbers of all workers are kept
//! as of one *epoch*, in rows, and are brought up to a moment with a single exponential. What comes of that
//! is off by some rounding errors, so it is taken as a range that the price lies in. Prices themselves are
//! worked out for those whose range says that they may be the cheapest, or that they may or may not count as
//! equal to it; mostly that is one worker.
//!
//! It knows workers of weight 1 of which only this gateway's requests are known. What other gateways say, or
//! the engines' gauges, fades otherwise: there [`Shortlist::consider`] gives no answer.

mod ranges;
#[cfg(test)]
mod tests;

use std::time::Duration;

use self::ranges::{Paces, Ranges, Scene};
use crate::balance;
use crate::cost::CostModel;
use crate::index::{MatchLengths, PrefixIndex, WorkerId};
use crate::load::Load;
use crate::pick::{Candidate, CostRules, Pick, RequestView, Reuse, Turn, cost_on, picked_one};
use crate::rendezvous;
use crate::spread_map::SpreadMap;
use crate::waiting_room::Ahead;

/// Nanoseconds from which on a moment in floating point is not the moment itself; after 104 days.
const EXACT_NS: u128 = 1 << f64::MANTISSA_DIGITS;

/// Workers by what a choice weighs of them.
#[derive(Debug)]
pub struct Shortlist {
    workers: Vec<WorkerId>,
    places: SpreadMap<WorkerId, u32>,
    /// What each draws by among equals.
    spreads: Vec<u64>,
    paces: Paces,
    /// Whether a worker cannot be weighed here: nothing was noted of it yet, or others were heard of.
    unfit: Vec<bool>,
    unfit_count: usize,
    /// Leading blocks of the request at hand that each holds, and what follows of it.
    matched: Vec<u32>,
    ranges: Ranges,
    /// A place whose worker had nothing to do when last looked for.
    idle: usize,
}

/// A choice, and what it was made from.
#[derive(Debug)]
pub struct Shortlisted {
    /// The same as of all candidates.
    pub pick: Pick,
    /// The chosen one, as it was weighed.
    pub chosen: Candidate,
    /// The lengths of all candidates' matches.
    pub lengths: MatchLengths,
}

impl Shortlist {
    /// Of these workers, which nothing was sent to yet. Their places are as they come here.
    pub fn new(workers: impl Iterator<Item = WorkerId>) -> Self {
        let workers: Vec<WorkerId> = workers.collect();
        let len = workers.len();
        Self {
            places: (0..).zip(&workers).map(|(place, worker)| (*worker, place)).collect(),
            spreads: workers.iter().map(|worker| rendezvous::spread(*worker)).collect(),
            workers,
            paces: Paces::new(len),
            unfit: vec![true; len],
            unfit_count: len,
            matched: vec![0; len],
            ranges: Ranges::new(len),
            idle: 0,
        }
    }

    /// What a worker was sent has changed, or how many tokens it computes in a millisecond.
    pub fn note(&mut self, place: usize, load: &Load, tokens_per_ms: f64) {
        let basis = load.basis();
        let was_unfit = std::mem::replace(&mut self.unfit[place], basis.is_none());
        self.unfit_count = self.unfit_count + usize::from(basis.is_none()) - usize::from(was_unfit);
        if let Some((requests, pace)) = basis {
            self.paces.set(place, requests, &pace, tokens_per_ms);
        }
    }

    /// Whether some worker's backlog, with what waits `ahead`, is surely no more than this; `false` where
    /// that is not known.
    pub fn is_open(&mut self, now: Duration, backlog_ms: f64, ahead: &Ahead) -> bool {
        if self.unfit_count > 0 || !self.paces.can_be_at(now) {
            return false;
        }
        let is_open = |place: &usize| {
            let own_ms = self.paces.most_backlog_ms(*place, now);
            own_ms <= backlog_ms && own_ms + ahead.of(self.workers[*place]) <= backlog_ms
        };
        let found = (self.idle..self.workers.len()).chain(0..self.idle).find(is_open);
        self.idle = found.unwrap_or(self.idle);
        found.is_some()
    }

    /// Picks the one that [`crate::route::consider`] picks of all these workers by [`crate::Policy::Prefix`];
    /// `None` where that takes all of them: few, or with others' requests. `candidate` makes the one at a
    /// place, with its load at this moment and nothing else.
    pub fn consider(
        &mut self,
        request: &RequestView<'_>,
        ahead: &Ahead,
        (now, turn): (Duration, &Turn),
        index: &PrefixIndex,
        candidate: impl Fn(usize) -> Candidate,
    ) -> Option<Shortlisted> {
        let all = self.workers.len();
        if all < 2 || self.unfit_count > 0 || !self.paces.can_be_at(now) || now.as_nanos() >= EXACT_NS {
            return None;
        }
        let lengths = self.fill_matches(request, index);
        // All requests are this gateway's.
        let hottest = index.hottest(now, request, &lengths, (all, 1.0));
        self.fill_ahead(ahead);
        let scene = Scene { model: CostModel::default(), request, hottest, longest: self.longest() };
        self.ranges.fill(&scene, &self.matched);
        self.ranges.range(&scene, &mut self.paces, now);

        let ready = |place: usize| {
            let mut one = candidate(place);
            debug_assert!(one.weight == 1.0 && one.source.is_none(), "{one:?}");
            one.matched_blocks = self.matched[place];
            let Reuse { tokens, uses } = hottest.reuse(request, &one);
            one.reuse = Reuse { tokens: tokens.max(0.0), uses };
            one.ahead_ms = ahead.of(one.worker);
            one
        };
        Some(self.choose(&scene, turn, ready, lengths))
    }

    /// As [`mod@crate::pick`] chooses by cost.
    fn choose(
        &self,
        scene: &Scene<'_>,
        turn: &Turn,
        ready: impl Fn(usize) -> Candidate,
        lengths: MatchLengths,
    ) -> Shortlisted {
        let Scene { model, request, longest, .. } = scene;
        let price = |place: usize| cost_on(model, request, &ready(place));
        let (mut cheapest, mut least_ms) = (0, f64::INFINITY);
        for place in self.ranges.may_be_least() {
            let ms = price(place).total_ms();
            if ms < least_ms {
                (cheapest, least_ms) = (place, ms);
            }
        }
        let queue = model.queue(&ready(cheapest));
        let rules = CostRules { model, request, queue, longest: *longest };
        let limit_ms = rules.limit_ms(least_ms);
        let equals = self.ranges.equals(limit_ms, cheapest, |place| price(place).total_ms());
        let index = balance::first_of_equal_weights(equals, rules.key(turn), |place| self.spreads[place]);
        let index = index.unwrap_or(cheapest);
        let chosen = ready(index);
        let reason = rules.reason(chosen.held_blocks());
        let pick = picked_one(request, &chosen, (index, reason), cost_on(model, request, &chosen));
        Shortlisted { pick, chosen, lengths }
    }

    /// How much of the request each worker holds.
    fn fill_matches(&mut self, request: &RequestView<'_>, index: &PrefixIndex) -> MatchLengths {
        let (mut lengths, mut matched) = (MatchLengths::default(), std::mem::take(&mut self.matched));
        matched.fill(0);
        let (mut length, mut holders) = (0, 0);
        index.each_match(request.reusable(), |worker, blocks| {
            let Some(place) = self.place(worker) else { return };
            matched[place] = blocks;
            if blocks != length {
                lengths.add_holders(length, holders);
                (length, holders) = (blocks, 0);
            }
            holders += 1;
        });
        lengths.add_holders(length, holders);
        self.matched = matched;
        lengths
    }

    fn fill_ahead(&mut self, ahead: &Ahead) {
        self.ranges.ahead_ms.fill(0.0);
        for (worker, ms) in ahead.each() {
            if let Some(place) = self.place(worker) {
                self.ranges.ahead_ms[place] = ms;
            }
        }
    }

    fn place(&self, worker: WorkerId) -> Option<usize> {
        // Often a worker's name is its place.
        let named = worker.0 as usize;
        if self.workers.get(named) == Some(&worker) {
            return Some(named);
        }
        self.places.get(&worker).map(|place| *place as usize)
    }

    /// Blocks that the one who holds the most of the request holds.
    fn longest(&self) -> u32 {
        self.matched.iter().copied().max().unwrap_or(0)
    }
}
