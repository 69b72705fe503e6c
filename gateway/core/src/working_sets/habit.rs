//! What is learned of sessions of one kind: whether they come back, and after how long.

use std::time::Duration;

use crate::fading::FadingSum;

/// How fast what is known of the time between turns follows what is seen: one part in so many.
pub(super) const GAP_WINDOW: f64 = 256.0;
/// How long it counts half that one came back, or did not.
const HABIT_HALF_LIFE: Duration = Duration::from_secs(60);
/// The share of answers after which another turn came, from which on one is waited for.
const RETURNING: f64 = 0.5;
/// The least that a lease is, however quickly turns follow each other.
pub(super) const SHORTEST_LEASE: Duration = Duration::from_millis(200);

/// Whether sessions of a kind come back after an answer, and how long that takes.
#[derive(Debug, Clone)]
pub(super) struct Habit {
    pub(super) ended: FadingSum,
    pub(super) returned: FadingSum,
    seen: f64,
    pub(super) mean_s: f64,
    /// Mean of the squares.
    square: f64,
}

impl Default for Habit {
    fn default() -> Self {
        let (ended, returned) = (FadingSum::new(HABIT_HALF_LIFE), FadingSum::new(HABIT_HALF_LIFE));
        Self { ended, returned, seen: 0.0, mean_s: 0.0, square: 0.0 }
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
    }

    /// How long the next turn is waited for: where most come back the mean and three deviations, which is 98
    /// in a hundred where times are exponential; else not at all.
    pub(super) fn lease(&self, now: Duration, longest: Duration) -> Duration {
        if self.returned.at(now) < RETURNING * self.ended.at(now) {
            return Duration::ZERO;
        }
        let deviation = (self.square - self.mean_s * self.mean_s).max(0.0).sqrt();
        Duration::from_secs_f64(self.mean_s + 3.0 * deviation).clamp(SHORTEST_LEASE.min(longest), longest)
    }
}
