//! The routing core's index, built from a worker's events, against what the worker holds: whenever it is
//! idle, while prefixes are shared and evicted, messages get lost, and subscribers come late.

use keyway_core::Recovery;
use keyway_tests::Metrics;
use keyway_worker::{KvEventOptions, WireFormat, WorkerOptions, start};

use crate::subscriber::{Subscriber, names};
use crate::traffic::{mark, round, worker};

const ROUNDS: usize = 30;

async fn follows_every_change(format: WireFormat) {
    let worker = worker(format).await;
    let mut random = fastrand::Rng::with_seed(1);
    let mut subscriber = Subscriber::connect(&worker, Recovery::Snapshot).await;
    let (mut most, mut removed) = (0, false);
    for _ in 0..ROUNDS {
        round(&worker, &mut random).await;
        subscriber.follow(&worker).await;
        removed |= subscriber.known() < most;
        most = most.max(subscriber.known());
    }
    assert!(most > 30 && removed, "the cache was full, and blocks were evicted: {most}");
    assert!(subscriber.feed.stats().batches > ROUNDS as u64);
    assert_eq!(subscriber.feed.stats().cleared, 0);
    worker.shutdown().await;
}

#[tokio::test]
async fn the_index_is_what_the_worker_holds_whenever_it_is_idle() {
    follows_every_change(WireFormat::VllmMap).await;
}

#[tokio::test]
async fn so_it_is_with_the_older_format() {
    follows_every_change(WireFormat::VllmArray).await;
}

#[tokio::test]
async fn what_gets_lost_on_the_way_is_replayed() {
    let worker = worker(WireFormat::VllmMap).await;
    for recovery in [Recovery::Replay, Recovery::Snapshot] {
        let mut random = fastrand::Rng::with_seed(2);
        let mut subscriber = Subscriber::connect(&worker, recovery).await;
        for _ in 0..ROUNDS {
            subscriber.loss = 0.4;
            round(&worker, &mut random).await;
            mark(&worker, &mut random).await;
            subscriber.drain(&worker).await;
            subscriber.loss = 0.0;
            // A lost message shows by the next one.
            mark(&worker, &mut random).await;
            subscriber.follow(&worker).await;
        }
        assert!(subscriber.lost > 5 && subscriber.feed.stats().gaps > 3, "{:?}", subscriber.feed.stats());
        assert_eq!(subscriber.feed.stats().cleared, 0);
    }
    worker.shutdown().await;
}

/// The test above without its cure: it must be able to fail.
#[tokio::test]
async fn without_replays_losses_show() {
    let worker = worker(WireFormat::VllmMap).await;
    let mut random = fastrand::Rng::with_seed(2);
    let mut subscriber = Subscriber::connect(&worker, Recovery::Nothing).await;
    subscriber.loss = 0.4;
    let mut short = 0;
    for _ in 0..ROUNDS {
        round(&worker, &mut random).await;
        mark(&worker, &mut random).await;
        subscriber.drain(&worker).await;
        short += usize::from(!subscriber.agrees(&names(&worker).await));
    }
    assert!(short > ROUNDS / 2, "{short} of {ROUNDS} times something was missing");
    worker.shutdown().await;
}

#[tokio::test]
async fn who_comes_late_learns_all_there_is() {
    let worker = worker(WireFormat::VllmMap).await;
    let mut random = fastrand::Rng::with_seed(3);
    let mut early = Subscriber::connect(&worker, Recovery::Snapshot).await;
    for _ in 0..10 {
        round(&worker, &mut random).await;
    }
    // From here on all that happened is published.
    early.follow(&worker).await;
    for recovery in [Recovery::Snapshot, Recovery::Replay] {
        let mut late = Subscriber::connect(&worker, recovery).await;
        let resident = names(&worker).await;
        assert!(
            late.agrees(&resident),
            "{recovery:?}: {} of {} blocks",
            late.holds(&resident),
            resident.len()
        );
        // And goes on from there.
        for _ in 0..5 {
            mark(&worker, &mut random).await;
            late.follow(&worker).await;
            early.follow(&worker).await;
        }
        assert_eq!((late.feed.stats().orphans, late.feed.stats().unknown_removals), (0, 0));
    }
    let requests = Metrics::fetch(worker.addr()).await.sum("keyway_worker_kv_replay_requests_total", &[]);
    assert_eq!(requests, 3.0);
    worker.shutdown().await;
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let worker = worker(WireFormat::VllmMap).await;
    let taken = format!("tcp://{}", worker.kv_events_addr().expect("events are on"));
    let kv_events = Some(KvEventOptions::new(taken.parse().expect("an address")));
    let listen = ([127, 0, 0, 1], 0).into();
    let refused = start(WorkerOptions { listen, kv_events, ..WorkerOptions::default() }).await;
    let message = refused.expect_err("the port is taken").to_string();
    assert!(message.contains(&taken) && message.contains("in use"), "{message}");
    worker.shutdown().await;
}
