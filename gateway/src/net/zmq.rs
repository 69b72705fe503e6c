//! The seam for ZMQ: a worker's live stream of KV events, and its replays. Whole messages in and out; what
//! they mean is `kv_events.rs`'s. A lost connection ends a stream: its owner connects anew and knows that
//! something was missed.

use std::{fmt, io, time::Duration};

use bytes::{Buf, Bytes};
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
pub use keyway_wire::zmtp::Frames;
use keyway_wire::zmtp::{self, Bounds, Incoming, Reader, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{TcpStream, dial};
use crate::clock;

/// What a worker may send in one message: one step's events. A block of 16 tokens takes some hundred bytes of
/// it, its tokens as numbers of up to five bytes, so this is what half a million tokens stored in one step
/// say. keyway-worker's snapshots come in parts of 100 KB.
const BOUNDS: Bounds = Bounds { message_bytes: 4 << 20, frames: 8 };

/// Bytes for which room is made before each read.
const READ_BYTES: usize = 64 << 10;

/// A connection that speaks ZMTP, used once the peer is ready.
struct Link {
    stream: TcpStream,
    reader: Reader,
    /// What is to be sent before anything is read.
    unsent: Bytes,
}

impl Link {
    /// Connects to `tcp://HOST:PORT` and waits until the peer is ready.
    async fn connect(endpoint: &str, socket: SocketType, timeout: Duration) -> io::Result<Self> {
        let connecting = async {
            let (host, port) = place(endpoint)?;
            let stream = dial(host, port).await?;
            stream.set_nodelay(true)?;
            let unsent = Bytes::copy_from_slice(&zmtp::greeting());
            let mut link = Self { stream, reader: Reader::new(socket, BOUNDS), unsent };
            loop {
                match link.incoming().await? {
                    Incoming::Greeting => link.unsent = zmtp::ready(socket).into(),
                    Incoming::Ready => return Ok(link),
                    _ => {}
                }
            }
        };
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("not connected within {timeout:?}"));
        clock::timeout(timeout, connecting).await.map_err(late)?
    }

    /// The next message. May be dropped and asked again: nothing is lost by that.
    async fn next(&mut self) -> io::Result<Frames> {
        loop {
            match self.incoming().await? {
                Incoming::Message(frames) => return Ok(frames),
                Incoming::Ping(context) => self.unsent = zmtp::pong(&context).into(),
                _ => {}
            }
        }
    }

    /// As [`Link::next`], for all that can come.
    async fn incoming(&mut self) -> io::Result<Incoming> {
        self.flush().await?;
        loop {
            if let Some(incoming) = self.reader.read().map_err(io::Error::other)? {
                return Ok(incoming);
            }
            self.reader.unread.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.reader.unread).await? == 0 {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
    }

    async fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.unsent = bytes.into();
        self.flush().await
    }

    async fn flush(&mut self) -> io::Result<()> {
        while self.unsent.has_remaining() {
            self.stream.write_buf(&mut self.unsent).await?;
        }
        Ok(())
    }
}

/// Host and port of `tcp://HOST:PORT`, as the configuration has checked it.
fn place(endpoint: &str) -> io::Result<(&str, u16)> {
    let place = endpoint.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
    let place = place.and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) =
        place.ok_or_else(|| io::Error::other(format!("{endpoint:?} is no tcp://HOST:PORT")))?;
    Ok((host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host), port))
}

/// A worker's live stream.
pub struct LiveStream(Link);

impl LiveStream {
    /// Connects, and subscribes to every topic.
    pub async fn connect(endpoint: &str, timeout: Duration) -> io::Result<Self> {
        let mut link = Link::connect(endpoint, SocketType::Sub, timeout).await?;
        link.send(zmtp::subscribe_to_all()).await?;
        Ok(Self(link))
    }

    /// The next message; an error once the connection is lost. May be dropped and asked again.
    pub async fn next(&mut self) -> io::Result<Frames> {
        self.0.next().await
    }
}

impl fmt::Debug for LiveStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LiveStream")
    }
}

/// How a request is made and how long is waited.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The worker's replay socket, as `tcp://HOST:PORT`.
    pub endpoint: String,
    /// What a DEALER sends.
    pub request: [Vec<u8>; 2],
    /// Before anything is done.
    pub pause: Duration,
    /// Longest time until the connection is open and the peer is ready.
    pub connect_timeout: Duration,
    /// Longest time until each reply; after it the replies end with an error.
    pub reply_timeout: Duration,
}

/// The replies to a request. An error ends them; otherwise their reader knows the last one.
pub fn ask(ask: Ask) -> BoxStream<'static, io::Result<Frames>> {
    stream::try_unfold((None, ask), |(link, ask)| async move {
        let mut link = match link {
            Some(link) => link,
            None => request(&ask).await?,
        };
        let frames = clock::timeout(ask.reply_timeout, link.next())
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        Ok(Some((frames, (Some(link), ask))))
    })
    .boxed()
}

async fn request(ask: &Ask) -> io::Result<Link> {
    clock::sleep(ask.pause).await;
    let mut link = Link::connect(&ask.endpoint, SocketType::Dealer, ask.connect_timeout).await?;
    link.send(zmtp::message(&ask.request)).await?;
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_configured() {
        for (endpoint, read) in [
            ("tcp://10.0.0.7:5557", Some(("10.0.0.7", 5557))),
            ("tcp://worker-0.pool:1", Some(("worker-0.pool", 1))),
            ("tcp://[fd00::7]:5557", Some(("fd00::7", 5557))),
            ("ipc:///tmp/x", None),
            ("tcp://a", None),
            ("tcp://a:70000", None),
        ] {
            assert_eq!(place(endpoint).ok(), read, "{endpoint}");
        }
    }
}
