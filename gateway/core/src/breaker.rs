//! Whether a worker that is reachable answers well enough to be sent requests: a circuit breaker, fed with
//! how answers ended. It opens after some failures in a row, or when too large a share of the recent answers
//! failed; then it lets one request through after a pause that grows with each failure, and closes when that
//! one ends well.
//!
//! Exact counts over a ring of time buckets, because a short burst weighs almost nothing in a decaying
//! average. Slow is no failure, nor is what the client did wrong or a worker's "not now" (4xx, 429, 503): the
//! caller does not report those. How many of the workers that share a model may be ejected at once is
//! [`may_eject`]. No clock: time is the `Duration` since the start.

use std::time::Duration;

/// Failures in a row that open it.
pub const CONSECUTIVE_FAILURES: u32 = 5;
/// Share of failed answers that opens it.
pub const FAILURE_RATIO: f64 = 0.5;
/// Answers below which no share is taken for one.
pub const MIN_SAMPLES: u32 = 20;
/// Span of one bucket; ten of them are looked at.
pub const BUCKET: Duration = Duration::from_secs(1);
/// First pause; each further failure doubles it.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause, however often in a row the breaker has opened.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Time after which a trial that has not ended counts no more, and another request may be one.
pub const TRIAL_PATIENCE: Duration = Duration::from_secs(10);
/// Share of the workers that may be out at once, rounded down: of one worker none, of three one.
pub const MAX_EJECTED_SHARE: f64 = 0.5;

const BUCKETS: usize = 10;

/// Whether one more of `workers` may be ejected where `ejected` already are.
pub fn may_eject(ejected: usize, workers: usize) -> bool {
    (ejected + 1) as f64 <= workers as f64 * MAX_EJECTED_SHARE
}

/// How an answer ended, where that says something of the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It ended as it should: this ends a row of failures, and closes the breaker if the request was the
    /// trial.
    Good,
    /// It broke off, stalled, or was a server's error.
    Bad,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    /// Nothing goes there before this time; then one trial does.
    Open {
        until: Duration,
    },
    /// A trial began at this time.
    Trial {
        since: Duration,
    },
}

/// Whether requests may go to one worker, and the counts of its recent answers that decide it.
#[derive(Debug, Clone)]
pub struct Breaker {
    state: State,
    in_a_row: u32,
    /// Times in a row that it opened.
    openings: u32,
    /// Good and bad answers of each bucket, the newest at `newest % BUCKETS`.
    buckets: [(u32, u32); BUCKETS],
    newest: u64,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, in_a_row: 0, openings: 0, buckets: [(0, 0); BUCKETS], newest: 0 }
    }
}

impl Breaker {
    /// Whether a request may go to the worker.
    pub fn admits(&self, now: Duration) -> bool {
        match self.state {
            State::Closed => true,
            State::Open { until } => now >= until,
            State::Trial { since } => now >= since + TRIAL_PATIENCE,
        }
    }

    /// Whether it is ejected: open, or on trial.
    pub fn is_open(&self) -> bool {
        self.state != State::Closed
    }

    /// A request goes to the worker. Returns whether it is the trial.
    pub fn begin(&mut self, now: Duration) -> bool {
        let trial = self.is_open() && self.admits(now);
        if trial {
            self.state = State::Trial { since: now };
        }
        trial
    }

    /// An answer ended. `trial` is what [`Breaker::begin`] said of its request; `may_eject` whether the fleet
    /// can do without the worker: if not, it stays in however badly it does. Returns whether it opened.
    pub fn end(&mut self, verdict: Verdict, trial: bool, may_eject: bool, now: Duration) -> bool {
        self.count(verdict, now);
        match (verdict, self.state) {
            (Verdict::Good, State::Trial { .. }) if trial => self.close(),
            (Verdict::Bad, State::Trial { .. }) if trial => return self.open(now),
            (Verdict::Bad, State::Closed) if may_eject && self.has_failed() => return self.open(now),
            _ => {}
        }
        false
    }

    /// A trial ended without saying anything: another may begin.
    pub fn abandon(&mut self, trial: bool, now: Duration) {
        if trial && matches!(self.state, State::Trial { .. }) {
            self.state = State::Open { until: now };
        }
    }

    fn open(&mut self, now: Duration) -> bool {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.openings.min(16)).min(MAX_PAUSE);
        self.openings = self.openings.saturating_add(1);
        self.state = State::Open { until: now + pause };
        true
    }

    /// What was counted before the pause says nothing of the worker that came back.
    fn close(&mut self) {
        *self = Self { newest: self.newest, ..Self::default() };
    }

    fn has_failed(&self) -> bool {
        let (good, bad) = self.buckets.iter().fold((0, 0), |(g, b), bucket| (g + bucket.0, b + bucket.1));
        let share = f64::from(bad) / f64::from((good + bad).max(1));
        self.in_a_row >= CONSECUTIVE_FAILURES || (good + bad >= MIN_SAMPLES && share >= FAILURE_RATIO)
    }

    fn count(&mut self, verdict: Verdict, now: Duration) {
        let bucket = (now.as_millis() / BUCKET.as_millis()) as u64;
        for passed in (self.newest + 1..=bucket).rev().take(BUCKETS) {
            self.buckets[passed as usize % BUCKETS] = (0, 0);
        }
        self.newest = self.newest.max(bucket);
        let (good, bad) = &mut self.buckets[self.newest as usize % BUCKETS];
        match verdict {
            Verdict::Good => {
                *good = good.saturating_add(1);
                self.in_a_row = 0;
            }
            Verdict::Bad => {
                *bad = bad.saturating_add(1);
                self.in_a_row = self.in_a_row.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests;
