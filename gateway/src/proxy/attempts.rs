//! One request's attempts. What a worker's answer says by its head is looked at before it is relayed: who
//! refuses or fails is asked no further, and another worker is, within the retry budget. The refusal is held,
//! so that the client sees a worker's own words if no other worker serves.
//!
//! A refusal that may be the request's own fault (4xx), and a failure (5xx), are diagnosed by what others
//! make of the same request: served by another, the first one's is held against it; refused by others too, it
//! is the client's own, is passed on, and its client is remembered for a while as one whose like is passed on
//! at once.

use std::{fmt, pin::pin, sync::Arc, time::Duration};

use http::StatusCode;
use keyway_core::index::WorkerId;

use crate::{
    clock::Instant,
    demand::Demand,
    error::Error,
    fleet::{Question, StreamKind, Worker},
    limits::{MAX_ASKED, MAX_ATTEMPTS},
    metrics::Obstacle,
    proxy::{
        asked::Asked,
        body::Response,
        dispatch::{Dispatch, once_begun},
        own_fault::RequestFailure,
        poison::Suspect,
        relay::{self, RelayedRequest},
        resume::ResumeState,
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
        }
    }

    /// Makes them until one is answered, or none is left.
    pub(crate) async fn run(&mut self, mut choice: Choice) -> Result<Response, Error> {
        loop {
            let miss = match self.attempt(choice).await {
                Ok(response) => return Ok(response),
                Err(miss) => miss,
            };
            match self.another(&miss).await {
                Some(next) => choice = next,
                None => return self.last_word(),
            }
        }
    }

    async fn attempt(&mut self, choice: Choice) -> Result<Response, Miss> {
        let (Dispatch { router, upstream, resumer, .. }, asked) = (self.dispatch, self.asked);
        let Choice { worker, pick, mut ticket } = choice;
        asked.record.picked(&worker, pick.reason.as_str(), pick.matched_tokens);
        let (asking, mut usage) = self.asking(&worker);
        let mut sent = resumer.sent(asked, asking, &worker, self.seed);
        let mut answer = {
            let outgoing = asked.outgoing(sent.body.clone(), &worker);
            let sending = pin!(upstream.send(worker.origin(), outgoing));
            let sending = pin!(silence::unless_lost(router, &worker, ticket.sent(), sending));
            // No worker has to wait for the doctor.
            let doctor = self.tried.is_empty().then_some(|| self.dispatch.look_for_drift(asked));
            once_begun(sending, doctor).await
        };
        let status = answer.as_ref().ok().map(http::Response::status);
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
        match answer {
            Ok(answer) => {
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
                let lifeline = resumer.lifeline(asked, &worker, &sent, answer.headers());
                Ok(self.relay(&worker, (answer, came), told, lifeline))
            }
            Err(error) => Err(self.unanswered(&worker, ticket, error)),
        }
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
        self.tried.push(head.worker.id);
        let status = head.answer.status();
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
        self.accuse(&mut head.told.ticket, &head.worker, charge, &status);
        self.held = Some(head);
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
        let held = self.held.as_mut().and_then(|held| held.told.ticket.give_back());
        if let Some(demand) = self.demand.take().or(held) {
            choice.ticket.carry(demand);
        }
        metrics.retries.with_label_values(&[miss.why]).inc();
        Some(choice)
    }

    /// No worker serves it: the client has the last refusal. Where more than one worker found fault with the
    /// request, the fault is its own.
    fn last_word(&mut self) -> Result<Response, Error> {
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
        self.dispatch.expose(&mut response, worker, &pick);
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
