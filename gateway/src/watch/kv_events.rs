//! Follows one worker's KV events: connects to its live stream, asks for what was missed, and lets
//! `keyway_core::kv_feed` make residency of both. While that works the worker is *trusted*: the index holds
//! exactly what it says. When it does not, the gateway says so once and goes on with a model of the cache,
//! from what it knew last.
//!
//! Trust ends when the connection is lost, when replays fail again and again, and when answers show that
//! blocks were stored of which no event came. It returns when all that was missed is known again.

pub mod find;
mod thread;

use std::{io, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::BoxStream};
use keyway_core::{
    index::PrefixIndex,
    kv_feed::{Action, FeedStats, KvFeed, Moments, Recovery},
};
use keyway_wire::kv_event::{
    Events,
    frames::{Live, ReplayReply, ReplayRequest},
};
use prometheus::{Gauge, IntCounter};
use tokio::sync::{Notify, watch};

pub use self::thread::EventThread;
use crate::{
    clock,
    config::KvSource,
    fleet::Worker,
    limits::{
        KV_CONNECT_TIMEOUT, KV_FEED_BLOCKS_MAX, KV_RECONNECT_PAUSE, KV_REPLAY_FAILURES_MAX, KV_REPLY_TIMEOUT,
    },
    metrics::Metrics,
    net::zmq::{self, Ask, Frames, LiveStream},
    routing::Router,
    shortage::Shortage,
};

/// Time until a replay is asked for again that could not be, for want of the gateway's own.
const UNASKED_PAUSE: Duration = Duration::from_millis(250);

/// How often silence is looked for.
const TICK: Duration = Duration::from_secs(1);

/// Follows `worker`'s events for ever: at the `place` that is known now, whose connection is `lost` now and
/// then.
pub async fn follow(
    worker: Arc<Worker>,
    mut place: watch::Receiver<Option<KvSource>>,
    lost: Arc<Notify>,
    (router, metrics): (Arc<Router>, Arc<Metrics>),
) {
    let (shortest, longest) = KV_RECONNECT_PAUSE;
    loop {
        // Ends with the task that knows the place.
        let Ok(Some(source)) = place.wait_for(Option::is_some).await.map(|source| source.clone()) else {
            return;
        };
        let mut follower =
            Follower::new(Arc::clone(&worker), source, Arc::clone(&router), Arc::clone(&metrics));
        let mut pause = shortest;
        let mut moved = false;
        while !moved {
            let error = tokio::select! {
                error = follower.session() => error,
                Ok(()) = place.changed() => io::Error::other("the worker says that they are elsewhere now, or nowhere"),
            };
            if follower.distrust(&error) {
                pause = shortest;
            }
            lost.notify_one();
            clock::sleep(pause).await;
            pause = (2 * pause).min(longest);
            moved = place.borrow().as_ref() != Some(&follower.source);
        }
    }
}

/// The index, between requests that have it.
struct Shared<'a>(&'a Router);

impl Moments for Shared<'_> {
    fn moment<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        self.0.index().with_fairly(f)
    }

    async fn between(&self) {
        tokio::task::yield_now().await;
    }
}

struct Follower {
    worker: Arc<Worker>,
    source: KvSource,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    feed: KvFeed,
    /// What the counters have counted already.
    counted: FeedStats,
    live: IntCounter,
    replayed: IntCounter,
    lag: Gauge,
    /// Whether it was said that they are not trusted.
    told: bool,
}

/// The replies under way.
type Replies = BoxStream<'static, io::Result<Frames>>;

/// What a session has waited for: a live message, a reply to what was asked, or time to look for silence.
enum Came {
    Live(io::Result<Frames>),
    Reply(Option<io::Result<Frames>>),
    Tick,
}

impl Follower {
    fn new(worker: Arc<Worker>, source: KvSource, router: Arc<Router>, metrics: Arc<Metrics>) -> Self {
        // An engine without snapshots ends the request for one at once, and is asked for a replay then.
        let recovery = if source.replay.is_some() { Recovery::Snapshot } else { Recovery::Nothing };
        let feed = KvFeed::new(worker.residency.token_id, router.hash_key(), recovery, KV_FEED_BLOCKS_MAX)
            .with_tiers(router.options().fetch_tokens_per_ms.map(|_| worker.residency.any_tier_id));
        let label = [worker.name.as_str()];
        metrics.caches.kv_trusted.with_label_values(&label).set(0);
        Self {
            live: metrics.caches.kv_batches.with_label_values(&[worker.name.as_str(), "live"]),
            replayed: metrics.caches.kv_batches.with_label_values(&[worker.name.as_str(), "replay"]),
            lag: metrics.caches.kv_lag.with_label_values(&label),
            worker,
            source,
            router,
            metrics,
            feed,
            counted: FeedStats::default(),
            told: false,
        }
    }

    /// One connection's life; why it ended.
    async fn session(&mut self) -> io::Error {
        let mut live = match LiveStream::connect(&self.source.events, KV_CONNECT_TIMEOUT).await {
            Ok(live) => live,
            Err(error) => return nobody_there(&error),
        };
        self.worker.residency.batch_came(self.router.now());
        let mut action = self.feed.connected(&Shared(&self.router)).await;
        let (mut replies, mut failures): (Option<Replies>, u32) = (None, 0);
        let mut pause = Duration::ZERO;
        loop {
            if let Some(asked) = self.replies(action, pause) {
                replies = Some(asked);
            }
            if failures >= KV_REPLAY_FAILURES_MAX {
                return io::Error::other("its replays fail");
            }
            if self.show() {
                self.feed.counted_on(&Shared(&self.router)).await;
            }
            let came = tokio::select! {
                message = live.next() => Came::Live(message),
                reply = next_of(&mut replies) => Came::Reply(reply),
                () = clock::sleep(TICK) => Came::Tick,
            };
            // A replay that the gateway could not ask for is no failure of its worker's, and is asked for
            // again.
            let unasked = matches!(&came, Came::Reply(Some(Err(error))) if Shortage::behind(error).is_some());
            action = match came {
                Came::Live(Ok(frames)) => self.live(&frames).await,
                Came::Live(Err(error)) => return error,
                Came::Reply(reply) => match self.reply(reply).await {
                    None => Action::Wait,
                    Some(complete) => {
                        replies = None;
                        failures = if complete { 0 } else { failures + u32::from(!unasked) };
                        pause = if unasked { UNASKED_PAUSE } else { failures * KV_RECONNECT_PAUSE.0 };
                        self.count_replay(complete);
                        self.feed.reply_ended(&Shared(&self.router), complete).await
                    }
                },
                Came::Tick if self.worker.residency.is_silent(self.router.now()) => {
                    return io::Error::other("blocks were stored of which no event came");
                }
                Came::Tick => Action::Wait,
            };
        }
    }

    /// Asks for what `action` says.
    fn replies(&self, action: Action, pause: Duration) -> Option<Replies> {
        let request = match action {
            Action::Wait => return None,
            Action::Replay { from } => ReplayRequest::From(from),
            Action::Snapshot => ReplayRequest::Snapshot,
        };
        let ask = Ask {
            endpoint: self.source.replay.clone()?,
            request: request.frames(),
            pause,
            connect_timeout: KV_CONNECT_TIMEOUT,
            reply_timeout: KV_REPLY_TIMEOUT,
        };
        Some(zmq::ask(ask))
    }

    async fn live(&mut self, frames: &Frames) -> Action {
        let Some(live) = Live::parse(frames) else {
            self.problem("malformed_message", 1);
            return Action::Wait;
        };
        let batch = Events::open(live.payload);
        self.worker.residency.batch_came(self.router.now());
        if let Ok(events) = &batch {
            self.lag.set((clock::unix_seconds() - events.ts).max(0.0));
        }
        let action = self.feed.live(&Shared(&self.router), live.seq, batch).await;
        self.live.inc();
        action
    }

    /// Takes one reply. `Some` ends the request: whether it was answered to its end.
    async fn reply(&mut self, reply: Option<io::Result<Frames>>) -> Option<bool> {
        let frames = match reply {
            Some(Ok(frames)) => frames,
            Some(Err(error)) => {
                tracing::debug!(worker = %self.worker.name, %error, "a replay of KV events was given up");
                return Some(false);
            }
            None => return Some(false),
        };
        match ReplayReply::parse(&frames) {
            None => {
                self.problem("malformed_message", 1);
                Some(false)
            }
            Some(ReplayReply::End) => Some(true),
            Some(ReplayReply::Batch { seq, payload }) => {
                self.feed.reply(&Shared(&self.router), seq, Events::open(payload)).await;
                self.replayed.inc();
                None
            }
        }
    }

    /// Brings trust and metrics up to date; whether the events are trusted from now on.
    fn show(&mut self) -> bool {
        if let Some(tokens) = self.feed.block_size() {
            self.worker.residency.announce_block_size(tokens);
        }
        if self.feed.is_barren() {
            self.distrust(&io::Error::other(
                "nothing that it stores can be indexed: no KV cache group of its model keeps whole prefixes, or it names none",
            ));
        }
        let is_new =
            self.feed.is_synced() && !self.feed.is_barren() && self.worker.residency.set_trusted(true);
        if is_new {
            self.router.index().with(|index| {
                index.set_exact(self.worker.residency.token_id, true);
                self.router.bound_cache(&self.worker, index);
            });
            self.metrics.caches.kv_trusted.with_label_values(&[&self.worker.name]).set(1);
            self.told = false;
            tracing::info!(worker = %self.worker.name, "KV events are followed");
        }
        let (now, before) = (self.feed.stats(), self.counted);
        if now == before {
            return is_new;
        }
        self.worker.residency.set_removed(now.removed + now.cleared + now.restarts);
        for (kind, count) in [
            ("undecodable", now.undecodable - before.undecodable),
            ("gap", now.gaps - before.gaps),
            ("restart", now.restarts - before.restarts),
            ("cleared", now.cleared - before.cleared),
            ("malformed_event", now.malformed - before.malformed),
            ("ignored_event", now.ignored - before.ignored),
            ("orphan_block", now.orphans - before.orphans),
            ("unknown_removal", now.unknown_removals - before.unknown_removals),
            ("over_capacity", now.over_capacity - before.over_capacity),
        ] {
            self.problem(kind, count);
        }
        self.counted = now;
        is_new
    }

    /// The events say nothing any more that can be relied on. Returns whether they did before.
    fn distrust(&mut self, error: &io::Error) -> bool {
        self.metrics.caches.kv_trusted.with_label_values(&[&self.worker.name]).set(0);
        let trusted = self.worker.residency.set_trusted(false);
        if trusted {
            // From here on what it held last is the state of a model.
            self.router.index().with(|index| {
                index.set_exact(self.worker.residency.token_id, false);
                self.router.bound_cache(&self.worker, index);
            });
        }
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                worker = %self.worker.name,
                %error,
                "KV events are not trusted; routing goes on with a model of this worker's cache"
            );
        }
        trusted
    }

    fn count_replay(&self, complete: bool) {
        let outcome = if complete { "complete" } else { "given_up" };
        self.metrics.caches.kv_replays.with_label_values(&[self.worker.name.as_str(), outcome]).inc();
    }

    fn problem(&self, kind: &str, count: u64) {
        if count > 0 {
            self.metrics
                .caches
                .kv_problems
                .with_label_values(&[self.worker.name.as_str(), kind])
                .inc_by(count);
        }
    }
}

/// A connection that could not be made, with what is mostly the reason.
fn nobody_there(error: &io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("{error} (vLLM listens only where its endpoint has a `*`, as in tcp://*:5557)"),
    )
}

/// The next reply; never, if nothing was asked.
async fn next_of(replies: &mut Option<Replies>) -> Option<io::Result<Frames>> {
    match replies {
        Some(replies) => replies.next().await,
        None => std::future::pending().await,
    }
}
