//! A request that is over, as spans: one of the gateway, with where the request was sent and why as events,
//! and one for each attempt. HTTP's names are OpenTelemetry's stable ones; what only Keyway knows begins with
//! `keyway.`.

use std::time::Duration;

use keyway_wire::openai::Usage;

use super::{
    Attempt, RequestTrace,
    context::SpanId,
    genai,
    otlp::{CLIENT, ERROR, Event, KeyValue, PARENT_KNOWN, PARENT_REMOTE, SERVER, Span, Status, attribute},
};
use crate::{clock::Instant, limits::MAX_TRACE_TEXT_BYTES};

/// What is known of a request at its end.
#[derive(Debug)]
pub struct Ended<'a> {
    /// The request's id, as the client and the log see it.
    pub id: &'a str,
    /// Path, without the query.
    pub path: &'a str,
    /// The model, as metrics name it.
    pub model: &'a str,
    /// Whose request it was.
    pub tenant: Option<&'a str>,
    /// Status that the client saw; 0 where it saw none.
    pub status: u16,
    /// How it ended, as metrics say it.
    pub outcome: &'static str,
    /// Tokens of the prompt and the answer, as the worker reported them; 0 where it did not.
    pub usage: &'a Usage,
    /// Time to the first token.
    pub ttft: Option<Duration>,
}

impl Ended<'_> {
    fn failed(&self) -> bool {
        !matches!(self.outcome, "complete" | "client_gone")
    }
}

/// The spans of a request, the gateway's first.
pub(super) fn of(trace: RequestTrace, ended: &Ended<'_>) -> Vec<Span> {
    let now = Instant::now();
    let mut server = span(&trace, trace.span, trace.context.parent, (trace.began.1, now));
    server.flags |= if trace.context.parent.is_some() { PARENT_REMOTE } else { 0 };
    server.kind = SERVER;
    server.name = match genai::operation(ended.path) {
        // Other paths are whatever clients make of them: no name for a group of spans.
        Some(_) => format!("{} {}", trace.method, ended.path),
        None => trace.method.to_string(),
    };
    server.attributes = server_attributes(&trace, ended);
    server.events = trace.attempts.iter().map(|attempt| picked(&trace, attempt)).collect();
    server.status = ended.failed().then(|| failed(ended.outcome));
    let last = trace.attempts.len().saturating_sub(1);
    let attempts = trace.attempts.iter().enumerate();
    let attempts = attempts.map(|(i, attempt)| client(&trace, attempt, ended, i == last, now));
    std::iter::once(server).chain(attempts).collect()
}

fn span(trace: &RequestTrace, own: SpanId, parent: Option<SpanId>, time: (Instant, Instant)) -> Span {
    let state = trace.state.as_ref().and_then(|state| state.to_str().ok()).unwrap_or_default();
    Span {
        trace_id: trace.context.trace.to_be_bytes().to_vec(),
        id: own.0.to_be_bytes().to_vec(),
        trace_state: state.to_owned(),
        parent_span_id: parent.map_or(Vec::new(), |parent| parent.0.to_be_bytes().to_vec()),
        start_time_unix_nano: nanos(trace, time.0),
        end_time_unix_nano: nanos(trace, time.1),
        flags: u32::from(trace.context.flags()) | PARENT_KNOWN,
        ..Span::default()
    }
}

fn nanos(trace: &RequestTrace, at: Instant) -> u64 {
    trace.began.0 + at.saturating_duration_since(trace.began.1).as_nanos() as u64
}

fn server_attributes(trace: &RequestTrace, ended: &Ended<'_>) -> Vec<KeyValue> {
    let mut attributes = vec![
        attribute("http.request.method", trace.method.as_str()),
        attribute("url.path", short(ended.path)),
        attribute("keyway.request_id", ended.id),
        attribute("keyway.model", ended.model),
        attribute("keyway.outcome", ended.outcome),
        attribute("keyway.attempts", trace.attempts.len() as u64),
    ];
    if genai::operation(ended.path).is_some() {
        attributes.push(attribute("http.route", ended.path));
    }
    if ended.status != 0 {
        attributes.push(attribute("http.response.status_code", u64::from(ended.status)));
    }
    attributes.extend(ended.tenant.map(|tenant| attribute("keyway.tenant", tenant)));
    if ended.failed() {
        attributes.push(attribute("error.type", ended.outcome));
    }
    attributes
}

/// Where it was sent, and why.
fn picked(trace: &RequestTrace, attempt: &Attempt) -> Event {
    let attributes = vec![
        attribute("keyway.worker", attempt.worker.name.as_str()),
        attribute("keyway.reason", attempt.reason),
        attribute("keyway.matched_tokens", attempt.matched_tokens),
    ];
    Event { time_unix_nano: nanos(trace, attempt.began), name: "keyway.pick".to_owned(), attributes }
}

fn client(trace: &RequestTrace, attempt: &Attempt, ended: &Ended<'_>, last: bool, now: Instant) -> Span {
    let time = (attempt.began, attempt.ended.unwrap_or(now));
    let mut span = span(trace, attempt.span, Some(trace.span), time);
    let rules = trace.tracer.rules.genai;
    let failure = attempt.error.as_ref().map(|(why, cause)| (*why, cause.as_str()));
    let failure = failure.or_else(|| (last && ended.failed()).then_some((ended.outcome, ended.outcome)));
    span.kind = CLIENT;
    span.name = rules.name(ended).unwrap_or_else(|| trace.method.to_string());
    let origin = attempt.worker.origin();
    span.attributes = rules.attributes(ended, last && attempt.error.is_none());
    span.attributes.extend([
        attribute("http.request.method", trace.method.as_str()),
        attribute("server.address", origin.host()),
        attribute("server.port", u64::from(origin.port())),
        attribute("keyway.reason", attempt.reason),
        attribute("keyway.matched_tokens", attempt.matched_tokens),
    ]);
    span.attributes.extend(failure.map(|(why, _)| attribute("error.type", why)));
    span.status = failure.map(|(_, cause)| failed(cause));
    span
}

fn failed(why: &str) -> Status {
    Status { message: why.to_owned(), code: ERROR }
}

/// A client's text, cut where it is longer than anything that is meant.
fn short(text: &str) -> &str {
    let fits = |end: &usize| text.is_char_boundary(*end);
    let end = (0..=text.len().min(MAX_TRACE_TEXT_BYTES)).rev().find(fits);
    &text[..end.unwrap_or(0)]
}
