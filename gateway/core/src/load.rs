//! What one worker has been sent and has not finished, and how busy it has been. Who holds these for how long
//! is decided by the owner of the response body, which calls `start`, then `first_token` or `cancelled`, then
//! `end`.

use std::f64::consts::LN_2;
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Duration;

use crate::fading::FadingSum;
use crate::legs::{LeftToCompute, PrefillDemand};
use crate::others::{Counted, EngineLoad, Others, OwnLoad, Shares};
use crate::pace::{Pace, PaceBasis, PaceSnapshot, Waiting};
use crate::ttft::Before;

/// Shared state of one worker.
#[derive(Debug, Default)]
pub struct Load {
    requests: AtomicU64,
    /// Of these, those whose prompt another worker computes at this moment, or whose KV is on its way.
    elsewhere: AtomicU64,
    known: Mutex<Known>,
}

/// What takes a lock.
#[derive(Debug, Default)]
struct Known {
    pace: Pace,
    others: Others,
    /// Of prompts that are computed elsewhere than they are answered; `None` while there were none.
    legs: Option<Box<Legs>>,
}

/// What a worker has to do with other workers' prompts.
#[derive(Debug)]
struct Legs {
    /// Requests whose prompt another worker computed, which come lately.
    handed: FadingSum,
    /// What is asked of it for others.
    demand: PrefillDemand,
}

/// After so long a request that came with its KV counts half.
const HANDED_HALF_LIFE: Duration = Duration::from_secs(60);

impl Default for Legs {
    fn default() -> Self {
        Self { handed: FadingSum::new(HANDED_HALF_LIFE), demand: PrefillDemand::default() }
    }
}

/// The state at one moment.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct LoadSnapshot {
    /// Requests sent whose response body still lives, and others'.
    pub requests: u64,
    /// Of these, those with an answer under way: others' are taken to have one.
    pub answering: u64,
    /// Requests per millisecond that came lately and whose prompt another worker computes.
    pub handed_per_ms: f64,
    /// The share of its time that this gateway's prompts ask for which it may compute for others.
    pub asked_share: f64,
    /// Uncached prompt tokens of those among them that have not produced a first token.
    pub waiting_prefill_tokens: u64,
    /// What waits, in time, and how busy it has been.
    pub pace: PaceSnapshot,
    /// Requests there lately, as the engine counts them.
    pub counted: Counted,
    /// Shares of all requests, by which arrivals have been scaled.
    pub shares: Shares,
}

impl Default for LoadSnapshot {
    fn default() -> Self {
        let (pace, counted) = (PaceSnapshot::default(), Counted::default());
        Self {
            requests: 0,
            answering: 0,
            handed_per_ms: 0.0,
            asked_share: 0.0,
            waiting_prefill_tokens: 0,
            pace,
            counted,
            shares: Shares::default(),
        }
    }
}

impl Legs {
    /// Requests per millisecond that are handed over here, and the share of its time that is asked for.
    fn at(&self, now: Duration, tokens_per_ms: f64) -> (f64, f64) {
        // What a steady rate adds up to is that rate times the half-life over ln 2.
        let handed_per_ms = self.handed.at(now) * LN_2 / HANDED_HALF_LIFE.as_millis() as f64;
        (handed_per_ms, self.demand.share(now, tokens_per_ms))
    }
}

impl LoadSnapshot {
    /// With the requests that others send: this gateway's, and those of the gateways that say what they have,
    /// are such shares of all, here as elsewhere.
    #[must_use]
    pub fn among(mut self, shares: Shares) -> Self {
        self.pace.arrivals_per_ms *= self.shares.gateways / shares.gateways;
        Self { shares, ..self }
    }
}

impl Load {
    /// A request with this much prefill of its own was sent. `streams`: its first token will be seen when it
    /// is made.
    pub fn start(&self, now: Duration, uncached_tokens: u64, streams: bool) -> Waiting {
        self.begins();
        self.computes(now, uncached_tokens, streams)
    }

    /// A request was sent. What it has of prefill is said by [`Load::computes`].
    pub fn begins(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    /// A request will be sent whose prompt another worker computes first.
    pub fn start_elsewhere(&self, now: Duration) {
        self.begins();
        self.goes_elsewhere(now);
    }

    /// A request that is here already is one whose prompt another worker computes.
    pub fn goes_elsewhere(&self, now: Duration) {
        self.elsewhere.fetch_add(1, Relaxed);
        self.known().legs.get_or_insert_default().handed.add(1.0, now);
    }

    /// A request begins whose prompt this worker computes for another one, or would be the one to.
    /// `evenness`: how much answers' pace counted ([`crate::legs::evenness`]).
    pub fn asked(&self, now: Duration, left: LeftToCompute, evenness: f64) {
        self.known().legs.get_or_insert_default().demand.add(now, left, evenness);
    }

    /// The share of its time that is asked for so, of a worker that computes `tokens_per_ms`; above 1 it is
    /// more than there is.
    pub fn asked_share(&self, now: Duration, tokens_per_ms: f64) -> f64 {
        self.known().legs.as_ref().map_or(0.0, |legs| legs.demand.share(now, tokens_per_ms))
    }

    /// The KV of a request of [`Load::start_elsewhere`] is here, or will not come.
    pub fn comes_from_elsewhere(&self) {
        let less = |count: u64| Some(count.saturating_sub(1));
        let before = self.elsewhere.fetch_update(Relaxed, Relaxed, less);
        debug_assert!(before.is_ok_and(|count| count > 0), "came more often than it began");
    }

    /// Such a request has so much prefill of its own after all.
    pub fn computes(&self, now: Duration, uncached_tokens: u64, streams: bool) -> Waiting {
        self.known().pace.start(now, uncached_tokens, streams)
    }

    /// Its first token came: its prefill no longer waits.
    pub fn first_token(&self, now: Duration, waiting: &Waiting) {
        self.known().pace.first_token(now, waiting);
    }

    /// It ended without a first token.
    pub fn cancelled(&self, now: Duration, waiting: &Waiting) {
        self.known().pace.cancelled(now, waiting);
    }

    /// Requests sent whose response body still lives.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Uncached prompt tokens of those that have not produced a first token.
    pub fn waiting_prefill_tokens(&self) -> u64 {
        self.known().pace.waiting_tokens()
    }

    /// Its response body is gone.
    pub fn end(&self) {
        // Stops at zero: a call too many must not make a worker look infinitely loaded for ever.
        let before = self.requests.fetch_update(Relaxed, Relaxed, |value| Some(value.saturating_sub(1)));
        debug_assert!(before.is_ok_and(|value| value > 0), "ended more than was started");
    }

    /// The state now, of a worker that computes `tokens_per_ms` prompt tokens in a millisecond.
    pub fn snapshot(&self, now: Duration, tokens_per_ms: f64) -> LoadSnapshot {
        let known = self.known();
        let others = known.others.now(now);
        let requests = self.requests.load(Relaxed) + others.requests.round() as u64;
        let (handed_per_ms, asked_share) =
            known.legs.as_ref().map_or((0.0, 0.0), |legs| legs.at(now, tokens_per_ms));
        LoadSnapshot {
            requests,
            answering: requests.saturating_sub(self.without_answer(&known)),
            handed_per_ms,
            asked_share,
            waiting_prefill_tokens: known.pace.waiting_tokens() + others.tokens as u64,
            pace: known.pace.snapshot(now, tokens_per_ms).with_others(&others, tokens_per_ms),
            counted: others.counted,
            shares: Shares::default(),
        }
    }

    /// Requests there, and what their pace goes by; `None` where others were heard of, whose part fades.
    pub(crate) fn basis(&self) -> Option<(u64, PaceBasis)> {
        let known = self.known();
        (!known.others.is_heard()).then(|| (self.requests.load(Relaxed), known.pace.basis()))
    }

    /// What this gateway has there now, to be held against what the engine says.
    pub fn own(&self) -> OwnLoad {
        let known = self.known();
        OwnLoad {
            requests: self.requests.load(Relaxed),
            waiting: known.pace.waiting() as u64,
            waiting_tokens: known.pace.waiting_tokens(),
            mean_tokens: known.pace.mean_tokens(),
            arrivals_per_ms: 0.0,
        }
    }

    /// The engine has answered for its load: what is not this gateway's is others'. `asked`: what this
    /// gateway had there then.
    pub fn engine_says(&self, now: Duration, engine: EngineLoad, asked: OwnLoad) {
        let own = asked.most(self.own());
        self.known().others.observe(now, engine, own);
    }

    /// What this gateway tells others that it has there: tokens less what a worker that is believed to
    /// compute `tokens_per_s` has done of them.
    pub fn told(&self, now: Duration, tokens_per_s: Option<f64>) -> OwnLoad {
        let own = self.own();
        let known = self.known();
        let left = known.pace.tokens_left(now, tokens_per_s.unwrap_or(0.0) / 1e3);
        let arrivals_per_ms = known.pace.arrivals_per_ms(now);
        OwnLoad { waiting_tokens: left.round() as u64, arrivals_per_ms, ..own }
    }

    /// Requests per millisecond that this gateway has sent there lately.
    pub fn arrivals_per_ms(&self, now: Duration) -> f64 {
        self.known().pace.arrivals_per_ms(now)
    }

    /// The other gateways have said what they have there, together.
    pub fn peers_say(&self, now: Duration, peers: OwnLoad) {
        self.known().others.peers_say(now, peers);
    }

    /// Counts who is there, for the means of others' load: at even times, while other gateways tell theirs.
    pub fn look(&self, now: Duration) {
        let own = self.own();
        self.known().others.look(now, own);
    }

    /// Uncached prompt tokens that are still to be computed, others' among them, by a worker that is believed
    /// to compute `tokens_per_s`. Without what it has done of them, a speed fitted from those that join a
    /// prompt half done would be half as much again too high, and stay so: they are sent the earlier, the
    /// faster it is believed to be.
    pub fn tokens_left(&self, now: Duration, tokens_per_s: Option<f64>) -> u64 {
        let known = self.known();
        let own = known.pace.tokens_left(now, tokens_per_s.unwrap_or(0.0) / 1e3);
        (own + known.others.now(now).tokens).round() as u64
    }

    /// What one more request finds here: tokens are [`Load::tokens_left`] and its own.
    pub fn before(&self, now: Duration, tokens_per_s: Option<f64>, uncached_tokens: u64) -> Before {
        let known = self.known();
        let others = known.others.now(now);
        let left = known.pace.tokens_left(now, tokens_per_s.unwrap_or(0.0) / 1e3) + others.tokens;
        let requests = self.requests.load(Relaxed) + others.requests.round() as u64;
        let answering = requests.saturating_sub(self.without_answer(&known));
        Before { tokens: left.round() + uncached_tokens as f64, answering: answering as f64 }
    }

    /// This gateway's requests whose answers have not begun.
    fn without_answer(&self, known: &Known) -> u64 {
        known.pace.waiting() as u64 + self.elsewhere.load(Relaxed)
    }

    /// Requests that no gateway has said it sent, as far as the engine's gauges tell.
    pub fn beyond_gateways(&self, now: Duration) -> f64 {
        self.known().others.beyond(now)
    }

    /// Others' requests, whether other gateways or the engine told of them.
    pub fn others(&self, now: Duration) -> f64 {
        self.known().others.now(now).requests
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic elsewhere leaves numbers that are at worst a little old.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::rate::PrefillRate;

    const NOW: Duration = Duration::from_secs(7);

    #[test]
    fn waiting_ends_with_the_first_token_and_the_request_with_its_body() {
        let load = Load::default();
        let (first, second) = (load.start(NOW, 100, true), load.start(NOW, 50, true));
        let seen = || (load.snapshot(NOW, 1.0).requests, load.snapshot(NOW, 1.0).waiting_prefill_tokens);
        assert_eq!(seen(), (2, 150));
        load.first_token(NOW, &first);
        assert_eq!(seen(), (2, 50));
        load.end();
        load.cancelled(NOW, &second);
        load.end();
        assert_eq!(seen(), (0, 0));
    }

    #[test]
    fn one_more_finds_tokens_of_those_that_wait_and_answers_of_the_others() {
        let load = Load::default();
        let finds = || load.before(NOW, Some(1_000.0), 30);
        assert_eq!(finds(), Before { tokens: 30.0, answering: 0.0 });
        let (first, _second) = (load.start(NOW, 100, true), load.start(NOW, 50, true));
        load.start_elsewhere(NOW);
        assert_eq!(finds(), Before { tokens: 180.0, answering: 0.0 });
        load.first_token(NOW, &first);
        assert_eq!(finds(), Before { tokens: 80.0, answering: 1.0 });
        load.comes_from_elsewhere();
        assert_eq!(finds(), Before { tokens: 80.0, answering: 2.0 });
        load.engine_says(NOW, EngineLoad { running: 7, waiting: 1, waiting_tokens: Some(550) }, load.own());
        assert_eq!(finds(), Before { tokens: 580.0, answering: 7.0 });
    }

    #[test]
    fn what_others_send_counts_as_load() {
        let load = Load::default();
        let ours = load.start(NOW, 1_000, true);
        let alone = load.snapshot(NOW, 2.0);
        load.engine_says(NOW, EngineLoad { running: 1, waiting: 3, waiting_tokens: Some(5_000) }, load.own());
        let shared = load.snapshot(NOW, 2.0);
        let shared = shared.among(Shares::of([shared.counted].into_iter()));
        assert_eq!((alone.requests, alone.waiting_prefill_tokens, alone.pace.backlog_ms), (1, 1_000, 500.0));
        assert_eq!(
            (shared.requests, shared.waiting_prefill_tokens, shared.pace.backlog_ms),
            (4, 5_000, 2_500.0)
        );
        assert!((shared.pace.arrivals_per_ms / alone.pace.arrivals_per_ms - 4.0).abs() < 1e-9);
        let twice = shared.among(shared.shares).pace.arrivals_per_ms;
        assert_eq!(twice, shared.pace.arrivals_per_ms, "a share is not taken twice");
        assert_eq!((load.requests(), load.waiting_prefill_tokens()), (1, 1_000), "its own stays its own");
        load.first_token(NOW, &ours);
        load.end();
    }

    /// By its share alone a gateway that has had two of sixteen requests takes any worker that it sent one
    /// to for one that eight were sent to.
    #[test]
    fn arrivals_that_other_gateways_tell_are_counted_and_not_estimated() {
        let (load, of_another) = (Load::default(), Load::default());
        load.start(NOW, 1_000, true);
        let _theirs: Vec<_> = (0..3).map(|_| of_another.start(NOW, 100, true)).collect();
        let own = load.snapshot(NOW, 1.0).pace.arrivals_per_ms;
        let arrivals = |load: &Load| {
            let seen = load.snapshot(NOW, 1.0);
            seen.among(Shares::of([seen.counted].into_iter())).pace.arrivals_per_ms / own
        };
        load.peers_say(NOW, of_another.told(NOW, None));
        load.look(NOW);
        assert!((arrivals(&load) - 4.0).abs() < 1e-9, "{}", arrivals(&load));
        // Half of what the engine has no gateway has sent.
        let engine = EngineLoad { running: 8, waiting: 0, waiting_tokens: Some(0) };
        for second in 1..=60 {
            let now = NOW + Duration::from_secs(second);
            load.peers_say(now, of_another.told(NOW, None));
            load.engine_says(now, engine, load.own());
        }
        let now = NOW + Duration::from_secs(60);
        let (seen, known) =
            (load.snapshot(now, 1.0), load.arrivals_per_ms(now) + of_another.arrivals_per_ms(NOW));
        let scaled = seen.among(Shares::of([seen.counted].into_iter())).pace.arrivals_per_ms / known;
        assert!((scaled - 2.0).abs() < 0.1, "{scaled}");
    }

    /// What is fitted of a worker that computes 1,000 tokens a second, one prompt after the other, and is
    /// sent the next one when so much of the one before is done.
    fn fitted(share_done: f64, believes: bool) -> f64 {
        let (load, mut rate) = (Load::default(), PrefillRate::default());
        let (mut sent, mut first_before) = (Duration::ZERO, None::<(Duration, Waiting)>);
        for i in 0..300 {
            let tokens = 500 + 97 * i % 1_000;
            let left = load.tokens_left(sent, rate.tokens_per_second().filter(|_| believes));
            let waiting = load.start(sent, tokens, true);
            let began = first_before.map_or(sent, |(at, before)| {
                load.first_token(at, &before);
                load.end();
                at
            });
            let takes = Duration::from_millis(tokens);
            rate.observe(left + tokens, (began + takes).saturating_sub(sent).as_secs_f64());
            first_before = Some((began + takes, waiting));
            sent = began + takes.mul_f64(share_done);
        }
        rate.tokens_per_second().unwrap()
    }

    #[test]
    fn a_speed_is_fitted_whenever_the_next_prompt_comes() {
        for share_done in [0.0, 0.3, 0.6, 0.9] {
            let speed = fitted(share_done, true);
            assert!((900.0..1_100.0).contains(&speed), "{share_done}: {speed}");
        }
        assert!(fitted(0.6, false) > 1_300.0);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let load = Load::default();
        thread::scope(|scope| {
            for tokens in 1..=4 {
                let load = &load;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        let waiting = load.start(NOW, tokens, true);
                        load.first_token(NOW, &waiting);
                        load.end();
                    }
                });
            }
        });
        let rest = load.snapshot(NOW, 1.0);
        assert_eq!((rest.requests, rest.waiting_prefill_tokens, rest.pace.backlog_ms), (0, 0, 0.0));
    }
}
