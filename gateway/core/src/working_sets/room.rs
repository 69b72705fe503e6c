//! What sessions take of one worker, and what it has done for them.

use std::time::Duration;

use super::{
    Home, SetRules,
    habit::{GAP_WINDOW, SHORTEST_LEASE},
};
use crate::fading::FadingSum;

/// How long what was asked counts half.
const ASKED_HALF_LIFE: Duration = Duration::from_secs(5);

/// What sessions take of one worker.
#[derive(Debug, Clone)]
pub(super) struct Room {
    pub(super) home: Home,
    pub(super) taken: f64,
    /// The sessions that are in here, the last that came in last.
    pub(super) inside: Vec<u64>,
    /// Prompt tokens that they asked for.
    pub(super) asked: FadingSum,
    /// When the prefill of those that came back in here is paid for.
    pub(super) paid: Duration,
    /// Seconds from the first token of an answer to its end, on the average of the last.
    pub(super) answer_s: f64,
    /// Seconds from a turn's begin to its end, on the average of the last.
    pub(super) turn_s: f64,
    pub(super) answers: f64,
}

impl Room {
    pub(super) fn new(home: Home) -> Self {
        Self {
            home,
            taken: 0.0,
            inside: Vec::new(),
            asked: FadingSum::new(ASKED_HALF_LIFE),
            paid: Duration::ZERO,
            answer_s: 0.0,
            turn_s: 0.0,
            answers: 0.0,
        }
    }

    /// Tokens that sessions may have here; `None`: any number.
    pub(super) fn most(&self, rules: &SetRules) -> Option<f64> {
        self.home.capacity.map(|tokens| tokens * rules.share)
    }

    /// Tokens that are left for a session that comes in: any number, if it is alone.
    pub(super) fn free(&self, rules: &SetRules) -> f64 {
        let most = self.most(rules).filter(|_| self.taken > 0.0);
        most.map_or(f64::INFINITY, |most| most * rules.fill - self.taken)
    }

    pub(super) fn add(&mut self, tokens: f64) {
        // Sums of what was added and taken away come out at next to nothing.
        self.taken = (self.taken + tokens).max(0.0);
    }

    /// Prompt tokens that sessions ask for in a second.
    pub(super) fn asked_per_s(&self, now: Duration) -> f64 {
        self.asked.at(now) * std::f64::consts::LN_2 / ASKED_HALF_LIFE.as_secs_f64()
    }

    /// An answer took so many seconds, and its turn so many.
    pub(super) fn answered(&mut self, answer_s: f64, turn_s: f64) {
        self.answers = (self.answers + 1.0).min(GAP_WINDOW);
        self.answer_s += (answer_s - self.answer_s) / self.answers;
        self.turn_s += (turn_s - self.turn_s) / self.answers;
    }

    /// A session came back in whose next turn comes `gap_s` after an answer: so many tokens are computed
    /// anew. In a second that may be a part of what the worker computes, and no more than what they displace
    /// can age in the part of the cache that is no session's. Until then it is newer than what those have
    /// that are in, and caches forget the oldest first.
    pub(super) fn came_back(&mut self, now: Duration, rules: &SetRules, tokens: f64, gap_s: f64) {
        let cycle_s = (gap_s + self.turn_s).max(SHORTEST_LEASE.as_secs_f64());
        let ages = (1.0 - rules.share) * self.home.capacity.unwrap_or(f64::INFINITY) / cycle_s;
        let per_s = ages.min(rules.returns * self.home.tokens_per_s).max(f64::MIN_POSITIVE);
        // What came back while no session waited is not made up for.
        let after_s = (self.paid.saturating_sub(now).as_secs_f64() + tokens / per_s).min(cycle_s);
        self.paid = now + Duration::try_from_secs_f64(after_s).unwrap_or_default();
    }
}
