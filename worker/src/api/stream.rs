//! An answer as server-sent events. Each poll sends what all choices have by then; the end is `[DONE]`, or,
//! if the engine fails, an error event and a broken body, never both.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Frame;
use keyway_wire::extension::AnswerExtension;

use super::answer::{AnswerHead, Piece, UsageField};
use super::answer_body::AnswerBody;
use super::error::ApiError;
use super::request::{Call, Endpoint};
use super::running::{Running, outcome, usage_of};
use super::{App, Response};
use crate::answer::reader::Shown;
use crate::metrics::{Outcome, RequestGuard};

/// Ends the body of a stream that could not end well.
#[derive(Debug, thiserror::Error)]
#[error("the stream failed after it began")]
pub(crate) struct StreamFailed;

/// The body of a streamed answer.
#[derive(Debug)]
pub(crate) struct EventStream {
    head: AnswerHead,
    choices: Vec<Running>,
    /// Whose first chunk is still to come, and is the one that names the role.
    roles_due: Vec<bool>,
    include_usage: bool,
    continuous_usage: bool,
    /// Whether chunks carry the worker extension.
    with_ids: bool,
    guard: RequestGuard,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Done,
    /// The error's event is given away, not yet sent.
    Failing,
    Failed,
}

impl EventStream {
    pub(crate) fn new(app: &Arc<App>, call: &Call, choices: Vec<Running>, guard: RequestGuard) -> Self {
        Self {
            head: AnswerHead::new(app, call),
            roles_due: vec![call.endpoint == Endpoint::Chat && !call.resumes(); choices.len()],
            choices,
            include_usage: call.shape.include_usage,
            continuous_usage: call.shape.continuous_usage,
            with_ids: call.wants_ids(),
            guard,
            state: State::Running,
        }
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
            if std::mem::take(&mut self.roles_due[index]) {
                let no_ids = self.with_ids.then(AnswerExtension::default);
                self.write(out, index, Piece::Role, no_ids);
            }
            if self.choices[index].output.finish.is_none() {
                if !text.is_empty() {
                    let keyway = self.take_ids(index);
                    self.write(out, index, Piece::Text(&text), keyway);
                }
                continue;
            }
            let mut rest = text;
            // With ids, text and end come in one chunk, so that a stream is never broken between the two.
            if !self.with_ids && !rest.is_empty() {
                self.write(out, index, Piece::Text(&rest), None);
                rest = Shown::default();
            }
            let keyway = self.take_ids(index);
            self.write(out, index, Piece::End(&rest), keyway);
        }
    }

    fn take_ids(&mut self, index: usize) -> Option<AnswerExtension> {
        self.with_ids.then(|| self.choices[index].untold.take_ids())
    }

    fn write(&mut self, out: &mut Vec<u8>, index: usize, piece: Piece<'_>, keyway: Option<AnswerExtension>) {
        let usage = if self.continuous_usage {
            UsageField::Counts(usage_of(&self.choices))
        } else if self.include_usage {
            UsageField::Null(())
        } else {
            UsageField::Absent
        };
        self.head.write_piece(out, index, piece, &mut self.choices[index], usage, keyway);
    }

    /// Appends the stream's end, once every choice has its own.
    fn end(&mut self, out: &mut Vec<u8>) {
        let finishes: Option<Vec<_>> = self.choices.iter().map(|c| c.output.finish).collect();
        let Some(finishes) = finishes else { return };
        if self.include_usage {
            let usage = usage_of(&self.choices);
            let keyway = self.take_ids(0);
            self.head.write_usage(out, usage, keyway);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
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
            State::Running => {}
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
        let drained = (0..this.choices.len()).try_for_each(|i| this.drain(i, context, &mut out));
        match drained {
            Ok(()) => this.end(&mut out),
            Err(error) => {
                out.extend_from_slice(error.to_event().as_bytes());
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
