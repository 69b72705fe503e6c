//! One request's weight on one worker, from the choice to the last byte of its answer.

use std::{sync::Arc, time::Duration};

use keyway_core::{
    breaker::Verdict,
    index::Placement,
    pace::Waiting,
    working_sets::{EndedTurn, NextTurn},
};

use super::{Accusation, Router};
use crate::{
    demand::Demand,
    fleet::{Worker, ejection::BreakerPermit},
    metrics::WorkerSeries,
    routing::refusal::Charge,
};

/// One request's weight on one worker. Counts until it is dropped; the placement is withdrawn unless the
/// worker began to answer.
#[derive(Debug)]
pub struct Ticket {
    pub(super) router: Arc<Router>,
    pub(super) worker: Arc<Worker>,
    placement: Option<Placement>,
    pub(super) sent: Duration,
    /// Cached tokens that the worker itself had announced, and how many of its blocks had gone by then.
    announced: u64,
    removed_before: u64,
    uncached_tokens: u64,
    /// Uncached tokens that were at the worker when it was sent, its own among them.
    tokens_before_first: u64,
    waiting: Option<Waiting>,
    pub(super) trip: BreakerPermit,
    /// What kind of request it is, as refusals are told apart.
    pub(super) kind: u64,
    /// What the request asks of its model's fleet, as long as it is here.
    demand: Option<Demand>,
    /// As a turn of its session; with the tokens that the conversation has with the answer so far.
    turn: Option<EndedTurn>,
}

impl Ticket {
    pub(super) fn start(
        router: Arc<Router>,
        worker: Arc<Worker>,
        placement: Placement,
        (sent, uncached_tokens): (Duration, u64),
        (streams, kind): (bool, u64),
    ) -> Box<Self> {
        worker.standing.begin(kind, sent);
        let speed = worker.rate.lock().tokens_per_second();
        let tokens_before_first = worker.load.tokens_left(sent, speed) + uncached_tokens;
        let waiting = Some(worker.load.start(sent, uncached_tokens, streams));
        let series = worker.series(&router.metrics);
        series.in_flight.inc();
        series.waiting_prefill_tokens.add(uncached_tokens as i64);
        Box::new(Self {
            sent,
            announced: 0,
            removed_before: worker.residency.removed(),
            router,
            trip: worker.gate().begin(),
            worker,
            placement: Some(placement),
            uncached_tokens,
            tokens_before_first,
            waiting,
            kind,
            demand: None,
            turn: None,
        })
    }

    /// Notes how many of the prompt's tokens the worker had announced, without what it was computing.
    pub(super) fn announced(mut self: Box<Self>, tokens: u64) -> Box<Self> {
        self.announced = tokens;
        self
    }

    /// Counts as a turn of its session until it is dropped.
    pub(super) fn in_session(mut self: Box<Self>, turn: Option<NextTurn>) -> Box<Self> {
        let ended = |turn: NextTurn| EndedTurn {
            session: turn.session,
            conversation_tokens: turn.prompt_tokens,
            first_token: None,
        };
        self.turn = turn.map(ended);
        self
    }

    /// Tokens of the prompt that the worker had announced when it was chosen.
    pub(super) fn announced_tokens(&self) -> u64 {
        self.announced
    }

    /// Whether events said since then that blocks have gone there.
    pub(super) fn blocks_removed(&self) -> bool {
        self.worker.residency.removed() != self.removed_before
    }

    /// Carries the request's part in its model's demand from now on.
    pub fn carry(&mut self, mut demand: Demand) {
        demand.sent(self.uncached_tokens);
        self.demand = Some(demand);
    }

    /// Gives it back, for the next attempt.
    pub fn give_back(&mut self) -> Option<Demand> {
        self.demand.take()
    }

    /// The first byte of the answer is here: the prompt is computed, its KV is in the worker's cache.
    pub fn first_token(&mut self, now: Duration) {
        // What an exact worker is expected to hold is expected until the answer's end. What another one was
        // sent is accepted by dropping the placement.
        self.placement = self.placement.take().filter(Placement::is_expected);
        if let Some(demand) = &mut self.demand {
            demand.first_token(now);
        }
        if self.stop_waiting(now, true) {
            if self.worker.standing.served(self.kind, self.sent, now) {
                tracing::info!(worker = %self.worker.name, "a misconfigured worker has served a request, and is back");
            }
            self.router.pump();
        }
    }

    /// However it is answered, it says nothing of the worker.
    pub fn excuse(&mut self) {
        drop(self.trip.pass_on());
    }

    /// The worker did not serve the request. How soon it said so is nothing of its speed, and it holds none
    /// of the prompt; the request still counts there until the ticket is dropped. `path` is what it was asked
    /// for.
    pub fn accuse(&mut self, charge: Charge, path: &str) -> Accusation {
        self.stop_waiting(self.router.now(), false);
        if let Some(placement) = self.placement.take() {
            self.router.index.lock().withdraw(placement);
        }
        Accusation::new(self, charge, path)
    }

    /// The first event of a stream is here, which tells how fast the worker is.
    pub fn stream_began(&mut self, now: Duration) {
        let seconds = now.saturating_sub(self.sent).as_secs_f64();
        if let Some(demand) = &mut self.demand {
            demand.stream_began(now);
        }
        if self.waiting.is_some() {
            self.worker.rate.lock().observe(self.tokens_before_first, seconds);
        }
        self.first_token(now);
    }

    /// The answer has so many tokens.
    pub fn answered(&mut self, tokens: u64) {
        if let Some(turn) = &mut self.turn {
            turn.conversation_tokens += tokens as f64;
        }
        if let Some(demand) = &mut self.demand {
            demand.answered(tokens);
        }
    }

    /// The worker's answer goes on: it is alive, whatever its probes say.
    pub fn still_answering(&self, now: Duration) {
        self.router.worker_answered(&self.worker, now);
    }

    /// Says how the answer ended, where that says something of the worker.
    pub fn judge(&mut self, verdict: Verdict) {
        self.judge_at(verdict, self.router.now());
    }

    /// [`Ticket::judge`], by who knows what time it is.
    pub fn judge_at(&mut self, verdict: Verdict, now: Duration) {
        self.trip.judge(verdict, now);
    }

    /// The router that issued it.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The worker it counts at.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    fn series(&self) -> &WorkerSeries {
        self.worker.series(&self.router.metrics)
    }

    /// When the request was sent there.
    pub fn sent(&self) -> Duration {
        self.sent
    }

    /// Whether it waited until now.
    fn stop_waiting(&mut self, now: Duration, answered: bool) -> bool {
        let Some(waiting) = self.waiting.take() else { return false };
        if answered {
            self.worker.load.first_token(now, &waiting);
            if let Some(turn) = &mut self.turn {
                turn.first_token = Some(now);
            }
        } else {
            self.worker.load.cancelled(now, &waiting);
        }
        self.series().waiting_prefill_tokens.sub(self.uncached_tokens as i64);
        true
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // What counts for it first, and the index and the room after that: a bug in those must not leak a
        // count.
        let now = self.router.now();
        let answered = !self.stop_waiting(now, false);
        if let Some(demand) = &self.demand {
            demand.ended(now);
        }
        if let Some(turn) = &self.turn {
            self.router.holding.turn_ended(now, turn);
        }
        self.worker.load.end();
        self.series().in_flight.dec();
        if let Some(placement) = self.placement.take() {
            if answered {
                self.router.index.linger(now, placement);
            } else {
                self.router.index.lock().withdraw(placement);
            }
        }
        self.router.pump();
    }
}

#[cfg(test)]
mod tests;
