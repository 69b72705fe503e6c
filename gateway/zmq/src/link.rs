//! One connection: its handshake, what comes, and what is to be sent. For both kinds of sockets.

use std::{collections::VecDeque, future::Future, io, io::IoSlice, time::Duration};

use bytes::{Buf as _, Bytes};
use keyway_wire::zmtp::{self, Bounds, Incoming, Reader, SocketType};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    task::consume_budget,
};

use crate::limits::{HANDSHAKE_MAX, READ_BYTES, TOGETHER_PIECES};

/// What comes from a peer.
#[derive(Debug)]
pub(crate) struct Inbound<R> {
    stream: R,
    reader: Reader,
}

impl<R: AsyncRead + Unpin> Inbound<R> {
    /// Meets a peer: what it sends from then on, once it is ready.
    pub(crate) async fn open(
        stream: R,
        to: &mut (impl AsyncWrite + Unpin),
        socket: SocketType,
        bounds: Bounds,
    ) -> io::Result<Self> {
        let mut from = Self { stream, reader: Reader::new(socket, bounds) };
        let meeting = async {
            to.write_all(&zmtp::greeting()).await?;
            loop {
                match from.next().await? {
                    Incoming::Greeting => to.write_all(&zmtp::ready(socket)).await?,
                    Incoming::Ready => return Ok(()),
                    _ => {}
                }
            }
        };
        in_time(HANDSHAKE_MAX, meeting).await?;
        Ok(from)
    }

    /// The next thing that has come. May be dropped and asked again: nothing is lost by that.
    pub(crate) async fn next(&mut self) -> io::Result<Incoming> {
        // One read brings hundreds of small things: a peer that sends them without end must let others have
        // their turns.
        consume_budget().await;
        loop {
            if let Some(incoming) = self.reader.read().map_err(io::Error::other)? {
                return Ok(incoming);
            }
            self.reader.unread.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.reader.unread).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// In no more time than this.
pub(crate) async fn in_time<T>(most: Duration, doing: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(most, doing).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Whole messages on their way out, in pieces whose memory other peers and the ring may share.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    pieces: VecDeque<Bytes>,
    bytes: usize,
}

impl Unsent {
    pub(crate) fn push(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        self.pieces.push_back(piece);
    }

    pub(crate) fn extend(&mut self, pieces: impl IntoIterator<Item = Bytes>) {
        for piece in pieces {
            self.push(piece);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// How much it is.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes of each piece that are still to be sent.
    #[cfg(test)]
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().map(Bytes::len)
    }

    /// Sends some of it. May be dropped and called again: nothing is sent twice.
    pub(crate) async fn send_some(&mut self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let slices: Vec<IoSlice<'_>> =
            self.pieces.iter().take(TOGETHER_PIECES).map(|piece| IoSlice::new(piece)).collect();
        let mut sent = to.write_vectored(&slices).await?;
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.bytes -= sent;
        while let Some(piece) = self.pieces.front_mut() {
            let part = sent.min(piece.len());
            piece.advance(part);
            sent -= part;
            if !piece.is_empty() {
                break;
            }
            self.pieces.pop_front();
        }
        Ok(())
    }

    /// Sends all of it.
    pub(crate) async fn send(&mut self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while !self.is_empty() {
            self.send_some(to).await?;
        }
        Ok(())
    }
}
