//! Hazard: a conversation wanders over the fleet, because its prompts do not show that they are one: here
//! each message bears an id of its own, which routing by text takes for a part of the prompt and no engine
//! sees.

use std::collections::BTreeSet;

use keyway_tests::openai::{CHAT, FAKE_MODEL};
use keyway_tests::{Client, Cluster, Response, post};
use serde_json::json;

/// A turn's body, as a client sends it that numbers its messages anew each time.
fn turn(n: usize) -> Vec<u8> {
    let id = format!("message-{n}-{}", "0123456789".repeat(5));
    let content = "Tell me more of whales, and of what they eat. ".repeat(6);
    let message = json!({ "id": id, "role": "user", "content": content });
    json!({ "model": FAKE_MODEL, "messages": [message] }).to_string().into_bytes()
}

async fn ask(cluster: &Cluster, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", CHAT, headers, body).await;
    let response = client.response().await;
    assert_eq!(response.status(), 200, "{}", response.text());
    response
}

/// Workers that twelve turns of this session went to, all for this reason.
async fn places(cluster: &Cluster, session: Option<&str>, reason: &str) -> BTreeSet<usize> {
    let headers: Vec<_> = session.iter().map(|name| ("x-session-id", *name)).collect();
    let mut places = BTreeSet::new();
    for n in 0..12 {
        let response = ask(cluster, &headers, &turn(n + session.map_or(0, |name| name.len() * 100))).await;
        assert_eq!(response.header("x-keyway-reason"), Some(reason));
        places.insert(cluster.served_by(&response));
    }
    places
}

#[tokio::test]
async fn a_session_that_says_its_name_stays_where_it_is() {
    let cluster = Cluster::of_fakes(4, "prefix").await;
    assert_eq!(places(&cluster, Some("a"), "session").await.len(), 1);
    assert_eq!(places(&cluster, Some("bb"), "session").await.len(), 1);
    // Without a name nothing holds them together.
    assert!(places(&cluster, None, "new").await.len() > 1);
    let mut admin = Client::connect(cluster.gateway.admin).await;
    admin.request("POST", "/explain", &[("x-session-id", "a")], &turn(7000)).await;
    let explained = admin.response().await.json();
    assert_eq!(
        (explained["session"].as_str(), explained["reason"].as_str()),
        (Some("header"), Some("session"))
    );
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_picks_total", &[("reason", "session")]), 24.0);
}

#[tokio::test]
async fn switched_off_a_name_changes_nothing() {
    let config = "[routing]\nsession_hints = false\n";
    let cluster = Cluster::builder().fakes(4).config(config).start().await;
    assert!(places(&cluster, Some("a"), "new").await.len() > 1);
}

#[tokio::test]
async fn what_is_left_out_of_the_hash_makes_turns_one_prompt() {
    let config = "[[routing.ignore]]\nfield = \"messages.id\"\npattern = \"^message-.*\"\n";
    let cluster = Cluster::builder().fakes(4).config(config).start().await;
    let home = cluster.served_by(&post(cluster.addr(), CHAT, &turn(0)).await);
    for n in 1..6 {
        let response = post(cluster.addr(), CHAT, &turn(n)).await;
        assert_eq!(
            (cluster.served_by(&response), response.header("x-keyway-reason")),
            (home, Some("prefix"))
        );
    }
}
