//! The listening socket: accepts connections, speaks HTTP/1.1 and HTTP/2 (prior knowledge, or by
//! ALPN where it speaks TLS) on them, bounds them, and
//! drains them on shutdown. What a request means is the stack's business.
//!
//! Next: [`crate::edge::stack`].

mod head_timer;
mod intake;

use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hyper::{rt::Executor, service::Service};
use hyper_util::{rt::TokioIo, server::conn::auto};
use keyway_clients::{
    clients::Place, ending::until_end, incoming::Incoming, lingering::Lingering, stalls::Taken,
};
use prometheus::IntGauge;
use tokio::io::{AsyncRead, AsyncWrite};

use self::head_timer::HeadTimer;
pub use self::intake::Intake;
use crate::{
    client::Client,
    clock::{self, KeptTimer},
    edge::stack::{Arrived, Stack},
    limits::{DRAIN_LOOK, DRAIN_QUIET, SHORTAGE_LOOK},
    machine::{
        cores::Cores,
        descriptors::{self, Shortages},
    },
    net::{self, TcpStream, tls::ServerTls},
    proxy::body::{Request, Response},
    shortage::Shortage,
    upstream::Upstream,
};

/// What the server needs besides the stack.
#[derive(Debug)]
pub struct Server {
    /// Where connections come in.
    pub listener: net::TcpListener,
    /// How many connections there may be, and how they end.
    pub intake: Arc<Intake>,
    /// TLS, if clients are to speak it.
    pub tls: Option<Arc<ServerTls>>,
    /// Where connections are served; `None`: on the runtime that accepts them.
    pub cores: Option<Arc<Cores>>,
    /// How long a client may take nothing of an answer (HTTP/2; over HTTP/1.1 the listener's sockets know).
    pub client_stall: Duration,
    /// `keyway_connections`, which both listeners count in: up with each connection let in, down at its end.
    pub connections: IntGauge,
    /// What the gateway lacks is told there.
    pub shortages: Shortages,
    /// Whose kept connections make room where descriptors are short; `None`: operators', who are let in to
    /// the last one.
    pub makes_room: Option<Upstream>,
}

/// Serves until `shutdown` completes, then lets open requests finish within the drain time. Returns whether
/// all did.
pub async fn serve(server: Server, stack: impl Stack, shutdown: impl Future<Output = ()>) -> bool {
    let clients = Arc::clone(&server.intake.clients);
    tokio::select! {
        () = accept_all(&server, stack, shutdown) => {}
        () = end_idle(&server) => {}
    }
    drop(server.listener);
    let within_s = server.intake.drain_timeout().as_secs();
    tracing::info!(
        connections = clients.count(),
        within_s,
        "draining: open requests may end; a second signal ends at once"
    );
    let emptied = async || {
        while clients.count() > 0 {
            clock::sleep(DRAIN_LOOK).await;
        }
    };
    let leaving = async {
        // Clients that send one request after the other are told to go by the answer to the next, so that
        // none is crossed by a close; who is silent for as long is closed.
        let quiet = clock::sleep(DRAIN_QUIET);
        tokio::select! { () = quiet => {}, () = emptied() => {} }
        clients.drain();
        emptied().await;
    };
    clock::timeout(server.intake.drain_timeout(), leaving).await.is_ok()
}

/// Lets connections in until `shutdown` completes.
async fn accept_all(server: &Server, stack: impl Stack, shutdown: impl Future<Output = ()>) {
    let spread = Spread { cores: server.cores.clone(), client_stall: server.client_stall };
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => return,
            accepted = accept(server) => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, or the peer left already: the listener itself is fine.
                if let Some(lacks) = Shortage::of(&error) {
                    server.shortages.note(lacks);
                } else {
                    tracing::warn!(%error, "a connection could not be accepted");
                }
                clock::sleep(SHORTAGE_LOOK).await;
                continue;
            }
        };
        let (place, is_last) = tokio::select! {
            // It was let in before.
            () = &mut shutdown => (server.intake.clients.any_place(peer.ip()), true),
            place = place(server, peer.ip()) => (place, false),
        };
        let open = Open::count(&server.connections, place);
        let service =
            Called { stack: stack.clone(), client: Arc::clone(open.client()), timer: Arc::default() };
        let header_read = server.intake.header_read();
        let connection = Connection { spread: spread.clone(), header_read, tls: server.tls.clone(), service };
        if let Some(cores) = &server.cores {
            match stream.into_std() {
                // What it is woken by is the runtime that it is served on.
                Ok(stream) => cores.run(connection.serve(open, async { TcpStream::from_std(stream) })),
                Err(error) => tracing::warn!(%error, "a connection could not be handed to a core"),
            }
        } else {
            tokio::spawn(connection.serve(open, async { Ok(stream) }));
        }
        if is_last {
            return;
        }
    }
}

/// A place for a client from this address, once there is one.
async fn place(server: &Server, from: IpAddr) -> Place {
    server.intake.clients.wait_for_place(from, || server.intake.bound()).await
}

/// Ends connections that ask for nothing, for ever. Over HTTP/1.1 hyper does that too, by its own clock.
async fn end_idle(server: &Server) {
    loop {
        // Who may still take the end of an answer is not idle.
        let limit = server.intake.header_read().max(server.client_stall);
        clock::sleep((limit / 4).min(Duration::from_secs(1))).await;
        server.intake.clients.end_idle(limit);
    }
}

/// What serves a client's connection.
struct Connection<S> {
    spread: Spread,
    header_read: Duration,
    tls: Option<Arc<ServerTls>>,
    service: Called<S>,
}

/// The stack as hyper calls it: at once, as it is ready at all times.
#[derive(Clone)]
struct Called<S> {
    stack: S,
    client: Arc<Client>,
    timer: Arc<KeptTimer>,
}

impl<S: Stack> Service<Request> for Called<S> {
    type Response = Response;
    type Error = Infallible;
    type Future = S::Future;

    fn call(&self, request: Request) -> S::Future {
        let (client, timer) = (Arc::clone(&self.client), Arc::clone(&self.timer));
        self.stack.clone().call(Arrived { request, client, timer })
    }
}

impl<S: Stack> Connection<S> {
    /// Serves the connection until its end; an error is only logged, and the place is given back either way.
    async fn serve(self, open: Open, stream: impl Future<Output = io::Result<TcpStream>>) {
        if let Err(error) = self.speak(stream).await {
            tracing::debug!(%error, "a client connection ended with an error");
        }
        drop(open);
    }

    async fn speak(
        self,
        stream: impl Future<Output = io::Result<TcpStream>>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let stream = stream.await?;
        match self.tls.clone() {
            None => self.answer(Lingering::new(stream)).await,
            Some(tls) => self.answer(Lingering::new(tls.accept(stream).await?)).await,
        }
    }

    async fn answer(
        self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let client = Arc::clone(&self.service.client);
        let stream = Incoming::within(self.header_read, stream, Arc::clone(&client));
        let builder = connection_builder(self.spread, self.header_read);
        // It keeps the builder for as long as the protocol is not known.
        let connection = builder.serve_connection(TokioIo::new(stream), self.service).into_owned();
        until_end(connection, &client, auto::Connection::graceful_shutdown).await.unwrap_or(Ok(()))
    }
}

/// Where a connection's streams are served (HTTP/2).
#[derive(Clone)]
struct Spread {
    cores: Option<Arc<Cores>>,
    client_stall: Duration,
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Spread {
    fn execute(&self, stream: F) {
        let stream = Taken::new(stream, self.client_stall);
        match &self.cores {
            Some(cores) => cores.run_near(stream),
            None => drop(tokio::spawn(stream)),
        }
    }
}

/// An open connection's place; given back on drop.
struct Open {
    gauge: IntGauge,
    place: Place,
}

impl Open {
    fn count(gauge: &IntGauge, place: Place) -> Self {
        gauge.inc();
        Self { gauge: gauge.clone(), place }
    }

    fn client(&self) -> &Arc<Client> {
        &self.place.client
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

/// The next client, once there is what its requests will need.
async fn accept(server: &Server) -> io::Result<(TcpStream, SocketAddr)> {
    if let Some(upstream) = &server.makes_room {
        room(upstream, &server.shortages).await;
    }
    net::accept(&server.listener).await
}

/// Waits until there are descriptors besides those that are not clients'. Who waits to be accepted is refused
/// nothing.
async fn room(upstream: &Upstream, shortages: &Shortages) {
    let mut noted = false;
    while descriptors::are_short_for_clients() {
        if upstream.shed() {
            continue;
        }
        if !std::mem::replace(&mut noted, true) {
            shortages.note(Shortage::Descriptors);
        }
        clock::sleep(SHORTAGE_LOOK).await;
    }
}

/// What one connection is made by: its timer is its own.
fn connection_builder(spread: Spread, header_read: Duration) -> auto::Builder<Spread> {
    let mut builder = auto::Builder::new(spread);
    keyway_clients::bound(&mut builder, header_read);
    // Heads, events and most answers are small: to copy them together is cheaper than to say where each part
    // lies.
    builder.http1().writev(false).timer(HeadTimer::default());
    builder
}
