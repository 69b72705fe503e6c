//! One request's weight on one worker, from the choice to the last byte of its answer.

use std::{sync::Arc, time::Duration};

use keyway_core::{
    breaker::Verdict,
    index::{Owner, Placement, WorkerId},
    pace::Waiting,
    told::Told,
    ttft::Before,
    working_sets::{EndedTurn, NextTurn},
};
use keyway_wire::block_hash::BlockHash;

use super::{Accusation, Pull, Router};
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
    /// What is placed once its KV is on its way here, if another worker computes it.
    coming: Option<Coming>,
    /// As other gateways were told of it, until they are told what became of it.
    told: Option<Told>,
    pub(super) sent: Duration,
    /// Cached tokens that the worker itself had announced, and how many of its blocks had gone by then.
    announced: u64,
    removed_before: u64,
    uncached_tokens: u64,
    /// Uncached tokens that were at the worker when it was sent, its own among them.
    before: Before,
    waiting: Option<Waiting>,
    pub(super) trip: BreakerPermit,
    /// What kind of request it is, as refusals are told apart.
    pub(super) kind: u64,
    /// What the request asks of its model's fleet, as long as it is here.
    demand: Option<Demand>,
    /// As a turn of its session; with the tokens that the conversation has with the answer so far.
    turn: Option<EndedTurn>,
    /// Whether the client asked for a stream.
    streams: bool,
    /// Whether another worker computes the prompt at this moment, or its KV is on its way.
    is_elsewhere: bool,
    /// Where the prompt was computed, if that is not here.
    handed: Option<Handover>,
    /// What the worker is to fetch from another one's cache.
    pull: Option<Pull>,
    /// Whether the worker has begun to answer.
    began: bool,
}

/// A prompt whose KV is to come from another worker. Until that has computed it, the worker that answers has
/// nothing of it: if its blocks counted as there, the next prompt behind the same prefix would be sent to it
/// alone, and be computed there from its first token on, before all that waits.
#[derive(Debug)]
pub(super) struct Coming {
    pub(super) owner: Owner,
    /// The worker, as the index names it for these blocks.
    pub(super) worker: WorkerId,
    pub(super) chain: Arc<Vec<BlockHash>>,
    pub(super) block_tokens: f64,
}

/// A prompt that another worker has computed.
#[derive(Debug, Clone, Copy)]
struct Handover {
    /// The worker, where the time of its KV's way is seen.
    from: Option<WorkerId>,
    /// Prompt tokens that were found cached there.
    cached_tokens: u64,
    at: Duration,
    /// Milliseconds for which the worker that answers had other prompts to compute then.
    queue_ms: f64,
}

/// What is known of a request when it is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    pub(super) at: Duration,
    /// Prompt tokens that the worker does not hold.
    pub(super) uncached_tokens: u64,
    /// Whether another worker is to compute the prompt.
    pub(super) splits: bool,
    /// Whether the client asked for a stream.
    pub(super) streams: bool,
    /// What kind of request it is, as refusals are told apart.
    pub(super) kind: u64,
}

impl Ticket {
    pub(super) fn start(
        router: Arc<Router>,
        worker: Arc<Worker>,
        placement: Placement,
        sending: Sending,
    ) -> Box<Self> {
        let Sending { at: sent, uncached_tokens, splits, streams, kind } = sending;
        worker.standing.begin(kind, sent);
        let series = worker.series(&router.metrics);
        series.in_flight.inc();
        if splits {
            worker.load.start_elsewhere(sent);
        } else {
            worker.load.begins();
        }
        let mut ticket = Box::new(Self {
            sent,
            announced: 0,
            removed_before: worker.residency.removed(),
            router,
            trip: worker.gate().begin(),
            worker,
            placement: Some(placement),
            coming: None,
            told: None,
            uncached_tokens,
            before: Before::default(),
            waiting: None,
            kind,
            demand: None,
            turn: None,
            streams,
            is_elsewhere: splits,
            handed: None,
            pull: None,
            began: false,
        });
        if !splits {
            ticket.computes_here(sent);
        }
        ticket
    }

    /// Places the prompt's blocks here once their KV comes, or is computed here after all.
    pub(super) fn placing_later(mut self: Box<Self>, coming: Option<Coming>) -> Box<Self> {
        self.coming = coming;
        self
    }

    fn place(&mut self) {
        let Some(Coming { owner, worker, chain, block_tokens }) = self.coming.take() else { return };
        let placement = self.router.index.settled().place_of(owner, worker, &chain);
        self.announced = (placement.found_blocks(&chain) as f64 * block_tokens) as u64;
        if let Some(telling) = &self.router.telling {
            self.told = telling.placed(self.router.now(), owner, &chain, &placement);
        }
        self.placement = Some(placement);
    }

    /// The worker computes the prompt itself, which waits there from now on.
    pub fn computes_here(&mut self, now: Duration) {
        self.come_from_elsewhere();
        self.place();
        let (worker, tokens) = (&self.worker, self.uncached_tokens);
        let speed = worker.rate.lock().tokens_per_second();
        self.before = worker.load.before(now, speed, tokens).without_itself();
        self.waiting = Some(worker.load.computes(now, tokens, self.streams));
        self.sent = now;
        self.series().waiting_prefill_tokens.add(tokens as i64);
    }

    /// No other worker computes the prompt, whatever was planned.
    pub fn is_asked_alone(&mut self) {
        if self.is_elsewhere {
            self.computes_here(self.router.now());
        }
    }

    /// Notes how many of the prompt's tokens the worker had announced, without what it was computing.
    pub(super) fn announced(mut self: Box<Self>, tokens: u64) -> Box<Self> {
        self.announced = tokens;
        self
    }

    /// Notes what of the prompt the worker is to fetch from another one's cache.
    pub(super) fn pulling(mut self: Box<Self>, pull: Option<&Pull>) -> Box<Self> {
        self.pull = pull.cloned();
        self
    }

    /// The worker fetches nothing after all: it computes that part too.
    pub fn pulls_nothing(&mut self) {
        self.pull = None;
    }

    /// What it fetches from another one's cache.
    pub fn pull(&self) -> Option<&Pull> {
        self.pull.as_ref()
    }

    /// Tells other gateways, if there are any, that this chain of `owner`'s was placed.
    pub(super) fn telling(mut self: Box<Self>, owner: Owner, chain: &[BlockHash]) -> Box<Self> {
        if let (Some(telling), Some(placement), false) =
            (&self.router.telling, &self.placement, chain.is_empty())
        {
            self.told = telling.placed(self.sent, owner, chain, placement);
        }
        self
    }

    /// They are told what became of it.
    fn tell(&mut self, now: Duration, began: bool) {
        if let (Some(told), Some(telling)) = (self.told.take(), &self.router.telling) {
            telling.closed(now, told, began);
        }
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

    /// Another worker has computed the prompt, of which it found so many tokens cached; this one is asked
    /// now.
    pub fn hand_over(&mut self, from: WorkerId, cached_tokens: u64, now: Duration) {
        self.place();
        let speed = self.worker.rate.lock().tokens_per_second();
        let queued = self.worker.load.tokens_left(now, speed) as f64;
        let queue_ms = speed.map_or(0.0, |tokens_per_s| queued / tokens_per_s * 1e3);
        if let Some(demand) = &mut self.demand {
            demand.hand_over(cached_tokens, now);
        }
        self.handed = Some(Handover { from: Some(from), cached_tokens, at: now, queue_ms });
        self.sent = now;
    }

    /// Another worker computes the prompt while this one waits for it, and found so many tokens cached. How
    /// long the KV is on its way, that does not tell.
    pub fn hand_over_beside(&mut self, cached_tokens: u64) {
        let now = self.router.now();
        if let Some(demand) = &mut self.demand {
            demand.hand_over(cached_tokens, now);
        }
        self.handed = Some(Handover { from: None, cached_tokens, at: self.sent, queue_ms: 0.0 });
    }

    /// Another worker computes the prompt after all: it waits here no longer.
    pub fn computes_elsewhere(&mut self) {
        if !std::mem::replace(&mut self.is_elsewhere, true) {
            let now = self.router.now();
            self.stop_waiting(now, false);
            self.worker.load.goes_elsewhere(now);
        }
        if let Some(demand) = &mut self.demand {
            demand.computes_elsewhere();
        }
    }

    fn come_from_elsewhere(&mut self) {
        if std::mem::take(&mut self.is_elsewhere) {
            self.worker.load.comes_from_elsewhere();
        }
    }

    /// Prompt tokens that were found cached where the prompt was computed, if that is another worker.
    pub fn handed(&self) -> Option<u64> {
        self.handed.map(|handover| handover.cached_tokens)
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
        demand.sent(self.uncached_tokens, self.worker.role());
        if self.is_elsewhere {
            demand.computes_elsewhere();
        }
        self.demand = Some(demand);
    }

    /// Gives it back, for the next attempt.
    pub fn give_back(&mut self) -> Option<Demand> {
        self.demand.take()
    }

    /// The first byte of the answer is here: the prompt is computed, its KV is in the worker's cache.
    pub fn first_token(&mut self, now: Duration) {
        // Of two that are asked at once, the one that answers has the KV by now.
        self.place();
        // What an exact worker is expected to hold is expected until the answer's end. What another one was
        // sent is accepted by dropping the placement.
        self.began = true;
        self.come_from_elsewhere();
        self.placement = self.placement.take().filter(Placement::is_expected);
        self.tell(now, true);
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
        self.tell(self.router.now(), false);
        Accusation::new(self, charge, path)
    }

    /// The first event of a stream is here, which tells how fast the worker is.
    pub fn stream_began(&mut self, now: Duration) {
        let seconds = now.saturating_sub(self.sent).as_secs_f64();
        if let Some(demand) = &mut self.demand {
            demand.stream_began(now);
        }
        match &self.pull {
            None if self.waiting.is_some() => {
                self.worker.rate.lock().observe(self.before.tokens as u64, seconds);
                let predicted_ms = self.worker.ttft.lock().observe(self.before, seconds * 1e3);
                if let Some(predicted_ms) = predicted_ms {
                    self.series().ttft_predicted(predicted_ms / 1e3, seconds);
                }
            }
            Some(pull) if !self.began => {
                let speed = self.worker.rate.lock().tokens_per_second();
                if let Some(speed) = speed.filter(|speed| *speed > 0.0) {
                    let without_ms = self.before.tokens / speed * 1e3;
                    let pair = (pull.from.id, self.worker.id);
                    self.router.pulled(now, pair, pull.tokens, (seconds * 1e3, without_ms));
                }
            }
            _ => {}
        }
        if let Some(Handover { from: Some(from), at, queue_ms, .. }) = self.handed.filter(|_| !self.began) {
            let took = now.saturating_sub(at);
            self.router.handed_over(now, (from, self.worker.id), self.uncached_tokens, (took, queue_ms));
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
        self.come_from_elsewhere();
        self.stop_waiting(now, false);
        if let Some(demand) = &self.demand {
            demand.ended(now);
        }
        if let Some(turn) = &self.turn {
            self.router.holding.turn_ended(now, turn);
        }
        self.worker.load.end();
        self.series().in_flight.dec();
        self.tell(now, self.began);
        if let Some(placement) = self.placement.take() {
            if self.began {
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
