//! One request's attempts. What a worker's answer says by its head is looked at before it is relayed: who
//! refuses or fails is asked no further, and another worker is, within the retry budget. The refusal is held,
//! so that the client sees a worker's own words if no other worker serves.
//!
//! A refusal that may be the request's own fault (4xx), and a failure (5xx), are diagnosed by what others
//! make of the same request: served by another, the first one's is held against it; refused by others too, it
//! is the client's own, is passed on, and its client is remembered for a while as one whose like is passed on
//! at once.

mod pulls;
mod ways;

use std::{fmt, pin::pin, sync::Arc, time::Duration};

use http::StatusCode;
use keyway_core::index::WorkerId;

use self::ways::Way;
use crate::{
    clock::Instant,
    config::Role,
    demand::Demand,
    error::Error,
    fleet::{Question, StreamKind, Worker},
    limits::{MAX_ASKED, MAX_ATTEMPTS},
    metrics::Obstacle,
    proxy::{
        asked::Asked,
        body::Response,
        dispatch::{Dispatch, once_begun},
        kv_transfer,
        own_fault::RequestFailure,
        poison::Suspect,
        prefill_leg::FromTwo,
        relay::{self, RelayedRequest},
        resume::{ResumeState, Sent},
        silence,
    },
    routing::{Accusation, Choice, Ticket, refusal::Charge},
    upstream::{Answer, Outgoing, SendError},
    usage::{ask::ask, hide::UsageFilter},
};

/// The attempts so far.
pub(crate) struct Attempts<'a> {
    dispatch: &'a Dispatch,
    asked: &'a Arc<Asked>,
    seed: u64,
    tried: Vec<WorkerId>,
    /// How many of these may have worked on it.
    worked: usize,
    accusations: Vec<Accusation>,
    /// What those said who may have found the request itself at fault.
    opinions: Vec<StatusCode>,
    /// The last refusal or failure, head and unread body, for the client if no other worker serves.
    held: Option<Box<Held>>,
    /// What the client is told where there is none.
    lost: Error,
    demand: Option<Demand>,
    /// Whether what is asked has broken workers before.
    suspect: Option<Suspect>,
    /// Whether what ended them is no reason against another model.
    other_may: bool,
}

/// An answer whose head has come.
struct Held {
    worker: Arc<Worker>,
    answer: http::Response<Answer>,
    came: Instant,
    told: RelayedRequest,
}

/// Why an attempt came to nothing, and whether another may be made.
struct Miss {
    why: &'static str,
    may_repeat: bool,
    /// It may be the request's own fault.
    in_doubt: bool,
    /// No worker was asked: another one is no retry.
    is_local: bool,
}

impl<'a> Attempts<'a> {
    /// No attempt yet. `suspect`: something is held against the body already.
    pub(crate) fn new(dispatch: &'a Dispatch, asked: &'a Arc<Asked>, suspect: Option<Suspect>) -> Self {
        Self {
            dispatch,
            asked,
            seed: fastrand::u64(..),
            tried: Vec::new(),
            worked: 0,
            accusations: Vec::new(),
            opinions: Vec::new(),
            held: None,
            lost: Error::WorkerLost,
            demand: None,
            suspect,
            other_may: false,
        }
    }

    /// Makes them, from the worker that was chosen on, until one is answered; `None`: none was, and there is
    /// the [`Attempts::last_word`].
    pub(crate) async fn run(&mut self, chosen: Result<Choice, Error>, demand: Demand) -> Option<Response> {
        let mut choice = match chosen {
            Ok(choice) => choice,
            Err(error) => {
                self.other_may =
                    matches!(error, Error::NoWorker | Error::ModelNotFound { .. } | Error::TooBusy { .. });
                (self.lost, self.demand) = (error, Some(demand));
                return None;
            }
        };
        choice.ticket.carry(demand);
        if self.asked.info.metered {
            self.asked.record.asks();
        }
        loop {
            let miss = match self.attempt(choice).await {
                Ok(response) => return Some(response),
                Err(miss) => miss,
            };
            let Some(next) = self.another(&miss).await else {
                let is_shut = matches!(self.lost, Error::NoPrefill | Error::TooBusy { .. });
                self.other_may = self.shows_no_fault(&miss) || (is_shut && !self.has_asked());
                return None;
            };
            choice = next;
        }
    }

    /// Whether workers of another model may be asked: none of this one's could take the request, none says
    /// that it is at fault, and nothing was answered.
    pub(crate) fn may_fall_back(&self) -> bool {
        self.other_may && self.asked.info.owner.is_none()
    }

    /// Whether any worker was asked.
    pub(crate) fn has_asked(&self) -> bool {
        !self.tried.is_empty()
    }

    /// Whether there was no worker to ask.
    pub(crate) fn lacks_worker(&self) -> bool {
        !self.has_asked() && matches!(self.lost, Error::NoWorker | Error::ModelNotFound { .. })
    }

    /// Counts on from the attempts at another model's workers: all together are bounded.
    pub(crate) fn after(mut self, before: &Attempts<'_>) -> Self {
        self.worked = before.worked;
        self
    }

    /// Goes on with what is left of later attempts, at another model's workers, that came to nothing.
    pub(crate) fn take_over(&mut self, later: &mut Attempts<'_>) {
        self.worked = later.worked;
        self.demand = later.take_demand().or(self.demand.take());
        later.give_up();
    }

    /// What the request asks of the fleet: goes on with it to the next worker.
    pub(crate) fn take_demand(&mut self) -> Option<Demand> {
        let held = self.held.as_mut().and_then(|held| held.told.ticket.give_back());
        self.demand.take().or(held)
    }

    /// Another model has the request: nobody shows whose fault this one's refusals were.
    pub(crate) fn give_up(&mut self) {
        self.accusations.drain(..).for_each(Accusation::undecided);
    }

    /// Whether nothing in what has come of them speaks against the request, or against one more of them.
    fn shows_no_fault(&self, miss: &Miss) -> bool {
        let found_fault = self.opinions.len() > 1 || self.opinions.iter().any(StatusCode::is_client_error);
        let may_go_on = miss.may_repeat && !miss.in_doubt && !miss.is_local;
        may_go_on && !found_fault && self.worked < MAX_ATTEMPTS
    }

    async fn attempt(&mut self, choice: Choice) -> Result<Response, Miss> {
        // In a box: few fleets have workers for a part of requests.
        let (choice, way) = match choice.worker.role() {
            Role::Decode => Box::pin(self.way_of(choice)).await?,
            _ => (choice, Way::Alone),
        };
        let (Dispatch { router, upstream, resumer, .. }, asked) = (self.dispatch, self.asked);
        let Choice { worker, pick, splits, pull, mut ticket } = choice;
        asked.record.picked(&worker, pick.reason.as_str(), pick.matched_tokens);
        let (asking, mut usage) = self.asking(&worker);
        let mut sent = resumer.sent(asked, asking, &worker, self.seed);
        let asks_to_pull = pull.as_ref().is_some_and(|pull| asked.asks_to_pull(&mut sent.body, pull));
        let mut from_two = None;
        // No worker has to wait for the doctor.
        let doctor = self.tried.is_empty().then_some(|| self.dispatch.look_for_drift(asked));
        let mut answer = if let Way::Beside(both) = way {
            let (worker, at, body) = (&*worker, ticket.sent(), &sent.body);
            // All of it in the box.
            let both = Box::pin(async move {
                let (legs, partner) = *both;
                legs.send(partner, (worker, at), body).await
            });
            let met = once_begun(pin!(both), doctor).await;
            match met {
                Ok(met) => {
                    ticket.hand_over_beside(met.cached_tokens);
                    from_two = Some(FromTwo { cached_tokens: met.cached_tokens });
                    met.answer
                }
                Err(fallen) => return self.partner_fell(*fallen, (ticket, &sent)),
            }
        } else {
            match way {
                Way::After(handed) => {
                    sent.body = kv_transfer::decode_body(&sent.body, &handed.params);
                    from_two = Some(FromTwo { cached_tokens: handed.cached_tokens });
                }
                // The worker may have been one for a part of requests when it was chosen.
                _ => ticket.is_asked_alone(),
            }
            let outgoing = asked.outgoing(sent.body.clone(), &worker);
            let sending = pin!(upstream.send(worker.origin(), outgoing));
            let sending = pin!(silence::unless_lost(router, &worker, ticket.sent(), sending));
            once_begun(sending, doctor).await
        };
        if asks_to_pull && self.may_refuse_to_pull(&answer) {
            // In a box: it is hardly ever done.
            answer = Box::pin(self.without_pull(&worker, &mut ticket, &mut sent)).await;
        }
        let status = answer.as_ref().ok().map(http::Response::status).filter(|_| !worker.needs_partner());
        if let Some(kind) = status.and_then(|status| usage.may_be_refused(status, &worker)) {
            usage = UsageFilter::pass_all();
            sent = resumer.sent(asked, asked.body.clone(), &worker, self.seed);
            // In a box: it is hardly ever done.
            answer = Box::pin(unasked(
                self.dispatch,
                asked.outgoing(sent.body.clone(), &worker),
                (&worker, kind),
                ticket.sent(),
            ))
            .await;
        }
        let choice = Choice { worker, pick, splits, pull, ticket };
        let mut response = self.take(choice, answer, (usage, &sent))?;
        if let Some(from_two) = from_two {
            response.extensions_mut().insert(from_two);
        }
        Ok(response)
    }

    /// What becomes of a worker's answer, or of none.
    fn take(
        &mut self,
        choice: Choice,
        answer: Result<http::Response<Answer>, SendError>,
        (usage, sent): (UsageFilter, &Sent),
    ) -> Result<Response, Miss> {
        let Choice { worker, pick, mut ticket, .. } = choice;
        let (Dispatch { router, resumer, .. }, asked) = (self.dispatch, self.asked);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(self.unanswered(&worker, ticket, error)),
        };
        let came = Instant::now();
        router.worker_answered(&worker, router.at(came));
        let (info, record) = (Arc::clone(&asked.info), Arc::clone(&asked.record));
        let (series, suspect) = (Arc::clone(&asked.series), self.suspect.clone());
        let charge = self.charge(&answer, &worker, &mut ticket);
        let told = RelayedRequest { ticket, info, pick, record, series, usage, suspect };
        if let Some(charge) = charge {
            // In a box: what is mostly not there takes no room in each request's future.
            return Err(self.refused(Box::new(Held { worker, answer, came, told }), charge));
        }
        if answer.status().is_success() {
            self.accusations.drain(..).for_each(Accusation::upheld);
        }
        let lifeline = resumer.lifeline(asked, &worker, sent, answer.headers());
        Ok(self.relay(&worker, (answer, came), told, lifeline))
    }

    /// What the worker is asked, which may be for more than the client asks.
    fn asking(&self, worker: &Arc<Worker>) -> (bytes::Bytes, UsageFilter) {
        let (dispatch, Asked { parts, body, info, .. }) = (self.dispatch, &**self.asked);
        if !(dispatch.answers.ask_usage && info.stream) {
            return (body.clone(), UsageFilter::pass_all());
        }
        let always = dispatch.resumer.counts_tokens(worker);
        let kind = StreamKind::of(parts.uri.path(), info.has_tools);
        ask(kind, (body.clone(), &info.stream_options), worker, always)
    }

    /// Holds an answer that refuses or fails, in case no other worker serves.
    fn refused(&mut self, mut head: Box<Held>, charge: Charge) -> Miss {
        let status = head.answer.status();
        self.accuse(&mut head.told.ticket, &head.worker, charge, &status);
        let miss = self.missed(&head.worker, charge, status);
        self.held = Some(head);
        miss
    }

    /// A worker refuses, or fails.
    fn missed(&mut self, worker: &Worker, charge: Charge, status: StatusCode) -> Miss {
        self.tried.push(worker.id);
        let in_doubt = matches!(charge, Charge::Failed | Charge::Rejected(_));
        if in_doubt {
            self.worked += 1;
            self.opinions.push(status);
        }
        let may_repeat = match charge {
            Charge::Busy { .. } => self.asked.may_repeat_unbegun(),
            Charge::Failed => self.asked.may_repeat(),
            _ => true,
        };
        let in_doubt = in_doubt && charge != Charge::Failed;
        Miss { why: charge.as_str(), may_repeat, in_doubt, is_local: false }
    }

    /// What this answer is held against its worker for, if anything.
    fn charge<T>(&self, answer: &http::Response<T>, worker: &Worker, ticket: &mut Ticket) -> Option<Charge> {
        let status = answer.status();
        let charge = Charge::of(status, answer.headers())?;
        match charge {
            Charge::Rejected(_) if !self.asked.is_alike_everywhere() => None,
            Charge::Rejected(_) | Charge::Failed
                if self.is_own_fault(status) && worker.standing.may_pass() =>
            {
                ticket.excuse();
                None
            }
            charge => Some(charge),
        }
    }

    fn is_own_fault(&self, status: StatusCode) -> bool {
        let Dispatch { retries, router, .. } = self.dispatch;
        retries.own_faults.knows(self.asked, RequestFailure::Status(status), router.now())
    }

    fn unanswered(&mut self, worker: &Arc<Worker>, mut ticket: Box<Ticket>, error: SendError) -> Miss {
        self.tried.push(worker.id);
        let why = error.as_str();
        let id = self.asked.record.id();
        if error.is_the_worker_s() {
            tracing::warn!(worker = %worker.name, id, error = why, cause = %error, "worker gave no answer");
        }
        self.lost = error.to_client();
        let may_repeat = match error {
            SendError::Connect(_) => {
                self.dispatch.router.worker_failed(worker);
                self.asked.record.attempt_failed(why, &error);
                true
            }
            // Busy, or about to leave: it says itself that nothing has happened.
            SendError::Refused => {
                self.accuse(&mut ticket, worker, Charge::Busy { retry_after: None }, &error);
                true
            }
            SendError::Lost(_) => {
                self.worked += 1;
                self.accuse(&mut ticket, worker, Charge::Lost, &error);
                let Dispatch { retries, router, .. } = self.dispatch;
                self.asked.broken.note();
                self.suspect = retries.poisons.broke(self.asked, worker.id, router.now());
                self.asked.may_repeat() && self.asked.broken.may_break_another()
            }
            // A race is no worker's fault; what is local is the gateway's own.
            SendError::Raced | SendError::Local(_) => {
                self.asked.record.attempt_failed(why, &error);
                self.asked.may_repeat()
            }
        };
        // Its weight goes before the next worker is chosen.
        self.demand = ticket.give_back();
        Miss { why, may_repeat, in_doubt: false, is_local: error.is_local() }
    }

    fn accuse(&mut self, ticket: &mut Ticket, worker: &Worker, charge: Charge, cause: &dyn fmt::Display) {
        let why = charge.as_str();
        tracing::debug!(worker = %worker.name, id = self.asked.record.id(), why, "a worker does not serve a request");
        self.asked.record.attempt_failed(why, cause);
        self.accusations.push(ticket.accuse(charge, self.asked.parts.uri.path()));
    }

    /// Another worker, if one may be asked.
    async fn another(&mut self, miss: &Miss) -> Option<Choice> {
        let Dispatch { router, retries, metrics, .. } = self.dispatch;
        let over = self.tried.len() >= MAX_ASKED || self.worked >= MAX_ATTEMPTS;
        let info = &self.asked.info;
        if !miss.may_repeat || over || !router.has_another(info, &self.tried) {
            return None;
        }
        let now = router.now();
        let taken = {
            let mut budget = retries.budget.lock();
            miss.is_local || if miss.in_doubt { budget.take_in_doubt(now) } else { budget.take(now) }
        };
        if !taken {
            metrics.retries_refused.inc();
            return None;
        }
        // With no worker left, what became of this attempt says more than "none is ready".
        let mut choice = router.choose(info, &self.tried).await.ok()?;
        if let Some(demand) = self.take_demand() {
            choice.ticket.carry(demand);
        }
        metrics.retries.with_label_values(&[miss.why]).inc();
        Some(choice)
    }

    /// No worker serves it: the client has the last refusal. Where more than one worker found fault with the
    /// request, the fault is its own.
    pub(crate) fn last_word(&mut self) -> Result<Response, Error> {
        if self.opinions.len() > 1 {
            let Dispatch { retries, router, .. } = self.dispatch;
            let note = |status: &StatusCode| {
                retries.own_faults.note(self.asked, RequestFailure::Status(*status), router.now());
            };
            self.opinions.iter().for_each(note);
            self.accusations.clear();
        } else {
            self.accusations.drain(..).for_each(Accusation::undecided);
        }
        // There is no other that stores it.
        let away = self.asked.info.owner.is_some() && self.worked == 0 && self.lost == Error::WorkerLost;
        let Some(held) = self.held.take() else {
            return Err(if away { Error::StateAway } else { self.lost.clone() });
        };
        let Held { worker, answer, came, told } = *held;
        Ok(self.relay(&worker, (answer, came), told, Err(Obstacle::Path)))
    }

    fn relay(
        &self,
        worker: &Worker,
        (answer, came): (http::Response<Answer>, Instant),
        told: RelayedRequest,
        lifeline: Result<Box<ResumeState>, Obstacle>,
    ) -> Response {
        let pick = told.pick;
        let lifeline = (lifeline, Arc::clone(&self.dispatch.resumer));
        let mut response = relay::relay((answer, came), told, lifeline, self.dispatch.terms(self.asked));
        self.dispatch.watch(&mut response, self.asked, worker);
        self.dispatch.expose(&mut response, &self.asked.info, (worker, &pick));
        response
    }
}

/// Sends the client's own request once more where a worker has refused one that asked for a stream's usage.
/// If it serves this, the question was what it refused, and streams of this kind ask it no more.
async fn unasked(
    dispatch: &Dispatch,
    request: Outgoing<'_>,
    (worker, kind): (&Worker, StreamKind),
    sent: Duration,
) -> Result<http::Response<Answer>, SendError> {
    let sending = pin!(dispatch.upstream.send(worker.origin(), request));
    let sending = pin!(silence::unless_lost(&dispatch.router, worker, sent, sending));
    let answer = sending.await?;
    if answer.status().is_success() {
        tracing::warn!(worker = %worker.name, ?kind, "worker refuses stream_options; its streams are not asked for their usage");
        worker.habits.answered(kind, Question::Refused);
    }
    Ok(answer)
}
