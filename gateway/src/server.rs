//! The listening socket: accepts connections, speaks HTTP/1.1 and HTTP/2 (prior knowledge, or by
//! ALPN where it speaks TLS) on them, bounds them, and
//! drains them on shutdown. What a request means is the stack's business.
//!
//! Next: [`crate::stack`].

mod intake;

use std::{future::Future, io, sync::Arc, time::Duration};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use prometheus::IntGauge;

pub use self::intake::Intake;
use self::intake::Slot;
use crate::{
    clock,
    limits::{DRAIN_LOOK, DRAIN_QUIET, HEAD_BUFFER_BYTES, HEADER_READ_TIMEOUT, MAX_H2_STREAMS},
    net,
    stack::Stack,
    tls::ServerTls,
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
    /// Open connections.
    pub connections: IntGauge,
}

/// Serves until `shutdown` completes, then lets open requests finish within the drain time. Returns whether all did.
pub async fn serve(server: Server, stack: impl Stack, shutdown: impl Future<Output = ()>) -> bool {
    let builder = Arc::new(connection_builder());
    let graceful = GracefulShutdown::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept(&server.listener, &server.intake) => accepted,
        };
        let (stream, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, or the peer left already: the listener itself is fine.
                tracing::warn!(%error, "a connection could not be accepted");
                clock::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(stack.clone());
        let (builder, watcher, tls) = (Arc::clone(&builder), graceful.watcher(), server.tls.clone());
        let open = Open::count(&server.connections, slot);
        tokio::spawn(async move {
            let ended = match tls {
                None => watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await,
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => {
                        watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await
                    }
                    Err(error) => Err(error.into()),
                },
            };
            if let Err(error) = ended {
                tracing::debug!(error = %error, "a client connection ended with an error");
            }
            drop(open);
        });
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

async fn accept(listener: &net::TcpListener, intake: &Arc<Intake>) -> io::Result<(net::TcpStream, Slot)> {
    let slot = intake.slot().await;
    let (stream, _) = net::accept(listener).await?;
    Ok((stream, slot))
}

fn connection_builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(HEAD_BUFFER_BYTES);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_H2_STREAMS);
    builder
}
