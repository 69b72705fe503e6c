//! What waits at one worker and how busy it has been, from two moments of each request: when it is sent and
//! when its first token comes. How fast the worker is, is [`mod@crate::rate`]'s, what these are worth to a
//! choice [`crate::cost`]'s.

use std::collections::VecDeque;
use std::time::Duration;

use crate::others::OthersNow;

/// Time constant of what is learned: about the last four minutes count.
pub(crate) const MEMORY_S: f64 = 120.0;
/// Before its first request a worker is taken to have been idle for so long: one request is no rate.
pub(crate) const IDLE_BEFORE_S: f64 = 10.0;
/// Weight of the newest request in the mean of their tokens.
const MEAN_GAIN: f64 = 0.05;
/// The busy share counts up to here: beyond it the price of a busy worker would have no bound.
pub(crate) const MAX_BUSY_SHARE: f64 = 0.95;

/// What is known of one worker's prefill.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    /// Requests without a first token, in the order sent.
    waiting: VecDeque<Prefill>,
    waiting_tokens: u64,
    next: u64,
    /// Since when the first of `waiting` is taken to be in prefill.
    head_since: Duration,
    /// When its first request came.
    began: Option<Duration>,
    /// When the decayed sums below were last brought up to date.
    updated: Duration,
    /// Requests per second that were sent, decayed over [`MEMORY_S`]. Too low while less time than that was
    /// seen.
    arrivals: f64,
    /// Share of time in which a request waited for its first token, decayed as `arrivals` is.
    busy: f64,
    /// Uncached prompt tokens of one request, a running mean.
    mean_tokens: f64,
}

#[derive(Debug, Clone)]
struct Prefill {
    number: u64,
    /// Uncached prompt tokens that are not known to be computed.
    tokens: u64,
    /// Whether its first token will be seen: that of an answer that does not stream comes with its last.
    seen: bool,
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

/// What a pace is at any moment until something happens there.
#[derive(Copy, Clone, Debug)]
pub(crate) struct PaceBasis {
    /// Tokens that wait, and those of them that time alone can take to be computed.
    pub(crate) waiting_tokens: f64,
    pub(crate) passing_tokens: f64,
    pub(crate) head_since: Duration,
    /// When the first request came, and when what follows was so.
    pub(crate) began: Option<Duration>,
    pub(crate) updated: Duration,
    pub(crate) arrivals: f64,
    pub(crate) busy: f64,
    pub(crate) is_busy: bool,
}

impl Pace {
    /// A request with this much prefill of its own was sent. `streams`: its first token will be seen when it
    /// is made.
    pub fn start(&mut self, now: Duration, uncached_tokens: u64, streams: bool) -> Waiting {
        self.advance(now);
        self.began.get_or_insert(now);
        self.arrivals += 1.0 / MEMORY_S;
        let gain = if self.next == 0 { 1.0 } else { MEAN_GAIN };
        self.mean_tokens += gain * (uncached_tokens as f64 - self.mean_tokens);
        if self.waiting.is_empty() {
            self.head_since = now;
        }
        let number = self.next;
        self.next += 1;
        self.waiting.push_back(Prefill { number, tokens: uncached_tokens, seen: streams });
        self.waiting_tokens += uncached_tokens;
        Waiting(number)
    }

    /// Its first token came.
    pub fn first_token(&mut self, now: Duration, waiting: &Waiting) {
        self.advance(now);
        if let Some(prefill) = self.remove(waiting).filter(|prefill| prefill.seen) {
            self.head_since = now;
            // Prompts are computed in the order sent, so what was sent before it and cannot be seen is
            // computed too.
            for earlier in self.waiting.iter_mut().take_while(|other| other.number < prefill.number) {
                if !earlier.seen {
                    self.waiting_tokens -= std::mem::take(&mut earlier.tokens);
                }
            }
        }
    }

    /// It ended without a first token.
    pub fn cancelled(&mut self, now: Duration, waiting: &Waiting) {
        self.advance(now);
        let was_first = self.waiting.front().is_some_and(|first| first.number == waiting.0);
        if self.remove(waiting).is_some() && was_first {
            self.head_since = now;
        }
    }

    /// The pace now, at this rate. Prompts count as done in proportion to the time since the last first
    /// token, but not beyond the first whose own first token would have been seen.
    pub fn snapshot(&self, now: Duration, tokens_per_ms: f64) -> PaceSnapshot {
        let (decay, busy) = self.faded(now);
        let seen = self.seen(now);
        PaceSnapshot {
            backlog_ms: self.tokens_left(now, tokens_per_ms) / tokens_per_ms,
            arrivals_per_ms: self.arrivals * decay / seen / 1e3,
            busy_share: (busy / seen).min(MAX_BUSY_SHARE),
        }
    }

    /// What [`Pace::snapshot`] is worked out from.
    pub(crate) fn basis(&self) -> PaceBasis {
        PaceBasis {
            waiting_tokens: self.waiting_tokens as f64,
            passing_tokens: self.tokens_to_first_seen(f64::INFINITY),
            head_since: self.head_since,
            began: self.began,
            updated: self.updated,
            arrivals: self.arrivals,
            busy: self.busy,
            is_busy: !self.waiting.is_empty(),
        }
    }

    /// Requests per millisecond that came lately.
    pub fn arrivals_per_ms(&self, now: Duration) -> f64 {
        self.arrivals * self.faded(now).0 / self.seen(now) / 1e3
    }

    /// The part of the memory that has been filled: what began a minute ago has a third of its arrivals in
    /// the decayed sums, and is not taken for a third as busy.
    fn seen(&self, now: Duration) -> f64 {
        let elapsed = self.began.map_or(0.0, |began| now.saturating_sub(began).as_secs_f64());
        1.0 - (-(elapsed + IDLE_BEFORE_S) / MEMORY_S).exp()
    }

    /// Prompt tokens of those that wait, less what is computed by now at this rate.
    pub fn tokens_left(&self, now: Duration, tokens_per_ms: f64) -> f64 {
        let possible = millis(now.saturating_sub(self.head_since)) * tokens_per_ms;
        self.waiting_tokens as f64 - possible.min(self.tokens_to_first_seen(possible))
    }

    /// Prompt tokens of those that wait.
    pub fn waiting_tokens(&self) -> u64 {
        self.waiting_tokens
    }

    /// Requests sent there that have neither a first token nor ended.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Uncached prompt tokens of one request, on the mean of the last ones.
    pub fn mean_tokens(&self) -> f64 {
        self.mean_tokens
    }

    fn remove(&mut self, waiting: &Waiting) -> Option<Prefill> {
        // In order of their numbers, and the one that ends is mostly the first.
        let at = self.waiting.binary_search_by_key(&waiting.0, |prefill| prefill.number).ok()?;
        let prefill = self.waiting.remove(at)?;
        self.waiting_tokens -= prefill.tokens;
        Some(prefill)
    }

    /// Tokens up to the first prompt whose first token will be seen, with it; counted no further than
    /// `enough`.
    fn tokens_to_first_seen(&self, enough: f64) -> f64 {
        let mut tokens = 0.0;
        for prefill in &self.waiting {
            tokens += prefill.tokens as f64;
            if prefill.seen || tokens >= enough {
                break;
            }
        }
        tokens
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

impl PaceSnapshot {
    /// With what others have there.
    pub(crate) fn with_others(self, others: &OthersNow, tokens_per_ms: f64) -> Self {
        let backlog_ms = self.backlog_ms + others.tokens / tokens_per_ms;
        let arrivals_per_ms = self.arrivals_per_ms + others.arrivals_per_ms;
        if others.counted.all <= others.counted.own {
            return Self { backlog_ms, arrivals_per_ms, ..self };
        }
        let busy_share = self.busy_share.max(others.busy_share).min(MAX_BUSY_SHARE);
        Self { backlog_ms, arrivals_per_ms, busy_share }
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

    /// A worker that prefills one prompt after the other at `rate` tokens a second: `n` prompts of `tokens`
    /// at intervals of `gap` seconds. When the last is done.
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
                tickets[i] = Some(pace.start(s(at), tokens, true));
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
    fn a_worker_that_has_just_joined_is_as_busy_as_it_is() {
        for seconds in [20.0, 60.0] {
            let mut pace = Pace::default();
            serve(&mut pace, 1_000.0, seconds as usize, 2_000, 4_000.0, 1.0);
            let now = pace.snapshot(s(1_000.0 + seconds), 4.0);
            // As if it had been idle for ten seconds before.
            let expected = seconds / (seconds + IDLE_BEFORE_S);
            assert!((now.arrivals_per_ms * 1e3 / expected - 1.0).abs() < 0.05, "{now:?}");
            assert!((now.busy_share / (0.5 * expected) - 1.0).abs() < 0.05, "{now:?}");
        }
        let mut pace = Pace::default();
        pace.start(s(5.0), 100, true);
        let first = pace.snapshot(s(5.0), 4.0);
        assert!(first.arrivals_per_ms * 1e3 < 0.15 && first.busy_share == 0.0, "{first:?}");
    }

    #[test]
    fn the_backlog_falls_with_time_but_not_below_what_has_not_begun() {
        let mut pace = Pace::default();
        let first = pace.start(s(1.0), 2_000, true);
        let second = pace.start(s(1.0), 500, true);
        assert_eq!(pace.snapshot(s(1.0), 1.0).backlog_ms, 2_500.0);
        assert_eq!(pace.snapshot(s(2.5), 1.0).backlog_ms, 1_000.0);
        assert_eq!(pace.snapshot(s(60.0), 1.0).backlog_ms, 500.0, "the head takes longer than thought");
        pace.cancelled(s(61.0), &first);
        assert_eq!(pace.snapshot(s(61.0), 1.0).backlog_ms, 500.0);
        pace.first_token(s(61.5), &second);
        pace.first_token(s(61.5), &second);
        assert_eq!((pace.waiting_tokens(), pace.snapshot(s(61.5), 1.0).backlog_ms), (0, 0.0));
    }

    #[test]
    fn answers_that_do_not_stream_are_taken_to_be_prefilled_in_time() {
        let mut pace = Pace::default();
        let whole: Vec<_> = (0..3).map(|_| pace.start(s(0.0), 1_000, false)).collect();
        assert_eq!(pace.snapshot(s(1.5), 1.0).backlog_ms, 1_500.0);
        assert_eq!(pace.snapshot(s(9.0), 1.0).backlog_ms, 0.0, "they may decode for long");
        let streamed = pace.start(s(9.0), 400, true);
        let after = pace.start(s(9.0), 300, false);
        assert_eq!(pace.snapshot(s(9.0), 1.0).backlog_ms, 300.0);
        pace.first_token(s(9.5), &streamed);
        assert_eq!((pace.waiting_tokens(), pace.snapshot(s(9.5), 1.0).backlog_ms), (300, 300.0));
        for waiting in whole.iter().chain([&after]) {
            pace.first_token(s(10.0), waiting);
        }
        assert_eq!((pace.waiting_tokens(), pace.snapshot(s(10.0), 1.0).backlog_ms), (0, 0.0));
    }
}
