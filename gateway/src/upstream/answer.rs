//! The body of a worker's answer: over HTTP/1.1 together with the connection that it comes over, which it
//! drives; over HTTP/2 a stream, with its place on a connection that others use too. Dropped before its end
//! it tells the worker so.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http_body::{Body, Frame, SizeHint};
use thiserror::Error;

use super::{
    http1::Http1Error,
    origin::{Link, Origin},
    shared::Place,
};
use crate::upstream::trailers;

/// A body that reads its connection as it is polled. Dropped before its end it closes the connection, or its
/// stream.
#[derive(Debug)]
pub struct Answer {
    kind: Kind,
    beside: Option<Box<Beside>>,
}

/// What an answer has with it as long as it lives, where it was waited for together with something else.
pub struct Beside {
    /// Its first piece, which has been read.
    pub first: Option<Frame<Bytes>>,
    /// What goes on meanwhile, and is given up with it.
    pub work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// What is given back with it.
    pub held: Box<dyn fmt::Debug + Send>,
}

impl fmt::Debug for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, work, held } = self;
        f.debug_struct("Beside")
            .field("first", first)
            .field("work", &work.is_some())
            .field("held", held)
            .finish()
    }
}

#[derive(Debug)]
enum Kind {
    Own(Own),
    Shared(Box<Stream>),
}

/// Why an answer broke off.
#[derive(Debug, Error)]
pub enum AnswerError {
    /// Over HTTP/1.1, on a connection that served it alone.
    #[error(transparent)]
    Own(#[from] Http1Error),
    /// Over HTTP/2, on a connection that others share.
    #[error(transparent)]
    Shared(#[from] h2::Error),
}

/// An answer over a connection of its own.
#[derive(Debug)]
struct Own {
    /// Until the body's end.
    link: Option<Link>,
    origin: Origin,
}

/// An answer over one that is shared.
#[derive(Debug)]
struct Stream {
    body: RecvStream,
    /// Bytes to come, where the head says how many.
    left: Option<u64>,
    state: State,
    /// Until the body's end.
    place: Option<Place>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Data,
    Trailers,
    Ended,
}

impl Answer {
    pub(super) fn own(link: Link, origin: Origin) -> Self {
        let mut own = Own { link: Some(link), origin };
        own.hand_back_at_end();
        Self { kind: Kind::Own(own), beside: None }
    }

    /// The body of a stream; its length as the head has it, and whether by its status there is none whatever
    /// comes.
    pub(super) fn shared(body: RecvStream, length: Option<u64>, bodyless: bool, place: Place) -> Self {
        let mut stream = Stream { body, left: length, state: State::Data, place: Some(place) };
        if bodyless || stream.body.is_end_stream() {
            stream.end();
        }
        Self { kind: Kind::Shared(Box::new(stream)), beside: None }
    }
}

impl Answer {
    /// Whether its end is that of its connection: whether all of it has come is not to be told from that.
    pub fn ends_with_connection(&self) -> bool {
        match &self.kind {
            Kind::Own(own) => own.link.as_ref().is_some_and(|link| link.ends_with_answer()),
            Kind::Shared(_) => false,
        }
    }

    /// It, with what lives as long as it does.
    #[must_use]
    pub fn with(self, beside: Beside) -> Self {
        Self { beside: Some(Box::new(beside)), ..self }
    }

    /// Goes on with what goes on beside it; its first piece, if that has been read already.
    fn poll_beside(&mut self, cx: &mut Context<'_>) -> Option<Frame<Bytes>> {
        let beside = self.beside.as_mut()?;
        beside.work.take_if(|work| work.as_mut().poll(cx).is_ready());
        beside.first.take()
    }

    /// Bytes of its first piece, if that has been read and not passed on.
    fn first_bytes(&self) -> u64 {
        let first = self.beside.as_ref().and_then(|beside| beside.first.as_ref()?.data_ref());
        first.map_or(0, |bytes| bytes.len() as u64)
    }
}

impl Own {
    fn hand_back_at_end(&mut self) {
        if let Some(link) = self.link.take_if(|link| link.has_ended()) {
            self.origin.keep(link);
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Http1Error>>> {
        let Some(link) = &mut self.link else { return Poll::Ready(None) };
        let frame = ready!(link.poll_frame(cx));
        if matches!(frame, Some(Err(_))) {
            self.link = None;
        }
        self.hand_back_at_end();
        Poll::Ready(frame)
    }
}

impl Stream {
    fn end(&mut self) {
        self.state = State::Ended;
        self.place = None;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if self.state == State::Data {
            match ready!(self.body.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    // What was taken may come again: the client's pace is the worker's.
                    let _ = self.body.flow_control().release_capacity(bytes.len());
                    self.left = self.left.map(|left| left.saturating_sub(bytes.len() as u64));
                    if self.body.is_end_stream() {
                        self.end();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error)) => {
                    self.end();
                    // Only that its request need not be sent to its end (RFC 9113, section 8.1). Every other
                    // reset, CANCEL too, is an answer that broke off.
                    let whole = error.is_reset() && error.reason() == Some(Reason::NO_ERROR);
                    let whole = whole && self.left == Some(0);
                    return Poll::Ready(if whole { None } else { Some(Err(error)) });
                }
                None => self.state = State::Trailers,
            }
        }
        if self.state == State::Trailers {
            let mut trailers = ready!(self.body.poll_trailers(cx));
            self.end();
            if let Ok(Some(trailers)) = &mut trailers {
                trailers::filter(trailers);
            }
            let trailers =
                trailers.transpose().filter(|trailers| !matches!(trailers, Ok(all) if all.is_empty()));
            return Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers)));
        }
        Poll::Ready(None)
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        if let Some(first) = self.poll_beside(cx) {
            return Poll::Ready(Some(Ok(first)));
        }
        match &mut self.kind {
            Kind::Own(own) => own.poll(cx).map_err(AnswerError::Own),
            Kind::Shared(stream) => stream.poll(cx).map_err(AnswerError::Shared),
        }
    }

    fn is_end_stream(&self) -> bool {
        if self.beside.as_ref().is_some_and(|beside| beside.first.is_some()) {
            return false;
        }
        match &self.kind {
            Kind::Own(own) => own.link.is_none(),
            Kind::Shared(stream) => stream.state == State::Ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let left = match &self.kind {
            Kind::Own(own) => own.link.as_ref().map_or(SizeHint::with_exact(0), |link| link.size_hint()),
            Kind::Shared(stream) => stream.left.map_or_else(SizeHint::default, SizeHint::with_exact),
        };
        match (self.first_bytes(), left.exact()) {
            (0, _) => left,
            (first, Some(left)) => SizeHint::with_exact(first + left),
            (..) => SizeHint::default(),
        }
    }
}
