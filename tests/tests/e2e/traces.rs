//! Hazard: a trace breaks at the gateway, names the wrong parent, carries a prompt, or costs a request
//! something when its collector is slow or gone. A collector that reads with OpenTelemetry's own messages
//! receives the spans.

use std::process::Command;

use keyway_tests::bins::workspace_root;
use keyway_tests::openai::{CHAT, FAKE_MODEL, chat, chat_stream};
use keyway_tests::process::Process;
use keyway_tests::{Client, Cluster, FakeWorker, Gateway, Response, eventually, tools};
use serde_json::Value;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const SECRET: &str = "xyzzy-secret-prompt";

struct Collector(Process);

impl Collector {
    /// `None`: skip the test.
    fn start(refusals: u32) -> Option<Self> {
        let mut command = Command::new(tools::python()?);
        command.arg(workspace_root().join("tests/python/otlp_collector.py")).arg(refusals.to_string());
        Some(Self(Process::spawn("collector", &mut command)))
    }

    async fn url(&self) -> String {
        format!("http://{}/base/", self.0.announced("collecting on ").await)
    }

    /// The spans that came, as many as these.
    async fn spans(&self, count: usize) -> Vec<Value> {
        let read = || -> Vec<Value> {
            let log = self.0.log();
            log.iter()
                .filter_map(|line| line.strip_prefix("span "))
                .map(|json| serde_json::from_str(json).unwrap())
                .collect()
        };
        eventually!(read().len() >= count, "{count} spans");
        assert!(!self.0.log().iter().any(|line| line.contains(SECRET)), "a prompt in a trace");
        read()
    }
}

/// A chat request in the client's own trace.
async fn traced(gateway: &Gateway, body: &[u8], flags: &str) -> Response {
    let mut client = Client::connect(gateway.addr).await;
    let context = format!("00-{TRACE}-{PARENT}-{flags}");
    let headers =
        [("content-type", "application/json"), ("traceparent", &*context), ("tracestate", "vendor=one")];
    client.request("POST", &format!("{CHAT}?secret={SECRET}"), &headers, body).await;
    client.response().await
}

fn seen(worker: &FakeWorker, name: &str) -> Option<String> {
    worker.requests().last().and_then(|request| request.head.header(name).map(str::to_owned))
}

#[tokio::test]
async fn a_client_s_trace_goes_through_the_gateway_to_the_worker() {
    // The collector refuses once: what it could not take comes again.
    let Some(collector) = Collector::start(1) else { return };
    let cluster =
        Cluster::builder().fakes(1).args(&["--otlp-endpoint", &collector.url().await]).start().await;
    let worker = &cluster.fakes[0];
    worker.set_usage(40, 16);
    assert_eq!(traced(&cluster.gateway, &chat_stream(SECRET), "01").await.status(), 200);
    let spans = collector.spans(2).await;
    let [server, client] = &spans[..] else { panic!("{spans:?}") };
    for span in &spans {
        assert_eq!(
            (&span["trace"], &span["state"], &span["service"], &span["error"]),
            (&TRACE.into(), &"vendor=one".into(), &"keyway".into(), &false.into()),
            "{span}"
        );
        assert!(span["nanos"].as_u64() > Some(0), "{span}");
    }
    // Who is whose parent: the client's span, the gateway's, the attempt's, and of that the worker is told.
    assert_eq!((&server["parent"], &server["kind"]), (&PARENT.into(), &2.into()));
    assert_eq!((&client["parent"], &client["kind"]), (&server["span"], &3.into()));
    let told = format!("00-{TRACE}-{}-01", client["span"].as_str().unwrap());
    assert_eq!(seen(worker, "traceparent"), Some(told));
    assert_eq!(seen(worker, "tracestate").as_deref(), Some("vendor=one"));
    // 0x200: this parent is in another process, which the gateway's own is not.
    assert_eq!((server["flags"].as_u64(), client["flags"].as_u64()), (Some(0x301), Some(0x101)));
    assert_eq!(server["name"], format!("POST {CHAT}"));
    assert_eq!(client["name"], format!("chat {FAKE_MODEL}"));
    let pick = &server["events"][0];
    assert_eq!(
        (&pick["name"], &pick["keyway.worker"]),
        (&"keyway.pick".into(), &worker.addr().to_string().into())
    );
    let of = |span: &Value, key: &str| span["attributes"][key].clone();
    assert_eq!(
        (of(server, "http.response.status_code"), of(server, "keyway.outcome")),
        (200.into(), "complete".into())
    );
    assert_eq!(of(client, "gen_ai.provider.name"), "openai");
    assert_eq!(
        (of(client, "gen_ai.usage.input_tokens"), of(client, "gen_ai.usage.cache_read.input_tokens")),
        (40.into(), 16.into())
    );
    assert!(of(client, "gen_ai.response.time_to_first_chunk").as_f64() > Some(0.0), "{client}");
    eventually!(collector.0.log().iter().any(|line| line == "refused"));
    // The collector has them before its answer is counted.
    eventually!(
        cluster.gateway.metrics().await.sum("keyway_trace_spans_total", &[("outcome", "sent")]) == 2.0
    );
}

#[tokio::test]
async fn each_attempt_has_a_span_and_a_request_without_a_trace_begins_one() {
    let Some(collector) = Collector::start(0) else { return };
    let (url, lost) = (collector.url().await, FakeWorker::start().await);
    let worker = FakeWorker::start().await;
    let config = format!("policy = \"round-robin\"\n[traces]\notlp_endpoint = \"{url}\"\ngenai = \"1.36\"\n");
    let gateway = Gateway::builder().config(&config).worker(worker.addr()).worker(lost.addr()).start().await;
    gateway.wait_ready(2).await;
    lost.stop().await;
    for _ in 0..2 {
        assert_eq!(keyway_tests::post(gateway.addr, CHAT, &chat(SECRET)).await.status(), 200);
    }
    // Two requests, one of them at two workers.
    let spans = collector.spans(5).await;
    let servers: Vec<&Value> = spans.iter().filter(|span| span["kind"] == 2).collect();
    assert_eq!(servers.len(), 2);
    assert!(servers.iter().all(|span| span["parent"] == ""), "{servers:?}");
    assert_ne!(servers[0]["trace"], servers[1]["trace"]);
    let failed: Vec<&Value> = spans.iter().filter(|span| span["error"] == true).collect();
    let [failed] = failed[..] else { panic!("{failed:?}") };
    assert_eq!(failed["attributes"]["error.type"], "connect");
    assert_eq!(failed["attributes"]["gen_ai.system"], "openai");
    let attempts: Vec<&Value> = spans.iter().filter(|span| span["parent"] == failed["parent"]).collect();
    let [_, second] = attempts[..] else { panic!("{attempts:?}") };
    assert!(
        second["started"].as_u64()
            >= failed["started"].as_u64().map(|at| at + failed["nanos"].as_u64().unwrap())
    );
    let told: Vec<String> = worker
        .requests()
        .iter()
        .filter_map(|request| request.head.header("traceparent").map(str::to_owned))
        .collect();
    let second = format!("-{}-", second["span"].as_str().unwrap());
    assert_eq!(told.iter().filter(|header| header.contains(&second)).count(), 1, "{told:?}");
}

#[tokio::test]
async fn what_the_client_does_not_record_is_not_recorded_and_still_has_its_parent() {
    let Some(collector) = Collector::start(0) else { return };
    let cluster =
        Cluster::builder().fakes(1).args(&["--otlp-endpoint", &collector.url().await]).start().await;
    assert_eq!(traced(&cluster.gateway, &chat(SECRET), "00").await.status(), 200);
    let told = seen(&cluster.fakes[0], "traceparent").unwrap();
    assert!(told.starts_with(&format!("00-{TRACE}-")) && told.ends_with("-00"), "{told}");
    assert!(!told.contains(PARENT), "{told}");
    assert_eq!(traced(&cluster.gateway, &chat(SECRET), "01").await.status(), 200);
    // The one that was recorded came; the other did not.
    assert_eq!(collector.spans(2).await.len(), 2);
}

#[tokio::test]
async fn without_traces_a_client_s_header_passes_as_it_came() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    assert_eq!(traced(&cluster.gateway, &chat(SECRET), "01").await.status(), 200);
    let context = format!("00-{TRACE}-{PARENT}-01");
    assert_eq!(seen(&cluster.fakes[0], "traceparent"), Some(context));
    assert_eq!(seen(&cluster.fakes[0], "tracestate").as_deref(), Some("vendor=one"));
}

#[tokio::test]
async fn a_collector_that_is_gone_costs_spans_and_no_request() {
    let gone = FakeWorker::start().await;
    gone.stop().await;
    let endpoint = format!("http://{}", gone.addr());
    let cluster = Cluster::builder().fakes(1).args(&["--otlp-endpoint", &endpoint]).start().await;
    for i in 0..20 {
        cluster.chat(&format!("request {i}")).await;
    }
    let failed = async || {
        let metrics = cluster.gateway.metrics().await;
        metrics.sum("keyway_trace_spans_total", &[("outcome", "failed")])
    };
    eventually!(failed().await == 40.0, "all spans given up");
    cluster.gateway.idle().await;
}
