//! The sockets of KV events: a PUB for live batches, a ROUTER for replays and snapshots. What peers may do to
//! them is `keyway-zmq`'s, frames are `keyway-wire`'s, contents `log.rs`'s.
//!
//! No peer is waited for: a slow subscriber misses batches, and each client of the replay is answered by
//! itself. Payloads are shared with the log, not copied; what subscribers may miss by is what the log keeps,
//! so it takes no memory of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use keyway_wire::kv_event::frames::{END_SEQ, ReplayRequest, seq_frame};
use keyway_zmq::{PubLimits, PubSocket, Replies, RouterLimits, RouterSocket};
use tokio::net::TcpListener;

use super::log::{Log, Numbered};
use super::{BoundAddrs, Follower, KvEventOptions, KvEventsError, Layout, ZmqAddr};
use crate::limits::{
    KV_ASKERS_MAX, KV_REPLAY_BATCHES_MAX, KV_REPLAY_BYTES_MAX, KV_REPLY_STALL_MAX, KV_SUBSCRIBER_STALL_MAX,
    KV_SUBSCRIBERS_MAX,
};
use crate::metrics::Metrics;

const LIVE: PubLimits = PubLimits {
    connections: KV_SUBSCRIBERS_MAX,
    kept_messages: KV_REPLAY_BATCHES_MAX,
    kept_bytes: KV_REPLAY_BYTES_MAX,
    stall: KV_SUBSCRIBER_STALL_MAX,
};
const REPLAY: RouterLimits = RouterLimits { connections: KV_ASKERS_MAX, stall: KV_REPLY_STALL_MAX };

/// Bound sockets that publish nothing yet. Who asks for a replay waits.
pub(crate) struct Publisher {
    live: PubSocket,
    replay: Option<TcpListener>,
    options: KvEventOptions,
    addrs: BoundAddrs,
}

/// Binds the sockets. The error says which address, and why.
pub(crate) async fn bind(options: &KvEventOptions) -> Result<Publisher, KvEventsError> {
    let (listener, publish) = listen(&options.publish).await?;
    let live = PubSocket::new(listener, LIVE).map_err(failed(&options.publish))?;
    let (mut replay, mut replay_addr) = (None, None);
    if let Some(addr) = &options.replay {
        let (listener, bound) = listen(addr).await?;
        (replay, replay_addr) = (Some(listener), Some(bound));
    }
    let addrs = BoundAddrs { publish, replay: replay_addr };
    Ok(Publisher { live, replay, options: options.clone(), addrs })
}

async fn listen(addr: &ZmqAddr) -> Result<(TcpListener, SocketAddr), KvEventsError> {
    let listener = TcpListener::bind(addr.host_and_port()).await.map_err(failed(addr))?;
    let bound = listener.local_addr().map_err(failed(addr))?;
    Ok((listener, bound))
}

/// What is wrong with an address, once the system has said it.
fn failed(addr: &ZmqAddr) -> impl FnOnce(io::Error) -> KvEventsError {
    move |source| KvEventsError::Bind { addr: addr.clone(), source }
}

impl Publisher {
    /// Where the sockets are.
    pub(crate) fn addrs(&self) -> BoundAddrs {
        self.addrs
    }

    /// Publishes until the engine is gone.
    pub(crate) async fn run(self, follower: Follower, layout: Layout, metrics: Arc<Metrics>) {
        let log = Arc::new(Mutex::new(Log::new(layout, self.options.format)));
        let topic = Bytes::copy_from_slice(self.options.topic.as_bytes());
        let replay = self.replay.map(|listener| {
            let (log, topic, metrics) = (Arc::clone(&log), topic.clone(), Arc::clone(&metrics));
            RouterSocket::new(listener, REPLAY, move |request| answer(&request, &log, &topic, &metrics))
        });
        if let Some(Err(error)) = &replay {
            tracing::error!(%error, "the KV replay socket failed: no replays");
        }
        publish(&self.live, &follower, &log, &topic, &metrics).await;
    }
}

/// Publishes every step as a batch, in order.
async fn publish(live: &PubSocket, follower: &Follower, log: &Mutex<Log>, topic: &Bytes, metrics: &Metrics) {
    while let Some(steps) = follower.next().await {
        for step in steps {
            let (seq, payload) = lock(log).append(&step);
            metrics.kv_event_batches.inc();
            live.send(&[topic.clone(), seq_frame_bytes(seq), payload]);
        }
        let missed = live.missed().saturating_sub(metrics.kv_event_batches_missed.get());
        metrics.kv_event_batches_missed.inc_by(missed);
    }
}

/// The replies to a request.
fn answer(request: &[Bytes], log: &Arc<Mutex<Log>>, topic: &Bytes, metrics: &Metrics) -> Replies {
    let Some(request) = ReplayRequest::parse(request) else {
        tracing::debug!("a KV replay request that is neither 8 bytes of sequence number nor `snapshot`");
        return Box::new(std::iter::empty());
    };
    metrics.kv_replay_requests.inc();
    match request {
        ReplayRequest::From(next) => {
            let end = lock(log).next_seq();
            replies(Replay { log: Arc::clone(log), next, end }, topic.clone())
        }
        ReplayRequest::Snapshot => replies(lock(log).snapshot(now_s()), topic.clone()),
    }
}

/// The batches from one number on that were there at some moment. What the log drops while they are taken is
/// left out, which the numbers show.
struct Replay {
    log: Arc<Mutex<Log>>,
    next: u64,
    end: u64,
}

impl Iterator for Replay {
    type Item = Numbered;

    fn next(&mut self) -> Option<Numbered> {
        let batch = lock(&self.log).first_since(self.next).filter(|(seq, _)| *seq < self.end)?;
        self.next = batch.0 + 1;
        Some(batch)
    }
}

/// The batches and the end mark, in vLLM's layout from v0.26 on.
fn replies(batches: impl Iterator<Item = Numbered> + Send + 'static, topic: Bytes) -> Replies {
    let batches =
        batches.map(move |(seq, payload)| vec![Bytes::new(), topic.clone(), seq_frame_bytes(seq), payload]);
    let end = vec![Bytes::new(), Bytes::new(), Bytes::from_static(&END_SEQ), Bytes::new()];
    Box::new(batches.chain([end]))
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seq_frame_bytes(seq: u64) -> Bytes {
    Bytes::copy_from_slice(&seq_frame(seq))
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
