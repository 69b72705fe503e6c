//! The listening socket: accepts connections, speaks HTTP/1.1 and HTTP/2 (prior knowledge, or by
//! ALPN where it speaks TLS) on them, bounds them, and
//! drains them on shutdown. What a request means is the stack's business.
//!
//! Next: [`crate::stack`].

mod greeting;
mod intake;
mod lingering;
pub mod stalls;

use std::{convert::Infallible, error::Error, future::Future, io, sync::Arc, time::Duration};

use hyper::{rt::Executor, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
};
use prometheus::IntGauge;

pub use self::intake::Intake;
use self::{greeting::Greeting, intake::Slot, lingering::Lingering, stalls::Taken};
use crate::{
    body::{Request, Response},
    clock,
    cores::Cores,
    descriptors::{self, Shortages},
    limits::{
        DRAIN_LOOK, DRAIN_QUIET, HEAD_BUFFER_BYTES, MAX_H2_FAULTY_STREAMS, MAX_H2_HEADER_LIST_BYTES,
        MAX_H2_STREAMS, MAX_H2_UNSEEN_RESETS, SHORTAGE_LOOK,
    },
    net::{self, Shortage, TcpStream},
    stack::Stack,
    tls::ServerTls,
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
    /// Open connections.
    pub connections: IntGauge,
    /// What the gateway lacks is told there.
    pub shortages: Shortages,
    /// Whose kept connections make room where descriptors are short; `None`: operators', who are let in to the last one.
    pub makes_room: Option<Upstream>,
}

/// Serves until `shutdown` completes, then lets open requests finish within the drain time. Returns whether all did.
pub async fn serve(server: Server, stack: impl Stack, shutdown: impl Future<Output = ()>) -> bool {
    let mut header_read = server.intake.header_read();
    let spread = Spread { cores: server.cores.clone(), client_stall: server.client_stall };
    let build = |header_read| Arc::new(connection_builder(spread.clone(), header_read));
    let mut builder = build(header_read);
    let graceful = GracefulShutdown::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept(&server) => accepted,
        };
        let (stream, slot) = match accepted {
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
        let open = Open::count(&server.connections, slot);
        if header_read != server.intake.header_read() {
            header_read = server.intake.header_read();
            builder = build(header_read);
        }
        let connection = Connection {
            builder: Arc::clone(&builder),
            header_read,
            watcher: graceful.watcher(),
            tls: server.tls.clone(),
            service: Called(stack.clone()),
        };
        let Some(cores) = &server.cores else {
            tokio::spawn(connection.serve(open, async { Ok(stream) }));
            continue;
        };
        match stream.into_std() {
            // What it is woken by is the runtime that it is served on.
            Ok(stream) => cores.run(connection.serve(open, async { TcpStream::from_std(stream) })),
            Err(error) => tracing::warn!(%error, "a connection could not be handed to a core"),
        }
    }
    drop(server.listener);
    tracing::info!(connections = graceful.count(), "draining");
    let leaving = async {
        // Clients that send one request after the other are told to go by the answer to the next, so that none is
        // crossed by a close; who is silent for as long is closed.
        let quiet = clock::sleep(DRAIN_QUIET);
        tokio::select! { () = quiet => {}, () = emptied(&graceful) => {} }
        graceful.shutdown().await;
    };
    clock::timeout(server.intake.drain_timeout(), leaving).await.is_ok()
}

/// What serves a client's connection.
struct Connection<S> {
    builder: Arc<auto::Builder<Spread>>,
    header_read: Duration,
    watcher: Watcher,
    tls: Option<Arc<ServerTls>>,
    service: Called<S>,
}

/// The stack as hyper calls it: at once, as it is ready at all times.
#[derive(Clone)]
struct Called<S>(S);

impl<S: Stack> Service<Request> for Called<S> {
    type Response = Response;
    type Error = Infallible;
    type Future = S::Future;

    fn call(&self, request: Request) -> S::Future {
        self.0.clone().call(request)
    }
}

impl<S: Stack> Connection<S> {
    /// Until its end.
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
        let Self { builder, header_read, watcher, tls, service } = self;
        let stream = stream.await?;
        match tls {
            None => {
                let stream = TokioIo::new(Greeting::within(header_read, Lingering::new(stream)));
                watcher.watch(builder.serve_connection(stream, service)).await
            }
            Some(tls) => {
                let stream = Lingering::new(tls.accept(stream).await?);
                let stream = TokioIo::new(Greeting::within(header_read, stream));
                watcher.watch(builder.serve_connection(stream, service)).await
            }
        }
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

async fn emptied(open: &GracefulShutdown) {
    while open.count() > 0 {
        clock::sleep(DRAIN_LOOK).await;
    }
}

/// An open connection's place; given back on drop.
struct Open {
    gauge: IntGauge,
    _slot: Slot,
}

impl Open {
    fn count(gauge: &IntGauge, slot: Slot) -> Self {
        gauge.inc();
        Self { gauge: gauge.clone(), _slot: slot }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

/// The next client, once there is a place and what its requests will need.
async fn accept(server: &Server) -> io::Result<(TcpStream, Slot)> {
    let slot = server.intake.slot().await;
    if let Some(upstream) = &server.makes_room {
        room(upstream, &server.shortages).await;
    }
    let (stream, _) = net::accept(&server.listener).await?;
    Ok((stream, slot))
}

/// Waits until there are descriptors besides those that are not clients'. Who waits to be accepted is refused nothing.
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

fn connection_builder(spread: Spread, header_read: Duration) -> auto::Builder<Spread> {
    let mut builder = auto::Builder::new(spread);
    builder
        .http1()
        // Heads, events and most answers are small: to copy them together is cheaper than to say where each part lies.
        .writev(false)
        .timer(TokioTimer::new())
        .header_read_timeout(header_read)
        .max_buf_size(HEAD_BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_H2_STREAMS)
        .max_pending_accept_reset_streams(MAX_H2_UNSEEN_RESETS)
        .max_local_error_reset_streams(MAX_H2_FAULTY_STREAMS)
        .max_header_list_size(MAX_H2_HEADER_LIST_BYTES);
    builder
}
