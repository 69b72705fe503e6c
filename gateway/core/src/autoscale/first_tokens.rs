//! How long requests that came lately wait for their first token. By when they came, not by when the token
//! came: while a backlog is worked off, its last requests would otherwise be a missed objective long after no
//! new request misses it; and a request that still waits would not be one at all. Whether the objective is
//! missed is not decided here.

use std::{collections::VecDeque, time::Duration};

use super::window::{MIN_VALUES, upper_value};

/// Requests that are watched at once, at most; of more that come only every second, fourth, … is.
const WATCHED_MAX: usize = 1_024;

/// Names a request that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watched(u64);

/// The requests of a window that ended as long ago as a first token may take.
#[derive(Debug, Clone)]
pub struct FirstTokens {
    window: Duration,
    objective: Duration,
    came: u64,
    /// One of so many is watched; a power of two.
    every: u64,
    /// In the order in which they came.
    requests: VecDeque<Request>,
}

#[derive(Debug, Clone)]
struct Request {
    number: u64,
    came: Duration,
    /// Until its first token, or until it gave up.
    waited: Option<Duration>,
}

impl FirstTokens {
    /// Of a window of this length before whatever may still keep the objective.
    pub fn new(window: Duration, objective: Duration) -> Self {
        Self { window, objective, came: 0, every: 1, requests: VecDeque::new() }
    }

    /// A request came. `None`: enough others are watched.
    pub fn come(&mut self, now: Duration) -> Option<Watched> {
        self.forget(now);
        let number = self.came;
        self.came += 1;
        if !number.is_multiple_of(self.every) {
            return None;
        }
        if self.requests.len() == WATCHED_MAX {
            self.every *= 2;
            self.requests.retain(|request| request.number.is_multiple_of(self.every));
        } else if self.requests.len() < WATCHED_MAX / 8 {
            self.every = (self.every / 2).max(1);
        }
        self.requests.push_back(Request { number, came: now, waited: None });
        Some(Watched(number))
    }

    /// Its first token came.
    pub fn first_token(&mut self, now: Duration, watched: Watched) {
        if let Some(request) = self.place(watched).and_then(|at| self.requests.get_mut(at)) {
            request.waited.get_or_insert(now.saturating_sub(request.came));
        }
    }

    /// It is gone. One that gave up after the objective's time has missed it; who left before says nothing.
    pub fn gone(&mut self, now: Duration, watched: Watched) {
        let Some(at) = self.place(watched) else { return };
        let Some(request) = self.requests.get_mut(at).filter(|request| request.waited.is_none()) else {
            return;
        };
        let waited = now.saturating_sub(request.came);
        if waited >= self.objective {
            request.waited = Some(waited);
        } else {
            self.requests.remove(at);
        }
    }

    /// It is no longer watched here, as if it had not come: others make it wait from now on.
    pub fn leave(&mut self, watched: Watched) {
        if let Some(at) = self.place(watched) {
            self.requests.remove(at);
        }
    }

    fn place(&self, watched: Watched) -> Option<usize> {
        self.requests.binary_search_by_key(&watched.0, |request| request.number).ok()
    }

    /// Seconds that `share` of them do not exceed, a request that still waits counted as far as it has;
    /// `None` where they are too few.
    pub fn quantile(&mut self, now: Duration, share: f64) -> Option<f64> {
        self.forget(now);
        let judged = self.requests.iter().filter(|request| request.came + self.objective <= now);
        let waits = judged.map(|request| request.waited.unwrap_or(now.saturating_sub(request.came)));
        let seconds: Vec<f64> = waits.map(|waited| waited.as_secs_f64()).collect();
        (seconds.len() >= MIN_VALUES).then(|| upper_value(seconds, share))
    }

    fn forget(&mut self, now: Duration) {
        let span = self.window + self.objective;
        while self.requests.front().is_some_and(|request| now.saturating_sub(request.came) > span) {
            self.requests.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn watch() -> FirstTokens {
        FirstTokens::new(s(30.0), s(4.0))
    }

    #[test]
    fn the_last_of_a_backlog_are_no_missed_objective_of_those_who_come() {
        let mut watch = watch();
        let late: Vec<_> = (0..100).filter_map(|i| watch.come(s(0.01 * f64::from(i)))).collect();
        let soon: Vec<_> = (0..100).filter_map(|i| watch.come(s(60.0 + 0.01 * f64::from(i)))).collect();
        for one in soon {
            watch.first_token(s(61.5), one);
        }
        for one in late {
            watch.first_token(s(62.0), one);
        }
        let p90 = watch.quantile(s(66.0), 0.9).unwrap();
        assert!((0.5..1.5).contains(&p90), "{p90}");
    }

    #[test]
    fn who_still_waits_misses_it_and_who_may_still_keep_it_does_not() {
        let mut watch = watch();
        for i in 0..20 {
            watch.come(s(0.1 * f64::from(i)));
        }
        assert_eq!(watch.quantile(s(3.9), 0.9), None, "nobody can be judged yet");
        assert!(watch.quantile(s(6.0), 0.5).unwrap() > 4.0);
        assert_eq!(watch.quantile(s(40.0), 0.5), None, "nor those of long ago");
    }

    #[test]
    fn who_gives_up_has_missed_it_unless_it_left_early() {
        let mut watch = watch();
        let gave_up: Vec<_> = (0..10).filter_map(|_| watch.come(s(0.0))).collect();
        let left: Vec<_> = (0..90).filter_map(|_| watch.come(s(0.0))).collect();
        for one in left {
            watch.gone(s(1.0), one);
        }
        for one in gave_up {
            watch.gone(s(9.0), one);
        }
        assert_eq!(watch.quantile(s(20.0), 0.1), Some(9.0));
        let served: Vec<_> = (0..90).filter_map(|_| watch.come(s(20.0))).collect();
        for one in served {
            watch.first_token(s(20.5), one);
            watch.gone(s(21.0), one);
        }
        assert_eq!(watch.quantile(s(25.0), 0.5), Some(0.5), "an answer that ended after its first token");
    }

    #[test]
    fn who_leaves_for_others_counts_for_nothing_and_may_come_late() {
        let mut watch = watch();
        let gone: Vec<_> = (0..10).filter_map(|_| watch.come(s(0.0))).collect();
        let stays: Vec<_> = (0..10).filter_map(|_| watch.come(s(1.0))).collect();
        for one in gone {
            watch.leave(one);
        }
        for one in stays {
            watch.first_token(s(3.0), one);
        }
        assert_eq!(watch.quantile(s(20.0), 1.0), Some(2.0));
        // Who came long before is watched from then on.
        let late = watch.come(s(2.0)).unwrap();
        watch.first_token(s(20.0), late);
        assert_eq!(watch.quantile(s(20.0), 1.0), Some(18.0));
    }

    #[test]
    fn of_many_a_fair_part_is_watched() {
        let mut watch = watch();
        // A hundred times as many as are kept, of which a fifth wait for six seconds.
        for i in 0..102_400_u32 {
            let now = 30.0 * f64::from(i) / 102_400.0;
            let wait = if i / 7 % 5 == 0 { 6.0 } else { 1.0 };
            if let Some(one) = watch.come(s(now)) {
                watch.first_token(s(now + wait), one);
            }
            assert!(watch.requests.len() <= WATCHED_MAX);
        }
        assert_eq!(watch.quantile(s(34.0), 0.9), Some(6.0));
        assert_eq!(watch.quantile(s(34.0), 0.7), Some(1.0));
        assert!(watch.requests.len() >= WATCHED_MAX / 4, "{}", watch.requests.len());
        // And all again when fewer come.
        let seen = (0..2_000).filter(|i| watch.come(s(100.0 + f64::from(*i))).is_some()).count();
        assert!(seen > 1_700, "{seen}");
    }
}
