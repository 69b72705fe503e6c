//! After how long a worker closes idle connections, as far as it can be seen: engines do not say. Where it
//! does so at the same age again, connections are not used for as long as that, so that no request meets the
//! close. Time is an argument.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{clock::Instant, limits::POOL_IDLE_TIMEOUT};

/// Closes of younger connections are no idle timeout: servers' are whole seconds.
const YOUNGEST: Duration = Duration::from_millis(500);
/// Closes that are this near are one event: a worker that restarts closes all at once.
const ONE_EVENT: Duration = Duration::from_secs(1);
/// How long what was learned counts: the worker's next version may be more patient.
const LEARNED_FOR: Duration = Duration::from_secs(600);

/// One worker's, of all cores.
#[derive(Debug)]
pub(super) struct IdleTimeout {
    /// For how long a connection may wait; read for each request.
    lease_ms: AtomicU64,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// The last close: at which age, and when.
    last: Option<(Duration, Instant)>,
    learned: Option<Instant>,
}

impl Default for IdleTimeout {
    fn default() -> Self {
        Self { lease_ms: AtomicU64::new(POOL_IDLE_TIMEOUT.as_millis() as u64), seen: Mutex::default() }
    }
}

impl IdleTimeout {
    /// For how long a connection may wait for a request.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Relaxed))
    }

    /// The worker has closed a connection that had waited for so long.
    pub(super) fn closed(&self, age: Duration, now: Instant) {
        if age < YOUNGEST {
            return;
        }
        let mut seen = self.seen.lock();
        let before = seen.last.filter(|(_, at)| now >= *at + ONE_EVENT);
        if seen.last.is_some() && before.is_none() {
            return;
        }
        seen.last = Some((age, now));
        if let Some((before, _)) = before.filter(|(before, _)| before.abs_diff(age) <= age / 10) {
            seen.learned = Some(now);
            // A quarter less: a close and a request that would cross are under way for a part of it.
            self.set(before.min(age) * 3 / 4);
        }
    }

    /// Forgets what was learned long ago; to be called now and then.
    pub(super) fn age(&self, now: Instant) {
        let mut seen = self.seen.lock();
        if seen.learned.is_some_and(|at| now >= at + LEARNED_FOR) {
            *seen = Seen::default();
            self.set(POOL_IDLE_TIMEOUT);
        }
    }

    fn set(&self, lease: Duration) {
        self.lease_ms.store(lease.min(POOL_IDLE_TIMEOUT).as_millis() as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lease after closes at these ages, each so many milliseconds after the start.
    fn lease_after(closes: &[(u64, u64)]) -> u128 {
        let (timeout, start) = (IdleTimeout::default(), Instant::now());
        for (at_ms, age_ms) in closes {
            timeout.closed(Duration::from_millis(*age_ms), start + Duration::from_millis(*at_ms));
        }
        timeout.lease().as_millis()
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_is_learned_from_closes_at_the_same_age() {
        assert_eq!(lease_after(&[(0, 2_000), (3_000, 2_004)]), 1_500);
        assert_eq!(lease_after(&[(0, 1_000), (5_000, 3_000), (9_000, 2_900)]), 2_175);
        // The pool's own bound is shorter than most workers'.
        assert_eq!(lease_after(&[(0, 75_000), (80_000, 75_000)]), 4_000);
    }

    #[tokio::test(start_paused = true)]
    async fn closes_that_have_another_reason_teach_nothing() {
        for closes in [
            &[(0, 2_000)][..],
            // A restart closes all at once, those used together at one age.
            &[(0, 2_000), (1, 2_000), (2, 2_000), (999, 2_000)],
            &[(0, 1_000), (2_000, 3_000), (4_000, 700), (6_000, 1_800)],
            // A worker that closes as it likes, at once.
            &[(0, 3), (2_000, 3), (4_000, 3)],
        ] {
            assert_eq!(lease_after(closes), 4_000, "{closes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_learned_is_forgotten_after_a_while() {
        let (timeout, start) = (IdleTimeout::default(), Instant::now());
        let seconds = |s| start + Duration::from_secs(s);
        timeout.closed(Duration::from_secs(2), seconds(1));
        timeout.closed(Duration::from_secs(2), seconds(4));
        timeout.age(seconds(600));
        assert_eq!(timeout.lease().as_millis(), 1_500);
        timeout.age(seconds(604));
        assert_eq!(timeout.lease(), POOL_IDLE_TIMEOUT);
    }
}
