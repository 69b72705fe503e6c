//! A worker whose experts are spread over real processes: the same answers, whichever of them dies or stalls,
//! and nothing left behind.
#![cfg(target_os = "linux")]

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::checkpoint::tokenizer;
use crate::client::{client, metric, metric_becomes, options, post, send, with};
use keyway_worker::model::ModelSource;
use keyway_worker::{ExpertParallelOptions, RunningWorker, StartError, WorkerOptions, start};

const COMPLETIONS: &str = "/v1/completions";

/// A worker of `size` processes. The deadline, in seconds, tells its ranks from those of other tests.
pub(crate) fn spread(size: usize, deadline: f64, retries: usize) -> WorkerOptions {
    let expert_parallel = ExpertParallelOptions {
        size,
        deadline: Duration::from_secs_f64(deadline),
        retries,
        redundant_experts: 0,
        hosts: Vec::new(),
        data_parallel_attention: false,
        rank_command: vec![env!("CARGO_BIN_EXE_keyway-worker").into(), "expert-rank".into()],
    };
    WorkerOptions { expert_parallel, threads: Some(2), ..options() }
}

/// A process that lives: its state is neither zombie nor gone.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The living ranks of the worker with this deadline: numbers and processes.
pub(crate) fn ranks(deadline: f64) -> Vec<(usize, u32)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let args: Vec<String> = line.split(|b| *b == 0).map(|a| String::from_utf8_lossy(a).into()).collect();
        let value = |name: &str| {
            let at = args.iter().position(|arg| arg == name)?;
            args.get(at + 1)?.parse::<f64>().ok()
        };
        if value("--deadline") == Some(deadline) && lives(pid) {
            found.push((value("--rank").unwrap() as usize, pid));
        }
    }
    found.sort_unstable();
    found
}

pub(crate) fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

pub(crate) async fn gone(pids: &[(usize, u32)]) {
    let all_gone = async {
        while pids.iter().any(|(_, pid)| lives(*pid)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all_gone).await.expect("a rank outlives its worker");
}

pub(crate) fn body(i: usize, max_tokens: usize) -> Value {
    let prompt: Vec<usize> = (0..40 + 7 * i).map(|t| (t * (i + 3)) % 256).collect();
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9, "seed": i, "ignore_eos": true})
}

/// A stream's text, and how it ended; `at` is called with the number of events so far.
async fn stream(addr: SocketAddr, body: Value, at: impl FnMut(usize)) -> (String, Option<Value>) {
    stream_at(addr, None, body, at).await
}

/// [`stream`], of a data-parallel rank.
pub(crate) async fn stream_at(
    addr: SocketAddr,
    rank: Option<usize>,
    body: Value,
    mut at: impl FnMut(usize),
) -> (String, Option<Value>) {
    let body = with(body, json!({"stream": true})).to_string();
    let mut request = http::Request::post(format!("http://{addr}{COMPLETIONS}"));
    if let Some(rank) = rank {
        request = request.header("x-data-parallel-rank", rank);
    }
    let request = request.header("content-type", "application/json").body(Full::from(body)).unwrap();
    let mut answer = client(false).request(request).await.unwrap().into_body();
    let (mut raw, mut events) = (String::new(), 0);
    while let Some(Ok(frame)) = answer.frame().await {
        let Ok(data) = frame.into_data() else { continue };
        raw.push_str(std::str::from_utf8(&data).unwrap());
        while events < raw.matches("\n\n").count() {
            events += 1;
            at(events);
        }
    }
    let (mut text, mut error) = (String::new(), None);
    for event in raw.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()) {
        if event != "[DONE]" {
            let event: Value = serde_json::from_str(event).unwrap();
            text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
            error = event.get("error").cloned().or(error);
        }
    }
    assert_eq!(raw.ends_with("data: [DONE]\n\n"), error.is_none(), "{raw}");
    (text, error)
}

pub(crate) async fn text(addr: SocketAddr, body: &Value) -> String {
    let answer = post(addr, COMPLETIONS, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

async fn idle_again(worker: &RunningWorker) {
    for gauge in ["requests_running", "requests_waiting", "kv_blocks_used"] {
        metric_becomes(worker.addr(), &format!("keyway_worker_{gauge}"), 0.0).await;
    }
    metric_becomes(worker.addr(), "keyway_worker_expert_ranks_up", 1.0).await;
}

#[tokio::test]
async fn processes_answer_as_one_does() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("mixtral");
    std::fs::create_dir(&dir).unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/mixtral");
    for file in std::fs::read_dir(data).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
    std::fs::write(dir.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    for (size, model) in [(2, ModelSource::Random), (4, ModelSource::Dir(dir)), (3, ModelSource::Builtin)] {
        let alone = start(WorkerOptions { model: model.clone(), ..options() }).await.unwrap();
        let worker = start(WorkerOptions { model, ..spread(size, 61.0, 0) }).await.unwrap();
        let before = ranks(61.0);
        assert_eq!(before.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), (1..size).collect::<Vec<_>>());
        for i in 0..3 {
            let body = body(i, 20);
            assert_eq!(text(worker.addr(), &body).await, text(alone.addr(), &body).await);
        }
        let version = async |addr| send(addr, "GET", "/version", "").await.json();
        assert_eq!(version(worker.addr()).await, version(alone.addr()).await, "one numerics id");
        let mut served = 0.0;
        for rank in 0..size {
            served +=
                metric(worker.addr(), &format!("keyway_worker_expert_rank_tokens_total{{rank=\"{rank}\"}}"))
                    .await;
        }
        let routed = send(worker.addr(), "GET", "/metrics", "").await.text;
        let routed = routed
            .lines()
            .filter_map(|l| l.strip_prefix("keyway_worker_expert_tokens_total{"))
            .map(|l| l.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        assert!(served > 0.0 && routed.sum::<f64>() == served);
        idle_again(&worker).await;
        worker.shutdown().await;
        gone(&before).await;
        alone.shutdown().await;
    }
}

/// Waits until there are at least so many.
pub(crate) async fn at_least(addr: SocketAddr, name: &str, count: f64) {
    let reached = async {
        while metric(addr, name).await < count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reached).await.expect(name);
}

/// Two generations side by side, again and again; at an event of the first, a rank is sent a signal. Returns
/// how often each rank was at fault.
async fn disturb(deadline: f64, how: &str, at: &[(usize, usize)]) -> [f64; 3] {
    let alone = start(options()).await.unwrap();
    let worker = start(spread(3, deadline, 2)).await.unwrap();
    let bodies = [body(0, 1000), body(1, 1000)];
    let expected = [text(alone.addr(), &bodies[0]).await, text(alone.addr(), &bodies[1]).await];
    for (i, (step, victim)) in at.iter().enumerate() {
        let (_, pid) = *ranks(deadline).iter().find(|(rank, _)| rank == victim).unwrap();
        let hit = |events| {
            if events == *step {
                signal(how, pid);
            }
        };
        let (one, other) = tokio::join!(
            stream(worker.addr(), bodies[0].clone(), hit),
            stream(worker.addr(), bodies[1].clone(), |_| {})
        );
        assert_eq!([one.0, other.0], expected, "{how} at {step}");
        assert_eq!((one.1, other.1), (None, None));
        at_least(worker.addr(), "keyway_worker_expert_group_restarts_total", i as f64 + 1.0).await;
        idle_again(&worker).await;
    }
    let mut faults = [0.0; 3];
    for (rank, faults) in faults.iter_mut().enumerate() {
        let name = format!("keyway_worker_expert_rank_failures_total{{rank=\"{rank}\"}}");
        *faults = metric(worker.addr(), &name).await;
    }
    let last = ranks(deadline);
    assert_eq!(last.len(), 2, "ranks of earlier groups are ended");
    worker.shutdown().await;
    gone(&last).await;
    alone.shutdown().await;
    faults
}

#[tokio::test]
async fn a_rank_killed_at_any_step_changes_no_answer_and_is_named() {
    let faults = disturb(66.0, "-KILL", &[(1, 1), (9, 2), (20, 1), (200, 2)]).await;
    assert_eq!(faults, [0.0, 2.0, 2.0]);
}

#[tokio::test]
async fn a_rank_that_stalls_changes_no_answer_and_is_named() {
    let faults = disturb(1.5, "-STOP", &[(1, 2), (15, 1)]).await;
    // On a busy machine another one may seem to stall as well.
    assert!(faults[1] >= 1.0 && faults[2] >= 1.0, "{faults:?}");
}

#[tokio::test]
async fn without_retries_requests_in_flight_fail_with_the_ranks_name_and_the_next_one_is_served() {
    let alone = start(options()).await.unwrap();
    let worker = start(spread(2, 2.5, 0)).await.unwrap();
    let expected = text(alone.addr(), &body(2, 1000)).await;
    for (how, cause) in [("-KILL", "it is gone"), ("-STOP", "no answer within 2.5s")] {
        let (_, pid) = ranks(2.5)[0];
        let hit = |events| {
            if events == 3 {
                signal(how, pid);
            }
        };
        let (said, error) = stream(worker.addr(), body(2, 1000), hit).await;
        let message = error.expect("the stream must fail")["message"].to_string();
        assert!(message.contains("rank 1 failed") && message.contains(cause), "{message}");
        assert!(expected.starts_with(&said) && said.len() < expected.len());
        assert_eq!(text(worker.addr(), &body(2, 1000)).await, expected);
        idle_again(&worker).await;
    }
    assert_eq!(metric(worker.addr(), "keyway_worker_requests_total{outcome=\"error\"}").await, 2.0);
    worker.shutdown().await;
    alone.shutdown().await;
}

#[tokio::test]
async fn a_rank_that_dies_while_nothing_runs_is_started_again() {
    let worker = start(spread(2, 62.0, 2)).await.unwrap();
    let before = ranks(62.0);
    signal("-KILL", before[0].1);
    metric_becomes(worker.addr(), "keyway_worker_expert_group_restarts_total", 1.0).await;
    idle_again(&worker).await;
    assert_eq!(send(worker.addr(), "GET", "/health", "").await.status, 200);
    assert!(ranks(62.0).len() == 1 && ranks(62.0) != before);
    worker.shutdown().await;
}

/// Free addresses of this machine; others may take one before it is used, which is unlikely.
pub(crate) fn addrs<const N: usize>() -> [SocketAddr; N] {
    let listeners = [(); N].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    std::array::from_fn(|i| listeners[i].local_addr().unwrap())
}

/// A rank that is told where the others are.
pub(crate) fn host_rank(rank: usize, hosts: &str, deadline: &str) -> tokio::process::Child {
    tokio::process::Command::new(env!("CARGO_BIN_EXE_keyway-worker"))
        .args(["expert-rank", "--rank", &rank.to_string(), "--hosts", hosts, "--model", "random"])
        .args(["--threads", "1", "--deadline", deadline])
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Ranks started by somebody else, over TCP: one is killed and started again in the middle of a generation.
#[tokio::test]
async fn a_group_over_tcp_answers_the_same_and_takes_a_rank_back() {
    let hosts = addrs::<3>();
    let list = hosts.map(|addr| addr.to_string()).join(",");
    let rank = |rank: usize| host_rank(rank, &list, "65");
    let (mut one, _two) = (rank(1), rank(2));
    let mut options = spread(3, 65.0, 2);
    options.expert_parallel.hosts = hosts.into();
    let worker = start(options).await.unwrap();
    let alone = start(self::options()).await.unwrap();
    let expected = text(alone.addr(), &body(0, 600)).await;
    assert_eq!(text(worker.addr(), &body(0, 600)).await, expected);
    let pid = one.id().unwrap();
    let hit = |events| {
        if events == 5 {
            signal("-KILL", pid);
        }
    };
    let again = async {
        one.wait().await.unwrap();
        rank(1)
    };
    let (answer, _one) = tokio::join!(stream(worker.addr(), body(0, 600), hit), again);
    assert_eq!(answer, (expected, None));
    metric_becomes(worker.addr(), "keyway_worker_expert_group_restarts_total", 1.0).await;
    idle_again(&worker).await;
    worker.shutdown().await;
    alone.shutdown().await;
}

/// The command, killed and ended: its ranks end with it.
#[tokio::test]
async fn ranks_end_with_their_worker_however_it_ends() {
    for (how, deadline, success) in [("-KILL", 63.0, false), ("-TERM", 64.0, true)] {
        let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_keyway-worker"))
            .args(["--listen", "127.0.0.1:0", "--model", "random", "--num-kv-blocks", "64"])
            .args(["--expert-parallel-size", "3", "--expert-parallel-deadline", &deadline.to_string()])
            .stderr(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        while !lines.next_line().await.unwrap().unwrap().contains("ready on http://") {}
        let pids = ranks(deadline);
        assert_eq!(pids.len(), 2);
        if success {
            // A service manager tells all of them at once.
            for (_, pid) in &pids {
                signal(how, *pid);
            }
        }
        signal(how, child.id().unwrap());
        assert_eq!(child.wait().await.unwrap().success(), success);
        gone(&pids).await;
    }
}

#[tokio::test]
async fn what_cannot_be_spread_is_refused() {
    let refused = async |options: WorkerOptions| match start(options).await {
        Err(error @ (StartError::Options(_) | StartError::Engine(_))) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(spread(9, 10.0, 0)).await,
        "keyway-random has 8 experts: expert-parallel-size 9 must be at most 8"
    );
    assert!(refused(spread(99, 10.0, 0)).await.contains("at most 32"));
    assert!(refused(spread(0, 10.0, 0)).await.contains("at least 1"));
    assert!(refused(spread(2, 0.01, 0)).await.contains("at least 100ms"));
    let mut nobody = spread(2, 10.0, 1);
    nobody.expert_parallel.rank_command = vec!["/nonexistent".into()];
    let message = refused(nobody).await;
    assert!(message.contains("group does not start: No such file"), "{message}");
    let mut ends = spread(2, 10.0, 1);
    ends.expert_parallel.rank_command = vec!["true".into()];
    let message = refused(ends).await;
    assert!(message.contains("rank 1 failed in exchange 1") && message.contains("it is gone"), "{message}");
}
