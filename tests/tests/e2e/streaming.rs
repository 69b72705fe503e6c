//! Hazard: events are held back, merged, torn or rewritten on their way. Each is with the client as soon as
//! the worker said it.

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat_stream, delta};
use keyway_tests::{Call, Client, Cluster, End, Exchange, Next};

/// A client's stream at the first worker, begun by head alone; the test says the rest.
async fn begun_stream(cluster: &Cluster) -> (Client, Call) {
    cluster.fakes[0].manual();
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat_stream("hi")).await;
    let mut call = cluster.fakes[0].call().await;
    call.begin_stream().await;
    (client, call)
}

#[tokio::test]
async fn each_event_arrives_before_the_next_is_said() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat_stream("hi")).await;
        let mut call = cluster.fakes[0].call().await;
        call.begin_stream().await;
        assert_eq!(exchange.status().await, 200, "the head arrives before any event");
        for word in ["one", "two", "three"] {
            call.say(word).await;
            assert_eq!(exchange.next_event().await.event(), delta(word).to_string());
        }
        call.done().await;
        assert_eq!(exchange.next_event().await.event(), DONE);
        assert_eq!(exchange.next_event().await, Next::End { end: End::Complete, torn: false });
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn an_event_said_in_pieces_arrives_whole() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (mut client, mut call) = begun_stream(&cluster).await;
    client.head().await;
    let event = delta("Grüße 日本 🔑").to_string();
    for byte in format!("data: {event}\n\n").bytes() {
        call.chunk(&[byte]).await;
    }
    assert_eq!(client.next_event().await.event(), event);
    call.done().await;
}

#[tokio::test]
async fn the_bytes_of_a_stream_are_not_rewritten() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    // Comments, CRLF, no blank after the colon, other fields, several data lines, an unfinished end.
    let stream = ": hello\n\ndata: {\"a\": 1 }\n\nevent: x\r\nid: 7\r\ndata:two\r\ndata: lines\r\n\r\nretry: 5\n\ndata: [DONE]\n\n";
    for cut in (0..stream.len()).step_by(11) {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat_stream("hi")).await;
        let mut call = cluster.fakes[0].call().await;
        call.begin_stream().await;
        for part in [&stream.as_bytes()[..cut], &stream.as_bytes()[cut..]] {
            if !part.is_empty() {
                call.chunk(part).await;
            }
        }
        call.end().await;
        let response = client.response().await;
        assert_eq!((response.text().as_str(), response.end), (stream, End::Complete), "cut at {cut}");
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    }
}

#[tokio::test]
async fn an_event_of_a_megabyte_passes() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (mut client, mut call) = begun_stream(&cluster).await;
    let event = delta(&"x".repeat(1_000_000)).to_string();
    let (said, seen) = tokio::join!(
        async {
            call.event(&event).await;
            call.done().await;
        },
        async {
            client.head().await;
            client.next_event().await.event()
        },
    );
    let () = said;
    assert!(seen == event, "the event changed");
    assert_eq!(client.next_event().await.event(), DONE);
}

#[tokio::test]
async fn two_hundred_streams_at_once_do_not_mix() {
    let cluster = Cluster::of_fakes(3, "random").await;
    let streams = (0..200).map(|i| {
        let addr = cluster.addr();
        let protocol = PROTOCOLS[i % 2];
        async move {
            let mut exchange =
                Exchange::post(protocol, addr, CHAT, &chat_stream(&format!("stream {i}"))).await;
            assert_eq!(exchange.status().await, 200);
            let (body, end) = exchange.body().await;
            assert_eq!(end, End::Complete);
            assert_eq!(String::from_utf8(body).unwrap().matches("data: ").count(), 5);
        }
    });
    futures_util::future::join_all(streams).await;
    cluster.gateway.idle().await;
}
