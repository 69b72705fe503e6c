//! Sockets: accept, HTTP/1.1 and HTTP/2 without TLS, drain at shutdown. What a request means is `api.rs`'s business.
//!
//! Read these files in order: `server.rs` (here), `engine.rs`, `scheduler.rs`, `block_manager.rs`, `model.rs`.
//!
//! Next: `engine.rs`, reached through `api.rs`.

use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use crate::api::{self, App};
use crate::limits::{CONNECTIONS_MAX, DRAIN_MAX, HEADER_READ_MAX};

/// Pause after a failed accept, usually for want of file descriptors: trying at once would only burn the processor.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Serves until `shutdown` fires or its sender is dropped, then lets open answers end, for at most [`DRAIN_MAX`].
pub(crate) async fn serve(listener: TcpListener, app: Arc<App>, mut shutdown: oneshot::Receiver<()>) {
    let graceful = GracefulShutdown::new();
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_READ_MAX);
    builder.http2().timer(TokioTimer::new());
    let builder = Arc::new(builder);
    let mut tasks = JoinSet::new();
    let accept = async {
        loop {
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
            let stream = accept(&listener).await;
            let app = Arc::clone(&app);
            let service = service_fn(move |request| api::handle(Arc::clone(&app), request));
            let (builder, watcher) = (Arc::clone(&builder), graceful.watcher());
            while tasks.try_join_next().is_some() {} // those that are over
            tasks.spawn(async move {
                let connection = builder.serve_connection(TokioIo::new(stream), service);
                if let Err(error) = watcher.watch(connection).await {
                    tracing::debug!(error, "a connection ended early");
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = accept => {}
        _ = &mut shutdown => {}
    }
    drop(listener);
    if tokio::time::timeout(DRAIN_MAX, graceful.shutdown()).await.is_err() {
        tracing::warn!(seconds = DRAIN_MAX.as_secs(), "answers still open after the drain are cut off");
    }
    tasks.shutdown().await;
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // A token must not wait for the acknowledgement of the one before it.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no TCP_NODELAY");
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}
