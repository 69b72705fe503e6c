//! A worker with an engine for each expert-parallel process: each request gets the answer of one process, at
//! whichever engine it is asked for; engines are told apart in metrics and KV events; whichever process dies
//! or stalls.
#![cfg(target_os = "linux")]

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use zeromq::{Socket as _, SocketRecv as _, SubSocket};

use crate::client::{client, metric, metric_becomes, options, post, send};
use crate::expert_parallel::{
    addrs, at_least, body, gone, host_rank, ranks, signal, spread, stream_at, text,
};
use keyway_wire::kv_event::EventBatch;
use keyway_worker::{KvEventOptions, RunningWorker, StartError, WorkerOptions, start};

const COMPLETIONS: &str = "/v1/completions";
const RANK: &str = "x-data-parallel-rank";

/// [`spread`], with attention on every process.
fn joined(size: usize, deadline: f64, retries: usize) -> WorkerOptions {
    let mut options = spread(size, deadline, retries);
    options.expert_parallel.data_parallel_attention = true;
    options
}

async fn at_rank(addr: SocketAddr, rank: &str, path: &str, body: &Value) -> (u16, Value) {
    let request = http::Request::post(format!("http://{addr}{path}"))
        .header("content-type", "application/json")
        .header(RANK, rank)
        .body(Full::from(body.to_string()))
        .unwrap();
    let (head, body) = client(false).request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (head.status.as_u16(), serde_json::from_slice(&body).unwrap())
}

/// A series of one engine.
async fn of_engine(addr: SocketAddr, name: &str, rank: usize) -> f64 {
    metric(addr, &format!("{name}{{engine=\"{rank}\"}}")).await
}

async fn idle_again(worker: &RunningWorker, size: usize) {
    for rank in 0..size {
        for gauge in ["requests_running", "requests_waiting", "kv_blocks_used"] {
            let name = format!("keyway_worker_{gauge}{{engine=\"{rank}\"}}");
            metric_becomes(worker.addr(), &name, 0.0).await;
        }
    }
    metric_becomes(worker.addr(), "keyway_worker_expert_ranks_up", 1.0).await;
}

#[tokio::test]
async fn every_engine_answers_as_one_process_does_and_is_seen_by_itself() {
    let alone = start(options()).await.unwrap();
    let worker = start(joined(3, 71.0, 0)).await.unwrap();
    let before = ranks(71.0);
    assert_eq!(before.len(), 2);
    for rank in 0..3 {
        for i in 0..2 {
            let body = body(i, 20);
            let (status, answer) = at_rank(worker.addr(), &rank.to_string(), COMPLETIONS, &body).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["choices"][0]["text"], text(alone.addr(), &body).await);
            // Neither engine has what the other one cached.
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0), 0);
        }
        let input = json!({"input": "some words"});
        let (status, answer) = at_rank(worker.addr(), &rank.to_string(), "/v1/embeddings", &input).await;
        assert_eq!(status, 200, "{answer}");
        let expected = post(alone.addr(), "/v1/embeddings", &input).await.json();
        assert_eq!(answer["data"], expected["data"], "rank {rank}");
    }
    for rank in 0..3 {
        assert_eq!(of_engine(worker.addr(), "keyway_worker_generation_tokens_total", rank).await, 40.0);
        let ended = format!("keyway_worker_requests_total{{outcome=\"length\",engine=\"{rank}\"}}");
        assert_eq!(metric(worker.addr(), &ended).await, 2.0);
        let served = format!("keyway_worker_expert_rank_tokens_total{{rank=\"{rank}\"}}");
        assert!(metric(worker.addr(), &served).await > 0.0);
    }
    let page = send(worker.addr(), "GET", "/metrics", "").await.text;
    let sum = |name: &str| -> f64 {
        let values = page.lines().filter(|line| line.starts_with(name));
        values.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    };
    let routed = sum("keyway_worker_expert_tokens_total{");
    assert!(routed > 0.0 && routed == sum("keyway_worker_expert_rank_tokens_total{"), "{page}");
    for wrong in ["3", "-1", "first"] {
        let (status, answer) = at_rank(worker.addr(), wrong, COMPLETIONS, &body(0, 1)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(RANK)));
    }
    assert_eq!(at_rank(alone.addr(), "1", COMPLETIONS, &body(0, 1)).await.0, 400);
    idle_again(&worker, 3).await;
    worker.shutdown().await;
    gone(&before).await;
    alone.shutdown().await;
}

/// Nobody asks for an engine: those who come together go to different ones.
#[tokio::test]
async fn the_engine_with_the_fewest_requests_takes_the_next() {
    let alone = start(options()).await.unwrap();
    let worker = start(joined(2, 72.0, 0)).await.unwrap();
    let bodies: Vec<Value> = (0..6).map(|i| body(i, 400)).collect();
    let addr = worker.addr();
    let ask = |body: &Value| {
        let body = body.clone();
        tokio::spawn(async move { text(addr, &body).await })
    };
    let answers: Vec<_> = bodies.iter().map(ask).collect();
    for (body, answer) in bodies.iter().zip(answers) {
        assert_eq!(answer.await.unwrap(), text(alone.addr(), body).await);
    }
    for rank in 0..2 {
        assert_eq!(of_engine(worker.addr(), "keyway_worker_generation_tokens_total", rank).await, 1200.0);
    }
    worker.shutdown().await;
    alone.shutdown().await;
}

#[tokio::test]
async fn each_engine_publishes_its_own_kv_events() {
    let kv_events = Some(KvEventOptions::new("tcp://127.0.0.1:0".parse().unwrap()));
    let worker = start(WorkerOptions { kv_events, ..joined(2, 73.0, 0) }).await.unwrap();
    let addrs: Vec<SocketAddr> = worker.kv_events_addrs().collect();
    assert_eq!(addrs.len(), 2);
    for (rank, addr) in addrs.into_iter().enumerate() {
        let mut live = SubSocket::new();
        live.connect(&format!("tcp://{addr}")).await.unwrap();
        live.subscribe("").await.unwrap();
        // Who subscribes hears what comes once it was heard.
        let batch = loop {
            let prompt: Vec<u32> = (0..64).map(|_| fastrand::u32(0..256)).collect();
            let asked = json!({"prompt": prompt, "max_tokens": 1});
            assert_eq!(at_rank(worker.addr(), &rank.to_string(), COMPLETIONS, &asked).await.0, 200);
            let heard = tokio::time::timeout(Duration::from_millis(200), live.recv()).await;
            if let Ok(message) = heard {
                let payload = message.unwrap().into_vec().pop().unwrap();
                break EventBatch::decode(&payload).unwrap().batch;
            }
        };
        assert_eq!(batch.data_parallel_rank, Some(rank as u32));
        assert!(worker.resident_blocks_of(rank).await.unwrap().len() >= 4);
        assert_eq!(worker.resident_blocks_of(1 - rank).await.unwrap().is_empty(), rank == 0);
    }
    worker.shutdown().await;
}

/// One generation at each engine, again and again; at an event of the first, a process is sent a signal.
async fn disturb(deadline: f64, how: &str, at: &[(usize, usize)]) {
    let alone = start(options()).await.unwrap();
    let worker = start(joined(3, deadline, 2)).await.unwrap();
    let bodies = [0, 1, 2].map(|i| body(i, 600));
    let mut expected = Vec::new();
    for body in &bodies {
        expected.push(text(alone.addr(), body).await);
    }
    for (i, (step, victim)) in at.iter().enumerate() {
        let (_, pid) = *ranks(deadline).iter().find(|(rank, _)| rank == victim).unwrap();
        let hit = |events| {
            if events == *step {
                signal(how, pid);
            }
        };
        let (zero, one, two) = tokio::join!(
            stream_at(worker.addr(), Some(0), bodies[0].clone(), hit),
            stream_at(worker.addr(), Some(1), bodies[1].clone(), |_| {}),
            stream_at(worker.addr(), Some(2), bodies[2].clone(), |_| {})
        );
        assert_eq!([&zero.0, &one.0, &two.0], [&expected[0], &expected[1], &expected[2]], "{how} at {step}");
        assert_eq!((zero.1, one.1, two.1), (None, None, None));
        at_least(worker.addr(), "keyway_worker_expert_group_restarts_total", i as f64 + 1.0).await;
        let failed = format!("keyway_worker_expert_rank_failures_total{{rank=\"{victim}\"}}");
        assert!(metric(worker.addr(), &failed).await >= 1.0);
        idle_again(&worker, 3).await;
    }
    let last = ranks(deadline);
    worker.shutdown().await;
    gone(&last).await;
    alone.shutdown().await;
}

#[tokio::test]
async fn a_process_killed_at_any_step_changes_no_answer_of_any_engine() {
    disturb(76.0, "-KILL", &[(1, 1), (9, 2), (150, 1)]).await;
}

#[tokio::test]
async fn a_process_that_stalls_changes_no_answer_of_any_engine() {
    disturb(1.75, "-STOP", &[(12, 2)]).await;
}

#[tokio::test]
async fn without_retries_requests_at_every_engine_fail_with_the_ranks_name_and_the_next_are_served() {
    let alone = start(options()).await.unwrap();
    let worker = start(joined(2, 74.0, 0)).await.unwrap();
    let (_, pid) = ranks(74.0)[0];
    // Once both are under way: on a busy machine one may be at its end before the other has begun.
    let seen = Cell::new([0, 0]);
    let hit = |rank: usize, events| {
        let mut now = seen.get();
        let were_both = now.iter().all(|events| *events > 0);
        now[rank] = events;
        seen.set(now);
        if !were_both && now.iter().all(|events| *events > 0) {
            signal("-KILL", pid);
        }
    };
    let long = body(1, 20_000);
    let (zero, one) = tokio::join!(
        stream_at(worker.addr(), Some(0), long.clone(), |events| hit(0, events)),
        stream_at(worker.addr(), Some(1), long, |events| hit(1, events))
    );
    for (rank, error) in [zero.1, one.1].into_iter().enumerate() {
        let message =
            error.unwrap_or_else(|| panic!("the stream at {rank} must fail"))["message"].to_string();
        assert!(message.contains("rank 1 failed") && message.contains("it is gone"), "{message}");
    }
    for rank in ["0", "1"] {
        let (status, answer) = at_rank(worker.addr(), rank, COMPLETIONS, &body(2, 30)).await;
        assert_eq!(
            (status, &answer["choices"][0]["text"]),
            (200, &json!(text(alone.addr(), &body(2, 30)).await))
        );
    }
    idle_again(&worker, 2).await;
    worker.shutdown().await;
    alone.shutdown().await;
}

/// Ranks started by somebody else, over TCP: one is killed and started again, the other keeps its weights and
/// not its KV.
#[tokio::test]
async fn a_group_over_tcp_answers_the_same_at_every_engine_and_takes_a_rank_back() {
    let hosts = addrs::<3>();
    let list = hosts.map(|addr| addr.to_string()).join(",");
    let (mut one, _two) = (host_rank(1, &list, "75"), host_rank(2, &list, "75"));
    let mut options = joined(3, 75.0, 2);
    options.expert_parallel.hosts = hosts.into();
    let worker = start(options).await.unwrap();
    let alone = start(self::options()).await.unwrap();
    let bodies = [body(0, 400), body(1, 400)];
    let expected = [text(alone.addr(), &bodies[0]).await, text(alone.addr(), &bodies[1]).await];
    let pid = one.id().unwrap();
    let hit = |events| {
        if events == 5 {
            signal("-KILL", pid);
        }
    };
    let again = async {
        one.wait().await.unwrap();
        host_rank(1, &list, "75")
    };
    let (first, second, _one) = tokio::join!(
        stream_at(worker.addr(), Some(1), bodies[0].clone(), hit),
        stream_at(worker.addr(), Some(2), bodies[1].clone(), |_| {}),
        again
    );
    assert_eq!([first, second], expected.clone().map(|text| (text, None)));
    for (body, expected) in bodies.iter().zip(&expected) {
        let (_, answer) = at_rank(worker.addr(), "2", COMPLETIONS, body).await;
        assert_eq!(&answer["choices"][0]["text"], expected);
    }
    idle_again(&worker, 3).await;
    worker.shutdown().await;
    alone.shutdown().await;
}

#[tokio::test]
async fn what_cannot_be_joined_is_refused() {
    let refused = async |options: WorkerOptions| match start(options).await {
        Err(error @ (StartError::Options(_) | StartError::KvEvents(_))) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(joined(1, 10.0, 0)).await.contains("needs expert-parallel-size"));
    let share = WorkerOptions { memory_utilization: Some(0.5), ..joined(2, 10.0, 0) };
    assert!(refused(share).await.contains("kv-cache-memory"));
    let kv_events = Some(KvEventOptions::new("tcp://127.0.0.1:65535".parse().unwrap()));
    let no_port = refused(WorkerOptions { kv_events, ..joined(2, 10.0, 0) }).await;
    assert!(no_port.contains("no port for rank 1") || no_port.contains("cannot publish"), "{no_port}");
}
