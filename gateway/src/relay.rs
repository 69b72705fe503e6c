//! The answer's body on its way from the worker to the client. It is polled through: no task, no channel, no buffer
//! but an unfinished event, so a slow client slows the worker and a dropped body aborts the generation.
//!
//! A stream ends honestly: whole events only, and when the worker breaks off, one error event, no `[DONE]`, and an
//! aborted body. Other answers pass byte for byte; a broken one is aborted.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use keyway_core::pick::Pick;
use keyway_wire::openai::Usage;
use memchr::memmem;

use crate::{
    body::{BoxError, Response, ResponseBody},
    clock::{self, Instant, Sleep},
    error::Error,
    headers::strip_hop_by_hop,
    limits::{ABORT_DELAY, ALIVE_NOTE_INTERVAL, MAX_EVENT_BYTES},
    metrics::ModelSeries,
    record::Record,
    request::RequestInfo,
    routing::Ticket,
    sse::EventSplitter,
    upstream::Answer,
    usage::UsageTap,
};

/// Turns a worker's answer into the client's.
pub fn relay(
    answer: http::Response<Answer>,
    ticket: Ticket,
    info: RequestInfo,
    pick: Pick,
    record: Arc<Record>,
    series: Arc<ModelSeries>,
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
    let body = Relay {
        upstream,
        events,
        state: State::Relaying,
        account: Account {
            last_event: None,
            alive_noted: Instant::now(),
            succeeded: parts.status.is_success(),
            failed_in_band: false,
            done: false,
            tap,
            ticket,
            info,
            pick,
            record,
            series,
        },
    };
    let body = body.started(parts.status);
    http::Response::from_parts(parts, ResponseBody::relay(body))
}

/// The body. The ticket in its account is the worker's load; it goes when the body goes.
#[derive(Debug)]
pub struct Relay {
    upstream: Answer,
    events: Option<EventSplitter>,
    state: State,
    account: Account,
}

#[derive(Debug)]
enum State {
    Relaying,
    /// The error event was handed out; the abort follows once it has left.
    Aborting(Pin<Box<Sleep>>),
    Ended,
}

impl Relay {
    fn started(mut self, status: StatusCode) -> Self {
        if self.events.is_none() && status.is_success() {
            // An unstreamed answer's head comes when its tokens are computed.
            self.account.ticket.first_token();
        }
        if self.upstream.is_end_stream() {
            self.complete();
        }
        self
    }

    fn complete(&mut self) {
        self.state = State::Ended;
        self.account.complete();
    }

    /// What may be passed on of the bytes that came; nothing while an event is unfinished.
    fn pass(&mut self, bytes: Bytes) -> Result<Bytes, BoxError> {
        let out = match &mut self.events {
            Some(events) => events.push(bytes)?,
            None => bytes,
        };
        if !out.is_empty() {
            self.account.saw(&out, self.events.is_some());
        }
        // Bodies of known length are not polled again after their last byte.
        if self.upstream.is_end_stream() && self.events.as_ref().is_none_or(EventSplitter::is_empty) {
            self.complete();
        }
        Ok(out)
    }

    fn end(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let tail = self.events.as_mut().map(EventSplitter::take_tail).filter(|tail| !tail.is_empty());
        if let Some(tail) = &tail {
            self.account.saw(tail, true);
        }
        self.complete();
        tail.map(|tail| Ok(Frame::data(tail)))
    }

    /// The upstream failed. `None` where the stream had said all it had to say.
    fn break_off(&mut self, cause: &dyn std::fmt::Display) -> Option<Result<Frame<Bytes>, BoxError>> {
        if self.account.done {
            self.complete();
            return None;
        }
        Some(self.lose(cause))
    }

    fn lose(&mut self, cause: &dyn std::fmt::Display) -> Result<Frame<Bytes>, BoxError> {
        let record = &self.account.record;
        tracing::warn!(id = record.id(), %cause, "the worker's answer broke off");
        record.outcome(Error::StreamLost.code());
        if self.events.is_some() {
            self.state = State::Aborting(Box::pin(clock::sleep(ABORT_DELAY)));
            return Ok(Frame::data(Error::StreamLost.to_body().to_event().into()));
        }
        self.state = State::Ended;
        Err(Error::StreamLost.into())
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
                State::Aborting(delay) => {
                    ready!(delay.as_mut().poll(cx));
                    this.state = State::Ended;
                    return Poll::Ready(Some(Err(Error::StreamLost.into())));
                }
                State::Relaying => {}
            }
            let frame = match ready!(Pin::new(&mut this.upstream).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(this.break_off(&error)),
                None => return Poll::Ready(this.end()),
            };
            match frame.into_data() {
                Ok(bytes) => match this.pass(bytes) {
                    Ok(out) if out.is_empty() => {}
                    Ok(out) => return Poll::Ready(Some(Ok(Frame::data(out)))),
                    Err(error) => return Poll::Ready(this.break_off(&error)),
                },
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        if self.events.is_some() { SizeHint::default() } else { self.upstream.size_hint() }
    }
}

/// What is counted of an answer as it passes.
#[derive(Debug)]
struct Account {
    last_event: Option<Instant>,
    alive_noted: Instant,
    succeeded: bool,
    failed_in_band: bool,
    /// Whether `[DONE]` was passed on.
    done: bool,
    tap: UsageTap,
    ticket: Ticket,
    info: RequestInfo,
    pick: Pick,
    record: Arc<Record>,
    series: Arc<ModelSeries>,
}

impl Account {
    fn saw(&mut self, bytes: &Bytes, is_event: bool) {
        self.tap.see(bytes);
        if !is_event {
            return;
        }
        let now = Instant::now();
        if now - self.alive_noted > ALIVE_NOTE_INTERVAL {
            self.alive_noted = now;
            self.ticket.still_answering();
        }
        if let Some(last) = self.last_event.replace(now) {
            self.series.itl().observe((now - last).as_secs_f64());
        } else {
            let ttft = now - self.record.started();
            self.series.ttft().observe(ttft.as_secs_f64());
            self.record.first_token(ttft);
            self.ticket.stream_began();
        }
        self.failed_in_band |= memmem::find(bytes, b"data: {\"error\"").is_some();
        self.done |= bytes.trim_ascii_end().ends_with(b"[DONE]");
    }

    fn complete(&mut self) {
        let outcome = match (self.succeeded, self.failed_in_band) {
            (true, false) => "complete",
            (true, true) => "worker_error_event",
            (false, _) => "worker_status",
        };
        self.record.outcome(outcome);
        if let Some(usage) = self.tap.finish() {
            self.count(usage);
        }
    }

    fn count(&self, usage: Usage) {
        let reported = usage.cached_tokens().unwrap_or(0);
        self.series.tokens(usage.prompt_tokens, usage.completion_tokens, self.pick.matched_tokens, reported);
        self.ticket.router().learn(&self.info, &self.pick, &usage, &self.ticket);
        self.record.usage(usage);
    }
}
