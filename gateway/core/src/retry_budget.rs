//! How many requests may be sent again: a share of those that come, and a few a second in any case. So when
//! every worker fails, the fleet sees little more than the clients' own requests, instead of a multiple of
//! them (a retry storm).
//!
//! A token bucket, as in Finagle and linkerd: each request puts a share of a token in, each second some, each
//! retry takes one out; what is above the brim is lost.

use std::time::Duration;

/// Retries for each request that comes.
pub const RETRY_SHARE: f64 = 0.2;
/// Retries that every second allows, so that an almost idle gateway still repeats what failed.
pub const RETRIES_PER_SECOND: f64 = 10.0;
/// Most retries at once: ten seconds of the floor.
pub const RETRY_BURST: f64 = 100.0;
/// Share of the burst that is left to requests that failed for no fault of their own.
pub const DOUBT_RESERVE: f64 = 0.25;

/// The budget of one gateway. Time is the `Duration` since it started.
#[derive(Debug, Clone)]
pub struct RetryBudget {
    tokens: f64,
    filled_at: Duration,
}

impl RetryBudget {
    /// A full budget: [`RETRY_BURST`] retries may follow each other at once.
    pub fn new(now: Duration) -> Self {
        Self { tokens: RETRY_BURST, filled_at: now }
    }

    /// A client's request came, which allows [`RETRY_SHARE`] of a retry more, up to [`RETRY_BURST`].
    pub fn request(&mut self) {
        self.tokens = (self.tokens + RETRY_SHARE).min(RETRY_BURST);
    }

    /// Whether one may be sent again; if so, that is taken off the budget.
    pub fn take(&mut self, now: Duration) -> bool {
        self.take_above(0.0, now)
    }

    /// [`RetryBudget::take`] for one that may have been refused for its own fault: a part is kept for the
    /// others.
    pub fn take_in_doubt(&mut self, now: Duration) -> bool {
        self.take_above(RETRY_BURST * DOUBT_RESERVE, now)
    }

    fn take_above(&mut self, reserve: f64, now: Duration) -> bool {
        let since = now.saturating_sub(self.filled_at).as_secs_f64();
        self.filled_at = self.filled_at.max(now);
        self.tokens = (self.tokens + since * RETRIES_PER_SECOND).min(RETRY_BURST);
        let may = self.tokens >= reserve + 1.0;
        if may {
            self.tokens -= 1.0;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What may be taken off the budget, held against what came since any earlier moment.
    struct Window {
        /// Least of "taken, less what came" at any moment so far.
        least: f64,
        surplus: f64,
    }

    impl Window {
        fn moves(&mut self, taken: f64) {
            self.surplus += taken;
            self.least = self.least.min(self.surplus);
        }

        /// Most that was taken in any window, less its share and its floor.
        fn most(&self) -> f64 {
            self.surplus - self.least
        }
    }

    proptest! {
        #[test]
        fn in_no_window_do_retries_exceed_their_share_and_floor(
            steps in prop::collection::vec((0_u64..40, any::<bool>()), 0..2_000),
        ) {
            let mut budget = RetryBudget::new(Duration::ZERO);
            let (mut now, mut window) = (Duration::ZERO, Window { least: 0.0, surplus: 0.0 });
            for (ms, request) in steps {
                now += Duration::from_millis(ms);
                window.moves(-(ms as f64) / 1e3 * RETRIES_PER_SECOND);
                if request {
                    budget.request();
                    window.moves(-RETRY_SHARE);
                } else if budget.take(now) {
                    window.moves(1.0);
                }
                prop_assert!(window.most() <= RETRY_BURST + 1e-6, "{}", window.most());
            }
        }

        #[test]
        fn a_fleet_that_fails_whole_sees_little_more_than_the_clients_requests(
            gaps_ms in prop::collection::vec(prop_oneof![8 => 0_u64..3, 1 => 0_u64..5_000], 1..3_000),
            attempts_max in 2_u32..5,
        ) {
            let mut budget = RetryBudget::new(Duration::ZERO);
            let (mut now, mut window) = (Duration::ZERO, Window { least: 0.0, surplus: 0.0 });
            for gap in gaps_ms {
                now += Duration::from_millis(gap);
                window.moves(-(gap as f64) / 1e3 * RETRIES_PER_SECOND - (1.0 + RETRY_SHARE));
                budget.request();
                // Every attempt fails, and is made again for as long as that is allowed.
                let attempts = 1 + (1..attempts_max).take_while(|_| budget.take(now)).count();
                window.moves(attempts as f64);
                prop_assert!(window.most() <= RETRY_BURST + 1.0 + 1e-6, "{}", window.most());
            }
        }
    }

    #[test]
    fn requests_in_doubt_leave_a_part_to_the_others() {
        let mut budget = RetryBudget::new(Duration::ZERO);
        let in_doubt = (0..1_000).take_while(|_| budget.take_in_doubt(Duration::ZERO)).count();
        let others = (0..1_000).take_while(|_| budget.take(Duration::ZERO)).count();
        assert_eq!((in_doubt, others), (75, 25));
        // All that comes is in doubt: the others' part fills first.
        for second in 1..=10 {
            let now = Duration::from_secs(second);
            assert_eq!(budget.take_in_doubt(now), second > 2, "{second}");
        }
    }

    #[test]
    fn a_spent_budget_fills_with_requests_and_with_time() {
        let mut budget = RetryBudget::new(Duration::ZERO);
        let burst = (0..1_000).take_while(|_| budget.take(Duration::ZERO)).count();
        assert_eq!(burst as f64, RETRY_BURST);
        for _ in 0..5 {
            assert!(!budget.take(Duration::ZERO));
            budget.request();
        }
        assert!(budget.take(Duration::ZERO), "five requests are one retry");
        assert!(!budget.take(Duration::from_millis(99)));
        assert!(budget.take(Duration::from_millis(101)), "a tenth of a second is one");
        // Time that goes backwards gives nothing.
        assert!(!budget.take(Duration::ZERO));
    }
}
