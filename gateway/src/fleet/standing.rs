//! How a worker stands to what it is asked for: what it refuses ([`keyway_core::refusals`]), when it last
//! served anything, and how often refusals were passed on unexamined since. Who is asked is decided in
//! `routing/`, what a refusal means in `attempts.rs`.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use keyway_core::refusals::{Mark, Refusals, Stance};
use parking_lot::Mutex;

use crate::limits::PASSED_REFUSALS_MAX;

/// What one worker refuses, when it last served anything, and how many refusals were passed on.
#[derive(Debug, Default)]
pub struct Standing {
    refusals: Mutex<Refusals>,
    /// Whether there are any, to know without the lock that there are none.
    refuses: AtomicBool,
    /// Milliseconds from the start to its last good answer, and one; 0 before.
    served_at: AtomicU64,
    /// Refusals passed on without asking another worker, since it last served something or was looked into.
    passed: AtomicU32,
}

impl Standing {
    /// How it stands to a kind of request.
    pub fn stance(&self, kind: u64, now: Duration) -> Stance {
        if self.refuses_something() { self.refusals.lock().stance(kind, now) } else { Stance::Willing }
    }

    /// Whether it refuses any kind.
    pub fn refuses_something(&self) -> bool {
        self.refuses.load(Relaxed)
    }

    /// A request of this kind goes there.
    pub fn begin(&self, kind: u64, now: Duration) {
        if self.refuses_something() {
            self.refusals.lock().begin(kind, now);
        }
    }

    /// It refused one that was `sent` then.
    pub fn refused(&self, kind: u64, (sent, now): (Duration, Duration), after: Option<Duration>) -> Mark {
        self.changed(|refusals| refusals.refused(kind, sent, now, after))
    }

    /// It served one that was `sent` then. Returns whether it was misconfigured.
    pub fn served(&self, kind: u64, sent: Duration, now: Duration) -> bool {
        self.served_at.store(now.as_millis() as u64 + 1, Relaxed);
        if self.passed.load(Relaxed) > 0 {
            self.passed.store(0, Relaxed);
        }
        self.refuses_something() && self.changed(|refusals| refusals.served(kind, sent))
    }

    /// The refusal was the request's own fault.
    pub fn dismiss(&self, mark: Mark, now: Duration) {
        self.passed.store(0, Relaxed);
        self.changed(|refusals| refusals.dismiss(mark, now));
    }

    /// Another worker served the very request. Returns whether that makes this one misconfigured.
    pub fn convict(&self, mark: Mark) -> bool {
        self.changed(|refusals| refusals.convict(mark))
    }

    /// Whether it refuses what others serve, and serves nothing.
    pub fn misconfigured(&self) -> bool {
        self.refuses_something() && self.refusals.lock().misconfigured(self.last_served())
    }

    /// Whether one more of its refusals may be passed on without asking another worker.
    pub fn may_pass(&self) -> bool {
        self.passed.fetch_add(1, Relaxed) < PASSED_REFUSALS_MAX
    }

    fn last_served(&self) -> Option<Duration> {
        self.served_at.load(Relaxed).checked_sub(1).map(Duration::from_millis)
    }

    fn changed<T>(&self, change: impl FnOnce(&mut Refusals) -> T) -> T {
        let mut refusals = self.refusals.lock();
        let changed = change(&mut refusals);
        self.refuses.store(!refusals.is_empty(), Relaxed);
        changed
    }
}

#[cfg(test)]
mod tests {
    use keyway_core::refusals::{CONVICTIONS, FIRST_PAUSE};

    use super::*;

    const KIND: u64 = 1;

    #[test]
    fn a_good_answer_ends_all_that_was_held_against_a_worker() {
        let standing = Standing::default();
        let mut now = Duration::from_secs(1);
        for _ in 0..CONVICTIONS {
            assert!(!standing.misconfigured());
            standing.begin(KIND, now);
            let mark = standing.refused(KIND, (now, now), None);
            standing.convict(mark);
            now += FIRST_PAUSE * 8;
        }
        assert!(standing.misconfigured());
        assert!(standing.served(KIND, now, now));
        assert!(!standing.misconfigured() && !standing.refuses_something());
    }

    #[test]
    fn some_refusals_pass_unexamined_until_the_worker_serves_or_is_looked_into() {
        let standing = Standing::default();
        let now = Duration::from_secs(1);
        let pass = || (0..1_000).take_while(|_| standing.may_pass()).count() as u32;
        assert_eq!((pass(), pass()), (PASSED_REFUSALS_MAX, 0));
        standing.served(KIND, now, now);
        assert_eq!((pass(), pass()), (PASSED_REFUSALS_MAX, 0));
        let mark = standing.refused(KIND, (now, now), None);
        standing.dismiss(mark, now);
        assert_eq!(pass(), PASSED_REFUSALS_MAX);
        assert!(!standing.refuses_something());
    }
}
