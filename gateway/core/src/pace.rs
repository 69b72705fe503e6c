//! How one worker prefills: what waits there, how fast it goes, how busy it is. Learned from two moments of each
//! request, when it is sent and when its first token comes; time is an argument. What a number is worth to a choice is
//! [`crate::cost`]'s.

use std::collections::VecDeque;
use std::time::Duration;

/// Time constant of what is learned: about the last four minutes count.
const MEMORY_S: f64 = 120.0;
/// A single prefill of this many tokens is believed as much as the rate it started from.
const PRIOR_TOKENS: f64 = 4096.0;
/// Before any answer: tokens per second of an eight-billion-parameter model on a large GPU.
pub const PRIOR_TOKENS_PER_S: f64 = 8_000.0;
/// The busy share counts up to here: beyond it the price of a busy worker would have no bound.
const MAX_BUSY_SHARE: f64 = 0.95;

/// What is known of one worker's prefill.
#[derive(Debug, Clone)]
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
    /// Decayed sums over first tokens of (tokens squared, tokens times seconds): their quotient is the rate, in which
    /// long prefills count for more than the fixed costs of short ones.
    squares: f64,
    products: f64,
}

/// Names one request that waits, from [`Pace::start`].
#[derive(Debug, PartialEq, Eq)]
pub struct Waiting(u64);

/// A worker's pace at one moment.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct PaceSnapshot {
    /// Milliseconds until all that waits is computed.
    pub backlog_ms: f64,
    /// Prompt tokens computed in a millisecond.
    pub tokens_per_ms: f64,
    /// Requests per millisecond that came lately.
    pub arrivals_per_ms: f64,
    /// Share of time in which prompts waited lately, at most 0.95.
    pub busy_share: f64,
}

impl Default for PaceSnapshot {
    fn default() -> Self {
        Self {
            backlog_ms: 0.0,
            tokens_per_ms: PRIOR_TOKENS_PER_S / 1e3,
            arrivals_per_ms: 0.0,
            busy_share: 0.0,
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(PRIOR_TOKENS_PER_S)
    }
}

impl Pace {
    /// A worker of which nothing is known but a rate to start from, in tokens per second.
    pub fn new(prior_tokens_per_s: f64) -> Self {
        let squares = PRIOR_TOKENS * PRIOR_TOKENS;
        Self {
            waiting: VecDeque::new(),
            waiting_tokens: 0,
            next: 0,
            head_since: Duration::ZERO,
            updated: Duration::ZERO,
            arrivals: 0.0,
            busy: 0.0,
            squares,
            products: squares / prior_tokens_per_s,
        }
    }

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
        let Some(tokens) = self.remove(waiting) else { return };
        let seconds = now.saturating_sub(self.head_since).as_secs_f64();
        self.squares += (tokens as f64).powi(2);
        self.products += tokens as f64 * seconds;
        self.head_since = now;
    }

    /// It ended without a first token.
    pub fn cancelled(&mut self, now: Duration, waiting: &Waiting) {
        self.advance(now);
        let was_first = self.waiting.front().is_some_and(|(number, _)| *number == waiting.0);
        if self.remove(waiting).is_some() && was_first {
            self.head_since = now;
        }
    }

    /// The pace now. The prompt in prefill counts as done in proportion to its time, until it is seen to take longer.
    pub fn snapshot(&self, now: Duration) -> PaceSnapshot {
        let per_ms = self.squares / self.products / 1e3;
        let head = self.waiting.front().map_or(0, |(_, tokens)| *tokens) as f64;
        let done = (millis(now.saturating_sub(self.head_since)) * per_ms).min(head);
        let (decay, idle) = self.decay(now);
        let busy = if idle { self.busy * decay } else { 1.0 - (1.0 - self.busy) * decay };
        PaceSnapshot {
            backlog_ms: (self.waiting_tokens as f64 - done) / per_ms,
            tokens_per_ms: per_ms,
            arrivals_per_ms: self.arrivals * decay / 1e3,
            busy_share: busy.min(MAX_BUSY_SHARE),
        }
    }

    /// Prompt tokens of those that wait.
    pub fn waiting_tokens(&self) -> u64 {
        self.waiting_tokens
    }

    fn remove(&mut self, waiting: &Waiting) -> Option<u64> {
        // In order of their numbers, and the one that ends is mostly the first.
        let at = self.waiting.binary_search_by_key(&waiting.0, |(number, _)| *number).ok()?;
        let (_, tokens) = self.waiting.remove(at)?;
        self.waiting_tokens -= tokens;
        Some(tokens)
    }

    fn decay(&self, now: Duration) -> (f64, bool) {
        let elapsed = now.saturating_sub(self.updated).as_secs_f64();
        ((-elapsed / MEMORY_S).exp(), self.waiting.is_empty())
    }

    fn advance(&mut self, now: Duration) {
        let (decay, idle) = self.decay(now);
        self.arrivals *= decay;
        self.busy = if idle { self.busy * decay } else { 1.0 - (1.0 - self.busy) * decay };
        // What is learned of the rate fades only while there is something to learn.
        if !idle {
            let least = PRIOR_TOKENS * PRIOR_TOKENS;
            let fade =
                if self.squares * decay > least { decay } else { least.min(self.squares) / self.squares };
            self.squares *= fade;
            self.products *= fade;
        }
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

    /// A worker that prefills one prompt after the other at `rate`, each with a fixed cost, for `n` prompts of
    /// `tokens` at intervals of `gap` seconds.
    fn serve(pace: &mut Pace, from: f64, n: usize, tokens: u64, rate: f64, fixed: f64, gap: f64) -> f64 {
        let mut free = from;
        let mut events: Vec<(f64, bool, usize)> = Vec::new();
        for i in 0..n {
            let at = from + i as f64 * gap;
            free = free.max(at) + fixed + tokens as f64 / rate;
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
    fn the_rate_is_learned_also_from_a_queue_that_never_empties() {
        for gap in [10.0, 1.0] {
            let mut pace = Pace::new(50_000.0);
            let end = serve(&mut pace, 5.0, 200, 10_000, 6_000.0, 0.02, gap);
            let snapshot = pace.snapshot(s(end));
            let rate = snapshot.tokens_per_ms * 1e3;
            assert!((rate / 6_000.0 - 1.0).abs() < 0.03, "{rate}");
            assert_eq!(snapshot.backlog_ms, 0.0);
        }
    }

    #[test]
    fn a_changed_rate_is_followed() {
        let mut pace = Pace::default();
        let end = serve(&mut pace, 0.0, 300, 8_000, 8_000.0, 0.0, 1.5);
        let end = serve(&mut pace, end, 300, 8_000, 2_000.0, 0.0, 5.0);
        let rate = pace.snapshot(s(end)).tokens_per_ms * 1e3;
        assert!((rate / 2_000.0 - 1.0).abs() < 0.05, "{rate}");
    }

    #[test]
    fn short_prompts_with_a_fixed_cost_do_not_drown_the_rate_of_long_ones() {
        let mut pace = Pace::default();
        let end = serve(&mut pace, 0.0, 40, 10_000, 6_000.0, 0.03, 4.0);
        let end = serve(&mut pace, end, 200, 50, 6_000.0, 0.03, 0.5);
        let rate = pace.snapshot(s(end)).tokens_per_ms * 1e3;
        assert!((rate / 6_000.0 - 1.0).abs() < 0.05, "{rate}");
    }

    #[test]
    fn arrivals_and_busy_share_are_those_of_the_last_minutes() {
        let mut pace = Pace::default();
        // 2.5 s of work every 5 s.
        let end = serve(&mut pace, 0.0, 200, 10_000, 4_000.0, 0.0, 5.0);
        let busy = pace.snapshot(s(end));
        assert!((busy.arrivals_per_ms * 1e3 - 0.2).abs() < 0.01, "{busy:?}");
        assert!((busy.busy_share - 0.5).abs() < 0.02, "{busy:?}");
        let later = pace.snapshot(s(end + 240.0));
        assert!(later.busy_share < 0.08 && later.arrivals_per_ms < busy.arrivals_per_ms / 7.0, "{later:?}");
        assert_eq!(later.tokens_per_ms, busy.tokens_per_ms, "silence says nothing of the rate");
    }

    #[test]
    fn the_backlog_falls_with_time_but_not_below_what_has_not_begun() {
        let mut pace = Pace::new(1_000.0);
        let first = pace.start(s(1.0), 2_000);
        let second = pace.start(s(1.0), 500);
        assert_eq!(pace.snapshot(s(1.0)).backlog_ms, 2_500.0);
        assert_eq!(pace.snapshot(s(2.5)).backlog_ms, 1_000.0);
        assert_eq!(pace.snapshot(s(60.0)).backlog_ms, 500.0, "the head takes longer than thought");
        pace.cancelled(s(61.0), &first);
        assert_eq!(pace.snapshot(s(61.0)).backlog_ms, 500.0);
        pace.first_token(s(61.5), &second);
        pace.first_token(s(61.5), &second);
        assert_eq!((pace.waiting_tokens(), pace.snapshot(s(61.5)).backlog_ms), (0, 0.0));
    }

    #[test]
    fn first_tokens_of_one_step_share_its_time() {
        let mut pace = Pace::new(1_000.0);
        for step in 0..200 {
            let at = f64::from(step);
            let batch: Vec<_> = (0..4).map(|_| pace.start(s(at), 1_000)).collect();
            batch.iter().for_each(|waiting| pace.first_token(s(at + 0.8), waiting));
        }
        let rate = pace.snapshot(s(200.0)).tokens_per_ms * 1e3;
        assert!((rate / 5_000.0 - 1.0).abs() < 0.1, "{rate}");
    }
}
