//! Hazard: one client holds what all have to share, at no cost of its own: places by bodies that never end,
//! connections by saying nothing. Bodies come over both protocols, in pieces of a byte and of many; honest
//! clients are served meanwhile.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use keyway_tests::h2_client::H2Client;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, FakeWorker, Gateway, Protocol, Resources, eventually, post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

/// Places of the gateway here.
const PLACES: usize = 90;

async fn with_limits(limits: &str) -> (Gateway, FakeWorker) {
    let worker = FakeWorker::start().await;
    // An index that is not written in large pages meanwhile.
    let routing = "[routing]\nindex_bytes = 1048576";
    let toml = format!(
        "worker = [\"http://{}\"]\n{routing}\n[limits]\nmax_in_flight = {PLACES}\n{limits}\n",
        worker.addr()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    (gateway, worker)
}

async fn arriving(gateway: &Gateway) -> usize {
    gateway.metrics().await.sum("keyway_arriving", &[]) as usize
}

async fn honest(gateway: &Gateway) {
    let answer = post(gateway.addr, CHAT, &chat("an honest one")).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
}

/// Sends a body without an end until it is answered; with which status.
async fn endless(addr: std::net::SocketAddr, protocol: Protocol, piece: &'static [u8]) -> u16 {
    let pause = || tokio::time::sleep(Duration::from_millis(100));
    match protocol {
        Protocol::Http1 => {
            let mut client = Client::connect(addr).await;
            let head = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: 60000000\r\n\r\n");
            client.send(head.as_bytes()).await;
            let (mut client, mut sends) = (client, true);
            for _ in 0..100 {
                sends = sends && client.try_send(piece).await;
                pause().await;
                if !sends {
                    break;
                }
            }
            client.try_head().await.map_or(0, |head| head.status())
        }
        Protocol::Http2 => {
            let mut client = H2Client::connect(addr).await;
            let (mut exchange, mut stream) = client.begin(CHAT, None).await;
            let sends = async {
                while stream.send_data(Bytes::from_static(piece), false).is_ok() {
                    pause().await;
                }
                std::future::pending::<()>().await;
            };
            tokio::select! { head = exchange.head() => head.status.as_u16(), () = sends => 0 }
        }
    }
}

#[tokio::test]
async fn bodies_that_never_end_keep_nobody_out_and_end() {
    for protocol in [Protocol::Http1, Protocol::Http2] {
        // Too little for the least rate; more than that, for too long.
        for (piece, limits) in [
            (&b" "[..], "body_idle_ms = 2000\nbody_timeout_ms = 60000"),
            (&[b' '; 2_000][..], "body_idle_ms = 60000\nbody_timeout_ms = 2000"),
        ] {
            let (gateway, worker) = with_limits(limits).await;
            let mut attackers = JoinSet::new();
            for _ in 0..2 * PLACES {
                attackers.spawn(endless(gateway.addr, protocol, piece));
            }
            eventually!(arriving(&gateway).await >= PLACES / 2);
            for _ in 0..20 {
                honest(&gateway).await;
                assert!(arriving(&gateway).await < PLACES);
            }
            let statuses = attackers.join_all().await;
            let count = |wanted| statuses.iter().filter(|status| **status == wanted).count();
            // Those beyond the share of their address are refused at once, the others once they have had
            // their time.
            assert!(count(408) >= PLACES / 2 && count(429) > 0, "{protocol:?}: {statuses:?}");
            assert!(statuses.iter().all(|status| [408, 429].contains(status)), "{protocol:?}: {statuses:?}");
            assert_eq!((arriving(&gateway).await, worker.request_count()), (0, 20));
            gateway.idle().await;
        }
    }
}

#[tokio::test]
async fn one_address_leaves_places_to_others() {
    let (gateway, worker) = with_limits("").await;
    let other: IpAddr = [127, 0, 0, 2].into();
    let mut clients = Vec::new();
    worker.hang();
    for _ in 0..2 * PLACES {
        let mut client = Client::connect(gateway.addr).await;
        client.post(CHAT, &chat_stream("without end")).await;
        clients.push(client);
    }
    eventually!(worker.active() == PLACES * 8 / 9);
    worker.answer();
    let mut honest = Client::connect_from(other, gateway.addr).await;
    honest.post(CHAT, &chat("from elsewhere")).await;
    assert_eq!(honest.response().await.status(), 200);
    let refused = post(gateway.addr, CHAT, &chat("one more")).await;
    assert_eq!((refused.status(), refused.header("retry-after")), (429, Some("1")), "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!((&error["code"], &error["type"]), (&"share_taken".into(), &"rate_limit_error".into()));
    assert!(
        error["message"].as_str().is_some_and(|text| text.contains("your address has 80 requests")),
        "{error}"
    );
    drop(clients);
    gateway.idle().await;
}

#[tokio::test]
async fn a_connection_that_asks_for_nothing_is_closed() {
    let limits = "header_read_ms = 400\nclient_stall_ms = 400\nbody_idle_ms = 400";
    let (gateway, _worker) = with_limits(limits).await;
    // Nothing; a request that was answered; one whose body does not come.
    H2Client::connect(gateway.addr).await.closed().await;
    let mut client = H2Client::connect(gateway.addr).await;
    assert_eq!(client.post(CHAT, &chat("one")).await.head().await.status, 200);
    client.closed().await;
    let mut client = H2Client::connect(gateway.addr).await;
    let (mut exchange, _stream) = client.begin(CHAT, None).await;
    assert_eq!(exchange.head().await.status, 408);
    client.closed().await;
    gateway.idle().await;
}

#[tokio::test]
async fn where_there_is_no_place_who_has_been_idle_for_longest_goes() {
    let (gateway, worker) = with_limits("max_connections = 6").await;
    worker.manual();
    // One that is served, then idle ones of both protocols and one whose body never comes.
    let mut served = Client::connect(gateway.addr).await;
    served.post(CHAT, &chat_stream("served")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    assert_eq!(served.head().await.status(), 200);
    worker.answer();
    let mut http1 = Client::connect(gateway.addr).await;
    http1.post(CHAT, &chat("one")).await;
    assert_eq!(http1.response().await.status(), 200);
    let mut http2 = H2Client::connect(gateway.addr).await;
    assert_eq!(http2.post(CHAT, &chat("one")).await.head().await.status, 200);
    let mut half = H2Client::connect(gateway.addr).await;
    let _half = half.begin(CHAT, None).await;
    eventually!(arriving(&gateway).await == 1);
    // Each one more is let in for the one that has been idle for longest; these stay idle too.
    let mut more = Vec::new();
    for _ in 0..6 {
        let mut client = Client::connect(gateway.addr).await;
        client.post(CHAT, &chat("more")).await;
        assert_eq!(client.response().await.status(), 200);
        more.push(client);
    }
    assert!(http1.try_head().await.is_none(), "closed");
    http2.closed().await;
    half.closed().await;
    call.say("still served").await;
    served.next_event().await.event();
    let mut last = more.pop().expect("some");
    last.post(CHAT, &chat("the last one is still open")).await;
    assert_eq!(last.response().await.status(), 200);
    call.done().await;
    gateway.idle().await;
}

/// Bytes of request bodies that the gateway may hold here.
const BODY_MEMORY: usize = 16 << 20;

async fn body_memory(gateway: &Gateway) -> usize {
    gateway.metrics().await.sum("keyway_body_memory_bytes", &[]) as usize
}

#[tokio::test]
async fn large_bodies_take_no_more_memory_than_they_may() {
    let (gateway, worker) =
        with_limits(&format!("max_body_memory_bytes = {BODY_MEMORY}\nbody_idle_ms = 3000")).await;
    honest(&gateway).await;
    Resources::forget_peak(&gateway.process);
    let before = Resources::of(&gateway.process);
    // Each all but its last bytes, which never come.
    let mut clients = Vec::new();
    let part = vec![b' '; 2 << 20];
    let mut refused = 0;
    for _ in 0..30 {
        let mut client = Client::connect(gateway.addr).await;
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n", part.len() + 1);
        client.send(head.as_bytes()).await;
        refused += usize::from(!client.try_send(&part).await);
        clients.push(client);
        assert!(body_memory(&gateway).await <= BODY_MEMORY);
        honest(&gateway).await;
    }
    // Of another address there is room for a body that comes whole.
    let mut honest = Client::connect_from([127, 0, 0, 2].into(), gateway.addr).await;
    honest.post(CHAT, &chat(&"large ".repeat(100_000))).await;
    assert_eq!(honest.response().await.status(), 200);
    let mut statuses = Vec::new();
    for mut client in clients {
        statuses.push(client.try_head().await.map_or(429, |head| head.status()));
    }
    let count = |wanted| statuses.iter().filter(|status| **status == wanted).count();
    assert!(count(408) >= 6 && count(429) >= 20, "{statuses:?}, {refused} while they sent");
    eventually!(body_memory(&gateway).await == 0);
    let grown = Resources::of(&gateway.process).peak_bytes.saturating_sub(before.peak_bytes) as usize;
    assert!(grown < 2 * BODY_MEMORY, "{grown} bytes");
    // What an answer is under way to is held until its end.
    worker.manual();
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat_stream(&"large ".repeat(100_000))).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    assert!(body_memory(&gateway).await >= 600_000);
    call.done().await;
    drop(client);
    eventually!(body_memory(&gateway).await == 0);
}

#[tokio::test]
async fn what_takes_no_place_is_no_idleness() {
    let (gateway, _worker) = with_limits("header_read_ms = 400\nclient_stall_ms = 400").await;
    // Another gateway that listens, for much longer than may be idle.
    let mut listens = tokio::net::TcpStream::connect(gateway.admin).await.unwrap();
    listens.write_all(b"GET /load HTTP/1.1\r\nhost: k\r\n\r\n").await.unwrap();
    let hears = async {
        let mut line = [0; 4 << 10];
        while listens.read(&mut line).await.is_ok_and(|bytes| bytes > 0) {}
    };
    // And who asks for what the gateway itself knows, of either listener, all that time.
    let asks = async {
        let (mut client, mut operator) =
            (Client::connect(gateway.addr).await, Client::connect(gateway.admin).await);
        for _ in 0..30 {
            for (client, path) in [(&mut client, "/v1/models"), (&mut operator, "/metrics")] {
                client.request("GET", path, &[], b"").await;
                assert_eq!(client.response().await.status(), 200);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! { () = hears => panic!("the stream of load was ended"), () = asks => {} }
}
