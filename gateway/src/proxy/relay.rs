//! The answer's body on its way from the worker to the client. It is polled through: no task, no channel, no
//! buffer but an unfinished event, so a slow client slows the worker and a dropped body aborts the
//! generation.
//!
//! When the worker breaks off, or says itself that it failed, another one goes on with the stream where that
//! can be (`resume.rs`). Otherwise it ends honestly: whole events only, then one error event in the API's own
//! shape, no `[DONE]`, and an aborted body. Other answers pass byte for byte; a broken one is aborted.

mod account;
mod failure;
mod meter;
mod notable;
mod patience;
mod screen;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use keyway_core::breaker::Verdict;

pub use self::account::RelayedRequest;
use self::{
    account::Account,
    failure::Failure,
    meter::{Meter, Metered, is_media},
    patience::{Due, Patience},
    screen::{Failing, Screen, Seen},
};
use crate::{
    api::{Api, AtFault},
    clock::{self, Instant, Sleep},
    config::Timeouts,
    error::Error,
    limits::ABORT_DELAY,
    metrics::Obstacle,
    proxy::{
        body::{BoxError, Response, ResponseBody},
        locations::lead_back,
        resume::{Again, Begun, ResumeState, Resumer},
        silence,
    },
    routing::Ticket,
    sse::EventSplitter,
    upstream::Answer,
    usage::UsageTap,
};

/// What bounds an answer, and in whose words it is.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// The API that was asked.
    pub api: Api,
    /// How long its parts may take.
    pub timeouts: Timeouts,
    /// Largest event of a stream.
    pub max_event_bytes: usize,
}

/// Turns a worker's answer into the client's. What may be resumed has a lifeline.
pub fn relay(
    (answer, began): (http::Response<Answer>, Instant),
    told: RelayedRequest,
    (lifeline, resumer): (Result<Box<ResumeState>, Obstacle>, Arc<Resumer>),
    terms: Terms,
) -> Response {
    let (mut parts, upstream) = answer.into_parts();
    if parts.status == StatusCode::NO_CONTENT {
        // RFC 9110, section 8.6.
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    lead_back(&mut parts.headers, &told.ticket.worker().config().url);
    let plain = !parts.headers.contains_key(header::CONTENT_ENCODING);
    let kind = parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let (events, tap) = match kind.filter(|_| plain).unwrap_or_default() {
        kind if kind.starts_with(b"text/event-stream") => {
            (Some(EventSplitter::new(terms.max_event_bytes)), UsageTap::events())
        }
        kind if kind.starts_with(b"application/json") => (None, UsageTap::body()),
        _ => (None, UsageTap::Blind),
    };
    let meter = told.info.metered.then(|| {
        let (info, record) = (&told.info, Arc::clone(&told.record));
        let is_text = kind.is_none_or(|kind| !is_media(kind));
        let (work, background, status) = (info.work, info.background, parts.status);
        Box::new(Meter::new(record, Metered { api: terms.api, work, background, status, is_text }))
    });
    if events.is_some() {
        // What is added to the stream, or taken out of it, is not in its length.
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    // Only what comes as events, and well, is resumed: the rest is the worker's word on the request.
    let is_answer = parts.status.is_success();
    let resumable = events.is_some() && is_answer;
    // In its box from the first: it is large.
    let mut body = Box::new(Relay {
        until_closed: upstream.ends_with_connection(),
        upstream: Some(upstream),
        events,
        screen: Screen::new(if is_answer { terms.api } else { Api::Other }),
        lifeline: if resumable { lifeline } else { Err(Obstacle::Path) },
        resumer,
        state: State::Relaying,
        began,
        patience: Patience::new(&terms.timeouts, told.record.started(), began),
        account: Account::new(parts.status, (tap, meter), told, began),
        api: terms.api,
        max_event_bytes: terms.max_event_bytes,
    });
    body.start(parts.status);
    http::Response::from_parts(parts, ResponseBody::relay(body))
}

/// The body. The ticket in its account is the worker's load; it goes when the body goes.
#[derive(Debug)]
pub struct Relay {
    /// `None` once it failed: its connection is closed before the client has heard of it.
    upstream: Option<Answer>,
    /// Its end is the connection's: one that was cut looks the same.
    until_closed: bool,
    /// A stream's; other answers have none.
    events: Option<EventSplitter>,
    screen: Screen,
    lifeline: Result<Box<ResumeState>, Obstacle>,
    resumer: Arc<Resumer>,
    state: State,
    /// When the answer at hand began.
    began: Instant,
    patience: Patience,
    account: Account,
    api: Api,
    max_event_bytes: usize,
}

#[derive(Debug)]
enum State {
    Relaying,
    /// Another worker is asked for the rest; if none goes on, this is how the answer fails.
    Resuming(Again, Box<Failure>),
    /// The answer is given up.
    Failed(Box<Failure>),
    /// The error event was handed out; the abort follows once it has left.
    Aborting(Pin<Box<Sleep>>, Error),
    Ended,
}

impl Relay {
    fn start(&mut self, status: StatusCode) {
        if self.events.is_none() && status.is_success() && self.upstream_ended() {
            self.account.first_token(self.began);
        }
        self.complete_at_its_end(self.began);
    }

    fn upstream_ended(&self) -> bool {
        self.upstream.as_ref().is_none_or(Answer::is_end_stream)
    }

    fn complete(&mut self, now: Instant) {
        self.state = State::Ended;
        self.account.complete((self.screen.is_faulty(), self.screen.is_done()), now);
    }

    /// Bodies of known length are not polled again after their last byte. What ends too early is seen by who
    /// polls again.
    fn complete_at_its_end(&mut self, now: Instant) {
        let nothing_left = self.events.as_ref().is_none_or(EventSplitter::is_empty);
        if self.upstream_ended() && nothing_left && !self.lacks_end() {
            self.complete(now);
        }
    }

    /// What may be passed on of the bytes that came; nothing while an event is unfinished.
    fn pass(&mut self, bytes: Bytes) -> Result<Bytes, Error> {
        let now = Instant::now();
        self.account.hears(now);
        let Some(events) = &mut self.events else {
            self.account.saw_part(&bytes, now);
            self.complete_at_its_end(now);
            return Ok(bytes);
        };
        let limit_bytes = self.max_event_bytes;
        let events = events.push(bytes).map_err(|_| Error::EventTooLarge { limit_bytes })?;
        let out = self.pass_events(events, now);
        if matches!(self.state, State::Relaying) {
            self.complete_at_its_end(now);
        }
        Ok(out)
    }

    /// What becomes of whole events.
    fn pass_events(&mut self, events: Bytes, now: Instant) -> Bytes {
        if events.is_empty() {
            return events;
        }
        let seen = self.screen.see(&events);
        let Some(failing) = seen.failing else {
            return self.let_through(events, &seen, now);
        };
        if self.goes_on_elsewhere(&events, failing) {
            return self.let_through(events.slice(..failing.from), &seen, now);
        }
        if !failing.raises {
            // No worker goes on; clients would take it for content.
            let before = self.let_through(events.slice(..failing.from), &seen, now);
            self.upstream = None;
            self.state = State::Failed(Box::new(Failure::of(&events, failing)));
            return before;
        }
        self.screen.failed();
        self.let_through(events, &Seen { binds: true, ..seen }, now)
    }

    /// Lets another worker go on with a stream whose own one says that it failed. Returns whether one is
    /// looked for. Before there is content a request's own fault is what several workers say, whatever words
    /// they use.
    fn goes_on_elsewhere(&mut self, events: &Bytes, failing: Failing) -> bool {
        let blames_request = failing.fault == AtFault::Request;
        if blames_request && self.account.has_content() {
            return false;
        }
        let ticket = &mut self.account.told.ticket;
        let is_known = || self.lifeline.as_ref().is_ok_and(|lifeline| lifeline.is_own_fault());
        if blames_request && is_known() && ticket.worker().standing.may_pass() {
            ticket.excuse();
            return false;
        }
        // A worker that says that it has failed is in no doubt: the whole of the budget is for that.
        match again(&self.lifeline, ticket, blames_request) {
            Ok(again) => {
                let id = self.account.told.record.id();
                tracing::warn!(id, aborts = failing.aborts, "the worker says that its answer failed");
                self.account.failed_in_band(failing.fault, true);
                self.upstream = None;
                self.state = State::Resuming(again, Box::new(Failure::of(events, failing)));
                true
            }
            Err(obstacle) => {
                self.account.failed_in_band(failing.fault, false);
                self.nobody_goes_on();
                self.resumer.not_resumed(obstacle);
                false
            }
        }
    }

    /// Events on their way to the client.
    fn let_through(&mut self, events: Bytes, seen: &Seen, now: Instant) -> Bytes {
        let (mut out, mut mentions_usage) = (events, seen.mentions_usage);
        if let (Ok(lifeline), false) = (&mut self.lifeline, out.is_empty()) {
            let as_seen = out.as_ptr_range();
            let passed = lifeline.pass(out, seen.binds);
            out = passed.bytes;
            mentions_usage |= out.as_ptr_range() != as_seen;
            if let Some(obstacle) = passed.over {
                self.lifeline = Err(obstacle);
            }
        }
        if out.is_empty() { out } else { self.account.saw(out, (seen.generated, mentions_usage), now) }
    }

    /// Whether the answer is known to have more to say than was said.
    fn lacks_end(&self) -> bool {
        if self.events.is_none() {
            return self.until_closed && self.account.is_whole_json() == Some(false);
        }
        let must_be_done = self.lifeline.as_ref().is_ok_and(|lifeline| lifeline.must_be_done());
        !self.screen.may_end() || (must_be_done && !self.screen.is_done() && !self.screen.is_faulty())
    }

    /// The upstream has ended as it may.
    fn end(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let tail = self.events.as_mut().map(EventSplitter::take_tail).unwrap_or_default();
        let is_whole = self.screen.is_whole(&tail);
        let now = Instant::now();
        let out = if is_whole { self.pass_events(tail, now) } else { Bytes::new() };
        if matches!(self.state, State::Relaying) {
            if (is_whole || self.screen.is_done()) && !self.lacks_end() {
                self.complete(now);
            } else {
                self.lose(&"it ended early", Error::StreamLost);
            }
        }
        (!out.is_empty()).then_some(Ok(Frame::data(out)))
    }

    /// The upstream failed, maybe after the stream had said all it had to say.
    fn break_off(&mut self, cause: &dyn std::fmt::Display) {
        if self.screen.is_done() || self.screen.is_faulty() {
            self.complete(Instant::now());
        } else {
            self.lose(cause, Error::StreamLost);
        }
    }

    /// Looks whether the worker is still there to go on.
    fn look(&mut self) {
        let ticket = &self.account.told.ticket;
        let since = self.account.last_piece.unwrap_or(self.began);
        if silence::is_lost(ticket.router(), ticket.worker(), ticket.router().at(since)) {
            self.lose(&"it is silent, and its worker seems dead", Error::StreamLost);
        }
    }

    /// The worker is given up: another one is asked for the rest, or the answer has failed.
    fn lose(&mut self, cause: &dyn std::fmt::Display, error: Error) {
        let has_content = self.account.has_content();
        let told = &mut self.account.told;
        tracing::warn!(id = told.record.id(), %cause, "the worker's answer broke off");
        self.upstream = None;
        // Slow in all is no failure of the worker; to stop or to stall is one.
        if matches!(error, Error::Deadline { .. }) {
            self.state = State::Failed(error.into());
            return;
        }
        told.ticket.judge(Verdict::Bad);
        if let (Error::StreamLost, false, Ok(lifeline)) = (&error, has_content, &self.lifeline) {
            told.suspect = lifeline.broke_unbegun(told.ticket.worker().id);
        }
        self.state = match again(&self.lifeline, &mut told.ticket, false) {
            Ok(again) => State::Resuming(again, error.into()),
            Err(obstacle) => self.not_resumed(obstacle, error.into()),
        };
    }

    /// No other worker answers a stream that began with an error. What several blame it for is the request's
    /// own fault.
    fn nobody_goes_on(&mut self) {
        if let (true, Ok(lifeline)) = (self.account.nobody_goes_on(), &self.lifeline) {
            lifeline.note_own_fault();
        }
    }

    fn not_resumed(&self, obstacle: Obstacle, failure: Box<Failure>) -> State {
        if self.events.is_some() {
            self.resumer.not_resumed(obstacle);
        }
        State::Failed(failure)
    }

    /// An event is larger than is held: the worker has done nothing wrong, and another one would say the
    /// same.
    fn give_up(&mut self, error: Error) {
        tracing::warn!(id = self.account.told.record.id(), %error, "an answer cannot be relayed");
        self.upstream = None;
        self.state = State::Failed(error.into());
    }

    /// Another worker's stream takes the place of the broken one; of an event that was cut, nothing is left.
    fn go_on(&mut self, begun: Begun) {
        if let Ok(lifeline) = &mut self.lifeline {
            lifeline.begun(&begun);
        }
        self.events = Some(EventSplitter::new(self.max_event_bytes));
        self.screen.goes_on();
        self.began = Instant::now();
        if begun.suspect.is_some() {
            self.account.told.suspect = begun.suspect;
        }
        self.account.goes_on(begun.pick, begun.ticket, self.began);
        self.until_closed = begun.answer.ends_with_connection();
        self.upstream = Some(begun.answer);
        self.state = State::Relaying;
    }

    /// The last words of an answer that has failed.
    fn fail(&mut self, failure: Failure) -> Result<Frame<Bytes>, BoxError> {
        self.account.told.record.outcome(failure.outcome());
        self.account.failed();
        if self.events.is_none() {
            self.state = State::Ended;
            return Err(failure.error.into());
        }
        let event = failure.last_words(self.api, self.screen.events());
        let error = failure.error;
        self.state = State::Aborting(Box::pin(clock::sleep(ABORT_DELAY)), error);
        Ok(Frame::data(event))
    }
}

/// The search for another worker, where one can go on.
fn again(
    lifeline: &Result<Box<ResumeState>, Obstacle>,
    ticket: &mut Ticket,
    in_doubt: bool,
) -> Result<Again, Obstacle> {
    lifeline.as_ref().map_err(|obstacle| *obstacle).and_then(|lifeline| lifeline.again(ticket, in_doubt))
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        loop {
            match &mut this.state {
                State::Ended => return Poll::Ready(None),
                State::Aborting(delay, error) => {
                    ready!(delay.as_mut().poll(cx));
                    let error = error.clone();
                    this.state = State::Ended;
                    return Poll::Ready(Some(Err(error.into())));
                }
                State::Failed(failure) => {
                    let failure = failure.clone();
                    return Poll::Ready(Some(this.fail(*failure)));
                }
                State::Resuming(again, failure) => {
                    match Pin::new(again).poll(cx) {
                        Poll::Ready(Ok(begun)) => this.go_on(begun),
                        Poll::Ready(Err(obstacle)) => {
                            let failure = failure.clone();
                            this.nobody_goes_on();
                            this.state = this.not_resumed(obstacle, failure);
                        }
                        Poll::Pending => match ready!(this.patience.poll(None, cx)) {
                            Due::Look => {}
                            Due::Over(error) => this.state = State::Failed(error.into()),
                        },
                    }
                    continue;
                }
                State::Relaying => {}
            }
            let Some(upstream) = &mut this.upstream else { return Poll::Ready(None) };
            let frame = match Pin::new(upstream).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => {
                    this.break_off(&error);
                    continue;
                }
                Poll::Ready(None) => match this.end() {
                    Some(tail) => return Poll::Ready(Some(tail)),
                    None => continue,
                },
                Poll::Pending => {
                    match ready!(this.patience.poll(this.account.last_piece, cx)) {
                        Due::Look => this.look(),
                        Due::Over(error) => this.lose(&"it took too long", error),
                    }
                    continue;
                }
            };
            match frame.into_data() {
                Ok(bytes) => match this.pass(bytes) {
                    Ok(out) if out.is_empty() => {}
                    Ok(out) => return Poll::Ready(Some(Ok(Frame::data(out)))),
                    Err(error) => this.give_up(error),
                },
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.upstream {
            Some(upstream) if self.events.is_none() => upstream.size_hint(),
            _ => SizeHint::default(),
        }
    }
}
