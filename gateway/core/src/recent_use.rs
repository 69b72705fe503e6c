//! How much of a limit a gateway has used lately: what it takes of it ahead of need follows from that.

use std::time::Duration;

/// What is taken ahead of need lasts so long at the pace of late: some ten questions to the store.
const AHEAD: Duration = Duration::from_millis(250);

/// Time in which the pace follows.
const MEMORY: Duration = Duration::from_millis(300);

/// Time after the last request from which nothing is kept here.
const RESTS_AFTER: Duration = Duration::from_secs(5);

/// The pace at which requests come.
#[derive(Debug)]
pub(crate) struct RecentUse {
    since: Duration,
    used: f64,
    per_second: f64,
    last: Option<Duration>,
}

impl RecentUse {
    pub(crate) fn new(now: Duration) -> Self {
        Self { since: now, used: 0.0, per_second: 0.0, last: None }
    }

    /// A request takes so much.
    pub(crate) fn uses(&mut self, amount: f64, now: Duration) {
        self.used += amount;
        self.last = Some(now);
    }

    /// A request would take something, if there were anything.
    pub(crate) fn wants(&mut self, now: Duration) {
        self.last = Some(now);
    }

    /// Whether no request has come lately.
    pub(crate) fn rests(&self, now: Duration) -> bool {
        self.last.is_none_or(|last| now.saturating_sub(last) >= RESTS_AFTER)
    }

    /// What to have here for the requests that are to come: at least one while any come.
    pub(crate) fn ahead(&mut self, now: Duration) -> f64 {
        if self.rests(now) {
            (self.since, self.used, self.per_second) = (now, 0.0, 0.0);
            return 0.0;
        }
        let since = now.saturating_sub(self.since).as_secs_f64();
        // Over less, one request would be a pace.
        if since >= 0.02 {
            let weight = since / (since + MEMORY.as_secs_f64());
            self.per_second += weight * (self.used / since - self.per_second);
            (self.since, self.used) = (now, 0.0);
        }
        (self.per_second * AHEAD.as_secs_f64()).ceil().max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_ahead_follows_the_pace_and_ends_with_it() {
        let at = Duration::from_millis;
        let mut recent = RecentUse::new(at(0));
        assert!(recent.rests(at(0)) && recent.ahead(at(0)) == 0.0);
        for step in 1..=100 {
            recent.uses(4.0, at(50 * step));
            recent.ahead(at(50 * step));
        }
        assert_eq!(recent.ahead(at(5_001)), 20.0, "80 a second, for a quarter of one");
        assert!((1.0..3.0).contains(&recent.ahead(at(9_000))));
        assert!(recent.rests(at(10_000)) && recent.ahead(at(10_000)) == 0.0);
        recent.wants(at(11_000));
        assert_eq!(recent.ahead(at(11_000)), 1.0, "who was idle begins anew");
    }
}
