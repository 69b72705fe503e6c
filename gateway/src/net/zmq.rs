//! The seam for ZMQ: a worker's live stream of KV events, and its replays. Whole messages in and out; what they mean is
//! `kv_events.rs`'s. A lost connection ends a stream: whoever owns it connects anew and knows that something was missed.

use std::{fmt, io, time::Duration};

use bytes::Bytes;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use zeromq::{
    DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage,
};

use crate::clock;

/// The frames of one message.
pub type Frames = Vec<Bytes>;

/// A connected socket, and what it says of its connection.
struct Link<S> {
    socket: S,
    events: BoxStream<'static, SocketEvent>,
}

impl<S: Socket + SocketRecv + Send> Link<S> {
    async fn connect(endpoint: &str, timeout: Duration) -> io::Result<Self> {
        let mut options = SocketOptions::default();
        options.connect_timeout(timeout);
        let mut socket = S::with_options(options);
        let events = socket.monitor().boxed();
        socket.connect(endpoint).await.map_err(other)?;
        Ok(Self { socket, events })
    }

    /// The next message. May be dropped and asked again: nothing is lost by that.
    async fn next(&mut self) -> io::Result<Frames> {
        loop {
            tokio::select! {
                // What came before the connection was lost is read first.
                biased;
                message = self.socket.recv() => return Ok(message.map_err(other)?.into_vec()),
                event = self.events.next() => if let Some(SocketEvent::Disconnected(_)) | None = event {
                    return Err(io::ErrorKind::ConnectionReset.into());
                },
            }
        }
    }
}

/// An error of the system stays one, so that what the gateway lacks is told from what its worker does.
fn other(error: ZmqError) -> io::Error {
    match error {
        ZmqError::Network(error) => error,
        error => io::Error::other(error),
    }
}

/// A worker's live stream.
pub struct LiveStream(Link<SubSocket>);

impl LiveStream {
    /// Connects, and subscribes to every topic.
    pub async fn connect(endpoint: &str, timeout: Duration) -> io::Result<Self> {
        let mut link: Link<SubSocket> = Link::connect(endpoint, timeout).await?;
        link.socket.subscribe("").await.map_err(other)?;
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
    /// Where to.
    pub endpoint: String,
    /// What a DEALER sends.
    pub request: [Vec<u8>; 2],
    /// Before anything is done.
    pub pause: Duration,
    /// For the connection.
    pub connect_timeout: Duration,
    /// For each reply.
    pub reply_timeout: Duration,
}

/// The replies to a request. An error ends them; otherwise whoever reads them knows the last one.
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

async fn request(ask: &Ask) -> io::Result<Link<DealerSocket>> {
    clock::sleep(ask.pause).await;
    let mut link: Link<DealerSocket> = Link::connect(&ask.endpoint, ask.connect_timeout).await?;
    let [first, second] = ask.request.clone();
    let mut message = ZmqMessage::from(first);
    message.push_back(second.into());
    link.socket.send(message).await.map_err(other)?;
    Ok(link)
}
