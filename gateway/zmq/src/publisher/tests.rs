//! One subscriber and its clocks, in paused time.

use std::time::Duration;

use keyway_wire::zmtp::{greeting, ready};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    time::{advance, sleep},
};

use super::*;
use crate::limits::{HANDSHAKE_MAX, SUBSCRIPTIONS_MAX, TOPIC_BYTES_MAX};

const STALL: Duration = Duration::from_secs(30);
const PING: &[u8] = b"\x04\x09\x04PING\0\x0aok";
const PONG: &[u8] = b"\x04\x07\x04PONGok";

struct Served {
    shared: Arc<Shared>,
    place: Arc<Place>,
    peer: DuplexStream,
    serving: tokio::task::JoinHandle<io::Result<()>>,
}

/// A subscriber between which and the socket so many bytes fit.
fn serve_one(between: usize) -> Served {
    let limits = PubLimits { connections: 1, kept_messages: 100, kept_bytes: 1 << 20, stall: STALL };
    let (shared, place) = (Arc::new(Shared::new(limits)), Arc::new(Place::default()));
    let (peer, stream) = duplex(between);
    let (of_task, its_place) = (Arc::clone(&shared), Arc::clone(&place));
    let serving = tokio::spawn(async move { serve(stream, &of_task, &its_place).await });
    Served { shared, place, peer, serving }
}

impl Served {
    /// Shakes hands and subscribes to everything.
    async fn open(&mut self) {
        self.peer.write_all(&greeting()).await.unwrap();
        self.peer.write_all(&ready(SocketType::Sub)).await.unwrap();
        let mut hello = [0; 64 + 40];
        self.peer.read_exact(&mut hello).await.unwrap();
        assert_eq!(hello[64..], ready(SocketType::Pub));
        self.peer.write_all(b"\0\x01\x01").await.unwrap();
        self.settle().await;
    }

    /// Until the socket waits for something.
    async fn settle(&self) {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    async fn ended(self) -> io::ErrorKind {
        // In paused time it is now, or never.
        let ended = tokio::time::timeout(1000 * STALL, self.serving).await.expect("it ends");
        ended.unwrap().unwrap_err().kind()
    }
}

#[tokio::test(start_paused = true)]
async fn a_handshake_has_its_time_however_it_is_spent() {
    let silent = serve_one(1 << 10);
    let begun = Instant::now();
    assert_eq!(silent.ended().await, io::ErrorKind::TimedOut);
    assert_eq!(begun.elapsed(), HANDSHAKE_MAX);
    // A byte every second is no sign of life.
    let mut slow = serve_one(1 << 10);
    let begun = Instant::now();
    for byte in greeting() {
        if slow.peer.write_all(&[byte]).await.is_err() {
            break;
        }
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(slow.ended().await, io::ErrorKind::TimedOut);
    assert!(begun.elapsed() < 2 * HANDSHAKE_MAX);
    // Nor is a greeting all of it.
    let mut unready = serve_one(1 << 10);
    unready.peer.write_all(&greeting()).await.unwrap();
    assert_eq!(unready.ended().await, io::ErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn who_takes_nothing_is_disconnected_whatever_it_says_and_who_takes_little_is_not() {
    let mut served = serve_one(256);
    served.open().await;
    // With nothing to take nothing is late.
    advance(10 * STALL).await;
    served.settle().await;
    served.shared.send(&[vec![7; 10_000].into()]);
    for _ in 0..20 {
        sleep(STALL / 2).await;
        served.peer.read_u8().await.unwrap();
    }
    let begun = Instant::now();
    while served.peer.write_all(PING).await.is_ok() && begun.elapsed() < 10 * STALL {
        sleep(STALL / 10).await;
    }
    assert!(begun.elapsed() <= 2 * STALL);
    assert_eq!(served.ended().await, io::ErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn a_ping_is_answered_and_a_flood_of_them_by_few_pongs() {
    let mut served = serve_one(1 << 10);
    served.open().await;
    served.peer.write_all(PING).await.unwrap();
    let mut pong = [0; PONG.len()];
    served.peer.read_exact(&mut pong).await.unwrap();
    assert_eq!(pong, PONG);
    for _ in 0..10_000 {
        served.peer.write_all(PING).await.unwrap();
    }
    served.settle().await;
    served.shared.send(&[Bytes::from_static(b"heard")]);
    // Behind what was on the way.
    let mut came = Vec::new();
    while !came.ends_with(b"\0\x05heard") {
        assert_ne!(served.peer.read_buf(&mut came).await.unwrap(), 0);
    }
    assert!(came.len() < (1 << 10) + 10 * PONG.len(), "{}", came.len());
}

#[tokio::test(start_paused = true)]
async fn who_says_much_has_turns_like_everyone() {
    let mut served = serve_one(1 << 20);
    served.open().await;
    // Of words that need no answer, which would be a turn's end too.
    let much = b"\0\x02\0x".repeat((1 << 20) / 4);
    served.peer.write_all(&much).await.unwrap();
    tokio::task::yield_now().await;
    // There is room for what was read in one turn.
    let read = tokio::time::timeout(Duration::ZERO, served.peer.write(&much)).await.map_or(0, Result::unwrap);
    assert!((1..16 << 10).contains(&read), "{read}");
}

#[tokio::test(start_paused = true)]
async fn subscriptions_are_bounded_and_give_a_place_its_owner() {
    for many in [true, false] {
        let mut served = serve_one(1 << 10);
        served.open().await;
        assert!(served.place.is_engaged());
        served.peer.write_all(b"\0\x01\0").await.unwrap();
        served.settle().await;
        assert!(!served.place.is_engaged());
        let topics = if many { SUBSCRIPTIONS_MAX + 1 } else { 1 };
        let length = if many { 8 } else { TOPIC_BYTES_MAX + 1 };
        for topic in 0..topics {
            let mut frame = topic.to_be_bytes().to_vec();
            frame.resize(length, 0);
            let said =
                [b"\x06\0\0\0\0\0\0", &(10 + length as u16).to_be_bytes()[..], b"\x09SUBSCRIBE", &frame];
            // It may have been enough before the last.
            let _ = served.peer.write_all(&said.concat()).await;
        }
        assert_eq!(served.ended().await, io::ErrorKind::Other, "{many}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_published_before_a_subscription_is_not_heard() {
    let mut served = serve_one(1 << 10);
    served.shared.send(&[Bytes::from_static(b"before")]);
    served.open().await;
    served.shared.send(&[Bytes::from_static(b"after"), Bytes::from_static(b"x")]);
    let mut came = [0; 10];
    served.peer.read_exact(&mut came).await.unwrap();
    assert_eq!(&came, b"\x01\x05after\0\x01x");
    assert_eq!(served.shared.missed.load(Relaxed), 0);
}
