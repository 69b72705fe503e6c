//! Hazard: a worker that refuses at once looks idle and fast, and draws the requests that others could serve.
//! And the reverse: a worker that is full for a moment is left out for long, or one client's bad requests are
//! held against the workers.

use keyway_tests::openai::{CHAT, FAKE_MODEL, chat, chat_stream};
use keyway_tests::{Client, Cluster, FakeWorker, REFUSE_ME, Response, eventually, post};
use serde_json::json;

/// "Not now", what workers say that fail, and what they say of requests.
const BUSY: [u16; 3] = [429, 503, 529];
const FAILED: [u16; 3] = [500, 502, 504];
const REJECTED: [u16; 6] = [400, 401, 403, 404, 405, 422];

async fn ask(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", path, headers, body).await;
    client.response().await
}

/// Chats one after the other, every second one streamed; each must be served, and by none of `refusers`.
async fn all_are_served(cluster: &Cluster, times: usize, refusers: &[usize], what: &str) {
    for i in 0..times {
        let text = format!("{what}: question {i}");
        let body = if i % 2 == 0 { chat(&text) } else { chat_stream(&text) };
        let response = post(cluster.addr(), CHAT, &body).await;
        assert_eq!(response.status(), 200, "{text}: {}", response.text());
        assert!(!refusers.contains(&cluster.served_by(&response)), "{text}");
    }
}

/// Waits until a worker serves again, which it does.
async fn back(cluster: &Cluster, worker: usize) {
    cluster.fakes[worker].answer();
    let before = cluster.fakes[worker].request_count();
    eventually!(
        cluster.served_by(&cluster.chat("is it back?").await) == worker,
        "worker {worker} is back, which was asked {} times",
        cluster.fakes[worker].request_count() - before
    );
}

async fn states(cluster: &Cluster) -> Vec<String> {
    let workers = cluster.gateway.workers().await;
    let state = |fake: &FakeWorker| {
        let name = fake.addr().to_string();
        let row = workers.as_array().unwrap().iter().find(|row| row["worker"] == name.as_str()).unwrap();
        row["state"].as_str().unwrap().to_owned()
    };
    cluster.fakes.iter().map(state).collect()
}

#[tokio::test]
async fn whatever_one_of_three_says_to_everything_no_client_sees_it_and_it_is_asked_seldom() {
    for policy in ["prefix", "round-robin", "least-loaded"] {
        let cluster = Cluster::of_fakes(3, policy).await;
        for status in [&BUSY[..], &FAILED, &REJECTED].concat() {
            cluster.fakes[0].refuse(status, None);
            let before = cluster.fakes[0].request_count();
            all_are_served(&cluster, 45, &[0], &format!("{policy}, {status}")).await;
            // Single requests, after pauses that double: in a minute a dozen.
            let asked = cluster.fakes[0].request_count() - before;
            assert!(asked <= 15, "{policy}, {status}: asked {asked} times of 45");
            back(&cluster, 0).await;
        }
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn with_two_of_three_that_refuse_in_different_ways_the_third_serves_all() {
    let cluster = Cluster::of_fakes(3, "prefix").await;
    for (one, other) in [(503, 503), (401, 401), (404, 429), (500, 401), (500, 503), (400, 404), (502, 504)] {
        cluster.fakes[0].refuse(one, None);
        cluster.fakes[1].refuse(other, None);
        all_are_served(&cluster, 30, &[0, 1], &format!("{one} and {other}")).await;
        back(&cluster, 0).await;
        back(&cluster, 1).await;
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_session_does_not_stay_with_a_worker_that_refuses_it() {
    let cluster = Cluster::of_fakes(3, "prefix").await;
    for status in [503, 401] {
        // Its own words each time: what is cached of other conversations is no reason to go anywhere.
        let turn = |session: usize, turn: usize| {
            chat(&format!("{status}, session {session} {}", "and so on ".repeat(50 * (turn + 1))))
        };
        let mut homes = Vec::new();
        for session in 0..8 {
            let name = format!("{status}-{session}");
            let response = ask(&cluster, CHAT, &[("x-session-id", &name)], &turn(session, 0)).await;
            homes.push(cluster.served_by(&response));
        }
        let refuser = homes[0];
        cluster.fakes[refuser].refuse(status, None);
        let mut moved = 0;
        for turns in 1..6 {
            for (session, home) in homes.iter().enumerate() {
                let name = format!("{status}-{session}");
                let response = ask(&cluster, CHAT, &[("x-session-id", &name)], &turn(session, turns)).await;
                assert_eq!(response.status(), 200, "session {session}, turn {turns}, {status}");
                let served = cluster.served_by(&response);
                assert_ne!(served, refuser, "session {session} stays");
                moved += usize::from(*home != refuser && served != *home);
            }
        }
        // Where all tests want the cores at once, a worker may be late for its probe.
        assert!(moved <= 2, "{moved} turns left a worker that serves");
        back(&cluster, refuser).await;
    }
}

#[tokio::test]
async fn where_all_refuse_the_client_sees_a_worker_s_own_words() {
    let cluster = Cluster::of_fakes(3, "prefix").await;
    for status in [&BUSY[..], &FAILED, &REJECTED].concat() {
        cluster.fakes.iter().for_each(|fake| fake.refuse(status, Some("7")));
        for i in 0..10 {
            let response = post(cluster.addr(), CHAT, &chat(&format!("{status} {i}"))).await;
            assert_eq!(response.status(), status);
            assert_eq!(response.text(), format!("{{\"error\": {{\"message\": \"refused with {status}\"}}}}"));
            assert_eq!(response.header("retry-after"), Some("7"));
            assert!(response.header("x-keyway-worker").is_some());
        }
    }
    // All have asked for seven seconds; that holds back nobody where none is willing.
    cluster.fakes.iter().for_each(FakeWorker::answer);
    for i in 0..10 {
        cluster.chat(&format!("after {i}")).await;
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_worker_is_not_asked_before_the_time_that_it_names() {
    for after in ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"] {
        let cluster = Cluster::of_fakes(2, "round-robin").await;
        cluster.fakes[0].refuse(429, Some(after));
        all_are_served(&cluster, 30, &[0], after).await;
        assert_eq!(cluster.fakes[0].request_count(), 1, "{after}");
        assert_eq!(states(&cluster).await, ["ready", "ready"], "busy is not dead");
        // What it refuses is its chats: it has said nothing of others.
        let embed = json!({"model": FAKE_MODEL, "input": "text"}).to_string();
        for _ in 0..2 {
            ask(&cluster, "/v1/embeddings", &[], embed.as_bytes()).await;
        }
        assert_eq!(cluster.fakes[0].request_count(), 2, "{after}");
    }
}

#[tokio::test]
async fn one_client_s_bad_requests_are_passed_on_and_cost_others_nothing() {
    for status in [400, 401, 404, 422, 500] {
        let cluster = Cluster::of_fakes(3, "prefix").await;
        cluster.fakes.iter().for_each(|fake| fake.refuse_marked(status));
        for i in 0..3 {
            cluster.chat(&format!("before {i}")).await;
        }
        let before: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
        for i in 0..60 {
            let headers = [(REFUSE_ME, "yes"), ("authorization", "Bearer bad")];
            let body = chat(&format!("bad {i}"));
            let response = ask(&cluster, CHAT, &headers, &body).await;
            assert_eq!(response.status(), status);
            cluster.chat(&format!("good {i}")).await;
        }
        let asked: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
        // Looked into every ten seconds, and now and then.
        assert!(asked - before <= 120 + 30, "{status}: {} for 120 requests", asked - before);
        assert_eq!(states(&cluster).await, ["ready"; 3], "{status}");
        let metrics = cluster.gateway.metrics().await;
        assert_eq!(metrics.sum("keyway_worker_ejections_total", &[]), 0.0, "{status}");
        assert_eq!(metrics.sum("keyway_worker_misconfigured", &[]), 0.0, "{status}");
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_refuses_some_of_what_others_serve_is_asked_for_the_rest() {
    let cluster = Cluster::of_fakes(3, "round-robin").await;
    for status in [404, 500, 503] {
        cluster.fakes[0].refuse_marked(status);
        for i in 0..90 {
            let marked = i % 3 == 0;
            let headers: &[_] = if marked { &[(REFUSE_ME, "yes")] } else { &[] };
            let response = ask(&cluster, CHAT, headers, &chat(&format!("{status}, {i}"))).await;
            assert_eq!(response.status(), 200, "{status}, {i}");
        }
        eventually!(
            cluster.served_by(&cluster.chat("what it serves").await) == 0,
            "{status}: it serves the rest"
        );
        back(&cluster, 0).await;
        assert_eq!(states(&cluster).await, ["ready"; 3], "{status}");
    }
}

#[tokio::test]
async fn a_worker_that_refuses_what_others_serve_is_named_misconfigured_until_it_serves() {
    let cluster = Cluster::of_fakes(3, "prefix").await;
    for status in [401, 404] {
        cluster.fakes[1].refuse(status, None);
        eventually!(
            cluster.chat("question").await.status() == 200
                && states(&cluster).await == ["ready", "misconfigured", "ready"],
            "{status}: {:?}",
            states(&cluster).await
        );
        let metrics = cluster.gateway.metrics().await;
        let name = cluster.fakes[1].addr().to_string();
        let of_it = |name: &str| metrics.sum(name, &[("worker", &cluster.fakes[1].addr().to_string())]);
        assert_eq!(of_it("keyway_worker_misconfigured"), 1.0);
        assert!(of_it("keyway_worker_refusals_total") >= 3.0);
        let warned = |line: &&String| line.contains("refuses what others serve") && line.contains(&name);
        let warnings = || {
            let said = |line: &&String| warned(line) && line.contains(&format!("status={status}"));
            cluster.gateway.process.log().iter().filter(said).cloned().collect::<Vec<_>>()
        };
        // What a process logs is read a little later.
        eventually!(!warnings().is_empty(), "it is warned of");
        let warned = warnings();
        assert_eq!(warned.len(), 1, "{warned:?}");
        assert!(warned[0].contains(CHAT) && warned[0].contains("check"), "{warned:?}");
        back(&cluster, 1).await;
        assert_eq!(states(&cluster).await, ["ready"; 3]);
    }
    assert_eq!(cluster.gateway.metrics().await.sum("keyway_worker_misconfigured", &[]), 0.0);
}

#[tokio::test]
async fn what_may_have_left_something_behind_is_not_sent_twice() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    for status in [429, 503, 500, 401, 404] {
        cluster.fakes.iter().for_each(|fake| fake.refuse(status, None));
        for path in ["/v1/files", "/v1/batches", "/v1/fine_tuning/jobs"] {
            let before: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
            let response = ask(&cluster, path, &[], b"{}").await;
            assert_eq!(response.status(), status, "{path}");
            let after: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
            assert_eq!(after - before, 1, "{path}, {status}");
        }
    }
}

#[tokio::test]
async fn what_leaves_nothing_behind_is_sent_again_whatever_its_path() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    for (method, path, status) in [
        ("POST", "/v1/embeddings", 401),
        ("POST", "/v1/completions", 500),
        ("POST", "/v1/messages", 529),
        ("POST", "/v1/responses", 404),
        ("POST", "/rerank", 405),
        ("POST", "/tokenize", 404),
        ("GET", "/v1/files", 503),
        ("DELETE", "/v1/files/abc", 429),
    ] {
        cluster.fakes[0].refuse(status, None);
        for _ in 0..4 {
            let mut client = Client::connect(cluster.addr()).await;
            client.request(method, path, &[], b"{}").await;
            assert_eq!(client.response().await.status(), 200, "{method} {path}, {status}");
        }
    }
    // One of a worker's own is found where it is; others know nothing of it, and nothing follows from their
    // saying so.
    cluster.fakes[0].refuse(404, None);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(cluster.addr()).await;
        client.request("GET", "/v1/conversations/conv_1", &[], b"").await;
        statuses.push(client.response().await.status());
    }
    assert_eq!(statuses, [200; 4]);
    assert_eq!(states(&cluster).await, ["ready", "ready"]);
}
