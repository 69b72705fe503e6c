//! The search for a worker that goes on with a broken stream: chosen like any request's, among those that
//! were not tried and can do it, within the retry budget. Dropped with the answer's body, so a client that
//! leaves ends it.

use std::{pin::pin, sync::Arc};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use keyway_core::{index::WorkerId, pick::Pick};
use keyway_wire::headers::NUMERICS_ID;

use super::{Obstacle, Resumer};
use crate::{
    demand::Demand,
    fleet::Worker,
    limits::RESUMES_MAX,
    proxy::{
        asked::Asked,
        both_legs::{BothLegs, Failing, Fallen},
        poison::Suspect,
        silence,
    },
    routing::{Accusation, Choice, Ticket, refusal::Charge},
    upstream::{Answer, SendError},
};

/// "Not now", without a time.
const BUSY: Charge = Charge::Busy { retry_after: None };

/// What is searched for.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) resumer: Arc<Resumer>,
    pub(super) asked: Arc<Asked>,
    /// The request for the rest.
    pub(super) body: Bytes,
    /// Whose answer goes on exactly; any worker's, where the client has nothing yet.
    pub(super) numerics: Option<Arc<str>>,
    pub(super) tried: Vec<WorkerId>,
    pub(super) demand: Option<Demand>,
    /// Whether the request itself may be at fault: then a part of the budget is left to others.
    pub(super) in_doubt: bool,
    /// Where what is asked has broken a worker during the search.
    pub(super) suspect: Option<Suspect>,
}

/// Another worker's answer has begun.
#[derive(Debug)]
pub struct Begun {
    /// The body of the new worker's answer, of which nothing was read yet.
    pub answer: Answer,
    /// The request's weight on the new worker; it counts there until it is dropped.
    pub ticket: Box<Ticket>,
    /// Why it went there.
    pub pick: Pick,
    /// Who was tried so far, this one included.
    pub(super) tried: Vec<WorkerId>,
    /// Where what is asked has broken a worker.
    pub suspect: Option<Suspect>,
}

impl Search {
    pub(super) async fn run(mut self) -> Result<Begun, Obstacle> {
        let Resumer { router, upstream, retries, metrics, .. } = &*self.resumer;
        let path = self.asked.parts.uri.path();
        let mut accusations = Vec::new();
        loop {
            if self.tried.len() > RESUMES_MAX || !self.asked.broken.may_break_another() {
                return Err(Obstacle::Attempts);
            }
            let mut choice = router
                .choose_whole(&self.asked.info, &self.excluded())
                .await
                .map_err(|_| Obstacle::NoWorker)?;
            let taken = {
                let (mut budget, now) = (retries.budget.lock(), router.now());
                if self.in_doubt { budget.take_in_doubt(now) } else { budget.take(now) }
            };
            if !taken {
                metrics.retries_refused.inc();
                return Err(Obstacle::Budget);
            }
            if let Some(demand) = self.demand.take() {
                choice.ticket.carry(demand);
            }
            let (worker, pick) = (Arc::clone(&choice.worker), choice.pick);
            self.tried.push(worker.id);
            self.asked.record.picked(&worker, pick.reason.as_str(), pick.matched_tokens);
            let answer = if worker.needs_partner() {
                match Box::pin(self.in_two_legs(&mut choice)).await {
                    Ok(answer) => answer,
                    Err(fallen) => {
                        if let Some((partner, accusation)) = fallen {
                            self.tried.push(partner);
                            accusations.extend(accusation);
                        }
                        self.demand = choice.ticket.give_back();
                        continue;
                    }
                }
            } else {
                let outgoing = self.asked.outgoing(self.body_for(&choice), &worker);
                let sending = pin!(upstream.send(worker.origin(), outgoing));
                silence::unless_lost(router, &worker, choice.ticket.sent(), sending).await
            };
            match answer {
                Ok(answer) if self.goes_on(&answer) => {
                    router.worker_answered(&worker, router.now());
                    accusations.into_iter().for_each(Accusation::upheld);
                    let (answer, ticket) = (answer.into_body(), choice.ticket);
                    let (tried, suspect) = (self.tried, self.suspect);
                    return Ok(Begun { answer, ticket, pick, tried, suspect });
                }
                Ok(refusal) => {
                    self.accuse(&mut choice.ticket, &refusal, &mut accusations);
                    let status = refusal.status().as_u16();
                    tracing::warn!(worker = %worker.name, id = self.asked.record.id(), status, "worker does not go on with a stream");
                }
                Err(SendError::Connect(_)) => router.worker_failed(&worker),
                Err(SendError::Refused) => accusations.push(choice.ticket.accuse(BUSY, path)),
                Err(SendError::Lost(_)) => {
                    accusations.push(choice.ticket.accuse(Charge::Lost, path));
                    self.asked.broken.note();
                    self.suspect = self.resumer.retries.poisons.broke(&self.asked, worker.id, router.now());
                }
                // A race is no worker's fault; what is local is the gateway's own.
                Err(SendError::Raced | SendError::Local(_)) => {}
            }
            self.demand = choice.ticket.give_back();
        }
    }

    /// What the worker is sent: with where it fetches the prompt, if it does.
    fn body_for(&self, choice: &Choice) -> Bytes {
        let mut body = self.body.clone();
        if let Some(pull) = &choice.pull {
            self.asked.asks_to_pull(&mut body, pull);
        }
        body
    }

    /// To a worker that can compute no prompt, while another one does. An error where none is there for that,
    /// or that one fails: who it is, and what is held against it.
    async fn in_two_legs(
        &self,
        choice: &mut Choice,
    ) -> Result<Result<http::Response<Answer>, SendError>, Option<(WorkerId, Option<Accusation>)>> {
        let Resumer { router, upstream, metrics, .. } = &*self.resumer;
        let legs = BothLegs {
            router: Arc::clone(router),
            upstream: upstream.clone(),
            metrics: Arc::clone(metrics),
            asked: Arc::clone(&self.asked),
        };
        let read = legs.read().map_err(|_| None)?;
        let rooms = legs.rooms_at(choice, read).await.ok_or(None)?;
        let partner = legs.partner((read, rooms), &self.tried).await.map_err(|_| None)?;
        match legs.send(partner, (&choice.worker, choice.ticket.sent()), &self.body).await {
            Ok(met) => {
                choice.ticket.hand_over_beside(met.cached_tokens);
                Ok(met.answer)
            }
            Err(fallen) => {
                let Fallen { choice: mut partner, how } = *fallen;
                if matches!(how, Failing::Broke(SendError::Connect(_))) {
                    router.worker_failed(&partner.worker);
                }
                let path = self.asked.parts.uri.path();
                let accusation = how.charge().map(|charge| partner.ticket.accuse(charge, path));
                Err(Some((partner.worker.id, accusation)))
            }
        }
    }

    /// Holds a refusal against its worker. That a stream is to go on may be what it refuses; the same request
    /// again it may not.
    fn accuse(
        &self,
        ticket: &mut Ticket,
        refusal: &http::Response<Answer>,
        accusations: &mut Vec<Accusation>,
    ) {
        let is_same = self.body.as_ptr() == self.asked.body.as_ptr();
        match Charge::of(refusal.status(), refusal.headers()) {
            Some(Charge::Rejected(_)) if !is_same => {}
            Some(charge) => accusations.push(ticket.accuse(charge, self.asked.parts.uri.path())),
            None => {}
        }
    }

    /// Whose answer would not be the same, besides those that were tried.
    fn excluded(&self) -> Vec<WorkerId> {
        let mut excluded = self.tried.clone();
        if let Some(numerics) = &self.numerics {
            let other = |worker: &Arc<Worker>| worker.numerics_id().as_ref() != Some(numerics);
            let others = self.resumer.router.fleet().all();
            excluded.extend(others.iter().filter(|worker| other(worker)).map(|worker| worker.id));
        }
        excluded
    }

    /// Whether an answer is the stream that was asked for.
    fn goes_on(&self, answer: &http::Response<Answer>) -> bool {
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let streams = header(CONTENT_TYPE.as_str()).is_some_and(|kind| kind.starts_with("text/event-stream"));
        let same = self.numerics.as_deref().is_none_or(|numerics| header(NUMERICS_ID) == Some(numerics));
        answer.status().is_success() && streams && same
    }
}
