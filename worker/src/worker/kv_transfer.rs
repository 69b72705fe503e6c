//! Starts what moves KV between workers, where the options ask for it.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::{StartError, WorkerOptions};
use crate::engine::EngineHandle;
use crate::engine::backend::Backend;
use crate::kv_transfer::{self, Bound, Identity, KvTransferError, KvTransfers};
use crate::metrics::KvTransferMetrics;

/// A bound listener, and what its KV is.
pub(super) struct Ready {
    bound: Bound,
    identity: Identity,
}

/// KV transfers of a worker; nothing where there are none.
#[derive(Debug, Default)]
pub(super) struct Started {
    pub(super) transfers: Option<Arc<KvTransfers>>,
    pub(super) metrics: Option<Arc<KvTransferMetrics>>,
    pub(super) addr: Option<SocketAddr>,
    /// Serves other workers until it is dropped.
    pub(super) serving: JoinSet<()>,
}

impl Started {
    /// The port at which workers elsewhere fetch what is cached here; `None` where they cannot reach it,
    /// though they reach this worker's API.
    pub(super) fn source_port(&self, api: SocketAddr) -> Option<u16> {
        let kv = self.addr?;
        (!kv.ip().is_loopback() || api.ip().is_loopback()).then(|| kv.port())
    }
}

/// Binds the listener, if there shall be one.
pub(super) async fn bind(options: &WorkerOptions) -> Result<Option<Bound>, StartError> {
    let Some(options) = &options.kv_transfer else { return Ok(None) };
    Ok(Some(kv_transfer::bind(options).await?))
}

/// What the KV of these backends is; an error where it cannot be copied.
pub(super) fn ready(
    bound: Option<Bound>,
    backends: &[Box<dyn Backend>],
    numerics_id: &str,
) -> Result<Option<Ready>, StartError> {
    let Some(bound) = bound else { return Ok(None) };
    let [backend] = backends else {
        return Err(KvTransferError::NoCopies("each process of data-parallel attention").into());
    };
    let layout = backend.block_layout().ok_or(KvTransferError::NoCopies("a GPU"))?;
    let (numerics_id, block_size) = (numerics_id.to_owned(), backend.block_size());
    Ok(Some(Ready { bound, identity: Identity { numerics_id, layout, block_size } }))
}

/// Begins to serve other workers.
pub(super) fn start(ready: Option<Ready>, engines: &[EngineHandle]) -> Result<Started, StartError> {
    let (Some(Ready { bound, identity }), [engine]) = (ready, engines) else { return Ok(Started::default()) };
    let metrics = KvTransferMetrics::new().map_err(StartError::engine)?;
    let addr = bound.addr();
    let (transfers, listener) = bound.over(engine.clone(), identity, Arc::clone(&metrics))?;
    let mut serving = JoinSet::new();
    serving.spawn(kv_transfer::serve(listener, Arc::clone(&transfers)));
    tracing::info!("KV transfers on {addr}");
    Ok(Started { transfers: Some(transfers), metrics: Some(metrics), addr: Some(addr), serving })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_can_be_reached_on_this_machine_alone_is_no_source_for_others() {
        let port = |kv: Option<&str>, api: &str| {
            let started = Started { addr: kv.map(|kv| kv.parse().unwrap()), ..Started::default() };
            started.source_port(api.parse().unwrap())
        };
        assert_eq!(port(Some("127.0.0.1:7000"), "127.0.0.1:8000"), Some(7_000));
        assert_eq!(port(Some("0.0.0.0:7000"), "0.0.0.0:8000"), Some(7_000));
        assert_eq!(port(Some("127.0.0.1:7000"), "0.0.0.0:8000"), None);
        assert_eq!(port(None, "127.0.0.1:8000"), None);
    }
}
