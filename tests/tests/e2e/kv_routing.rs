//! Hazard: what the gateway believes a worker to hold is not what it holds. Real workers publish KV events,
//! the gateway tokenises prompts as they do, and each answer says how many tokens were cached: the prediction
//! must agree, while prefixes are shared, prolonged and evicted.

use keyway_tests::cluster::config_file;
use keyway_tests::openai::CHAT;
use keyway_tests::{Cluster, Metrics, Response, eventually, post};
use serde_json::{Value, json};

const MODEL: &str = "keyway-random";
/// So few that prompts push each other out.
const TIGHT: [&str; 2] = ["--num-kv-blocks", "96"];

fn chat(messages: &Value, salt: &str) -> Vec<u8> {
    json!({ "model": MODEL, "messages": messages, "max_tokens": 20, "temperature": 0, "cache_salt": salt })
        .to_string()
        .into_bytes()
}

fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}

fn matched(response: &Response) -> u64 {
    response.header("x-keyway-matched-tokens").and_then(|tokens| tokens.parse().ok()).expect("on loopback")
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("reported")
}

/// Waits until the gateway has taken all that its workers have published, and nothing more comes: an answer
/// may be here before the last events of its steps are.
async fn settled(cluster: &Cluster) {
    for worker in &cluster.workers {
        let name = worker.addr().to_string();
        let live = [("worker", name.as_str()), ("source", "live")];
        let mut before = f64::NAN;
        eventually!({
            let published =
                Metrics::fetch(worker.addr()).await.sum("keyway_worker_kv_event_batches_total", &[]);
            let taken = cluster.gateway.metrics().await.sum("keyway_kv_event_batches_total", &live);
            std::mem::replace(&mut before, published) == published && taken >= published
        });
    }
}

/// Conversations that share a beginning, in turns, in random order; returns how many answers agreed within a
/// block with what the gateway had said, and how many there were.
async fn traffic(cluster: &Cluster, turns: usize) -> (usize, usize) {
    let system = json!({ "role": "system", "content": "You answer briefly, and you are kind. ".repeat(3) });
    let mut conversations = vec![vec![system]; 6];
    let mut random = fastrand::Rng::with_seed(11);
    let (mut right, mut cached_in_all) = (0, 0);
    for turn in 0..turns {
        let conversation = &mut conversations[random.usize(..6)];
        if conversation.len() > 6 {
            conversation.truncate(1);
        }
        conversation.push(user(&format!("Question {turn}: {}", "and then? ".repeat(random.usize(1..8)))));
        let response = post(cluster.addr(), CHAT, &chat(&json!(conversation), "")).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        let answer = response.json();
        right += usize::from(matched(&response).abs_diff(cached(&answer)) <= 16);
        cached_in_all += cached(&answer);
        conversation.push(answer["choices"][0]["message"].clone());
        settled(cluster).await;
    }
    assert!(cached_in_all > 0, "something was shared");
    (right, turns)
}

#[tokio::test]
async fn with_events_and_tokens_predictions_are_what_workers_report() {
    let cluster = Cluster::builder().workers(2).worker_args(&TIGHT).kv_events().start().await;
    let (right, turns) = traffic(&cluster, 120).await;
    assert!(100 * right >= 99 * turns, "{right} of {turns}");
    let metrics = cluster.gateway.metrics().await;
    let predictions = |result| metrics.sum("keyway_predictions_total", &[("result", result)]);
    assert_eq!(predictions("right"), right as f64);
    let blocks = metrics.sum("keyway_worker_cached_blocks", &[]);
    assert!((50.0..=192.0).contains(&blocks), "{blocks}");
    assert_eq!(metrics.sum("keyway_token_keyer_requests_total", &[("outcome", "tokens")]), turns as f64);
    assert_eq!(metrics.sum("keyway_kv_event_problems_total", &[("kind", "gap")]), 0.0);
    cluster.gateway.idle().await;
    assert_eq!(cluster.gateway.process.log().iter().filter(|line| line.contains("WARN")).count(), 0);
}

/// What one of several clients has seen: answers that agreed within a block, all of them, and their cached
/// tokens.
#[derive(Default)]
struct Seen {
    right: usize,
    all: usize,
    cached: u64,
}

/// One client that never waits for events: conversations that share a beginning, turn after turn, streamed
/// and not.
async fn client(addr: std::net::SocketAddr, seed: u64, turns: usize) -> Seen {
    let system = json!({ "role": "system", "content": "You answer briefly, and you are kind. ".repeat(3) });
    let (mut seen, mut random) = (Seen::default(), fastrand::Rng::with_seed(seed));
    let mut conversation = vec![system];
    for turn in 0..turns {
        if conversation.len() > 1 + random.usize(2..10) {
            conversation.truncate(1);
        }
        let question = format!("Client {seed} asks {turn}: {}", "and then? ".repeat(random.usize(1..8)));
        conversation.push(user(&question));
        let body = chat(&json!(conversation), "");
        let response = post(addr, CHAT, &body).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        let answer = response.json();
        seen.right += usize::from(matched(&response).abs_diff(cached(&answer)) <= 16);
        seen.cached += cached(&answer);
        conversation.push(answer["choices"][0]["message"].clone());
        seen.all += 1;
    }
    seen
}

#[tokio::test]
async fn with_short_queues_predictions_agree_without_waiting_for_events() {
    let blocks = ["--num-kv-blocks", "256"];
    let cluster = Cluster::builder().workers(2).worker_args(&blocks).kv_events().start().await;
    let clients = (1..=3).map(|seed| client(cluster.addr(), seed, 120));
    let seen = futures_util::future::join_all(clients).await;
    let (right, all) = seen.iter().fold((0, 0), |(right, all), seen| (right + seen.right, all + seen.all));
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    let misses = |cause: &str| metrics.sum("keyway_prediction_misses_total", &[("cause", cause)]) as usize;
    let causes = ["tokens", "under_way", "evicted", "announced_late", "unexplained", "model", "text"];
    let told: Vec<_> = causes.iter().map(|cause| (*cause, misses(cause))).collect();
    println!("{right} of {all} within a block; misses: {told:?}");
    // On a machine that does other work an event may be late, which is known to be the cause: 99 % besides.
    let late = misses("under_way") + misses("announced_late") + misses("evicted");
    assert!(100 * (right + late) >= 99 * all && 100 * right >= 80 * all, "{right} of {all}; {told:?}");
    assert!(seen.iter().all(|seen| seen.cached > 0), "something was shared");
    // Every miss has one cause, and none is a worker that cannot be predicted.
    assert_eq!(told.iter().map(|(_, count)| count).sum::<usize>(), all - right);
    assert_eq!([misses("tokens"), misses("model"), misses("text")], [0; 3], "{told:?}");
}

/// The same without events: a prefix that was evicted is still believed in. So the test above can fail.
#[tokio::test]
async fn without_events_predictions_go_wrong_where_caches_are_tight() {
    let builder = Cluster::builder().workers(2).worker_args(&TIGHT);
    let cluster = builder.args(&["--tokenizer", "keyway-random=random"]).start().await;
    let (right, turns) = traffic(&cluster, 120).await;
    assert!(100 * right < 99 * turns, "{right} of {turns}");
    let misses = cluster.gateway.metrics().await.sum("keyway_prediction_misses_total", &[("cause", "model")]);
    assert_eq!(misses, (turns - right) as f64);
}

#[tokio::test]
async fn tenants_never_match_each_other() {
    let cluster = Cluster::builder().workers(2).kv_events().start().await;
    let prompt = json!([user(&"The same words for everybody. ".repeat(10))]);
    let ask = async |salt: &str| {
        let response = post(cluster.addr(), CHAT, &chat(&prompt, salt)).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        let found = (matched(&response), cached(&response.json()));
        settled(&cluster).await;
        found
    };
    for salt in ["", "one", "two"] {
        assert_eq!(ask(salt).await, (0, 0), "{salt:?} is the first of its tenant");
    }
    for salt in ["", "one", "two"] {
        let (matched, cached) = ask(salt).await;
        assert!(matched > 200 && matched.abs_diff(cached) <= 16, "{salt:?}: {matched}, {cached}");
    }
}

/// Asks as the tenant with this key; what was matched, and what was cached.
async fn as_tenant(addr: std::net::SocketAddr, key: &str, body: &[u8]) -> (u64, u64) {
    let mut client = keyway_tests::Client::connect(addr).await;
    client.request("POST", CHAT, &[("authorization", &format!("Bearer {key}"))], body).await;
    let response = client.response().await;
    assert_eq!(response.status(), 200, "{}", response.text());
    (matched(&response), cached(&response.json()))
}

#[tokio::test]
async fn tenants_with_keys_share_nothing_by_events_nor_by_text() {
    // SHA-256 of "one" and of "two".
    let hashes = [
        "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
        "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
    ];
    let table =
        |(i, hash): (usize, &&str)| format!("[[tenant]]\nname = \"t{i}\"\nkey_sha256 = [\"{hash}\"]\n");
    let tenants = config_file(&hashes.iter().enumerate().map(table).collect::<String>());
    let config = config_file(&format!("[auth]\ntenants_file = {:?}\n", tenants.path()));
    let body = chat(&json!([user(&"The same words for everybody. ".repeat(10))]), "chosen by the client");
    for events in [true, false] {
        let builder = Cluster::builder().workers(2).args(&["--config", config.path().to_str().unwrap()]);
        let cluster = if events { builder.kv_events() } else { builder }.start().await;
        for key in ["one", "two"] {
            assert_eq!(
                as_tenant(cluster.addr(), key, &body).await,
                (0, 0),
                "{key} is the first, events {events}"
            );
            if events {
                settled(&cluster).await;
            }
        }
        for key in ["one", "two"] {
            let (matched, cached) = as_tenant(cluster.addr(), key, &body).await;
            assert!(
                matched > 100 && cached > 200,
                "{key} finds its own, events {events}: {matched}, {cached}"
            );
        }
    }
}

#[tokio::test]
async fn a_worker_whose_events_end_is_not_trusted_and_its_successor_is() {
    let mut cluster = Cluster::builder().workers(2).kv_events().start().await;
    let name = cluster.workers[0].addr().to_string();
    cluster.workers[0].process.kill();
    let trusted = async |worker: &str| {
        cluster.gateway.metrics().await.sum("keyway_kv_events_trusted", &[("worker", worker)])
    };
    eventually!(trusted(&name).await == 0.0);
    assert_eq!(trusted(&cluster.workers[1].addr().to_string()).await, 1.0);
    eventually!(cluster.gateway.process.log().iter().any(|line| line.contains("KV events are not trusted")));
    let prompt = json!([user("Are you there?")]);
    for _ in 0..4 {
        assert_eq!(post(cluster.addr(), CHAT, &chat(&prompt, "")).await.status(), 200);
    }
}

#[tokio::test]
async fn completions_are_tokenised_too() {
    let cluster = Cluster::builder().workers(2).kv_events().start().await;
    let ids: Vec<u32> = (0..200).map(|i| 10 + i % 90).collect();
    for prompt in [json!("Once upon a time. ".repeat(12)), json!(ids), json!(["One. ".repeat(30), "Two."])] {
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": 2 }).to_string();
        for round in 0..2 {
            let response = post(cluster.addr(), "/v1/completions", body.as_bytes()).await;
            assert_eq!(response.status(), 200, "{}", response.text());
            let (matched, cached) = (matched(&response), cached(&response.json()));
            assert_eq!(matched > 100, round == 1, "{prompt}");
            assert!(matched.abs_diff(cached) <= 16, "{prompt}: {matched} and {cached}");
            settled(&cluster).await;
        }
    }
}
