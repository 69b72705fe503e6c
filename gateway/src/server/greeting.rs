//! A connection's first bytes, which must come in time: hyper's clock for heads begins once the protocol is known, and what
//! tells HTTP/1.1 from HTTP/2 waits without one. What comes behind them passes untouched.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clock::{self, Sleep};

/// How HTTP/2 begins; the first byte that differs is HTTP/1.1's.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream with a clock until its protocol is known.
#[derive(Debug)]
pub(super) struct Greeting<S> {
    stream: S,
    /// None once it is known.
    wait: Option<Wait>,
}

#[derive(Debug)]
struct Wait {
    /// Bytes of the preface that came.
    came: usize,
    alarm: Pin<Box<Sleep>>,
}

impl<S> Greeting<S> {
    /// The first bytes must come within this time.
    pub(super) fn within(limit: Duration, stream: S) -> Self {
        Self { stream, wait: Some(Wait { came: 0, alarm: Box::pin(clock::sleep(limit)) }) }
    }
}

impl Wait {
    /// Whether these bytes, or their end, decide.
    fn is_over(&mut self, bytes: &[u8]) -> bool {
        let expected = &PREFACE[self.came..];
        let common = bytes.iter().zip(expected).take_while(|(byte, expected)| byte == expected).count();
        self.came += common;
        bytes.is_empty() || common < bytes.len() || self.came == PREFACE.len()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Greeting<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        let Some(wait) = &mut this.wait else { return read };
        if read.is_pending() {
            return wait.alarm.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        if wait.is_over(&buf.filled()[before..]) {
            this.wait = None;
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Greeting<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    /// What becomes of a connection on which these bytes come, and then none until long after the limit.
    async fn after(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let (mut client, server) = tokio::io::duplex(64);
        let mut server = Greeting::within(LIMIT, server);
        client.write_all(bytes).await?;
        let sends = async {
            clock::sleep(LIMIT * 10).await;
            drop(client);
        };
        let mut came = Vec::new();
        let (read, ()) = tokio::join!(server.read_to_end(&mut came), sends);
        read.map(|_| came)
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_too_little_is_given_up_and_who_said_enough_may_pause() {
        for little in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r"] {
            assert_eq!(after(little).await.unwrap_err().kind(), io::ErrorKind::TimedOut, "{little:?}");
        }
        for enough in
            [&b"G"[..], b"PO", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore"]
        {
            assert_eq!(after(enough).await.unwrap(), enough);
        }
    }
}
