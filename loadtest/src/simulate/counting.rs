//! What comes out of a worker's engine, told to the gateway whose request it is and counted.

use std::time::Duration;

use keyway_core::{index::Placement, pace::Waiting, told::Told, ttft::Before};
use keyway_wire::block_hash::BlockHash;

use super::{
    gateway::Gateway, outcome::Outcome, routing::Arrival, sessions::CacheUse, transit::Computed, turns::Turns,
};
use crate::{
    engine_model::{Listener, Nanos, Token},
    slo::{Metric, Slo},
};

/// A request under way.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pub(super) arrived: Nanos,
    pub(super) sent: Nanos,
    pub(super) first: Nanos,
    pub(super) waiting: Option<Waiting>,
    pub(super) prompt_tokens: u64,
    /// What the router expected it to find there.
    pub(super) before: Before,
    /// Number of the gateway that it came to.
    pub(super) gateway: usize,
    pub(super) placement: Option<Placement>,
    /// As other gateways were told of it, until they are told that it was answered.
    pub(super) told: Option<Told>,
    /// Its session, if it is a turn of one that its gateway knows.
    pub(super) session: Option<u64>,
    pub(super) cache_use: CacheUse,
    /// Which copy of which row it is.
    pub(super) source: (u64, u32),
    /// Names of its blocks, where the worker tells what it holds.
    pub(super) chain: Vec<BlockHash>,
    /// When its last token came.
    pub(super) last: Nanos,
    pub(super) leg: Leg,
}

/// Which part of a request a flight is.
#[derive(Debug, Default)]
pub(super) enum Leg {
    #[default]
    Whole,
    /// Its prompt, for the worker that then answers it.
    First(Box<Arrival>),
    /// Its answer: worker `from` has computed the prompt, of which it found `cached_tokens`. The one that
    /// answers was told `at`, when it had other prompts to compute for so long.
    Handed { from: usize, cached_tokens: u32, uncached: u64, at: Nanos, queue_ms: f64 },
    /// All of it, but for a prefix that was fetched from another worker.
    Pulled,
}

/// One worker's desks and the run's figures, while its engine is advanced.
pub(super) struct Counting<'r, 'a> {
    pub(super) worker: usize,
    pub(super) gateways: &'r mut [Gateway],
    pub(super) flights: &'r mut [Flight],
    pub(super) turns: Option<&'r mut Turns<'a>>,
    pub(super) outcome: &'r mut Outcome,
    /// Prompts that were computed for other workers.
    pub(super) computed: &'r mut Vec<Computed>,
    pub(super) slo: &'r Slo,
    /// Whether the time between any two tokens counts.
    pub(super) itl: bool,
}

impl Counting<'_, '_> {
    /// A prompt was computed for another worker.
    fn prompt_computed(&mut self, token: Token) {
        let flight = &mut self.flights[token.request.slot as usize];
        let Leg::First(arrival) = std::mem::take(&mut flight.leg) else { return };
        let gateway = &mut self.gateways[flight.gateway];
        if let Some(waiting) = flight.waiting.take() {
            let took = Duration::from_nanos(token.at - flight.sent);
            gateway.first_token(self.worker, token.at, &waiting, Some((flight.before, took)));
        }
        let placement = flight.placement.take().filter(Placement::is_expected);
        gateway.tell_of_answer(token.at, flight.told.take());
        gateway.ended(self.worker, flight.prompt_tokens, placement);
        self.computed.push(Computed {
            at: token.at,
            gateway: flight.gateway,
            from: self.worker,
            arrival: *arrival,
            cached_tokens: token.cached_tokens,
        });
    }

    /// The first token of an answer.
    fn first_token(&mut self, token: Token) {
        let flight = &mut self.flights[token.request.slot as usize];
        let gateway = &mut self.gateways[flight.gateway];
        flight.first = token.at;
        let mut cached_tokens = token.cached_tokens;
        let took = Duration::from_nanos(token.at - flight.sent);
        let mut speed = Some((flight.before, took));
        match &flight.leg {
            Leg::Handed { from, cached_tokens: found, uncached, at, queue_ms } => {
                cached_tokens = *found;
                let ms = (token.at - at) as f64 / 1e6;
                gateway.handed_over(token.at, (*from, self.worker), *uncached, (ms, *queue_ms));
            }
            // How long it took is nothing of the worker's speed.
            Leg::Pulled => speed = None,
            Leg::Whole | Leg::First(_) => {}
        }
        if let Some(waiting) = flight.waiting.take() {
            let predicted_ms = gateway.first_token(self.worker, token.at, &waiting, speed);
            self.outcome.predicted(predicted_ms, took.as_secs_f64() * 1e3);
        }
        // The prompt is computed, and the worker has made room for it.
        flight.placement = flight.placement.take().filter(Placement::is_expected);
        gateway.tell_of_answer(token.at, flight.told.take());
        self.outcome.first_token(token.at - flight.arrived, cached_tokens);
        if let Some(sessions) = &mut self.outcome.sessions {
            sessions.first_token(flight.cache_use, cached_tokens);
        }
    }
}

impl Listener for Counting<'_, '_> {
    fn hears_all(&self) -> bool {
        self.itl
    }

    fn token(&mut self, token: Token) {
        if self.itl {
            let flight = &mut self.flights[token.request.slot as usize];
            let before = std::mem::replace(&mut flight.last, token.at);
            if token.number > 1 {
                self.outcome.between(token.at - before);
            }
        }
        if token.number > 1 && !token.last {
            return;
        }
        if let Leg::First(_) = self.flights[token.request.slot as usize].leg {
            self.prompt_computed(token);
            return;
        }
        if token.number == 1 {
            self.first_token(token);
        }
        let flight = &mut self.flights[token.request.slot as usize];
        let gateway = &mut self.gateways[flight.gateway];
        if token.last {
            gateway.ended(self.worker, flight.prompt_tokens, flight.placement.take());
            let gaps = u64::from(token.number - 1);
            let tpot = (token.at - flight.first).checked_div(gaps);
            let (ttft, e2e) = (flight.first - flight.arrived, token.at - flight.arrived);
            let good = self.slo.met_by(|metric| match metric {
                Metric::Ttft => Some(Duration::from_nanos(ttft)),
                Metric::Tpot => tpot.map(Duration::from_nanos),
                Metric::Ttst => None,
                Metric::E2e => Some(Duration::from_nanos(e2e)),
            });
            self.outcome.done(token.at, e2e, tpot, token.number, good);
            let tokens = flight.prompt_tokens + u64::from(token.number);
            gateway.turn_ended(token.at, flight.session, tokens, Some(flight.first));
            let (copy, row) = flight.source;
            let session = self.turns.as_mut().and_then(|turns| turns.ended(token.at, copy, row));
            if let Some(sessions) = &mut self.outcome.sessions {
                sessions.ended(token.at, session);
            }
        }
    }
}
