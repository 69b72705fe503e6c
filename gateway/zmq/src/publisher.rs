//! PUB: everyone hears what it subscribed to (ZeroMQ RFC 29). Messages are kept in `ring.rs`, once; who is
//! too slow for them misses the oldest, and who takes nothing for long is disconnected.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use keyway_wire::zmtp::{self, Incoming, SocketType};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::{
    accept::{Accepting, Place},
    limits::{PubLimits, SUBSCRIBER},
    link::{Inbound, Unsent},
    ring::{Message, Ring},
    topics::Topics,
};

/// A PUB socket. It and its connections close when it is dropped.
pub struct PubSocket {
    shared: Arc<Shared>,
    accepting: Accepting,
}

/// What all subscribers share.
struct Shared {
    ring: Mutex<Ring>,
    /// Wakes subscribers: the number of the message that comes next.
    end: watch::Sender<u64>,
    missed: AtomicU64,
    limits: PubLimits,
}

impl PubSocket {
    /// Publishes to those who connect to `listener`. To be called within a runtime.
    ///
    /// # Errors
    /// Where the listener has no address.
    pub fn new(listener: TcpListener, limits: PubLimits) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(limits));
        let own = Arc::clone(&shared);
        let accepting = Accepting::start(listener, limits.connections, move |stream, place| {
            let shared = Arc::clone(&own);
            async move {
                stream.set_nodelay(true)?;
                serve(stream, &shared, &place).await
            }
        })?;
        Ok(Self { shared, accepting })
    }

    /// The address that subscribers connect to, with the port that the system chose if the owner asked for
    /// port 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.accepting.addr()
    }

    /// Publishes one message, whose first frame is what subscribers filter by. Waits for no subscriber.
    pub fn send(&self, frames: &[Bytes]) {
        self.shared.send(frames);
    }

    /// Messages that were gone when a slow subscriber came to them, whether it wanted them or not, for each
    /// such subscriber. It is known of one once that goes on.
    pub fn missed(&self) -> u64 {
        self.shared.missed.load(Relaxed)
    }

    /// Closes the socket and its connections; once it returns, nothing listens any more.
    pub async fn close(self) {
        self.accepting.close().await;
    }
}

impl fmt::Debug for PubSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PubSocket").field("addr", &self.local_addr()).finish_non_exhaustive()
    }
}

impl Shared {
    fn new(limits: PubLimits) -> Self {
        let ring = Mutex::new(Ring::new(limits.kept_messages, limits.kept_bytes));
        Self { ring, end: watch::Sender::new(0), missed: AtomicU64::new(0), limits }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, frames: &[Bytes]) {
        let topic = frames.first().cloned().unwrap_or_default();
        let message = Message { topic, pieces: zmtp::shared_message(frames) };
        let end = {
            let mut ring = self.ring();
            ring.push(message);
            ring.end()
        };
        self.end.send_replace(end);
    }
}

/// Serves one subscriber until it is gone, which it always is with an error.
async fn serve<S>(stream: S, shared: &Shared, place: &Place) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite,
{
    let (from, mut to) = tokio::io::split(stream);
    let mut from = Inbound::open(from, &mut to, SocketType::Pub, SUBSCRIBER).await?;
    let mut news = shared.end.subscribe();
    let (mut topics, mut next) = (Topics::default(), 0);
    let (mut unsent, mut pong) = (Unsent::default(), None);
    let mut moved = Instant::now();
    loop {
        if unsent.is_empty() {
            // The last ping is answered; a peer that sends more of them than it hears wants no answer to
            // each.
            if let Some(pong) = pong.take() {
                unsent.push(pong);
            }
            if !topics.is_empty() {
                let end = *news.borrow_and_update();
                let gone = shared.ring().read(&mut next, &topics, &mut unsent);
                shared.missed.fetch_add(gone, Relaxed);
                if unsent.is_empty() && next < end {
                    tokio::task::yield_now().await;
                    continue;
                }
            }
            moved = Instant::now();
        }
        tokio::select! {
            incoming = from.next() => match incoming? {
                Incoming::Subscribe(topic) => {
                    let end = shared.ring().end();
                    if topics.is_empty() {
                        next = end;
                    }
                    if !topics.add(&topic, end) {
                        return Err(io::Error::other("it subscribes to more than a subscriber may"));
                    }
                    place.engage(true);
                }
                Incoming::Cancel(topic) => {
                    topics.remove(&topic);
                    place.engage(!topics.is_empty());
                }
                Incoming::Ping(context) => pong = Some(zmtp::pong(&context).into()),
                _ => {}
            },
            sent = unsent.send_some(&mut to), if !unsent.is_empty() => {
                sent?;
                moved = Instant::now();
            }
            () = sleep_until(moved + shared.limits.stall), if !unsent.is_empty() => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            changed = news.changed(), if unsent.is_empty() && !topics.is_empty() => {
                changed.map_err(io::Error::other)?;
            }
        }
    }
}

#[cfg(test)]
mod tests;
