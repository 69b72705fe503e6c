//! One HTTP/2 connection to a worker, which requests share. Unlike one of HTTP/1.1 it has a task of its own,
//! since no request may hold up another: the task moves bytes, each stream waits in a window of its own until
//! its client takes it. Which connection a request gets is not decided here (`upstream/links.rs`).

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use h2::{
    Ping, PingPong, Reason,
    client::{self, Connection, SendRequest},
};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::failure::FailureCause;
use crate::{
    clock::{self, Instant},
    limits::{
        ANSWER_BUFFER_BYTES, WORKER_H2_FRAME_BYTES, WORKER_H2_SILENCE, WORKER_H2_STREAMS, WORKER_H2_WINDOW,
    },
};

/// The end of a connection that takes requests. It is closed when this is gone and its last stream has ended.
pub(super) struct Shared {
    sender: SendRequest<Bytes>,
    /// How many have a place on it.
    taken: Arc<AtomicUsize>,
    opened: Instant,
    /// Whether an answer has come over it, and it has not been given up since: then its end is no failure of
    /// its worker.
    kept: Arc<AtomicBool>,
    idle_since: Mutex<Instant>,
}

/// A place for one stream; free again when dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<Shared>);

/// What came of asking for a place.
pub(super) enum Entry {
    /// One was free, and is taken until this is dropped.
    Free(Place),
    /// As many streams are open as the worker or the gateway allows.
    Full,
    /// The connection takes no more: it broke, or its worker said GOAWAY.
    Over,
}

impl Shared {
    /// Greets the worker, and waits until it has greeted too: from then on its own bounds are known, and who
    /// speaks no HTTP/2 has been found out.
    pub(super) async fn open<T>(io: T) -> io::Result<Arc<Self>>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let heard = Arc::new(AtomicBool::new(false));
        let (sender, mut connection) = client::Builder::new()
            .initial_window_size(WORKER_H2_WINDOW)
            .initial_connection_window_size(WORKER_H2_WINDOW * WORKER_H2_STREAMS)
            .data_frame_budget(WORKER_H2_FRAME_BYTES)
            .max_header_list_size(ANSWER_BUFFER_BYTES as u32)
            // What still comes for streams that their clients have left is no reason to end the others.
            .max_concurrent_reset_streams(WORKER_H2_STREAMS as usize)
            .max_local_error_reset_streams(None)
            .enable_push(false)
            .handshake(Listening { io, heard: Arc::clone(&heard) })
            .await
            .map_err(plain)?;
        let closed = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut pings = connection.ping_pong().ok_or_else(closed)?;
        pings.send_ping(Ping::opaque()).map_err(plain)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Ok(())) => Poll::Ready(Err(closed())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(plain(error))),
            Poll::Pending => pings.poll_pong(cx).map_ok(drop).map_err(plain),
        })
        .await?;
        let (taken, kept) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        tokio::spawn(drive(connection, pings, heard, (Arc::clone(&taken), Arc::clone(&kept))));
        let now = Instant::now();
        Ok(Arc::new(Self { sender, taken, opened: now, kept, idle_since: Mutex::new(now) }))
    }

    /// Since when it is there.
    pub(super) fn opened(&self) -> Instant {
        self.opened
    }

    /// A place, if one is free. Not to be called by two at once.
    pub(super) fn enter(self: &Arc<Self>) -> Entry {
        let taken = self.taken.load(Relaxed);
        if taken >= WORKER_H2_STREAMS as usize {
            return Entry::Full;
        }
        let ready = self.sender.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        if matches!(ready, Poll::Ready(Err(_))) {
            return Entry::Over;
        }
        if taken >= self.sender.current_max_send_streams() {
            return Entry::Full;
        }
        Entry::Free(self.first())
    }

    /// A place on a new connection, whatever the worker allows: a stream too many waits for its turn.
    pub(super) fn first(self: &Arc<Self>) -> Place {
        self.taken.fetch_add(1, Relaxed);
        Place(Arc::clone(self))
    }

    /// How long no stream has had a place; `None` while one has.
    pub(super) fn idle(&self) -> Option<std::time::Duration> {
        (self.taken.load(Relaxed) == 0).then(|| self.idle_since.lock().elapsed())
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl Place {
    /// An answer has begun to come.
    pub(super) fn answered(&self) {
        if !self.0.kept.load(Relaxed) {
            self.0.kept.store(true, Relaxed);
        }
    }

    /// Whether the connection is one that has carried answers.
    pub(super) fn is_kept(&self) -> bool {
        self.0.kept.load(Relaxed)
    }

    /// What sends a request; to be used at once.
    pub(super) fn sender(&self) -> SendRequest<Bytes> {
        self.0.sender.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before the place is free, so that no sweep sees a connection that seems idle since long ago.
        *self.0.idle_since.lock() = Instant::now();
        self.0.taken.fetch_sub(1, Relaxed);
    }
}

/// Moves a connection's bytes until it ends, and gives it up where a worker that owes answers is silent.
/// Dropped with it, its streams are told that it broke.
async fn drive<T>(
    mut connection: Connection<T, Bytes>,
    mut pings: PingPong,
    heard: Arc<AtomicBool>,
    (taken, kept): (Arc<AtomicUsize>, Arc<AtomicBool>),
) where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut alarm = Box::pin(clock::sleep(WORKER_H2_SILENCE));
    let mut asked = false;
    loop {
        let ended = poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => alarm.as_mut().poll(cx).map(|()| None),
        });
        if let Some(result) = ended.await {
            if let Err(error) = result {
                tracing::debug!(%error, "a worker's HTTP/2 connection ended");
            }
            return;
        }
        alarm.as_mut().reset(Instant::now() + WORKER_H2_SILENCE);
        if heard.swap(false, Relaxed) {
            // A PING of before has had its answer, if it was sent; the next one can be.
            let _ = pings.poll_pong(&mut Context::from_waker(Waker::noop()));
            asked = false;
        } else if asked {
            tracing::warn!("a worker's HTTP/2 connection is silent, and is given up");
            kept.store(false, Relaxed);
            return;
        } else if taken.load(Relaxed) > 0 {
            asked = pings.send_ping(Ping::opaque()).is_ok();
        }
    }
}

/// Without what the worker adds in its own words.
fn plain(error: h2::Error) -> io::Error {
    let cause = FailureCause::of_h2(&error);
    error.into_io().unwrap_or_else(|| io::Error::other(cause.to_string()))
}

/// Whether a worker says that it has not begun a request: it may be sent again, whatever it is (RFC 9113,
/// section 8.7).
pub(super) fn not_begun(error: &h2::Error) -> bool {
    error.is_remote()
        && (error.is_go_away() || (error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM)))
}

/// Bytes of a connection, with a note whenever some come.
struct Listening<T> {
    io: T,
    heard: Arc<AtomicBool>,
}

impl<T: AsyncRead + Unpin> AsyncRead for Listening<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.heard.store(true, Relaxed);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Listening<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
