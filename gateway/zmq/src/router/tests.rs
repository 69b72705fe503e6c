//! One asker and its clocks, in paused time.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use keyway_wire::zmtp::{greeting, message, ready};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::*;
use crate::limits::HANDSHAKE_MAX;

const STALL: Duration = Duration::from_secs(10);
const REPLY_BYTES: usize = 1000;

/// An asker that has shaken hands, of which each question has so many replies; how many were made.
async fn asker(replies: usize) -> (DuplexStream, JoinHandle<io::Result<()>>, Arc<AtomicUsize>, Arc<Place>) {
    let (mut peer, stream) = duplex(1 << 10);
    let (made, place) = (Arc::new(AtomicUsize::new(0)), Arc::new(Place::default()));
    let (counted, its_place) = (Arc::clone(&made), Arc::clone(&place));
    let serving = tokio::spawn(async move {
        let answer = move |_| -> Replies {
            let counted = Arc::clone(&counted);
            Box::new((0..replies).map(move |_| {
                counted.fetch_add(1, Relaxed);
                vec![vec![7; REPLY_BYTES].into()]
            }))
        };
        serve(stream, &answer, STALL, &its_place).await
    });
    peer.write_all(&greeting()).await.unwrap();
    peer.write_all(&ready(SocketType::Dealer)).await.unwrap();
    peer.read_exact(&mut [0; 64 + 43]).await.unwrap();
    (peer, serving, made, place)
}

async fn ended(serving: JoinHandle<io::Result<()>>) -> io::ErrorKind {
    // In paused time it is now, or never.
    let ended = tokio::time::timeout(1000 * STALL, serving).await.expect("it ends");
    ended.unwrap().unwrap_err().kind()
}

#[tokio::test(start_paused = true)]
async fn who_does_not_take_a_whole_reply_in_time_is_disconnected() {
    let (mut peer, serving, made, _) = asker(1_000_000).await;
    peer.write_all(&message(&["", "all"])).await.unwrap();
    // At a pace that is just enough.
    for _ in 0..20 {
        sleep(STALL * 9 / 10).await;
        peer.read_exact(&mut [0; 9 + REPLY_BYTES]).await.unwrap();
    }
    // Replies are made as they are taken.
    assert!(made.load(Relaxed) < 24, "{made:?}");
    // A byte now and then is not.
    let begun = Instant::now();
    while !serving.is_finished() && begun.elapsed() < 10 * STALL {
        peer.read_u8().await.unwrap();
        sleep(STALL / 10).await;
    }
    assert!(begun.elapsed() < 3 * STALL);
    assert_eq!(ended(serving).await, io::ErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn who_pings_and_does_not_read_is_disconnected_too() {
    let (mut peer, serving, ..) = asker(0).await;
    let pings = async { while peer.write_all(b"\x04\x09\x04PING\0\x0aok").await.is_ok() {} };
    tokio::time::timeout(1000 * STALL, pings).await.expect("it is disconnected");
    assert_eq!(ended(serving).await, io::ErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn questions_wait_for_the_one_before_and_an_asker_may_be_idle() {
    let (mut peer, serving, made, place) = asker(2).await;
    peer.write_all(&message(&["one"]).repeat(2)).await.unwrap();
    sleep(STALL / 2).await;
    assert!(place.is_engaged() && made.load(Relaxed) <= 2);
    for _ in 0..4 {
        peer.read_exact(&mut [0; 9 + REPLY_BYTES]).await.unwrap();
    }
    sleep(100 * HANDSHAKE_MAX).await;
    assert!(!place.is_engaged() && !serving.is_finished());
    peer.write_all(b"\x04\x09\x04PING\0\x0aok").await.unwrap();
    peer.read_exact(&mut [0; 9]).await.unwrap();
}
