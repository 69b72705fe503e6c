//! Hazard: an alias reaches a worker that does not know it, or more of the body changes than the name;
//! another model answers where it must not, or none where one could; a conversation changes its model between
//! turns.

use keyway_tests::openai::{CHAT, chat_for};
use keyway_tests::{Client, Cluster, FakeWorker, Gateway, Response, eventually, get, post};
use serde_json::Value;

use crate::tenants::table;

const NAMES: &str = "\
[[model]]
name = \"alpha\"
aliases = [\"gpt-4o\", \"default\"]
fallbacks = [\"gone\", \"beta\"]
";

/// A worker with `alpha` and one with `beta`, and what is said of their names.
async fn cluster(more: &str) -> Cluster {
    Cluster::builder().fake_with(&["alpha"]).fake_with(&["beta"]).config(more).start().await
}

fn last_body(worker: &FakeWorker) -> Vec<u8> {
    worker.requests().last().unwrap().body.clone()
}

async fn send(cluster: &Cluster, headers: &[(&str, &str)], path: &str, body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", path, headers, body).await;
    client.response().await
}

/// Waits for a line of the access log with these words.
async fn is_logged(gateway: &Gateway, words: &[&str]) {
    let there = || gateway.process.log().iter().any(|line| words.iter().all(|word| line.contains(word)));
    eventually!(there(), "{words:?} in {:?}", gateway.process.log());
}

#[tokio::test]
async fn an_alias_reaches_the_worker_as_its_model_and_nothing_else_changes() {
    let cluster = cluster(NAMES).await;
    let around = |model: &str| {
        format!(
            "{{ \"n\":1.0e0, \"model\" : \"{model}\",\"x\":{{\"model\":\"default\"}},\n\"messages\":[] }}"
        )
    };
    for alias in ["gpt-4o", "default", "gpt\\u002d4o"] {
        let response = post(cluster.addr(), CHAT, around(alias).as_bytes()).await;
        assert_eq!(cluster.served_by(&response), 0, "{alias}");
        assert_eq!(String::from_utf8(last_body(&cluster.fakes[0])).unwrap(), around("alpha"));
        assert_eq!(response.header("x-keyway-model"), Some("alpha"));
    }
    is_logged(&cluster.gateway, &["model=\"alpha\"", "asked_model=\"default\"", "model_by=\"alias\""]).await;
    let own = post(cluster.addr(), CHAT, around("alpha").as_bytes()).await;
    assert_eq!((own.header("x-keyway-model"), last_body(&cluster.fakes[0])), (None, around("alpha").into()));
    cluster.gateway.idle().await;
    let counted = cluster.gateway.metrics().await;
    let requests = |model: &str| counted.sum("keyway_requests_total", &[("model", model)]);
    assert_eq!((requests("alpha"), requests("default"), requests("other")), (4.0, 0.0, 0.0));
}

#[tokio::test]
async fn the_list_has_aliases_and_each_can_be_asked_for() {
    let cluster = cluster(&format!("{NAMES}[[model]]\nname = \"absent\"\naliases = [\"nobody\"]\n")).await;
    let list = get(cluster.addr(), "/v1/models").await.json();
    let mut ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().filter_map(|m| m["id"].as_str()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["alpha", "beta", "default", "gpt-4o"], "an alias of what nobody serves is none");
    assert!(list["data"].as_array().unwrap().iter().all(|model| model["owned_by"] == "tests"));
    let response = get(cluster.addr(), "/v1/models/gpt-4o").await;
    assert_eq!((response.status(), cluster.served_by(&response)), (200, 0));
    assert_eq!(cluster.fakes[0].requests().last().unwrap().target(), ("GET", "/v1/models/alpha"));
}

#[tokio::test]
async fn a_form_and_other_encodings_say_the_real_name_too() {
    let cluster = cluster(NAMES).await;
    let form = |model: &str| {
        format!(
            "--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\ndefault\r\n\
             --x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--x--\r\n"
        )
    };
    let multipart = [("content-type", "multipart/form-data; boundary=x")];
    let path = "/v1/audio/transcriptions";
    let response = send(&cluster, &multipart, path, form("default").as_bytes()).await;
    assert_eq!(cluster.served_by(&response), 0);
    assert_eq!(last_body(&cluster.fakes[0]), form("alpha").into_bytes());
    let pairs = [("content-type", "application/x-www-form-urlencoded")];
    send(&cluster, &pairs, path, b"a=%41&model=gpt%2D4o").await;
    assert_eq!(last_body(&cluster.fakes[0]), b"a=%41&model=alpha");
    let utf16: Vec<u8> = r#"{"model":"default","x":"é"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    send(&cluster, &[], CHAT, &utf16).await;
    assert_eq!(last_body(&cluster.fakes[0]), r#"{"model":"alpha","x":"é"}"#.as_bytes());
}

#[tokio::test]
async fn all_names_of_a_model_share_its_prefixes_and_large_bodies_are_no_others() {
    let cluster = cluster(NAMES).await;
    let prompt = "one prompt under several names. ".repeat(40);
    let matched = async |model: &str, prompt: &str| {
        let response = post(cluster.addr(), CHAT, &chat_for(model, prompt, false)).await;
        assert_eq!((response.status(), cluster.served_by(&response)), (200, 0));
        response.header("x-keyway-matched-tokens").unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(matched("default", &prompt).await, 0);
    assert!(matched("gpt-4o", &prompt).await > 100 && matched("alpha", &prompt).await > 100);
    let large = "large ".repeat(100_000);
    assert_eq!(matched("default", &large).await, 0);
    assert!(matched("alpha", &large).await > 1_000);
    let said = post(cluster.gateway.admin, "/explain", &chat_for("gpt-4o", &prompt, false)).await.json();
    assert_eq!((&said["model"], said["workers"].as_array().unwrap().len()), (&"alpha".into(), 1), "{said}");
}

#[tokio::test]
async fn an_unknown_name_is_refused_with_the_list_whatever_others_are_called() {
    let cluster = cluster(NAMES).await;
    for name in ["gpt-4", "Default", "gone"] {
        let response = post(cluster.addr(), CHAT, &chat_for(name, "hi", false)).await;
        assert_eq!(response.status(), 404, "{name}");
        let error = response.json()["error"].clone();
        assert_eq!(error["code"], "model_not_found");
        assert!(error["message"].as_str().unwrap().contains("alpha, beta"), "{error}");
    }
    assert_eq!(cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>(), 0);
}

/// Asks for a model and wants the other one to answer.
async fn falls_back(cluster: &Cluster, asked: &str, why: &str) {
    for stream in [false, true] {
        let response = post(cluster.addr(), CHAT, &chat_for(asked, why, stream)).await;
        assert_eq!(response.status(), 200, "{why}");
        assert_eq!(
            (cluster.served_by(&response), response.header("x-keyway-model")),
            (1, Some("beta")),
            "{why}"
        );
        let got: Value = serde_json::from_slice(&last_body(&cluster.fakes[1])).unwrap();
        let mut sent: Value = serde_json::from_slice(&chat_for("beta", why, stream)).unwrap();
        // What the gateway asks of streams besides.
        sent["stream_options"] = got["stream_options"].clone();
        assert_eq!(got["model"], "beta", "{why}");
        assert_eq!(got["messages"], sent["messages"], "{why}");
    }
}

#[tokio::test]
async fn another_model_answers_where_the_workers_of_one_are_busy_broken_or_gone() {
    let cluster = cluster(NAMES).await;
    assert_eq!(cluster.served_by(&post(cluster.addr(), CHAT, &chat_for("default", "hi", false)).await), 0);
    for status in [503, 429, 500] {
        cluster.fakes[0].refuse(status, None);
        falls_back(&cluster, "alpha", &format!("it answers {status}")).await;
    }
    cluster.fakes[0].answer();
    cluster.fakes[0].stop().await;
    for round in 0..3 {
        falls_back(&cluster, "default", &format!("its worker is gone, {round}")).await;
    }
    is_logged(&cluster.gateway, &["model=\"beta\"", "asked_model=\"alpha\"", "model_by=\"fallback\""]).await;
    is_logged(&cluster.gateway, &["model=\"beta\"", "asked_model=\"default\"", "model_by=\"fallback\""])
        .await;
    let counted = cluster.gateway.metrics().await;
    let labels = [("model", "alpha"), ("fallback", "beta")];
    assert_eq!(counted.sum("keyway_model_fallbacks_total", &labels), 12.0);
    assert_eq!(counted.sum("keyway_model_fallbacks_total", &[]), 12.0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn another_model_answers_who_would_wait_for_too_long() {
    let cluster = cluster(&format!("[routing]\nshed_after_ms = 50\n{NAMES}")).await;
    cluster.fakes[0].manual();
    let mut first = Client::connect(cluster.addr()).await;
    first.post(CHAT, &chat_for("alpha", &"a long prompt ".repeat(100_000), false)).await;
    let call = cluster.fakes[0].call().await;
    falls_back(&cluster, "alpha", "its worker has enough to do").await;
    call.respond_json(200, &keyway_tests::openai::answer("hello", 5, 0)).await;
    assert_eq!(cluster.served_by(&first.response().await), 0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_model_that_the_fleet_lacks_is_answered_by_the_one_that_stands_in() {
    let names = "[[model]]\nname = \"claude\"\naliases = [\"default\"]\nfallbacks = [\"alpha\"]\n";
    let cluster = cluster(names).await;
    for name in ["claude", "default"] {
        let response = post(cluster.addr(), CHAT, &chat_for(name, "hi", false)).await;
        assert_eq!((response.status(), cluster.served_by(&response)), (200, 0));
    }
    cluster.fakes[0].refuse(503, Some("7"));
    let response = post(cluster.addr(), CHAT, &chat_for("claude", "hi", false)).await;
    assert_eq!(response.json()["error"]["code"], "model_not_found", "the first one's fault is told");
}

#[tokio::test]
async fn what_is_the_client_s_fault_or_has_begun_is_not_asked_of_another_model() {
    let cluster = cluster(NAMES).await;
    for status in [400, 401, 404, 413, 422] {
        cluster.fakes[0].refuse(status, None);
        let response = post(cluster.addr(), CHAT, &chat_for("alpha", &format!("hi {status}"), false)).await;
        assert_eq!((response.status(), response.header("x-keyway-model")), (status, None));
    }
    cluster.fakes[0].manual();
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat_for("alpha", "a stream", true)).await;
    let mut call = cluster.fakes[0].call().await;
    call.begin_stream().await;
    call.say("one").await;
    assert_eq!(client.head().await.status(), 200);
    call.cut();
    let (body, _) = client.body().await;
    assert!(String::from_utf8(body).unwrap().contains("stream_lost"));
    assert_eq!(cluster.fakes[1].request_count(), 0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn with_nobody_to_stand_in_the_client_sees_what_the_first_model_s_worker_said() {
    let cluster = cluster(NAMES).await;
    cluster.fakes[0].refuse(503, Some("7"));
    cluster.fakes[1].stop().await;
    eventually!(cluster.gateway.ready_workers().await == 1);
    let response = post(cluster.addr(), CHAT, &chat_for("gpt-4o", "hi", false)).await;
    assert_eq!((response.status(), response.header("retry-after")), (503, Some("7")));
    assert_eq!(cluster.served_by(&response), 0);
}

#[tokio::test]
async fn a_split_keeps_sessions_together_and_has_its_share() {
    const SESSIONS: usize = 2_000;
    let names = "[[model]]\nname = \"alpha\"\naliases = [\"default\"]\nsplit = { beta = 0.1 }\n";
    let cluster = cluster(names).await;
    let mut client = Client::connect(cluster.addr()).await;
    let mut taken = 0;
    for session in 0..SESSIONS {
        let id = format!("session-{session}");
        let mut models = Vec::new();
        for (name, turn) in [("alpha", "Hello"), ("default", "And then?")] {
            let body = chat_for(name, turn, false);
            client.request("POST", CHAT, &[("x-session-id", &id)], &body).await;
            models.push(cluster.served_by(&client.response().await));
        }
        assert_eq!(models[0], models[1], "{id}");
        taken += models[0];
    }
    // Seven standard deviations: the hashes' key is drawn anew for each run.
    assert!((106..=294).contains(&taken), "{taken} of {SESSIONS} went to the model with a tenth");
    let counted = cluster.gateway.metrics().await;
    let labels = [("model", "alpha"), ("chosen", "beta")];
    assert_eq!(counted.sum("keyway_model_splits_total", &labels), 2.0 * taken as f64);
    is_logged(&cluster.gateway, &["model=\"beta\"", "asked_model=\"alpha\"", "model_by=\"split\""]).await;
    // The share of a model that is gone stays with the others.
    cluster.fakes[1].stop().await;
    for session in 0..100 {
        let headers = [("x-session-id", &*format!("later-{session}"))];
        let response = send(&cluster, &headers, CHAT, &chat_for("alpha", "hi", false)).await;
        assert_eq!((response.status(), cluster.served_by(&response)), (200, 0));
    }
}

#[tokio::test]
async fn a_reload_changes_names_and_a_bad_one_leaves_them() {
    let worker = FakeWorker::with_models(&["alpha"]).await;
    let toml = |more: &str| format!("worker = [\"http://{}\"]\n{more}", worker.addr());
    let gateway = Gateway::builder().config(&toml("")).start().await;
    gateway.wait_ready(1).await;
    let ask = async |name: &str| post(gateway.addr, CHAT, &chat_for(name, "hi", false)).await.status();
    let reload = async |more: &str| {
        gateway.rewrite(&toml(more));
        let mut client = Client::connect(gateway.admin).await;
        client.request("POST", "/reload", &[("content-type", "application/json")], b"").await;
        client.response().await
    };
    assert_eq!(ask("default").await, 404);
    let one = "[[model]]\nname = \"alpha\"\naliases = [\"default\"]\n";
    assert_eq!(reload(one).await.json()["done"], "changed: model");
    assert_eq!(ask("default").await, 200);
    let refused = reload("[[model]]\nname = \"alpha\"\naliases = [\"alpha\"]\n").await;
    assert_eq!(refused.status(), 422);
    assert!(refused.json()["error"].as_str().unwrap().contains("model \"alpha\": aliases"));
    assert_eq!(ask("default").await, 200);
    assert_eq!(reload("").await.json()["done"], "changed: model");
    assert_eq!(ask("default").await, 404);
}

#[tokio::test]
async fn a_tenant_s_limits_and_salt_hold_under_every_name() {
    let limited = "max_in_flight = 1\n";
    let tenants = keyway_tests::cluster::config_file(&table("alice", "ka", limited));
    let worker = FakeWorker::with_models(&["alpha"]).await;
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n\
         [[model]]\nname = \"alpha\"\naliases = [\"a\", \"b\"]\n",
        worker.addr(),
        tenants.path()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    worker.manual();
    let headers = [("authorization", "Bearer ka")];
    let mut first = Client::connect(gateway.addr).await;
    first.request("POST", CHAT, &headers, &chat_for("a", "hi", false)).await;
    let call = worker.call().await;
    let got: Value = serde_json::from_slice(&call.request.body).unwrap();
    assert_eq!((&got["model"], got["cache_salt"].is_string()), (&"alpha".into(), true), "{got}");
    let mut second = Client::connect(gateway.addr).await;
    second.request("POST", CHAT, &headers, &chat_for("b", "hi", false)).await;
    assert_eq!(second.response().await.status(), 429, "both names are one tenant's");
    call.respond_json(200, &keyway_tests::openai::answer("hello", 5, 0)).await;
    assert_eq!(first.response().await.status(), 200);
    is_logged(&gateway, &["tenant=\"alice\"", "model=\"alpha\"", "asked_model=\"a\""]).await;
}
