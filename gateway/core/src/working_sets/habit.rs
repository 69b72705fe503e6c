//! What is learned of sessions of one kind: whether they come back, after how long, and until when it pays to
//! wait for them.
//!
//! A session's tokens take the same room while its next turn is waited for as while one is computed. So the
//! shorter a lease is, the more sessions take turns in a cache; and the more turns come when it has ended,
//! and are computed anew. A lease is as short as what may go to those allows ([`SetRules::returns`]). Where
//! one tool in ten takes long, its session is not waited for, unless the cache has nothing better to do.

use std::time::Duration;

use super::{SetRules, room::Room};
use crate::fading::FadingSum;

/// How fast what is known of the time between turns follows what is seen: one part in so many.
pub(super) const GAP_WINDOW: f64 = 256.0;
/// How long it counts half that one came back, or did not.
const HABIT_HALF_LIFE: Duration = Duration::from_secs(60);
/// The share of answers after which another turn came, from which on one is waited for.
const RETURNING: f64 = 0.5;
/// The least that a lease is, however quickly turns follow each other.
pub(super) const SHORTEST_LEASE: Duration = Duration::from_millis(200);
/// Classes of times until the next turn, and the end of the first: they go to a minute and a half.
const CLASSES: usize = 34;
const FIRST_S: f64 = 0.001;

/// Whether sessions of a kind come back after an answer, and how long that takes.
#[derive(Debug, Clone)]
pub(super) struct Habit {
    pub(super) ended: FadingSum,
    pub(super) returned: FadingSum,
    seen: f64,
    pub(super) mean_s: f64,
    /// Mean of the squares.
    square: f64,
    gaps: Gaps,
}

/// How the times until the next turn are spread: parts of all, by classes of which each goes to the square
/// root of two times as far as the one before.
#[derive(Debug, Clone)]
struct Gaps {
    parts: [f64; CLASSES],
}

impl Default for Habit {
    fn default() -> Self {
        let (ended, returned) = (FadingSum::new(HABIT_HALF_LIFE), FadingSum::new(HABIT_HALF_LIFE));
        Self { ended, returned, seen: 0.0, mean_s: 0.0, square: 0.0, gaps: Gaps { parts: [0.0; CLASSES] } }
    }
}

impl Habit {
    /// One came back after so long.
    pub(super) fn returned(&mut self, now: Duration, seconds: f64) {
        self.returned.add(1.0, now);
        self.seen = (self.seen + 1.0).min(GAP_WINDOW);
        let part = 1.0 / self.seen;
        self.mean_s += part * (seconds - self.mean_s);
        self.square += part * (seconds * seconds - self.square);
        self.gaps.add(part, seconds);
    }

    /// How long the next turn is waited for at a worker. Where most come back it is the mean and three
    /// deviations, which is 98 in a hundred where times are exponential, or less: so long that what those ask
    /// for who come later is no more than the worker may compute for who comes back. Else not at all.
    pub(super) fn lease(&self, now: Duration, (rules, room): (&SetRules, &Room)) -> Duration {
        let longest = rules.longest_lease;
        let (returned, ended) = (self.returned.at(now), self.ended.at(now));
        if returned < RETURNING * ended {
            return Duration::ZERO;
        }
        let deviation = (self.square - self.mean_s * self.mean_s).max(0.0).sqrt();
        let most = self.mean_s + 3.0 * deviation;
        let enough = self.gaps.enough((returned / ended).min(1.0), (rules, room));
        Duration::from_secs_f64(most.min(enough)).clamp(SHORTEST_LEASE.min(longest), longest)
    }
}

// === impl Gaps ===

impl Gaps {
    fn add(&mut self, part: f64, seconds: f64) {
        self.parts.iter_mut().for_each(|share| *share -= part * *share);
        let class = (2.0 * (seconds / FIRST_S).max(1.0).log2()).ceil() as usize;
        self.parts[class.min(CLASSES - 1)] += part;
    }

    /// The least time after which few enough come who come at all, which is so many of all.
    fn enough(&self, returning: f64, (rules, room): (&SetRules, &Room)) -> f64 {
        let Some(capacity) = room.most(rules) else { return f64::INFINITY };
        let most_per_s = rules.returns * room.home.tokens_per_s;
        let (mut until_s, mut later, mut waited_s) = (FIRST_S, returning, 0.0);
        for part in self.parts {
            later = (later - returning * part).max(0.0);
            waited_s += returning * part * until_s;
            // A session's tokens are had once in the time of a turn and of what is waited.
            let cycle_s = room.turn_s + waited_s + (1.0 - returning + later) * until_s;
            if later * capacity <= most_per_s * cycle_s {
                return until_s;
            }
            until_s *= std::f64::consts::SQRT_2;
        }
        f64::INFINITY
    }
}
