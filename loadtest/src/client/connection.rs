//! One connection of HTTP/1.1: sends a request and reads its answer in the task that asks, without a task or
//! a channel of its own. Decides nothing about which connection is used.

mod answer;

use std::{
    cell::RefCell,
    future::poll_fn,
    io::{self, IoSlice},
    mem,
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, ReadBuf},
    net::TcpStream,
};

use self::answer::{Body, read_head};
pub use self::answer::{Head, Malformed};
use crate::limits::{AHEAD_KEPT_BYTES, ANSWER_HEAD_BYTES_MAX, READ_BYTES};

thread_local! {
    /// What is read goes through here: many connections wait, few read at a time.
    static SPACE: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

/// Why there is no whole answer.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The connection broke; the system says why.
    #[error("the connection broke")]
    Connection(#[from] io::Error),
    /// The server closed it within the answer.
    #[error("the connection ended before the answer did")]
    Early,
    /// What came is no answer.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The head is larger than [`ANSWER_HEAD_BYTES_MAX`].
    #[error("the answer's head is larger than {ANSWER_HEAD_BYTES_MAX} bytes")]
    HeadTooLarge,
}

/// A connection between requests.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Bytes of an answer that nobody has taken yet.
    ahead: Vec<u8>,
}

/// An answer whose head is here.
#[derive(Debug)]
pub struct Answering {
    /// Its status, and what else is read of its head.
    pub head: Head,
    body: Body,
    connection: Connection,
    /// The whole request was sent.
    asked: bool,
}

/// A request's bytes that are not sent yet.
struct Unsent<'a>(&'a [u8], &'a [u8]);

// === impl Connection ===

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, ahead: Vec::new() }
    }

    /// Whether the server has said nothing since the last answer: all that it could is that it is going.
    pub(super) fn is_quiet(&self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        let has_nothing = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.stream.poll_read_ready(&mut context).is_pending()
            || self.stream.try_read(&mut [0]).is_err_and(has_nothing)
    }

    /// Sends a request and waits for the head of its answer, which may come before all of the request is
    /// sent.
    pub(super) async fn ask(mut self, head: &[u8], body: &[u8]) -> Result<Answering, Broken> {
        let (mut unsent, mut unsendable) = (Unsent(head, body), None);
        let (head, body) = poll_fn(|context| {
            loop {
                match self.poll_send(context, &mut unsent) {
                    // A server that refuses a request may answer it all the same.
                    Poll::Ready(Err(error)) => (unsent, unsendable) = (Unsent(&[], &[]), Some(error)),
                    Poll::Ready(Ok(())) | Poll::Pending => {}
                }
                match ready!(self.poll_head(context)) {
                    // 100 Continue and the like; the answer is still to come.
                    Ok((Head { status: 100 | 102..=199, .. }, _)) => {}
                    Ok(answer) => return Poll::Ready(Ok(answer)),
                    Err(error) => return Poll::Ready(Err(unsendable.take().map_or(error, Broken::from))),
                }
            }
        })
        .await?;
        let asked = unsent.is_empty() && unsendable.is_none();
        Ok(Answering { head, body, connection: self, asked })
    }

    fn poll_send(&mut self, context: &mut Context<'_>, unsent: &mut Unsent<'_>) -> Poll<io::Result<()>> {
        while !unsent.is_empty() {
            let (stream, slices) =
                (Pin::new(&mut self.stream), [IoSlice::new(unsent.0), IoSlice::new(unsent.1)]);
            let sent = match unsent {
                Unsent(only, []) | Unsent([], only) => ready!(stream.poll_write(context, only))?,
                _ => ready!(stream.poll_write_vectored(context, &slices))?,
            };
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.advance(sent);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<Result<(Head, Body), Broken>> {
        loop {
            let ahead = &mut self.ahead;
            if !ahead.is_empty()
                && let Some((length, head, body)) = read_head(ahead)?
            {
                ahead.drain(..length);
                return Poll::Ready(Ok((head, body)));
            }
            if ahead.len() > ANSWER_HEAD_BYTES_MAX {
                return Poll::Ready(Err(Broken::HeadTooLarge));
            }
            let more = ready!(poll_read(&mut self.stream, context, |bytes| {
                ahead.extend_from_slice(bytes);
                bytes.len()
            }))?;
            if more == 0 {
                return Poll::Ready(Err(Broken::Early));
            }
        }
    }
}

/// Reads what is there, and hands it to `take`; nothing at the connection's end.
fn poll_read<T>(
    stream: &mut TcpStream,
    context: &mut Context<'_>,
    take: impl FnOnce(&[u8]) -> T,
) -> Poll<io::Result<T>> {
    SPACE.with_borrow_mut(|space| {
        let mut space = ReadBuf::new(space);
        ready!(Pin::new(stream).poll_read(context, &mut space))?;
        Poll::Ready(Ok(take(space.filled())))
    })
}

// === impl Answering ===

impl Answering {
    /// Waits for more of the body and hands each piece of it to `piece`. Whether there may be more still.
    pub async fn more(&mut self, mut piece: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let Self { body, connection: Connection { stream, ahead }, .. } = self;
        if !ahead.is_empty() {
            let came = mem::take(ahead);
            let mut bytes = &came[..];
            body.take(&mut bytes, &mut piece)?;
            // As a rule nothing is left, and the space is kept for the next answer's head.
            let taken = came.len() - bytes.len();
            *ahead = came;
            ahead.drain(..taken);
            ahead.shrink_to(AHEAD_KEPT_BYTES);
            return Ok(!body.is_over());
        }
        if body.is_over() {
            return Ok(false);
        }
        poll_fn(|context| {
            poll_read(stream, context, |mut bytes| {
                if bytes.is_empty() {
                    return if body.ends_with_connection() { Ok(false) } else { Err(Broken::Early) };
                }
                body.take(&mut bytes, &mut piece)?;
                // What a server says beyond its answer makes the connection useless.
                ahead.extend_from_slice(bytes);
                Ok(!body.is_over())
            })
        })
        .await?
    }

    /// The connection, if another request may be sent on it.
    pub(super) fn into_connection(self) -> Option<Connection> {
        let fit = self.asked && self.body.keeps_connection() && self.connection.ahead.is_empty();
        fit.then_some(self.connection)
    }
}

// === impl Unsent ===

impl Unsent<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty() && self.1.is_empty()
    }

    fn advance(&mut self, sent: usize) {
        let of_head = sent.min(self.0.len());
        (self.0, self.1) = (&self.0[of_head..], &self.1[sent - of_head..]);
    }
}

#[cfg(test)]
mod tests;
