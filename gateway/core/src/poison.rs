//! Requests that break workers: a body behind which the connections of two different workers have broken
//! before anything of an answer came is refused for a while, and for longer each time that it breaks one
//! more. Only hashes are kept. No clock: time is the `Duration` since the start.
//!
//! That a worker broke is no proof: all that it was asked broke with it. So one worker that breaks off again
//! and again is not enough; a body that is answered about as often as it breaks something is not refused; the
//! first refusal is short; and what is answered after one is forgotten.

use std::{collections::HashMap, time::Duration};

use crate::index::WorkerId;

/// Workers that a request may break before anything of an answer came.
pub const BROKEN_MAX: usize = 2;
/// The first refusal; each further one is twice as long. One that comes back is tried at one worker at most
/// after each.
pub const FIRST_TERM: Duration = Duration::from_secs(30);
/// The longest refusal: an innocent request that broke with its workers comes through that long after they
/// are well.
pub const TERM_MAX: Duration = Duration::from_secs(300);
/// How long it is held against a body that it broke a worker, beyond a refusal.
pub const MEMORY: Duration = Duration::from_secs(600);
/// How often those are looked for that are over.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Bodies remembered at once, some 60 bytes each; beyond it those that are not refused go first.
pub const CASES_MAX: usize = 4_096;

/// The bodies that broke workers lately, by a hash.
#[derive(Debug, Default)]
pub struct Poison {
    cases: HashMap<u64, Case>,
    sweep_at: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    first: WorkerId,
    /// Whether another one than the first broke too.
    is_second: bool,
    /// How often a worker broke behind it.
    broken: u32,
    /// How often one has answered it since the first broke.
    answered: u32,
    refused_until: Duration,
    /// How long it is refused next.
    term: Duration,
    remembered_until: Duration,
}

impl Poison {
    /// Whether nothing is held against any body any more: then there is no need for a hash.
    pub fn is_empty(&mut self, now: Duration) -> bool {
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP_EVERY;
            self.cases.retain(|_, case| case.remembered_until > now);
        }
        self.cases.is_empty()
    }

    /// A worker's connection broke behind it. Returns for how long it is refused from now on, if it is.
    pub fn broke(&mut self, body: u64, worker: WorkerId, now: Duration) -> Option<Duration> {
        self.make_room(now);
        let case = self.cases.entry(body).or_insert(Case {
            first: worker,
            is_second: false,
            broken: 0,
            answered: 0,
            refused_until: Duration::ZERO,
            term: FIRST_TERM,
            remembered_until: now,
        });
        case.broken += 1;
        case.is_second |= worker != case.first;
        case.remembered_until = case.remembered_until.max(now + MEMORY);
        if !case.is_second || case.broken <= case.answered + 1 || case.refused_until > now {
            return None;
        }
        let term = case.term;
        case.refused_until = now + term;
        case.term = (term * 2).min(TERM_MAX);
        case.remembered_until = case.refused_until + MEMORY;
        Some(term)
    }

    /// A worker answered it whole.
    pub fn answered(&mut self, body: u64, now: Duration) {
        let Some(case) = self.cases.get_mut(&body) else { return };
        case.answered += 1;
        let was_refused = !case.refused_until.is_zero();
        if case.answered > case.broken || was_refused && case.refused_until <= now {
            self.cases.remove(&body);
        }
    }

    /// Whether something is held against it.
    pub fn knows(&self, body: u64) -> bool {
        self.cases.contains_key(&body)
    }

    /// For how long it is refused, if it is.
    pub fn refused(&self, body: u64, now: Duration) -> Option<Duration> {
        let case = self.cases.get(&body)?;
        case.refused_until.checked_sub(now).filter(|left| !left.is_zero())
    }

    /// What is over goes, and what must so that one more has its place.
    fn make_room(&mut self, now: Duration) {
        if self.cases.len() < CASES_MAX {
            return;
        }
        self.cases.retain(|_, case| case.remembered_until > now);
        if self.cases.len() >= CASES_MAX {
            self.cases.retain(|_, case| case.refused_until > now);
        }
        if self.cases.len() >= CASES_MAX {
            self.cases.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const ONE: WorkerId = WorkerId(1);
    const TWO: WorkerId = WorkerId(2);

    #[test]
    fn who_breaks_two_is_refused_for_longer_each_time() {
        let mut poison = Poison::default();
        assert_eq!((poison.broke(7, ONE, SECOND), poison.refused(7, SECOND)), (None, None));
        assert_eq!(poison.broke(7, TWO, 2 * SECOND), Some(FIRST_TERM));
        assert_eq!(poison.refused(7, 2 * SECOND), Some(FIRST_TERM));
        assert_eq!(poison.refused(8, 2 * SECOND), None, "others are not");
        let mut now = 2 * SECOND + FIRST_TERM;
        assert_eq!(poison.refused(7, now), None, "it may be tried again");
        let mut term = FIRST_TERM;
        for _ in 0..8 {
            term = (term * 2).min(TERM_MAX);
            assert_eq!(poison.broke(7, ONE, now), Some(term));
            // What was under way when it was refused changes nothing.
            assert_eq!(poison.broke(7, TWO, now + SECOND), None);
            now += term;
        }
        assert_eq!(term, TERM_MAX);
    }

    #[test]
    fn a_worker_that_breaks_off_again_and_again_is_not_the_body_s_fault() {
        let mut poison = Poison::default();
        for second in 0..100 {
            assert_eq!(poison.broke(7, ONE, second * SECOND), None);
        }
        // Nor are two, where a third one answers.
        let mut poison = Poison::default();
        for second in 0..100 {
            let worker = if second % 2 == 0 { ONE } else { TWO };
            assert_eq!(poison.broke(7, worker, second * SECOND), None);
            poison.answered(7, second * SECOND);
        }
    }

    #[test]
    fn what_is_answered_is_forgotten() {
        let mut poison = Poison::default();
        poison.broke(7, ONE, SECOND);
        poison.answered(7, SECOND);
        assert!(poison.knows(7));
        poison.answered(7, SECOND);
        assert!(!poison.knows(7));
        // An answer that was under way does not end a refusal; one to what is asked after it does.
        poison.broke(8, ONE, SECOND);
        poison.broke(8, TWO, 2 * SECOND);
        poison.answered(8, 3 * SECOND);
        assert!(poison.refused(8, 4 * SECOND).is_some());
        poison.answered(8, 2 * SECOND + FIRST_TERM);
        assert!(!poison.knows(8));
        // What comes to nothing is too.
        poison.broke(9, ONE, 100 * SECOND);
        assert!(!poison.is_empty(200 * SECOND) && poison.is_empty(200 * SECOND + MEMORY));
    }

    proptest! {
        #[test]
        fn they_are_bounded_and_those_that_are_refused_stay(bodies in prop::collection::vec(0u64..20_000, 0..12_000)) {
            let mut poison = Poison::default();
            poison.broke(u64::MAX, ONE, Duration::ZERO);
            poison.broke(u64::MAX, TWO, Duration::ZERO);
            for body in bodies {
                poison.broke(body, ONE, SECOND);
                prop_assert!(poison.cases.len() <= CASES_MAX);
            }
            prop_assert!(poison.refused(u64::MAX, SECOND).is_some());
        }
    }
}
