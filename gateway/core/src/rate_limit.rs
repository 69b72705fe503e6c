//! A limit on how much may come in a time: a token bucket that one request may overdraw, for what is only
//! known afterwards (the tokens of an answer). What a request may take is reserved when it begins and settled
//! when it has ended. Time is the `Duration` since the start.

use std::time::Duration;

/// Added to each wait, which is rounded to a nanosecond: that must not make it too short.
const ROUNDING: Duration = Duration::from_micros(1);

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
        let burst = Self::burst_of(amount);
        Self { per_second: amount / 60.0, burst, level: burst, filled_at: now }
    }

    /// What may come at once of so many a minute.
    pub fn burst_of(per_minute: f64) -> f64 {
        (per_minute / 6.0).max(1.0)
    }

    /// One of so many equal parts of `per_minute`, of which `left` is left.
    pub fn part_of(per_minute: f64, parts: usize, left: f64, now: Duration) -> Self {
        let mut part = Self { level: left, ..Self::per_minute(per_minute, now) };
        part.becomes_part_of(per_minute, parts, now);
        part
    }

    /// Becomes one of so many equal parts of `per_minute`, and what is left becomes a part in the same way.
    pub fn becomes_part_of(&mut self, per_minute: f64, parts: usize, now: Duration) {
        let parts = parts.max(1) as f64;
        let per_second = per_minute / 60.0 / parts;
        let level = self.level(now);
        if per_second != self.per_second {
            self.burst = (Self::burst_of(per_minute) / parts).max(1.0);
            self.level = (level * per_second / self.per_second).min(self.burst);
            self.per_second = per_second;
        }
    }

    /// What is left at `now`; below 0 where it is owed.
    pub fn level(&mut self, now: Duration) -> f64 {
        // Fills it up to now.
        let _ = self.wait(0.0, now);
        self.level
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
        let wait = Duration::try_from_secs_f64(missing / self.per_second).unwrap_or(Duration::MAX);
        Err(wait.saturating_add(ROUNDING))
    }

    /// Takes `amount` where anything is left, if only one; what is not left is owed. So what is larger than
    /// the whole limit can be had, and while it is owed nothing else can.
    pub fn reserve(&mut self, amount: f64, now: Duration) -> Result<(), Duration> {
        self.wait(1.0, now)?;
        self.level -= amount;
        Ok(())
    }

    /// Takes `amount` in any case: what has begun takes more than was reserved for it.
    pub fn extend(&mut self, amount: f64) {
        self.level -= amount;
    }

    /// What was `reserved` is given back, and what was `used` of it taken.
    pub fn settle(&mut self, reserved: f64, used: f64) {
        self.level = (self.level + reserved - used).min(self.burst);
    }

    /// How much is left at `now`, and when the limit is full again. Takes nothing.
    pub fn standing(&mut self, now: Duration) -> Standing {
        let missing = (self.burst - self.level(now)).max(0.0);
        Standing {
            per_minute: self.per_second * 60.0,
            left: self.level.max(0.0),
            full_in: Duration::try_from_secs_f64(missing / self.per_second).unwrap_or(Duration::MAX),
        }
    }
}

/// How a limit stands at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    /// What [`RateLimit::per_minute`] was given, in its unit: requests a minute, or tokens.
    pub per_minute: f64,
    /// What may come at once.
    pub left: f64,
    /// When it will be as if nothing had ever come.
    pub full_in: Duration,
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

    proptest! {
        /// Requests that reserve, take more, leave or end with another count than was reserved, in any order.
        #[test]
        fn what_is_reserved_is_settled_and_one_request_alone_overdraws(
            per_minute in 1.0_f64..100_000.0,
            steps in prop::collection::vec((0_u64..5_000, 0_u32..3, 0.0_f64..5_000.0, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut limit = RateLimit::per_minute(per_minute, Duration::ZERO);
            let (burst, mut now) = (limit.burst, Duration::ZERO);
            let (mut reserved, mut used, mut largest, mut beyond) = (Vec::<f64>::new(), 0.0, 0.0_f64, 0.0);
            for (wait, what, amount, which) in steps {
                now += Duration::from_millis(wait);
                match what {
                    0 => match limit.reserve(amount, now) {
                        Ok(()) => {
                            largest = largest.max(amount);
                            reserved.push(amount);
                        }
                        Err(retry_after) => {
                            let later = now + retry_after;
                            prop_assert!(limit.clone().reserve(amount, later).is_ok(), "who waits as told passes");
                        }
                    },
                    _ if reserved.is_empty() => {}
                    1 => {
                        let was = reserved.swap_remove(which.index(reserved.len()));
                        limit.settle(was, amount);
                        used += amount;
                        beyond += (amount - was).max(0.0);
                    }
                    _ => {
                        let at = which.index(reserved.len());
                        limit.extend(amount);
                        reserved[at] += amount;
                        beyond += amount;
                    }
                }
                // Never below what one request reserved, but for what was used beyond reservations.
                prop_assert!(limit.level >= -largest - beyond - 1e-6, "{} of {largest}, {beyond}", limit.level);
                prop_assert!(limit.level <= burst);
                // What is held and what was used has come from the bucket: nothing is given away.
                let held: f64 = reserved.iter().sum();
                let come = burst + now.as_secs_f64() * per_minute / 60.0;
                prop_assert!(held + used <= come - limit.level + 1e-6 * (1.0 + held + used));
            }
        }

        #[test]
        fn what_is_reserved_and_given_back_leaves_no_trace(per_minute in 60.0_f64..100_000.0, amounts in prop::collection::vec(0.0_f64..1e6, 1..20)) {
            let mut limit = RateLimit::per_minute(per_minute, Duration::ZERO);
            for amount in amounts {
                prop_assert!(limit.reserve(amount, Duration::ZERO).is_ok());
                limit.settle(amount, 0.0);
                let Standing { left, full_in, .. } = limit.standing(Duration::ZERO);
                prop_assert!((left - per_minute / 6.0).abs() < 1e-6 && full_in < Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn what_is_owed_must_be_waited_for() {
        let mut limit = RateLimit::per_minute(600.0, Duration::ZERO);
        limit.reserve(1.0, Duration::ZERO).unwrap();
        limit.settle(1.0, 200.0);
        let wait = limit.wait(1.0, Duration::ZERO).unwrap_err();
        assert_eq!(wait.as_secs_f64().round(), 10.0, "100 over a burst of 100, at 10 a second");
        assert!(limit.wait(1.0, wait).is_ok());
    }

    #[test]
    fn parts_of_a_limit_are_the_limit_together() {
        let at = Duration::from_secs;
        for (per_minute, burst) in [(600.0, 100.0), (6.0, 1.0)] {
            let mut part = RateLimit::per_minute(per_minute, at(0));
            part.becomes_part_of(per_minute, 8, at(0));
            assert!((8.0 * part.level(at(0)) - burst).abs() < 1e-9);
            part.extend(part.level);
            part.becomes_part_of(per_minute, 8, at(1));
            assert!((part.level(at(1)) - per_minute / 480.0).abs() < 1e-9, "asked again it goes on");
            part.becomes_part_of(per_minute, 4, at(1));
            assert!((part.level(at(1)) - per_minute / 240.0).abs() < 1e-9);
            assert!(part.take(1.0, at(100)).is_ok(), "one may always come at last");
        }
    }

    #[test]
    fn more_than_the_whole_limit_can_be_had_once() {
        let mut limit = RateLimit::per_minute(6.0, Duration::ZERO);
        limit.reserve(500.0, Duration::ZERO).unwrap();
        assert_eq!(
            limit.standing(Duration::ZERO),
            Standing { per_minute: 6.0, left: 0.0, full_in: Duration::from_secs(5_000) }
        );
        assert!(limit.reserve(1.0, Duration::from_secs(60)).is_err());
        limit.settle(500.0, 0.0);
        assert!(limit.reserve(1.0, Duration::from_secs(60)).is_ok());
    }
}
