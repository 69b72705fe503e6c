//! One HTTP/1.1 connection to a worker, for one request at a time, driven by the request that waits for its
//! answer: no task, no channel and no copy stands between the socket and the answer's body. It reads when it
//! is asked for more and not before, so a slow client slows its worker. Who gets the connection next is
//! `origin.rs`' business.

mod body;
mod chunked;
mod head;
mod hop;
pub mod recorded;
mod request;

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::Method;
use http_body::{Frame, SizeHint};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::{poll_read_buf, poll_write_buf};

use self::{
    body::{Body, Part},
    request::Unsent,
};
use super::{Outgoing, interim::Interim};
use crate::{
    limits::{ANSWER_BUFFER_BYTES, POOL_IDLE_TIMEOUT},
    shortage::Shortage,
    upstream::trailers,
};

/// Bytes that a connection reads at first; more once an answer fills them.
const FIRST_READ_BYTES: usize = 4 << 10;

/// A connection, and what is known of the request that has it.
#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    /// What was read and is not yet understood.
    read: BytesMut,
    /// Bytes to ask for at the next read.
    read_bytes: usize,
    /// What is left to send of the request.
    unsent: Unsent,
    /// Why the rest cannot be sent; the worker may have answered before.
    send_error: Option<io::Error>,
    sent_any: bool,
    /// Whether the worker has said anything since this request began.
    heard: bool,
    body: Body,
    /// Whether another request may follow, as far as the answer's head says.
    keep_alive: bool,
    /// Whether it has carried an answer.
    answered: bool,
    /// For how long it may wait for a request, as the last answer's head says.
    lease: Duration,
    interim: Interim,
    /// Whether nothing may follow the answer's body.
    drops_trailers: bool,
}

/// Why there is no answer, or no more of one.
#[derive(Debug, Error)]
pub enum Http1Error {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The worker closed the connection before its answer's end.
    #[error("the worker closed the connection before its answer's end")]
    Cut,
    /// It was closed, or reset, before any byte of an answer.
    #[error("the worker closed the connection without a word{}", .0.as_ref().map(|error| format!(": {error}")).unwrap_or_default())]
    Unanswered(Option<io::Error>),
    /// What the worker said is not HTTP/1.1, or cannot be told from another answer.
    #[error("the worker's answer is malformed: {0}")]
    Malformed(&'static str),
    /// No byte of the request was sent: it can go over another connection.
    #[error("the connection was closed before the request: {0}")]
    NothingSent(io::Error),
}

/// What a connection reads from and writes to.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Pending where it is known that nothing has come; then the task is woken when something does.
    fn poll_readable(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Http1Error {
    /// Whether the connection was closed before the worker said anything: on a kept one that may be its own
    /// end, which has crossed the request.
    pub(super) fn is_silent_close(&self) -> bool {
        matches!(self, Self::Unanswered(_) | Self::NothingSent(_))
    }

    /// What the gateway lacked to send or read.
    pub(super) fn shortage(&self) -> Option<Shortage> {
        match self {
            Self::Io(error) | Self::NothingSent(error) | Self::Unanswered(Some(error)) => Shortage::of(error),
            _ => None,
        }
    }
}

impl<S: Transport> Connection<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            read: BytesMut::new(),
            read_bytes: FIRST_READ_BYTES,
            unsent: Unsent::default(),
            send_error: None,
            sent_any: false,
            heard: false,
            body: Body::Ended,
            keep_alive: true,
            answered: false,
            lease: POOL_IDLE_TIMEOUT,
            interim: Interim::new(),
            drops_trailers: false,
        }
    }

    /// Whether it has carried an answer: it is a kept one then.
    pub(super) fn has_answered(&self) -> bool {
        self.answered
    }

    /// For how long it may wait for the next request.
    pub(super) fn lease(&self) -> Duration {
        self.lease
    }

    /// Sends a request and waits for the head of its answer. After an error, or when dropped before, the
    /// connection is of no more use.
    pub(super) async fn ask(
        &mut self,
        request: &Outgoing<'_>,
        host: &http::HeaderValue,
    ) -> Result<http::Response<()>, Http1Error> {
        self.unsent.begin(request, host);
        (self.sent_any, self.heard, self.keep_alive) = (false, false, false);
        self.interim = Interim::new();
        poll_fn(|cx| self.poll_head(request.method(), cx)).await
    }

    fn poll_head(
        &mut self,
        method: &Method,
        cx: &mut Context<'_>,
    ) -> Poll<Result<http::Response<()>, Http1Error>> {
        self.send(cx);
        if let (false, Some(error)) = (self.sent_any, self.send_error.take()) {
            return Poll::Ready(Err(Http1Error::NothingSent(error)));
        }
        loop {
            if let Some(head) = head::parse(&mut self.read, method, &mut self.interim)? {
                (self.body, self.keep_alive) = (head.body, head.keep_alive);
                (self.answered, self.lease) = (true, head.lease);
                self.drops_trailers = head.drops_trailers;
                if !self.body.has_length() {
                    // A stream, which lasts.
                    self.unsent.give_back();
                }
                self.body.skip(&mut self.read);
                return Poll::Ready(Ok(head.response));
            }
            if self.read.len() >= ANSWER_BUFFER_BYTES {
                return Poll::Ready(Err(Http1Error::Malformed("its head is too long")));
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) => return Poll::Ready(Err(self.cut())),
                Ok(_) => self.heard = true,
                Err(error) => return Poll::Ready(Err(self.broken(error))),
            }
        }
    }

    /// The next piece of the answer's body, as it came.
    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Http1Error>>> {
        self.send(cx);
        loop {
            match self.body.take(&mut self.read) {
                Ok(Part::Data(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Ok(Part::Trailers(mut trailers)) => {
                    trailers::filter(&mut trailers);
                    let any = !trailers.is_empty() && !self.drops_trailers;
                    let frame = any.then(|| Ok(Frame::trailers(trailers)));
                    return Poll::Ready(frame);
                }
                Ok(Part::End) => return Poll::Ready(None),
                Ok(Part::More) => {}
                Err(malformed) => return Poll::Ready(Some(Err(malformed))),
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) if self.body.ends_with_connection() => self.body = Body::Ended,
                Ok(0) => return Poll::Ready(Some(Err(self.cut()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }

    /// Whether the answer has come to its end.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.body, Body::Ended)
    }

    /// Whether the answer ends when the worker closes the connection, and not before.
    pub(super) fn ends_with_answer(&self) -> bool {
        self.body.ends_with_connection()
    }

    /// Bytes of the answer to come, as far as its head says.
    pub(super) fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    /// Whether it is open and takes a request: nothing is under way on it, and the worker has said nothing
    /// unasked. The waker is told when that changes.
    pub(super) fn is_idle(&mut self, waker: &Waker) -> bool {
        self.stays_open()
            && self.has_ended()
            && !self.unsent.is_under_way()
            && self.send_error.is_none()
            && self.read.is_empty()
            && self.poll_read(&mut Context::from_waker(waker)).is_pending()
    }

    /// Whether another request may follow, as far as the worker has said.
    pub(super) fn stays_open(&self) -> bool {
        self.keep_alive
    }

    /// Sends what can be sent of the request. What fails shows where the answer does not come.
    fn send(&mut self, cx: &mut Context<'_>) {
        if !self.unsent.is_under_way() {
            return;
        }
        while self.unsent.has_remaining() {
            let Poll::Ready(may) = self.unsent.poll_turn(cx) else { return };
            match poll_write(Pin::new(&mut self.stream), cx, (&mut self.unsent, may)) {
                Poll::Pending => return self.unsent.nothing_yet(cx),
                Poll::Ready(Ok(0)) => return self.cannot_send(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(_)) => self.sent_any = true,
                Poll::Ready(Err(error)) => return self.cannot_send(error),
            }
        }
        match Pin::new(&mut self.stream).poll_flush(cx) {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => self.unsent.end(),
            Poll::Ready(Err(error)) => self.cannot_send(error),
        }
    }

    fn cannot_send(&mut self, error: io::Error) {
        self.unsent.end();
        self.send_error = Some(error);
        self.keep_alive = false;
    }

    fn cut(&mut self) -> Http1Error {
        let error = self.send_error.take();
        if self.heard { error.map_or(Http1Error::Cut, Http1Error::Io) } else { Http1Error::Unanswered(error) }
    }

    /// Reading has failed. What is no HTTP over TLS is no close.
    fn broken(&mut self, error: io::Error) -> Http1Error {
        let closed =
            !self.heard && error.kind() != io::ErrorKind::InvalidData && Shortage::of(&error).is_none();
        if closed { Http1Error::Unanswered(Some(error)) } else { Http1Error::Io(error) }
    }

    /// Reads once; 0 at the end. Where all that was read before has left, its room is used again; other room
    /// is made only when there is something to read, as a piece that was just passed on holds the old one for
    /// a moment.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if !self.read.try_reclaim(self.read_bytes) {
            ready!(self.stream.poll_readable(cx))?;
            self.read.reserve(self.read_bytes);
        }
        let read = ready!(poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.read))?;
        if read >= self.read_bytes {
            self.read_bytes = (self.read_bytes * 2).min(ANSWER_BUFFER_BYTES);
        }
        Poll::Ready(Ok(read))
    }
}

/// Writes some of what is left, at most so much, as one piece where it is one.
fn poll_write(
    stream: Pin<&mut impl Transport>,
    cx: &mut Context<'_>,
    (unsent, may): (&mut Unsent, usize),
) -> Poll<io::Result<usize>> {
    let chunk = unsent.chunk();
    if chunk.len() < unsent.remaining() && unsent.remaining() <= may {
        return poll_write_buf(stream, cx, unsent);
    }
    let written = ready!(stream.poll_write(cx, &chunk[..chunk.len().min(may)]))?;
    unsent.advance(written);
    Poll::Ready(Ok(written))
}

#[cfg(test)]
mod tests;
