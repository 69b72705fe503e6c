//! Hazard: a fleet that went to nothing never comes back, because nobody counts who waits for it.

use std::fs;

use keyway_tests::openai::{CHAT, FAKE_MODEL, chat};
use keyway_tests::{FakeWorker, Gateway, eventually, post};

#[tokio::test]
async fn a_request_for_a_model_without_workers_asks_for_one_and_is_served_by_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    fs::write(&path, "").unwrap();
    let config = format!(
        "[discovery]\nfile = {path:?}\ninterval_seconds = 0.05\n[scale]\nmin = 0\nwait_seconds = 60.0\nwait_max = 2\n\
         [[scale.model]]\nname = \"{FAKE_MODEL}\"\n"
    );
    let gateway = Gateway::builder().config(&config).start().await;
    let model = [("model", FAKE_MODEL)];
    let desired = async || gateway.metrics().await.sum("keyway_desired_workers", &model);
    assert_eq!(desired().await, 0.0);
    let other = keyway_tests::openai::chat_for("other", "hi", false);
    assert_eq!(post(gateway.addr, CHAT, &other).await.status(), 503, "at once: nobody knows this model");

    let addr = gateway.addr;
    let waits: Vec<_> = (0..2)
        .map(|i| tokio::spawn(async move { post(addr, CHAT, &chat(&format!("prompt {i}"))).await }))
        .collect();
    let waiting = async || gateway.metrics().await.sum("keyway_scale_waiting_requests", &model);
    eventually!(waiting().await == 2.0);
    eventually!(desired().await == 1.0);
    // The room is full.
    assert_eq!(post(addr, CHAT, &chat("one too many")).await.status(), 503);

    let worker = FakeWorker::start().await;
    fs::write(&path, format!("worker = [\"http://{}\"]", worker.addr())).unwrap();
    for wait in waits {
        assert_eq!(wait.await.unwrap().status(), 200);
    }
    gateway.idle().await;
    assert_eq!(waiting().await, 0.0);
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_scale_waits_total", &[("outcome", "served")]), 2.0);
    assert_eq!(metrics.sum("keyway_scale_waits_total", &[("outcome", "refused")]), 1.0);
}

#[tokio::test]
async fn clients_that_leave_while_they_wait_are_not_counted_any_more() {
    let config = format!(
        "[discovery]\nadmin_allow = [\"127.0.0.1\"]\n[scale]\nmin = 0\nwait_seconds = 600.0\n\
                          [[scale.model]]\nname = \"{FAKE_MODEL}\"\n"
    );
    let gateway = Gateway::builder().config(&config).start().await;
    let mut client = keyway_tests::Client::connect(gateway.addr).await;
    client.post(CHAT, &chat("hi")).await;
    let waiting = async || gateway.metrics().await.sum("keyway_scale_waiting_requests", &[]);
    eventually!(waiting().await == 1.0);
    drop(client);
    eventually!(waiting().await == 0.0);
    gateway.idle().await;
    assert_eq!(gateway.metrics().await.sum("keyway_scale_waits_total", &[("outcome", "left")]), 1.0);
}
