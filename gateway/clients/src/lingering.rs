//! The end of a connection whose client may still be sending: its refusal has been written, and what comes
//! now belongs to no request. To close the socket with that unread would reset the connection, and the
//! client's kernel would throw away the answer that lies there unread (RFC 9112, section 9.6). So this side
//! is closed alone, and what comes is read and dropped until the client closes its own.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    runtime::Handle,
    time::{self, Instant, Sleep},
};

use crate::limits::{LINGER_IDLE, LINGER_MAX};

/// A stream that ends so.
#[derive(Debug)]
pub struct Lingering<S: Stream> {
    /// `None` once it is dropped.
    stream: Option<S>,
    /// Whether there is an answer that the client may not have read.
    wrote: bool,
    /// Whether the client has closed its side, or the stream is broken.
    over: bool,
    /// Once this side is closed.
    wait: Option<Wait>,
}

/// What may be a client's connection.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for S {}

#[derive(Debug)]
struct Wait {
    until: Instant,
    /// When nothing has come for so long.
    alarm: Pin<Box<Sleep>>,
}

impl<S: Stream> Lingering<S> {
    /// A stream that is open.
    pub fn new(stream: S) -> Self {
        Self { stream: Some(stream), wrote: false, over: false, wait: None }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Reads and drops what comes, until the client has closed or has had its time.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut room = [0; 8 << 10];
        while !self.over {
            let mut dropped = ReadBuf::new(&mut room);
            let Ok(stream) = self.stream() else { break };
            let read = stream.poll_read(cx, &mut dropped);
            let now = Instant::now();
            let until = self.wait.as_ref().map_or(now + LINGER_MAX, |wait| wait.until);
            if now >= until {
                break;
            }
            let due = until.min(now + LINGER_IDLE);
            let wait =
                self.wait.get_or_insert_with(|| Wait { until, alarm: Box::pin(time::sleep_until(due)) });
            match read {
                Poll::Ready(read) => {
                    self.over = read.is_err() || dropped.filled().is_empty();
                    wait.alarm.as_mut().reset(due);
                }
                Poll::Pending => {
                    ready!(wait.alarm.as_mut().poll(cx));
                    break;
                }
            }
        }
        Poll::Ready(())
    }
}

impl<S: Stream> Drop for Lingering<S> {
    /// hyper drops the connection of a refused upgrade without closing it first.
    fn drop(&mut self) {
        let unread = self.wrote && !self.over && self.wait.is_none();
        if let (Some(stream), true, Ok(runtime)) = (self.stream.take(), unread, Handle::try_current()) {
            let mut rest = Self::new(stream);
            runtime.spawn(async move { rest.shutdown().await });
        }
    }
}

impl<S: Stream> AsyncRead for Lingering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, room) = (buf.filled().len(), buf.remaining());
        let read = self.stream()?.poll_read(cx, buf);
        if let Poll::Ready(read) = &read {
            self.over = read.is_err() || (buf.filled().len() == before && room > 0);
        }
        read
    }
}

impl<S: Stream> AsyncWrite for Lingering<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.wrote = true;
        self.stream()?.poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.wait.is_none() {
            let closed = ready!(self.stream()?.poll_shutdown(cx));
            self.over |= closed.is_err();
            closed?;
        }
        self.poll_over(cx).map(Ok)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wrote = true;
        self.stream()?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, DuplexStream, duplex};

    use super::*;

    fn pair() -> (DuplexStream, Lingering<DuplexStream>) {
        let (client, server) = duplex(64);
        (client, Lingering::new(server))
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_client_still_sends_is_read_until_it_closes() {
        let (mut client, mut server) = pair();
        server.write_all(b"no").await.unwrap();
        let sends = async {
            // Far more than there is room for.
            client.write_all(&[7; 1_000]).await.unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.unwrap();
            drop(client);
            answer
        };
        let (answer, closed) = tokio::join!(sends, server.shutdown());
        assert!(closed.is_ok());
        assert_eq!(answer, b"no");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_only_dropped_ends_so_too() {
        let (mut client, mut server) = pair();
        server.write_all(b"no").await.unwrap();
        drop(server);
        client.write_all(&[7; 1_000]).await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"no");
        // Nobody is waited for who was told nothing.
        let (mut client, server) = pair();
        drop(server);
        assert!(client.write_all(&[7; 1_000]).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_closed_first_is_not_waited_for() {
        let (client, mut server) = pair();
        drop(client);
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0);
        let before = Instant::now();
        server.shutdown().await.unwrap();
        assert!(before.elapsed().is_zero());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_says_nothing_has_its_time_and_one_that_never_ends_has_a_little_more() {
        let (client, mut server) = pair();
        let before = Instant::now();
        server.shutdown().await.unwrap();
        assert_eq!(before.elapsed().as_secs(), LINGER_IDLE.as_secs());
        drop(client);

        let (mut client, mut server) = pair();
        let sends = async {
            while client.write_all(b"more").await.is_ok() {
                time::sleep(LINGER_IDLE / 4).await;
            }
        };
        let before = Instant::now();
        let closes = async {
            server.shutdown().await.unwrap();
            drop(server);
        };
        tokio::join!(sends, closes);
        let seconds = before.elapsed().as_secs_f64();
        assert!(seconds >= LINGER_MAX.as_secs_f64(), "{seconds}");
        assert!(seconds <= (LINGER_MAX + LINGER_IDLE).as_secs_f64(), "{seconds}");
    }
}
