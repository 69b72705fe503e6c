//! Answers whose bytes are at hand, read as a worker's connection reads them: for fuzzing, and for answers
//! that were recorded.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Method, uri::PathAndQuery};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Connection, Http1Error, Transport};
use crate::upstream::Outgoing;

/// What a client would be told.
#[derive(Debug)]
pub struct RecordedAnswer {
    /// Status and headers, without those that concern the hop alone.
    pub head: http::Response<()>,
    /// All of the body.
    pub body: Vec<u8>,
    /// What may follow it.
    pub trailers: HeaderMap,
    /// Whether the connection would carry another request.
    pub may_serve_again: bool,
}

/// Reads the answer to a request with this method from what comes in these pieces. `None`: it waits for more;
/// a connection that `closes` behind the last piece lets none wait.
///
/// # Errors
/// Why it is no answer.
pub fn read<'a>(
    method: Method,
    pieces: impl Iterator<Item = &'a [u8]>,
    closes: bool,
) -> Option<Result<RecordedAnswer, Http1Error>> {
    let pieces = pieces.filter(|piece| !piece.is_empty()).collect::<Vec<_>>().into_iter();
    let mut connection = Connection::new(Recorded { pieces, rest: &[], closes });
    let request = Outgoing::own(method, PathAndQuery::from_static("/"), Bytes::new());
    let host = HeaderValue::from_static("worker");
    let asked = connection.ask(&request, &host).now_or_never()?;
    let head = match asked {
        Ok(head) => head,
        Err(error) => return Some(Err(error)),
    };
    let (mut body, mut trailers) = (Vec::new(), HeaderMap::new());
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        match connection.poll_frame(&mut cx) {
            Poll::Pending => return None,
            Poll::Ready(None) => break,
            Poll::Ready(Some(Err(error))) => return Some(Err(error)),
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => body.extend_from_slice(&data),
                Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
            },
        }
    }
    let may_serve_again = connection.is_idle(Waker::noop());
    Some(Ok(RecordedAnswer { head, body, trailers, may_serve_again }))
}

/// Gives one piece at each read, and takes whatever is written.
struct Recorded<'a> {
    pieces: std::vec::IntoIter<&'a [u8]>,
    /// Of a piece that was larger than a read.
    rest: &'a [u8],
    closes: bool,
}

impl Transport for Recorded<'_> {}

impl AsyncRead for Recorded<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rest.is_empty() {
            match self.pieces.next() {
                Some(piece) => self.rest = piece,
                None if self.closes => return Poll::Ready(Ok(())),
                None => return Poll::Pending,
            }
        }
        let (now, later) = self.rest.split_at(self.rest.len().min(buf.remaining()));
        buf.put_slice(now);
        self.rest = later;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Recorded<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
