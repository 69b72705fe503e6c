//! Hazard: a changed configuration that needs a restart, cuts streams, or is taken over by halves.

use crate::cancel::Clogged;
use keyway_tests::cluster::config_file;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream, delta};
use keyway_tests::{Client, Exchange, FakeWorker, Gateway, Response, eventually, post};

async fn command(gateway: &Gateway, path: &str) -> Response {
    let mut client = Client::connect(gateway.admin).await;
    client.request("POST", path, &[("content-type", "application/json")], b"").await;
    client.response().await
}

fn toml(worker: &FakeWorker, more: &str) -> String {
    format!("worker = [\"http://{}\"]\n{more}", worker.addr())
}

/// A key and the file that lets it in.
const KEY: &str = "kw-reload";
const KEY_SHA256: &str = "40245376893372379e6cc53160bf3e295e9d7a14bdad8e8ca383188084bbe79b";

#[tokio::test]
async fn a_new_file_holds_for_new_requests_and_leaves_streams_alone() {
    let (old, new) = (FakeWorker::start().await, FakeWorker::start().await);
    let gateway = Gateway::builder().config(&toml(&old, "[limits]\nmax_in_flight = 2\n")).start().await;
    gateway.wait_ready(1).await;
    old.manual();
    let mut open = Vec::new();
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, gateway.addr, CHAT, &chat_stream("hi")).await;
        let mut call = old.call().await;
        call.begin_stream().await;
        call.say("one").await;
        assert_eq!(exchange.status().await, 200);
        exchange.next_event().await.event();
        open.push((exchange, call));
    }
    assert_eq!(post(gateway.addr, CHAT, &chat("too many")).await.status(), 503);

    gateway.rewrite(&toml(
        &new,
        "policy = \"round-robin\"\n[limits]\nmax_in_flight = 9\nmax_body_bytes = 300\n",
    ));
    gateway.process.signal("HUP");
    eventually!(gateway.workers().await.to_string().contains(&new.addr().to_string()));
    eventually!(
        post(gateway.addr, CHAT, &chat("hi")).await.header("x-keyway-worker")
            == Some(&new.addr().to_string())
    );
    assert_eq!(post(gateway.addr, CHAT, &chat(&"long ".repeat(100))).await.status(), 413);
    let said = post(gateway.admin, "/explain", &chat("hi")).await.json();
    assert_eq!(said["policy"], "round-robin", "{said}");

    for (mut exchange, mut call) in open {
        call.say("two").await;
        assert_eq!(exchange.next_event().await.event(), delta("two").to_string());
        call.done().await;
        assert_eq!(exchange.next_event().await.event(), DONE);
    }
    eventually!(!gateway.workers().await.to_string().contains(&old.addr().to_string()), "it has drained");
    gateway.idle().await;
}

#[tokio::test]
async fn a_bad_file_changes_nothing_and_one_line_says_why() {
    let (old, new) = (FakeWorker::start().await, FakeWorker::start().await);
    let gateway = Gateway::builder().config(&toml(&old, "")).start().await;
    gateway.wait_ready(1).await;
    // A good worker and limit, and behind them a file that does not exist: nothing of it may be taken over.
    gateway.rewrite(&toml(
        &new,
        "policy = \"random\"\n[limits]\nmax_body_bytes = 3\n[auth]\ntenants_file = \"/nowhere/tenants.toml\"\n",
    ));
    let refused = command(&gateway, "/reload").await;
    assert_eq!(refused.status(), 422);
    let why = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(why.contains("/nowhere/tenants.toml") && why.lines().count() == 1, "{why}");
    let answer = post(gateway.addr, CHAT, &chat("hi")).await;
    assert_eq!(
        (answer.status(), answer.header("x-keyway-worker")),
        (200, Some(old.addr().to_string().as_str()))
    );
    // And one that is read well, but a tokenizer that it names is not there.
    gateway.rewrite(&toml(
        &old,
        "policy = \"random\"\n[[model]]\nname = \"fake-model\"\ntokenizer = \"/nowhere\"\n",
    ));
    assert_eq!(command(&gateway, "/reload").await.status(), 422);
    assert_eq!(post(gateway.admin, "/explain", &chat("hi")).await.json()["policy"], "prefix");
    let ok = async || gateway.metrics().await.sum("keyway_config_last_reload_ok", &[]);
    assert_eq!(ok().await, 0.0);
    gateway.rewrite(&toml(&old, ""));
    gateway.process.signal("HUP");
    eventually!(ok().await == 1.0);
}

#[tokio::test]
async fn a_shorter_drain_holds_for_the_end_that_comes() {
    let worker = FakeWorker::start().await;
    worker.hang();
    let of = |seconds: u32| toml(&worker, &format!("[limits]\ndrain_seconds = {seconds}\n"));
    let mut gateway = Gateway::builder().config(&of(3_600)).start().await;
    gateway.wait_ready(1).await;
    let exchange = Exchange::post(PROTOCOLS[0], gateway.addr, CHAT, &chat_stream("hi")).await;
    eventually!(worker.active() == 1);
    gateway.rewrite(&of(0));
    assert_eq!(command(&gateway, "/reload").await.status(), 200);
    gateway.process.terminate();
    gateway.process.ended().await;
    drop(exchange);
}

#[tokio::test]
async fn what_only_a_restart_changes_is_named() {
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().config(&toml(&worker, "")).start().await;
    gateway.wait_ready(1).await;
    gateway.rewrite(&toml(&worker, "[routing]\nindex_bytes = 65536\n[limits]\nmax_in_flight = 7\n"));
    let done = command(&gateway, "/reload").await;
    assert_eq!(done.status(), 200);
    let said = done.json()["done"].as_str().unwrap().to_owned();
    assert_eq!(said, "changed: limits.max_in_flight; only a restart changes: routing.index_bytes");
    // It is what a later reload compares with.
    assert_eq!(
        command(&gateway, "/reload").await.json()["done"],
        "changed: nothing; only a restart changes: routing.index_bytes"
    );
}

#[tokio::test]
async fn keys_and_the_operators_token_can_be_asked_for_and_given_up() {
    let worker = FakeWorker::start().await;
    let token = keyway_tests::cluster::config_file("the-token\n");
    let tenants = keyway_tests::cluster::config_file(&format!(
        "[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{KEY_SHA256}\"]\n"
    ));
    let gateway = Gateway::builder().config(&toml(&worker, "")).start().await;
    gateway.wait_ready(1).await;
    assert_eq!(post(gateway.addr, CHAT, &chat("hi")).await.status(), 200);
    let auth =
        format!("[auth]\ntenants_file = {:?}\nadmin_token_file = {:?}\n", tenants.path(), token.path());
    gateway.rewrite(&toml(&worker, &auth));
    assert_eq!(command(&gateway, "/reload").await.status(), 200);
    assert_eq!(post(gateway.addr, CHAT, &chat("hi")).await.status(), 401);
    assert_eq!(command(&gateway, "/reload").await.status(), 401);
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", CHAT, &[("authorization", &format!("Bearer {KEY}"))], &chat("hi")).await;
    assert_eq!(client.response().await.status(), 200);
    gateway.rewrite(&toml(&worker, ""));
    gateway.process.signal("HUP");
    eventually!(post(gateway.addr, CHAT, &chat("hi")).await.status() == 200);
}

#[tokio::test]
async fn a_shorter_time_to_connect_holds_for_the_next_request() {
    let worker = Clogged::start();
    // Longer than a test's patience.
    let of =
        |ms: u32| format!("worker = [\"http://{}\"]\n[limits]\nconnect_timeout_ms = {ms}\n", worker.addr);
    let (long, short) = (of(3_600_000), of(200));
    let gateway = Gateway::builder().config(&long).start().await;
    gateway.wait_ready(1).await;
    let clogged = worker.clog().await;
    gateway.rewrite(&short);
    assert_eq!(command(&gateway, "/reload").await.status(), 200);
    let answer = post(gateway.addr, CHAT, &chat("hi")).await;
    assert!([502, 503].contains(&answer.status()), "{}", answer.status());
    drop(clogged);
}

#[tokio::test]
async fn after_a_reload_only_the_new_list_of_workers_is_looked_at() {
    let (old, new) = (FakeWorker::start().await, FakeWorker::start().await);
    let (first, second) = (config_file(&toml(&old, "")), config_file(&toml(&new, "")));
    let of = |list: &tempfile::NamedTempFile| {
        format!("[discovery]\nfile = {:?}\ninterval_seconds = 0.05\n", list.path())
    };
    let gateway = Gateway::builder().config(&of(&first)).start().await;
    gateway.wait_ready(1).await;
    gateway.rewrite(&of(&second));
    assert_eq!(command(&gateway, "/reload").await.status(), 200);
    // Whoever still looked at it would say so, and count it.
    std::fs::write(first.path(), "this is no list").unwrap();
    let looks = async |outcome: &str| {
        gateway
            .metrics()
            .await
            .sum("keyway_discovery_updates_total", &[("source", "file"), ("outcome", outcome)])
    };
    let before = looks("ok").await;
    eventually!(looks("ok").await >= before + 5.0);
    assert_eq!(looks("failed").await, 0.0);
    gateway.wait_ready(1).await;
    assert!(!gateway.workers().await.to_string().contains(&old.addr().to_string()));
}
