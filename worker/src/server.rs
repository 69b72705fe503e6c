//! Sockets: accept, HTTP/1.1 and HTTP/2 without TLS, drain at shutdown. What a request means is `api.rs`'s
//! business; what a client may send and how long it may take, `gateway/clients`', which the gateway keeps to
//! as well.
//!
//! Read these files in order: `server.rs` (here), `engine.rs`, `scheduler.rs`, `block_manager.rs`,
//! `model.rs`.
//!
//! Next: `engine.rs`, reached through `api.rs`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::{Builder, Connection};
use keyway_clients::clients::{Clients, Place};
use keyway_clients::ending::until_end;
use keyway_clients::incoming::Incoming;
use keyway_clients::lingering::Lingering;
use keyway_clients::stalls::Taken;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::api::{self, App};
use crate::limits::{ClientBounds, DRAIN_MAX};

/// Pause after a failed accept, usually for want of file descriptors: trying at once would only burn the
/// processor.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// How often idle connections are looked for, at least.
const IDLE_LOOK: Duration = Duration::from_secs(1);

/// Runs streams of HTTP/2, which end where their client takes nothing of its answer for so long.
#[derive(Debug, Clone)]
struct Streams {
    stall: Duration,
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        tokio::spawn(Taken::new(stream, self.stall));
    }
}

/// Serves until `shutdown` fires or its sender is dropped, then lets open answers end, for at most
/// [`DRAIN_MAX`].
pub(crate) async fn serve(listener: TcpListener, app: Arc<App>, mut shutdown: oneshot::Receiver<()>) {
    let bounds = app.clients;
    give_up_on_readers(&listener, bounds.stall);
    let clients = Arc::new(Clients::default());
    let mut builder = Builder::new(Streams { stall: bounds.stall });
    keyway_clients::bound(&mut builder, bounds.header_read);
    let builder = Arc::new(builder);
    let mut tasks = JoinSet::new();
    let accept = async {
        loop {
            let (stream, peer) = accept(&listener).await;
            let place = clients.wait_for_place(peer.ip(), || bounds.connections).await;
            while tasks.try_join_next().is_some() {} // those that are over
            tasks.spawn(connection(Arc::clone(&app), Arc::clone(&builder), stream, place));
        }
    };
    tokio::select! {
        () = accept => {}
        () = end_idle(&clients, bounds) => {}
        _ = &mut shutdown => {}
    }
    drop(listener);
    clients.drain();
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN_MAX, all).await.is_err() {
        tracing::warn!(seconds = DRAIN_MAX.as_secs(), "answers still open after the drain are cut off");
    }
    tasks.shutdown().await;
}

/// Serves one connection until its end.
async fn connection(app: Arc<App>, builder: Arc<Builder<Streams>>, stream: TcpStream, place: Place) {
    let client = Arc::clone(&place.client);
    let stream = Incoming::within(app.clients.header_read, Lingering::new(stream), Arc::clone(&client));
    let asking = Arc::clone(&client);
    let service = service_fn(move |request| {
        asking.asks(tokio::time::Instant::now());
        api::handle(Arc::clone(&app), Arc::clone(&asking), request)
    });
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    if let Some(Err(error)) = until_end(connection, &client, Connection::graceful_shutdown).await {
        tracing::debug!(error, "a connection ended early");
    }
    drop(place);
}

/// Ends connections that ask for nothing, for ever. Over HTTP/1.1 hyper does that too, by its own clock.
async fn end_idle(clients: &Clients, bounds: ClientBounds) {
    // Who may still take the end of an answer is not idle.
    let limit = bounds.header_read.max(bounds.stall);
    loop {
        tokio::time::sleep(IDLE_LOOK.min(limit / 4)).await;
        clients.end_idle(limit);
    }
}

/// Lets TCP's own clock end connections whose client takes nothing of what was sent. Linux alone has it.
fn give_up_on_readers(listener: &TcpListener, stall: Duration) {
    #[cfg(target_os = "linux")]
    if let Err(error) = socket2::SockRef::from(listener).set_tcp_user_timeout(Some(stall)) {
        tracing::warn!(%error, "clients that read nothing keep their connections");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (listener, stall);
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // A token must not wait for the acknowledgement of the one before it.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no TCP_NODELAY");
                }
                return (stream, peer);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}
