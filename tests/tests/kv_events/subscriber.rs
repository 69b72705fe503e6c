//! A router's end of the KV events: real SUB and DEALER sockets around the routing core's feed. Loses
//! messages when told to. Knows nothing of the worker but its addresses.

use std::net::SocketAddr;

use keyway_core::kv_feed::Alone;
use keyway_core::{Action, KvFeed, PrefixIndex, Recovery, TokenSpace, WorkerId, token_chain};
use keyway_tests::Metrics;
use keyway_tests::eventually::patient;
use keyway_wire::block_hash::{BlockHash, HashKey};
use keyway_wire::kv_event::Events;
use keyway_wire::kv_event::frames::{Live, ReplayReply, ReplayRequest};
use keyway_worker::{CacheChange, RunningWorker};
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

const WORKER: WorkerId = WorkerId(7);
const BLOCK_SIZE: u32 = 16;

fn key() -> HashKey {
    HashKey::new(0x5eed)
}

pub(crate) struct Subscriber {
    live: SubSocket,
    replay: Option<SocketAddr>,
    pub(crate) feed: KvFeed,
    index: Alone,
    random: fastrand::Rng,
    /// Share of the live messages that get lost, and of the replies that are given up.
    pub(crate) loss: f64,
    pub(crate) lost: usize,
}

impl Subscriber {
    /// Connects to the worker's events.
    pub(crate) async fn connect(worker: &RunningWorker, recovery: Recovery) -> Self {
        let mut live = SubSocket::new();
        let publish = worker.kv_events_addr().expect("events are on");
        patient("the live stream", live.connect(&format!("tcp://{publish}"))).await.expect("connects");
        live.subscribe("kv@").await.expect("subscribes");
        let mut subscriber = Self {
            live,
            replay: worker.kv_replay_addr(),
            feed: KvFeed::new(WORKER, key(), recovery, 100_000),
            index: Alone::new(PrefixIndex::new(8 << 20)),
            random: fastrand::Rng::with_seed(5),
            loss: 0.0,
            lost: 0,
        };
        let action = subscriber.feed.connected(&subscriber.index).await;
        subscriber.carry_out(action).await;
        subscriber
    }

    /// Takes live messages until the index is what the worker holds.
    pub(crate) async fn follow(&mut self, worker: &RunningWorker) {
        let resident = names(worker).await;
        while !self.agrees(&resident) {
            self.receive().await;
        }
    }

    /// Takes live messages, or loses them, up to the last one that the worker has published.
    pub(crate) async fn drain(&mut self, worker: &RunningWorker) {
        let published = published(worker).await;
        while self.receive().await + 1 < published {}
    }

    /// Takes one live message, or loses it; its number.
    async fn receive(&mut self) -> u64 {
        let message = patient("a live message", self.live.recv()).await.expect("received").into_vec();
        let live = Live::parse(&message).expect("a live message");
        assert_eq!(live.topic, b"kv@test");
        if self.random.f64() < self.loss {
            self.lost += 1;
        } else {
            let action = self.feed.live(&self.index, live.seq, Events::open(live.payload)).await;
            self.carry_out(action).await;
        }
        live.seq
    }

    async fn carry_out(&mut self, mut action: Action) {
        loop {
            let request = match action {
                Action::Wait => return,
                Action::Replay { from } => ReplayRequest::From(from),
                Action::Snapshot => ReplayRequest::Snapshot,
            };
            let complete = self.request(request).await;
            action = self.feed.reply_ended(&self.index, complete).await;
        }
    }

    /// Asks, and applies the replies; false if it was given up.
    async fn request(&mut self, request: ReplayRequest) -> bool {
        let replay = self.replay.expect("a replay socket");
        let mut socket = DealerSocket::new();
        patient("the replay", socket.connect(&format!("tcp://{replay}"))).await.expect("connects");
        let [delimiter, body] = request.frames();
        let mut message = ZmqMessage::from(delimiter);
        message.push_back(body.into());
        socket.send(message).await.expect("sent");
        loop {
            let frames = patient("a reply", socket.recv()).await.expect("received").into_vec();
            match ReplayReply::parse(&frames).expect("a reply") {
                ReplayReply::End => return true,
                ReplayReply::Batch { .. } if self.random.f64() < self.loss / 10.0 => return false,
                ReplayReply::Batch { seq, payload } => {
                    self.feed.reply(&self.index, seq, Events::open(payload)).await;
                }
            }
        }
    }

    pub(crate) fn agrees(&self, resident: &[BlockHash]) -> bool {
        self.index.0.borrow().resident(WORKER) == resident.len() && self.holds(resident) == resident.len()
    }

    /// How many of these the index has.
    pub(crate) fn holds(&self, resident: &[BlockHash]) -> usize {
        resident.iter().filter(|name| self.index.0.borrow().holds(WORKER, **name)).count()
    }

    /// How many blocks the index has.
    pub(crate) fn known(&self) -> usize {
        self.index.0.borrow().resident(WORKER)
    }
}

/// Batches that the worker has published by now; more may be on their way.
async fn published(worker: &RunningWorker) -> u64 {
    Metrics::fetch(worker.addr()).await.sum("keyway_worker_kv_event_batches_total", &[]) as u64
}

/// What the worker holds, in the index's names.
pub(crate) async fn names(worker: &RunningWorker) -> Vec<BlockHash> {
    let mut names = std::collections::HashMap::new();
    for change in worker.resident_blocks().await.expect("the engine lives") {
        let CacheChange::Stored { hash, parent, tokens, salt, .. } = change else { panic!("resident") };
        let space = TokenSpace { salt: &salt, adapter: None, block_size: BLOCK_SIZE };
        let before = parent.map_or_else(|| space.root(key()), |parent| names[&parent]);
        names.insert(hash, token_chain::extend(before, &tokens, &[]));
    }
    names.into_values().collect()
}
