//! Hazard: a worker that was taken out gets requests, loses those it has, or leaves its numbers behind; a
//! broken list takes the fleet down; the admin listener lets anybody in.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use keyway_tests::openai::{CHAT, DONE, chat, chat_stream};
use keyway_tests::{Client, Exchange, FakeWorker, Gateway, Protocol, Response, eventually, post};

/// Writes a list of workers as a ConfigMap changes: a new file in the old one's place.
fn list(path: &Path, workers: &[&FakeWorker]) {
    let urls: Vec<String> = workers.iter().map(|worker| format!("\"http://{}\"", worker.addr())).collect();
    write(path, &format!("worker = [{}]\n", urls.join(", ")));
}

fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

async fn gateway(discovery: &str) -> Gateway {
    let config = format!("[discovery]\ninterval_seconds = 0.05\n{discovery}");
    Gateway::builder().config(&config).start().await
}

async fn command(admin: SocketAddr, method: &str, path: &str, body: &str) -> Response {
    let mut client = Client::connect(admin).await;
    client.request(method, path, &[("content-type", "application/json")], body.as_bytes()).await;
    client.response().await
}

async fn names_of(gateway: &Gateway, worker: &FakeWorker) -> usize {
    let name = format!("\"{}\"", worker.addr());
    gateway.metrics().await.text.matches(&name).count()
}

#[tokio::test]
async fn workers_of_a_file_join_and_drain_without_losing_a_request() {
    let (first, second) = (FakeWorker::start().await, FakeWorker::start().await);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    list(&path, &[]);
    let gateway = gateway(&format!("file = {path:?}\n")).await;
    assert_eq!(post(gateway.addr, CHAT, &chat("nobody there")).await.status(), 503);

    list(&path, &[&first]);
    gateway.wait_ready(1).await;
    first.manual();
    let mut open = Exchange::post(Protocol::Http1, gateway.addr, CHAT, &chat_stream("long")).await;
    let mut call = first.call().await;
    call.begin_stream().await;
    call.say("one").await;
    assert_eq!(open.status().await, 200);
    open.next_event().await.event();

    // Out of the list with a stream open: it drains, and whatever comes goes to the other.
    list(&path, &[&second]);
    eventually!(gateway.workers().await.to_string().contains("draining"));
    gateway.wait_ready(1).await;
    for i in 0..20 {
        assert_eq!(post(gateway.addr, CHAT, &chat(&format!("prompt {i}"))).await.status(), 200);
    }
    assert_eq!((first.request_count(), second.request_count()), (1, 20));

    call.say("two").await;
    call.done().await;
    assert_eq!(open.next_event().await.event(), open_two());
    assert_eq!(open.next_event().await.event(), DONE);
    eventually!(gateway.workers().await.as_array().map(Vec::len) == Some(1));
    eventually!(names_of(&gateway, &first).await == 0, "nothing of the worker that has left");
    assert!(names_of(&gateway, &second).await > 3);
    gateway.idle().await;

    // Its address comes back as a new worker.
    first.answer();
    list(&path, &[&first, &second]);
    gateway.wait_ready(2).await;
}

fn open_two() -> String {
    keyway_tests::openai::delta("two").to_string()
}

#[tokio::test]
async fn a_list_that_cannot_be_read_changes_nothing() {
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    list(&path, &[&worker]);
    let gateway = gateway(&format!("file = {path:?}\n")).await;
    gateway.wait_ready(1).await;
    let failed = async || {
        let metrics = gateway.metrics().await;
        metrics.sum("keyway_discovery_updates_total", &[("source", "file"), ("outcome", "failed")])
    };
    for broken in ["worker = [", "worker = [\"nonsense\"]", "listen = \"127.0.0.1:1\""] {
        let before = failed().await;
        write(&path, broken);
        eventually!(failed().await > before + 1.0);
        assert_eq!(post(gateway.addr, CHAT, &chat("still there")).await.status(), 200, "{broken}");
    }
    let before = failed().await;
    fs::remove_file(&path).unwrap();
    eventually!(failed().await > before + 1.0);
    assert_eq!(gateway.ready_workers().await, 1);
}

#[tokio::test]
async fn every_address_of_a_name_is_a_worker() {
    let worker = FakeWorker::start().await;
    let dns = format!("[[discovery.dns]]\nurl = \"http://localhost:{}\"\n", worker.addr().port());
    let gateway = gateway(&dns).await;
    gateway.wait_ready(1).await;
    assert_eq!(post(gateway.addr, CHAT, &chat("hi")).await.status(), 200);
    let metrics = gateway.metrics().await;
    assert!(metrics.sum("keyway_discovery_updates_total", &[("source", "dns"), ("outcome", "ok")]) >= 1.0);
}

#[tokio::test]
async fn operators_add_drain_and_remove_workers_of_allowed_hosts() {
    let (first, second) = (FakeWorker::start().await, FakeWorker::start().await);
    let gateway = gateway("admin_allow = [\"127.0.0.1\"]\n").await;
    let admin = gateway.admin;
    let add = |url: String| format!("{{\"url\": \"{url}\"}}");
    for worker in [&first, &second] {
        let body = add(format!("http://{}", worker.addr()));
        assert_eq!(command(admin, "POST", "/workers", &body).await.status(), 201);
        assert_eq!(command(admin, "POST", "/workers", &body).await.status(), 409);
    }
    gateway.wait_ready(2).await;
    let elsewhere = command(admin, "POST", "/workers", &add("http://10.0.0.1:1".to_owned())).await;
    assert_eq!(elsewhere.status(), 403);
    assert!(elsewhere.text().contains("admin_allow"), "{}", elsewhere.text());
    let events = format!("{{\"url\": \"http://{}\", \"kv_events\": \"tcp://10.0.0.1:2\"}}", first.addr());
    assert_eq!(command(admin, "POST", "/workers", &events).await.status(), 403);
    let key = "{\"url\": \"http://127.0.0.1:1\", \"api_key_file\": \"/etc/passwd\"}";
    assert_eq!(command(admin, "POST", "/workers", key).await.status(), 400);

    let drain = format!("/workers/{}/drain", first.addr());
    // What a web page of another origin can send.
    let plain = post(admin, &drain, b"").await;
    let mut client = Client::connect(admin).await;
    client.request("POST", &drain, &[("content-type", "text/plain")], b"").await;
    assert_eq!(client.response().await.status(), 415);
    assert!(plain.status() == 415 || plain.status() == 202, "{}", plain.status());
    if plain.status() == 415 {
        assert_eq!(command(admin, "POST", &drain, "").await.status(), 202);
    }
    gateway.wait_ready(1).await;
    for i in 0..10 {
        assert_eq!(post(gateway.addr, CHAT, &chat(&format!("p {i}"))).await.status(), 200);
    }
    assert_eq!((first.request_count(), second.request_count()), (0, 10));
    let undrain = format!("/workers/{}/undrain", first.addr());
    assert_eq!(command(admin, "POST", &undrain, "").await.status(), 202);
    assert_eq!(command(admin, "POST", &undrain, "").await.status(), 404);
    gateway.wait_ready(2).await;
    assert_eq!(command(admin, "DELETE", &format!("/workers/{}", second.addr()), "").await.status(), 202);
    eventually!(gateway.workers().await.as_array().map(Vec::len) == Some(1));
    assert_eq!(command(admin, "DELETE", "/workers/127.0.0.1:1", "").await.status(), 404);
}

#[tokio::test]
async fn what_an_operator_drained_stays_drained_whatever_the_list_says() {
    let (first, second) = (FakeWorker::start().await, FakeWorker::start().await);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    list(&path, &[&first, &second]);
    let gateway = gateway(&format!("file = {path:?}\n")).await;
    gateway.wait_ready(2).await;
    let drain = format!("/workers/{}/drain", first.addr());
    assert_eq!(command(gateway.admin, "POST", &drain, "").await.status(), 202);
    gateway.wait_ready(1).await;
    let looks = async || gateway.metrics().await.sum("keyway_discovery_updates_total", &[]);
    let before = looks().await;
    eventually!(looks().await > before + 3.0);
    assert_eq!(gateway.ready_workers().await, 1);
    list(&path, &[&second]);
    eventually!(gateway.workers().await.as_array().map(Vec::len) == Some(1));
    list(&path, &[&first, &second]);
    gateway.wait_ready(2).await;
}
