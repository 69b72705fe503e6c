//! The answer's body on its way from the worker to the client. It is polled through: no task, no channel, no buffer
//! but an unfinished event, so a slow client slows the worker and a dropped body aborts the generation.
//!
//! When the worker breaks off, another one goes on with the stream where that can be (`resume.rs`). Otherwise it ends
//! honestly: whole events only, then one error event, no `[DONE]`, and an aborted body. Other answers pass byte for byte; a
//! broken one is aborted.

mod patience;

use std::{
    pin::Pin,
    sync::{Arc, LazyLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use keyway_core::{breaker::Verdict, pick::Pick};
use keyway_wire::openai::Usage;
use memchr::memmem::Finder;

use self::patience::Patience;
use crate::{
    body::{BoxError, Response, ResponseBody},
    clock::{self, Instant, Sleep},
    config::Timeouts,
    error::Error,
    headers::strip_hop_by_hop,
    limits::{ABORT_DELAY, ALIVE_NOTE_INTERVAL, MAX_EVENT_BYTES},
    metrics::ModelSeries,
    record::Record,
    request::RequestInfo,
    resume::{Again, Begun, Lifeline, Obstacle, Resumer},
    routing::Ticket,
    sse::EventSplitter,
    upstream::Answer,
    usage::{self, UsageTap, hide::UsageFilter},
};

/// How an event begins by which a worker says that it failed. Made once: to set a search up takes as long as to look
/// through an event.
static ERROR_EVENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"data: {\"error\""));

/// Turns a worker's answer into the client's. What may be resumed has a lifeline.
pub fn relay(
    answer: http::Response<Answer>,
    told: Told,
    (lifeline, resumer): (Result<Box<Lifeline>, Obstacle>, Arc<Resumer>),
    timeouts: Timeouts,
) -> Response {
    let (mut parts, upstream) = answer.into_parts();
    strip_hop_by_hop(&mut parts.headers);
    let plain = !parts.headers.contains_key(header::CONTENT_ENCODING);
    let is = |kind: &str| {
        parts.headers.get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(kind.as_bytes()))
    };
    let (events, tap) = match (plain, is("text/event-stream"), is("application/json")) {
        (true, true, _) => (Some(EventSplitter::new(MAX_EVENT_BYTES)), UsageTap::Events(None)),
        (true, _, true) => (None, UsageTap::Body(Vec::new(), 0)),
        _ => (None, UsageTap::Blind),
    };
    // Only what comes as events, and well, is resumed: the rest is the worker's word on the request.
    let resumable = events.is_some() && parts.status.is_success();
    let body = Relay {
        upstream: Some(upstream),
        events,
        lifeline: if resumable { lifeline } else { Err(Obstacle::Path) },
        resumer,
        state: State::Relaying,
        patience: Patience::new(timeouts, told.record.started()),
        account: Account {
            last_event: None,
            began: false,
            alive_noted: None,
            status: parts.status,
            failed_in_band: false,
            done: false,
            tap,
            told,
        },
    };
    let body = body.started(parts.status);
    http::Response::from_parts(parts, ResponseBody::relay(body))
}

/// The body. The ticket in its account is the worker's load; it goes when the body goes.
#[derive(Debug)]
pub struct Relay {
    /// `None` once it failed: its connection is closed before the client has heard of it.
    upstream: Option<Answer>,
    events: Option<EventSplitter>,
    lifeline: Result<Box<Lifeline>, Obstacle>,
    resumer: Arc<Resumer>,
    state: State,
    patience: Patience,
    account: Account,
}

#[derive(Debug)]
enum State {
    Relaying,
    /// Another worker is asked for the rest; if none goes on, this is the error.
    Resuming(Again, Error),
    /// The answer is given up.
    Failed(Error),
    /// The error event was handed out; the abort follows once it has left.
    Aborting(Pin<Box<Sleep>>, Error),
    Ended,
}

impl Relay {
    fn started(mut self, status: StatusCode) -> Self {
        if self.events.is_none() && status.is_success() {
            // An unstreamed answer's head comes when its tokens are computed.
            self.account.told.ticket.first_token();
        }
        if self.upstream_ended() {
            self.complete();
        }
        self
    }

    fn upstream_ended(&self) -> bool {
        self.upstream.as_ref().is_none_or(Answer::is_end_stream)
    }

    fn complete(&mut self) {
        self.state = State::Ended;
        self.account.complete();
    }

    /// What may be passed on of the bytes that came; nothing while an event is unfinished.
    fn pass(&mut self, bytes: Bytes) -> Result<Bytes, BoxError> {
        let mut out = match &mut self.events {
            Some(events) => events.push(bytes)?,
            None => bytes,
        };
        let mut broke = false;
        if let (Ok(lifeline), false) = (&mut self.lifeline, out.is_empty()) {
            let passed = lifeline.pass(out);
            (out, broke) = (passed.bytes, passed.broke);
            if let Some(obstacle) = passed.over {
                self.lifeline = Err(obstacle);
            }
        }
        if !out.is_empty() {
            out = self.account.saw(out, self.events.is_some());
        }
        if broke {
            self.lose(&"its engine is gone", Error::StreamLost);
        } else if self.upstream_ended()
            && self.events.as_ref().is_none_or(EventSplitter::is_empty)
            && !self.lacks_end()
        {
            // Bodies of known length are not polled again after their last byte.
            self.complete();
        }
        Ok(out)
    }

    /// Whether the stream is known to have more to say than was said.
    fn lacks_end(&self) -> bool {
        !self.account.done && self.lifeline.as_ref().is_ok_and(|lifeline| lifeline.must_be_done())
    }

    fn end(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        if self.lacks_end() {
            self.lose(&"it ended early", Error::StreamLost);
            return None;
        }
        let tail = self.events.as_mut().map(EventSplitter::take_tail).filter(|tail| !tail.is_empty());
        let tail = tail.map(|tail| self.account.saw(tail, true)).filter(|tail| !tail.is_empty());
        self.complete();
        tail.map(|tail| Ok(Frame::data(tail)))
    }

    /// The upstream failed, maybe after the stream had said all it had to say.
    fn break_off(&mut self, cause: &dyn std::fmt::Display) {
        if self.account.done {
            self.complete();
        } else {
            self.lose(cause, Error::StreamLost);
        }
    }

    /// The worker is given up: another one is asked for the rest, or the answer has failed.
    fn lose(&mut self, cause: &dyn std::fmt::Display, error: Error) {
        let told = &mut self.account.told;
        tracing::warn!(id = told.record.id(), %cause, "the worker's answer broke off");
        self.upstream = None;
        // Slow in all is no failure of the worker; to stop or to stall is one.
        if matches!(error, Error::Deadline { .. }) {
            self.state = State::Failed(error);
            return;
        }
        told.ticket.judge(Verdict::Bad);
        self.state = match self.lifeline.as_ref().map(|lifeline| lifeline.again(told.ticket.give_back())) {
            Ok(Ok(again)) => State::Resuming(again, error),
            Err(obstacle) => self.not_resumed(*obstacle, error),
            Ok(Err(obstacle)) => self.not_resumed(obstacle, error),
        };
    }

    fn not_resumed(&self, obstacle: Obstacle, error: Error) -> State {
        if self.events.is_some() {
            self.resumer.not_resumed(obstacle);
        }
        State::Failed(error)
    }

    /// Another worker's stream takes the place of the broken one; of an event that was cut, nothing is left.
    fn go_on(&mut self, begun: Begun) {
        if let Ok(lifeline) = &mut self.lifeline {
            lifeline.begun(&begun);
        }
        self.events = Some(EventSplitter::new(MAX_EVENT_BYTES));
        self.account.told.pick = begun.pick;
        self.account.told.ticket = begun.ticket;
        self.account.began = false;
        self.upstream = Some(begun.answer);
        self.state = State::Relaying;
    }

    /// The last words of an answer that has failed.
    fn fail(&mut self, error: Error) -> Result<Frame<Bytes>, BoxError> {
        self.account.told.record.outcome(error.code());
        if self.events.is_some() {
            let event = error.to_body().to_event().into();
            self.state = State::Aborting(Box::pin(clock::sleep(ABORT_DELAY)), error);
            return Ok(Frame::data(event));
        }
        self.state = State::Ended;
        Err(error.into())
    }
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
                State::Failed(error) => {
                    let error = error.clone();
                    return Poll::Ready(Some(this.fail(error)));
                }
                State::Resuming(again, error) => {
                    match Pin::new(again).poll(cx) {
                        Poll::Ready(Ok(begun)) => this.go_on(begun),
                        Poll::Ready(Err(obstacle)) => {
                            let error = error.clone();
                            this.state = this.not_resumed(obstacle, error);
                        }
                        Poll::Pending => {
                            let error = ready!(this.patience.poll(None, cx));
                            this.state = State::Failed(error);
                        }
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
                    let last = this.account.last_event.filter(|_| this.account.began);
                    let error = ready!(this.patience.poll(last, cx));
                    this.lose(&"it took too long", error);
                    continue;
                }
            };
            match frame.into_data() {
                Ok(bytes) => match this.pass(bytes) {
                    Ok(out) if out.is_empty() => {}
                    Ok(out) => return Poll::Ready(Some(Ok(Frame::data(out)))),
                    Err(error) => this.break_off(&error),
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

/// What is counted of an answer as it passes.
#[derive(Debug)]
struct Account {
    last_event: Option<Instant>,
    /// Whether the worker that streams now has said something.
    began: bool,
    /// When it was last noted that the worker says something: it may have been silent since its head.
    alive_noted: Option<Instant>,
    status: StatusCode,
    failed_in_band: bool,
    /// Whether `[DONE]` was passed on.
    done: bool,
    tap: UsageTap,
    told: Told,
}

/// What is known of a request when its answer begins.
#[derive(Debug)]
pub struct Told {
    /// Its weight on the worker.
    pub ticket: Ticket,
    /// What routing read of it.
    pub info: Arc<RequestInfo>,
    /// Why it went there.
    pub pick: Pick,
    /// Its record.
    pub record: Arc<Record>,
    /// The series of its model.
    pub series: Arc<ModelSeries>,
    /// What becomes of the usage in a stream.
    pub usage: UsageFilter,
}

impl Account {
    /// Counts what came; returns what the client is to see of it.
    fn saw(&mut self, bytes: Bytes, is_event: bool) -> Bytes {
        let mentions_usage = is_event && usage::is_mentioned(&bytes);
        self.tap.see(&bytes, mentions_usage);
        if !is_event {
            return bytes;
        }
        let bytes = self.told.usage.pass(bytes, mentions_usage);
        if bytes.is_empty() {
            return bytes;
        }
        let now = Instant::now();
        if self.alive_noted.is_none_or(|noted| now - noted > ALIVE_NOTE_INTERVAL) {
            self.alive_noted = Some(now);
            self.told.ticket.still_answering();
        }
        let first_of_worker = !std::mem::replace(&mut self.began, true);
        if let Some(last) = self.last_event.replace(now) {
            self.told.series.itl().observe((now - last).as_secs_f64());
            if first_of_worker {
                // How long it took says nothing of its speed: it had part of the answer to compute too.
                self.told.ticket.first_token();
            }
        } else {
            let ttft = now - self.told.record.started();
            self.told.series.ttft().observe(ttft.as_secs_f64());
            self.told.record.first_token(ttft);
            self.told.ticket.stream_began();
        }
        self.failed_in_band |= ERROR_EVENT.find(&bytes).is_some();
        self.done |= bytes.trim_ascii_end().ends_with(b"[DONE]");
        bytes
    }

    fn complete(&mut self) {
        let outcome = match (self.status.is_success(), self.failed_in_band) {
            (true, false) => "complete",
            (true, true) => "worker_error_event",
            (false, _) => "worker_status",
        };
        let now = self.told.ticket.router().now();
        if let Some(verdict) = verdict(self.status, self.failed_in_band) {
            self.told.ticket.judge_at(verdict, now);
        }
        self.told.record.outcome(outcome);
        if outcome == "complete" && self.done {
            self.told.usage.ended();
        }
        if let Some(usage) = self.tap.finish() {
            self.count(usage, now);
        }
    }

    fn count(&mut self, usage: Usage, now: Duration) {
        self.told.ticket.answered(usage.completion_tokens);
        let reported = usage.cached_tokens().unwrap_or(0);
        self.told.series.tokens(
            usage.prompt_tokens,
            usage.completion_tokens,
            self.told.pick.matched_tokens,
            reported,
        );
        let router = self.told.ticket.router();
        let miss = router.learn(&self.told.info, &self.told.pick, &usage, (&self.told.ticket, now));
        self.told.record.usage(usage, miss);
    }
}

/// What a whole answer says of the worker. "Not now" (429, 503) is neither good nor bad; nor is what may be the request's fault: a
/// refusal (4xx), an error inside a stream. A failure that was looked into has its verdict by now, and keeps it.
fn verdict(status: StatusCode, failed_in_band: bool) -> Option<Verdict> {
    match status.as_u16() {
        400..500 | 503 | 529 => None,
        500.. => Some(Verdict::Bad),
        _ if failed_in_band => None,
        _ => Some(Verdict::Good),
    }
}
