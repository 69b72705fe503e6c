//! Hazard: one request breaks worker after worker, as each that dies of it hands it on to the next, and
//! whoever sent it sends it again; or a request is taken for such a one since its worker died of something
//! else.

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::CHAT;
use keyway_tests::{Call, Cluster, Exchange, FakeWorker, Protocol, post};
use serde_json::json;

/// How far a worker comes before it breaks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Breaks {
    BeforeHead,
    InHead,
    AfterHead,
    AfterOpening,
}

async fn fleet(workers: usize) -> Cluster {
    let cluster = Cluster::builder().fakes(workers).start().await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    cluster
}

async fn any_call(cluster: &Cluster) -> Call {
    let calls = cluster.fakes.iter().map(|worker| Box::pin(worker.call()));
    futures_util::future::select_all(calls).await.0
}

async fn breaks(mut call: Call, how: Breaks) {
    match how {
        Breaks::BeforeHead => {}
        Breaks::InHead => call.raw(b"HTTP/1.1 200 OK\r\ncontent-ty").await,
        Breaks::AfterHead => call.begin_stream().await,
        Breaks::AfterOpening => {
            call.begin_stream().await;
            call.event(r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#).await;
        }
    }
    call.cut();
}

/// Status and body that a client has of a request behind which every worker breaks, and how many it broke.
async fn broken(
    cluster: &Cluster,
    (protocol, path): (Protocol, &str),
    body: &str,
    how: Breaks,
) -> (u16, String, usize) {
    let asked = || cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>();
    let before = asked();
    let breaking = async {
        loop {
            breaks(any_call(cluster).await, how).await;
        }
    };
    let answered = async {
        let mut exchange = Exchange::post(protocol, cluster.addr(), path, body.as_bytes()).await;
        (exchange.status().await, exchange.body().await.0)
    };
    let (status, text) = tokio::select! { answer = answered => answer, () = breaking => unreachable!() };
    (status, String::from_utf8_lossy(&text).into_owned(), asked() - before)
}

#[tokio::test]
async fn what_breaks_two_workers_is_asked_of_no_third_and_refused_for_a_while() {
    let chat = |text: &str, stream: bool| {
        let messages = json!([{"role": "user", "content": text}]);
        json!({"model": "fake-model", "stream": stream, "max_tokens": 5, "messages": messages}).to_string()
    };
    let cases = [
        (CHAT, chat("whole", false), Breaks::BeforeHead),
        (CHAT, chat("in its head", false), Breaks::InHead),
        ("/v1/messages", chat("anthropic", false), Breaks::BeforeHead),
        ("/v1/embeddings", json!({"model": "fake-model", "input": "x"}).to_string(), Breaks::BeforeHead),
        (CHAT, chat("stream", true), Breaks::BeforeHead),
        (CHAT, chat("stream, head", true), Breaks::AfterHead),
        (CHAT, chat("stream, role", true), Breaks::AfterOpening),
        (
            "/v1/completions",
            json!({"model": "fake-model", "prompt": "x", "stream": true}).to_string(),
            Breaks::AfterHead,
        ),
    ];
    for (path, body, how) in &cases {
        let cluster = fleet(4).await;
        let (status, text, asked) = broken(&cluster, (Protocol::Http1, path), body, *how).await;
        // A stream that has begun is looked for elsewhere as ever, here at all there are.
        let most = if matches!(how, Breaks::AfterHead | Breaks::AfterOpening) { 4 } else { 2 };
        assert_eq!(asked, most, "{path} {how:?}: {text}");
        assert!(status == 502 || text.contains("stream_lost"), "{path} {how:?}: {status} {text}");
        for protocol in PROTOCOLS {
            let (status, text, asked) = broken(&cluster, (protocol, path), body, *how).await;
            assert_eq!((status, asked), (503, 0), "{path} {how:?}: {text}");
            assert!(text.contains("breaks_workers"), "{text}");
        }
        let refused = post(cluster.addr(), path, body.as_bytes()).await;
        let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=30).contains(&wait), "{wait}");
        // Others are served.
        cluster.fakes.iter().for_each(FakeWorker::answer);
        assert_eq!(post(cluster.addr(), CHAT, chat("a harmless one", false).as_bytes()).await.status(), 200);
        let refused =
            cluster.gateway.metrics().await.sum("keyway_requests_total", &[("outcome", "breaks_workers")]);
        assert_eq!(refused, 3.0);
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_breaks_off_whatever_it_is_asked_is_no_request_s_fault() {
    let cluster = Cluster::builder().fakes(3).start().await;
    let (flaky, well) = cluster.fakes.split_at(1);
    flaky[0].manual();
    well.iter().for_each(FakeWorker::answer);
    let breaking = async {
        loop {
            flaky[0].call().await.cut();
        }
    };
    let asking = async {
        for round in 0..40 {
            assert_eq!(cluster.chat("always the same").await.status(), 200, "round {round}");
        }
    };
    tokio::select! { () = asking => {}, () = breaking => unreachable!() };
    assert!(flaky[0].request_count() > 0, "nothing was tried");
}
