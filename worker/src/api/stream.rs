//! An answer as server-sent events. Each poll sends what all choices have by then. How an API tells its
//! pieces is a [`Events`]: `chunks.rs`, `messages/stream.rs` and `responses/stream.rs`. If the engine fails,
//! the stream ends with an error event and a broken body, and never has its proper end.

use std::fmt::Debug;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Frame;
use serde::Serialize;

use super::Response;
use super::answer_body::AnswerBody;
use super::error::ApiError;
use super::running::{Running, outcome};
use crate::answer::reader::Shown;
use crate::metrics::{Outcome, RequestGuard};

/// Ends the body of a stream that could not end well.
#[derive(Debug, thiserror::Error)]
#[error("the stream failed after it began")]
pub(crate) struct StreamFailed;

/// How an API tells a stream's pieces.
pub(super) trait Events: Debug + Send {
    /// Appends what can be told before the first token.
    fn begin(&mut self, _out: &mut Vec<u8>) {}

    /// Appends what choice `index` says, often nothing; its last piece comes once its output is finished.
    fn say(&mut self, out: &mut Vec<u8>, choices: &mut [Running], index: usize, text: Shown);

    /// Appends the stream's end, once every choice has its own.
    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]);

    /// Appends the error that breaks the stream.
    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError);
}

/// The body of a streamed answer.
#[derive(Debug)]
pub(crate) struct EventStream {
    events: Box<dyn Events>,
    choices: Vec<Running>,
    guard: RequestGuard,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was told yet.
    Opening,
    Running,
    Done,
    /// The error's event is given away, not yet sent.
    Failing,
    Failed,
}

impl EventStream {
    pub(super) fn new(events: Box<dyn Events>, choices: Vec<Running>, guard: RequestGuard) -> Self {
        Self { events, choices, guard, state: State::Opening }
    }

    pub(crate) fn into_response(self) -> Response {
        let mut response = Response::new(AnswerBody::new(self));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// Appends the events of everything that choice `index` has by now.
    fn drain(&mut self, index: usize, context: &mut Context<'_>, out: &mut Vec<u8>) -> Result<(), ApiError> {
        loop {
            let Poll::Ready(text) = self.choices[index].poll_text(context)? else { return Ok(()) };
            let Some(text) = text else { return Ok(()) };
            self.events.say(out, &mut self.choices, index, text);
        }
    }

    /// Appends the stream's end, once every choice has its own.
    fn end(&mut self, out: &mut Vec<u8>) {
        let finishes: Option<Vec<_>> = self.choices.iter().map(|c| c.output.finish).collect();
        let Some(finishes) = finishes else { return };
        self.events.end(out, &mut self.choices);
        self.guard.set(outcome(finishes.into_iter()));
        self.state = State::Done;
    }
}

impl http_body::Body for EventStream {
    type Data = Bytes;
    type Error = StreamFailed;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamFailed>>> {
        let this = self.get_mut();
        match this.state {
            State::Opening | State::Running => {}
            State::Done => return Poll::Ready(None),
            State::Failing => {
                // A body that breaks at once takes with it what the connection has not written: let it write.
                this.state = State::Failed;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            State::Failed => return Poll::Ready(Some(Err(StreamFailed))),
        }
        let mut out = Vec::new();
        if this.state == State::Opening {
            this.events.begin(&mut out);
            this.state = State::Running;
        }
        let drained = (0..this.choices.len()).try_for_each(|i| this.drain(i, context, &mut out));
        match drained {
            Ok(()) => this.end(&mut out),
            Err(error) => {
                this.events.fail(&mut out, &error);
                this.guard.set(Outcome::Error);
                this.choices.clear();
                this.state = State::Failing;
            }
        }
        if out.is_empty() { Poll::Pending } else { Poll::Ready(Some(Ok(Frame::data(out.into())))) }
    }

    fn is_end_stream(&self) -> bool {
        self.state == State::Done
    }
}

pub(super) fn write_event(out: &mut Vec<u8>, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    // Writing plain structs to memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, data);
    out.extend_from_slice(b"\n\n");
}
