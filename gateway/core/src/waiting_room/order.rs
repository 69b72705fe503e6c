//! In which order those who wait are gone through: by response ratio or arrival, who has missed the objective
//! behind who can still keep it, who asked for an objective of its own and is about to miss it first, owners
//! in turn. Who begins is not decided here.

use std::{cmp::Reverse, time::Duration};

use super::{Entry, FORESEEN, RoomRules, WaitingRoom};

/// Of those who begin while both wait, one in so many would miss the objective: enough that no request
/// starves, little enough that workers who can do little more than comes serve what comes.
const LATE_ONE_IN: u32 = 32;

/// From so many horizons before it would be late on, a request with an objective of its own goes first: what
/// goes before it until then fills a worker twice.
const URGENT_HORIZONS: f64 = 2.0;

/// How much of what workers are sent beforehand is kept for those who can keep the objective. With less than
/// a step of an engine left, a worker would make steps without a prompt between two of a backlog, which cost
/// a tenth of what a fleet can do.
const RESERVED: f64 = 0.5;

impl<R> WaitingRoom<R> {
    pub(super) fn order(&mut self, now: Duration) {
        // Mostly one comes and none waits.
        if self.waiting.len() < 2 {
            return;
        }
        let grain = self.rules.grain_ms;
        if self.rules.by_response_ratio {
            let ratio = |entry: &Entry<R>| {
                let waited = now.saturating_sub(entry.arrived).as_secs_f64() * 1e3;
                (grain + waited) / entry.own_ms.unwrap_or(0.0).max(f64::MIN_POSITIVE)
            };
            // Numbers that are not negative are in the order of their bits; and entries are larger than keys.
            self.waiting.sort_by_cached_key(|entry| (Reverse(ratio(entry).to_bits()), entry.number));
        } else {
            self.waiting.sort_by_key(|entry| entry.number);
        }
        self.yield_to_those_in_time(now);
        self.let_the_urgent_go_first(now);
        self.fair.arrange(&mut self.waiting, |entry| entry.share);
    }

    /// Puts one late request behind each so many that are in time, and the rest at the end; each kind stays
    /// in its order.
    fn yield_to_those_in_time(&mut self, now: Duration) {
        let rules = self.rules;
        let is_late = |entry: &Entry<R>| entry.is_late(now, &rules);
        if !self.waiting.iter().any(is_late) {
            return;
        }
        let (late, in_time): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(is_late);
        let mut late = late.into_iter();
        let mut since_late = self.in_time_begun;
        for entry in in_time {
            if since_late >= LATE_ONE_IN - 1 {
                self.waiting.extend(late.next());
                since_late = 0;
            }
            self.waiting.push(entry);
            since_late += 1;
        }
        self.waiting.extend(late);
    }

    /// Puts those first who will miss an objective of their own if they wait for much longer, in their order.
    fn let_the_urgent_go_first(&mut self, now: Duration) {
        let rules = self.rules;
        // The sort keeps the order of equals.
        if self.waiting.iter().any(|entry| entry.is_urgent(now, &rules)) {
            self.waiting.sort_by_cached_key(|entry| !entry.is_urgent(now, &rules));
        }
    }
}

impl<R> Entry<R> {
    /// Whether its first token is foreseen to come too late for the objective even if it begins now, as the
    /// last one before its worker's horizon.
    pub(super) fn is_late(&self, now: Duration, rules: &RoomRules) -> bool {
        self.share
            .objective
            .or(rules.objective)
            .is_some_and(|objective| self.slack_ms(now, objective, rules) < 0.0)
    }

    /// Whether an objective of its own can be kept, but not for much longer. One of the rules is everyone's,
    /// and their order is the best for all of them together.
    fn is_urgent(&self, now: Duration, rules: &RoomRules) -> bool {
        self.share.objective.is_some_and(|objective| {
            (0.0..=URGENT_HORIZONS * rules.horizon_ms).contains(&self.slack_ms(now, objective, rules))
        })
    }

    /// For how long it may still wait, in milliseconds.
    fn slack_ms(&self, now: Duration, objective: Duration, rules: &RoomRules) -> f64 {
        let waited_ms = now.saturating_sub(self.arrived).as_secs_f64() * 1e3;
        FORESEEN * objective.as_secs_f64() * 1e3 - waited_ms - self.own_ms.unwrap_or(0.0) - rules.horizon_ms
    }
}

/// What is kept from a request, as a share of the horizon.
pub(super) fn reserved(late: bool) -> f64 {
    if late { RESERVED } else { 0.0 }
}
