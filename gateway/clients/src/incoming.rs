//! What comes on a connection, which is looked at as it passes. The first bytes must come in time: hyper's
//! clock for heads begins once the protocol is known, and what tells HTTP/1.1 from HTTP/2 waits without one.
//! Over HTTP/1.1 a head that can be framed in two ways is spoiled (`heads.rs`). Over HTTP/2, frames that ask
//! for nothing must not be too many (`frames.rs`): of a client that floods nothing more is read.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{self, Sleep},
};

use crate::{
    client::{Client, Leave},
    frames::Frames,
    heads::Heads,
};

/// How HTTP/2 begins; the first byte that differs is HTTP/1.1's.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream whose client is looked at.
#[derive(Debug)]
pub struct Incoming<S> {
    stream: S,
    client: Arc<Client>,
    speaks: Speaks,
}

/// What the client speaks.
#[derive(Debug)]
enum Speaks {
    NotKnown(Wait),
    Http1(Heads),
    Http2(Frames),
    /// Too many frames of HTTP/2.
    TooMuch,
}

#[derive(Debug)]
struct Wait {
    /// Bytes of the preface that came.
    came: usize,
    alarm: Pin<Box<Sleep>>,
}

impl<S> Incoming<S> {
    /// The first bytes must come within this time.
    pub fn within(limit: Duration, stream: S, client: Arc<Client>) -> Self {
        let wait = Wait { came: 0, alarm: Box::pin(time::sleep(limit)) };
        Self { stream, client, speaks: Speaks::NotKnown(wait) }
    }

    /// Looks at what came.
    fn see(&mut self, bytes: &mut [u8]) {
        match &mut self.speaks {
            Speaks::Http1(heads) => heads.see(bytes),
            Speaks::Http2(frames) => {
                if !frames.may_come(bytes) {
                    self.speaks = Speaks::TooMuch;
                    self.client.leave(Leave::Flooding);
                }
            }
            Speaks::TooMuch => {}
            Speaks::NotKnown(wait) => match wait.behind_preface(bytes) {
                Begun::Not => {}
                Begun::Http1 => {
                    // Of its first line a part may have come before, as the preface's: that line says nothing
                    // of a body.
                    self.speaks = Speaks::Http1(Heads::new());
                    self.see(bytes);
                }
                Begun::Http2(begins) => {
                    self.speaks = Speaks::Http2(Frames::new());
                    self.see(&mut bytes[begins..]);
                }
            },
        }
    }
}

/// What the first bytes say.
enum Begun {
    Not,
    Http1,
    /// Its frames begin at this place of the bytes.
    Http2(usize),
}

impl Wait {
    /// Whether these bytes, or their end, decide.
    fn behind_preface(&mut self, bytes: &[u8]) -> Begun {
        let expected = &PREFACE[self.came..];
        let common = bytes.iter().zip(expected).take_while(|(byte, expected)| byte == expected).count();
        self.came += common;
        if self.came == PREFACE.len() {
            Begun::Http2(common)
        } else if bytes.is_empty() || common < bytes.len() {
            Begun::Http1
        } else {
            Begun::Not
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Incoming<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Speaks::TooMuch = this.speaks {
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if read.is_ready() {
            this.see(&mut buf.filled_mut()[before..]);
        } else if let Speaks::NotKnown(wait) = &mut this.speaks {
            return wait.alarm.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Incoming<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(wrote)
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
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<S> Incoming<S> {
    fn wrote(&mut self, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Speaks::Http2(frames), Poll::Ready(Ok(bytes))) = (&mut self.speaks, &wrote) {
            frames.wrote(*bytes);
        }
        wrote
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
        let mut server = Incoming::within(LIMIT, server, Client::alone());
        client.write_all(bytes).await?;
        let sends = async {
            time::sleep(LIMIT * 10).await;
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

    #[tokio::test(start_paused = true)]
    async fn of_a_client_that_floods_nothing_more_is_read() {
        let (mut client, server) = tokio::io::duplex(64);
        let connection = Client::alone();
        let mut server = Incoming::within(LIMIT, server, Arc::clone(&connection));
        let floods = async {
            client.write_all(PREFACE).await.unwrap();
            loop {
                client.write_all(b"\0\0\x08\x06\0\0\0\0\0flooding").await.unwrap();
            }
        };
        let reads = async {
            let mut came = 0;
            while let Ok(read) = time::timeout(LIMIT, server.read(&mut [0; 100])).await {
                came += read.unwrap();
            }
            came
        };
        let came = tokio::select! { () = floods => unreachable!("floods without end"), came = reads => came };
        assert!(came > 4_096 * 17 && came < 5_000 * 17, "{came} bytes");
        assert!(connection.leaves());
    }
}
