//! What waits at one worker and how busy it has been, from two moments of each request: when it is sent and when its first
//! token comes. How fast the worker is, is [`mod@crate::rate`]'s, what these are worth to a choice [`crate::cost`]'s.

use std::collections::VecDeque;
use std::time::Duration;

/// Time constant of what is learned: about the last four minutes count.
const MEMORY_S: f64 = 120.0;
/// The busy share counts up to here: beyond it the price of a busy worker would have no bound.
const MAX_BUSY_SHARE: f64 = 0.95;

/// What is known of one worker's prefill.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    /// Requests without a first token, in the order sent: a number, and uncached prompt tokens.
    waiting: VecDeque<(u64, u64)>,
    waiting_tokens: u64,
    next: u64,
    /// Since when the first of `waiting` is taken to be in prefill.
    head_since: Duration,
    /// When the decayed sums below were last brought up to date.
    updated: Duration,
    /// Requests per second.
    arrivals: f64,
    /// Share of time in which somebody waited for a first token.
    busy: f64,
}

/// Names one request that waits, from [`Pace::start`].
#[derive(Debug, PartialEq, Eq)]
pub struct Waiting(u64);

/// A worker's pace at one moment.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct PaceSnapshot {
    /// Milliseconds until all that waits is computed.
    pub backlog_ms: f64,
    /// Requests per millisecond that came lately.
    pub arrivals_per_ms: f64,
    /// Share of time in which prompts waited lately, at most 0.95.
    pub busy_share: f64,
}

impl Pace {
    /// A request with this much prefill of its own was sent.
    pub fn start(&mut self, now: Duration, uncached_tokens: u64) -> Waiting {
        self.advance(now);
        self.arrivals += 1.0 / MEMORY_S;
        if self.waiting.is_empty() {
            self.head_since = now;
        }
        let number = self.next;
        self.next += 1;
        self.waiting.push_back((number, uncached_tokens));
        self.waiting_tokens += uncached_tokens;
        Waiting(number)
    }

    /// Its first token came.
    pub fn first_token(&mut self, now: Duration, waiting: &Waiting) {
        self.advance(now);
        if self.remove(waiting) {
            self.head_since = now;
        }
    }

    /// It ended without a first token.
    pub fn cancelled(&mut self, now: Duration, waiting: &Waiting) {
        self.advance(now);
        let was_first = self.waiting.front().is_some_and(|(number, _)| *number == waiting.0);
        if self.remove(waiting) && was_first {
            self.head_since = now;
        }
    }

    /// The pace now, at this rate. The prompt in prefill counts as done in proportion to its time, until it is seen to
    /// take longer.
    pub fn snapshot(&self, now: Duration, tokens_per_ms: f64) -> PaceSnapshot {
        let head = self.waiting.front().map_or(0, |(_, tokens)| *tokens) as f64;
        let done = (millis(now.saturating_sub(self.head_since)) * tokens_per_ms).min(head);
        let (decay, busy) = self.faded(now);
        PaceSnapshot {
            backlog_ms: (self.waiting_tokens as f64 - done) / tokens_per_ms,
            arrivals_per_ms: self.arrivals * decay / 1e3,
            busy_share: busy.min(MAX_BUSY_SHARE),
        }
    }

    /// Prompt tokens of those that wait.
    pub fn waiting_tokens(&self) -> u64 {
        self.waiting_tokens
    }

    fn remove(&mut self, waiting: &Waiting) -> bool {
        // In order of their numbers, and the one that ends is mostly the first.
        let at = self.waiting.binary_search_by_key(&waiting.0, |(number, _)| *number);
        let Some((_, tokens)) = at.ok().and_then(|at| self.waiting.remove(at)) else { return false };
        self.waiting_tokens -= tokens;
        true
    }

    /// What is left by now of a number learned, and the busy share.
    fn faded(&self, now: Duration) -> (f64, f64) {
        let elapsed = now.saturating_sub(self.updated).as_secs_f64();
        let decay = (-elapsed / MEMORY_S).exp();
        let busy = if self.waiting.is_empty() { self.busy * decay } else { 1.0 - (1.0 - self.busy) * decay };
        (decay, busy)
    }

    fn advance(&mut self, now: Duration) {
        let (decay, busy) = self.faded(now);
        self.arrivals *= decay;
        self.busy = busy;
        self.updated = self.updated.max(now);
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// A worker that prefills one prompt after the other at `rate` tokens a second: `n` prompts of `tokens` at intervals
    /// of `gap` seconds. When the last is done.
    fn serve(pace: &mut Pace, from: f64, n: usize, tokens: u64, rate: f64, gap: f64) -> f64 {
        let mut free = from;
        let mut events: Vec<(f64, bool, usize)> = Vec::new();
        for i in 0..n {
            let at = from + i as f64 * gap;
            free = free.max(at) + tokens as f64 / rate;
            events.extend([(at, true, i), (free, false, i)]);
        }
        events.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut tickets: Vec<Option<Waiting>> = (0..n).map(|_| None).collect();
        for (at, starts, i) in events {
            if starts {
                tickets[i] = Some(pace.start(s(at), tokens));
            } else {
                pace.first_token(s(at), tickets[i].as_ref().unwrap());
            }
        }
        free
    }

    #[test]
    fn arrivals_and_busy_share_are_those_of_the_last_minutes() {
        let mut pace = Pace::default();
        // 2.5 s of work every 5 s.
        let end = serve(&mut pace, 0.0, 200, 10_000, 4_000.0, 5.0);
        let busy = pace.snapshot(s(end), 4.0);
        assert!((busy.arrivals_per_ms * 1e3 - 0.2).abs() < 0.01, "{busy:?}");
        assert!((busy.busy_share - 0.5).abs() < 0.02, "{busy:?}");
        let later = pace.snapshot(s(end + 240.0), 4.0);
        assert!(later.busy_share < 0.08 && later.arrivals_per_ms < busy.arrivals_per_ms / 7.0, "{later:?}");
    }

    #[test]
    fn the_backlog_falls_with_time_but_not_below_what_has_not_begun() {
        let mut pace = Pace::default();
        let first = pace.start(s(1.0), 2_000);
        let second = pace.start(s(1.0), 500);
        assert_eq!(pace.snapshot(s(1.0), 1.0).backlog_ms, 2_500.0);
        assert_eq!(pace.snapshot(s(2.5), 1.0).backlog_ms, 1_000.0);
        assert_eq!(pace.snapshot(s(60.0), 1.0).backlog_ms, 500.0, "the head takes longer than thought");
        pace.cancelled(s(61.0), &first);
        assert_eq!(pace.snapshot(s(61.0), 1.0).backlog_ms, 500.0);
        pace.first_token(s(61.5), &second);
        pace.first_token(s(61.5), &second);
        assert_eq!((pace.waiting_tokens(), pace.snapshot(s(61.5), 1.0).backlog_ms), (0, 0.0));
    }
}
