//! KV between workers: one computes a prompt and keeps its KV blocks, another fetches them and answers. The
//! words of a request are those of vLLM's NIXL connector (`kv_transfer_params`), so a gateway that splits
//! prompts between vLLMs does so between these workers.
//!
//! ```text
//! first leg   api ── prompt held ──▶ kept.rs ◀── ask, blocks ──▶ export.rs ─┐
//!                                                                wire.rs, seal.rs over TCP
//! second leg  api ── before it is submitted ──────────────────▶ import.rs ─┘
//! ```
//!
//! Between two workers of one machine blocks go through memory that both have (`room.rs`).
//!
//! What another worker has cached of a prompt is fetched likewise (`remote_kv_source`, the words of
//! vLLM's tier of peers). No leg goes before, and nothing was kept: the exporter looks what it has, and
//! holds that for the transfer.
//!
//! What is fetched is taken only if weights, numerics and layout are equal, and if each block is that of the
//! importer's own tokens and salt (`chain.rs`). Whatever goes wrong, the prompt is computed as ever.
//!
//! Next: `engine/holds.rs`, which holds the blocks.

mod chain;
mod export;
mod fault;
mod import;
mod kept;
mod room;
mod seal;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

pub(crate) use self::export::serve;
use self::fault::Fault;
use self::kept::Kept;
use self::seal::Secret;
use crate::engine::EngineHandle;
use crate::engine::backend::BlockLayout;
use crate::engine::holds::Hold;
use crate::limits::{KV_IMPORTS_MAX, KV_KEY_BYTES_MAX, KV_KEY_BYTES_MIN, KV_ROOM_BYTES};
use crate::metrics::KvTransferMetrics;

/// How KV goes between workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvTransferOptions {
    /// Where others fetch KV from this worker; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The host by which they reach it; that of `listen`, if absent.
    pub host: Option<String>,
    /// A file with the secret that all workers of a fleet share; absent on loopback alone.
    pub key_file: Option<PathBuf>,
    /// How long the KV of a prompt is kept for another worker.
    pub keep: Duration,
    /// Whether blocks may go through memory that is shared with a worker of this machine.
    pub shared_memory: bool,
}

/// Why KV cannot be moved as it is asked for.
#[derive(Debug, thiserror::Error)]
pub enum KvTransferError {
    /// The address cannot be bound.
    #[error("cannot listen for KV transfers on {addr}: {source}")]
    Bind {
        /// The address asked for.
        addr: SocketAddr,
        /// Why the system refuses it.
        source: io::Error,
    },
    /// The secret cannot be read.
    #[error("cannot read kv-transfer-key-file {}: {source}", path.display())]
    KeyFile {
        /// The file that was named.
        path: PathBuf,
        /// Why it cannot be read.
        source: io::Error,
    },
    /// The secret is none.
    #[error(
        "kv-transfer-key-file {} has {bytes} bytes: a key has {KV_KEY_BYTES_MIN} to {KV_KEY_BYTES_MAX}",
        path.display()
    )]
    KeyLength {
        /// The file that was named.
        path: PathBuf,
        /// Bytes in it, white space around them left out.
        bytes: usize,
    },
    /// Others than this machine's could fetch prompts.
    #[error("kv-transfer-listen {0} is not loopback: it needs kv-transfer-key-file")]
    NoKey(SocketAddr),
    /// No worker could be told where to fetch.
    #[error("kv-transfer-listen {0} is every address: say by kv-transfer-host how others reach this worker")]
    NoHost(SocketAddr),
    /// There is no randomness for names and challenges.
    #[error("this system gives no random numbers for KV transfers")]
    NoRandom,
    /// The KV is where this process cannot copy it.
    #[error("kv-transfer-listen needs one engine that computes on the CPU: {0} keeps its KV elsewhere")]
    NoCopies(&'static str),
}

/// The bound listener of a worker's KV transfers, and what it was asked for.
#[derive(Debug)]
pub(crate) struct Bound {
    listener: TcpListener,
    addr: SocketAddr,
    host: String,
    secret: Secret,
    keep: Duration,
    room_bytes: Option<usize>,
}

/// What KV must agree in to be the KV that would be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Weights, configuration and arithmetic.
    pub(crate) numerics_id: String,
    /// How blocks are laid out.
    pub(crate) layout: BlockLayout,
    /// Positions of a block.
    pub(crate) block_size: usize,
}

/// A worker's KV transfers: what it keeps for others, and what it needs to fetch from them.
#[derive(Debug)]
pub(crate) struct KvTransfers {
    engine: EngineHandle,
    identity: Identity,
    /// Names this process among those that move KV.
    engine_id: String,
    host: String,
    addr: SocketAddr,
    secret: Secret,
    keep: Duration,
    /// Memory to share with a worker of this machine for a transfer.
    room_bytes: Option<usize>,
    kept: Kept,
    imports: Semaphore,
    metrics: Arc<KvTransferMetrics>,
}

/// Where another worker listens for those that fetch KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Where a prompt's KV is kept, by what a request says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteKv {
    /// What its worker calls it.
    pub(crate) transfer: u128,
    pub(crate) peer: Peer,
    /// Leading tokens of the prompt, in whole blocks.
    pub(crate) tokens: usize,
}

/// Binds the listener. The error says what is missing.
pub(crate) async fn bind(options: &KvTransferOptions) -> Result<Bound, KvTransferError> {
    let secret = match &options.key_file {
        Some(path) => Secret::read(path)?,
        None if options.listen.ip().is_loopback() => Secret::none(),
        None => return Err(KvTransferError::NoKey(options.listen)),
    };
    let host = match &options.host {
        Some(host) => host.clone(),
        None if options.listen.ip().is_unspecified() => return Err(KvTransferError::NoHost(options.listen)),
        None => options.listen.ip().to_string(),
    };
    let failed = |source| KvTransferError::Bind { addr: options.listen, source };
    let listener = TcpListener::bind(options.listen).await.map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    let room_bytes = options.shared_memory.then_some(KV_ROOM_BYTES);
    Ok(Bound { listener, addr, host, secret, keep: options.keep, room_bytes })
}

impl Bound {
    /// Where others fetch KV, with the port that the system chose.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The transfers of this engine, and the listener to [`serve`].
    pub(crate) fn over(
        self,
        engine: EngineHandle,
        identity: Identity,
        metrics: Arc<KvTransferMetrics>,
    ) -> Result<(Arc<KvTransfers>, TcpListener), KvTransferError> {
        let engine_id = seal::random::<16>().map_err(|_| KvTransferError::NoRandom)?;
        let transfers = KvTransfers {
            engine,
            identity,
            engine_id: format!("{:032x}", u128::from_le_bytes(engine_id)),
            host: self.host,
            addr: self.addr,
            secret: self.secret,
            keep: self.keep,
            room_bytes: self.room_bytes,
            kept: Kept::default(),
            imports: Semaphore::new(KV_IMPORTS_MAX),
            metrics,
        };
        Ok((Arc::new(transfers), self.listener))
    }
}

impl KvTransfers {
    /// Keeps a prompt's KV for another worker, for a while; what that is to be told. `None` where there is no
    /// name for it. Without a hold, as too much is held, and of a short prompt, nothing is to be fetched.
    /// That is said, since a worker that says nothing is taken for one that never keeps KV.
    pub(crate) fn offer(&self, hold: Option<Arc<Hold>>) -> Option<Value> {
        let transfer = u128::from_le_bytes(seal::random().ok()?);
        let tokens = hold.as_ref().map_or(0, |hold| hold.tokens().len());
        if let Some(hold) = hold.filter(|_| tokens > 0) {
            self.kept.add(transfer, hold, tokio::time::Instant::now() + self.keep);
            self.metrics.kept.set(self.kept.len() as i64);
        }
        let expiry = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + self.keep;
        Some(json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_engine_id": self.engine_id,
            "remote_request_id": format!("{transfer:032x}"),
            "remote_host": self.host,
            "remote_port": self.addr.port(),
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": expiry.as_secs_f64(),
        }))
    }

    /// Notes a request whose KV is said to be where no worker of this kind is.
    pub(crate) fn is_foreign(&self) {
        self.metrics.imported(Fault::Foreign.as_str());
        tracing::warn!(cause = %Fault::Foreign, "KV was not fetched; the prompt is computed here");
    }
}
