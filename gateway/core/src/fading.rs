//! A sum that forgets: what was added counts half after a time, a quarter after twice that. It costs two
//! numbers, however much is added.

use std::time::Duration;

/// The sum, and when it was that much.
#[derive(Debug, Clone)]
pub struct FadingSum {
    half_life: Duration,
    sum: f64,
    at: Duration,
}

impl FadingSum {
    /// A sum of 0. What is added to it counts half after `half_life`.
    pub fn new(half_life: Duration) -> Self {
        Self { half_life, sum: 0.0, at: Duration::ZERO }
    }

    /// Adds an amount that counts from `now` on.
    pub fn add(&mut self, amount: f64, now: Duration) {
        self.sum = self.at(now) + amount;
        self.at = now.max(self.at);
    }

    /// How much it is now.
    pub fn at(&self, now: Duration) -> f64 {
        // Nothing fades to nothing, without a power of two being worked out.
        if self.sum == 0.0 {
            return 0.0;
        }
        let halves = now.saturating_sub(self.at).as_secs_f64() / self.half_life.as_secs_f64().max(1e-9);
        self.sum * (-halves).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_is_left_after_the_half_life_whether_or_not_it_was_looked_at() {
        let secs = Duration::from_secs;
        let mut sum = FadingSum::new(secs(60));
        sum.add(8.0, secs(100));
        assert_eq!((sum.at(secs(100)), sum.at(secs(160)), sum.at(secs(280))), (8.0, 4.0, 1.0));
        sum.add(4.0, secs(160));
        assert_eq!(sum.at(secs(220)), 4.0);
        // Time that seems to go back adds nothing and takes nothing.
        sum.add(1.0, secs(100));
        assert_eq!(sum.at(secs(160)), 9.0);
    }
}
