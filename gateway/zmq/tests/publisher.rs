//! Hazard: one subscriber takes the publisher's memory, or keeps others from what is published.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use keyway_wire::zmtp::{Incoming, SocketType, greeting, ready};
use keyway_zmq::{PubLimits, PubSocket, SUBSCRIPTIONS_MAX};

use self::support::{Peer, frames, listener, no_greetings, outrages};

const LIMITS: PubLimits =
    PubLimits { connections: 8, kept_messages: 64, kept_bytes: 8 << 20, stall: Duration::from_secs(600) };

async fn publisher() -> PubSocket {
    PubSocket::new(listener().await, LIMITS).unwrap()
}

fn subscription(topic: &[u8]) -> Vec<u8> {
    [b"\0", &[1 + topic.len() as u8][..], b"\x01", topic].concat()
}

/// A subscriber to this; `None` where there is no place for it.
async fn try_subscriber(publisher: &PubSocket, topic: &[u8]) -> Option<Peer> {
    let mut peer = Peer::try_ready(publisher.local_addr(), SocketType::Sub).await?;
    peer.say(&subscription(topic)).await;
    peer.is_heard().await.then_some(peer)
}

async fn subscriber(publisher: &PubSocket, topic: &[u8]) -> Peer {
    try_subscriber(publisher, topic).await.expect("a place")
}

#[tokio::test]
async fn everyone_hears_what_it_subscribed_to_in_either_version_s_words() {
    let publisher = publisher().await;
    let mut all = subscriber(&publisher, b"").await;
    let mut some = subscriber(&publisher, b"kv@a").await;
    let mut newer = Peer::ready(publisher.local_addr(), SocketType::Sub).await;
    newer.say(b"\x04\x0d\x09SUBSCRIBEkv@").await;
    assert!(newer.is_heard().await);
    let sent =
        [frames(&["kv@a", "1"]), frames(&["kv@b", "2"]), frames(&["other", "", "3"]), frames(&["kv@a"])];
    for frames in &sent {
        publisher.send(frames);
    }
    for (peer, heard) in [(&mut all, &[0, 1, 2, 3][..]), (&mut some, &[0, 3]), (&mut newer, &[0, 1, 3])] {
        for number in heard {
            assert_eq!(peer.message().await, sent[*number]);
        }
    }
    newer.say(b"\x04\x0a\x06CANCELkv@").await;
    assert!(newer.is_heard().await);
    publisher.send(&sent[0]);
    newer.say(&subscription(b"other")).await;
    assert!(newer.is_heard().await);
    publisher.send(&sent[2]);
    assert_eq!(newer.message().await, sent[2]);
    // More than is sent together.
    let large = [Bytes::from_static(b"kv@a"), vec![9; 3 << 20].into(), Bytes::new(), vec![8; 200].into()];
    publisher.send(&large);
    assert_eq!(some.message().await, sent[0]);
    assert_eq!(some.message().await, large);
    assert_eq!(publisher.missed(), 0);
}

#[tokio::test]
async fn who_breaks_a_bound_is_disconnected_and_others_hear_on() {
    let publisher = publisher().await;
    let mut good = subscriber(&publisher, b"").await;
    let addr = publisher.local_addr();
    let flood: Vec<u8> =
        (0..=SUBSCRIPTIONS_MAX).flat_map(|topic| subscription(&topic.to_le_bytes())).collect();
    let own =
        [("subscriptions without end", flood, false), ("two frames", b"\x01\x01\x01\0\x01a".to_vec(), false)];
    for (what, bytes, for_ever) in outrages().into_iter().chain(own) {
        let mut bad = Peer::ready(addr, SocketType::Sub).await;
        bad.say_until_disconnected(what, &bytes, for_ever).await;
        publisher.send(&frames(&["still", what]));
        assert_eq!(good.message().await, frames(&["still", what]));
    }
    let dealer = [&greeting()[..], &ready(SocketType::Dealer)].concat();
    for (what, bytes) in no_greetings().into_iter().chain([("a peer for another socket", dealer)]) {
        Peer::silent(addr, SocketType::Sub).await.say_until_disconnected(what, &bytes, false).await;
        publisher.send(&frames(&["still", what]));
        assert_eq!(good.message().await, frames(&["still", what]));
    }
}

#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    let publisher = publisher().await;
    let mut good = subscriber(&publisher, b"").await;
    let mut silent = Vec::new();
    for number in 0..5 * LIMITS.connections {
        let peer = Peer::silent(publisher.local_addr(), SocketType::Sub).await;
        if number % 2 == 0 {
            // Some say hello, and then nothing.
            let _ = peer.try_say(&greeting());
        }
        silent.push(peer);
    }
    for engaged in 2..=LIMITS.connections {
        let mut late = subscriber(&publisher, b"").await;
        publisher.send(&frames(&["to all"]));
        assert_eq!(good.message().await, frames(&["to all"]), "{engaged}");
        assert_eq!(late.message().await, frames(&["to all"]), "{engaged}");
        silent.push(late);
    }
    // Where all are engaged, they keep their places; one that leaves makes room.
    assert!(try_subscriber(&publisher, b"").await.is_none());
    publisher.send(&frames(&["to all"]));
    assert_eq!(good.message().await, frames(&["to all"]));
    silent.pop();
    while try_subscriber(&publisher, b"").await.is_none() {}
}

#[tokio::test]
async fn who_never_reads_costs_itself_messages_and_others_nothing() {
    let publisher = publisher().await;
    let mut good = subscriber(&publisher, b"").await;
    let mut lazy = subscriber(&publisher, b"").await;
    let loud = subscriber(&publisher, b"").await;
    let payload = Bytes::from(vec![7; 1 << 20]);
    for number in 0..100_u64 {
        let message = vec![Bytes::new(), number.to_be_bytes().to_vec().into(), payload.clone()];
        publisher.send(&message);
        assert_eq!(good.message().await, message);
        // Says much, reads nothing.
        let _ = loud.try_say(&b"\x04\x09\x04PING\0\x0aok".repeat(1000));
    }
    let mut heard = Vec::new();
    while heard.last() != Some(&99) {
        let frames = lazy.message().await;
        heard.push(u64::from_be_bytes(frames[1][..].try_into().unwrap()));
    }
    assert_eq!(heard[0], 0);
    assert!(heard.is_sorted());
    // What is kept has its bound, so there is a gap; its end is there.
    assert_eq!(publisher.missed(), 100 - heard.len() as u64);
    assert!(publisher.missed() > 0);
}

#[tokio::test]
async fn a_closed_socket_is_closed_and_its_port_is_free() {
    let publisher = publisher().await;
    let mut peer = subscriber(&publisher, b"").await;
    let addr = publisher.local_addr();
    publisher.close().await;
    assert_eq!(peer.next().await, None::<Incoming>);
    let listener = tokio::net::TcpListener::bind(addr).await.unwrap();
    let publisher = PubSocket::new(listener, LIMITS).unwrap();
    subscriber(&publisher, b"").await;
}
