//! How many requests may be sent again: a share of those that come, and a few a second in any case. So when every worker
//! fails, the fleet sees little more than the clients' own requests, instead of a multiple of them (a retry storm).
//!
//! A token bucket, as in Finagle and linkerd: each request puts a share of a token in, each second some, each retry takes
//! one out; what is above the brim is lost.

use std::time::Duration;

/// Retries for each request that comes.
pub const RETRY_SHARE: f64 = 0.2;
/// Retries that every second allows, so that an almost idle gateway still repeats what failed.
pub const RETRIES_PER_SECOND: f64 = 10.0;
/// Most retries at once: ten seconds of the floor.
pub const RETRY_BURST: f64 = 100.0;

/// The budget of one gateway. Time is the `Duration` since it started.
#[derive(Debug, Clone)]
pub struct RetryBudget {
    tokens: f64,
    filled_at: Duration,
}

impl RetryBudget {
    /// A full one.
    pub fn new(now: Duration) -> Self {
        Self { tokens: RETRY_BURST, filled_at: now }
    }

    /// A request came.
    pub fn request(&mut self) {
        self.tokens = (self.tokens + RETRY_SHARE).min(RETRY_BURST);
    }

    /// Whether one may be sent again; if so, that is taken off the budget.
    pub fn take(&mut self, now: Duration) -> bool {
        let since = now.saturating_sub(self.filled_at).as_secs_f64();
        self.filled_at = self.filled_at.max(now);
        self.tokens = (self.tokens + since * RETRIES_PER_SECOND).min(RETRY_BURST);
        let may = self.tokens >= 1.0;
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

    proptest! {
        #[test]
        fn retries_never_exceed_their_share_and_floor(
            steps in prop::collection::vec((0_u64..40, any::<bool>()), 0..2_000),
        ) {
            let mut budget = RetryBudget::new(Duration::ZERO);
            let (mut now, mut requests, mut retries) = (Duration::ZERO, 0_u32, 0_u32);
            for (ms, request) in steps {
                now += Duration::from_millis(ms);
                if request {
                    budget.request();
                    requests += 1;
                } else {
                    retries += u32::from(budget.take(now));
                }
                let most = RETRY_BURST
                    + f64::from(requests) * RETRY_SHARE
                    + now.as_secs_f64() * RETRIES_PER_SECOND;
                prop_assert!(f64::from(retries) <= most + 1e-6, "{retries} of at most {most}");
            }
        }
    }

    #[test]
    fn a_spent_budget_fills_with_requests_and_with_time() {
        let mut budget = RetryBudget::new(Duration::ZERO);
        while budget.take(Duration::ZERO) {}
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
