//! Hazard: nobody can say why a request went where it went. `/explain` must say what then happens, and change
//! nothing.

use keyway_tests::openai::{CHAT, FAKE_MODEL, chat};
use keyway_tests::{Client, Cluster, FakeWorker, eventually, get, post};
use serde_json::{Value, json};

async fn explained(cluster: &Cluster, body: &[u8]) -> Value {
    let response = post(cluster.gateway.admin, "/explain", body).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    response.json()
}

#[tokio::test]
async fn what_is_explained_is_what_happens() {
    let cluster = Cluster::of_fakes(3, "prefix").await;
    let prompt = "The same beginning. ".repeat(40);
    let home = cluster.served_by(&cluster.chat(&prompt).await);
    let next = format!("{prompt} And a question.");
    let (first, again) = (explained(&cluster, &chat(&next)).await, explained(&cluster, &chat(&next)).await);
    let held = |explanation: &Value| -> Vec<Value> {
        let rows = explanation["workers"].as_array().cloned().unwrap_or_default();
        rows.into_iter().map(|row| json!([row["worker"], row["matched_blocks"], row["chosen"]])).collect()
    };
    assert_eq!(held(&first), held(&again), "explaining records nothing");
    let name = cluster.fakes[home].addr().to_string();
    assert_eq!((first["chosen"].as_str(), first["reason"].as_str()), (Some(name.as_str()), Some("prefix")));
    let rows = first["workers"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let row = rows.iter().find(|row| row["worker"] == name.as_str()).unwrap();
    assert!(row["matched_tokens"].as_u64().unwrap() > 100 && row["chosen"] == true, "{row}");
    let cheapest = rows.iter().map(|row| row["cost_ms"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    assert_eq!(row["cost_ms"].as_f64(), Some(cheapest));
    let answer = cluster.chat(&next).await;
    assert_eq!(cluster.served_by(&answer), home);
    assert_eq!(answer.header("x-keyway-matched-tokens"), Some(row["matched_tokens"].to_string().as_str()));
    assert_eq!(cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>(), 2, "nothing was sent");
    assert!(!first.to_string().contains("beginning"), "no text of the prompt");
}

#[tokio::test]
async fn a_model_that_is_not_there_is_said_to_be() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let response = post(cluster.gateway.admin, "/explain", br#"{"model":"nobody's","messages":[]}"#).await;
    assert_eq!(response.status(), 404);
    let response = post(cluster.addr(), "/explain", br#"{"messages":[]}"#).await;
    assert_eq!(response.status(), 404, "not for clients");
    assert_eq!(post(cluster.addr(), CHAT, &chat("hi")).await.status(), 200);
}

#[tokio::test]
async fn a_session_that_leaves_its_past_is_told_where() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let body = |clock: &str, turns: usize| {
        let system = format!("{}It is {clock}. {}", "Be kind. ".repeat(20), "Be brief. ".repeat(40));
        let mut messages = vec![json!({ "role": "system", "content": system })];
        for turn in 0..=turns {
            let question = format!("Secret question {turn}: {}", "and why? ".repeat(20));
            messages.push(json!({ "role": "user", "content": question }));
            messages.push(json!({ "role": "assistant", "content": "Because. ".repeat(20) }));
        }
        json!({ "model": FAKE_MODEL, "messages": messages }).to_string().into_bytes()
    };
    for turns in 0..3 {
        assert_eq!(post(cluster.addr(), CHAT, &body("10:00", turns)).await.status(), 200);
    }
    let steady = explained(&cluster, &body("10:00", 3)).await;
    assert_eq!(steady["drift"], Value::Null, "it goes on from its past");
    let moved = explained(&cluster, &body("10:07", 3)).await;
    assert_eq!(moved["drift"]["field"], "messages[0].content", "{moved}");
    // "10:07" begins 186 bytes into the text.
    let (offset, within) =
        (moved["drift"]["offset"].as_u64().unwrap(), moved["drift"]["within_bytes"].as_u64().unwrap());
    assert!(offset <= 189 && 189 < offset + within, "{moved}");
    assert!(
        moved["drift"]["lost_bytes"].as_u64() > Some(600) && !moved.to_string().contains("Secret"),
        "{moved}"
    );
    let drifts = async || {
        let of = [("field", "system_message"), ("model", FAKE_MODEL)];
        cluster.gateway.metrics().await.sum("keyway_prompt_drifts_total", &of)
    };
    assert_eq!(drifts().await, 0.0, "explaining counts nothing");
    assert_eq!(post(cluster.addr(), CHAT, &body("10:07", 3)).await.status(), 200);
    assert_eq!(drifts().await, 1.0);
    eventually!(cluster.gateway.process.log().iter().any(|line| line.contains("messages[0].content+")));
}

#[tokio::test]
async fn choices_are_logged_by_their_hashes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("decisions.jsonl");
    let cluster = Cluster::builder().fakes(2).args(&["--decision-log", file.to_str().unwrap()]).start().await;
    let prompt = "Something confidential. ".repeat(40);
    let mut served = Vec::new();
    for question in ["", "One?", "Two?"] {
        // Longer than a block: what ends inside one has no name.
        let answer = cluster.chat(&format!("{prompt}{}", question.repeat(40))).await;
        served.push(answer.header("x-keyway-worker").unwrap().to_owned());
    }
    let read = || -> Vec<Value> {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    eventually!(read().len() == 3);
    let lines = read();
    for (line, served) in lines.iter().zip(&served) {
        assert_eq!(line["worker"].as_str(), Some(served.as_str()));
        assert_eq!(line["first_block"], lines[0]["first_block"], "an equal beginning has an equal name");
        assert_eq!(line["workers"].as_array().map(Vec::len), Some(2));
        assert!(!line.to_string().contains("confidential"));
    }
    assert!(lines[1]["matched_tokens"].as_u64() > Some(100), "{}", lines[1]);
    assert_ne!(lines[1]["last_block"], lines[2]["last_block"]);
}

#[tokio::test]
async fn what_is_too_large_to_explain_or_one_too_many_keeps_nobody_waiting() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let admin = cluster.gateway.admin;
    let large = |bytes: usize| chat(&"large ".repeat(bytes / 6));
    let refused = post(admin, "/explain", &large(9 << 20)).await;
    assert_eq!((refused.status(), &refused.json()["error"]["code"]), (413, &"request_too_large".into()));
    let body = large(7 << 20);
    let (most, last) = body.split_at(body.len() - 1);
    let mut asker = Client::connect(admin).await;
    let head = format!("POST /explain HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n\r\n", body.len());
    asker.send(&[head.as_bytes(), most].concat()).await;
    // It has the only place, until its last byte is here and it is answered.
    eventually!(post(admin, "/explain", &chat("another")).await.status() == 503);
    assert_eq!(get(admin, "/livez").await.status(), 200);
    asker.send(last).await;
    assert_eq!(get(admin, "/livez").await.status(), 200);
    assert_eq!(asker.response().await.status(), 200);
    let many = (0..8).map(|_| post(admin, "/explain", &body));
    let answers = futures_util::future::join_all(many).await;
    let statuses: Vec<u16> = answers.iter().map(keyway_tests::Response::status).collect();
    assert!(statuses.contains(&200), "{statuses:?}");
    assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
    assert_eq!(post(admin, "/explain", &chat("one more")).await.status(), 200);
}
