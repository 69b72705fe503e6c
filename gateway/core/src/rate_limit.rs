//! A limit on how much may come in a time: a token bucket that may be overdrawn, for what is only known afterwards (the
//! tokens of an answer). Time is the `Duration` since the start.

use std::time::Duration;

/// One limit and how much of it is left.
#[derive(Debug, Clone)]
pub struct RateLimit {
    per_second: f64,
    burst: f64,
    level: f64,
    filled_at: Duration,
}

impl RateLimit {
    /// So many a minute; as many as come in ten seconds may come at once, at least one.
    pub fn per_minute(amount: f64, now: Duration) -> Self {
        let burst = (amount / 6.0).max(1.0);
        Self { per_second: amount / 60.0, burst, level: burst, filled_at: now }
    }

    /// Takes `amount` if at least that much is left; else says how long to wait for it.
    pub fn take(&mut self, amount: f64, now: Duration) -> Result<(), Duration> {
        self.wait(amount, now)?;
        self.level -= amount;
        Ok(())
    }

    /// How long until `amount` is left, without taking it.
    pub fn wait(&mut self, amount: f64, now: Duration) -> Result<(), Duration> {
        let since = now.saturating_sub(self.filled_at).as_secs_f64();
        self.filled_at = self.filled_at.max(now);
        self.level = (self.level + since * self.per_second).min(self.burst);
        // Rounding must not make a wait that was long enough too short.
        if self.level + 1e-9 >= amount.min(self.burst) {
            return Ok(());
        }
        let missing = amount.min(self.burst) - self.level;
        Err(Duration::try_from_secs_f64(missing / self.per_second).unwrap_or(Duration::MAX))
    }

    /// Takes `amount` in any case; what is not left is owed.
    pub fn charge(&mut self, amount: f64) {
        self.level -= amount;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_more_passes_than_the_limit_and_one_burst(
            per_minute in 1.0_f64..10_000.0,
            waits_ms in prop::collection::vec(0_u64..2_000, 1..300),
        ) {
            let mut limit = RateLimit::per_minute(per_minute, Duration::ZERO);
            let (mut now, mut passed) = (Duration::ZERO, 0_u32);
            for wait in waits_ms {
                now += Duration::from_millis(wait);
                if let Err(retry_after) = limit.take(1.0, now) {
                    now += retry_after;
                    prop_assert!(limit.take(1.0, now).is_ok(), "who waits as told passes");
                }
                passed += 1;
                let most = (per_minute / 6.0).max(1.0) + now.as_secs_f64() * per_minute / 60.0;
                prop_assert!(f64::from(passed) <= most + 1e-3, "{passed} of {most}");
            }
        }
    }

    #[test]
    fn what_is_owed_must_be_waited_for() {
        let mut limit = RateLimit::per_minute(600.0, Duration::ZERO);
        limit.charge(200.0);
        let wait = limit.wait(1.0, Duration::ZERO).unwrap_err();
        assert_eq!(wait.as_secs_f64().round(), 10.0, "100 over a burst of 100, at 10 a second");
        assert!(limit.wait(1.0, wait).is_ok());
    }
}
