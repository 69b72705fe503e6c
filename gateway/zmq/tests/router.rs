//! Hazard: one asker takes the memory of whom it asks, or keeps others from their answers.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use keyway_wire::zmtp::{Incoming, SocketType, message};
use keyway_zmq::{Replies, RouterLimits, RouterSocket};

use self::support::{Peer, frames, listener, no_greetings, outrages};

const LIMITS: RouterLimits = RouterLimits { connections: 8, stall: Duration::from_secs(600) };

/// Asked `much`, it answers a gigabyte; nothing, to `nothing`; what was asked otherwise. How many replies it
/// made.
async fn router() -> (RouterSocket, Arc<AtomicUsize>) {
    let made = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&made);
    let answer = move |question: Vec<Bytes>| -> Replies {
        let counted = Arc::clone(&counted);
        let (times, reply) = match question.last().map(|frame| &frame[..]) {
            Some(b"much") => (1024, vec![Bytes::new(), vec![7; 1 << 20].into()]),
            Some(b"nothing") => (0, vec![]),
            _ => (1, question),
        };
        Box::new(
            std::iter::repeat_with(move || {
                counted.fetch_add(1, Relaxed);
                reply.clone()
            })
            .take(times),
        )
    };
    (RouterSocket::new(listener().await, LIMITS, answer).unwrap(), made)
}

async fn ask(peer: &mut Peer, question: &str) {
    peer.say(&message(&["", question])).await;
}

async fn is_answered(peer: &mut Peer) {
    ask(peer, "hello").await;
    assert_eq!(peer.message().await, frames(&["", "hello"]));
}

#[tokio::test]
async fn each_asker_has_its_own_answers_in_order() {
    let (router, _) = router().await;
    let mut dealer = Peer::ready(router.local_addr(), SocketType::Dealer).await;
    let mut other = Peer::ready(router.local_addr(), SocketType::Dealer).await;
    for question in ["one", "nothing", "two"] {
        ask(&mut dealer, question).await;
    }
    ask(&mut other, "three").await;
    assert_eq!(dealer.message().await, frames(&["", "one"]));
    assert_eq!(dealer.message().await, frames(&["", "two"]));
    assert_eq!(other.message().await, frames(&["", "three"]));
    assert!(dealer.is_heard().await);
}

#[tokio::test]
async fn who_breaks_a_bound_is_disconnected_and_others_are_answered() {
    let (router, _) = router().await;
    let addr = router.local_addr();
    let mut good = Peer::ready(addr, SocketType::Dealer).await;
    for (what, bytes, for_ever) in outrages() {
        let mut bad = Peer::ready(addr, SocketType::Dealer).await;
        bad.say_until_disconnected(what, &bytes, for_ever).await;
        is_answered(&mut good).await;
    }
    for (what, bytes) in no_greetings() {
        Peer::silent(addr, SocketType::Dealer).await.say_until_disconnected(what, &bytes, false).await;
        is_answered(&mut good).await;
    }
}

#[tokio::test]
async fn who_does_not_read_its_answers_delays_nobody_and_they_are_not_made() {
    let (router, made) = router().await;
    let mut slow = Vec::new();
    for _ in 1..LIMITS.connections {
        let mut peer = Peer::ready(router.local_addr(), SocketType::Dealer).await;
        for _ in 0..100 {
            ask(&mut peer, "much").await;
        }
        slow.push(peer);
    }
    let mut good = Peer::ready(router.local_addr(), SocketType::Dealer).await;
    for _ in 0..100 {
        is_answered(&mut good).await;
    }
    // Megabytes: what the system takes of each connection, and one more.
    let made = made.load(Relaxed) - 100;
    assert!(made < 64 * slow.len(), "{made}");
}

#[tokio::test]
async fn who_asks_nothing_keeps_nobody_out() {
    let (router, _) = router().await;
    let addr = router.local_addr();
    let mut busy = Peer::ready(addr, SocketType::Dealer).await;
    ask(&mut busy, "much").await;
    assert_eq!(busy.message().await[1].len(), 1 << 20);
    let mut idle = Vec::new();
    for number in 0..5 * LIMITS.connections {
        idle.push(if number % 2 == 0 {
            Peer::silent(addr, SocketType::Dealer).await
        } else {
            Peer::ready(addr, SocketType::Dealer).await
        });
    }
    is_answered(&mut Peer::ready(addr, SocketType::Dealer).await).await;
    // Who is being answered kept its place.
    for _ in 1..1024 {
        assert_eq!(busy.message().await[1].len(), 1 << 20);
    }
    is_answered(&mut busy).await;
}

#[tokio::test]
async fn a_closed_socket_is_closed() {
    let (router, _) = router().await;
    let mut peer = Peer::ready(router.local_addr(), SocketType::Dealer).await;
    let addr = router.local_addr();
    router.close().await;
    assert_eq!(peer.next().await, None::<Incoming>);
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}
