//! The head of a request as HTTP/1.1 writes it (RFC 9112, sections 3 and 5). Bodies are known in full, so
//! their length is said and nothing is chunked.

use std::{
    io::{IoSlice, Write},
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Method,
    header::{CONTENT_LENGTH, HOST},
};

use crate::{limits::READING_INLINE_BYTES, machine::turns::Turns, upstream::Outgoing};

/// Room for a head besides target and host.
const HEAD_BYTES: usize = 512;

/// Bodies up to this size are copied behind their head: that is cheaper than to say where each of the two
/// lies.
const COPIED_BODY_BYTES: usize = 4 << 10;

/// Room that is kept for the next request of a connection: a head with such a body.
const KEPT_BYTES: usize = COPIED_BODY_BYTES + 2 * HEAD_BYTES;

/// What is left to send of a request. One comes after the other in the same room.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    /// The head, with a short body behind it.
    head: Vec<u8>,
    /// Bytes of it that were sent.
    sent: usize,
    /// The rest of the body: all of it or nothing.
    body: Bytes,
    is_under_way: bool,
    /// Of a large body; `None` where it is small.
    turns: Option<Box<Turns>>,
}

impl Unsent {
    /// Takes a request: its line and headers, with the worker's host and the body's length in place of
    /// whatever the headers say of them, and its body.
    pub(super) fn begin(&mut self, request: &Outgoing<'_>, host: &HeaderValue) {
        (self.sent, self.is_under_way) = (0, true);
        let copied = Some(request.body()).filter(|body| body.len() <= COPIED_BODY_BYTES);
        write_head(&mut self.head, request, host, copied.map_or(0, Bytes::len));
        match copied {
            Some(body) => self.head.extend_from_slice(body),
            None => self.body = request.body().clone(),
        }
        self.turns = (self.body.len() > READING_INLINE_BYTES).then(Box::default);
    }

    /// Ready where so much may be written now. A socket of this machine may take all of a body at once.
    pub(super) fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        self.turns.as_mut().map_or(Poll::Ready(usize::MAX), |turns| turns.poll_turn(cx))
    }

    /// The worker takes no more yet.
    pub(super) fn nothing_yet(&mut self, cx: &mut Context<'_>) {
        if let Some(turns) = &mut self.turns {
            turns.nothing_yet(cx);
        }
    }

    /// Whether a request has begun and its end was neither sent nor given up.
    pub(super) fn is_under_way(&self) -> bool {
        self.is_under_way
    }

    /// The request was sent, or cannot be.
    pub(super) fn end(&mut self) {
        (self.is_under_way, self.body, self.turns) = (false, Bytes::new(), None);
        self.head.clear();
        if self.head.capacity() > KEPT_BYTES {
            self.head = Vec::new();
        }
    }

    /// Gives the room back, where it will not be needed soon.
    pub(super) fn give_back(&mut self) {
        if !self.is_under_way {
            self.head = Vec::new();
        }
    }
}

impl Buf for Unsent {
    fn remaining(&self) -> usize {
        self.head.len() - self.sent + self.body.len()
    }

    fn chunk(&self) -> &[u8] {
        if self.sent < self.head.len() { &self.head[self.sent..] } else { &self.body }
    }

    fn chunks_vectored<'a>(&'a self, room: &mut [IoSlice<'a>]) -> usize {
        let parts = [&self.head[self.sent..], &self.body].into_iter().filter(|part| !part.is_empty());
        room.iter_mut().zip(parts).map(|(place, part)| *place = IoSlice::new(part)).count()
    }

    fn advance(&mut self, bytes: usize) {
        let of_head = bytes.min(self.head.len() - self.sent);
        self.sent += of_head;
        self.body.advance(bytes - of_head);
        if let Some(turns) = &mut self.turns {
            turns.copied(bytes);
        }
    }
}

fn write_head(head: &mut Vec<u8>, request: &Outgoing<'_>, host: &HeaderValue, more_bytes: usize) {
    let target = request.target().as_str();
    // Most heads fit; the vector grows for the others.
    head.reserve(HEAD_BYTES + target.len() + host.len() + more_bytes);
    for part in [request.method().as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    field(head, HOST.as_str(), host);
    for (name, value) in request.headers() {
        field(head, name.as_str(), value);
    }
    let length = request.body().len();
    // RFC 9110, section 8.6: said where a body has a meaning, be it empty.
    if length > 0 || [Method::POST, Method::PUT, Method::PATCH].contains(request.method()) {
        // Writing to memory does not fail.
        let _ = write!(head, "{CONTENT_LENGTH}: {length}\r\n");
    }
    head.extend_from_slice(b"\r\n");
}

/// A header's value has no line end by its type.
fn field(head: &mut Vec<u8>, name: &str, value: &HeaderValue) {
    // One by one: of a part whose length is known the compiler makes one store.
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value.as_bytes());
    head.extend_from_slice(b"\r\n");
}
