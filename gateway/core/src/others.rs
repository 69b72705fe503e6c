//! What others send to a worker besides this gateway, and what that means for the queue there: what other
//! gateways say that they have there, and what the engine's own gauges count beyond theirs and this
//! gateway's. Both are old as soon as they are read, so what they said counts for less and less. Asking is
//! the caller's; this gateway's own requests are [`crate::load`]'s.

use std::time::Duration;

/// What an engine says of its load.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Requests in the batch that it computes.
    pub running: u64,
    /// Requests that wait for a place in it.
    pub waiting: u64,
    /// Prompt tokens that wait, cached ones left out, where it counts them.
    pub waiting_tokens: Option<u64>,
}

/// What one gateway has at the engine.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct OwnLoad {
    /// Requests that have not ended.
    pub requests: u64,
    /// Those among them without a first token.
    pub waiting: u64,
    /// Uncached prompt tokens of those.
    pub waiting_tokens: u64,
    /// Uncached prompt tokens of one request, on the mean.
    pub mean_tokens: f64,
    /// Requests per millisecond that it has sent there lately.
    pub arrivals_per_ms: f64,
}

/// Age at which what the gauges said no longer counts; it fades evenly until then.
pub const MAX_AGE: Duration = Duration::from_secs(15);
/// Time constant of the running means.
const MEMORY_S: f64 = 60.0;
/// The first look stands for so long, in seconds,
const FIRST_LOOK_S: f64 = 1.0;
/// and before it no request waited for so long: one look is no share of time.
const IDLE_BEFORE_S: f64 = 10.0;
/// This gateway's share of all requests is taken to be at least this: one of 64 gateways.
const MIN_SHARE: f64 = 1.0 / 64.0;

/// Requests at a worker, on the mean of the last minute; 0 where nothing was heard of others lately.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Counted {
    /// Those that this gateway sent.
    pub own: f64,
    /// Those of this gateway and of others that say what they have there.
    pub gateways: f64,
    /// Those of all senders, this gateway among them.
    pub all: f64,
}

/// Shares of the requests at some workers, above 0 and at most 1.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Shares {
    /// This gateway's.
    pub own: f64,
    /// That of this gateway and of others that say what they have there.
    pub gateways: f64,
}

impl Shares {
    /// Of all workers together. Of one worker a gateway has too few requests in a minute to tell its share:
    /// taken worker by worker, some look several times as busy as they are, and their prefixes are copied for
    /// nothing (four gateways over eight workers had 0.95 of the hits that one has; by the share over all
    /// workers 0.99: `tests/external/routing/docs/several-gateways.md`).
    pub fn of(counted: impl Iterator<Item = Counted>) -> Self {
        let sum = |sum: Counted, one: Counted| Counted {
            own: sum.own + one.own,
            gateways: sum.gateways + one.gateways,
            all: sum.all + one.all,
        };
        let Counted { own, gateways, all } = counted.fold(Counted::default(), sum);
        let share = |part: f64| if all <= part { 1.0 } else { (part / all).clamp(MIN_SHARE, 1.0) };
        Self { own: share(own), gateways: share(gateways) }
    }
}

impl Default for Shares {
    /// All of them are this gateway's.
    fn default() -> Self {
        Self { own: 1.0, gateways: 1.0 }
    }
}

/// What others have at one worker.
#[derive(Clone, Debug, Default)]
pub struct Others {
    /// Whether anything was said or counted yet.
    is_heard: bool,
    /// When it was first looked at, and last.
    began: Option<Duration>,
    updated: Duration,
    /// What the other gateways said, all of them together, and when.
    peers: OwnLoad,
    peers_seen: Duration,
    /// The most of what they said since the gauges were last read, as [`OwnLoad::most`] is of this gateway's.
    peers_most: OwnLoad,
    /// What the engine's gauges count beyond all that is known, and when.
    rest_requests: f64,
    rest_tokens: f64,
    rest_seen: Duration,
    /// Running means of the requests there.
    means: Counted,
    /// Running mean of the looks at which prompts waited there, from 0.
    busy: f64,
}

/// What others have at a worker by now.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct OthersNow {
    /// Requests that all others have there; a number counts for less the older it is, and for nothing after
    /// [`MAX_AGE`].
    pub requests: f64,
    /// Their uncached prompt tokens that wait.
    pub tokens: f64,
    /// This gateway's requests there and all, as running means; 0 if neither gateways nor the engine said
    /// anything for [`MAX_AGE`].
    pub counted: Counted,
    /// Share of time in which prompts waited there, whichever sender's.
    pub busy_share: f64,
    /// Requests per millisecond that other gateways say they send there.
    pub arrivals_per_ms: f64,
}

impl OwnLoad {
    /// The most of two moments. What an engine says is from between asking it and its answer: who has ended
    /// or begun since would look like others'.
    #[must_use]
    pub fn most(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            waiting: self.waiting.max(other.waiting),
            waiting_tokens: self.waiting_tokens.max(other.waiting_tokens),
            mean_tokens: other.mean_tokens,
            arrivals_per_ms: other.arrivals_per_ms,
        }
    }

    /// Together with another gateway's.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            waiting: self.waiting + other.waiting,
            waiting_tokens: self.waiting_tokens + other.waiting_tokens,
            mean_tokens: self.mean_tokens,
            arrivals_per_ms: self.arrivals_per_ms + other.arrivals_per_ms,
        }
    }
}

impl Others {
    /// The engine was asked.
    pub fn observe(&mut self, now: Duration, engine: EngineLoad, own: OwnLoad) {
        let all = engine.running + engine.waiting;
        let known = own.and(self.peers_most);
        let requests = all.saturating_sub(known.requests);
        let tokens = match engine.waiting_tokens {
            // Where no other sender is, what differs is what gateways take their own to weigh.
            _ if requests == 0 => 0.0,
            Some(tokens) => tokens.saturating_sub(known.waiting_tokens) as f64,
            None => {
                // A request that waits does so for a prompt that is being computed, mostly: at times only for
                // a step of decodes.
                let pending = engine.waiting + u64::from(engine.waiting > 0);
                pending.saturating_sub(known.waiting).min(requests) as f64 * own.mean_tokens
            }
        };
        (self.rest_requests, self.rest_tokens, self.rest_seen) = (requests as f64, tokens, now);
        self.peers_most = self.peers;
        let waits =
            own.waiting > 0 || engine.waiting > 0 || engine.waiting_tokens.is_some_and(|tokens| tokens > 0);
        let all = all.max(own.requests);
        let gateways = (own.requests + self.peers.requests).min(all);
        let there = Counted { own: own.requests as f64, gateways: gateways as f64, all: all as f64 };
        self.count(now, there, waits);
    }

    /// The other gateways have said what they have there, together.
    pub fn peers_say(&mut self, now: Duration, peers: OwnLoad) {
        (self.peers, self.peers_seen, self.is_heard) = (peers, now, true);
        self.peers_most = self.peers_most.most(peers);
    }

    /// Counts who is there, for the means: to be called at times that do not depend on who comes and goes.
    pub fn look(&mut self, now: Duration, own: OwnLoad) {
        let gateways = (own.requests + self.peers.requests) as f64;
        let waits =
            own.waiting + self.peers.waiting > 0 || self.rest_tokens * left(self.rest_seen, now) > 0.0;
        let there = Counted { own: own.requests as f64, gateways, all: gateways + self.beyond(now) };
        self.count(now, there, waits);
    }

    /// Takes the requests there, and whether prompts wait, into the running means.
    fn count(&mut self, now: Duration, there: Counted, waits: bool) {
        let since = self.began.map_or(FIRST_LOOK_S, |_| now.saturating_sub(self.updated).as_secs_f64());
        self.began.get_or_insert(now);
        let gain = remembered(since);
        let toward = |mean: &mut f64, seen: f64| *mean += gain * (seen - *mean);
        toward(&mut self.means.own, there.own);
        toward(&mut self.means.gateways, there.gateways);
        toward(&mut self.means.all, there.all);
        self.busy += gain * (f64::from(u8::from(waits)) - self.busy);
        (self.updated, self.is_heard) = (now, true);
    }

    /// What is left of it.
    pub fn now(&self, now: Duration) -> OthersNow {
        // Where nobody else has been heard of, nothing is left to be worked out of what was said.
        if !self.is_heard {
            return OthersNow::default();
        }
        let (peers, rest) = (left(self.peers_seen, now), left(self.rest_seen, now));
        OthersNow {
            requests: self.peers.requests as f64 * peers + self.rest_requests * rest,
            tokens: self.peers.waiting_tokens as f64 * peers + self.rest_tokens * rest,
            counted: if peers.max(rest) == 0.0 { Counted::default() } else { self.means },
            // Mostly no prompt waits, or no look was taken.
            busy_share: if self.busy > 0.0 { self.busy / self.filled() } else { 0.0 },
            arrivals_per_ms: self.peers.arrivals_per_ms * peers,
        }
    }

    /// Whether others were ever heard of.
    pub(crate) fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// Requests that no gateway has said it sent, as far as the engine's gauges tell.
    pub fn beyond(&self, now: Duration) -> f64 {
        self.rest_requests * left(self.rest_seen, now)
    }

    /// The part of the memory that has been filled: what is looked at since a minute has two thirds of its
    /// share in `busy`.
    fn filled(&self) -> f64 {
        let elapsed = self.began.map_or(0.0, |began| self.updated.saturating_sub(began).as_secs_f64());
        remembered(elapsed + IDLE_BEFORE_S)
    }
}

/// What still counts of something seen then, from 1 to 0.
fn left(seen: Duration, now: Duration) -> f64 {
    1.0 - (now.saturating_sub(seen).as_secs_f64() / MAX_AGE.as_secs_f64()).min(1.0)
}

/// Weight in a running mean of the last so many seconds.
fn remembered(seconds: f64) -> f64 {
    1.0 - (-seconds / MEMORY_S).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: OwnLoad =
        OwnLoad { requests: 3, waiting: 1, waiting_tokens: 700, mean_tokens: 1000.0, arrivals_per_ms: 0.001 };

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn share(others: OthersNow) -> f64 {
        Shares::of([others.counted].into_iter()).own
    }

    fn after(engine: EngineLoad, own: OwnLoad) -> OthersNow {
        let mut others = Others::default();
        others.observe(s(100.0), engine, own);
        others.now(s(100.0))
    }

    #[test]
    fn what_is_not_ours_is_others() {
        let counted = EngineLoad { running: 5, waiting: 4, waiting_tokens: Some(3_000) };
        let others = after(counted, OWN);
        assert_eq!((others.requests, others.tokens), (6.0, 2_300.0));
        // Four wait and one is computed; one of them is ours.
        let counts_no_tokens = EngineLoad { waiting_tokens: None, ..counted };
        assert_eq!(after(counts_no_tokens, OWN).tokens, 4_000.0);
    }

    #[test]
    fn an_engine_with_only_our_requests_has_no_others() {
        let engine = EngineLoad { running: 2, waiting: 1, waiting_tokens: None };
        let own = OwnLoad { waiting: 2, ..OWN };
        let seen = |others: OthersNow| (others.requests, others.tokens, share(others));
        assert_eq!(seen(after(engine, own)), (0.0, 0.0, 1.0));
        // One of ours that waits for the end of a step in which nobody's prompt is computed.
        let between = EngineLoad { running: 2, waiting: 1, waiting_tokens: None };
        assert_eq!(seen(after(between, OWN)), (0.0, 0.0, 1.0));
        let weighs_more = EngineLoad { waiting_tokens: Some(1_500), ..between };
        assert_eq!(seen(after(weighs_more, OWN)), (0.0, 0.0, 1.0));
        // Its gauges may be older than what we have sent.
        let late = EngineLoad { running: 1, waiting: 0, waiting_tokens: Some(0) };
        assert_eq!(seen(after(late, OWN)), (0.0, 0.0, 1.0));
    }

    #[test]
    fn what_other_gateways_say_is_not_counted_again_by_the_gauges() {
        let peers = OwnLoad { requests: 4, waiting: 2, waiting_tokens: 9_000, ..OwnLoad::default() };
        let mut others = Others::default();
        others.peers_say(s(100.0), peers);
        let told = others.now(s(100.0));
        assert_eq!((told.requests, told.tokens), (4.0, 9_000.0), "whatever the engine counts");
        // Four wait and one is computed; one of them is ours, two are theirs: two go past all gateways.
        let engine = EngineLoad { running: 5, waiting: 4, waiting_tokens: None };
        others.observe(s(100.0), engine, OWN);
        let all = others.now(s(100.0));
        assert_eq!((all.requests, all.tokens), (6.0, 11_000.0));
        assert_eq!(others.beyond(s(100.0)), 2.0);
        // Who has ended there since the engine was asked is not somebody else, but the next look may find
        // out.
        others.peers_say(s(100.5), OwnLoad::default());
        others.observe(s(101.0), engine, OWN);
        assert_eq!(others.beyond(s(101.0)), 2.0);
        others.observe(s(102.0), engine, OWN);
        assert_eq!(others.beyond(s(102.0)), 6.0);
    }

    #[test]
    fn our_share_is_known_by_what_other_gateways_say_alone() {
        let mut others = Others::default();
        let peers = OwnLoad { requests: 9, ..OwnLoad::default() };
        for second in 0..60_u32 {
            others.peers_say(s(f64::from(second)), peers);
            others.look(s(f64::from(second)), OWN);
        }
        let now = others.now(s(59.0));
        assert!((share(now) - 0.25).abs() < 0.001 && now.busy_share > 0.9, "{now:?}");
        assert_eq!(Shares::of([now.counted].into_iter()).gateways, 1.0);
        let silent = others.now(s(80.0));
        assert_eq!((silent.requests, share(silent)), (0.0, 1.0), "who says nothing any more");
    }

    #[test]
    fn a_worker_that_is_looked_at_since_a_moment_is_as_busy_as_it_is() {
        let mut others = Others::default();
        let engine = EngineLoad { running: 12, waiting: 1, waiting_tokens: None };
        others.observe(s(1_000.0), engine, OWN);
        assert!(others.now(s(1_000.0)).busy_share < 0.15);
        for second in 1..=60_u32 {
            others.observe(s(f64::from(1_000 + second)), engine, OWN);
            let busy = others.now(s(f64::from(1_000 + second))).busy_share;
            // As if nobody had waited for ten seconds before.
            let expected = (f64::from(second) + FIRST_LOOK_S) / (f64::from(second) + IDLE_BEFORE_S);
            assert!((busy - expected).abs() < 0.1, "{second}: {busy}");
        }
    }

    #[test]
    fn our_share_is_that_of_all_workers_together() {
        let of = |own, gateways, all| Counted { own, gateways, all };
        let shares = |counted: &[Counted]| {
            let Shares { own, gateways } = Shares::of(counted.iter().copied());
            (own, gateways)
        };
        // One of four gateways, which has had none at the first worker for a minute, and by chance most at
        // the second. Two of the others say what they have.
        assert_eq!(shares(&[of(0.0, 2.0, 3.0), of(2.0, 2.5, 3.0), of(0.0, 1.5, 2.0)]), (0.25, 0.75));
        assert_eq!(shares(&[of(0.0, 900.0, 900.0)]), (MIN_SHARE, 1.0));
        assert_eq!(shares(&[of(3.0, 3.0, 3.0), Counted::default()]), (1.0, 1.0));
        assert_eq!(shares(&[]), (1.0, 1.0));
    }

    #[test]
    fn it_fades_and_our_share_is_that_of_the_last_minute() {
        let mut others = Others::default();
        for second in 0..600_u32 {
            let engine = EngineLoad { running: 12, waiting: 0, waiting_tokens: None };
            let own = OwnLoad { waiting: u64::from(second % 4 == 0), ..OWN };
            others.observe(s(f64::from(second)), engine, own);
        }
        let fresh = others.now(s(599.0));
        assert!((share(fresh) - 0.25).abs() < 0.001, "{fresh:?}");
        assert_eq!(Shares::of([fresh.counted].into_iter()).gateways, share(fresh), "the others say nothing");
        assert!((fresh.busy_share - 0.25).abs() < 0.01, "{fresh:?}");
        assert_eq!(fresh.requests, 9.0);
        assert!((others.now(s(599.0 + 7.5)).requests - 4.5).abs() < 1e-9);
        let gone = others.now(s(700.0));
        assert_eq!((gone.requests, gone.tokens, share(gone)), (0.0, 0.0, 1.0));
    }
}
