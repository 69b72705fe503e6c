//! Hazard: a prompt goes to a worker that does not hold its prefix, or all prompts to one. The same tests
//! under another policy show that it is the policy that does it.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, Response, post};
use serde_json::json;

/// A long beginning, so that many blocks match; `topic` makes it a prefix of its own.
fn prefix(topic: usize) -> String {
    format!("Conversation {topic}. ").repeat(100)
}

/// Sends turns of one growing conversation; returns the workers that served them.
async fn conversation(cluster: &Cluster, topic: usize, turns: usize) -> Vec<usize> {
    let mut prompt = prefix(topic);
    let mut served = Vec::new();
    for turn in 0..turns {
        let _ = write!(prompt, "Turn {turn}: and what came next? ");
        served.push(cluster.served_by(&cluster.chat(&prompt).await));
    }
    served
}

fn distinct(served: &[usize]) -> usize {
    served.iter().collect::<BTreeSet<_>>().len()
}

#[tokio::test]
async fn a_conversation_stays_with_the_worker_that_holds_its_prefix() {
    let cluster = Cluster::of_fakes(4, "prefix").await;
    for topic in 0..4 {
        let served = conversation(&cluster, topic, 6).await;
        assert_eq!(distinct(&served), 1, "topic {topic}: {served:?}");
    }
}

/// Moves a conversation by stopping its first worker, lets that worker return, and says whether the
/// conversation stayed where it had moved to.
async fn stays_after_moving(cluster: &Cluster) -> bool {
    let first = conversation(cluster, 0, 1).await[0];
    cluster.fakes[first].stop().await;
    assert_eq!(conversation(cluster, 0, 3).await, [1 - first; 3], "it moves to the other worker");
    cluster.fakes[first].restart().await;
    cluster.gateway.wait_ready(2).await;
    let served = conversation(cluster, 0, 3).await;
    assert_eq!(distinct(&served), 1, "{served:?}");
    served[0] != first
}

#[tokio::test]
async fn a_conversation_stays_where_its_cache_is_when_its_first_worker_returns() {
    assert!(stays_after_moving(&Cluster::of_fakes(2, "prefix").await).await);
}

#[tokio::test]
async fn without_room_for_an_index_it_returns_to_where_its_hash_points() {
    let cluster = Cluster::builder().fakes(2).args(&["--index-bytes", "1"]).start().await;
    assert!(!stays_after_moving(&cluster).await);
}

#[tokio::test]
async fn a_short_common_beginning_does_not_draw_everything_to_one_worker() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let mut served = Vec::new();
    for topic in 0..40 {
        let prompt = format!("You are a helpful assistant. Answer briefly and kindly. {}", prefix(topic));
        served.push(cluster.served_by(&cluster.chat(&prompt).await));
    }
    assert_eq!(distinct(&served), 2, "{served:?}");
}

#[tokio::test]
async fn round_robin_spreads_the_same_conversation() {
    let cluster = Cluster::of_fakes(4, "round-robin").await;
    let served = conversation(&cluster, 0, 8).await;
    for worker in 0..4 {
        assert_eq!(served.iter().filter(|&&w| w == worker).count(), 2, "{served:?}");
    }
}

#[tokio::test]
async fn new_prefixes_spread_over_the_fleet() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let mut served = Vec::new();
    for topic in 0..40 {
        served.push(cluster.served_by(&cluster.chat(&prefix(topic)).await));
    }
    // Hashed: 40 of 40 at one worker would be a chance of 2^-39.
    assert_eq!(distinct(&served), 2, "{served:?}");
}

#[tokio::test]
async fn the_answer_says_where_why_and_how_much_was_matched() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let first = cluster.chat(&prefix(1)).await;
    let second = cluster.chat(&(prefix(1) + "More?")).await;
    let matched = |r: &Response| r.header("x-keyway-matched-tokens").and_then(|v| v.parse::<u64>().ok());
    assert_eq!(matched(&first), Some(0));
    assert!(matched(&second).is_some_and(|tokens| tokens > 100), "{:?}", matched(&second));
    assert_eq!(second.header("x-keyway-reason"), Some("prefix"));
    assert_ne!(first.header("x-keyway-reason"), Some("prefix"));
}

#[tokio::test]
async fn least_loaded_avoids_the_worker_that_is_busy() {
    let cluster = Cluster::of_fakes(2, "least-loaded").await;
    cluster.fakes.iter().for_each(keyway_tests::FakeWorker::hang);
    let mut waiting = Client::connect(cluster.addr()).await;
    waiting.post(CHAT, &chat("long work")).await;
    keyway_tests::eventually!(cluster.fakes.iter().any(|f| f.active() == 1));
    let busy = cluster.fakes.iter().position(|f| f.active() == 1).expect("just seen");
    cluster.fakes.iter().for_each(keyway_tests::FakeWorker::answer);
    for i in 0..6 {
        assert_ne!(cluster.served_by(&cluster.chat(&format!("short {i}")).await), busy);
    }
    drop(waiting);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_queue_at_the_prefix_s_worker_sends_new_work_of_that_prefix_elsewhere() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let hot = prefix(7);
    let home = cluster.served_by(&cluster.chat(&hot).await);
    cluster.fakes[home].hang();
    let mut waiting = Vec::new();
    for i in 0..4 {
        // Each brings work of its own, far more than the prefix saves.
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat(&format!("{hot}{}", format!("question {i} ").repeat(2_000)))).await;
        waiting.push(client);
    }
    let elsewhere = &cluster.fakes[1 - home];
    keyway_tests::eventually!(elsewhere.request_count() > 0, "some of the burst goes to the other worker");
}

#[tokio::test]
async fn every_policy_of_the_command_line_serves() {
    for policy in ["prefix", "keyway", "least-loaded", "round-robin", "random", "power-of-two", "chwbl"] {
        let cluster = Cluster::of_fakes(2, policy).await;
        for i in 0..4 {
            cluster.chat(&format!("policy {policy} {i}")).await;
        }
        cluster.gateway.idle().await;
    }
}

/// Sends a prompt of ids; who served it, and how many of its tokens were counted on.
async fn by_ids(cluster: &Cluster, (path, field): (&str, &str), ids: &[u32]) -> (usize, u64) {
    let sampling = json!({ "max_tokens": 3, "max_new_tokens": 3 });
    let body = json!({ "model": "fake-model", field: ids, "sampling_params": sampling }).to_string();
    let response = post(cluster.addr(), path, body.as_bytes()).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let matched = response.header("x-keyway-matched-tokens").and_then(|tokens| tokens.parse().ok());
    (cluster.served_by(&response), matched.expect("exposed"))
}

#[tokio::test]
async fn prompts_of_ids_are_found_again_token_by_token_without_a_tokenizer() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let ways =
        [("/inference/v1/generate", "token_ids"), ("/generate", "input_ids"), ("/v1/completions", "prompt")];
    for (topic, way) in (1_u32..).zip(ways) {
        let ids: Vec<u32> = (0..100).map(|i| 100_000 * topic + i).collect();
        let (first, matched) = by_ids(&cluster, way, &ids).await;
        assert_eq!(matched, 0, "{way:?}");
        // Six blocks of sixteen; of its own 96 tokens alone the last block is computed anew.
        assert_eq!(by_ids(&cluster, way, &[&ids[..], &[7, 8, 9]].concat()).await, (first, 96), "{way:?}");
        assert_eq!(by_ids(&cluster, way, &ids[..96]).await, (first, 80), "{way:?}");
        let mut other = ids.clone();
        other[40] += 1;
        assert_eq!(by_ids(&cluster, way, &other).await, (first, 32), "{way:?}");
    }
    // A picture's place among the ids is filled by what the picture is: they do not say which.
    let ids: Vec<u32> = (0..100).collect();
    let body =
        json!({ "model": "fake-model", "token_ids": ids, "features": { "mm_hashes": { "image": ["a"] } } });
    for _ in 0..2 {
        let response = post(cluster.addr(), ways[0].0, body.to_string().as_bytes()).await;
        assert_ne!(response.header("x-keyway-matched-tokens"), Some("96"));
    }
}
