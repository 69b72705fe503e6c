//! Who is connected. There are so many places; where all are taken, a newcomer gets that of the oldest peer
//! that has nothing going on: one that has not finished its handshake, subscribed to nothing or asked
//! nothing. So connections that say nothing, however many, keep no newcomer out. Only where all are engaged
//! is a newcomer refused.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinHandle, JoinSet},
};

use crate::limits::ACCEPT_PAUSE;

/// One of the places for peers. A newcomer takes it from a peer that is not engaged, if there is no other.
#[derive(Debug, Default)]
pub(crate) struct Place {
    engaged: AtomicBool,
}

impl Place {
    /// Says whether the peer has something going on, for which it keeps its place.
    pub(crate) fn engage(&self, engaged: bool) {
        self.engaged.store(engaged, Relaxed);
    }

    pub(crate) fn is_engaged(&self) -> bool {
        self.engaged.load(Relaxed)
    }
}

/// A socket that takes connections. They end with it.
#[derive(Debug)]
pub(crate) struct Accepting {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Accepting {
    /// Serves each connection by a task of its own, `connections` at once.
    pub(crate) fn start<F>(
        listener: TcpListener,
        connections: usize,
        serve: impl Fn(TcpStream, Arc<Place>) -> F + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let addr = listener.local_addr()?;
        Ok(Self { addr, task: tokio::spawn(accept(listener, connections, serve)) })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes the listening socket and all connections; once it returns, nothing listens any more.
    pub(crate) async fn close(mut self) {
        self.task.abort();
        // It says that it was aborted.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept<F>(listener: TcpListener, connections: usize, serve: impl Fn(TcpStream, Arc<Place>) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let (mut tasks, mut places) = (JoinSet::new(), Places { most: connections, taken: Vec::new() });
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => if places.make_room() {
                    let place = Arc::new(Place::default());
                    let served = serve(stream, Arc::clone(&place));
                    let task = tasks.spawn(async move {
                        let ended = served.await;
                        tracing::debug!(%peer, ?ended, "a ZMQ peer is gone");
                    });
                    places.taken.push((task, place));
                } else {
                    tracing::debug!(%peer, connections, "a ZMQ peer is refused: all places are taken");
                },
                Err(error) => {
                    tracing::warn!(%error, "no connection can be accepted for ZMQ");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = tasks.join_next() => places.forget_gone(),
        }
    }
}

/// The places that are taken, the oldest first.
#[derive(Debug)]
struct Places {
    most: usize,
    taken: Vec<(AbortHandle, Arc<Place>)>,
}

impl Places {
    /// Whether there is room for one more; sends away who must go for it.
    fn make_room(&mut self) -> bool {
        if self.taken.len() < self.most {
            return true;
        }
        self.forget_gone();
        if self.taken.len() < self.most {
            return true;
        }
        let Some(idle) = self.taken.iter().position(|(_, place)| !place.is_engaged()) else {
            return false;
        };
        self.taken.remove(idle).0.abort();
        true
    }

    fn forget_gone(&mut self) {
        self.taken.retain(|(task, _)| !task.is_finished());
    }
}
