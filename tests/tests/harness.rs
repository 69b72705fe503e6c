//! The harness tested against itself, without a gateway: what the fake worker says is what the raw clients
//! see, aborts are seen, and the chaos proxy breaks exactly where it was told to.

use keyway_tests::chaos_proxy::Fault;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream};
use keyway_tests::{ChaosProxy, Client, End, FakeWorker, Next, eventually, get, post};

#[tokio::test]
async fn the_fake_worker_answers_whole_and_streamed_and_records_bytes() {
    let worker = FakeWorker::start().await;
    assert_eq!(get(worker.addr(), "/health").await.status(), 200);
    assert_eq!(get(worker.addr(), "/v1/models").await.json()["data"][0]["id"], "fake-model");

    let mut client = Client::connect(worker.addr()).await;
    client.request("POST", CHAT, &[("X-Odd", "a  b")], &chat("hi")).await;
    let whole = client.response().await;
    assert_eq!(whole.json()["choices"][0]["message"]["content"], "one two three");
    client.post(CHAT, &chat_stream("hi")).await; // on the same connection
    assert_eq!(client.head().await.status(), 200);
    let mut events = Vec::new();
    while let Next::Event(data) = client.next_event().await {
        events.push(data);
    }
    assert_eq!(events.len(), 5);
    assert_eq!(events[4], DONE);

    let requests = worker.requests();
    assert_eq!(requests.len(), 2, "probes are not recorded");
    assert_eq!(requests[0].body, chat("hi"));
    assert!(requests[0].head.raw.starts_with(b"POST /v1/chat/completions HTTP/1.1\r\n"));
    assert!(memchr::memmem::find(&requests[0].head.raw, b"\r\nX-Odd: a  b\r\n").is_some());
    assert_eq!((worker.active(), worker.aborted()), (0, 0));
}

#[tokio::test]
async fn a_manual_call_is_driven_step_by_step() {
    let worker = FakeWorker::start().await;
    worker.manual();
    let mut client = Client::connect(worker.addr()).await;
    client.post(CHAT, &chat_stream("hi")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    assert_eq!(client.head().await.status(), 200);
    call.event("first").await;
    assert_eq!(client.next_event().await.event(), "first");
    call.chunk(b"data: ha").await;
    call.cut();
    assert_eq!(client.next_event().await, Next::End { end: End::Aborted, torn: true });
}

#[tokio::test]
async fn a_lie_about_the_length_shows_on_the_wire() {
    let worker = FakeWorker::start().await;
    worker.manual();
    let mut client = Client::connect(worker.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    let mut call = worker.call().await;
    call.head(200, &[("content-length", "10")]).await;
    call.raw(b"short").await;
    call.cut();
    let response = client.response().await;
    assert_eq!((response.text().as_str(), response.end), ("short", End::Aborted));
}

#[tokio::test]
async fn a_hanging_worker_counts_who_went_away() {
    let worker = FakeWorker::start().await;
    worker.hang();
    let mut client = Client::connect(worker.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    eventually!(worker.active() == 1);
    assert_eq!(worker.aborted(), 0);
    drop(client);
    eventually!(worker.active() == 0 && worker.aborted() == 1);
}

#[tokio::test]
async fn a_stopped_worker_refuses_and_comes_back_on_its_port() {
    let worker = FakeWorker::start().await;
    let mut idle = Client::connect(worker.addr()).await;
    worker.stop().await;
    assert!(tokio::net::TcpStream::connect(worker.addr()).await.is_err());
    let closed = !idle.try_send(b"GET /health HTTP/1.1\r\n\r\n").await || idle.try_head().await.is_none();
    assert!(closed, "connections die with the worker");
    worker.restart().await;
    assert_eq!(get(worker.addr(), "/health").await.status(), 200);
}

#[tokio::test]
async fn the_port_of_a_stopped_worker_is_given_to_nobody_else() {
    let worker = FakeWorker::start().await;
    worker.stop().await;
    let taken = tokio::net::TcpListener::bind(worker.addr()).await;
    assert_eq!(taken.map_err(|error| error.kind()).err(), Some(std::io::ErrorKind::AddrInUse));
    worker.restart().await;
    assert_eq!(get(worker.addr(), "/health").await.status(), 200);
}

#[tokio::test]
async fn the_proxy_cuts_at_the_byte_it_was_told() {
    let worker = FakeWorker::start().await;
    let proxy = ChaosProxy::start(worker.addr()).await;
    let whole = post(proxy.addr(), CHAT, &chat("hi")).await;
    assert_eq!(whole.end, End::Complete);
    let head = whole.head.raw.len();
    for (fault, end) in [
        (Fault::Drip, End::Complete),
        (Fault::CutAfter(head + 7), End::Aborted),
        (Fault::HalfCloseAfter(head + 7), End::Aborted),
    ] {
        proxy.set(fault);
        let response = post(proxy.addr(), CHAT, &chat("hi")).await;
        let wanted = if end == End::Complete { &whole.body[..] } else { &whole.body[..7] };
        assert_eq!((&response.body[..], response.end), (wanted, end), "{fault:?}");
    }
}

#[tokio::test]
async fn the_proxy_stalls_until_told_otherwise() {
    let worker = FakeWorker::start().await;
    let proxy = ChaosProxy::start(worker.addr()).await;
    proxy.set(Fault::StallAfter(5));
    let mut client = Client::connect(proxy.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    eventually!(proxy.passed() == [5]);
    proxy.set(Fault::None);
    assert_eq!(client.response().await.end, End::Complete);
    proxy.set(Fault::Refuse);
    let mut refused = Client::connect(proxy.addr()).await;
    let closed =
        !refused.try_send(b"GET /health HTTP/1.1\r\n\r\n").await || refused.try_head().await.is_none();
    assert!(closed);
}
