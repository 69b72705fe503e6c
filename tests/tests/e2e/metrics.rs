//! Hazard: a metric that dashboards and autoscalers rely on is missing, wrong or malformed.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, DONE, FAKE_MODEL, chat_for, chat_stream, usage_chunk};
use keyway_tests::{Client, Cluster, FakeWorker, Gateway, Metrics, eventually, post, tools};

/// The names other parts and people rely on.
const CONTRACT: [&str; 7] = [
    "keyway_requests_total",
    "keyway_time_to_first_token_seconds",
    "keyway_inter_token_latency_seconds",
    "keyway_prompt_tokens_total",
    "keyway_cached_tokens_total",
    "keyway_requests_in_flight",
    "keyway_index_bytes",
];

#[tokio::test]
async fn the_metrics_of_the_contract_count_what_passed() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].set_usage(100, 40);
    let prompt = "The same beginning every time. ".repeat(40);
    for _ in 0..3 {
        cluster.chat(&prompt).await;
    }
    for _ in 0..2 {
        assert_eq!(post(cluster.addr(), CHAT, &chat_stream(&prompt)).await.status(), 200);
    }
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    for name in CONTRACT {
        assert!(metrics.has(name), "{name} is missing:\n{}", metrics.text);
    }
    let model = ("model", FAKE_MODEL);
    assert_eq!(metrics.sum("keyway_requests_total", &[model, ("outcome", "complete")]), 5.0);
    assert_eq!(metrics.sum("keyway_prompt_tokens_total", &[model]), 500.0);
    assert_eq!(metrics.sum("keyway_cached_tokens_total", &[model, ("source", "reported")]), 200.0);
    assert!(metrics.sum("keyway_cached_tokens_total", &[model, ("source", "predicted")]) > 0.0);
    assert_eq!(
        metrics.sum("keyway_time_to_first_token_seconds_count", &[model]),
        2.0,
        "streams have a first token"
    );
    assert!(metrics.sum("keyway_inter_token_latency_seconds_count", &[model]) > 0.0);
    assert!(metrics.sum("keyway_index_bytes", &[]) > 0.0);
    assert_eq!(metrics.sum("keyway_routing_seconds_count", &[]), 5.0, "once a request");
}

#[tokio::test]
async fn a_retry_counts_when_another_worker_is_tried_and_not_when_none_is_left() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes[0].stop().await;
    // Until the refusal is noticed one of two goes to the worker that is gone, and is repeated once.
    for i in 0..4 {
        assert_eq!(cluster.chat(&format!("prompt {i}")).await.status(), 200);
    }
    let after_one = cluster.gateway.metrics().await.sum("keyway_retries_total", &[]);
    cluster.fakes[1].stop().await;
    assert_ne!(post(cluster.addr(), CHAT, &chat_for(FAKE_MODEL, "hi", false)).await.status(), 200);
    assert!(after_one <= 1.0, "{after_one}");
    assert_eq!(cluster.gateway.metrics().await.sum("keyway_retries_total", &[]), after_one);
}

/// Some engines send a short stream in one piece with its length; nobody polls such a body after its last
/// byte.
#[tokio::test]
async fn a_stream_of_declared_length_counts_as_complete() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let stream = format!("data: {}\n\ndata: {DONE}\n\n", usage_chunk(10, 4));
    let answered = async {
        let call = cluster.fakes[0].call().await;
        call.respond(200, &[("content-type", "text/event-stream")], stream.as_bytes()).await;
    };
    let body = chat_stream("hi");
    let (response, ()) = tokio::join!(post(cluster.addr(), CHAT, &body), answered);
    assert_eq!(response.text(), stream);
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    let model = ("model", FAKE_MODEL);
    assert_eq!(metrics.sum("keyway_requests_total", &[model, ("outcome", "complete")]), 1.0);
    assert_eq!(metrics.sum("keyway_cached_tokens_total", &[model, ("source", "reported")]), 4.0);
}

#[tokio::test]
async fn a_request_in_flight_is_seen_at_its_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].hang();
    let mut client = keyway_tests::Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat_stream("hi")).await;
    let name = cluster.fakes[0].addr().to_string();
    let at_worker = |m: &Metrics| m.sum("keyway_requests_in_flight", &[("worker", &name)]);
    eventually!(at_worker(&cluster.gateway.metrics().await) == 1.0);
    drop(client);
    eventually!(at_worker(&cluster.gateway.metrics().await) == 0.0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn clients_cannot_make_series() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.chat("one").await;
    post(cluster.addr(), CHAT, &chat_for("unknown-0", "hi", false)).await;
    let before = cluster.gateway.metrics().await.samples.len();
    for i in 1..100 {
        post(cluster.addr(), CHAT, &chat_for(&format!("unknown-{i}"), "hi", false)).await;
        post(cluster.addr(), &format!("/v1/made-up-{i}"), b"{}").await;
    }
    let metrics = cluster.gateway.metrics().await;
    assert!(!metrics.text.contains("unknown-") && !metrics.text.contains("made-up-"));
    // Requests without a model, and their outcome, are the one series that may be new.
    assert!(metrics.samples.len() <= before + 30, "{before} series became {}", metrics.samples.len());
}

/// One key that a tenant has, and the hash of it that the file of tenants names.
const KEY: &str = "kw-of-the-only-tenant";
const KEY_SHA256: &str = "b5542c9dda5e10b63da223b285decd8dd6e8d9a60e97aece22386eba86df24e1";

/// Sends so many requests with a name of their own wherever a client may choose one: model, path, key,
/// session, request, tenant and trace.
async fn ask_by_many_names(gateway: &Gateway, names: std::ops::Range<u32>) {
    let mut client = Client::connect(gateway.addr).await;
    for i in names {
        let path = if i % 4 == 1 { format!("/v1/made-up-{i}?x={i}") } else { CHAT.to_owned() };
        let key = if i % 4 == 2 { format!("made-up-{i}") } else { KEY.to_owned() };
        let model = if i % 4 == 3 { FAKE_MODEL.to_owned() } else { format!("made-up-{i}") };
        let body = format!("{{\"model\":\"{model}\",\"user\":\"made-up-{i}\",\"messages\":[]}}");
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: made-up-{i}\r\nauthorization: Bearer {key}\r\nx-session-id: made-up-{i}\r\n\
             x-request-id: made-up-{i}\r\nx-tenant: made-up-{i}\r\nuser-agent: made-up-{i}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        client.send(request.as_bytes()).await;
        let response = client.response().await;
        let statuses: &[u16] = match i % 4 {
            2 => &[401],
            3 => &[200],
            _ => &[200, 404],
        };
        assert!(statuses.contains(&response.status()), "{i}: {}", response.text());
    }
}

#[tokio::test]
async fn ten_thousand_names_make_no_series() {
    let worker = FakeWorker::start().await;
    let tenants = config_file(&format!("[[tenant]]\nname = \"one\"\nkey_sha256 = [\"{KEY_SHA256}\"]\n"));
    let toml =
        format!("worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n", worker.addr(), tenants.path());
    let gateway = Gateway::builder().config(&toml).log("info,access=warn").start().await;
    gateway.wait_ready(1).await;
    let series = |metrics: &Metrics| -> BTreeSet<String> {
        metrics.samples.iter().map(|sample| format!("{}{:?}", sample.name, sample.labels)).collect()
    };
    // Every kind of them has been there.
    ask_by_many_names(&gateway, 0..200).await;
    // The scaling sum's come with its next turn.
    eventually!(gateway.metrics().await.sum("keyway_desired_workers", &[]) > 0.0);
    let before = series(&gateway.metrics().await);
    ask_by_many_names(&gateway, 200..10_200).await;
    let metrics = gateway.metrics().await;
    let new: Vec<_> = series(&metrics).difference(&before).cloned().collect();
    assert!(new.is_empty(), "{new:?}");
    assert!(!metrics.text.contains("made-up"));
    assert!(metrics.sum("keyway_requests_total", &[]) >= 7_500.0, "they were counted");
    gateway.idle().await;
}

#[tokio::test]
async fn promtool_finds_nothing_to_complain_about() {
    let Some(promtool) = tools::tool("promtool") else { return };
    let cluster = Cluster::builder().workers(1).start().await;
    let model = keyway_tests::get(cluster.addr(), "/v1/models").await.json()["data"][0]["id"].clone();
    let body = chat_for(model.as_str().unwrap(), "hi", false);
    assert_eq!(post(cluster.addr(), CHAT, &body).await.status(), 200);
    for addr in [cluster.gateway.admin, cluster.workers[0].addr()] {
        let text = Metrics::fetch(addr).await.text;
        let mut child = Command::new(&promtool)
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("promtool runs");
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), text.as_bytes()).expect("promtool reads");
        let output = child.wait_with_output().expect("promtool ends");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        // vLLM's own names have a colon, which promtool reserves for recording rules; nothing else may be
        // said.
        let vllms = |line: &&str| line.starts_with("vllm:") && line.ends_with("should not contain ':'");
        let faults: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty() && !vllms(line)).collect();
        assert!(faults.is_empty(), "{addr}: {said}");
        assert_eq!(output.status.success(), !text.contains("\nvllm:"), "{addr}: {said}");
    }
}

#[test]
fn the_deployed_scrape_configuration_is_valid() {
    let Some(promtool) = tools::tool("promtool") else { return };
    let file = keyway_tests::bins::workspace_root().join("deploy/prometheus/prometheus.yml");
    let output = Command::new(promtool).args(["check", "config"]).arg(file).output().expect("promtool runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
