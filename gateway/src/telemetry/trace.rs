//! OpenTelemetry traces: one span for each request and one for each attempt at a worker, under the client's
//! own trace where it brought one (W3C Trace Context). Spans go to a collector by OTLP, from a bounded queue;
//! nothing here waits, and without `[traces]` nothing is made. No prompt text, no keys, no query strings.
//!
//! ```text
//! client's span ─▶ SERVER "POST /v1/chat/completions" ─▶ CLIENT "chat MODEL" ─▶ the worker's spans
//! ```

mod context;
mod export;
mod genai;
mod otlp;
mod spans;

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method};
use prometheus::IntCounterVec;
use tokio::sync::mpsc;

use self::{
    context::{Context, SpanId, TRACEPARENT, TRACESTATE},
    otlp::Span,
};
pub use self::{export::Traces, spans::Ended};
use crate::{
    clock::{self, Instant},
    config::TraceRules,
    fleet::Worker,
    limits::{MAX_TRACE_STATE_BYTES, MAX_TRACED_ATTEMPTS},
    upstream::Outgoing,
};

/// Begins traces, and hands them on when their requests are over.
#[derive(Debug)]
pub struct Tracer {
    rules: TraceRules,
    queue: mpsc::Sender<Vec<Span>>,
    /// `keyway_trace_spans_total{outcome}`; here for spans that are dropped as the queue is full.
    spans: IntCounterVec,
}

/// One request's trace, as far as it came.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: Arc<Tracer>,
    context: Context,
    /// Id of the gateway's own span, under which its attempts' spans are.
    span: SpanId,
    state: Option<HeaderValue>,
    method: Method,
    began: (u64, Instant),
    attempts: Vec<Attempt>,
}

/// One attempt at a worker.
#[derive(Debug)]
struct Attempt {
    span: SpanId,
    worker: Arc<Worker>,
    reason: &'static str,
    matched_tokens: u64,
    began: Instant,
    ended: Option<Instant>,
    /// In a word, and its cause.
    error: Option<(&'static str, String)>,
}

impl Tracer {
    /// Begins a request's trace, or goes on with the client's.
    pub fn begin(self: &Arc<Self>, method: &Method, headers: &HeaderMap) -> RequestTrace {
        let client = Context::of(headers);
        let (context, state) = match client {
            Some(mut context) => {
                context.sampled = if self.rules.follow_client {
                    context.sampled
                } else {
                    context.is_within(self.rules.sample)
                };
                (context, headers.get(TRACESTATE).filter(|state| state.len() <= MAX_TRACE_STATE_BYTES))
            }
            None => (Context::new(self.rules.sample), None),
        };
        RequestTrace {
            tracer: Arc::clone(self),
            context,
            span: SpanId::new(),
            state: state.cloned(),
            method: method.clone(),
            began: (clock::unix_nanos(), Instant::now()),
            attempts: Vec::new(),
        }
    }
}

impl RequestTrace {
    /// The request goes to a worker, for the first time or again.
    pub fn attempt(&mut self, worker: &Arc<Worker>, reason: &'static str, matched_tokens: u64) {
        let now = Instant::now();
        if let Some(last) = self.attempts.last_mut() {
            last.ended.get_or_insert(now);
        }
        if self.attempts.len() == MAX_TRACED_ATTEMPTS {
            self.attempts.remove(0);
        }
        self.attempts.push(Attempt {
            span: SpanId::new(),
            worker: Arc::clone(worker),
            reason,
            matched_tokens,
            began: now,
            ended: None,
            error: None,
        });
    }

    /// The last attempt came to nothing.
    pub fn attempt_failed(&mut self, why: &'static str, cause: String) {
        if let Some(last) = self.attempts.last_mut() {
            last.ended = Some(Instant::now());
            last.error = Some((why, cause));
        }
    }

    /// Puts the last attempt into the headers that its worker sees: there, its spans belong under it.
    pub fn tell(&self, request: &mut Outgoing<'_>) {
        let parent = self.attempts.last().map_or(self.span, |last| last.span);
        request.set(TRACEPARENT, self.context.header(parent));
        match &self.state {
            Some(state) => request.set(TRACESTATE, state.clone()),
            // What belongs to a trace that was not taken over does not go on in this one.
            None => request.leave_out(TRACESTATE),
        }
    }

    /// The request is over: its spans are handed on, or dropped where the queue is full.
    pub fn end(self, ended: &Ended<'_>) {
        if !self.context.sampled {
            return;
        }
        let tracer = Arc::clone(&self.tracer);
        let spans = spans::of(self, ended);
        let count = spans.len() as u64;
        if tracer.queue.try_send(spans).is_err() {
            tracer.spans.with_label_values(&["dropped"]).inc_by(count);
        }
    }
}
