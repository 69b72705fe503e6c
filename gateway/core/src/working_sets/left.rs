//! What some workers have left for sessions, and whose turn may begin there.

use std::time::Duration;

use super::{
    Home, KnownBy, NextTurn, WorkingSets,
    queue::{Age, Kept},
};
use crate::index::WorkerId;

/// What the workers that a turn may go to can do together, and have to do for sessions. Other workers'
/// sessions, those of another model, are no part of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Left {
    /// Prompt tokens that they compute in a second.
    pub tokens_per_s: f64,
    /// Tokens that their caches hold; infinitely many where that is not known of all.
    pub cache_tokens: f64,
    /// Whether requests wait because none of them can begin.
    pub is_behind: bool,
    /// Prompt tokens that sessions ask of them in a second.
    asked_per_s: f64,
    /// Seconds from an answer's first token to its end.
    answer_s: f64,
    /// The most tokens that one of them has left for a session that comes in now.
    most_free: f64,
    /// Which workers these are.
    among: u64,
    /// What of that is kept for those who wait.
    kept: Kept,
    /// When another of them may be come to, at the earliest.
    opens: Duration,
}

impl WorkingSets {
    /// What these workers can do together, and have left for sessions. `is_behind`: whether requests wait
    /// because none of them can begin.
    pub fn left(&mut self, now: Duration, homes: impl Iterator<Item = Home>, is_behind: bool) -> Left {
        self.end_leases(now);
        let mut left = Left {
            tokens_per_s: 0.0,
            cache_tokens: 0.0,
            is_behind,
            asked_per_s: 0.0,
            answer_s: 0.0,
            most_free: 0.0,
            among: 0,
            kept: Kept { last: None, spare: 0.0 },
            opens: Duration::MAX,
        };
        // Mostly no session waits, and nothing is kept.
        let anyone_waits = !self.queues.is_empty();
        let mut open = Vec::new();
        let (mut answers, mut answering_s) = (0.0, 0.0);
        for home in homes {
            left.tokens_per_s += home.tokens_per_s;
            left.cache_tokens += home.capacity.unwrap_or(f64::INFINITY);
            left.among = left.among.wrapping_add(spread(home.worker));
            let Some(room) = self.rooms.get(&home.worker) else {
                left.most_free = f64::INFINITY;
                open.extend(anyone_waits.then_some(f64::INFINITY));
                continue;
            };
            left.asked_per_s += room.asked_per_s(now);
            answers += room.answers;
            answering_s += room.answers * room.answer_s;
            if room.paid > now {
                left.opens = left.opens.min(room.paid);
            } else {
                let free = room.free(&self.rules);
                left.most_free = left.most_free.max(free);
                open.extend(anyone_waits.then_some(free));
            }
        }
        left.kept.spare = left.most_free;
        if anyone_waits {
            left.kept = self.queues.keep(left.among, now, open.into_iter());
        }
        left.answer_s = if answers > 0.0 { answering_s / answers } else { 0.0 };
        left
    }

    /// Whether pauses pay for sessions of this kind: the workers could not compute anew what is asked, and
    /// their caches, if they held all that is in, would serve enough more than that. A session's tokens are
    /// then served once in the time of an answer and until the next turn; no prefill is waited for.
    pub fn pays(&self, kind: KnownBy, left: &Left) -> bool {
        let cycle_s = (self.habits[kind as usize].mean_s + left.answer_s).max(f64::MIN_POSITIVE);
        let served_per_s = self.rules.share * left.cache_tokens / cycle_s;
        let from = if left.is_behind { self.rules.pays_from_behind } else { self.rules.pays_from };
        left.asked_per_s > from * left.tokens_per_s
            && left.cache_tokens.is_finite()
            && served_per_s > self.rules.turnover * left.tokens_per_s
    }

    /// Until when a turn waits; `None`: it may begin. `left`: what the workers have that it may go to.
    pub fn waits_until(&mut self, now: Duration, turn: &NextTurn, left: &Left) -> Option<Duration> {
        let latest = turn.arrived + self.rules.longest_pause;
        if self.is_in(turn.session) || now >= latest {
            return None;
        }
        let (age, need) = (self.age(turn), self.need(turn));
        let is_kept = left.kept.last.is_some_and(|last| age <= last);
        if need <= if is_kept { left.most_free } else { left.kept.spare } {
            return None;
        }
        self.queues.wait(left.among, age, need, now);
        Some(latest.min(self.next_end).min(left.opens).max(now))
    }

    /// When its session began, and its name.
    fn age(&self, turn: &NextTurn) -> Age {
        let since = self.sessions.get(&turn.session).map_or(turn.arrived, |session| session.since);
        (since, turn.session)
    }
}

/// A worker's part of what names several.
fn spread(worker: WorkerId) -> u64 {
    (u64::from(worker.0) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
