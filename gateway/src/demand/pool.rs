//! One model's demand: what its requests ask for at this moment, what was learned of them, and the sum of
//! workers that follows ([`keyway_core::autoscale`]).

use std::{
    collections::HashSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use keyway_core::{
    autoscale::{FirstTokens, Recent, Scaler, Seen, Sum, TokenRate, flowing, is_behind},
    health::State,
};
use parking_lot::Mutex;

use super::{full_rate::FullRate, roles::Roles};
use crate::{config::ModelScale, fleet::Worker};

/// Weight of one request in what is learned of answers: about the last fifty count.
const SHARE_GAIN: f64 = 0.02;
/// Requests that count in the share of uncached tokens: of fewer it is off by chance as much as arrivals are.
const SHARE_OF_REQUESTS: f64 = 200.0;
/// Requests that the first guess, that nothing is cached, counts for.
const SHARE_GUESS_COUNTS: f64 = 20.0;
/// Weight of the newest window in which workers were full.
const FULL_RATE_GAIN: f64 = 0.3;
/// Time in which what full workers computed gives way, to 37 %, to what others do.
const FULL_RATE_MEMORY_S: f64 = 3_600.0;
/// The least part of requests that a mean is taken of.
const PART_MIN: f64 = 1e-3;

/// What one model's requests ask of its workers now, and what was learned of them.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) model: String,
    /// Of workers for all of a request.
    pub(crate) state: Mutex<PoolState>,
    /// Of workers for a part of one, once the model has any.
    pub(super) roles: OnceLock<Roles>,
}

#[derive(Debug)]
pub(crate) struct PoolState {
    /// Prompt tokens that came, cached or not; where workers have roles, to all of the model's together.
    pub(super) arrivals: TokenRate,
    /// Tokens of one such prompt.
    pub(super) prompt_mean: f64,
    /// Whether the model's workers have roles, so that what comes goes to these in part.
    pub(super) by_role: bool,
    /// Which part of the model's requests has come to these, of late.
    pub(super) part: f64,
    /// Whether any has come since the last sum, and when that was seen last.
    pub(super) came: bool,
    used: Option<Duration>,
    /// Times to the first token of streamed requests, over the time that the SLO is judged by.
    pub(super) ttft: FirstTokens,
    /// Mean time between tokens of those that ended.
    pub(crate) itl: Recent,
    pub(crate) scaler: Scaler,
    /// Share of prompt tokens that no cache held, of late.
    pub(super) uncached_share: f64,
    /// How many requests it is of.
    pub(super) shares: f64,
    /// Prompt tokens of requests that have no worker yet.
    pub(crate) unsent_tokens: f64,
    /// Uncached tokens of requests at a worker without a first token.
    pub(crate) sent_tokens: f64,
    /// Uncached tokens of requests past their first token: who still waits for it waits in a queue and holds
    /// no cache, and to count a queue as cache would ask for workers to keep it in.
    pub(crate) held_tokens: f64,
    pub(crate) waiting: u64,
    pub(crate) running: u64,
    /// Seconds from a request's first token to its end, of late.
    pub(crate) run_s: Option<f64>,
    /// Tokens of an answer, and their squares, of late.
    pub(super) answers: Option<(f64, f64)>,
    pub(super) held: Held,
    pub(crate) first_waiting: u64,
    /// Tokens per second of a worker, as last known, and when that was looked at.
    pub(super) rate: f64,
    pub(super) rated: Option<Duration>,
    /// Whether it is more than the operator's guess, and whether full workers have shown it.
    pub(super) was_fitted: bool,
    pub(super) was_full: bool,
    pub(super) full_rate: FullRate,
    /// When more waited last than was worked off beside what came.
    pub(super) behind: Option<Duration>,
    pub(crate) last: Option<(Seen, Sum)>,
}

/// What runs, as a mean over about a window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Held {
    /// Until when it was seen.
    pub(super) at: Duration,
    /// When something ran last.
    pub(super) busy: Duration,
    /// Requests past their first token: as many as would run if no work waited.
    pub(super) running: f64,
    /// Tokens of KV cache that they hold.
    pub(super) tokens: f64,
}

impl Pool {
    /// Of a model that has had no requests.
    pub(crate) fn new(model: &str, scale: &ModelScale) -> Self {
        Self { model: model.to_owned(), state: Mutex::new(PoolState::new(scale)), roles: OnceLock::new() }
    }
}

impl PoolState {
    /// Of a model that has had no requests.
    pub(crate) fn new(scale: &ModelScale) -> Self {
        let objective = Duration::try_from_secs_f64(scale.rules.ttft_slo_s).unwrap_or(Duration::MAX);
        Self {
            arrivals: TokenRate::new(scale.rules.window),
            prompt_mean: 0.0,
            by_role: false,
            part: 1.0,
            came: false,
            used: None,
            ttft: FirstTokens::new(scale.rules.judged_over(), objective),
            itl: Recent::new(scale.rules.judged_over()),
            scaler: Scaler::new(scale.rules.clone()),
            uncached_share: 1.0,
            shares: SHARE_GUESS_COUNTS,
            unsent_tokens: 0.0,
            sent_tokens: 0.0,
            held_tokens: 0.0,
            waiting: 0,
            running: 0,
            run_s: None,
            answers: None,
            held: Held::default(),
            first_waiting: 0,
            rate: scale.prior_tokens_per_s,
            rated: None,
            was_fitted: false,
            was_full: false,
            full_rate: FullRate::new(scale.rules.window),
            behind: None,
            last: None,
        }
    }

    /// How many workers the model needs now, and what that follows from.
    pub(crate) fn sum(&mut self, now: Duration, workers: &[&Arc<Worker>]) -> (Seen, Sum) {
        let serves = |worker: &&Arc<Worker>| worker.routable() && !worker.standing.misconfigured();
        let ready: Vec<&Arc<Worker>> = workers.iter().copied().filter(serves).collect();
        // What is started or ended is all that is behind an address, however many engines it has.
        let addresses = addresses(&ready);
        let engines_each = ready.len() as f64 / addresses.len().max(1) as f64;
        let rates = ready.iter().filter_map(|worker| worker.rate.lock().tokens_per_second());
        let rules = self.scaler.rules();
        let behind = self.last.is_some_and(|(seen, _)| is_behind(rules, &seen));
        let behind_at = if behind { Some(now) } else { self.behind };
        let was_behind = behind_at.is_some_and(|at| now.saturating_sub(at) < rules.judged_over());
        let alone = ready.iter().all(|worker| worker.load.others(now) == 0.0);
        let full = self.full_rate.look(now, behind && alone, addresses.len());
        self.behind = behind_at;
        self.take_rate(now, mean(rates).map(|rate| rate * engines_each), (behind, full));
        let caches = ready.iter().filter_map(|worker| worker.residency.capacity.lock().tokens());
        let joining: Vec<_> =
            workers.iter().copied().filter(|worker| worker.state() == State::Joining).collect();
        let starting = self::addresses(&joining).difference(&addresses).count();
        let (share, part) = (self.share(now), self.part);
        self.prompt_mean = self.arrivals.mean(now);
        let flow = |per_s: f64| self.run_s.map_or(f64::INFINITY, |run_s| per_s * run_s) * part.max(PART_MIN);
        let mut seen = Seen {
            uncached_tokens_per_s: self.arrivals.per_second(now) * share,
            mean_uncached_tokens: self.prompt_mean * share / part.max(PART_MIN),
            backlog_tokens: self.unsent_tokens * share + self.sent_tokens,
            waiting: self.waiting,
            running: self.running,
            running_mean: self.running as f64,
            kv_tokens: 0.0,
            flow: flow(self.arrivals.requests_per_second(now)),
            was_behind,
            kv_tokens_per_worker: mean(caches.map(|tokens| tokens as f64 * engines_each)),
            prefill_tokens_per_s: self.rate,
            ttft_p90_s: self.ttft.quantile(now, 0.9),
            itl_p90_s: self.itl.quantile(now, 0.9),
            ready: addresses.len() as u32,
            starting: starting as u32,
        };
        (seen.running_mean, seen.kv_tokens) = self.hold(now, flowing(self.scaler.rules(), &seen));
        let sum = self.scaler.step(now, &seen);
        self.last = Some((seen, sum));
        (seen, sum)
    }

    /// A full worker computes prompts more slowly, beside more answers, and how many full ones are needed is
    /// what the sum says. So what full ones computed is kept, and gives way over an hour to what is fitted
    /// from single answers while no backlog is left: the load may have become another. Before workers were
    /// ever full, a higher fit is taken at once, and a lower one over a quarter of the scale-in time: the
    /// slowest moment would ask for too many.
    fn take_rate(&mut self, now: Duration, fitted: Option<f64>, (behind, full): (bool, Option<f64>)) {
        let then = self.rated.replace(now);
        if let Some(full) = full {
            let gain = if self.was_full { FULL_RATE_GAIN } else { 1.0 };
            self.was_full = true;
            self.rate += gain * (full - self.rate);
            return;
        }
        let (Some(fitted), Some(then)) = (fitted, then.filter(|_| self.was_fitted)) else {
            self.rate = fitted.unwrap_or(self.rate);
            self.was_fitted |= fitted.is_some();
            return;
        };
        let rules = self.scaler.rules();
        let memory_s = match (self.was_full, behind) {
            (true, true) => return,
            (true, false) => FULL_RATE_MEMORY_S,
            (false, true) => 2.0 * rules.window.as_secs_f64(),
            (false, false) if fitted < self.rate => rules.scale_in_after.as_secs_f64() / 4.0,
            (false, false) => 0.0,
        };
        let elapsed = now.saturating_sub(then).as_secs_f64();
        self.rate += (fitted - self.rate) * (1.0 - (-elapsed / memory_s.max(1e-3)).exp());
    }

    /// What runs and what it holds, as means over about a window; of both only the share that is not there
    /// because work waits.
    fn hold(&mut self, now: Duration, share: f64) -> (f64, f64) {
        let Held { at: then, busy, running, tokens } = self.held;
        let window_s = self.scaler.rules().window.as_secs_f64().max(1e-3);
        let gain = 1.0 - (-now.saturating_sub(then).as_secs_f64() / window_s).exp();
        let runs = share * self.running as f64;
        let running = running + gain * (runs - running);
        // Seen at any moment, an answer is half done; and long ones are seen longer (W. Feller's inspection
        // paradox).
        let grown = self.answers.map_or(0.0, |(mean, square)| square / (2.0 * mean.max(1.0)));
        let now_held = share * self.held_tokens + runs * grown;
        let tokens = tokens + gain * (now_held - tokens);
        let busy = if self.running > 0 { now } else { busy };
        // A mean that only fades would keep the last worker of a fleet that may go to nothing.
        let over = now.saturating_sub(busy) > self.scaler.rules().window;
        let (running, tokens) = if over { (0.0, 0.0) } else { (running, tokens) };
        self.held = Held { at: now, busy, running, tokens };
        (running, tokens)
    }

    pub(super) fn learn_answer(&mut self, tokens: u64) {
        let (tokens, square) = (tokens as f64, (tokens * tokens) as f64);
        let known = self.answers.get_or_insert((tokens, square));
        known.0 += SHARE_GAIN * (tokens - known.0);
        known.1 += SHARE_GAIN * (square - known.1);
    }

    pub(super) fn learn_run(&mut self, seconds: f64) {
        let known = self.run_s.get_or_insert(seconds);
        *known += SHARE_GAIN * (seconds - *known);
    }

    pub(super) fn learn_share(&mut self, prompt_tokens: u64, uncached_tokens: u64) {
        if prompt_tokens > 0 {
            let share = (uncached_tokens as f64 / prompt_tokens as f64).min(1.0);
            // Long prompts are most of the work, so they are most of what is learned.
            let weight = prompt_tokens as f64 / self.arrivals_mean().max(1.0);
            self.shares = (self.shares + 1.0).min(SHARE_OF_REQUESTS);
            let gain = (weight / self.shares).min(0.5);
            self.uncached_share += gain * (share - self.uncached_share);
        }
    }

    /// The share of what comes that is for these workers to compute. One that only fades would keep the last
    /// worker of a role for which nothing comes any more.
    fn share(&mut self, now: Duration) -> f64 {
        if std::mem::take(&mut self.came) {
            self.used = Some(now);
        }
        let over = self.scaler.rules().judged_over();
        let is_used = self.used.is_some_and(|at| now.saturating_sub(at) <= over);
        if is_used || !self.by_role { self.uncached_share } else { 0.0 }
    }

    /// Of a request that has come through: how much of its prompt these workers computed, and whether they
    /// had a part in it.
    pub(super) fn learn_part(&mut self, prompt_tokens: u64, computed_tokens: u64, had_part: bool) {
        self.learn_share(prompt_tokens, computed_tokens);
        self.part += (f64::from(u8::from(had_part)) - self.part) / self.shares;
    }

    fn arrivals_mean(&self) -> f64 {
        if self.by_role {
            return self.prompt_mean;
        }
        self.last.map_or(0.0, |(seen, _)| seen.mean_uncached_tokens / self.uncached_share.max(1e-3))
    }
}

/// Where workers are: several data-parallel engines are at one address.
fn addresses(workers: &[&Arc<Worker>]) -> HashSet<String> {
    workers.iter().map(|worker| worker.config().address()).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(test)]
mod tests;
