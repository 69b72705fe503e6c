//! KV events: tells routers, over ZMQ and in vLLM's format, which prefixes this worker holds. A live stream
//! (PUB), and a replay socket (ROUTER) for those who missed something or come late. The engine's part ends at
//! [`Recorder`]: it never waits, and knows nothing of sockets.
//!
//! ```text
//! engine ── changes of a step ──▶ recorder.rs ──▶ publisher.rs ── live batches ──▶ PUB
//!                                                   │ log.rs: batches kept, state mirrored
//!                                                   └─────── replays, snapshots ──▶ ROUTER
//! ```
//!
//! **Nothing is lost on this side.** If the publisher falls behind, steps are merged into one that says the
//! same in fewer words, instead of being dropped. What is lost on the way to a slow subscriber leaves a gap
//! in the sequence numbers, which the replay fills.
//!
//! **What is published.** Token ids, hashes that are random per process, and the raw `cache_salt` of a
//! prompt's first block, as vLLM does, because a router must tell tenants apart. Who may subscribe can read
//! prompts: bind to loopback or to a network of one's own.

mod address;
mod event;
mod log;
mod mirror;
mod publisher;
mod recorder;

use std::io;
use std::net::SocketAddr;

use keyway_wire::kv_event::WireFormat;

pub use self::address::{BadZmqAddr, ZmqAddr};
pub(crate) use self::event::Layout;
pub(crate) use self::publisher::{Publisher, bind};
pub(crate) use self::recorder::{Follower, Recorder, channel};

/// Where and how KV events are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventOptions {
    /// The live stream, bound here; port 0 takes a free one.
    pub publish: ZmqAddr,
    /// Replays and snapshots, bound here; none if absent.
    pub replay: Option<ZmqAddr>,
    /// First frame of every message, which subscribers filter by.
    pub topic: String,
    /// How events are written.
    pub format: WireFormat,
}

impl KvEventOptions {
    /// A live stream at `publish`, in the format of vLLM from v0.24 on; no topic, no replay.
    pub fn new(publish: ZmqAddr) -> Self {
        Self { publish, replay: None, topic: String::new(), format: WireFormat::VllmMap }
    }

    /// Of one of several data-parallel engines: `None` if it has no port.
    pub(crate) fn of_rank(&self, rank: usize) -> Option<Self> {
        let replay = match &self.replay {
            None => None,
            Some(replay) => Some(replay.of_rank(rank)?),
        };
        Some(Self { publish: self.publish.of_rank(rank)?, replay, ..self.clone() })
    }
}

/// Why KV events cannot be published where they are asked for.
#[derive(Debug, thiserror::Error)]
pub enum KvEventsError {
    /// The address cannot be bound.
    #[error("cannot publish KV events on {addr}: {source}")]
    Bind {
        /// The address asked for: of the live stream, or of the replays.
        addr: ZmqAddr,
        /// Why the system refuses it, such as a port that is in use.
        source: io::Error,
    },
    /// The port of a data-parallel engine would be no port.
    #[error("{addr} has no port for rank {rank}")]
    NoPort {
        /// Where the first engine's live stream is.
        addr: ZmqAddr,
        /// Which of the engines it is.
        rank: usize,
    },
}

/// Where the sockets were bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BoundAddrs {
    pub(crate) publish: SocketAddr,
    pub(crate) replay: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_cannot_be_had_is_named() {
        let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = format!("tcp://{}", taken.local_addr().unwrap());
        let mut options = KvEventOptions::new(addr.parse().unwrap());
        let expected = format!("cannot publish KV events on {addr}: ");
        let refused = bind(&options).await.err().unwrap();
        assert!(matches!(refused, KvEventsError::Bind { .. }), "{refused}");
        assert!(refused.to_string().starts_with(&expected), "{refused}");
        options.replay = Some(std::mem::replace(&mut options.publish, "tcp://127.0.0.1:0".parse().unwrap()));
        let refused = bind(&options).await.err().unwrap();
        assert!(refused.to_string().starts_with(&expected), "the replays' address: {refused}");
        let no_port = KvEventsError::NoPort { addr: "tcp://*:65535".parse().unwrap(), rank: 1 };
        assert_eq!(no_port.to_string(), "tcp://*:65535 has no port for rank 1");
    }
}
