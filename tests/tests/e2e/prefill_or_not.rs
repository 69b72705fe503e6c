//! Hazard: a prompt is computed apart where that takes longer, or at a worker whose answers then stand still;
//! and nobody can say why.

use keyway_tests::openai::{chat_stream, delta};
use keyway_tests::{Call, Client, FakeWorker, eventually, post};
use serde_json::Value;

use crate::prefill_decode::{Fleet, keep, long};

/// A stream that the worker for decode computes and answers.
async fn here(fleet: &Fleet, question: &str) -> (Client, Call) {
    let mut client = fleet.ask(&chat_stream(&long(question))).await;
    let mut call = fleet.decode[0].call().await;
    assert!(fleet.prefill[0].try_call().is_none(), "{question}");
    call.begin_stream().await;
    call.event(&delta("And").to_string()).await;
    assert_eq!(client.head().await.status(), 200);
    client.next_event().await;
    (client, call)
}

async fn ways(fleet: &Fleet, question: &str) -> Value {
    let response = post(fleet.gateway.admin, "/explain", &chat_stream(&long(question))).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    response.json()["ways"].clone()
}

#[tokio::test]
async fn a_worker_computes_what_it_answers_until_its_answers_would_stand_still() {
    let fleet = Fleet::splitting("auto", 1, 1).await;
    let name = |worker: &FakeWorker| worker.addr().to_string();
    let told = ways(&fleet, "First?").await;
    assert_eq!(
        (told["chosen"].as_str(), told["here"]["stall_ms"].as_f64()),
        (Some("here"), Some(0.0)),
        "{told}"
    );
    assert_eq!(told["split"]["prefill"].as_str(), Some(name(&fleet.prefill[0]).as_str()));
    assert_eq!(told["split"]["worker"].as_str(), Some(name(&fleet.decode[0]).as_str()));
    let mut under_way = Vec::new();
    let mut asked = 0;
    let told = loop {
        let question = format!("{asked}?");
        let told = ways(&fleet, &question).await;
        if told["chosen"] == "split" {
            break told;
        }
        under_way.push(here(&fleet, &question).await);
        asked += 1;
        assert!(asked < 20, "{told}");
    };
    assert!(asked >= 1, "an idle worker computes what it answers");
    let ms = |of: &str, what: &str| told[of][what].as_f64().unwrap();
    assert!(ms("here", "cost_ms") > ms("split", "cost_ms") && ms("here", "stall_ms") > 0.0, "{told}");
    assert!(ms("split", "transfer_ms") > 0.0 && ms("split", "stall_ms") == 0.0, "{told}");
    assert_eq!(told["evenness"].as_f64(), Some(1.0), "{told}");
    let mut client = fleet.ask(&chat_stream(&long(&format!("{asked}?")))).await;
    let call = fleet.prefill[0].call().await;
    assert_eq!(fleet.decode[0].request_count(), asked, "it has nothing to fetch yet");
    keep(call, "p", 0).await;
    let mut call = fleet.decode[0].call().await;
    call.begin_stream().await;
    call.done().await;
    assert_eq!(client.head().await.status(), 200);
    let metrics = fleet.gateway.metrics().await;
    let chosen = |way: &str| metrics.sum("keyway_prompt_ways_total", &[("way", way)]);
    assert_eq!((chosen("here"), chosen("split")), (asked as f64, 1.0));
    for (_, call) in under_way {
        call.done().await;
    }
}

/// What answers lose by standing still is no reason to wait for workers that cannot compute all prompts.
#[tokio::test]
async fn workers_for_prefill_that_are_asked_for_more_than_they_can_do_are_no_reason_to_wait() {
    let fleet = Fleet::splitting("auto", 1, 1).await;
    let (mut client, call) = here(&fleet, "First?").await;
    assert_eq!(ways(&fleet, "Then?").await["evenness"].as_f64(), Some(1.0));
    let mut asked = Vec::new();
    for i in 0..4 {
        asked.push(fleet.ask(&chat_stream(&format!("{i} {}", "word ".repeat(60_000)))).await);
    }
    let share = async || ways(&fleet, "Then?").await["prefill_asked_share"].as_f64().unwrap();
    eventually!(share().await > 1.0, "the prompts have begun");
    let told = ways(&fleet, "Then?").await;
    assert_eq!(told["evenness"].as_f64(), Some(0.0), "{told}");
    drop(asked);
    call.done().await;
    client.next_event().await;
}

/// The worker that answers has nothing of a prompt until its KV comes. What goes on from that prompt would be
/// computed there whole, in front of all that waits.
#[tokio::test]
async fn what_goes_on_from_a_prompt_on_its_way_is_computed_where_that_is() {
    let fleet = Fleet::splitting("auto", 1, 1).await;
    let mut under_way = Vec::new();
    let first = loop {
        let question = format!("{}?", under_way.len());
        if ways(&fleet, &question).await["chosen"] == "split" {
            break long(&question);
        }
        under_way.push(here(&fleet, &question).await);
        assert!(under_way.len() < 20);
    };
    let (mut clients, mut calls) = (Vec::new(), Vec::new());
    for prompt in [first.clone(), format!("{first} And then?")] {
        clients.push(fleet.ask(&chat_stream(&prompt)).await);
        calls.push(fleet.prefill[0].call().await);
    }
    assert_eq!(fleet.decode[0].request_count(), under_way.len(), "it has nothing to fetch yet");
    for call in calls {
        keep(call, "p", 0).await;
        let mut call = fleet.decode[0].call().await;
        call.begin_stream().await;
        call.done().await;
    }
    for mut client in clients {
        assert_eq!(client.head().await.status(), 200);
    }
    for (_, call) in under_way {
        call.done().await;
    }
}

#[tokio::test]
async fn never_is_never() {
    let fleet = Fleet::splitting("never", 1, 1).await;
    let mut under_way = Vec::new();
    for asked in 0..6 {
        let question = format!("{asked}?");
        assert_eq!(ways(&fleet, &question).await, Value::Null);
        under_way.push(here(&fleet, &question).await);
    }
    assert_eq!(fleet.legs("done").await, 0.0);
}

#[tokio::test]
async fn what_waits_at_a_worker_is_what_it_computes_itself() {
    let fleet = Fleet::splitting("always", 1, 1).await;
    let waiting = async |worker: &FakeWorker| {
        let name = worker.addr().to_string();
        fleet.gateway.metrics().await.sum("keyway_waiting_prefill_tokens", &[("worker", &name)])
    };
    let mut client = fleet.ask(&chat_stream(&long("Who?"))).await;
    let call = fleet.prefill[0].call().await;
    assert!(waiting(&fleet.prefill[0]).await > 256.0);
    assert_eq!(waiting(&fleet.decode[0]).await, 0.0);
    call.respond_json(500, &serde_json::json!({ "error": { "message": "no" } })).await;
    let mut call = fleet.decode[0].call().await;
    assert_eq!(waiting(&fleet.prefill[0]).await, 0.0);
    assert!(waiting(&fleet.decode[0]).await > 256.0, "it computes the prompt after all");
    call.begin_stream().await;
    call.event(&delta("Me.").to_string()).await;
    client.head().await;
    client.next_event().await;
    eventually!(waiting(&fleet.decode[0]).await == 0.0);
    call.done().await;
}

#[tokio::test]
async fn what_is_asked_of_a_worker_for_prefill_is_shown_once_its_speed_is_known() {
    let fleet = Fleet::splitting("always", 1, 1).await;
    let worker = fleet.prefill[0].addr().to_string();
    let asked =
        async || fleet.gateway.metrics().await.sum("keyway_prefill_asked_share", &[("worker", &worker)]);
    for question in 0..20 {
        if question == 10 {
            assert_eq!(asked().await, 0.0);
        }
        let mut client = fleet.ask(&chat_stream(&long(&format!("{question}?")))).await;
        keep(fleet.prefill[0].call().await, "p", 0).await;
        let mut call = fleet.decode[0].call().await;
        call.begin_stream().await;
        call.done().await;
        assert_eq!(client.head().await.status(), 200);
    }
    assert!(asked().await > 0.0);
}

#[tokio::test]
async fn what_handovers_take_is_learned_for_each_pair() {
    let fleet = Fleet::splitting("always", 1, 1).await;
    let (from, to) = (fleet.prefill[0].addr().to_string(), fleet.decode[0].addr().to_string());
    for asked in 0..6 {
        let metrics = fleet.gateway.metrics().await;
        let is_known = metrics.sum("keyway_kv_transfer_seconds_per_token", &[]) > 0.0;
        assert_eq!(is_known, asked >= 3, "after {asked}");
        let mut client = fleet.ask(&chat_stream(&long(&format!("{asked}?")))).await;
        keep(fleet.prefill[0].call().await, "p", 0).await;
        let mut call = fleet.decode[0].call().await;
        call.begin_stream().await;
        call.event(&delta("Me.").to_string()).await;
        client.head().await;
        client.next_event().await;
        call.done().await;
    }
    fleet.gateway.idle().await;
    let metrics = fleet.gateway.metrics().await;
    let pair = [("from", from.as_str()), ("to", to.as_str())];
    assert!(metrics.sum("keyway_kv_transfer_seconds_per_token", &pair) > 0.0);
    assert_eq!(metrics.sum("keyway_kv_handover_seconds_count", &[]), 6.0);
}
