//! A request whose legs go at once: one worker computes its prompt while the one that is to answer waits for
//! the KV (SGLang, `kv_transfer/sglang.rs`). The latter can compute no prompt itself: without a partner it is
//! not asked, and where its partner fails it is left, since it would wait until a timeout of its own. Who is
//! asked next is `attempts.rs`'s business, and `resume`'s.

use std::{future::poll_fn, pin::Pin, pin::pin, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Limited};
use keyway_core::{breaker::Verdict, index::WorkerId};
use keyway_wire::openai::Usage;

use super::{
    asked::Asked,
    dispatch::Dispatch,
    kv_transfer::sglang::{LegsAsked, Meeting, NotComputed, new_room, read_prefill, says_failure},
    silence,
};
use crate::{
    clock::{self, Instant},
    config::KvTransfer,
    error::Error,
    fleet::{ClaimedRooms, Worker},
    limits::{PARTNER_GRACE, PREFILL_ANSWER_BYTES_MAX, ROOM_WAIT},
    metrics::Metrics,
    routing::{Choice, Router, refusal::Charge},
    upstream::{Answer, Beside, SendError, Upstream},
};

/// What both legs of a request need.
#[derive(Debug, Clone)]
pub(super) struct BothLegs {
    pub(super) router: Arc<Router>,
    pub(super) upstream: Upstream,
    pub(super) metrics: Arc<Metrics>,
    pub(super) asked: Arc<Asked>,
}

/// The worker that computes for another one, and the request's rooms at that.
#[derive(Debug)]
pub(super) struct Partner {
    rooms: ClaimedRooms,
    room: u64,
    choice: Choice,
}

/// What the worker that answers made of it; the prompt's worker did its part, or no longer matters.
#[derive(Debug)]
pub(super) struct Met {
    pub(super) answer: Result<http::Response<Answer>, SendError>,
    /// Prompt tokens that were found cached where it was computed.
    pub(super) cached_tokens: u64,
}

/// The worker that was to compute the prompt did not.
#[derive(Debug)]
pub(super) struct Fallen {
    pub(super) choice: Choice,
    pub(super) how: Failing,
}

/// How it did not.
#[derive(Debug)]
pub(super) enum Failing {
    /// It refuses or fails, as the head of its answer says.
    Answered(http::Response<Answer>),
    /// It gave no answer, or none to its end.
    Broke(SendError),
    /// It says so in the body of an answer that begins well.
    Said(NotComputed),
}

impl Failing {
    /// What is held against the worker; `None` where nothing is, or it was not asked.
    pub(super) fn charge(&self) -> Option<Charge> {
        match self {
            Self::Answered(answer) => Charge::of(answer.status(), answer.headers()),
            Self::Broke(SendError::Refused) => Some(Charge::Busy { retry_after: None }),
            Self::Broke(SendError::Lost(_)) => Some(Charge::Lost),
            Self::Broke(_) => None,
            Self::Said(NotComputed { status, .. }) => {
                let status = status.and_then(|status| StatusCode::from_u16(status).ok());
                let charge = status.and_then(|status| Charge::of(status, &HeaderMap::new()));
                Some(charge.unwrap_or(Charge::Failed))
            }
        }
    }
}

/// The other leg, as it goes on: the cached tokens at its end, where it says how many.
type Prefill = Pin<Box<dyn Future<Output = Result<Option<u64>, Box<Fallen>>> + Send>>;

impl BothLegs {
    pub(super) fn of(dispatch: &Dispatch, asked: &Arc<Asked>) -> Self {
        let Dispatch { router, upstream, metrics, .. } = dispatch;
        Self {
            router: Arc::clone(router),
            upstream: upstream.clone(),
            metrics: Arc::clone(metrics),
            asked: Arc::clone(asked),
        }
    }

    /// What the request asks for, if it can go in two legs at all.
    pub(super) fn read(&self) -> Result<LegsAsked, Error> {
        let path = self.asked.parts.uri.path();
        let refused = |message: String| Err(Error::NoChat { message, param: None });
        if !matches!(path, "/v1/chat/completions" | "/v1/completions" | "/generate") {
            return refused(format!(
                "this model's workers answer with what others have computed, which they do for chats and completions, not at {path}"
            ));
        }
        let asked = LegsAsked::of(&self.asked.body)
            .ok_or_else(|| Error::BodyUnreadable("it is no object in JSON".to_owned()))?;
        if asked.prompt_logprobs {
            return refused(
                "this model's workers answer with what others have computed, and know no logprobs of the prompt: \
                 leave out echo or logprobs, logprob_start_len or return_logprob"
                    .to_owned(),
            );
        }
        Ok(asked)
    }

    /// Rooms for the request at the worker that was chosen or, where that has none left, at another one,
    /// which is the choice then; else at the first that has some again within this time. None are needed
    /// where the choice turns out to compute prompts itself.
    pub(super) async fn rooms(
        &self,
        choice: &mut Choice,
        (asked, tried): (LegsAsked, &[WorkerId]),
        wait: Duration,
    ) -> Result<Option<ClaimedRooms>, Error> {
        if !self.router.has_prefill(&self.asked.info, &self.without_others(tried)) {
            return Err(Error::NoPrefill);
        }
        // Its prompt waits for none of those that are computed there.
        choice.ticket.computes_elsewhere();
        if let Some(rooms) = choice.worker.rooms().try_claim(asked.rooms) {
            return Ok(Some(rooms));
        }
        let is_full = |worker: &&Arc<Worker>| worker.needs_partner() && !worker.rooms().has(asked.rooms);
        let full = self.router.fleet().all();
        let full = full.iter().filter(is_full).map(|worker| worker.id);
        let full: Vec<WorkerId> = tried.iter().copied().chain(full).chain([choice.worker.id]).collect();
        if self.router.has_another(&self.asked.info, &full) {
            self.choose_again(choice, &full).await?;
            if !choice.worker.needs_partner() {
                return Ok(None);
            }
            choice.ticket.computes_elsewhere();
        }
        let (worker, rooms) = clock::timeout(wait, self.first_rooms(choice, asked, tried))
            .await
            .map_err(|_| Error::TooBusy { retry_after: Duration::from_secs(1) })?;
        if worker != choice.worker.id {
            let others = self.router.fleet().all();
            let others = others.iter().map(|worker| worker.id).filter(|id| *id != worker).collect::<Vec<_>>();
            self.choose_again(choice, &others).await?;
            choice.ticket.computes_elsewhere();
        }
        Ok(Some(rooms))
    }

    /// The first rooms that are free at any of the workers that the request may go to.
    async fn first_rooms(
        &self,
        choice: &Choice,
        asked: LegsAsked,
        tried: &[WorkerId],
    ) -> (WorkerId, ClaimedRooms) {
        let model = self.asked.info.model.as_deref();
        let fleet = self.router.fleet().all();
        let may_have = |worker: &&Arc<Worker>| {
            worker.id == choice.worker.id
                || (worker.needs_partner()
                    && worker.routable()
                    && worker.may_serve(model)
                    && !tried.contains(&worker.id))
        };
        let mut claims: Vec<_> = fleet
            .iter()
            .filter(may_have)
            .map(|worker| (worker.id, Box::pin(worker.rooms().claim(asked.rooms))))
            .collect();
        poll_fn(|cx| {
            for (id, claim) in &mut claims {
                if let Poll::Ready(rooms) = claim.as_mut().poll(cx) {
                    return Poll::Ready((*id, rooms));
                }
            }
            Poll::Pending
        })
        .await
    }

    async fn choose_again(&self, choice: &mut Choice, tried: &[WorkerId]) -> Result<(), Error> {
        let mut other = self.router.choose(&self.asked.info, tried).await?;
        if let Some(demand) = choice.ticket.give_back() {
            other.ticket.carry(demand);
        }
        *choice = other;
        Ok(())
    }

    /// Rooms at the chosen worker, within the usual time.
    pub(super) async fn rooms_at(&self, choice: &mut Choice, asked: LegsAsked) -> Option<ClaimedRooms> {
        choice.ticket.computes_elsewhere();
        clock::timeout(ROOM_WAIT, choice.worker.rooms().claim(asked.rooms)).await.ok()
    }

    /// A worker that computes the prompt for the one that has these rooms.
    pub(super) async fn partner(
        &self,
        (asked, rooms): (LegsAsked, ClaimedRooms),
        tried: &[WorkerId],
    ) -> Result<Partner, Error> {
        let tried = self.without_others(tried);
        let choice = self
            .router
            .choose_prefill(&self.asked.info, &tried)
            .await
            .map_err(|error| if error == Error::NoWorker { Error::NoPrefill } else { error })?;
        Ok(Partner { rooms, room: new_room(asked.rooms), choice })
    }

    /// Those that were tried, and those that speak another contract.
    fn without_others(&self, tried: &[WorkerId]) -> Vec<WorkerId> {
        let fleet = self.router.fleet().all();
        let speaks_another = |worker: &&Arc<Worker>| worker.kv_transfer() != KvTransfer::Sglang;
        let others = fleet.iter().filter(speaks_another).map(|worker| worker.id);
        tried.iter().copied().chain(others).collect()
    }

    /// Sends both legs, and waits until the one that answers has begun to, or it is known that the other one
    /// has done its part; or that it has failed, and then the first is left.
    pub(super) async fn send(
        &self,
        partner: Partner,
        (worker, sent): (&Worker, Duration),
        body: &Bytes,
    ) -> Result<Met, Box<Fallen>> {
        let Partner { rooms, room, choice } = partner;
        let mut cached_tokens = choice.pick.matched_tokens;
        let (prefill_body, decode_body) = {
            let (host, port) = (choice.worker.url_host(), choice.worker.bootstrap_port());
            Meeting { host, port, room, prefill_rank: choice.worker.rank() }.bodies(body)
        };
        let mut prefill = Some(self.clone().prefill(choice, prefill_body));
        let outgoing = self.asked.outgoing(decode_body, worker);
        let sending = pin!(self.upstream.send(worker.origin(), outgoing));
        let sending = pin!(silence::unless_lost(&self.router, worker, sent, sending));
        let head = beside(&mut prefill, &mut cached_tokens, sending).await?;
        let mut answer = match head {
            Ok(answer) if answer.status().is_success() => answer,
            failed => {
                let status = failed.as_ref().ok().map(http::Response::status);
                if status == Some(StatusCode::INTERNAL_SERVER_ERROR) {
                    word_of(&mut prefill).await?;
                }
                return Ok(Met { answer: failed, cached_tokens });
            }
        };
        let first = if prefill.is_some() && !answer.body().is_end_stream() {
            let piece = pin!(poll_fn(|cx| Pin::new(answer.body_mut()).poll_frame(cx)));
            match beside(&mut prefill, &mut cached_tokens, piece).await? {
                Some(Err(_)) => return Ok(Met { answer: Err(SendError::broken_off()), cached_tokens }),
                Some(Ok(frame)) => Some(frame),
                None => None,
            }
        } else {
            None
        };
        if first.as_ref().and_then(Frame::data_ref).is_some_and(|piece| says_failure(piece)) {
            word_of(&mut prefill).await?;
        }
        // How it ends is counted, and of no more consequence: the KV has come.
        let work = prefill.map(|prefill| -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move { drop(prefill.await) })
        });
        let answer = answer.map(|answer| answer.with(Beside { first, work, held: Box::new(rooms) }));
        Ok(Met { answer: Ok(answer), cached_tokens })
    }

    /// The other leg.
    fn prefill(self, choice: Choice, body: Bytes) -> Prefill {
        Box::pin(async move {
            let (worker, began) = (Arc::clone(&choice.worker), Instant::now());
            self.asked.record.prefilled_by(&worker);
            let heard = {
                let asking = pin!(self.ask(&worker, body));
                silence::unless_lost(&self.router, &worker, choice.ticket.sent(), asking).await
            };
            let ended = match heard {
                Ok(Heard::Read(Ok(usage))) => Ok(self.computed(choice, usage)),
                Ok(Heard::Read(Err(said))) => Err(Fallen { choice, how: Failing::Said(said) }),
                Ok(Heard::Refused(answer)) => Err(Fallen { choice, how: Failing::Answered(answer) }),
                Err(error) => Err(Fallen { choice, how: Failing::Broke(error) }),
            };
            let legs = &self.metrics.prefill_legs;
            legs.seconds.observe((Instant::now() - began).as_secs_f64());
            let outcome = match &ended {
                Ok(_) => "done",
                Err(fallen) => fallen.how.charge().map_or("lost", Charge::as_str),
            };
            legs.legs.with_label_values(&[worker.name.as_str(), outcome]).inc();
            tracing::debug!(worker = %worker.name, outcome, "a worker computes a prompt for another");
            ended.map_err(Box::new)
        })
    }

    async fn ask(&self, worker: &Worker, body: Bytes) -> Result<Heard, SendError> {
        let answer = self.upstream.send(worker.origin(), self.asked.outgoing(body, worker)).await?;
        if !answer.status().is_success() {
            return Ok(Heard::Refused(answer));
        }
        let kind = answer.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        let is_stream = kind.starts_with(b"text/event-stream");
        let body = Limited::new(answer.into_body(), PREFILL_ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|_| SendError::broken_off())?.to_bytes();
        Ok(Heard::Read(read_prefill(is_stream, &body)))
    }

    fn computed(&self, choice: Choice, usage: Option<Usage>) -> Option<u64> {
        let Choice { worker, pick, mut ticket, .. } = choice;
        let now = self.router.now();
        self.router.worker_answered(&worker, now);
        ticket.stream_began(now);
        ticket.judge_at(Verdict::Good, now);
        let usage = usage?;
        self.router.learn(&self.asked.info, &pick, &usage, (&ticket, now));
        usage.cached_tokens()
    }
}

/// What the worker that computes says.
enum Heard {
    Read(Result<Option<Usage>, NotComputed>),
    Refused(http::Response<Answer>),
}

/// Waits for `work`, and meanwhile for the other leg; an error where that fails first.
async fn beside<T>(
    prefill: &mut Option<Prefill>,
    cached_tokens: &mut u64,
    mut work: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Box<Fallen>> {
    poll_fn(|cx| {
        if let Some(leg) = prefill
            && let Poll::Ready(ended) = leg.as_mut().poll(cx)
        {
            *prefill = None;
            *cached_tokens = ended?.unwrap_or(*cached_tokens);
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}

/// The worker that was to answer fails, mostly because its partner does, which is heard of a little later: an
/// error if so.
async fn word_of(prefill: &mut Option<Prefill>) -> Result<(), Box<Fallen>> {
    let Some(leg) = prefill else { return Ok(()) };
    let Ok(ended) = clock::timeout(PARTNER_GRACE, leg).await else { return Ok(()) };
    *prefill = None;
    ended.map(drop)
}
