//! Hazard: the first minute. `keyway` with no configuration starts its own workers, says so, and answers.

use keyway_tests::eventually::patient;
use keyway_tests::openai::{CHAT, DONE, chat_for};
use keyway_tests::{Exchange, Gateway, Protocol, eventually, get, post};
use serde_json::Value;

#[tokio::test]
async fn keyway_alone_answers_streams_and_finds_a_long_prompt_again() {
    let gateway = Gateway::builder().start().await;
    gateway.wait_ready(2).await;
    let models = get(gateway.addr, "/v1/models").await.json();
    let model = models["data"][0]["id"].as_str().expect("a model").to_owned();

    let answer = post(gateway.addr, CHAT, &body(&model, "What is a KV cache?", false)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(answer.json()["choices"][0]["message"]["content"].is_string());
    assert!(answer.json()["usage"]["completion_tokens"].as_u64() > Some(0));

    let stream = body(&model, "And a prefix?", true);
    let mut exchange = Exchange::post(Protocol::Http1, gateway.addr, CHAT, &stream).await;
    assert_eq!(exchange.status().await, 200);
    let mut events = vec![exchange.next_event().await.event()];
    while events.last().is_some_and(|e| e != DONE) {
        events.push(exchange.next_event().await.event());
    }
    assert!(events.len() > 2, "{events:?}");

    let long = body(&model, &"Every prompt of this user begins in the same way. ".repeat(12), false);
    let (first, second) = (post(gateway.addr, CHAT, &long).await, post(gateway.addr, CHAT, &long).await);
    assert_eq!(first.status(), 200, "{}", first.text());
    assert_eq!(first.header("x-keyway-worker"), second.header("x-keyway-worker"));
    assert_eq!(second.header("x-keyway-reason"), Some("prefix"));
    let cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached > Some(0), "{}", second.json()["usage"]);
    gateway.idle().await;
}

#[tokio::test]
async fn a_first_question_gets_a_true_answer() {
    let gateway = Gateway::builder().start().await;
    gateway.wait_ready(2).await;
    let question = br#"{"messages": [{"role": "user", "content": "How do I add a worker?"}]}"#;
    let answer = post(gateway.addr, CHAT, question).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer = answer.json();
    let said = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
    assert!(said.contains("--worker") && said.contains("keyway"), "{said}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    gateway.idle().await;
}

#[tokio::test]
async fn the_curl_line_it_prints_works_as_printed() {
    let Some(curl) = keyway_tests::tools::tool("curl") else { return };
    let gateway = Gateway::builder().start().await;
    gateway.wait_ready(2).await;
    gateway.process.announced("curl ").await;
    let printed = curl_command(&gateway).await;
    let shell = printed.replacen("curl", &curl.display().to_string(), 1);
    let output = tokio::process::Command::new("sh")
        .args(["-c", &shell])
        .env("no_proxy", "*")
        .kill_on_drop(true)
        .output();
    let output = patient("curl", output).await.expect("sh runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("\"content\":"), "{printed}: {said}");
    assert!(
        said.contains("data: [DONE]") || serde_json::from_str::<Value>(&said).is_ok(),
        "{printed}: {said}"
    );
}

/// The first printed command, with its continuation lines.
async fn curl_command(gateway: &Gateway) -> String {
    let command = || {
        let log = gateway.process.log();
        let start = log.iter().position(|l| l.trim_start().starts_with("curl "))?;
        let end = start + log[start..].iter().position(|l| !l.ends_with('\\'))?;
        Some(log[start..=end].join("\n"))
    };
    eventually!(command().is_some(), "a whole command is printed");
    command().expect("just seen")
}

fn body(model: &str, prompt: &str, stream: bool) -> Vec<u8> {
    let mut request: Value = serde_json::from_slice(&chat_for(model, prompt, stream)).unwrap();
    request["max_tokens"] = 12.into();
    request.to_string().into_bytes()
}
